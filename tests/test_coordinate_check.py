"""The refined coordinate check: its terms beside a decomposition by hand, what it costs, and what it leaves alone."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor, RefinedCoordinateCheck
from torch_gradmon.capture.hooks import tensors_of
from torch_gradmon.core import torch_modes
from torch_gradmon.core.keys import RCC_SOURCES, Key, format_key, parse_key

from . import loops
from .families import BY_NAME

# most loops here are of what is measured, and leave out what the audit of the loop misses
pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore:torch_gradmon.*Gradients are not cleared")]

UPDATE, PROPAGATED, INPUT, MOVED_INPUT = "RCC (W_t-W_0)x_t", "RCC W_0(x_t-x_0)", "RCC x_t", "RCC (x_t-x_0)"

# --- models: each takes x [batch, 6, 8] and returns something with a tensor in it ---------------------------------------------


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Conv2d(3, 2, 3, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.unsqueeze(1)).flatten(1)


class Attends(nn.Module):
    """By hand, with keyword arguments, a tuple and dropout of torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=0.1 if self.training else 0.0)
        return self.out(y.transpose(1, 2).flatten(2)), q.sum()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attend, self.drop = nn.LayerNorm(8), Attends(), nn.Dropout(0.2)
        self.mlp = nn.Sequential(nn.LayerNorm(8, bias=False), nn.Linear(8, 12), nn.GELU(), nn.Dropout(0.1), nn.Linear(12, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attend(self.norm(input=x), causal=True)[0])
        return x + self.mlp(x)


class Transformer(nn.Module):
    def __init__(self, recompute: str = "") -> None:
        super().__init__()
        self.embed, self.blocks, self.recompute = nn.Embedding(11, 8), nn.ModuleList(Block() for _ in range(2)), recompute

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x[..., 0].abs().mul(5).long() % 11)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant") if self.recompute else block(x)
        return x


class Multihead(nn.Module):
    """torch's own, which returns a tuple, all inputs by name; and a module that returns a dict."""

    class Both(nn.Linear):
        def forward(self, input: Tensor) -> Any:
            y = super().forward(input)
            return {"value": y, "best": y.argmax(-1), "none": None}

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.both = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True), self.Both(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.both(self.attend(query=x, key=x.flip(1), value=x)[0])["value"]


class Shared(nn.Module):
    """One layer three times in a forward, twice of them with the very same tensor but other random numbers."""

    class Noisy(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return F.dropout(super().forward(input), 0.3, self.training)

    class Twice(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.layer(x)

    def __init__(self) -> None:
        super().__init__()
        self.first = self.Noisy(8, 8)
        self.twice = self.Twice(self.first)

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(self.first(x))


class Nested(nn.Module):
    """Wrappers whose parts get what they got; one that writes to it before, by its weights, and one that gives a scale along."""

    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.layer = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x.mul_(self.scale)
            return self.layer(x)

    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, scale: float = 1.0, places: Any = ()) -> Tensor:
            return self.layer(x) * scale + len(places)

    class Passes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.factor = Nested.Doubles(), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, float(self.factor.bias.detach()), [None, 2])  # the weights decide on the scale

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8))
        self.scales, self.passes = self.Scales(), self.Passes()
        self.end = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 4)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.passes(self.scales(self.start(x) + 0))
        return self.end(x + self.passes.factor(x))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "conv": Conv,
    "transformer": Transformer,
    "recomputed": lambda: Transformer("nonreentrant"),
    "recomputed reentrant": lambda: Transformer("reentrant"),
    "multihead": Multihead,
    "shared": Shared,
    "nested": Nested,
}


def checked(model: nn.Module, reference: Any = "init", **options: Any) -> tuple[ModuleMonitor, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    monitor = ModuleMonitor(model, **options)
    monitor.set_reference_module(reference)
    RefinedCoordinateCheck(monitor)
    return monitor.attach(optimizer), optimizer


def batch(size: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(size, 6, 8, dtype=dtype)


def loss_of(output: Any) -> Tensor:
    return next(tensor for _, tensor in tensors_of(output, "")).float().square().mean()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *inputs: Tensor) -> None:
    for x in inputs or (batch(),):
        loss_of(model(x)).backward()
    optimizer.step()
    optimizer.zero_grad()


# --- by hand ------------------------------------------------------------------------------------------------------------------


def _calls(model: nn.Module, x: Tensor) -> dict[str, list[tuple[Any, Any, Tensor, Any]]]:
    """Of each module's calls: arguments and output as they were, and the state of the random generator at its beginning."""
    found: dict[str, list[Any]] = {}
    open_calls: list[tuple[Any, ...]] = []
    for name, part in model.named_modules():

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            open_calls.append((*copy.deepcopy((args, kwargs)), torch.get_rng_state()))

        def after(_: nn.Module, args: Any, output: Any, name: str = name) -> None:
            found.setdefault(name, []).append((*open_calls.pop(), copy.deepcopy(output)))

        part.register_forward_pre_hook(before, with_kwargs=True)
        part.register_forward_hook(after)
    model(x)
    return found


def _norms(x: Tensor) -> Tensor:
    return x.double().square().sum(-1).sqrt().reshape(-1)


def by_hand(model: nn.Module, reference: nn.Module, inputs: list[Tensor]) -> dict[str, float]:
    """Every value that is due, from the definitions, in float64; neither module is changed, nor the random generator."""
    norms: dict[str, list[Tensor]] = {}
    state = torch.get_rng_state()

    def put(source: str, path: str, x: Tensor, minus: Tensor | None = None) -> None:
        if x.is_floating_point():
            norms.setdefault(f"{source}/{path}/l2norm", []).append(_norms(x.double() - (0 if minus is None else minus.double())))

    for x in inputs:
        begin = torch.get_rng_state()
        with torch.no_grad():
            start = _calls(copy.deepcopy(reference), x.clone())
            torch.set_rng_state(begin)
            now = _calls(copy.deepcopy(model), x.clone())
            after = torch.get_rng_state()
            for name, calls in now.items():
                for (args, kwargs, rng, out), (args_0, kwargs_0, _, out_0) in (
                    zip(calls, start[name], strict=True) if name else ()
                ):
                    part, part_0 = model.get_submodule(name), copy.deepcopy(reference).get_submodule(name)
                    torch.set_rng_state(rng)
                    moved = part_0(*copy.deepcopy(args), **copy.deepcopy(kwargs))
                    outputs = [dict(tensors_of(each, name)) for each in (out, moved, out_0)]
                    for path, tensor in outputs[0].items():
                        put(UPDATE, path, tensor, outputs[1][path])
                        if not isinstance(part, nn.Embedding):
                            put(PROPAGATED, path, outputs[1][path], outputs[2][path])
                    x_t, x_0 = (a[0] if a else next(iter(k.values())) for a, k in ((args, kwargs), (args_0, kwargs_0)))
                    put(INPUT, name, x_t)
                    put(MOVED_INPUT, name, x_t, x_0)
                    if type(part) in (nn.Linear, nn.LayerNorm, nn.modules.linear.NonDynamicallyQuantizableLinear, Shared.Noisy):
                        b, b_0 = (0.0 if p.bias is None else p.bias for p in (part, part_0))
                        put(UPDATE, f"{name}.weight", (out - b), (moved - b_0))
                        put(PROPAGATED, f"{name}.weight", (moved - b_0), (out_0 - b_0))
                        put(UPDATE, f"{name}.weight/W_t x_t", out - b)
                        put(PROPAGATED, f"{name}.weight/W_0 x_0", out_0 - b_0)
                    if isinstance(part, nn.LayerNorm):
                        n_t, n_0 = (
                            (t - t.mean(-1, keepdim=True)) / (t.var(-1, keepdim=True, correction=0) + part.eps).sqrt()
                            for t in (x_t.double(), x_0.double())
                        )
                        put(UPDATE, f"{name}.weight/x_t", n_t)
                        put(PROPAGATED, f"{name}.weight/x_t-x_0", n_t, n_0)
        torch.set_rng_state(after)
    torch.set_rng_state(state)
    return {key: torch.cat(parts).mean().item() for key, parts in norms.items()}


def _same(found: dict[str, float], truth: dict[str, float], slack: float = 1e-12) -> None:
    assert found.keys() == truth.keys()
    wrong = {key: (found[key], value) for key, value in truth.items() if abs(found[key] - value) > 1e-6 * value + slack}
    assert not wrong


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("init", [True, False], ids=["init", "copy"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_terms_are_those_of_a_decomposition_by_hand(kind: str, init: bool) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]().double()
    truth = copy.deepcopy(model)
    monitor, optimizer = checked(model, "init" if init else copy.deepcopy(model), on_metric_error="raise")
    for number in range(3):
        inputs = [batch(3), batch(2)]
        state = torch.get_rng_state()
        expected = by_hand(model, truth, inputs) if "recomputed" not in kind else {}
        torch.set_rng_state(state)
        step(model, optimizer, *inputs)
        found = monitor.get_step_metrics()
        if expected:
            _same(found, expected)
        moves = {key for key, value in found.items() if value > 0 and key.startswith((UPDATE, PROPAGATED, MOVED_INPUT))}
        absolute = {key for key in moves if key.count("/") > 2 and not key.endswith("/x_t-x_0/l2norm")}
        assert (moves > absolute) == (number > 0)  # without an update nothing has moved, dropout or not
        assert len(found) >= 10


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("recompute", ["nonreentrant", "reentrant"])
def test_a_recomputation_does_not_count(recompute: str) -> None:
    rows = []
    for kind in ("", recompute):
        torch.manual_seed(0)
        model = Transformer(kind).double()
        monitor, optimizer = checked(model, on_metric_error="raise")
        if kind:  # gradients flow through the embedding only where the input has some
            model.embed.weight.requires_grad_(True)
        for _ in range(2):
            step(model, optimizer, batch())
        rows.append(monitor.get_step_metrics())
    assert rows[0] == pytest.approx(rows[1], rel=1e-6, abs=1e-12)


class LooksBack(nn.Module):
    """A backward pass within the forward, as for a gradient penalty."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.part, self.end, self.recompute = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 2), recompute

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        y = checkpoint(self.part, x, use_reentrant=False) if self.recompute else self.part(x)
        (slope,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True) if torch.is_grad_enabled() else (0.0,)
        return self.end(self.part(y)) + 0.0 * torch.as_tensor(slope).sum()


def test_a_recomputation_within_the_forward_does_not_count() -> None:
    rows = []
    for recompute in (False, True):
        torch.manual_seed(0)
        monitor, optimizer = checked(model := LooksBack(recompute).double(), on_metric_error="raise")
        for _ in range(2):
            step(model, optimizer, batch())
        rows.append(monitor.get_step_metrics())
        assert monitor.missing() == {}
    assert rows[0] == rows[1]


def test_under_autocast_all_three_outputs_are_rounded_as_in_training() -> None:
    torch.manual_seed(0)
    model = Transformer()
    truth = copy.deepcopy(model)
    monitor, optimizer = checked(model)
    for number in range(2):
        x, state = batch(dtype=torch.float32), torch.get_rng_state()
        with torch.autocast("cpu", torch.bfloat16):
            expected = by_hand(model, truth, [x])
            torch.set_rng_state(state)
            loss = loss_of(model(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found = monitor.get_step_metrics()
        assert found.keys() == expected.keys()
        for key in (f"{UPDATE}/blocks.1.attend.qkv/l2norm", f"{PROPAGATED}/blocks.1.attend.qkv/l2norm"):
            assert found[key] == pytest.approx(expected[key], rel=1e-6)
            assert (found[key] > 0) == (number > 0)


# --- what it costs ------------------------------------------------------------------------------------------------------------


def test_a_bias_is_taken_from_outputs_of_low_precision_without_rounding_once_more() -> None:
    model = nn.Sequential(nn.Linear(8, 8)).bfloat16()
    nn.init.constant_(model[0].bias, 0.01)
    reference = copy.deepcopy(model)
    monitor, optimizer = checked(model)
    x = batch(dtype=torch.bfloat16)
    step(model, optimizer, x)
    with torch.no_grad():
        start = reference(x).double() - reference[0].bias.double()
    values = monitor.get_step_metrics()
    assert values[f"{PROPAGATED}/0.weight/W_0 x_0/l2norm"] == pytest.approx(_norms(start).mean().item(), rel=1e-6)


def test_what_a_run_around_computed_on_the_same_tensors_is_not_computed_again() -> None:
    model = Nested()
    reference = copy.deepcopy(model)
    runs: Counter[str] = Counter()
    for name, part in reference.named_modules():
        part.register_forward_pre_hook(lambda *_, name=name: runs.update([name]))
    monitor, optimizer = checked(model, reference)
    step(model, optimizer, batch(dtype=torch.float32))
    assert monitor.missing() == {}
    # the pass itself, and what comes besides it: of the model's own input nothing, then each once for each call and container
    besides = {name: count - 1 for name, count in runs.items()}
    assert besides == {
        **dict.fromkeys(["", "start", "start.0", "start.0.0"], 0),
        **dict.fromkeys(["start.0.1", "start.1"], 1),
        "scales": 1,
        "scales.layer": 2,  # it gets other numbers than its container did
        "passes": 1,
        "passes.inner": 1,
        "passes.inner.layer": 1,
        "passes.factor": 1,
        "end": 1,
        "end.0": 1,
        "end.0.0": 1,
        "end.1": 2,
        "end.1.0": 2,
    }


def test_wrappers_around_wrappers_cost_one_run_and_a_pattern_for_leaves_one_each() -> None:
    inner: nn.Module = nn.Linear(8, 8)
    for _ in range(20):
        inner = nn.Sequential(inner)
    model = nn.Sequential(nn.Linear(8, 8), inner, nn.Linear(8, 8))
    for pattern, expected in ((".*", 2), (r"(^|\.)2$", 2)):
        reference = copy.deepcopy(model)
        runs: list[int] = []
        for part in reference.modules():
            if isinstance(part, nn.Linear):
                part.register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
        monitor = ModuleMonitor(model)
        monitor.set_reference_module(reference)
        RefinedCoordinateCheck(monitor, metric_regex=pattern)
        monitor.begin_step(0)
        model(torch.randn(4, 8))
        monitor.end_step()
        assert len(runs) == 3 + (expected if pattern == ".*" else 1)
        monitor.detach()


def test_only_on_due_steps_and_with_no_hook_of_the_check_left_after_a_forward() -> None:
    model = Nested()
    reference = copy.deepcopy(model)
    runs: list[int] = []
    reference.end.register_forward_pre_hook(lambda *_: runs.append(1))
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    monitor = ModuleMonitor(model, every=2)
    monitor.set_reference_module(reference)
    RefinedCoordinateCheck(monitor, "rms", metric_regex="^end", every=4)
    monitor.attach(optimizer)
    for number in range(6):
        before = len(runs)
        loss = loss_of(model(batch(dtype=torch.float32)))
        for module in (model, reference):
            assert not [p for p in module.modules() if p is not model and len(p._forward_hooks) > 0]
        model.eval()(batch(dtype=torch.float32))
        with monitor.no_monitor():
            model.train()(batch(dtype=torch.float32))
        assert len(runs) - before == (2 if number % 4 == 0 else 0)
        loss.backward()
        optimizer.step()
        found = monitor.get_step_metrics()
        assert all(key.endswith("/rms") and "/end" in key for key in found)
        assert len(found) == (5 * 4 + 2 * 4 if number % 4 == 0 else 0)


# --- metrics ------------------------------------------------------------------------------------------------------------------


def test_rms_and_functions_of_the_terms() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3))
    monitor, optimizer = checked(model)
    RefinedCoordinateCheck(monitor, "rms")
    RefinedCoordinateCheck(monitor, "largest", lambda x: x.abs().amax(), r"^1$", "max")
    start = copy.deepcopy(model)
    step(model, optimizer, x := batch(dtype=torch.float32))
    before = copy.deepcopy(model).double()
    step(model, optimizer, x)
    found = monitor.get_step_metrics()
    for name, width in (("0", 5), ("1", 3)):
        assert found[f"{UPDATE}/{name}/rms"] == pytest.approx(found[f"{UPDATE}/{name}/l2norm"] / width**0.5, rel=1e-9)
    h = before[0](x.double())
    update = h @ (before[1].weight - start[1].weight.double()).T + before[1].bias - start[1].bias.double()
    assert found[f"{UPDATE}/1/largest"] == pytest.approx(update.abs().max().item(), rel=1e-5)
    assert f"{UPDATE}/0/largest" not in found
    with pytest.raises(ValueError, match="already registered"):
        RefinedCoordinateCheck(monitor)
    assert monitor.describe()[f"{UPDATE}/.*/l2norm"].startswith("Euclidean norm over the last dimension")


def test_keys_are_read_back_in_both_styles_and_go_to_the_run_directory(tmp_path: Path) -> None:
    for source in RCC_SOURCES:
        for name in ("h.0.fc", "h.0.fc.weight/W_t x_t"):
            key = Key(source, name, "l2norm")
            assert [parse_key(format_key(key, style), style) for style in ("name_first", "metric_first")] == [key, key]
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    sink = gradmon.testing.RecordingSink()
    monitor, optimizer = checked(model, run_dir=tmp_path / "run")
    monitor.add_sink(sink)
    for _ in range(2):
        step(model, optimizer, batch(dtype=torch.float32))
    found = monitor.get_step_metrics()
    monitor.detach()
    assert len(found) == 16
    run = gradmon.load_run(tmp_path / "run")
    assert run.record(1).metrics == found == sink.rows[1][1]
    assert run._reader.value(f"{UPDATE}/1.weight/W_t x_t/l2norm", 1) == found[f"{UPDATE}/1.weight/W_t x_t/l2norm"]


def test_wandb_takes_its_keys_for_values_of_layers() -> None:
    from torch_gradmon.sinks.wandb import _LAYER

    keys = [f"{source}/fc.weight/W_t x_t/l2norm" for source in RCC_SOURCES] + [f"{source}_l2norm/fc" for source in RCC_SOURCES]
    assert all(_LAYER.match(key) for key in keys)


# --- why there is nothing -----------------------------------------------------------------------------------------------------


class Refuses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() != 8:
            raise ZeroDivisionError("on purpose")
        return x


def test_reasons() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.Identity(), nn.Linear(8, 2), nn.Linear(2, 2))
    other = copy.deepcopy(model)
    del other[4]
    other[1] = nn.Linear(8, 8)
    other[2] = Refuses()
    other[3] = nn.Linear(8, 3)
    nn.init.zeros_(other[1].weight)
    nn.init.ones_(other[1].bias)
    monitor = ModuleMonitor(model)
    monitor.set_reference_module(other)
    check = RefinedCoordinateCheck(monitor)
    monitor.begin_step(0)
    with pytest.raises(ValueError, match=r"no forward of the model was seen in step 0; call refined_coordinate_check\(\) after"):
        check.refined_coordinate_check()
    with pytest.warns(gradmon.GradmonWarning, match="coordinate check of 2 failed.*ZeroDivisionError: on purpose") as caught:
        model(torch.randn(1, 8)).sum().backward()
        model(torch.randn(1, 8)).sum().backward()
    assert len(caught) == 1
    assert monitor.warning_counts() == {"check:2": 2}
    check.refined_coordinate_check()
    monitor.end_step()
    check.refined_coordinate_check()  # outside of a step
    missing = monitor.missing()
    assert missing[f"{UPDATE}/2/l2norm"] == "it could not be checked: ZeroDivisionError: on purpose"
    assert missing[f"{UPDATE}/3/l2norm"] == "it has another shape in the reference module, (1, 3)"
    assert missing[f"{INPUT}/4/l2norm"] == "the reference module has no such module, or called it less often"
    found = monitor.get_step_metrics()
    assert f"{PROPAGATED}/3/l2norm" in found  # of the reference alone
    assert {f"{INPUT}/{name}/l2norm" for name in "0123"} <= found.keys()
    assert not [key for key in (*found, *missing) if "root" in key]
    assert found.keys().isdisjoint(missing)


def test_an_embedding_has_the_update_term_only_and_containers_of_indices_no_input() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Embedding(5, 3)))
    monitor, optimizer = checked(model)
    for _ in range(2):
        step(model, optimizer, torch.tensor([[1, 2], [3, 1]]))
    found, missing = monitor.get_step_metrics(), monitor.missing()
    assert found.keys() == {f"{UPDATE}/0.0/l2norm", f"{UPDATE}/0/l2norm", f"{PROPAGATED}/0/l2norm"}
    assert found[f"{UPDATE}/0.0/l2norm"] == found[f"{UPDATE}/0/l2norm"] > 0 == found[f"{PROPAGATED}/0/l2norm"]
    assert missing[f"{PROPAGATED}/0.0/l2norm"] == "an embedding takes indices, which have no difference"
    assert missing[f"{INPUT}/0/l2norm"] == "a tensor of dtype torch.int64, which has no difference"


_BESIDE = pytest.param(
    "beside", marks=pytest.mark.skipif(not torch_modes.TELLS_EXPORT, reason="before torch 2.7 nothing in compiled graphs")
)


@pytest.mark.parametrize("way", ["removed", "raises", "compiled", _BESIDE, "in place"])
def test_without_a_reference_that_runs_or_with_compiled_parts_there_is_a_reason(way: str) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    called: Any = model
    if way in ("compiled", "beside"):
        called = torch.compile(model, backend="eager")
    elif way == "in place":
        model.compile(backend="eager")
    monitor, optimizer = checked(called if way == "compiled" else model, Refuses() if way == "raises" else "init")
    if way == "removed":
        monitor.remove_reference_module()
    for _ in range(2):
        if way == "raises" and monitor.current_step is None:
            with pytest.warns(gradmon.GradmonWarning, match="reference module failed"):
                step(called, optimizer, torch.zeros(2, 8))
        else:
            step(called, optimizer, torch.zeros(2, 8))
        assert monitor.get_step_metrics() == {}
        (reason,) = set(monitor.missing().values())
        assert {
            "removed": 'call monitor.set_reference_module("init") before training',
            "raises": "the reference module is off, because it raised ZeroDivisionError: on purpose",
        }.get(way, "inside torch.compile modules cannot be run once more") in reason
        assert len(monitor.missing()) == 8
    torch._dynamo.reset()


# --- what it leaves alone -----------------------------------------------------------------------------------------------------

SETTINGS = [
    {"family": family, "recompute": recompute, "micro_batches": 4}
    for family, recompute in [*((name, "") for name in BY_NAME), ("gpt_tied", "reentrant"), ("gpt_tied", "nonreentrant")]
    if loops.valid(family=family, recompute=recompute) and family != "complex"  # which is one module without parts
]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: str(loops.Setting(**setting)))
def test_training_is_the_same_bit_for_bit(setting: dict[str, Any]) -> None:
    monitors = []

    def watch(model: Any, optimizer: Any, scaler: Any) -> ModuleMonitor:
        monitor = ModuleMonitor(model, on_metric_error="raise", every=2)
        monitor.set_reference_module("init")
        RefinedCoordinateCheck(monitor)
        RefinedCoordinateCheck(monitor, "random", lambda x: torch.rand(()) + x.numel())
        monitors.append(monitor.attach(optimizer, scaler=scaler))
        return monitor

    plain, watched = (loops.train(**setting, steps=6, monitored=monitored) for monitored in (None, watch))
    assert loops.differences(plain, watched) == []
    rows = list(monitors[0].get_all_metrics().values())
    moved = [max(v for k, v in row.items() if k.count("/") == 2 and k.startswith(UPDATE) and k.endswith("2norm")) for row in rows]
    assert moved[0] <= (1e-6 if setting["family"] == "lstm" else 0)  # for which torch has another kernel without a graph
    assert min(moved[1:]) > 1e-6


def test_the_reference_stays_as_it_is_and_follows_the_mode_of_parts() -> None:
    torch.manual_seed(0)
    model, plain = (Conv() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    reference = copy.deepcopy(model).requires_grad_(False)
    saved = copy.deepcopy(reference.state_dict())
    attributes = [dict(vars(part)) for part in reference.modules()]
    monitor, optimizer = checked(model, reference)
    others = torch.optim.SGD(plain.parameters(), 0.3)
    for _ in range(3):
        x, state = batch(dtype=torch.float32), torch.get_rng_state()
        step(model, optimizer, x)
        torch.set_rng_state(state)
        step(plain, others, x)
    assert monitor.get_step_metrics()[f"{UPDATE}/net.1/l2norm"] > 0
    assert loops.differences(dict(plain.state_dict()), dict(model.state_dict())) == []
    assert loops.differences(dict(saved), dict(reference.state_dict())) == []
    assert [dict(vars(part)) for part in reference.modules()] == attributes
    model.net[1].eval()
    first, _ = checked(model)
    first.begin_step(0)
    model(batch(dtype=torch.float32))
    first.end_step()
    assert first.get_step_metrics()[f"{UPDATE}/net.1/l2norm"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_on_a_gpu_the_masks_are_the_same_and_a_reference_may_lie_elsewhere(where: str) -> None:
    torch.manual_seed(0)
    model = (Transformer() if where == "cuda" else Nested()).cuda()
    state = torch.cuda.get_rng_state()
    monitor, optimizer = checked(model, copy.deepcopy(model).to(where), on_metric_error="raise")
    loss = loss_of(model(batch(dtype=torch.float32).cuda()))
    torch.cuda.set_rng_state(state)
    loss.backward()
    optimizer.step()
    found = monitor.get_step_metrics()
    moved = [value for key, value in found.items() if key.count("/") == 2 and key.startswith((UPDATE, PROPAGATED, MOVED_INPUT))]
    assert len(moved) > 20
    assert max(moved) <= (0 if where == "cuda" else 1e-4)
