"""Every number that a monitored training run gives, against clones taken by hand in the loop and measured the naive way."""

from __future__ import annotations

import copy
import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import torch_gradmon as gradmon
from tests import oracle
from tests.families import BY_NAME, FAMILIES, Family
from torch_gradmon import ModuleMonitor, SpikeDetector
from torch_gradmon.spikes import MedianMad

Tensors = dict[str, Tensor]


@dataclass
class Seen:
    """One step as seen by hand, beside what the monitor said of it."""

    before_clip: Tensors
    gradients: Tensors
    parameters: Tensors
    after: Tensors
    metrics: dict[str, float]
    missing: dict[str, str]

    @property
    def updates(self) -> Tensors:
        wide = {name: torch.complex128 if p.is_complex() else torch.float64 for name, p in self.parameters.items()}
        return {name: self.after[name].to(wide[name]) - p.to(wide[name]) for name, p in self.parameters.items()}


def clip(model: nn.Module, max_norm: float) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if any(g.is_sparse for g in gradients):  # torch's clip refuses these
        for gradient in gradients:
            gradient.mul_(0.5)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def _parameters(model: nn.Module) -> Tensors:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _gradients(model: nn.Module) -> Tensors:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def train(
    family: Family,
    model: nn.Module,
    optimizer: Optimizer,
    monitor: ModuleMonitor,
    steps: int = 3,
    micro_batches: int = 1,
    max_norm: float | None = None,
    scale: Callable[[int], float] = lambda step: 1.0,
) -> list[Seen]:
    """Train and take clones; ``scale`` multiplies the loss of a step."""
    seen, batches = [], iter(family.batches(steps * micro_batches))
    for step in range(steps):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            (family.loss(model, next(batches)) * scale(step)).backward()
        before_clip = _gradients(model)
        if max_norm is not None:
            clip(model, max_norm)
        gradients, parameters = _gradients(model), _parameters(model)
        optimizer.step()
        metrics, missing = monitor.get_step_metrics(), monitor.missing()
        seen.append(Seen(before_clip, gradients, parameters, _parameters(model), metrics, missing))
    return seen


def norm(tensors: Tensor | Tensors) -> float:
    return oracle.values(tensors if isinstance(tensors, Tensor) else list(tensors.values()))["norm"]


def watched(family: Family, **arguments: object) -> tuple[nn.Module, SGD, ModuleMonitor]:
    model = family.model()
    optimizer = SGD(model.parameters(), lr=0.05)
    return model, optimizer, ModuleMonitor(model, on_metric_error="raise", **arguments)


def check_tables(metrics: dict[str, float], sources: dict[str, Tensors], also: dict[str, float], where: str) -> None:
    """``metrics`` holds every built-in of all these tensors and ``also``, right, and nothing else."""
    expected = set(also)
    for source, tensors in sources.items():
        for name, tensor in tensors.items():
            own = f"{source}/{name}/"
            there = {m: metrics[own + m] for m in oracle.BUILT_INS if own + m in metrics}
            oracle.check(there, tensor, where=f"{where} {own}")
            expected |= {own + metric for metric in there}
    assert metrics.keys() == expected, where
    for key, value in also.items():
        assert type(metrics[key]) is float
        assert metrics[key] == pytest.approx(value, rel=1e-6, abs=1e-300), f"{where} {key}"


@pytest.mark.parametrize("max_norm", [None, 0.01], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("micro_batches", [1, 4], ids=["one backward", "four backwards"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_key_of_every_family(family: Family, micro_batches: int, max_norm: float | None) -> None:
    model, optimizer, monitor = watched(family)
    for metric in oracle.BUILT_INS:
        monitor.add_gradient_metric(metric)
        monitor.add_parameter_metric(metric)
        monitor.add_update_metric(metric)
    monitor.add_update_metric("ratio")
    monitor.attach(optimizer)
    for step, seen in enumerate(train(family, model, optimizer, monitor, micro_batches=micro_batches, max_norm=max_norm)):
        sources = {
            "gradient_before_clip": seen.before_clip,
            "gradient": seen.gradients,
            "parameter": seen.parameters,
            "update": seen.updates,
        }
        ratios = {f"update/{k}/ratio": norm(u) / norm(p) for k, u in seen.updates.items() if norm(p := seen.parameters[k]) > 0}
        check_tables(seen.metrics, sources, ratios, f"step {step}")
        asked = {
            f"{s}/{k}/{m}" for s in sources for k in seen.parameters for m in (*oracle.BUILT_INS, *["ratio"] * (s == "update"))
        }
        assert seen.missing.keys() == asked - seen.metrics.keys()
        if max_norm is not None:  # the two stages must differ, or this would prove nothing
            assert norm(seen.gradients) < 0.9 * norm(seen.before_clip)


# --- optimizer, reference, local gradients, activations ----------------------------------------------------------------------


def _cosine(a: Tensor, b: Tensor) -> float:
    x, y = oracle.reals(a), oracle.reals(b)
    return float((x * y).sum() / (x.square().sum() * y.square().sum()).sqrt())


@pytest.mark.parametrize("family", ["mlp", "gpt_tied", "frozen_unused", "bf16", "conv_batchnorm"])
@pytest.mark.parametrize(
    ("make", "first", "second"),
    [
        (lambda p: AdamW(p, lr=1e-3), "exp_avg", "exp_avg_sq"),
        (lambda p: SGD(p, lr=0.01, momentum=0.9), "momentum_buffer", None),
        (lambda p: torch.optim.RMSprop(p, lr=0.01), None, "square_avg"),
        (lambda p: SGD(p, lr=0.01), None, None),
    ],
    ids=["AdamW", "SGD momentum", "RMSprop", "SGD"],
)
def test_the_optimizers_state(family: str, make: Callable, first: str | None, second: str | None) -> None:
    model = BY_NAME[family].model()
    optimizer, monitor = make(model.parameters()), ModuleMonitor(model, on_metric_error="raise")
    for metric in ("exp_avg_norm", "exp_avg_sq_norm", "grad_momentum_cosine", "second_moment_ratio"):
        monitor.add_optimizer_metric(metric)
    monitor.attach(optimizer)
    for _ in range(3):
        (seen,) = train(BY_NAME[family], model, optimizer, monitor, steps=1, max_norm=0.1)
        expected = {}
        for name, p in model.named_parameters():
            state = optimizer.state.get(p, {})
            if first and first in state:
                expected[f"optimizer/{name}/exp_avg_norm"] = norm(state[first])
                if norm(p.grad) > 0:
                    expected[f"optimizer/{name}/grad_momentum_cosine"] = _cosine(p.grad, state[first])
            if second and second in state:
                expected[f"optimizer/{name}/exp_avg_sq_norm"] = norm(state[second])
                if second == "exp_avg_sq" and not p.is_complex():
                    expected[f"optimizer/{name}/second_moment_ratio"] = _out_of_step(p.grad, state, 0.999, 1e-8)
        check_tables(seen.metrics, {}, expected, family)


def _out_of_step(gradient: Tensor, state: dict, beta: float, eps: float) -> float:
    """The formula, in float64."""
    g, v = oracle.reals(gradient), oracle.reals(state["exp_avg_sq"]) / (1 - beta ** float(state["step"]))
    return float((g.square() / torch.maximum(v, torch.full_like(v, eps**2))).mean().sqrt())


def test_a_cosine_with_a_zero_gradient_does_not_exist_and_is_absent_with_a_reason() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    nn.init.zeros_(model[1].weight)  # as in LoRA: the first layer's gradient is exactly zero at the first step
    optimizer, monitor = AdamW(model.parameters()), ModuleMonitor(model, on_metric_error="raise")
    monitor.add_optimizer_metric("grad_momentum_cosine")
    monitor.attach(optimizer)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert monitor.get_step_metrics().keys() == {f"optimizer/1.{p}/grad_momentum_cosine" for p in ("weight", "bias")}
    assert monitor.missing().keys() == {f"optimizer/0.{p}/grad_momentum_cosine" for p in ("weight", "bias")}


@pytest.mark.parametrize("family", ["mlp", "gpt_tied", "complex", "bf16", "odd_sizes", "non_contiguous"])
def test_differences_to_a_reference_module(family: str) -> None:
    model, optimizer, monitor = watched(BY_NAME[family])
    reference = copy.deepcopy(model)
    monitor.set_reference_module(reference)
    for metric in oracle.BUILT_INS:
        monitor.add_parameter_difference_metric(metric)
    monitor.add_parameter_difference_metric("furthest", lambda now, then: (now - then).abs().max() if now.numel() else None)
    monitor.attach(optimizer)
    start = _parameters(reference)
    for seen in train(BY_NAME[family], model, optimizer, monitor):
        moved = {name: p.detach() for name, p in Seen({}, {}, start, seen.parameters, {}, {}).updates.items()}
        own = {
            f"parameter_difference/{name}/furthest": float((seen.parameters[name] - start[name]).abs().max())
            for name, p in start.items()
            if p.numel()
        }
        check_tables(seen.metrics, {"parameter_difference": moved}, own, family)


LOCAL = ["mlp", "conv_batchnorm", "frozen_unused", "bf16", "odd_sizes"]


@pytest.mark.parametrize(
    ("family", "penalty"),
    [*itertools.product(LOCAL, [False, True]), ("gpt_tied", False), ("sparse_embedding", False)],  # no second derivatives
)
def test_local_gradients_are_those_of_the_backward_passes_merged(family: str, penalty: bool) -> None:
    model, optimizer, monitor = watched(BY_NAME[family])
    for metric in oracle.BUILT_INS:
        monitor.add_gradient_metric(metric, stages="local")
    monitor.add_gradient_metric("first", lambda g: g.abs().sum(), metric_aggregation_fn="max", stages="local")
    monitor.attach(optimizer)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for step in range(3):
        optimizer.zero_grad()
        came: dict[str, list[Tensor]] = {}
        for batch in BY_NAME[family].batches(3, seed=step):
            loss = BY_NAME[family].loss(model, batch)
            if penalty:
                slopes = torch.autograd.grad(loss, list(parameters.values()), create_graph=True, allow_unused=True)
                loss = loss + 0.1 * sum(slope.square().sum() for slope in slopes if slope is not None)
            # asked for by hand, gradients pass the same hooks, but are accumulated nowhere
            by_hand = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
            for name, gradient in zip(parameters, by_hand, strict=True):
                came.setdefault(name, []).extend([] if gradient is None else [gradient.detach().clone()])
            loss.backward()
        optimizer.step()
        there = {name: torch.cat([oracle.reals(g) for g in gradients]) for name, gradients in came.items() if gradients}
        own = {f"gradient_local/{k}/first": max(float(g.abs().sum()) for g in came[k]) for k, x in there.items()}
        check_tables(monitor.get_step_metrics(), {"gradient_local": there}, own, f"step {step}")


def test_activations_are_those_of_the_training_forwards_merged_by_elements() -> None:
    model, optimizer, monitor = watched(BY_NAME["mlp"])
    outputs: dict[str, list[Tensor]] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda m, args, out, name=name: outputs.setdefault(name or "[root module]", []).append(out.detach().clone())
        )
    for metric in oracle.BUILT_INS:
        monitor.add_activation_metric(metric)
    monitor.attach(optimizer)
    for _ in range(3):
        outputs.clear()
        for size in (8, 3, 1):
            model(torch.randn(size, 10)).square().mean().backward()
        taken = {name: torch.cat([x.reshape(-1) for x in several]) for name, several in outputs.items()}
        with torch.no_grad():
            model(torch.full((4, 10), 100.0))
        model.eval()(torch.full((4, 10), 100.0))
        model.train()
        optimizer.step()
        optimizer.zero_grad()
        check_tables(monitor.get_step_metrics(), {"activation": taken}, {}, "activations")


# --- whole-model values ------------------------------------------------------------------------------------------------------


def _summary_by_hand(seen: Seen, trainable: set[str], step: int) -> dict[str, float]:
    """What the whole-model values must be, of those that one step's clones tell."""
    x = oracle.reals(list(seen.before_clip.values()))
    squares = {name: oracle.reals(g).square().sum().item() for name, g in seen.before_clip.items()}
    expected = {
        "grad_norm": x.square().sum().sqrt().item(),
        "grad_max": x.abs().max().item(),
        "grad_nonfinite_count": 0.0,
        "grad_top_fraction": max(squares.values()) / sum(squares.values()),
        "param_norm": norm({name: seen.parameters[name] for name in trainable}),
        "steps_not_applied": 0.0,
    }
    if step % 10 == 0:
        updates = {name: seen.updates[name] for name in trainable}
        ratios = sorted(
            norm(u) / norm(seen.parameters[k]) for k, u in updates.items() if u.dim() >= 2 and norm(seen.parameters[k])
        )
        deciles = statistics.quantiles(ratios, n=10, method="inclusive") if len(ratios) > 1 else ratios
        expected |= {
            "update_norm": norm(updates),
            "update_ratio": norm(updates) / expected["param_norm"],
            "update_ratio_p10": deciles[0],
            "update_ratio_p90": deciles[-1],
        }
    return {f"gradmon/{name}": value for name, value in expected.items()}


@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("family", ["mlp", "gpt_tied", "frozen_unused", "lstm", "bf16", "non_contiguous"])
def test_the_fourteen_whole_model_values(family: str, max_norm: float | None) -> None:
    model, optimizer, monitor = watched(BY_NAME[family])
    monitor.add_detector(SpikeDetector(MedianMad(warmup=4)))  # the standard one would still be warming up
    monitor._runtime.use_preset("standard")
    monitor.attach(optimizer)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    shares = []
    run = train(
        BY_NAME[family], model, optimizer, monitor, 12, max_norm=max_norm, scale=lambda step: 10.0 if step % 3 == 1 else 1e-3
    )
    for step, seen in enumerate(run):
        expected = _summary_by_hand(seen, trainable, step)
        if max_norm is not None:
            shares.append(norm(seen.gradients) < norm(seen.before_clip) * 0.999)
            expected |= {"gradmon/grad_norm_after_clip": norm(seen.gradients), "gradmon/clip_fraction": sum(shares) / len(shares)}
        metrics = dict(seen.metrics)
        assert metrics.pop("gradmon/overhead_fraction") > 0
        assert math.isfinite(metrics.pop("gradmon/spike_score", math.nan)) == (step >= 4)
        check_tables(metrics, {}, expected, f"step {step}")
        every = {f"gradmon/{key}" for key in gradmon.step.planner.PRESETS["standard"].keys}
        assert len(every) == 14
        assert seen.missing.keys() == every - seen.metrics.keys()
    assert max_norm is None or 0 < sum(shares) < len(shares)


@pytest.mark.filterwarnings("ignore:.*the spike detector of grad_norm has nothing to judge")
def test_the_monitors_share_of_the_time_is_never_above_the_whole() -> None:
    model, optimizer, monitor = watched(BY_NAME["mlp"])
    monitor._runtime.use_preset("standard")
    monitor.attach(optimizer)
    for _ in range(100):
        for p in model.parameters():
            p.grad = torch.ones_like(p)  # a loop in which the monitor has nearly all the time
        optimizer.step()
        assert 0 < monitor.get_step_metrics()["gradmon/overhead_fraction"] <= 100 + 1e-6


def test_the_clip_values_leave_the_dashboard_when_nothing_clipped_in_a_hundred_steps() -> None:
    model, optimizer, monitor = watched(BY_NAME["mlp"])
    monitor._runtime.use_preset("minimal")
    monitor.attach(optimizer)
    train(BY_NAME["mlp"], model, optimizer, monitor, 1, max_norm=1e-3)
    for step, seen in enumerate(train(BY_NAME["mlp"], model, optimizer, monitor, 101)):
        clips = {key for key in seen.metrics if "clip" in key}
        assert clips == (set() if step >= 99 else {"gradmon/grad_norm_after_clip", "gradmon/clip_fraction"}), step


def _block(name: str) -> str:
    return ".".join(name.split(".")[:2]) if name.startswith("blocks.") else name.split(".")[0]


GPT_GROUPS: dict[str, Callable[[list[str]], dict[str, list[str]]]] = {
    "all": lambda names: {name: [name] for name in names},
    r"^blocks\.1\..*weight": lambda names: {n: [n] for n in names if n.startswith("blocks.1.") and n.endswith("weight")},
    "blocks": lambda names: {
        **{block: [name for name in names if _block(name) == block] for block in map(_block, names)},
        "group_0": [name for name in names if not name.endswith("bias")],
        "group_1": [name for name in names if name.endswith("bias")],
    },
}


@pytest.mark.parametrize("choice", GPT_GROUPS)
def test_layer_values_over_parameters_blocks_and_groups(choice: str) -> None:
    model = BY_NAME["gpt_tied"].model()
    monitor = ModuleMonitor(model, layers=choice, on_metric_error="raise", preset="standard")
    names = [name for name, _ in model.named_parameters()]
    sides = [[p for name, p in model.named_parameters() if name.endswith("bias") == bias] for bias in (False, True)]
    optimizer = SGD([{"params": side} for side in sides], lr=0.05)
    monitor.attach(optimizer)
    for step, seen in enumerate(train(BY_NAME["gpt_tied"], model, optimizer, monitor, 2, max_norm=0.1)):
        expected = {}
        for label, members in GPT_GROUPS[choice](names).items():
            pick = [{name: tensors[name] for name in members} for tensors in (seen.before_clip, seen.updates, seen.parameters)]
            expected[f"gradient_before_clip/{label}/norm"] = norm(pick[0])
            if step == 0 and norm(pick[2]) > 0:
                expected[f"update/{label}/ratio"] = norm(pick[1]) / norm(pick[2])
        check_tables({k: v for k, v in seen.metrics.items() if not k.startswith("gradmon/")}, {}, expected, choice)


def test_top_parameters_and_top_layers_hold_the_largest_shares_of_the_squared_norm() -> None:
    model, optimizer, monitor = watched(BY_NAME["gpt_tied"], layers="top")
    monitor._runtime.use_preset("minimal")
    monitor.attach(optimizer)
    (seen,) = train(BY_NAME["gpt_tied"], model, optimizer, monitor, 1, max_norm=0.1)
    total = norm(seen.before_clip) ** 2
    shares = sorted(((name, norm(g) ** 2 / total) for name, g in seen.before_clip.items()), key=lambda pair: -pair[1])
    for found, count in (
        (monitor.last_record.top_gradients(3), 3),
        (monitor.last_record.top_gradients(), 10),
        (monitor.last_record.top_gradients(999), 999),
    ):
        assert [name for name, _ in found] == [name for name, _ in shares[:count]]
        assert [share for _, share in found] == pytest.approx([share for _, share in shares[:count]], rel=1e-6)
    shown = {k: v for k, v in seen.metrics.items() if not k.startswith("gradmon/")}
    check_tables(shown, {}, {f"gradient_before_clip/{name}/share": share for name, share in shares[:10]}, "top")
