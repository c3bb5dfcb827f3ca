// Rows of statistics of tensors in CPU memory, each element read once, and inner products. Built by kernel_build.py beside it.
//
// A tensor is cut into chunks by its own size alone, and the rows of its chunks are merged in order: whatever it is measured
// together with, and by however many threads, its row is the same to the last bit. (Not contracted to fused multiply-adds, which
// would round a scaled difference once where torch rounds it twice.)
//
// A tensor for which sums in float32 are too inexact is read a second time, with sums in float64. NaN and Inf are not looked for: they
// turn a sum NaN or infinite, and the caller is told how many rows have one.

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <system_error>
#include <thread>
#include <vector>
#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

// Subnormal numbers count as zero in threads that ask for it (torch.set_flush_denormal), and all threads have to agree.
#if defined(__SSE__)
#include <cpuid.h>
#include <xmmintrin.h>
#define TORCH_GRADMON_MODE _mm_getcsr()
#define TORCH_GRADMON_SET_MODE(mode) _mm_setcsr(mode)
#else
#define TORCH_GRADMON_MODE 0u
#define TORCH_GRADMON_SET_MODE(mode) (void)(mode)
#endif

namespace {

// Elements that are looked at together: one register of AVX-512, two of AVX2, four of NEON. Each lane sums the same elements
// everywhere, so all processors with fused multiply-adds find the same row to the last bit.
constexpr int LANES = 16;
// Elements of one register. GCC takes longer vectors apart, and compares them one element at a time.
#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
constexpr int PARTS = LANES / WIDTH;
typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Bits __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));
typedef double Doubles __attribute__((vector_size(4 * WIDTH)));  // half as many

// Vectors whose lanes are summed, in float32 if that will do, before they go on in float64: rounding loses at most
// (RUN - 1) / 2^24 = 8.9e-7 of the magnitudes. Sums in float64 alone gain as well by being cut in two.
constexpr int64_t RUN = 16;
// A chunk's quarters have sums of their own, which come out the same whether the quarters are read one after the other or by turns.
constexpr int QUARTERS = 4;

// How a processor reads memory fastest. ahead: it is asked for what comes so many bytes later, since its own prefetcher stops at the end of
// each page. Nothing is read there, so it may be past the end.
//
// On a Zen 5 float32 takes 0.99 sums of it from end to end with 6 kB (4 to 32 kB alike; 1.17 without), and 1.2 by turns. The others wait
// less if they ask in four places: GPT-2 took 0.98 sums on a Xeon with AVX-512 and 2 kB; a Zen 4 takes 0.92 of the time by turns, and 2 kB
// ahead cost it a tenth. (Both seen with an older kernel. What AMD made before a Zen 4 is read as that is; nothing was measured there.)
struct Reading {
    bool by_turns;
    int64_t ahead;
};

Reading reading() {
#if defined(TORCH_GRADMON_BY_TURNS)  // for tests
    return {TORCH_GRADMON_BY_TURNS, 0};
#elif defined(__SSE__)
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    __cpuid(0, eax, ebx, ecx, edx);
    const bool is_amd = ebx == signature_AMD_ebx && ecx == signature_AMD_ecx && edx == signature_AMD_edx;
    __cpuid(1, eax, ebx, ecx, edx);
    const unsigned family = (eax >> 8 & 0xf) + (eax >> 20 & 0xff);  // of Zen 5 and later 26 and above
    if (!is_amd) return {true, 1 << 11};
    if (family < 26) return {true, 1 << 8};
#endif
    return {false, 3 << 11};
}
const Reading READING = reading();

// Elements: 256 kB of float32. Chunks are what threads share out.
constexpr int64_t CHUNK = 1 << 16;
// Elements for which another thread pays: it starts within 20 us, and reads so many in 50 or more.
constexpr int64_t PER_THREAD = 1 << 19;

// The columns of a row, as torch_gradmon.core.moments.Column numbers them.
enum Column { COUNT, SUM, ABS_SUM, SQUARE_SUM, NEAR_ZERO, NONFINITE, MIN, MAX, COLUMNS };

// --- elements as they are stored, WIDTH at a time, in float32 -------------------------------------------------------------------

template <class Vector>
Vector load(const void* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

struct Float32 {
    typedef float Stored;
    static constexpr bool BY_TURNS = WIDTH == LANES;  // AVX2 has too few registers for the sums of four places
    static Floats vector(const Stored* from) { return load<Floats>(from); }
};

struct BFloat16 {
    typedef uint16_t Stored;
    static constexpr bool BY_TURNS = false;  // bound by the work on what is read
    static Floats vector(const Stored* from) { return (Floats)(__builtin_convertvector(load<Halves>(from), Bits) << 16); }
};

struct Float16 {
    typedef uint16_t Stored;
    static constexpr bool BY_TURNS = false;
    static Floats vector(const Stored* from) {
        const Bits half = __builtin_convertvector(load<Halves>(from), Bits);
        const Bits magnitude = (half & 0x7fff) << 13;
        // The exponents' offsets differ by 112. A subnormal has no leading one: it gets one, which is subtracted again.
        const Bits normal = magnitude + (112u << 23);
        const Bits subnormal = (Bits)((Floats)(normal + (1u << 23)) - (Floats)(Bits{} + (113u << 23)));
        const Bits is_small = (Bits)(magnitude < (1u << 23)), is_special = (Bits)(magnitude >= (31u << 23));
        const Bits finite = (is_small & subnormal) | (~is_small & normal);
        return (Floats)(finite | (is_special & 0x7f800000) | (half & 0x8000) << 16);
    }
};

// --- chunks -------------------------------------------------------------------------------------------------------------------

// What is done to elements first: they are multiplied by a scale, and those of another tensor are subtracted.
struct Change {
    float scale;
    bool minus;
};

template <class Kind, bool CHANGED>
Floats read(const typename Kind::Stored* values, const typename Kind::Stored* minus, int64_t index, Change change) {
    Floats x = Kind::vector(values + index);
    if (CHANGED) {
        x = x * change.scale;
        if (change.minus) x = x - Kind::vector(minus + index);
    }
    return x;
}

Floats magnitude(Floats x) { return (Floats)((Bits)x & 0x7fffffff); }

// What compilers write in too many instructions, if left to themselves: the halves of a register in float64, a square that is added
// before it is rounded (by every processor that a kernel is built for), and a count of magnitudes within a limit.
#if defined(__AVX512F__)
Doubles low(Floats x) { return (Doubles)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x)); }
Doubles high(Floats x) { return (Doubles)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)x, 1)); }
#elif defined(__AVX__)
Doubles low(Floats x) { return (Doubles)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)x)); }
Doubles high(Floats x) { return (Doubles)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)x, 1)); }
#else
Doubles low(Floats x) { return Doubles{x[0], x[1]}; }
Doubles high(Floats x) { return Doubles{x[2], x[3]}; }
#endif

Floats square_added(Floats x, Floats sum) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)x, (__m512)sum);
#elif defined(__AVX__) && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)x, (__m256)x, (__m256)sum);
#elif defined(__ARM_NEON)
    return (Floats)vfmaq_f32((float32x4_t)sum, (float32x4_t)x, (float32x4_t)x);
#else
    return sum + x * x;
#endif
}

Ints counted(Floats m, Floats limit, Ints count) {
#if defined(__AVX512F__)
    return m <= limit ? count + 1 : count;
#else
    return count - (m <= limit);  // true is -1
#endif
}

// The sums of WIDTH lanes, in float32 or in float64.
struct Narrow {
    Floats sum = {};
    void add(Floats x) { sum += x; }
    void add_square(Floats x) { sum = square_added(x, sum); }
};

struct Wide {
    Doubles of_low = {}, of_high = {};
    void add(Floats x) { of_low += low(x), of_high += high(x); }
    void add_square(Floats x) { add_product(x, x); }
    void add_product(Floats x, Floats y) { of_low += low(x) * low(y), of_high += high(x) * high(y); }
    void add(const Narrow& run) { add(run.sum); }
    void add(const Wide& run) { of_low += run.of_low, of_high += run.of_high; }
    double operator[](int lane) const { return lane < WIDTH / 2 ? of_low[lane] : of_high[lane - WIDTH / 2]; }
};

// Sums of WIDTH lanes each, of part of a chunk.
template <class Of>
struct Sums {
    Of sum[PARTS], abs_sum[PARTS], square_sum[PARTS];

    template <class Other>
    void add(const Sums<Other>& other) {
        for (int part = 0; part < PARTS; ++part) {
            sum[part].add(other.sum[part]);
            abs_sum[part].add(other.abs_sum[part]);
            square_sum[part].add(other.square_sum[part]);
        }
    }
};

// Reads elements, and keeps what does not depend on their order. Of: what the sums of a run are computed in.
template <class Kind, bool CHANGED, class Of>
struct Reader {
    typedef typename Kind::Stored Stored;
    const Stored *values, *minus;
    const Change change;
    const Floats within;
    Ints near[PARTS] = {};
    Floats smallest[PARTS], largest[PARTS];

    Reader(const Stored* values, const Stored* minus, Change change, float limit)
        : values(values), minus(minus), change(change), within(Floats{} + limit) {
        for (int part = 0; part < PARTS; ++part) {
            smallest[part] = Floats{} + std::numeric_limits<float>::infinity();
            largest[part] = -smallest[part];
        }
    }

    // The elements from begin to end and, by turns with them, those that lie apart, 2 * apart, ... behind: each place has sums of its own.
    template <int PLACES>
    void look(int64_t begin, int64_t end, int64_t apart, Sums<Wide>* sums) {
        const int64_t ahead = READING.ahead / static_cast<int64_t>(sizeof *values);
        for (int64_t start = begin; start < end; start += RUN * LANES) {
            Sums<Of> runs[PLACES];
            const int64_t stop = std::min(end, start + RUN * LANES);
            for (int64_t first = start; first < stop; first += LANES) {
                for (int place = 0; place < PLACES; ++place) {
                    const int64_t i = first + place * apart;
                    Sums<Of>& run = runs[place];
                    __builtin_prefetch(values + i + ahead);
                    if (CHANGED && change.minus) __builtin_prefetch(minus + i + ahead);
                    for (int part = 0; part < PARTS; ++part) {
                        const Floats x = read<Kind, CHANGED>(values, minus, i + part * WIDTH, change);
                        const Floats m = magnitude(x);
                        run.sum[part].add(x);
                        run.abs_sum[part].add(m);
                        run.square_sum[part].add_square(x);
                        near[part] = counted(m, within, near[part]);
                        smallest[part] = x < smallest[part] ? x : smallest[part];
                        largest[part] = x > largest[part] ? x : largest[part];
                    }
                }
            }
            for (int place = 0; place < PLACES; ++place) sums[place].add(runs[place]);
        }
    }
};

template <class Kind, bool CHANGED, class Of>
void look_at(const void* address, const void* other, int64_t length, Change change, float limit, double* row) {
    const auto* values = static_cast<const typename Kind::Stored*>(address);
    const auto* minus = static_cast<const typename Kind::Stored*>(other);
    Reader<Kind, CHANGED, Of> reader(values, minus, change, limit);
    const int64_t whole = length / LANES * LANES;
    int64_t start = 0;
    Sums<Wide> all;
    if (whole >= QUARTERS * RUN * LANES) {  // quarters shorter than a run cost more than they bring
        const int64_t apart = whole / (QUARTERS * LANES) * LANES;
        Sums<Wide> quarters[QUARTERS];
        if (Kind::BY_TURNS && READING.by_turns) {
            reader.template look<QUARTERS>(0, apart, apart, quarters);
        } else {
            for (int quarter = 0; quarter < QUARTERS; ++quarter) {
                reader.template look<1>(quarter * apart, (quarter + 1) * apart, 0, quarters + quarter);
            }
        }
        for (const Sums<Wide>& quarter : quarters) all.add(quarter);
        start = QUARTERS * apart;
    }
    reader.template look<1>(start, whole, 0, &all);
    std::fill(row, row + MIN, 0.0);
    row[COUNT] = static_cast<double>(length);
    row[MIN] = std::numeric_limits<double>::infinity();
    row[MAX] = -row[MIN];
    for (int lane = 0; lane < LANES; ++lane) {
        const int part = lane / WIDTH, place = lane % WIDTH;
        row[SUM] += all.sum[part][place];
        row[ABS_SUM] += all.abs_sum[part][place];
        row[SQUARE_SUM] += all.square_sum[part][place];
        row[NEAR_ZERO] += reader.near[part][place];
        // of +0 and -0 the first one read is kept: adding 0 makes both +0
        row[MIN] = std::min<double>(row[MIN], reader.smallest[part][place] + 0.0);
        row[MAX] = std::max<double>(row[MAX], reader.largest[part][place] + 0.0);
    }
    if (whole == length) return;
    // the rest, in float64: of a few elements the mean may be large beside the spread, for which float32 is too narrow
    typename Kind::Stored last[LANES] = {}, last_minus[LANES] = {};
    std::copy(values + whole, values + length, last);
    if (CHANGED && change.minus) std::copy(minus + whole, minus + length, last_minus);
    Floats rest[PARTS];
    for (int part = 0; part < PARTS; ++part) rest[part] = read<Kind, CHANGED>(last, last_minus, part * WIDTH, change);
    for (int lane = 0; lane < length - whole; ++lane) {
        const double x = rest[lane / WIDTH][lane % WIDTH], m = x < 0 ? -x : x;
        row[SUM] += x;
        row[ABS_SUM] += m;
        row[SQUARE_SUM] += x * x;
        row[NEAR_ZERO] += m <= limit;
        row[MIN] = std::min(row[MIN], x);
        row[MAX] = std::max(row[MAX], x);
    }
}

// The sum of the products of elements, in float64, which holds a product of two float32 numbers exactly.
template <class Kind>
double multiply(const void* address, const void* other, int64_t length) {
    typedef typename Kind::Stored Stored;
    const auto *first = static_cast<const Stored*>(address), *second = static_cast<const Stored*>(other);
    Wide sums[PARTS];
    const auto add = [&](const Stored* x, const Stored* y) {
        for (int part = 0; part < PARTS; ++part) sums[part].add_product(Kind::vector(x + part * WIDTH), Kind::vector(y + part * WIDTH));
    };
    const int64_t whole = length / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) add(first + i, second + i);
    Stored last[LANES] = {}, last_of_second[LANES] = {};
    std::copy(first + whole, first + length, last);
    std::copy(second + whole, second + length, last_of_second);
    add(last, last_of_second);
    double product = 0;
    for (int lane = 0; lane < LANES; ++lane) product += sums[lane / WIDTH][lane % WIDTH];
    return product;
}

// A tensor, or a pair of tensors, as the caller describes it; dtype is an index of LOOKS.
struct Entry {
    int64_t address, other, length, dtype;
};

typedef void (*Look)(const void*, const void*, int64_t, Change, float, double*);
#define TORCH_GRADMON_LOOKS(Kind) \
    {{look_at<Kind, false, Narrow>, look_at<Kind, false, Wide>}, {look_at<Kind, true, Narrow>, look_at<Kind, true, Wide>}}
constexpr Look LOOKS[][2][2] = {TORCH_GRADMON_LOOKS(Float32), TORCH_GRADMON_LOOKS(BFloat16), TORCH_GRADMON_LOOKS(Float16)};
typedef double (*Multiply)(const void*, const void*, int64_t);
constexpr Multiply MULTIPLIES[] = {multiply<Float32>, multiply<BFloat16>, multiply<Float16>};
constexpr int64_t SIZES[] = {4, 2, 2};

struct Chunk {
    const Entry* entry;
    int64_t start;
    int64_t length() const { return std::min(CHUNK, entry->length - start); }
    const void* first() const { return at(entry->address); }
    const void* second() const { return at(entry->other); }

private:
    const void* at(int64_t address) const { return reinterpret_cast<const void*>(address + start * SIZES[entry->dtype]); }
};

// The chunks of these entries, in order.
std::vector<Chunk> chunks_of(const Entry* entries, const std::vector<int64_t>& positions) {
    std::vector<Chunk> chunks;
    for (const int64_t position : positions) {
        int64_t start = 0;
        do {  // an empty tensor has one chunk too
            chunks.push_back({entries + position, start});
            start += CHUNK;
        } while (start < entries[position].length);
    }
    return chunks;
}

// Calls ``look`` once for each chunk, with its number.
template <class Look>
void share_out(const std::vector<Chunk>& chunks, int threads, Look look) {
    int64_t elements = 0;
    for (const Chunk& chunk : chunks) elements += chunk.length();
    const int64_t all = static_cast<int64_t>(chunks.size());
    std::atomic<int64_t> next{0};
    const auto work = [&] {
        for (int64_t i; (i = next++) < all;) look(i);
    };
    // Threads of their own live for this call only: no OpenMP, whose second runtime in a process may hang, and nothing that a fork loses.
    const unsigned mode = TORCH_GRADMON_MODE;
    std::vector<std::thread> others;
    try {
        for (int64_t useful = std::min<int64_t>(threads, elements / PER_THREAD); useful > 1; --useful) {
            others.emplace_back([&] {
                TORCH_GRADMON_SET_MODE(mode);
                work();
            });
        }
    } catch (const std::system_error&) {  // the process may have no more: fewer will do
    }
    work();
    for (std::thread& other : others) other.join();
}

// What is the same for all tensors of a call.
struct Call {
    const Entry* entries;
    const float* scale;
    float limit;
    int threads;
    double* rows;
};

void look_at_chunk(const Call& call, Chunk chunk, bool wide, double* row) {
    const Change change = {call.scale ? *call.scale : 1.0f, chunk.entry->other != 0};
    const bool changed = call.scale || change.minus;
    LOOKS[chunk.entry->dtype][changed][wide](chunk.first(), chunk.second(), chunk.length(), change, call.limit, row);
}

void merge(double* into, const double* row) {
    for (int column = 0; column < MIN; ++column) into[column] += row[column];
    into[MIN] = std::min(into[MIN], row[MIN]);
    into[MAX] = std::max(into[MAX], row[MAX]);
}

// Writes the rows of the tensors at these positions; wide: with sums in float64 throughout.
void measure(const Call& call, const std::vector<int64_t>& positions, bool wide) {
    const std::vector<Chunk> chunks = chunks_of(call.entries, positions);
    std::vector<double> parts(chunks.size() * COLUMNS);
    share_out(chunks, call.threads, [&](int64_t i) { look_at_chunk(call, chunks[i], wide, &parts[i * COLUMNS]); });
    for (size_t i = 0; i < chunks.size(); ++i) {
        const double* part = parts.data() + i * COLUMNS;
        double* row = call.rows + (chunks[i].entry - call.entries) * COLUMNS;
        if (chunks[i].start == 0) {
            std::copy(part, part + COLUMNS, row);
        } else {
            merge(row, part);
        }
    }
}

// The rows of ``count`` tensors merged into one. Sums are added in the order in which torch adds a column, to the same bit: four rows by
// turns, in runs of sixteen, and runs of runs.
void add_up(int64_t count, const double* rows, double* total) {
    constexpr int TURNS = 4, LEVELS = 4;
    const std::array<double, COLUMNS> empty = {0, 0, 0, 0, 0, 0, INFINITY, -INFINITY};
    std::copy(empty.begin(), empty.end(), total);
    for (int turn = 0; turn < TURNS; ++turn) {
        std::array<double, COLUMNS> sums[LEVELS] = {empty, empty, empty, empty};
        for (int64_t i = 1; i <= count / TURNS; ++i) {
            merge(sums[0].data(), rows + ((i - 1) * TURNS + turn) * COLUMNS);
            for (int64_t level = 1, run = 16; level < LEVELS && i % run == 0; ++level, run *= 16) {
                merge(sums[level].data(), sums[level - 1].data());
                sums[level - 1] = empty;
            }
        }
        for (int level = 1; level < LEVELS; ++level) merge(sums[0].data(), sums[level].data());
        for (int64_t i = count / TURNS * TURNS; turn == 0 && i < count; ++i) merge(sums[0].data(), rows + i * COLUMNS);
        merge(total, sums[0].data());
    }
}

bool is_finite(const double* row) {
    double witness = 0;
    for (int column = 0; column < COLUMNS; ++column) witness += row[column];
    return std::isfinite(witness);
}

// What row_needs_precise_pass in precise.py finds for a finite row: squares that leave the range of float32, or a mean that has more than
// half of the square, whose std would have more than twice the error of the sums.
bool is_imprecise(const double* row) {
    const double mean_square = row[SQUARE_SUM] / row[COUNT], mean = row[SUM] / row[COUNT];
    const bool is_in_range = mean_square >= 1e-30 && mean_square <= 1e30;
    return (!is_in_range && row[ABS_SUM] != 0) || mean * mean > mean_square / 2;
}

std::vector<int64_t> all_of(int64_t count) {
    std::vector<int64_t> positions(count);
    std::iota(positions.begin(), positions.end(), 0);
    return positions;
}

}  // namespace

// Writes a row of eight numbers for each of ``count`` tensors.
//
// scale: what every element is multiplied by, or null. limit: magnitudes up to here count as near zero.
// total: where these merged into one are written, or null. Returns how many rows are not finite, which have to be measured otherwise.
extern "C" int64_t torch_gradmon_rows(
    int64_t count, const int64_t* table, const float* scale, float limit, int threads, double* rows, double* total) {
    const Call call = {reinterpret_cast<const Entry*>(table), scale, limit, threads, rows};
    std::vector<int64_t> positions = all_of(count);
    measure(call, positions, false);
    int64_t nonfinite = 0;
    positions.clear();
    for (int64_t entry = 0; entry < count; ++entry) {
        const double* row = rows + entry * COLUMNS;
        if (row[COUNT] == 0) continue;  // its extremes are infinite
        if (!is_finite(row)) {
            ++nonfinite;
        } else if (is_imprecise(row)) {
            positions.push_back(entry);
        }
    }
    if (!positions.empty()) measure(call, positions, true);
    if (total && nonfinite == 0) add_up(count, rows, total);
    return nonfinite;
}

// Writes the inner products of ``count`` pairs of tensors.
extern "C" void torch_gradmon_products(int64_t count, const int64_t* table, int threads, double* products) {
    const Entry* entries = reinterpret_cast<const Entry*>(table);
    const std::vector<Chunk> chunks = chunks_of(entries, all_of(count));
    std::vector<double> parts(chunks.size());
    share_out(chunks, threads, [&](int64_t i) {
        parts[i] = MULTIPLIES[chunks[i].entry->dtype](chunks[i].first(), chunks[i].second(), chunks[i].length());
    });
    std::fill(products, products + count, 0.0);
    for (size_t i = 0; i < chunks.size(); ++i) products[chunks[i].entry - entries] += parts[i];
}
