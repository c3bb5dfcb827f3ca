"""``python -m tests.fuzz --count 1000 --seed 0``: run many programs, and print what is wrong."""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import time
import traceback

import torch

from . import drawing, plan, rules, runner


def _judge(work: tuple[int, bool]) -> tuple[int, list[str]]:
    seed, leaks = work
    torch.set_num_threads(1)
    try:
        return seed, runner.problems(drawing.draw(seed), leaks)
    except Exception:
        return seed, [f"the generator itself failed: {traceback.format_exc(limit=-3)}"]


def main() -> int:
    """The command; the number of failures is capped as an exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--leaks", type=int, default=10, help="look for leaks in every so-manyth program")
    parser.add_argument("--show", type=int, help="print the program of this seed and what is wrong with it")
    parser.add_argument("--most", type=int, default=8, help="problems of a program that are printed")
    parser.add_argument("--smaller", action="store_true", help="with --show: make it as small as it still fails")
    parser.add_argument("--only", choices=sorted(rules.FEATURES), help="programs with this feature")
    parser.add_argument("--spread", type=int, metavar="COUNT", help="print seeds of so many programs that have every choice")
    options = parser.parse_args()
    if options.spread:
        print(drawing.spread(options.spread, among=20 * options.spread))
        return 0
    torch.set_num_threads(1)
    if options.show is not None:
        return _show(options.show, options.smaller)
    start, failed = time.perf_counter(), 0
    seeds = range(options.seed, options.seed + options.count)
    if options.only:
        have = (seed for seed in itertools.count(options.seed) if rules.FEATURES[options.only](drawing.draw(seed)))
        seeds = list(itertools.islice(have, options.count))
    work = [(seed, seed % options.leaks == 0) for seed in seeds]
    with _Here() if options.jobs == 1 else multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        for seed, found in pool.imap(_judge, work):
            if found:
                failed += 1
                more = [f"... and {len(found) - options.most} more kinds"] * (len(found) > options.most)
                print(f"seed {seed}: {drawing.draw(seed)}", *found[: options.most], *more, sep="\n    ", flush=True)
    print(f"{options.count} programs from seed {options.seed}: {failed} failed, {time.perf_counter() - start:.0f} s")
    return min(failed, 100)


class _Here:
    imap = staticmethod(map)

    def __enter__(self) -> _Here:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _show(seed: int, make_smaller: bool) -> int:
    p = drawing.draw(seed)
    found = runner.problems(p, leaks=True)
    if found and make_smaller:
        kind = runner.kind_of(found[0])
        leaks = found[0].endswith("alive")
        p = runner.smaller(p, lambda other: any(runner.kind_of(each) == kind for each in _tried(other, leaks)))
        found = _tried(p, leaks)
    print(plan.describe(p), *found, sep="\n")
    return min(len(found), 100)


def _tried(p: drawing.Program, leaks: bool) -> list[str]:
    try:
        return runner.problems(p, leaks)
    except Exception:
        return []


if __name__ == "__main__":
    raise SystemExit(main())
