"""Clips whose limit follows the gradients: the naive formulas over hundreds of steps, what they leave alone, and where it is told."""

from __future__ import annotations

import copy
import json
import math
import pickle
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor
from torch_gradmon.plugins.clipping import AdaGC, ZClip

from . import clip_oracle, clip_ranks
from .ranks import on_ranks
from .reads import HostReads

pytestmark = pytest.mark.thorough

SIZES = (7, 300, 5000)


def model_of(*sizes: int, dtype: torch.dtype = torch.float32) -> nn.ParameterList:
    return nn.ParameterList(torch.randn(size, dtype=dtype) for size in sizes)


def give(model: nn.Module, norms: list[float | None], generator: torch.Generator) -> None:
    """Gradients of these norms."""
    for parameter, norm in zip(model.parameters(), norms, strict=True):
        if norm is None:
            parameter.grad = None
        else:
            random = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.grad = (random * (norm / random.norm())).to(parameter.dtype)


def norm_of(tensor: Tensor) -> float:
    return tensor.detach().double().norm().item()


def norms_of(model: nn.Module) -> list[float | None]:
    return [None if p.grad is None else norm_of(p.grad) for p in model.parameters()]


def total_of(norms: list[float | None]) -> float:
    return math.sqrt(sum(x * x for x in norms if x is not None))


def course(steps: int, seed: int = 0, bad: bool = True) -> Iterator[list[float | None]]:
    """Norms of three parameters as training has them: noise that decays, spikes, NaN, Inf, zero and none, in the warm-up too."""
    draw = random.Random(seed)
    for step in range(steps):
        norms: list[float | None] = [
            size * (1 + 3 * math.exp(-step / 60)) * math.exp(draw.gauss(0, 0.1)) for size in (0.02, 0.3, 0.5)
        ]
        if draw.random() < 0.05:
            norms = [(x or 0.0) * draw.choice([2, 10, 1e4]) for x in norms]
        if bad and draw.random() < 0.05:
            norms[draw.randrange(3)] = draw.choice([math.nan, math.inf, 0.0, None])
        yield norms


def poison(model: nn.Module, norms: list[float | None], generator: torch.Generator) -> None:
    give(model, [x if x is None or math.isfinite(x) else 1.0 for x in norms], generator)
    for parameter, norm in zip(model.parameters(), norms, strict=True):
        if norm is not None and not math.isfinite(norm):
            parameter.grad[0] = norm


# --- the formulas ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("monitored", "seed"), [(False, 0), (False, 1), (True, 2), (True, 3)])
def test_zclip_is_the_naive_formula(seed: int, monitored: bool) -> None:
    model, generator = model_of(*SIZES), torch.Generator().manual_seed(seed)
    monitor, naive = ModuleMonitor(model, preset="standard"), clip_oracle.ZClip()
    spikes = 0
    for step, norms in enumerate(course(300, seed)):
        poison(model, norms, generator)
        if monitored:
            monitor.begin_step(step)
        before, given_ = total_of(norms_of(model)), [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        limit = naive.limit()
        total = monitor.clip_grad_norm_("zclip")
        assert total.item() == pytest.approx(before, rel=1e-6, nan_ok=True)
        wanted = naive.clipped(before)
        if wanted == before or not math.isfinite(before):
            for parameter, was in zip(model.parameters(), given_, strict=True):
                assert parameter.grad is None or torch.equal(parameter.grad.nan_to_num(7), was.nan_to_num(7))
        else:
            spikes += 1
            assert total_of(norms_of(model)) == pytest.approx(wanted, rel=1e-6)
        if monitored:
            monitor.end_step()
            values = monitor.get_step_metrics()
            assert values.get("gradmon/clip_limit") == (None if limit is None else pytest.approx(limit, rel=1e-6))
            assert values["gradmon/grad_norm"] == pytest.approx(before, rel=1e-6, nan_ok=True)
            if math.isfinite(before) and "gradmon/grad_norm_after_clip" in values:
                assert values["gradmon/grad_norm_after_clip"] == pytest.approx(wanted, rel=1e-6)
    assert spikes >= 3
    state = monitor.state_dict()["clipping"]["zclip"]
    assert state["mean"] == pytest.approx(naive.mean, rel=1e-6)
    assert state["variance"] == pytest.approx(naive.variance, rel=1e-4)


@pytest.mark.parametrize(("monitored", "seed"), [(False, 0), (False, 1), (True, 2), (True, 3)])
def test_adagc_is_the_naive_formula(seed: int, monitored: bool) -> None:
    model, generator = model_of(*SIZES), torch.Generator().manual_seed(seed)
    monitor, naive = ModuleMonitor(model, preset="standard"), clip_oracle.AdaGC()
    total_clipped = 0
    for step, norms in enumerate(course(300, seed)):
        poison(model, norms, generator)
        if monitored:
            monitor.begin_step(step)
        before = norms_of(model)
        total = monitor.clip_grad_norm_("adagc")
        assert total.item() == pytest.approx(total_of(before), rel=1e-6, nan_ok=True)
        wanted, after = naive.clipped(before), norms_of(model)
        for was, found, expected in zip(before, after, wanted, strict=True):
            assert (found is None) == (expected is None)
            assert found is None or found == pytest.approx(expected, rel=1e-6, nan_ok=True)
            assert expected != was or found == was
        if monitored:
            monitor.end_step()
            count = sum(a is not None and math.isfinite(a) and a != b for a, b in zip(before, wanted, strict=True))
            assert monitor.get_step_metrics()["gradmon/clipped_parameters"] == count
            total_clipped += count
    assert total_clipped > 100 or not monitored
    state = monitor.state_dict()["clipping"]["adagc"]["norms"]
    for index, level in naive.level.items():
        assert state[str(index)] == [pytest.approx(level, rel=1e-6), naive.count[index]]


_norms = st.floats(1e-3, 1e3)


@settings(max_examples=60)
@given(st.lists(_norms, min_size=1, max_size=40), st.integers(1, 6), st.floats(0.5, 5), st.floats(0.1, 0.99))
def test_zclip_never_raises_a_norm_and_follows_the_formula(
    norms: list[float], warmup: int, threshold: float, alpha: float
) -> None:
    clip, naive = ZClip(threshold, alpha, warmup), clip_oracle.ZClip(threshold, alpha, warmup)
    for norm in norms:
        factors, _ = clip.factors(torch.tensor([[3.0, 0, 0, norm**2, 0, 0, 0, 0]], dtype=torch.float64), ["a"])
        assert 0 < factors.item() <= 1
        assert factors.item() * norm == pytest.approx(naive.clipped(norm), rel=1e-6)


@settings(max_examples=60)
@given(st.lists(st.tuples(_norms, _norms), min_size=1, max_size=40), st.integers(1, 6), st.floats(1.001, 3), st.floats(0.1, 0.99))
def test_adagc_never_raises_a_norm_and_follows_the_formula(
    norms: list[tuple[float, float]], warmup: int, ratio: float, beta: float
) -> None:
    clip, naive = AdaGC(ratio, beta, warmup, 2.0), clip_oracle.AdaGC(ratio, beta, warmup, 2.0)
    for pair in norms:
        rows = torch.tensor([[3.0, 0, 0, norm**2, 0, 0, 0, 0] for norm in pair], dtype=torch.float64)
        factors, _ = clip.factors(rows, ["a", "b"])
        assert bool(((factors > 0) & (factors <= 1)).all())
        found = [factor * norm for factor, norm in zip(factors.tolist(), pair, strict=True)]
        assert found == pytest.approx(naive.clipped(list(pair)), rel=1e-9)


def test_a_fixed_limit_besides_holds_in_the_warm_up_and_after_it() -> None:
    model, generator = model_of(*SIZES), torch.Generator()
    monitor = ModuleMonitor(model)
    monitor.add_gradient_metric("norm")
    clip = ZClip(warmup=4, max_norm=0.5)
    for step, norm in enumerate([0.3, 0.9, 0.4, 0.6, 0.7, 50.0, 0.2]):
        give(model, [norm, None, None], generator)
        monitor.begin_step(step)
        monitor.clip_grad_norm_(clip)
        monitor.end_step()
        assert total_of(norms_of(model)) == pytest.approx(min(norm, 0.5), rel=1e-6)
        assert monitor.get_step_metrics()["gradmon/clip_limit"] == 0.5
    assert clip.state_dict()["mean"] > 0.5  # it learns what the norms are, not what they are cut to


def test_a_first_gradient_of_zero_does_not_stop_a_parameter_for_good() -> None:
    # the factor of a LoRA pair that is multiplied by the one that starts at zero
    model, generator = model_of(4, 4), torch.Generator()
    monitor = ModuleMonitor(model)
    clip = AdaGC(warmup=3)
    for norms in ([0.5, 0.0], [0.5, 0.2], [0.5, 0.2], [0.5, 0.2], [0.5, 0.2]):
        give(model, [1.0, 1.0], generator)
        for parameter, norm in zip(model.parameters(), norms, strict=True):
            parameter.grad *= norm
        monitor.clip_grad_norm_(clip)
    assert norms_of(model) == pytest.approx([0.5, 0.2], rel=1e-6)


def test_a_parameter_that_thaws_has_a_warm_up_of_its_own() -> None:
    model, generator = model_of(4, 4), torch.Generator()
    clip, monitor = AdaGC(warmup=3, max_norm=100.0), ModuleMonitor(model)
    for step in range(12):
        give(model, [1.0, None if step < 6 else 1.0 + step], generator)
        monitor.clip_grad_norm_(clip)
        if 6 <= step < 9:
            assert norms_of(model)[1] == pytest.approx(1.0 + step, rel=1e-6)
    assert norms_of(model)[1] < 8  # the smallest of its warm-up was 7
    assert clip.state_dict()["norms"]["1"][1] == 6


# --- every kind of gradient ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["zclip", "adagc"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_gradients_of_each_dtype(name: str, dtype: torch.dtype) -> None:
    model, generator = model_of(4000, dtype=dtype), torch.Generator().manual_seed(0)
    clip: Any = ZClip(warmup=3) if name == "zclip" else AdaGC(warmup=3, max_norm=100.0)
    naive: Any = clip_oracle.ZClip(warmup=3) if name == "zclip" else clip_oracle.AdaGC(warmup=3, max_norm=100.0)
    monitor = ModuleMonitor(model)
    for norm in (1.0, 1.1, 0.9, 1.0, 20.0, 1.0):
        real = torch.randn(4000, 2 if dtype.is_complex else 1, generator=generator, dtype=torch.float64)
        real *= norm / real.norm()
        model[0].grad = (torch.view_as_complex(real) if dtype.is_complex else real[:, 0]).to(dtype)
        before = (
            math.hypot(*torch.view_as_real(model[0].grad).double().flatten().tolist())
            if dtype.is_complex
            else norm_of(model[0].grad)
        )
        total = monitor.clip_grad_norm_(clip)
        assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        wanted = naive.clipped(before) if name == "zclip" else naive.clipped([before])[0]
        after = model[0].grad
        found = torch.view_as_real(after).double().norm().item() if dtype.is_complex else norm_of(after)
        # each element is rounded once, without a bias
        assert found == pytest.approx(wanted, rel=1e-3 if dtype in (torch.bfloat16, torch.float16) else 1e-6)


def test_a_sparse_gradient() -> None:
    model = nn.Sequential(nn.Embedding(10, 3, sparse=True))
    clip, monitor = ZClip(warmup=2), ModuleMonitor(model)
    for scale in (1.0, 1.1, 30.0):
        model.zero_grad()
        (model(torch.tensor([1, 1, 4])).sum() * scale).backward()
        before = norm_of(model[0].weight.grad.coalesce().to_dense())
        assert monitor.clip_grad_norm_(clip).item() == pytest.approx(before, rel=1e-6)
    assert norm_of(model[0].weight.grad.coalesce().to_dense()) < 0.1 * before


def test_tied_and_repeated_parameters_are_clipped_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    clip, monitor, generator = AdaGC(warmup=1, max_norm=0.5), ModuleMonitor(model), torch.Generator()
    for _ in range(2):
        give(model, [2.0], generator)
        assert monitor.clip_grad_norm_(clip, parameters=[model[0].weight, model[1].weight]).item() == pytest.approx(2.0)
    assert norms_of(model) == pytest.approx([0.52])
    assert clip.state_dict() == {"norms": {"0.weight": [pytest.approx(0.5002), 2]}}


def test_parameters_of_no_watched_model_are_known_by_their_place() -> None:
    model, other = model_of(5), model_of(6, 7)
    clip, monitor = AdaGC(), ModuleMonitor(model)
    both = [*other.parameters(), *model.parameters()]
    give(model, [1.0], torch.Generator())
    give(other, [1.0, 2.0], torch.Generator())
    monitor.clip_grad_norm_(clip, parameters=both)
    assert set(clip.state_dict()["norms"]) == {"parameters[0]", "parameters[1]", "0"}
    unwatched = AdaGC()
    ModuleMonitor().clip_grad_norm_(unwatched, parameters=iter(both))
    assert set(unwatched.state_dict()["norms"]) == {f"parameters[{i}]" for i in range(3)}


def test_no_gradients_at_all() -> None:
    model = model_of(3)
    monitor = ModuleMonitor(model)
    for name in ("zclip", "adagc"):
        assert monitor.clip_grad_norm_(name).item() == 0.0
    assert monitor.state_dict()["clipping"] == {"zclip": {"count": 0, "mean": 0.0, "variance": 0.0}, "adagc": {"norms": {}}}


def test_under_a_scaler_it_comes_after_unscale_and_an_inf_step_is_not_learned() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    monitor = gradmon.watch(model, optimizer, scaler=scaler, on_spike=None)
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((4, 3), math.inf if step == 2 else 1.0)).square().mean()).backward()
        scaler.unscale_(optimizer)
        before = total_of(norms_of(model))
        assert monitor.clip_grad_norm_("zclip").item() == pytest.approx(before, rel=1e-6, nan_ok=True)
        scaler.step(optimizer)
        scaler.update()
        if step != 2:
            assert monitor.get_step_metrics()["gradmon/grad_norm"] == pytest.approx(before, rel=1e-6)
    assert monitor.state_dict()["clipping"]["zclip"]["count"] == 5


# --- what is told, and what is not waited for ---------------------------------------------------------------------------------------


def test_in_an_attached_loop_the_clip_is_seen_and_told() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    clip = ZClip(warmup=5)
    shares = []
    for step in range(12):
        optimizer.zero_grad()
        (model(torch.randn(8, 5)).square().mean() * (100 if step == 9 else 1)).backward()
        before = total_of(norms_of(model))
        monitor.clip_grad_norm_(clip)
        after = total_of(norms_of(model))
        optimizer.step()
        values = monitor.get_step_metrics()
        assert values["gradmon/grad_norm"] == pytest.approx(before, rel=1e-6)
        assert values["gradmon/grad_norm_after_clip"] == pytest.approx(after, rel=1e-6)
        assert ("gradmon/clip_limit" in values) == (step >= 5)
        assert (after < 0.99 * before) == ("gradmon/clip_limit" in values and before > values["gradmon/clip_limit"])
        shares.append(values["gradmon/clip_fraction"])
    assert shares[9] > shares[8]


def test_several_clips_of_one_step_add_up() -> None:
    model = model_of(4, 4)
    monitor = ModuleMonitor(model)
    monitor.add_gradient_metric("norm")
    first, second = AdaGC(max_norm=0.1), AdaGC(max_norm=0.1)
    give(model, [1.0, 1.0], torch.Generator())
    monitor.begin_step(0)
    monitor.clip_grad_norm_(first, parameters=model[0])
    monitor.clip_grad_norm_(second, parameters=model[1])
    monitor.end_step()
    assert monitor.get_step_metrics()["gradmon/clipped_parameters"] == 2


@pytest.mark.parametrize("name", ["zclip", "adagc"])
def test_nothing_is_read_back_but_what_measuring_reads(name: str) -> None:
    model, generator = model_of(*SIZES), torch.Generator()
    monitor = ModuleMonitor(model)

    def reads(**arguments: Any) -> int:
        give(model, [0.3, 0.2, 0.1], generator)
        with HostReads() as seen:
            monitor.clip_grad_norm_(**arguments)
        return sum(seen.counts.values())

    for _ in range(3):
        assert reads(max_norm=name) <= reads(max_norm=1.0, exact=True)


# --- state ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [10, 25, 100, 140])
def test_a_run_that_is_resumed_goes_on_bit_for_bit(at: int) -> None:
    def run(resume: bool) -> tuple[list[Tensor], dict[str, Any]]:
        model, generator = model_of(*SIZES), torch.Generator().manual_seed(3)
        monitor, found = ModuleMonitor(model), []
        for step, norms in enumerate(course(180, 5)):
            if resume and step == at:
                state = json.loads(json.dumps(monitor.state_dict()))
                monitor = ModuleMonitor(model)
                monitor.load_state_dict(state)
                assert monitor.state_dict() == state
            poison(model, norms, generator)
            monitor.clip_grad_norm_("zclip")
            monitor.clip_grad_norm_("adagc")
            found += [p.grad.clone().nan_to_num(7) for p in model.parameters() if p.grad is not None]
        return found, monitor.state_dict()

    whole, resumed = run(False), run(True)
    assert all(torch.equal(a, b) for a, b in zip(whole[0], resumed[0], strict=True))
    assert whole[1] == resumed[1]


def test_objects_of_the_user_keep_their_own_state_and_copy_and_pickle() -> None:
    model, generator = model_of(*SIZES), torch.Generator()
    monitor = ModuleMonitor(model)
    for clip in (ZClip(warmup=3), AdaGC(warmup=3)):
        for norms in course(10, 1, bad=False):
            give(model, norms, generator)
            monitor.clip_grad_norm_(clip)
        state = clip.state_dict()
        again = type(clip)()
        again.load_state_dict(json.loads(json.dumps(state)))
        assert again.state_dict() == copy.deepcopy(clip).state_dict() == pickle.loads(pickle.dumps(clip)).state_dict() == state
    assert monitor.state_dict()["clipping"] == {}


@pytest.mark.parametrize(
    "bad", [{"nothing": {}}, {"zclip": {"count": 1}}, {"zclip": {"count": 1, "mean": math.nan, "variance": 0}}, {"adagc": 3}, [1]]
)
def test_a_state_that_is_none_is_refused_and_changes_nothing(bad: Any) -> None:
    model = model_of(3)
    monitor = ModuleMonitor(model)
    give(model, [1.0], torch.Generator())
    monitor.clip_grad_norm_("zclip")
    before = monitor.state_dict()
    with pytest.raises(ValueError, match="nothing was loaded"):
        monitor.load_state_dict({**before, "clipping": bad})
    assert monitor.state_dict() == before


def test_a_state_of_before_there_were_adaptive_clips_is_taken() -> None:
    monitor = ModuleMonitor(model_of(3))
    state = monitor.state_dict()
    del state["clipping"]
    monitor.load_state_dict(state)


# --- errors --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"max_norm": "zlip"}, "'zlip' is not one of 'zclip', 'adagc'.*did you mean zclip"),
        ({"max_norm": "zclip", "norm_type": 1.0}, "exact norm of order 2, got norm_type=1.0"),
        ({"max_norm": ZClip(), "norm_type": math.inf}, "got norm_type=inf"),
        ({"max_norm": AdaGC(), "exact": False}, "got exact=False"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_changes(arguments: dict[str, Any], match: str) -> None:
    model = model_of(30)
    monitor = ModuleMonitor(model)
    give(model, [5.0], torch.Generator())
    before = model[0].grad.clone()
    with pytest.raises(ValueError, match=match):
        monitor.clip_grad_norm_(**arguments)
    assert torch.equal(model[0].grad, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_raises_where_that_is_asked_for(bad: float) -> None:
    model = model_of(30)
    monitor = ModuleMonitor(model)
    give(model, [5.0], torch.Generator())
    model[0].grad[3] = bad
    for name in ("zclip", "adagc"):
        with pytest.raises(RuntimeError, match="total norm"):
            monitor.clip_grad_norm_(name, error_if_nonfinite=True)
        assert not math.isfinite(monitor.clip_grad_norm_(name, exact=True).item())


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (ZClip, {"threshold": 0}),
        (ZClip, {"alpha": 1.0}),
        (ZClip, {"warmup": 0}),
        (ZClip, {"max_norm": -1.0}),
        (ZClip, {"eps": "a"}),
        (AdaGC, {"ratio": 1.0}),
        (AdaGC, {"beta": 0}),
        (AdaGC, {"warmup": 1.5}),
        (AdaGC, {"max_norm": math.inf}),
    ],
)
def test_arguments_are_checked(kind: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(arguments))):
        kind(**arguments)


def test_a_switched_off_monitor_clips_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADMON_DISABLE", "1")
    model = model_of(30)
    monitor = ModuleMonitor(model)
    give(model, [5.0], torch.Generator())
    monitor.clip_grad_norm_("adagc")
    assert norms_of(model) == pytest.approx([1.0])


# --- ranks ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2", "tp", "sequence"])
@pytest.mark.parametrize("how", ["exact", "exact-1", "exact-inf", "zclip", "adagc"])
def test_ranks_clip_by_the_norm_of_the_whole(wrap: str, how: str) -> None:
    for steps in on_ranks(2, clip_ranks.clipped, wrap, how):
        for total, true_total, found, wanted in steps:
            assert total == pytest.approx(true_total, rel=1e-6)
            assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["exact", "zclip", "adagc"])
def test_plain_parameters_that_differ_by_rank_count_together(how: str) -> None:
    for total, true_total, values in on_ranks(2, clip_ranks.experts, how):
        assert total == pytest.approx(true_total, rel=1e-6)
        assert values == pytest.approx(true_total, rel=1e-6)


@pytest.mark.ranks
def test_a_rank_that_is_alone_is_told_and_nothing_changes() -> None:
    said, unchanged = on_ranks(2, clip_ranks.alone)[0]
    assert unchanged
    assert len(said) == 3
    assert all("a monitor of the same model and metrics on every rank" in each for each in said)
