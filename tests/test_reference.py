"""A reference module beside the training: values, when it runs, why there is nothing, and what it leaves alone."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor
from torch_gradmon.capture.hooks import tensors_of

from . import loops, oracle
from .families import BY_NAME

# most loops here are of what is measured, and leave out what the audit of the loop misses
pytestmark = pytest.mark.filterwarnings("ignore:torch_gradmon. Gradients are not cleared")

Met = dict[str, list[Tensor]]


def distance(x: Tensor, reference: Tensor) -> Tensor:
    return (x.double() - reference.double()).abs()


# --- models: each takes x [batch, 6] and what it returns holds a tensor -------------------------------------------------------------


class Plain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.ReLU(inplace=True), nn.Linear(8, 3))


class Shared(nn.Module):
    """One layer that is called three times, with dropout in between."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(6, 6), nn.Dropout(0.3)
        self.same = self.layer

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.drop(self.layer(x).tanh())
        return x


class Containers(nn.Module):
    """Keyword arguments only; a tuple from one module, a dict with an integer tensor from another."""

    class Pair(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y, (F.dropout(y, 0.5, self.training), None)

    def __init__(self) -> None:
        super().__init__()
        self.pair = Containers.Pair(6, 4)

    def forward(self, *, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        y, (z, _) = self.pair(scale * x)
        return {"out": y + z, "best": y.argmax(-1)}


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.part, self.reentrant = nn.Linear(6, 6), Plain(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, self.first(x), use_reentrant=self.reentrant)


def _loss(output: Any) -> Tensor:
    return next(tensor for _, tensor in tensors_of(output, "")).float().square().mean()


def _inputs(model: nn.Module, size: int = 5) -> dict[str, Tensor]:
    return {"input" if isinstance(model, Plain) else "x": torch.randn(size, 6)}


def watched(model: nn.Module, reference: Any = "init", **options: Any) -> tuple[ModuleMonitor, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    monitor = ModuleMonitor(model, **options)
    if reference is not None:
        monitor.set_reference_module(reference)
    monitor.add_activation_difference_metric("norm")
    return monitor.attach(optimizer), optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, **inputs: Tensor) -> None:
    _loss(model(**(inputs or _inputs(model)))).backward()
    optimizer.step()
    optimizer.zero_grad()


def outputs(module: nn.Module, met: Met, **inputs: Tensor) -> Any:
    """The output of a forward; ``met`` receives what each module returns, under the names that keys have."""

    def hook(name: str) -> Callable[..., None]:
        def returned(module: nn.Module, args: Any, output: Any) -> None:
            for path, tensor in tensors_of(output, name or "[root module]"):
                met.setdefault(path, []).append(tensor.detach().clone())

        return returned

    handles = [part.register_forward_hook(hook(name)) for name, part in module.named_modules()]
    output = module(**inputs)
    for handle in handles:
        handle.remove()
    return output


# --- values -----------------------------------------------------------------------------------------------------------------------

MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain,
    "shared": Shared,
    "containers": Containers,
    "reentrant checkpoint": lambda: Recomputed(True),
    "checkpoint": lambda: Recomputed(False),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # the reference runs without gradients
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("by_hand", [False, True], ids=["attached", "by hand"])
@pytest.mark.parametrize("init", [True, False], ids=["init", "copy"])
@pytest.mark.parametrize("kind", MODELS)
def test_differences_are_those_to_a_reference_that_is_run_by_hand(kind: str, init: bool, by_hand: bool, autocast: bool) -> None:
    model = MODELS[kind]()
    truth = copy.deepcopy(model)
    monitor, optimizer = watched(model, "init" if init else copy.deepcopy(model))
    for metric in oracle.BUILT_INS[1:]:
        monitor.add_activation_difference_metric(metric)
    monitor.add_activation_difference_metric("distance", distance)
    for number in range(3):
        if by_hand:
            monitor.begin_step(number)
        own, theirs = {}, {}
        for size in (5, 2, 3):
            inputs, state = _inputs(model, size), torch.get_rng_state()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                with torch.no_grad():
                    outputs(copy.deepcopy(truth), theirs, **inputs)
                torch.set_rng_state(state)
                loss = _loss(outputs(model, own, **inputs))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if by_hand:
            monitor.end_step()
        found = monitor.get_step_metrics()
        own.pop("[root module].best", None)
        for path, tensors in own.items():
            differences = [one.double() - other.double() for one, other in zip(tensors, theirs[path], strict=True)]
            values = {k.rpartition("/")[2]: v for k, v in found.items() if k.startswith(f"activation_difference/{path}/")}
            mean = oracle.reals(differences).abs().mean().item()
            assert values.pop("distance") == pytest.approx(mean, rel=1e-6, abs=0)
            oracle.check(values, differences, path)
            assert (values["max"] > 0) == (number > 0)
        assert len(found) == 12 * len(own)
    assert monitor.missing() == {}


def test_parameters_are_compared_with_those_of_the_moment_of_the_call() -> None:
    model = Plain()
    monitor, optimizer = watched(model)
    monitor.add_parameter_difference_metric("norm")
    monitor.add_parameter_difference_metric("cosine", lambda p, q: F.cosine_similarity(p.flatten(), q.flatten(), dim=0))
    start = {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}
    for number in range(3):
        now = {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}
        step(model, optimizer)
        found = monitor.get_step_metrics()
        for name, own in now.items():
            assert found[f"parameter_difference/{name}/norm"] == pytest.approx((own - start[name]).norm().item(), rel=1e-6)
            cosine = F.cosine_similarity(own.flatten(), start[name].flatten(), dim=0).item()
            assert found[f"parameter_difference/{name}/cosine"] == pytest.approx(cosine, rel=1e-5)
        assert (found["parameter_difference/0.weight/norm"] == 0) == (number == 0)


def test_an_initial_copy_follows_the_mode_and_another_module_keeps_its_own() -> None:
    model = Plain().eval()
    torch.nn.init.uniform_(model[1].running_mean)
    other = copy.deepcopy(model)
    (first, optimizer), (second, _) = watched(model), watched(model, other)
    model.train()
    model[1].eval()
    for monitor in (first, second):
        monitor.begin_step(0)
    _loss(model(torch.randn(5, 6))).backward()
    for monitor in (first, second):
        monitor.end_step()
    zero = [key.split("/")[1] for key, value in first.get_step_metrics().items() if value == 0]
    assert zero == ["0", "1", "2", "3", "4", "[root module]"]
    assert second.get_step_metrics()["activation_difference/1/norm"] == 0  # both in eval mode
    assert second.get_step_metrics()["activation_difference/2/norm"] > 0  # a dropout that is off
    assert [part.training for part in other.modules()] == [False] * 6
    assert optimizer


# --- when it runs -----------------------------------------------------------------------------------------------------------------


def _counted(reference: nn.Module) -> tuple[nn.Module, list[int]]:
    runs: list[int] = []
    reference.register_forward_pre_hook(lambda *_: runs.append(1))
    return reference, runs


def test_it_runs_where_a_metric_is_due_and_nowhere_else() -> None:
    model = Plain()
    reference, runs = _counted(copy.deepcopy(model))
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    monitor = ModuleMonitor(model, every=2).attach(optimizer)
    monitor.add_activation_difference_metric("norm", metric_regex="^4$", every=4)
    monitor.add_parameter_difference_metric("norm", metric_regex="^0.weight$")
    monitor.set_reference_module(reference)
    for number in range(6):
        x = torch.randn(5, 6)
        with monitor.no_monitor():
            model(x)
        with torch.no_grad():
            model(x)
        model.eval()(x)
        model.train()
        before = len(runs)
        for _ in range(2):
            _loss(model(x)).backward()
        assert len(runs) - before == (2 if number % 4 == 0 else 0)
        # until a step has ended, a call in evaluation mode with gradients may be the first one of a training in that mode
        assert before == 1 + 2 * ((number + 3) // 4)
        optimizer.step()
        found = monitor.get_step_metrics().keys()
        assert found == ({"parameter_difference/0.weight/norm"} if number % 2 == 0 else set()) | (
            {"activation_difference/4/norm"} if number % 4 == 0 else set()
        )


@pytest.mark.parametrize("late", ["nothing", "metric", "reference", "both"])
def test_every_third_step_has_values_whenever_they_were_asked_for(late: str) -> None:
    model = Plain()
    monitor, optimizer = watched(model, None if late in ("reference", "both") else "init", every=3)
    if late in ("metric", "both"):
        monitor.detach()
        monitor = ModuleMonitor(model, every=3).attach(optimizer)
        if late == "metric":
            monitor.set_reference_module("init")
    seen = []
    for number in range(7):
        if number == 2 and late in ("metric", "both"):
            monitor.add_activation_difference_metric("norm")
        if number == 2 and late in ("reference", "both"):
            monitor.set_reference_module("init")
        step(model, optimizer)
        if found := monitor.get_step_metrics():
            assert len(found) == 6
            seen.append((number, found["activation_difference/4/norm"] == 0))
    assert seen == ([(0, True)] if late == "nothing" else []) + [(3, False), (6, False)]


# --- why there is nothing ---------------------------------------------------------------------------------------------------------


class Breaks(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        raise ZeroDivisionError("on purpose")


def test_reasons() -> None:
    model = Plain()
    other = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Dropout(0.4), nn.Identity(), nn.Linear(7, 3))
    del other[1]  # what came behind moves up
    other.add_module("3", nn.Linear(7, 3))
    monitor, optimizer = watched(model, other)
    monitor.add_parameter_difference_metric("norm", metric_regex="weight")
    step(model, optimizer)
    assert monitor.get_step_metrics().keys() == {"activation_difference/[root module]/norm"}
    shape = "it has another shape in the reference module, (5, 7)"
    assert monitor.missing() == {
        **{f"activation_difference/{name}/norm": shape for name in "012"},
        "activation_difference/3/norm": "it has another shape in the reference module, (5, 3)",
        "activation_difference/4/norm": "the reference module has no such output",
        "parameter_difference/0.weight/norm": "the reference module has another shape there, (7, 6)",
        "parameter_difference/1.weight/norm": "the reference module has no such parameter",
        "parameter_difference/4.weight/norm": "the reference module has no such parameter",
    }


def test_one_that_raises_is_off_after_one_warning_until_another_one_is_set() -> None:
    model = Plain()
    monitor, optimizer = watched(model, Breaks())
    with pytest.warns(
        gradmon.GradmonWarning, match=r"reference module failed and is off.*ZeroDivisionError: on purpose"
    ) as caught:
        for _ in range(3):
            before = model[0].weight.detach().clone()
            step(model, optimizer)
            assert not torch.equal(model[0].weight, before)
            assert monitor.get_step_metrics() == {}
            reason = "the reference module is off, because it raised ZeroDivisionError: on purpose"
            assert set(monitor.missing().values()) == {reason}
    assert len(caught) == 1
    assert monitor.warning_counts() == {"reference": 1}
    assert monitor.has_reference_module()
    monitor.set_reference_module("init")
    step(model, optimizer)
    assert set(monitor.get_step_metrics().values()) == {0.0}


def test_the_watched_model_is_no_reference() -> None:
    model = Plain()
    compiled = torch.compile(model, backend="eager")
    monitor = ModuleMonitor(compiled)
    for same in (model, compiled, torch.compile(model, backend="eager")):
        with pytest.raises(ValueError, match="the reference is the watched model itself"):
            monitor.set_reference_module(same)
    assert not monitor.has_reference_module()


# --- what it leaves alone ---------------------------------------------------------------------------------------------------------

SETTINGS = [
    {"family": family, "recompute": recompute, "scaler": scaler, "micro_batches": 4}
    for family, recompute in [*((name, "") for name in BY_NAME), ("gpt_tied", "reentrant"), ("gpt_tied", "nonreentrant")]
    for scaler in (False, True)
    if loops.valid(family=family, recompute=recompute, scaler=scaler)
]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: str(loops.Setting(**setting)))
def test_training_is_the_same_bit_for_bit(setting: dict[str, Any]) -> None:
    monitors = []

    def watch(model: Any, optimizer: Any, scaler: Any) -> ModuleMonitor:
        monitor = ModuleMonitor(model, on_metric_error="raise", every=2)
        monitor.set_reference_module("init")
        monitor.add_activation_difference_metric("rms")
        monitor.add_activation_difference_metric("random", lambda x, y: torch.rand(()) + x.numel() - y.numel())
        monitors.append(monitor.attach(optimizer, scaler=scaler))
        return monitor

    plain, watched = (loops.train(**setting, steps=6, monitored=monitored) for monitored in (None, watch))
    assert loops.differences(plain, watched) == []
    first, *later = monitors[0].get_all_metrics().values()
    largest = max(value for key, value in first.items() if key.endswith("/rms"))
    assert largest <= (1e-7 if setting["family"] == "lstm" else 0)  # for which torch has another kernel where no graph is built
    assert [max(value for key, value in found.items() if key.endswith("/rms")) > 1e-6 for found in later] == [True, True]


@pytest.mark.parametrize("init", [True, False], ids=["init", "copy"])
def test_buffers_and_saved_states_stay_as_they_are(init: bool) -> None:
    model, plain = Plain(), Plain()
    plain.load_state_dict(model.state_dict())
    reference = copy.deepcopy(model)
    before = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    monitor, optimizer = watched(model, "init" if init else reference)
    reference = monitor._runtime.captures.modules.reference.module if init else reference
    others = torch.optim.SGD(plain.parameters(), 0.3)
    for _ in range(3):
        x, state = torch.randn(5, 6), torch.get_rng_state()
        step(model, optimizer, input=x)
        torch.set_rng_state(state)
        step(plain, others, input=x)
    assert monitor.get_step_metrics()["activation_difference/1/norm"] > 0
    assert loops.differences(dict(plain.state_dict()), dict(model.state_dict())) == []
    assert loops.differences(before, dict(reference.state_dict())) == []
    assert not any(parameter.grad is not None for parameter in reference.parameters())


def test_the_copy_feeds_nothing_and_other_metrics_are_as_without_it() -> None:
    found = []
    for reference in (None, "init"):
        torch.manual_seed(4)
        model = Plain()
        monitor, optimizer = watched(model, reference)
        monitor.add_activation_metric("mean", of=("output", "input", "output_gradient"))
        calls: list[int] = []
        monitor.add_activation_metric("calls", lambda x, calls=calls: calls.append(1) or 1.0, metric_regex="^0$")
        for _ in range(2):
            step(model, optimizer)
        values = monitor.get_step_metrics()
        found.append(({k: v for k, v in values.items() if "difference" not in k}, len(calls)))
    assert len(values) > len(found[1][0])
    assert found[0] == found[1]
    assert found[0][1] == 2


def test_a_part_that_both_have_is_measured_in_the_model_only() -> None:
    backbone = nn.Linear(6, 6)
    model, reference = nn.Sequential(backbone, nn.Linear(6, 3)), nn.Sequential(backbone, nn.Linear(6, 3))
    monitor, optimizer = watched(model, reference)
    calls: list[int] = []
    monitor.add_activation_metric("calls", lambda x: calls.append(1) or 1.0, metric_regex="^0$")
    for number in range(2):
        step(model, optimizer, input=torch.randn(5, 6))
        values = monitor.get_step_metrics()
        assert len(calls) == number + 1
        assert values["activation_difference/0/norm"] == 0  # its values are those of now on both sides
        assert values["activation_difference/1/norm"] > 0


def test_model_and_reference_are_collected() -> None:
    model, reference = Plain(), Plain()
    monitor, optimizer = watched(model, reference)
    step(model, optimizer)
    monitor.detach()
    gone = [weakref.ref(module) for module in (model, reference)]
    del model, optimizer
    gc.collect()
    assert [module() is None for module in gone] == [True, False]
    monitor.remove_reference_module()
    del reference
    gc.collect()
    assert gone[1]() is None
    assert monitor.missing() == {}


def test_a_copy_of_the_watched_model_runs_no_reference_and_feeds_nothing() -> None:
    model = Plain()
    reference, runs = _counted(copy.deepcopy(model))
    monitor, optimizer = watched(model, reference)
    calls: list[int] = []
    monitor.add_activation_metric("calls", lambda x: calls.append(1) or 1.0, metric_regex="^0$")
    step(model, optimizer)
    twin = copy.deepcopy(model)
    for _ in range(2):
        _loss(twin(torch.randn(5, 6))).backward()
        step(model, optimizer)
    assert (len(runs), len(calls)) == (3, 3)


def test_removed_it_gives_nothing_and_detached_it_leaves_no_hooks() -> None:
    model = Plain()
    monitor, optimizer = watched(model)
    step(model, optimizer)
    assert len(monitor.get_step_metrics()) == 6
    monitor.remove_reference_module()
    step(model, optimizer)
    assert monitor.get_step_metrics() == {}
    assert len(monitor.missing()) == 6
    monitor.set_reference_module("init")
    step(model, optimizer)
    monitor.detach()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
