"""The gradient before clipping, in loops that nobody edited: right to 1e-6 against float64, or absent with a reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor

from . import oracle
from .families import BY_NAME, Family, TinyGPT
from .loops import differences

MLP = BY_NAME["mlp"]
clip_grad_norm_ = torch.nn.utils.clip_grad_norm_


def exact(model: nn.Module) -> float:
    """The norm of all gradients as they are now, in float64."""
    return oracle.values([p.grad for p in model.parameters() if p.grad is not None])["norm"]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)


def check(monitor: ModuleMonitor, before: float, after: float | None = None) -> None:
    values = monitor.get_step_metrics()
    assert values["gradmon/grad_norm"] == pytest.approx(before, rel=1e-6)
    if after is not None:
        assert values["gradmon/grad_norm_after_clip"] == pytest.approx(after, rel=1e-6)


def steps(family: Family, model: nn.Module, counts: Iterable[int]) -> Iterator[int]:
    """Accumulate the gradients of each step's micro-batches, then let the caller finish the step."""
    for step, count in enumerate(counts):
        for batch in family.batches(count, seed=step):
            (family.loss(model, batch) / count).backward()
        yield step
        model.zero_grad()


@pytest.mark.parametrize("counts", [[1] * 6, [4] * 4, [1, 4, 2, 3, 4, 1] * 3], ids=["one", "four", "changing"])
@pytest.mark.parametrize("name", ["mlp", "gpt_tied", "odd_sizes", "non_contiguous", "frozen_unused", "lstm"])
def test_the_norm_before_and_after_is_exact_and_what_clip_returned(name: str, counts: list[int]) -> None:
    family = BY_NAME[name]
    model = family.model()
    optimizer = sgd(model)
    monitor = gradmon.watch(model, optimizer)
    for step in steps(family, model, counts):
        before = exact(model)
        returned = clip_grad_norm_(model.parameters(), 0.03)
        after = exact(model)
        assert after < before
        optimizer.step()
        check(monitor, before, after)
        assert returned.item() == pytest.approx(before, rel=1e-6)
        assert monitor.current_step == step
        assert monitor.get_step_metrics()["gradmon/clip_fraction"] == 1.0


@pytest.mark.parametrize("name", ["bf16", "fp16", "complex", "sparse_embedding"])
def test_it_is_exact_where_torch_clips_roughly_or_not_at_all(name: str) -> None:
    family = BY_NAME[name]
    model = family.model()
    optimizer = sgd(model)
    monitor = gradmon.watch(model, optimizer)
    for _ in steps(family, model, [1, 3, 2]):
        before = exact(model)
        if name != "sparse_embedding":
            clip_grad_norm_(model.parameters(), 0.03)
        after = exact(model)
        optimizer.step()
        check(monitor, before, after if name != "sparse_embedding" else None)


@pytest.mark.parametrize("then", [[2, 2, 4, 6], [3, 1, 4], [5, 8, 4]], ids=str)
def test_after_a_hundred_equal_steps_fewer_micro_batches_give_the_right_value_or_none(then: list[int]) -> None:
    model = MLP.model()
    optimizer = sgd(model)
    monitor = gradmon.watch(model, optimizer)
    monitor.add_gradient_metric("norm", metric_regex="^0.weight$")
    seen = []
    for step in steps(MLP, model, [4] * 104 + then):
        before, layer = exact(model), model[0].weight.grad.double().norm().item()
        clip_grad_norm_(model.parameters(), before / 2)
        optimizer.step()
        values, missing = monitor.get_step_metrics(), monitor.missing()
        assert values["gradient/0.weight/norm"] == pytest.approx(layer / 2, rel=1e-5)
        for key, expected in {"gradmon/grad_norm": before, "gradient_before_clip/0.weight/norm": layer}.items():
            if key in values:
                assert values[key] == pytest.approx(expected, rel=1e-6)
            else:
                assert "monitor.clip_grad_norm_" in missing[key]
        seen.append("gradmon/grad_norm" in values)
        assert seen[-1] or step >= 104
        assert seen[-1] or "gradmon/spike_score" not in values
    assert seen[-1]  # it learns again


def test_every_layer_is_right_before_and_after() -> None:
    family = BY_NAME["gpt_tied"]
    model = family.model()
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = gradmon.watch(model, optimizer)
    for metric in oracle.BUILT_INS:
        monitor.add_gradient_metric(metric)
    for _ in steps(family, model, [1, 3]):
        stages = {"gradient_before_clip": {n: p.grad.clone() for n, p in model.named_parameters()}}
        clip_grad_norm_(model.parameters(), 0.03)
        stages["gradient"] = {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        values = monitor.get_step_metrics()
        for source, gradients in stages.items():
            for name, gradient in gradients.items():
                keys = {metric: f"{source}/{name}/{metric}" for metric in oracle.BUILT_INS}
                found = {metric: values[key] for metric, key in keys.items() if key in values}
                oracle.check(found, gradient, where=f"{source}/{name}")


def test_clipping_by_value() -> None:
    model = MLP.model()
    optimizer = sgd(model)
    monitor = gradmon.watch(model, optimizer)
    for _ in steps(MLP, model, [1, 2, 1]):
        before, largest = exact(model), max(p.grad.abs().max().item() for p in model.parameters())
        torch.nn.utils.clip_grad_value_(model.parameters(), largest / 4)
        after = exact(model)
        optimizer.step()
        check(monitor, before, after)
        assert monitor.get_step_metrics()["gradmon/grad_max"] == pytest.approx(largest, rel=1e-6)


# --- closures -----------------------------------------------------------------------------------------------------------------------


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p),
    "adamw_fused": lambda p: torch.optim.AdamW(p, fused=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4),
}


@pytest.mark.parametrize("by_keyword", [False, True], ids=["positional", "keyword"])
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_with_a_closure_it_is_the_norm_of_its_last_evaluation(name: str, micro_batches: int, by_keyword: bool) -> None:
    model = MLP.model()
    optimizer = OPTIMIZERS[name](model.parameters())
    monitor = gradmon.watch(model, optimizer, on_spike=None)  # L-BFGS diverges here
    for step in range(5):
        batches = MLP.batches(micro_batches, seed=step)
        norms = []

        def closure(batches: Any = batches, norms: list[Any] = norms) -> Tensor:
            optimizer.zero_grad()
            loss = torch.stack([MLP.loss(model, batch) for batch in batches]).mean()
            for batch in batches:
                (MLP.loss(model, batch) / len(batches)).backward()
            before = exact(model)
            clip_grad_norm_(model.parameters(), 0.03)
            norms.append((before, exact(model)))
            return loss.detach()

        optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
        assert len(norms) == 1 or name == "lbfgs"
        check(monitor, *norms[-1])
        assert monitor.current_step == step


# --- models ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [[1] * 4, [4, 4, 1, 3]], ids=["one", "changing"])
@pytest.mark.parametrize("recompute", ["reentrant", "nonreentrant"])
def test_with_activation_checkpointing(recompute: str, counts: list[int]) -> None:
    model = TinyGPT(recompute=recompute)
    optimizer = sgd(model)
    monitor = gradmon.watch(model, optimizer)
    for step in steps(BY_NAME["gpt_tied"], model, counts):
        before = exact(model)
        clip_grad_norm_(model.parameters(), 0.03)
        after = exact(model)
        optimizer.step()
        check(monitor, before, after)
        assert monitor.current_step == step


@pytest.mark.parametrize("watched", ["compiled", "inner"])
def test_with_a_compiled_model(watched: str) -> None:
    torch._dynamo.reset()
    inner = MLP.model()
    model = torch.compile(inner, backend="aot_eager")
    optimizer = sgd(inner)
    monitor = gradmon.watch(model if watched == "compiled" else inner, optimizer)
    monitor.add_gradient_metric("norm")
    for step in steps(MLP, model, [1, 3, 2]):
        before, layer = exact(inner), inner[0].weight.grad.double().norm().item()
        clip_grad_norm_(model.parameters(), 0.03)
        optimizer.step()
        check(monitor, before)
        assert monitor.get_step_metrics()["gradient_before_clip/0.weight/norm"] == pytest.approx(layer, rel=1e-6)
        assert monitor.current_step == step


# --- odd ways to come by a gradient ----------------------------------------------------------------------------------------------


def _absent(monitor: ModuleMonitor) -> None:
    keys = (
        "gradmon/grad_norm",
        "gradmon/grad_max",
        "gradmon/grad_nonfinite_count",
        "gradmon/grad_top_fraction",
        "gradmon/spike_score",
    )
    assert not monitor.get_step_metrics().keys() & set(keys)
    missing = monitor.missing()
    assert all("monitor.monitor_gradients(before_clip=True) once they are set, before any clip" in missing[key] for key in keys)
    assert monitor.get_step_metrics()["gradmon/grad_norm_after_clip"] == pytest.approx(0.03, rel=1e-4)


def test_gradients_assigned_by_hand_give_no_key_and_a_reason() -> None:
    model = MLP.model()
    optimizer = sgd(model)
    monitor = gradmon.watch(model, optimizer)
    for step, _ in enumerate(steps(MLP, model, [1, 0, 1, 0])):
        by_hand = step % 2 == 1
        if by_hand:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.5)
        before = exact(model)
        clip_grad_norm_(model.parameters(), 0.03)
        optimizer.step()
        assert monitor.current_step == step
        if by_hand:
            _absent(monitor)
        else:
            check(monitor, before)


def test_one_gradient_assigned_by_hand_leaves_no_sum_over_the_others() -> None:
    model = MLP.model()
    optimizer = sgd(model)
    monitor = gradmon.watch(model, optimizer)
    model[4].weight.requires_grad_(False)
    MLP.loss(model, MLP.batches(1)[0]).backward()
    model[4].weight.requires_grad_(True).grad = torch.ones_like(model[4].weight)
    clip_grad_norm_(model.parameters(), 0.03)
    optimizer.step()
    _absent(monitor)


def test_a_gradient_that_was_thrown_away_again_is_in_no_value() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)})
    optimizer = sgd(model)
    monitor = gradmon.watch(model, optimizer)
    monitor.add_gradient_metric("norm")
    x = torch.randn(4, 3)
    (model["a"](x) + model["b"](x)).sum().backward()
    optimizer.zero_grad()
    model["a"](x).square().sum().backward()
    before = exact(model)
    clip_grad_norm_(model.parameters(), 0.03)
    optimizer.step()
    check(monitor, before)
    assert not [key for key in monitor.get_step_metrics() if "/b." in key]


def test_parameters_that_only_an_earlier_evaluation_of_a_closure_reached_are_in_no_value() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)})
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    monitor = gradmon.watch(model, optimizer)
    monitor.add_gradient_metric("norm")
    monitor.add_gradient_metric("sum", torch.sum)
    x, norms = torch.randn(4, 3), []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model["a"](x) + (0 if norms else model["b"](x))).square().sum()
        loss.backward()
        norms.append(exact(model))
        return loss

    optimizer.step(closure)
    assert len(norms) == 2
    assert model["b"].weight.grad is None
    check(monitor, norms[-1])
    assert "gradmon/grad_norm_after_clip" not in monitor.get_step_metrics()
    assert not [key for key in monitor.get_step_metrics() if "/b." in key]


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")  # with create_graph=True, which is the point here
@pytest.mark.parametrize("kind", ["create_graph", "penalty_on_inputs", "penalty_on_parameters"])
def test_second_derivatives(kind: str) -> None:
    model = MLP.model()
    optimizer = sgd(model)
    monitor = gradmon.watch(model, optimizer)
    monitor.add_gradient_metric("norm", stages=("local", "before_clip"))
    for step in range(4):
        (x,) = MLP.batches(1, seed=step)[0]
        x.requires_grad_()
        loss = MLP.loss(model, (x,))
        if kind == "create_graph":
            parameters = list(model.parameters())
            loss.backward(create_graph=True, inputs=parameters)
            gradients = [p.grad for p in parameters]
            for parameter in parameters:
                parameter.grad = parameter.grad.detach().clone()
            sum(g.square().sum() for g in gradients).backward(inputs=parameters)
        else:
            into = [x] if kind == "penalty_on_inputs" else list(model.parameters())
            gradients = torch.autograd.grad(loss, into, create_graph=True)
            (loss + 0.1 * sum(g.square().sum() for g in gradients)).backward()
        before = exact(model)
        layer = model[0].weight.grad.double().norm().item()
        clip_grad_norm_(model.parameters(), 0.03)
        optimizer.step()
        optimizer.zero_grad()
        check(monitor, before)
        values = monitor.get_step_metrics()
        assert values["gradient_before_clip/0.weight/norm"] == pytest.approx(layer, rel=1e-6)
        if kind != "create_graph":  # a single backward pass, whatever autograd.grad went through
            assert values["gradient_local/0.weight/norm"] == pytest.approx(layer, rel=1e-6)
        assert monitor.current_step == step


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("half-way")


@pytest.mark.parametrize("zero_grad", [True, False])
def test_a_backward_pass_that_raises_half_way_leaves_no_trace(zero_grad: bool) -> None:
    model = MLP.model()
    optimizer = sgd(model)
    monitor = gradmon.watch(model, optimizer)
    for step in range(6):
        (x,) = MLP.batches(1, seed=step)[0]
        if step % 2:
            bad = model[2:](_Fails.apply(model[:2](x))).square().mean()
            with pytest.raises(RuntimeError, match="half-way"):
                bad.backward()
            assert model[4].weight.grad is not None
            assert model[0].weight.grad is None
            if zero_grad:
                optimizer.zero_grad()
        MLP.loss(model, (x,)).backward()
        before = exact(model)
        clip_grad_norm_(model.parameters(), 0.03)
        after = exact(model)
        optimizer.step()
        optimizer.zero_grad()
        check(monitor, before, after)
        assert monitor.current_step == step


# --- monitor.clip_grad_norm_ -----------------------------------------------------------------------------------------------------


def _with_gradients(spoil: float | None = None) -> nn.Module:
    model = MLP.model()
    MLP.loss(model, MLP.batches(1)[0]).backward()
    if spoil is not None:
        model[0].weight.grad[0, 0] = spoil
    return model


@pytest.mark.parametrize("spoil", [None, math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3, math.inf, 0.5])
@pytest.mark.parametrize("max_norm", [0.01, 1e3])
def test_the_method_clips_bit_for_bit_as_torch_does(max_norm: float, norm_type: float, spoil: float | None) -> None:
    ours, theirs = _with_gradients(spoil), _with_gradients(spoil)
    monitor = ModuleMonitor(ours, preset="minimal")
    monitor.begin_step(0)
    before = exact(ours)
    one = monitor.clip_grad_norm_(max_norm, norm_type)
    other = clip_grad_norm_(theirs.parameters(), max_norm, norm_type)
    monitor.end_step()
    assert differences([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()]) == []
    assert differences(one, other) == []
    if spoil is None:
        check(monitor, before, exact(ours) if max_norm < before else None)


@pytest.mark.parametrize("exactly", [False, True])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_the_method_raises_as_torch_does_and_leaves_the_gradients(norm_type: float, exactly: bool) -> None:
    model = _with_gradients(math.nan)
    gradients = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="so it cannot" if exactly else "error_if_nonfinite"):
        ModuleMonitor(model).clip_grad_norm_(0.01, norm_type, error_if_nonfinite=True, exact=exactly)
    assert differences(gradients, [p.grad for p in model.parameters()]) == []


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_exact_clips_by_the_exact_norm(norm_type: float) -> None:
    wide = nn.Linear(2000, 2000, bias=False)  # large enough for torch's float32 sum to be off by more than a rounding
    wide.weight.grad = torch.rand_like(wide.weight) + 1000.0
    truth = torch.linalg.vector_norm(wide.weight.grad.double(), norm_type).item()
    before = wide.weight.grad.double()
    returned = ModuleMonitor(wide).clip_grad_norm_(1.0, norm_type, exact=True)
    assert returned.item() == pytest.approx(truth, rel=1e-6)
    torch.testing.assert_close(wide.weight.grad.double(), before / (truth + 1e-6), rtol=1e-6, atol=0)


def test_the_method_clips_only_the_parameters_it_is_given() -> None:
    model = _with_gradients()
    untouched = model[0].weight.grad.clone()
    ModuleMonitor(model).clip_grad_norm_(0.01, parameters=model[4].parameters())
    assert model[0].weight.grad.equal(untouched)
    assert exact(model[4]) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("attached", [False, True])
def test_the_method_gives_both_norms_in_a_loop_written_by_hand_and_in_one_that_is_followed(attached: bool) -> None:
    model = MLP.model()
    optimizer = sgd(model)
    monitor = ModuleMonitor(model, preset="minimal")
    if attached:
        monitor.attach(optimizer)
    for step in steps(MLP, model, [1, 4, 2]):
        if not attached:
            assert monitor.begin_step(step)
        before = exact(model)
        monitor.clip_grad_norm_(0.03)
        after = exact(model)
        optimizer.step()
        if not attached:
            monitor.end_step()
        check(monitor, before, after)
        assert monitor.current_step == step


def test_the_method_measures_by_hand_assigned_gradients_too() -> None:
    model = MLP.model()
    optimizer = sgd(model)
    monitor = gradmon.watch(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    monitor.begin_step(0)
    before = exact(model)
    monitor.clip_grad_norm_(0.03)
    after = exact(model)
    optimizer.step()
    monitor.end_step()
    check(monitor, before, after)
