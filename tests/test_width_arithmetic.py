"""The arithmetic of the width sweep: terms of layers, exponents and their intervals, what is expected, and the verdicts."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon.analysis.width_sweep.result import (
    Expected,
    Layer,
    LayerTerms,
    LayerVerdict,
    Slope,
    SweepRun,
    TermLine,
    WidthSweep,
    fit_slope,
    kind_of,
    outcome,
    standard,
    student_quantile,
    table,
    user_expectations,
    within,
    words,
)
from torch_gradmon.analysis.width_sweep.sweep import TermProbe, terms

# --- the quantile of Student's distribution -------------------------------------------------------------------------------------


def density(t: float, freedom: int) -> float:
    constant = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    return constant * (1 + t * t / freedom) ** (-(freedom + 1) / 2)


def below(t: float, freedom: int, pieces: int = 4_000) -> float:
    """The probability of less than t, by Simpson's rule from 0."""
    width = t / pieces
    values = [density(k * width, freedom) for k in range(pieces + 1)]
    return 0.5 + width / 3 * (values[0] + values[-1] + 4 * math.fsum(values[1:-1:2]) + 2 * math.fsum(values[2:-1:2]))


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 8, 13, 58])
@pytest.mark.parametrize("probability", [0.6, 0.9, 0.975])
def test_the_quantile_has_its_probability_below_it(freedom: int, probability: float) -> None:
    assert below(student_quantile(probability, freedom), freedom) == pytest.approx(probability, abs=1e-9)


def test_the_quantile_is_that_of_closed_forms_and_printed_tables() -> None:
    for p in (0.7, 0.975, 0.999):
        assert student_quantile(p, 1) == pytest.approx(math.tan(math.pi * (p - 0.5)), rel=1e-12)
        assert student_quantile(p, 2) == pytest.approx((2 * p - 1) / math.sqrt(2 * p * (1 - p)), rel=1e-12)
    assert [round(student_quantile(0.975, n), 3) for n in (3, 10, 30, 120)] == [3.182, 2.228, 2.042, 1.980]
    assert student_quantile(0.5, 7) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("confidence", [1.0, -0.5, 1.5, -3.0])
def test_a_confidence_that_is_no_share_is_refused(confidence: float) -> None:
    with pytest.raises(ValueError, match="must"):
        fit_slope(lines(1.0, {0: 0.0}), confidence)


# --- the exponent -----------------------------------------------------------------------------------------------------------------

WIDTHS = (64, 128, 256, 512, 1024)


def lines(exponent: float, offsets: Mapping[int, float], noise: float = 0.0, seed: int = 0) -> dict[int, list[tuple[int, float]]]:
    generator = torch.Generator().manual_seed(seed)
    jitter = iter((noise * torch.randn(1000, generator=generator, dtype=torch.float64)).tolist())
    return {s: [(w, 2.0 ** (o + exponent * math.log2(w) + next(jitter))) for w in WIDTHS] for s, o in offsets.items()}


@pytest.mark.parametrize("exponent", [-1.0, -0.5, 0.0, 0.5, 1.0])
def test_a_power_law_gives_back_its_exponent_whatever_the_level_of_each_seed(exponent: float) -> None:
    slope = fit_slope(lines(exponent, {0: 0.0, 1: 5.0, 7: -9.0}))
    assert slope.exponent == pytest.approx(exponent, abs=1e-12)
    assert slope.high - slope.low < 1e-12
    assert slope.offset == pytest.approx(-4 / 3)
    assert slope.freedom == 3 * 5 - 3 - 1
    assert slope.at(256) == pytest.approx(2.0 ** (-4 / 3) * 256**exponent)


def test_the_fit_is_that_of_least_squares_with_a_column_for_each_seed() -> None:
    points = lines(0.3, {0: 1.0, 1: -2.0, 2: 0.5}, noise=0.2)
    del points[1][3]  # a width that one seed has not
    rows = [(seed, math.log2(w), math.log2(v)) for seed, pairs in points.items() for w, v in pairs]
    design = torch.tensor([[x, *(float(seed == s) for s in points)] for seed, x, _ in rows], dtype=torch.float64)
    y = torch.tensor([y for *_, y in rows], dtype=torch.float64)
    solution = torch.linalg.lstsq(design, y[:, None]).solution[:, 0]
    residuals = y - design @ solution
    freedom = len(rows) - 4
    variance = residuals @ residuals / freedom * torch.linalg.inv(design.T @ design)[0, 0]
    half = student_quantile(0.95, freedom) * variance.sqrt()
    slope = fit_slope(points, confidence=0.9)
    assert slope.exponent == pytest.approx(solution[0].item(), rel=1e-10)
    assert [slope.low, slope.high] == pytest.approx([(solution[0] - half).item(), (solution[0] + half).item()], rel=1e-9)
    assert slope.scatter == pytest.approx((residuals @ residuals / freedom).sqrt().item(), rel=1e-10)
    assert slope.offset == pytest.approx(solution[1:].mean().item(), rel=1e-9)


def test_the_interval_covers_as_often_as_it_says() -> None:
    covered = sum(
        slope.low <= 0.5 <= slope.high
        for seed in range(1000)
        for slope in [fit_slope(lines(0.5, {0: 0.0, 1: 3.0}, 0.3, seed), 0.9)]
    )
    assert 870 <= covered <= 930  # 900 with a deviation of 9.5


def test_points_without_a_line_are_refused() -> None:
    with pytest.raises(ValueError, match="three widths or more"):
        fit_slope({0: [(64, 1.0), (128, 2.0)]})
    with pytest.raises(ValueError, match="three widths or more"):
        fit_slope({0: [(64, 1.0), (128, 2.0)], 1: [(64, 1.0)]})
    with pytest.raises(ValueError, match="same width"):
        fit_slope({0: [(64, 1.0), (64, 2.0), (64, 3.0)]})
    for value in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="no logarithm"):
            fit_slope({0: [(64, 1.0), (128, value), (256, 1.0)]})


# --- the terms --------------------------------------------------------------------------------------------------------------------


def moved(model: nn.Module, scale: float = 0.1) -> nn.Module:
    """A copy whose parameters are others."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return other


def rms(tensor: Tensor) -> float:
    return tensor.double().square().mean().sqrt().item()


def test_the_terms_of_a_perceptron_are_those_written_out() -> None:
    before = nn.Sequential(nn.Linear(3, 8), nn.ReLU(inplace=True), nn.Linear(8, 5, bias=False)).double()
    after = moved(before)
    x = torch.randn(7, 3, dtype=torch.float64)
    (w0, b0, v0), (wt, bt, vt) = (list(model.parameters()) for model in (before, after))
    hidden0, hidden_t = torch.relu(x @ w0.T + b0), torch.relu(x @ wt.T + bt)
    found = terms(after, before, lambda model: model(x))
    assert found["0"].update == pytest.approx(rms(x @ (wt - w0).T + bt - b0), rel=1e-12)
    assert found["0"].propagated == 0.0
    assert found["0"].input == pytest.approx(rms(x))
    assert found["0"].output == pytest.approx((x @ wt.T + bt).abs().mean().item(), rel=1e-12)  # not what ReLU made of it in place
    assert found["2"].update == pytest.approx(rms(hidden_t @ (vt - v0).T), rel=1e-12)
    assert found["2"].propagated == pytest.approx(rms((hidden_t - hidden0) @ v0.T), rel=1e-12)
    assert found["2"].input == pytest.approx(rms(hidden_t))
    assert found["1"] == LayerTerms(None, None, found["1"].input, pytest.approx(hidden_t.mean().item()))  # type: ignore[arg-type]
    assert list(found) == ["0", "1", "2", ""]
    assert found[""].update is None
    assert found[""].output == pytest.approx((hidden_t @ vt.T).abs().mean().item())


class Shared(nn.Module):
    """A layer that is called twice, an embedding, a normalisation and attention, which gives a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.twice = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens))
        return self.twice(self.twice(self.attention(x, key=x, value=x)[0]))  # type: ignore[no-any-return]


def test_the_terms_of_other_layers_are_those_of_their_functions() -> None:
    before = Shared().double()
    after = moved(before)
    tokens = torch.randint(11, (3, 6))
    found = terms(after, before, lambda model: model(tokens))
    e0, et = before.embedding(tokens), after.embedding(tokens)
    assert found["embedding"].update == pytest.approx(rms(et - e0), rel=1e-12)
    assert (found["embedding"].propagated, found["embedding"].input) == (0.0, None)
    n0, nt, mixed = before.norm(e0), after.norm(et), before.norm(et)
    assert found["norm"].update == pytest.approx(rms(nt - mixed), rel=1e-12)
    assert found["norm"].propagated == pytest.approx(rms(mixed - n0), rel=1e-12)
    a0, at, between = before.attention(n0, n0, n0)[0], after.attention(nt, nt, nt)[0], before.attention(nt, nt, nt)[0]
    assert found["attention"].update == pytest.approx(rms(at - between), rel=1e-12)
    assert found["attention"].propagated == pytest.approx(rms(between - a0), rel=1e-12)
    ins0, ins_t = (a0, before.twice(a0)), (at, after.twice(at))
    updates = torch.cat([after.twice(x) - before.twice(x) for x in ins_t])
    below = torch.cat([before.twice(x) - before.twice(y) for x, y in zip(ins_t, ins0, strict=True)])
    assert found["twice"].update == pytest.approx(rms(updates), rel=1e-12)
    assert found["twice"].propagated == pytest.approx(rms(below), rel=1e-12)


def test_a_model_that_is_one_layer_has_terms_and_one_of_layers_has_none_of_its_own() -> None:
    layer = nn.Linear(3, 4)
    assert terms(moved(layer), layer, lambda model: model(torch.ones(2, 3)))[""].update is not None
    model = Shared()
    model.own = nn.Parameter(torch.ones(1))
    assert terms(moved(model), model, lambda model: model(torch.ones(1, 2, dtype=torch.long)))[""].update is None


def test_dropout_falls_on_the_same_elements_and_nothing_that_did_not_move_has_terms() -> None:
    model = nn.Sequential(nn.Linear(20, 20), nn.Dropout(0.5), nn.Linear(20, 20), nn.Dropout(0.5), nn.Linear(20, 3))
    found = terms(copy.deepcopy(model), model, lambda model: model(torch.ones(4, 20)))
    assert {(term.update, term.propagated) for name, term in found.items() if name in "024" and name} == {(0.0, 0.0)}


def test_dropout_inside_a_layer_is_that_of_its_own_call() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.attention = nn.Dropout(0.5), nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.before(x)
            return self.attention(x, self.before(x), x)[0]  # type: ignore[no-any-return]

    model = Noisy()
    found = terms(copy.deepcopy(model), model, lambda model: model(torch.ones(4, 20, 8)))
    assert (found["attention"].update, found["attention"].propagated) == (0.0, 0.0)


def test_a_module_that_runs_in_one_model_only_has_no_terms() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return self.second(y) if self.first.weight[0, 0] > 0 else y  # type: ignore[no-any-return]

    before, after = Fickle(), Fickle()
    with torch.no_grad():
        before.first.weight.fill_(-1.0)
        after.first.weight.fill_(1.0)
    found = terms(after, before, lambda model: model(torch.ones(1, 2)))
    assert found["second"].update is None
    assert found["first"].update == pytest.approx(4.0, abs=2.0)


def test_a_probe_changes_nothing_and_sees_what_float32_does_not() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2))
    model(torch.randn(5, 6)).sum().backward()
    probe = TermProbe(model)
    with torch.no_grad():
        model[3].weight.mul_(1 + 2.0**-23)
    state = copy.deepcopy(model.state_dict())
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    numbers = torch.get_rng_state()
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(1)).double()
    found = probe.measure(model, lambda copy: copy(x))
    assert probe.measure(model, lambda copy: copy(x)) == found
    assert all(torch.equal(kept, model.state_dict()[name]) for name, kept in state.items())
    assert all(torch.equal(kept, p.grad) for kept, p in zip(gradients, model.parameters(), strict=True) if p.grad is not None)
    assert torch.equal(torch.get_rng_state(), numbers)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert found["3"].update is not None
    assert found["3"].input is not None
    weight = model[3].weight.detach().double()
    assert (
        0.1 * 2.0**-23 * rms(weight) * found["3"].input < found["3"].update < 10 * 2.0**-23 * rms(weight) * 6 * found["3"].input
    )
    assert found["0"].update == found["1"].update == 0.0


def test_buffers_are_those_of_the_beginning_whatever_a_measurement_made_of_them() -> None:
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
    model = nn.Sequential(nn.Linear(6, 6), spectral, nn.BatchNorm1d(6))
    probe = TermProbe(model)
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(1)).double()
    for training in (True, True, False):
        found = probe.measure(model.train(training), lambda copy: copy(x))
        assert {(term.update, term.propagated) for name, term in found.items() if name in ("0", "1", "2")} == {(0.0, 0.0)}


def test_parametrized_weights_are_of_their_layer_and_no_layers_themselves() -> None:
    before = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 5, bias=False)), nn.LayerNorm(5, elementwise_affine=False)
    )
    after = moved(before)
    x = torch.randn(7, 4)
    found = terms(after, before, lambda model: model(x))
    assert found["0"].update == pytest.approx(rms(after[0](x) - before[0](x)), rel=1e-6)
    assert {name for name, term in found.items() if term.update is not None} == {"0"}
    alone = terms(after[0], before[0], lambda model: model(x))
    assert alone[""].update == found["0"].update


def test_complex_buffers_keep_both_parts() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("turn", torch.polar(torch.ones(2), torch.tensor([0.7, 1.4])))

        def forward(self, x: Tensor) -> Tensor:
            pairs = torch.view_as_complex(self.layer(x).unflatten(-1, (2, 2)))
            return torch.view_as_real(pairs * self.turn).flatten(-2)

    model = Turned()
    x = torch.randn(7, 4)
    found = TermProbe(model).measure(model, lambda copy: copy(x.double()))
    assert found[""].output == pytest.approx(model(x).abs().mean().item(), rel=1e-6)


def test_a_loss_may_take_gradients_with_respect_to_inputs() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    other = moved(model)

    def run(copy: nn.Module) -> object:
        x = torch.ones(2, 3, requires_grad=True)
        return torch.autograd.grad(copy(x).sum(), x, create_graph=True)

    plain = terms(other.requires_grad_(False), model.requires_grad_(False), lambda copy: copy(torch.ones(2, 3)))
    assert terms(other, model, run) == plain


def test_a_packed_sequence_is_measured_by_its_elements() -> None:
    before = nn.LSTM(3, 4, batch_first=True)
    after = moved(before)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(2, 5, 3), torch.tensor([5, 2]), batch_first=True)
    found = terms(after, before, lambda model: model(packed))
    assert found[""].update == pytest.approx(rms(after(packed)[0].data - before(packed)[0].data), rel=1e-5)
    assert found[""].input == pytest.approx(rms(packed.data))


def test_a_layer_that_writes_to_its_input_is_measured_on_what_it_was_given() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((3,), 2.0))

        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(self.scale)

    before, after = nn.Sequential(Scales()), nn.Sequential(Scales())
    after[0].scale.data.fill_(5.0)
    found = terms(after, before, lambda model: model(torch.ones(4, 3)))
    assert (found["0"].update, found["0"].propagated, found["0"].input) == (3.0, 0.0, 1.0)


def test_calls_of_other_shapes_have_no_difference() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.expert = nn.Linear(2, 1), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.expert(x[self.gate(x)[:, 0] > 0])

    before, after = Routed(), Routed()
    with torch.no_grad():
        for model, bias in ((before, 0.0), (after, 9.0)):
            model.gate.weight.fill_(1.0)
            model.gate.bias.fill_(bias)
    found = terms(after, before, lambda model: model(torch.tensor([[1.0, 1.0], [-1.0, -1.0]])))
    assert found["gate"].update == pytest.approx(9.0)
    assert found["expert"].update is None


def test_a_probe_follows_the_mode_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    probe = TermProbe(model)
    x = torch.randn(64, 4).double()
    model.eval()
    assert probe.measure(model, lambda copy: copy(x))["1"].output == pytest.approx(model.double()(x).abs().mean().item())


# --- what is expected -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda n: nn.Linear(3, n), "input"),
        (lambda n: nn.Linear(n, 4 * n), "hidden"),
        (lambda n: nn.Linear(n, 3), "output"),
        (lambda n: nn.Linear(3, 3), "fixed"),
        (lambda n: nn.Embedding(10, n), "input"),
        (lambda n: nn.Embedding(n, 10), "output"),
        (lambda n: nn.LayerNorm(n), "vector"),
        (lambda n: nn.Conv2d(3, n, 5), "input"),
        (lambda n: nn.Conv2d(n, 3, 5), "output"),
        (lambda n: nn.ConvTranspose1d(3, n, 5), "input"),
        (lambda n: nn.MultiheadAttention(n, 2), "hidden"),
    ],
)
def test_the_kind_of_a_layer_follows_from_which_sides_grow(make: Callable[[int], nn.Module], kind: str) -> None:
    narrow, wide = ({name: tuple(p.shape) for name, p in make(n).named_parameters()} for n in (8, 32))
    assert kind_of(make(8), narrow, wide) == kind


def layers(*kinds: str, rate: float | None = 0.0) -> dict[str, Layer]:
    return {f"{place}.{kind}": Layer(kind, rate) for place, kind in enumerate(kinds)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "rate", "updates", "below"),
    [
        ("sgd", 0.0, [-0.5, 0.5, 0.5, 1.0], [None, -0.5, 0.5, 1.0]),
        ("sgd", -0.5, [-1.0, 0.0, 0.0, 0.5], [None, -1.0, 0.0, 0.5]),
        ("sgd", -1.0, [-1.5, -0.5, -0.5, 0.0], [None, -1.5, -0.5, 0.0]),
        ("adam", 0.0, [0.0, 1.0, 1.0, 1.0], [None, 0.0, 1.0, 1.5]),
        ("adam", -1.0, [-1.0, 0.0, 0.0, 0.0], [None, -1.0, 0.0, 0.5]),
    ],
)
def test_the_standard_parametrisation_has_the_exponents_of_the_papers(
    family: Any, rate: float, updates: list[float], below: list[float | None]
) -> None:
    found = list(standard(layers("input", "hidden", "hidden", "output", rate=rate), family).values())
    assert [each.update for each in found] == updates
    assert [each.propagated for each in found] == below


def test_what_theory_does_not_say_is_not_judged() -> None:
    found = standard(layers("input", "vector", "hidden", "fixed", "output"), "adam")
    assert [each.update for each in found.values()] == [0.0, 0.0, 1.0, None, 1.0]
    assert {each.propagated for each in found.values()} == {None}
    assert set(standard(layers("input", "output", rate=None), "sgd").values()) == {Expected(None, None)}


def test_patterns_say_what_to_expect_and_the_first_one_decides() -> None:
    names = layers("input", "hidden", "output")
    found = user_expectations({"hidden$": (0.5, None), "^2": 1, "output": -1, "0": None}, names)
    assert list(found.values()) == [Expected(None, None), Expected(0.5, None), Expected(1, 1)]
    assert user_expectations({"hidden": 1.0}, names)["0.input"] == Expected(0.0, 0.0)


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"hiden": 1.0}, ValueError, "matches none .* did you mean 0.hidden"),
        ({"(": 1.0}, ValueError, "no regex"),
        ({"hidden": "1"}, TypeError, "a pair"),
        ({"hidden": (1.0, 2.0, 3.0)}, TypeError, "a pair"),
        ({"hidden": True}, TypeError, "a pair"),
        ({"hidden": math.nan}, TypeError, "must be an exponent"),
        ({"hidden": (0.0, math.inf)}, TypeError, "must be an exponent"),
        ({0: 1.0}, TypeError, "patterns of module names, such as 'head', got 0"),
    ],
)
def test_patterns_that_say_nothing_are_refused(asked: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        user_expectations(asked, layers("hidden"))


# --- the verdicts -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "aim", "answer"),
    [
        (-0.2, 0.2, 0.0, True),
        (-0.25, 0.25, 0.0, True),
        (0.9, 1.1, 1.0, True),
        (0.26, 0.3, 0.0, False),
        (-0.9, -0.3, 0.0, False),
        (-0.1, 0.1, 1.0, False),
        (0.2, 0.3, 0.0, None),
        (-0.3, 0.0, 0.0, None),
        (-0.4, -0.2, 0.0, None),
        (-1.0, 1.0, 0.0, None),
    ],
)
def test_an_interval_is_inside_outside_or_both(low: float, high: float, aim: float, answer: bool | None) -> None:
    assert within(Slope((low + high) / 2, low, high, 0.0, 0.0, 3), aim, 0.25) is answer


def runs(update: Callable[[int, int], float], propagated: Callable[[int, int], float] = lambda w, s: 1.0) -> list[SweepRun]:
    return [SweepRun(w, s, [1.0], [{"a": LayerTerms(update(w, s), propagated(w, s), 1.0, 1.0)}]) for w in WIDTHS for s in (0, 1)]


def verdicts(found: list[SweepRun], aim: float | None = 0.0, kind: Any = "hidden") -> tuple[LayerVerdict, LayerVerdict]:
    one, two = WidthSweep(found, {"a": Layer(kind, 0.0)}, {"a": Expected(aim, 0.0)}, 0.25, 0.95, {}).verdicts
    return one, two


@pytest.mark.parametrize(
    ("update", "aim", "state", "as_expected"),
    [
        (lambda w, s: 3.0 + s, 0.0, "stable", True),
        (lambda w, s: w**0.5, 0.0, "grows", False),
        (lambda w, s: w**-1.0, 0.0, "vanishes", False),
        (lambda w, s: w**0.25 * 2 ** (s * w / 1000), 0.0, "undecided", None),
        (lambda w, s: w**1.1, 1.0, "grows", True),
        (lambda w, s: 1.0, 1.0, "stable", False),
        (lambda w, s: w**0.5, None, "grows", None),
        (lambda w, s: 0.0, 0.0, "zero", None),
        (lambda w, s: 0.0 if w == 64 else 1.0, 0.0, "undecided", None),
        (lambda w, s: math.nan if w == 1024 else 1.0, 0.0, "not finite", False),
        (lambda w, s: math.inf if w == 1024 else 1.0, None, "not finite", None),
    ],
)
def test_a_verdict_says_what_was_shown(update: Any, aim: float | None, state: str, as_expected: bool | None) -> None:
    verdict, _ = verdicts(runs(update), aim)
    assert (verdict.state, verdict.as_expected) == (state, as_expected)
    assert bool(verdict.reason) == (verdict.slope is None)


def test_a_term_that_is_zero_in_some_runs_says_where() -> None:
    found, _ = verdicts(runs(lambda w, s: 0.0 if (w, s) == (128, 0) else 1.0))
    assert (found.state, found.slope, found.as_expected, found.judged) == ("undecided", None, None, True)
    assert found.reason == "zero at width 128 with seed 0"


def test_all_pass_only_if_each_is_shown_to() -> None:
    stable, grows, unclear = (
        verdicts(runs(f))[0] for f in (lambda w, s: 1.0, lambda w, s: float(w), lambda w, s: 2 ** (w % 300 / 100))
    )
    zero, free = verdicts(runs(lambda w, s: 0.0))[0], verdicts(runs(lambda w, s: float(w)), None)[0]
    unowned = WidthSweep(runs(lambda w, s: 0.0), {"a": Layer("hidden", None)}, {"a": Expected(0.0, 0.0)}, 0.25, 0.95, {})
    idle = unowned.verdicts[0]
    assert outcome([stable, idle, free]) == "passes", "what no optimizer has need not move"
    assert outcome([stable, zero]) == "undecided", "what one has and does not move passes nobody"
    assert outcome([stable, zero, grows]) == "fails"
    assert outcome([stable, unclear]) == "undecided"
    assert outcome([stable, unclear, grows]) == "fails"
    assert outcome([zero, free]) == outcome([]) == "undecided"


def test_a_module_whose_part_raises_is_measured_on_its_own_arguments() -> None:
    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.part = nn.Parameter(torch.randn(4, 4)), nn.Linear(3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with contextlib.suppress(RuntimeError):
                self.part(x * 100)  # of another size than it takes
            return x @ self.weight

    torch.manual_seed(0)
    model = nn.Sequential(Tries())
    probe, x = TermProbe(model), torch.randn(5, 4)
    with torch.no_grad():
        model[0].weight += 1.0
    found = probe.measure(model, lambda copy: copy(x.double()))["0"]
    assert found.update == pytest.approx((x.double() @ torch.ones(4, 4).double()).square().mean().sqrt().item(), rel=1e-6)


def test_the_words_name_what_does_not_move() -> None:
    moved, still = verdicts(runs(lambda w, s: 1.0))[0], verdicts(runs(lambda w, s: 0.0))[0]
    text = words([moved, still], 64, 1024)
    assert text.startswith("Undecided: 1 of 2 terms")
    assert "Not moved: a (its parameters do not move); an update of zero cannot be judged" in text
    assert "more seeds" not in text


def test_the_words_name_the_layer_the_power_and_the_remedy() -> None:
    text = words(verdicts(runs(lambda w, s: float(w), lambda w, s: w**-0.5)), 64, 1024)
    assert text.startswith("Fails: 2 of 2 terms")
    assert "too large in wide models in a (width^+1.00): divide the learning rate there" in text
    assert "too little in wide models in a (width^-0.50)" in text
    assert "in a (width^-1.00): multiply" in words(verdicts(runs(lambda w, s: 1 / w)), 64, 1024)
    assert (
        words(verdicts(runs(lambda w, s: 1.0)), 64, 1024)
        == "Passes: all 2 terms have the expected exponent from width 64 to 1024."
    )
    assert "Undecided: no judged term" in words(verdicts(runs(lambda w, s: 0.0, lambda w, s: 0.0)), 64, 1024)
    assert "Training diverged in a (not finite at width 64 with seed 0)" in words(verdicts(runs(lambda w, s: math.nan)), 64, 1024)
    output = verdicts(runs(lambda w, s: 1.0, lambda w, s: w**0.5), kind="output")
    assert "add up in a (width^+0.50)" in words(output, 64, 1024)
    unclear = words(verdicts(runs(lambda w, s: 2 ** (w % 300 / 100))), 64, 1024)
    assert unclear.startswith("Undecided: 1 of 2")
    assert "give more seeds" in unclear


def test_hidden_layers_that_stay_while_logits_grow_are_called_what_they_are() -> None:
    hidden, output = verdicts(runs(lambda w, s: 1.0))[0], verdicts(runs(lambda w, s: w**0.5), kind="output")[0]
    grown = verdicts(runs(lambda w, s: w**0.5))[0]
    assert "controlled divergence" in words([hidden, output], 64, 1024)
    assert "controlled divergence" not in words([grown, output], 64, 1024)
    assert "controlled divergence" not in words([output], 64, 1024)
    assert "controlled divergence" not in words([hidden], 64, 1024)


def test_the_table_has_a_line_for_each_term() -> None:
    head, one, two = table(verdicts(runs(lambda w, s: float(w)), aim=None)).splitlines()
    assert head.split() == ["module", "kind", "term", "exponent", "interval", "expected"]
    assert one.split() == ["a", "hidden", "(W_t-W_0)x_t", "+1.00", "+1.00", "to", "+1.00", "any", "grows"]
    assert two.split()[-2:] == ["+0.00", "stable"]
    failing = table(verdicts(runs(lambda w, s: float(w))))
    assert failing.splitlines()[1].endswith("grows, FAILS")
    assert table(verdicts(runs(lambda w, s: float(w)), aim=1.0)).splitlines()[1].endswith("grows, as expected")


def test_one_step_of_sgd_on_one_layer_is_what_the_formula_says() -> None:
    layer = nn.Linear(30, 5, bias=False).double()
    start, x, y = copy.deepcopy(layer), torch.randn(9, 30).double(), torch.randn(9, 5).double()
    F.mse_loss(layer(x), y).backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    residual = 2 * (x @ start.weight.detach().T - y) / y.numel()
    assert terms(layer, start, lambda model: model(x))[""].update == pytest.approx(rms(0.1 * x @ x.T @ residual), rel=1e-10)


def test_the_terms_are_those_of_the_refined_coordinate_check() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 16, bias=False), nn.ReLU(), nn.Linear(16, 3)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    probe, x = TermProbe(model), torch.randn(12, 6)
    monitor = gradmon.ModuleMonitor(model)
    monitor.set_reference_module("init")
    gradmon.RefinedCoordinateCheck(monitor, "mean_square", lambda term: term.double().square().mean())
    monitor.attach(optimizer)
    for _ in range(3):
        found = probe.measure(model, lambda copy: copy(x.double()))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        values = monitor.get_step_metrics()
        for name in ("0", "1", "3", "5"):
            for source, ours in (("RCC (W_t-W_0)x_t", found[name].update), ("RCC W_0(x_t-x_0)", found[name].propagated)):
                assert ours is not None
                assert math.sqrt(values[f"{source}/{name}/mean_square"]) == pytest.approx(ours, rel=1e-5, abs=1e-6)
    assert all(found[name].update > 1e-3 for name in ("0", "1", "3", "5"))  # type: ignore[operator]


def test_what_adds_up_below_the_output_is_the_largest_of_the_updates() -> None:
    rates = {"first": 0.0, "large": 0.0, "small": -1.0, "last": -1.0}
    kinds: dict[str, Any] = {"first": "input", "large": "hidden", "small": "hidden", "last": "output"}
    found = standard({name: Layer(kinds[name], rates[name]) for name in kinds}, "adam")
    assert [found[name].update for name in kinds] == [0.0, 1.0, 0.0, 0.0]
    assert [found[name].propagated for name in kinds] == [None, 0.0, 1.0, 1.5]


def test_lines_run_through_the_geometric_mean_of_the_seeds() -> None:
    assert TermLine("a", "stable", "red", {16: [5.0], 8: [1.0, 100.0]}).means == pytest.approx([10.0, 5.0])
