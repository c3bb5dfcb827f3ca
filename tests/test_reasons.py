"""What ``missing()`` says is true: each reason, the situation that brings it, and what must be said then."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor
from torch_gradmon.core.records import Metric, StepRecord
from torch_gradmon.step.model_index import ModelIndex
from torch_gradmon.step.record_builder import ReasonContext, Reasons

FROZEN = "it is frozen: its requires_grad is False"
UNUSED = "it had no gradient: the loss does not depend on it, or its gradient was removed"
NOT_APPLIED = "the step was not applied"
LATE = "it was asked for after the step had begun"
NEEDS_NONE = "it needs no gradient: nothing that it is computed from is trained"
NOT_CALLED = "the module was not called in a training forward that hooks can see"


class Net(nn.Module):
    """``low`` and ``up`` are a low-rank pair beside ``base``; ``spare`` is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.low, self.up = nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
        self.head, self.spare = nn.Linear(4, 2, bias=False), nn.Linear(4, 2, bias=False)
        self.embed = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(self.base(x) + self.up(self.low(x)))


@dataclass
class Loop:
    """One training, and what is asked of it."""

    model: Net = field(default_factory=Net)
    optimizers: list[Optimizer] = field(default_factory=list)
    monitor: ModuleMonitor = field(default_factory=ModuleMonitor)

    def begin(self, *, attached: bool = True, scaler: Any = None, kind: type[Optimizer] = AdamW) -> Loop:
        """With an optimizer of all parameters, unless there are others."""
        self.optimizers = self.optimizers or [kind(self.model.parameters(), lr=0.1)]
        self.monitor.set_module(self.model)
        for name in ("norm", "max"):
            self.monitor.add_gradient_metric(name, stages=("local", "before_clip", "after_clip"))
            self.monitor.add_parameter_metric(name)
            self.monitor.add_update_metric(name)
        self.monitor.add_update_metric("ratio")
        self.monitor.add_optimizer_metric("exp_avg_norm")
        self.monitor.add_activation_metric("norm", of=("output", "output_gradient", "input", "input_gradient"))
        if attached:
            self.monitor.attach(*self.optimizers, scaler=scaler)
        return self

    def backward(self, x: Tensor | None = None) -> None:
        self.model(torch.randn(3, 4) if x is None else x).square().mean().backward()

    def step(self, backward: bool = True) -> None:
        if backward:
            self.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def reasons(self, name: str) -> dict[str, str]:
        """By source and metric, of one parameter or module; sources whose keys are all there are left out."""
        found = {}
        for key, reason in self.monitor.missing().items():
            source, _, rest = key.partition("/")
            where, _, metric = rest.rpartition("/")
            if where == name:
                found[f"{source} {metric}"] = reason
        return found


def _of(names: str, metrics: str, reason: str) -> dict[str, str]:
    return {f"{source} {metric}": reason for source in names.split() for metric in metrics.split()}


GRADIENTS = "gradient gradient_before_clip gradient_local"
NO_UPDATE = "no attached optimizer has it"


def frozen_under_lora(loop: Loop) -> None:
    loop.model.base.requires_grad_(False)
    loop.optimizers = [AdamW([p for p in loop.model.parameters() if p.requires_grad], lr=0.1)]
    loop.begin().step()


def frozen_and_in_the_optimizer(loop: Loop) -> None:
    loop.model.base.requires_grad_(False)
    loop.begin().step()


def frozen_in_mid_run(loop: Loop) -> None:
    loop.begin().step()
    loop.step()
    loop.model.base.requires_grad_(False)
    loop.step()


def frozen_in_mid_run_with_zeros_as_gradients(loop: Loop) -> None:
    loop.begin().step()
    loop.backward()
    loop.optimizers[0].step()
    loop.optimizers[0].zero_grad(set_to_none=False)
    loop.model.base.requires_grad_(False)
    loop.step()


def frozen_within_the_step(loop: Loop) -> None:
    loop.begin()
    y = loop.model(torch.randn(3, 4))
    loop.model.base.requires_grad_(False)
    loop.model.base.weight.grad = None
    (y * 0 + loop.model.head(torch.ones(3, 4))).sum().backward()
    loop.model.base.weight.grad = None
    loop.step(backward=False)


def thawed_again(loop: Loop) -> None:
    loop.model.base.requires_grad_(False)
    loop.begin().step()
    loop.model.base.requires_grad_(True)
    loop.step()


def unused_in_the_forward(loop: Loop) -> None:
    loop.begin().step()


def in_no_optimizer(loop: Loop) -> None:
    loop.optimizers = [AdamW([p for name, p in loop.model.named_parameters() if "base" not in name], lr=0.1)]
    loop.begin().step()


def no_backward(loop: Loop) -> None:
    loop.begin()
    loop.model(torch.randn(3, 4))
    with pytest.warns(gradmon.core.errors.GradmonWarning, match="steps when all gradients are None") if False else _nothing():
        loop.optimizers[0].step()


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def taken_away_after_backward(loop: Loop) -> None:
    loop.begin()
    loop.backward()
    loop.model.base.weight.grad = None
    loop.step(backward=False)


def assigned_after_backward(loop: Loop) -> None:
    loop.begin()
    loop.backward()
    loop.model.spare.weight.grad = torch.ones(2, 4)
    loop.step(backward=False)


def its_optimizer_did_not_step(loop: Loop) -> None:
    first = AdamW(loop.model.base.parameters(), lr=0.1)
    last = AdamW([p for name, p in loop.model.named_parameters() if "base" not in name], lr=0.1)
    loop.optimizers = [first, last]
    loop.begin()
    loop.backward()
    last.step()


def refused_by_the_scaler(loop: Loop) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    loop.begin(scaler=scaler)
    scaler.scale(loop.model(torch.full((3, 4), float("inf"))).sum()).backward()
    scaler.step(loop.optimizers[0])
    scaler.update()


def without_momentum(loop: Loop) -> None:
    loop.begin(kind=SGD).step()


def zero_before_the_update(loop: Loop) -> None:
    torch.nn.init.zeros_(loop.model.base.weight)
    loop.begin().step()


def nothing_finite(loop: Loop) -> None:
    loop.optimizers = [SGD(loop.model.parameters(), lr=0.0)]
    loop.begin()
    loop.backward(torch.full((3, 4), float("nan")))
    for p in loop.model.parameters():
        if p.grad is not None:
            p.grad.fill_(0.0)
    loop.step(backward=False)


def by_hand_and_nothing_measured(loop: Loop) -> None:
    loop.begin(attached=False).monitor.begin_step(0)
    loop.step()
    loop.monitor.end_step()


def by_hand_before_clipping_only(loop: Loop) -> None:
    loop.begin(attached=False).monitor.begin_step(0)
    loop.backward()
    loop.monitor.monitor_gradients(before_clip=True)
    loop.step(backward=False)
    loop.monitor.end_step()


def by_hand_after_clipping_only(loop: Loop) -> None:
    loop.begin(attached=False).monitor.begin_step(0)
    loop.backward()
    loop.monitor.monitor_gradients()
    loop.monitor.monitor_parameters()
    loop.step(backward=False)
    loop.monitor.end_step()


def a_sample_of_updates(loop: Loop) -> None:
    loop.monitor = ModuleMonitor(update_regex="head")
    loop.begin().step()


def evaluated_only(loop: Loop) -> None:
    loop.begin().model.eval()
    with torch.no_grad():
        loop.model(torch.randn(3, 4))


def asked_for_within_the_step(loop: Loop) -> None:
    loop.begin()
    loop.backward()
    loop.monitor.add_gradient_metric("rms")
    loop.monitor.add_parameter_metric("own", lambda t: t.sum())
    loop.monitor.add_activation_metric("rms")
    loop.step(backward=False)


def on_every_second_step(loop: Loop) -> None:
    loop.monitor.add_parameter_metric("l1_norm", every=2)
    loop.begin().step()
    loop.step()


def sparse(loop: Loop) -> None:
    embedding = nn.Embedding(5, 4, sparse=True)
    loop.model.embed = nn.Sequential(embedding)  # type: ignore[assignment]
    loop.optimizers = [SGD(loop.model.parameters(), lr=0.1)]
    loop.begin()
    loop.backward(torch.tensor([1, 2]))
    loop.step(backward=False)


BY_HAND = {
    **_of("update", "norm max ratio", "updates are measured by hooks on the optimizer, which attach() installs"),
    "optimizer exp_avg_norm": "the optimizer's state is measured by hooks on it, which attach() installs",
    **_of("gradient_local", "norm max", "gradients of micro-batches are measured by hooks, which attach() installs"),
}
NOT_MEASURED = _of(
    "parameter", "norm max", "the parameters were not measured: attach the optimizer, or call monitor.monitor_parameters()"
)
AFTER = _of(
    "gradient",
    "norm max",
    "no gradient of it was measured: call monitor.monitor_gradients() between backward and the optimizer's step",
)
BEFORE = _of(
    "gradient_before_clip",
    "norm max",
    "no gradient of it was measured before clipping: clip with monitor.clip_grad_norm_, or call "
    "monitor.monitor_gradients(before_clip=True) before you clip",
)
SET_BY_HAND = (
    "no gradient before clipping was seen: no backward pass ran through the parameter's hook; if the loop sets gradients itself, call "
    "monitor.monitor_gradients(before_clip=True) once they are set, before any clip"
)
NO_FINITE = "the tensor has no finite elements"
LOCAL = {f"gradient_local {metric}": "no backward pass brought a gradient for it" for metric in ("norm", "max")}
NO_GRADIENTS = {
    "activation_gradient norm": "no backward pass that ends in parameters brought a gradient for its output in a training forward",
    "input_gradient norm": "no backward pass that ends in parameters brought a gradient for its input in a training forward",
}
NO_BACKWARD = {
    **_of(
        "gradient_before_clip",
        "norm max",
        "no gradient before clipping was seen: no backward pass ran through the parameter's hook",
    ),
    **_of("gradient", "norm max", "no gradient in this step, or nothing was measured when the optimizer stepped"),
}
#: The situation, whose reasons are looked at, and what must be said; a reason may go on.
TABLE: list[tuple[Callable[[Loop], None], str, dict[str, str]]] = [
    (
        frozen_under_lora,
        "base.weight",
        {
            **_of(GRADIENTS, "norm max", FROZEN),
            **_of("update", "norm max ratio", "it is frozen, and no attached optimizer has it"),
            "optimizer exp_avg_norm": "it is frozen, and no attached optimizer has it",
        },
    ),
    (frozen_under_lora, "up.weight", {}),
    (frozen_under_lora, "base", {}),
    (
        frozen_and_in_the_optimizer,
        "base.weight",
        {**_of(GRADIENTS, "norm max", FROZEN), "optimizer exp_avg_norm": "the optimizer keeps no such state for it"},
    ),
    (frozen_in_mid_run, "base.weight", _of(GRADIENTS, "norm max", FROZEN)),
    (frozen_in_mid_run_with_zeros_as_gradients, "base.weight", _of("gradient_local", "norm max", FROZEN)),
    (
        frozen_within_the_step,
        "base.weight",
        {
            **LOCAL,
            **_of("gradient gradient_before_clip", "norm max", UNUSED),
            "optimizer exp_avg_norm": "the optimizer keeps no such state for it",
        },
    ),
    (thawed_again, "base.weight", {}),
    (
        unused_in_the_forward,
        "spare.weight",
        {
            **_of("gradient gradient_before_clip", "norm max", UNUSED),
            **LOCAL,
            "optimizer exp_avg_norm": "the optimizer keeps no such state for it",
        },
    ),
    (unused_in_the_forward, "spare", {**_of("activation input", "norm", NOT_CALLED), **NO_GRADIENTS}),
    (unused_in_the_forward, "embed", {"input_gradient norm": NEEDS_NONE}),
    (in_no_optimizer, "base.weight", {**_of("update", "norm max ratio", NO_UPDATE), "optimizer exp_avg_norm": NO_UPDATE}),
    (no_backward, "base.weight", {**NO_BACKWARD, **LOCAL, "optimizer exp_avg_norm": "the optimizer keeps no such state for it"}),
    (
        taken_away_after_backward,
        "base.weight",
        {
            **_of("gradient", "norm max", "its gradient was gone when the optimizer stepped, or its optimizer did not step"),
            "optimizer exp_avg_norm": "the optimizer keeps no such state for it",
        },
    ),
    (assigned_after_backward, "spare.weight", {**_of("gradient_before_clip", "norm max", SET_BY_HAND), **LOCAL}),
    (
        its_optimizer_did_not_step,
        "base.weight",
        {
            **_of(
                "gradient gradient_before_clip",
                "norm max",
                "its optimizer did not step in this step; its gradient counts in the step that uses it",
            ),
            **_of("update", "norm max ratio", "its optimizer did not step"),
            "optimizer exp_avg_norm": "its optimizer did not step",
        },
    ),
    (
        refused_by_the_scaler,
        "head.weight",
        {
            **_of("update", "norm max ratio", NOT_APPLIED),
            "optimizer exp_avg_norm": NOT_APPLIED,
            **_of(GRADIENTS, "max", NO_FINITE),
        },
    ),
    (without_momentum, "base.weight", {"optimizer exp_avg_norm": "the optimizer keeps no such state for it"}),
    (zero_before_the_update, "base.weight", {"update ratio": "the norm of the parameter was zero or NaN before the update"}),
    (
        nothing_finite,
        "base.weight",
        {
            **_of("gradient_before_clip gradient_local", "max", NO_FINITE),
            "optimizer exp_avg_norm": "the optimizer keeps no such state for it",
        },
    ),
    (by_hand_and_nothing_measured, "base.weight", {**BY_HAND, **NOT_MEASURED, **AFTER, **BEFORE}),
    (by_hand_before_clipping_only, "base.weight", {**BY_HAND, **NOT_MEASURED, **AFTER}),
    (
        by_hand_before_clipping_only,
        "spare.weight",
        {**BY_HAND, **NOT_MEASURED, **AFTER, **_of("gradient_before_clip", "norm max", UNUSED)},
    ),
    (by_hand_after_clipping_only, "base.weight", {**BY_HAND, **BEFORE}),
    (by_hand_after_clipping_only, "spare.weight", {**BY_HAND, **BEFORE, **_of("gradient", "norm max", UNUSED)}),
    (a_sample_of_updates, "base.weight", _of("update", "norm max ratio", "update_regex='head' leaves it out")),
    (evaluated_only, "base.weight", {}),
    (asked_for_within_the_step, "base.weight", {"gradient rms": LATE, "gradient_before_clip rms": LATE, "parameter own": LATE}),
    (asked_for_within_the_step, "base", {"activation rms": LATE}),
    (on_every_second_step, "base.weight", {"parameter l1_norm": "measured on steps divisible by 2"}),
    (sparse, "embed.0.weight", {"optimizer exp_avg_norm": "the optimizer keeps no such state for it"}),
]


@pytest.mark.parametrize(("situation", "name", "said"), TABLE, ids=[f"{case.__name__}-{name}" for case, name, _ in TABLE])
def test_every_reason_is_that_of_its_situation(situation: Callable[[Loop], None], name: str, said: dict[str, str]) -> None:
    loop = Loop()
    situation(loop)
    found = loop.reasons(name)
    assert found.keys() == said.keys()
    assert {key: reason for key, reason in found.items() if not reason.startswith(said[key])} == {}
    loop.monitor.detach()


# --- values of layers, and of the whole model ------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["all", "blocks", "base|head"])
def test_layers_that_are_not_shown_have_a_reason(choice: str) -> None:
    loop = Loop(monitor=ModuleMonitor(layers=choice))
    loop.model.base.requires_grad_(False)
    loop.optimizers = [AdamW([p for p in loop.model.parameters() if p.requires_grad], lr=0.1)]
    loop.monitor.set_module(loop.model)
    loop.monitor._runtime.use_preset("standard")
    loop.monitor.attach(*loop.optimizers)
    loop.step()
    end = "" if choice == "blocks" else ".weight"
    missing = {key: reason for key, reason in loop.monitor.missing().items() if not key.startswith("gradmon/")}
    expected = {
        f"gradient_before_clip/base{end}/norm": FROZEN,
        f"update/base{end}/ratio": "it is frozen, and no attached optimizer has it",
    }
    if choice != "base|head":
        expected[f"gradient_before_clip/spare{end}/norm"] = UNUSED
    assert missing == expected
    loop.step()
    missing = {key: reason for key, reason in loop.monitor.missing().items() if not key.startswith("gradmon/")}
    assert missing == {key: reason for key, reason in expected.items() if "update" not in key}, "no update is measured here"


def _model_values(loop: Loop) -> dict[str, str]:
    found = loop.monitor.missing()
    return {key.removeprefix("gradmon/"): reason for key, reason in found.items() if key.startswith("gradmon/")}


def test_a_loop_by_hand_that_clips_and_does_not_measure_after_it_is_told_what_to_call() -> None:
    loop = Loop()
    loop.monitor.set_module(loop.model)
    loop.monitor._runtime.use_preset("standard")
    for step in range(2):
        loop.monitor.begin_step(step)
        loop.backward()
        loop.monitor.monitor_gradients(before_clip=True)
        torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3)
        loop.model.zero_grad()
        loop.monitor.end_step()
    told = _model_values(loop)
    for name in ("grad_norm_after_clip", "clip_fraction"):
        assert "call monitor.monitor_gradients() after you clip" in told[name]
    assert "monitor.monitor_parameters()" in told["param_norm"]


def test_a_gradient_that_is_taken_away_is_not_used_and_not_clipped() -> None:
    loop = Loop()
    loop.optimizers = [SGD(loop.model.parameters(), lr=0.1)]
    loop.monitor.set_module(loop.model)
    loop.monitor._runtime.use_preset("minimal")
    loop.monitor.attach(*loop.optimizers)
    loop.backward()
    torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3)
    loop.step(backward=False)
    assert "clip_fraction" in {key.removeprefix("gradmon/") for key in loop.monitor.get_step_metrics()}
    loop.backward()
    loop.model.base.weight.grad = None
    used = [p.grad.double().norm() for p in loop.model.parameters() if p.grad is not None]
    loop.step(backward=False)
    values = loop.monitor.get_step_metrics()
    assert values["gradmon/grad_norm_after_clip"] == pytest.approx(torch.stack(used).norm().item(), rel=1e-6)
    assert values["gradmon/clip_fraction"] == 0.5
    loop.backward()
    loop.model.zero_grad()
    loop.step(backward=False)
    told = _model_values(loop)
    assert told["clip_fraction"] == told["grad_norm_after_clip"] == "all gradients were gone when the optimizers stepped"


def test_gradients_that_are_gone_before_the_monitor_clips_are_known_from_the_backward_pass() -> None:
    loop = Loop()
    loop.optimizers = [SGD(loop.model.parameters(), lr=0.1)]
    loop.monitor.set_module(loop.model)
    loop.monitor._runtime.use_preset("minimal")
    loop.monitor.attach(*loop.optimizers)
    loop.backward()
    norm = torch.stack([p.grad.double().norm() for p in loop.model.parameters() if p.grad is not None]).norm()
    loop.model.zero_grad()
    loop.monitor.clip_grad_norm_(1.0)
    loop.step(backward=False)
    assert loop.monitor.get_step_metrics()["gradmon/grad_norm"] == pytest.approx(norm.item(), rel=1e-6)


def test_a_rule_that_gives_no_score_is_not_said_to_warm_up() -> None:
    loop = Loop()
    loop.optimizers = [SGD(loop.model.parameters(), lr=0.1)]
    loop.monitor.set_module(loop.model)
    loop.monitor._runtime.use_preset("minimal")
    loop.monitor.add_detector(gradmon.SpikeDetector(lambda value: None))
    loop.monitor.attach(*loop.optimizers)
    loop.step()
    assert _model_values(loop)["spike_score"].startswith("the detector's rule gave no score")


def test_micro_batches_of_a_loop_by_hand_are_not_said_to_be_spread_over_ranks() -> None:
    loop = Loop()
    loop.monitor.set_module(loop.model)
    loop.monitor.add_micro_batch_metrics()
    loop.monitor.begin_step(0)
    loop.backward()
    loop.monitor.end_step()
    assert all(reason.startswith("no gradient of a micro-batch was seen") for reason in _model_values(loop).values())


def test_parameters_that_are_spread_over_ranks_have_no_gradients_of_micro_batches() -> None:
    inventory = ModelIndex(Net())
    inventory.spread.add("base.weight")
    situation = ReasonContext(inventory, {}, (), (), True, {})
    sources = ("gradient_local", "update")
    reasons = Reasons(StepRecord(0, 0.0, True, {}), dict.fromkeys(sources, inventory.names), {}, situation, None)
    norm = Metric("norm", "gradient_local", re.compile("weight"), shown=False)
    assert "only once they are reduced" in reasons._why(norm, "base.weight")
    assert reasons._why(norm, "low.weight") == "no backward pass brought a gradient for it"
    # after detach() nobody knows which optimizers there were
    assert reasons._why(replace(norm, source="update"), "low.weight") == "no attached optimizer changes it"


def test_values_of_the_model_that_are_asked_for_within_a_step_are_said_to_be() -> None:
    loop = Loop(monitor=ModuleMonitor(layers="all"))  # which measures squares, and no extremes
    loop.optimizers = [SGD(loop.model.parameters(), lr=0.1)]
    loop.monitor.set_module(loop.model)
    loop.monitor.attach(*loop.optimizers)
    loop.backward()
    loop.monitor._runtime.use_preset("minimal")
    loop.monitor.add_model_metric("grad_mean")
    loop.step(backward=False)
    told = _model_values(loop)
    assert {name: told[name] for name in ("grad_max", "grad_mean")} == {"grad_max": LATE, "grad_mean": LATE}
    loop.step()
    assert not _model_values(loop).keys() & {"grad_max", "grad_mean"}


def test_a_module_that_does_not_run_beside_something_compiled() -> None:
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    loop = Loop()
    loop.optimizers = [SGD(loop.model.parameters(), lr=0.1)]
    loop.monitor.set_module(loop.model)
    loop.monitor.add_activation_metric("norm", metric_regex="spare")
    loop.monitor.attach(*loop.optimizers)
    with pytest.warns(gradmon.GradmonWarning, match="none of these modules ran, or torch.compile traced the model"):
        loop.step()
    assert loop.monitor.missing()["activation/spare/norm"].startswith(
        "no hook on a module was called: none of these modules ran, or"
    )


def test_a_module_that_is_never_called_is_not_said_to_be_in_evaluation() -> None:
    """A call in evaluation mode, with gradients, may begin a step of which no hook sees the forward; here it begins none."""
    loop = Loop().begin()
    for _ in range(3):
        loop.step()
        assert loop.monitor.missing()["activation/spare/norm"] == NOT_CALLED
        loop.model.eval()
        loop.model(torch.randn(3, 4))
        loop.model.train()


class Pair(nn.Module):
    """Two layers, whose outputs it returns together."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.other(x)


def test_of_a_container_whose_tensors_are_all_nan_it_is_said_that_they_are() -> None:
    pair = Pair()
    model = nn.Sequential(nn.Linear(4, 4), pair)
    monitor = ModuleMonitor(model)
    monitor.add_activation_metric("max", of=("output", "output_gradient"))
    optimizer = SGD(model.parameters(), lr=0.1)
    monitor.attach(optimizer)
    for step in range(2):
        one, other = model(torch.randn(3, 4))
        ((one * other).sum() * float("nan")).backward()
        optimizer.step()
        told = monitor.missing()
        assert told["activation_gradient/1/max"] == "the tensor has no finite elements"
        assert told.get("activation/1/max") == (None if step == 0 else "the tensor has no finite elements")


def test_parameters_that_are_nan_are_not_said_to_be_zero() -> None:
    model = nn.Linear(4, 2)
    monitor = ModuleMonitor(model, layers="all", preset="standard")
    monitor.add_update_metric("ratio")
    optimizer = SGD(model.parameters(), lr=0.1)
    monitor.attach(optimizer, start_step=10)
    torch.nn.init.constant_(model.weight, float("nan"))
    torch.nn.init.constant_(model.bias, float("nan"))
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    told = monitor.missing()
    assert told["update/weight/ratio"] == "the norm of the parameter was zero or NaN before the update"
    assert told["gradmon/update_ratio"] == "the norm of the updated parameters was nan before the update"
    assert told["gradmon/update_ratio_p10"] == "no updated parameter of two or more dimensions has a norm above zero"


def test_where_parts_are_called_by_themselves_the_reference_is_said_not_to_run() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    monitor = ModuleMonitor(model)
    monitor.add_activation_difference_metric("norm")
    monitor.set_reference_module("init")
    optimizer = SGD(model.parameters(), lr=0.1)
    monitor.attach(optimizer)
    for by_parts in (True, False, True):
        x = torch.randn(3, 4)
        (model[1](model[0](x)) if by_parts else model(x)).sum().backward()
        optimizer.step()
        told = monitor.missing()
        by_itself = "the reference module runs when the whole model is called, but here a part of it was called directly"
        assert told.get("activation_difference/0/norm") == (by_itself if by_parts else None)


def test_after_a_live_change_what_is_missing_in_the_last_step_is_what_was_asked_of_it() -> None:
    loop = Loop()
    loop.optimizers = [SGD(loop.model.parameters(), lr=0.1)]
    loop.monitor.set_module(loop.model)
    loop.monitor._runtime.use_preset("standard")
    loop.monitor.attach(*loop.optimizers)
    loop.step()
    loop.monitor.set_detail(preset="minimal", steps=1)
    loop.step()
    values = loop.monitor.get_step_metrics()
    assert "gradmon/param_norm" not in values
    assert not [name for name in _model_values(loop) if name.startswith(("param_", "update_"))]
    loop.step()
    assert "update_norm" in _model_values(loop)


def test_all_gradients_were_gone_also_where_none_was_seen_before_clipping() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer)
    optimizer.step()
    assert monitor.missing()["gradmon/clip_fraction"] == "all gradients were gone when the optimizers stepped"
    monitor.detach()


def test_after_a_step_that_was_not_monitored_that_is_the_reason() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer, every=2)
    monitor.add_gradient_metric("norm")
    assert monitor.last_record is None
    for step in range(4):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        told = monitor.missing()
        if step % 2:
            assert monitor.get_step_metrics() == {}
            assert {"gradmon/grad_norm", "gradmon/clip_fraction", "gradient/weight/norm"} <= told.keys()
            assert set(told.values()) == {f"step {step} was not monitored"}
        else:
            assert "gradmon/grad_norm" not in told
            assert told["gradmon/clip_fraction"] == f"nothing clipped in {1 + step // 2} step{'s' * (step > 1)}"
    monitor.detach()


def test_a_built_in_that_a_tensor_cannot_have_is_named_with_the_shape() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer)
    monitor.add_parameter_metric("spectral_norm")
    monitor.add_parameter_metric("mine", lambda tensor: None)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    told = monitor.missing()
    size = "largest singular value of the parameter as a matrix; of a stack of matrices the largest one"
    assert told["parameter/bias/spectral_norm"] == f"it is not defined for a tensor of shape [2]: {size}"
    assert told["parameter/bias/mine"] == "its function returned nothing"
    assert "parameter/weight/spectral_norm" not in told
    monitor.detach()
