"""What a monitor has to say of a step, metric by metric, from what truly happened in it: naive, in float64, all elements at once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import oracle
from .asks import Ask, asked
from .attending import attention, parts
from .optimizers import BY_CLOSURE
from .program import Program
from .truth import Record, Tensors, Truth


class Key(NamedTuple):
    """The parts of a key."""

    source: str
    name: str
    metric: str

    def text(self, p: Program) -> str:
        """As the program's monitor writes it."""
        name = p.name(self.name) if self.source else self.name
        if p.style == "metric_first" and name and self.metric:
            return f"{self.source}_{self.metric}/{name}"
        return ("" if p.style == "metric_first" else p.style) + "/".join(filter(None, (self.source, name, self.metric)))


class Number(NamedTuple):
    """A value that is known, and how far from it is right: an infinite slack of NaN is any value that is not finite. Without a value it
    cannot exist; one that is not promised may be absent.
    """

    value: float | None
    slack: float = 0.0
    promised: bool = True

    def fits(self, found: float) -> bool:
        if self.value is None:
            return False
        if math.isfinite(self.value):
            return abs(found - self.value) <= self.slack
        return str(found) == str(self.value) or (self.slack == math.inf and not math.isfinite(found))


Expected = dict[Key, Number]
NOTHING = Number(None)


def close(value: float, relative: float = 1e-6) -> Number:
    return Number(value, relative * abs(value) if math.isfinite(value) else 0.0)


def norm_of(tensors: Iterable[Tensor]) -> Number:
    return close(math.sqrt(sum(float(oracle.reals(t).square().sum()) for t in tensors)))


def logged(values: dict[str, list[float]]) -> Expected:
    """What was logged by hand."""
    return {Key("", key, ""): close(sum(each) / len(each)) for key, each in values.items()}


# --- metrics that are asked for by name ---------------------------------------------------------------------------------------------


def of_asks(p: Program, record: Record, truth: Truth) -> Iterator[tuple[Key, Number]]:
    """Every metric that is asked for by name."""
    for ask in asked(p):
        yield from _of_ask(p, record, truth, ask)
    if (truth.tuned or p.preset) == "full":  # where a step that it is due in had no attention
        yield from ((Key(f"attention_{metric}", ".*", ""), NOTHING) for metric in ("entropy_normalized", "max_logit"))


def _of_ask(p: Program, record: Record, truth: Truth, ask: Ask) -> Iterator[tuple[Key, Number]]:
    for source in ask.sources if ask.adder != "attention" else ():
        due = truth.number % ask.every == 0
        tensors = _tensors(p, record, truth, source, "split_calls" in ask.options) if due else {}
        for name in _names(record, source):
            if not re.search(ask.pattern, p.name(name)) or is_excluded(p, name):
                continue
            parts = {path: t for path, t in tensors.items() if belongs(path, name, record)}
            if name not in parts:  # of a container, its module stands for the tensors inside
                yield Key(source, name, ask.metric), NOTHING._replace(promised=not parts)
            if ask.metric == "log2_histogram" and due:
                yield from _histogram(source, name, [x for some in parts.values() for x in some])
                continue
            for path, some in parts.items():
                number = _number(p, record, truth, source, path, ask, some)
                # whether a forward in eval mode trains is known only afterwards, and which modules attend when they do
                unknown = (p.trains_in_eval or truth.mixed) and source in _OF_MODULES
                unknown = unknown or (ask.metric in ("dead", "saturation") and path not in record.modules)
                # a live change may begin in a call of the root, too late to see what that takes
                unknown = unknown or (bool(truth.tuned) and source == "input" and name == "[root module]")
                yield Key(source, path, ask.metric), number._replace(promised=not unknown)
    if ask.adder == "attention":
        found = [each for each in attention(truth, ask.metric, p.casts) if not is_excluded(p, each[0].name)]
        # in the first step a closure's forward in eval mode may be an evaluation
        unknown = truth.mixed or (p.trains_in_eval and p.optimizer in BY_CLOSURE and truth.number == p.start_step)
        yield from ((key, n._replace(promised=not unknown)) for key, n in found)
        if unknown or not found:
            yield Key(f"attention_{ask.metric}", ".*", ""), NOTHING


def is_excluded(p: Program, name: str) -> bool:
    return p.names not in ("", "renamed") and re.search(p.names, name) is not None and name != "[root module]"


_OF_MODULES = {
    "activation": "outputs",
    "input": "inputs",
    "activation_gradient": "output_gradients",
    "input_gradient": "input_gradients",
    "activation_difference": "differences",
}


def _names(record: Record, source: str) -> Iterable[str]:
    return record.modules if source in _OF_MODULES else record.names


def belongs(path: str, name: str, record: Record) -> bool:
    """Whether ``path`` names a tensor of this module or parameter, and not of a module inside."""
    if path == name:
        return True
    rest = path[len(name) :]
    return path.startswith(name) and rest[:1] in ("[", ".", "@") and path not in record.modules and not _inner(path, name, record)


def _inner(path: str, name: str, record: Record) -> bool:
    return any(path.startswith(other) and len(other) > len(name) and other.startswith(name) for other in record.modules)


def _tensors(p: Program, record: Record, truth: Truth, source: str, split: bool) -> dict[str, list[Tensor]]:
    """The tensors of a source by path; several are taken together."""
    if source in _OF_MODULES:
        found = truth.calls if split and source == "activation" else getattr(truth, _OF_MODULES[source])
        if source == "activation" and ("attention" in p.metrics or (p.preset == "full" and truth.number % 10 == 0)):
            found = {**found, **parts(truth, "attention" in p.metrics, p.casts, "@0" if split else "")}
        return {path: ts for path, ts in found.items() if not (isinstance(ts[0], Tensor) and not _is_number(ts[0]))}
    if source == "gradient_local":
        return truth.local
    return {name: [tensor] for name, tensor in _of_parameters(p, record, truth, source).items()}


def _is_number(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _of_parameters(p: Program, record: Record, truth: Truth, source: str) -> Tensors:
    if source == "update":
        return updates(p, truth)
    if source == "parameter_difference":
        return {name: _wide(q) - _wide(record.reference[name]) for name, q in truth.parameters.items()}
    if source == "optimizer":
        return {name: state["param"] for name, state in truth.states.items()}
    return {"gradient": truth.used, "gradient_before_clip": truth.before, "parameter": truth.parameters}[source]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128) if tensor.is_complex() else tensor.double()


def updates(p: Program, truth: Truth, of: str = "updated") -> Tensors:
    """After minus before, of the sample that the program asks for."""
    found = {}
    for name, before in truth.base.items():
        if p.update_sample and not p.update_sample.isdigit() and not re.search(p.update_sample, name):
            continue
        change = _wide(truth.updated[name]) - _wide(before) if of == "updated" else _wide(before)
        found[name] = _sampled(change, int(p.update_sample)) if p.update_sample.isdigit() else change
    return found


def _sampled(tensor: Tensor, count: int) -> Tensor:
    if tensor.dim() == 0 or tensor.shape[0] <= count:
        return tensor
    return tensor[torch.linspace(0, tensor.shape[0] - 1, count, dtype=torch.float64).round().long()]


def _number(p: Program, record: Record, truth: Truth, source: str, path: str, ask: Ask, tensors: list[Tensor]) -> Number:
    if source == "optimizer":
        return _of_state(truth.states[path], ask.metric)
    if source == "activation_difference":
        tensors = [_wide(a) - _wide(b) for a, b in tensors]  # type: ignore[misc]
    if ask.metric == "ratio":
        norm = float(oracle.reals(updates(p, truth, "base")[path]).norm())
        return close(float(oracle.reals(tensors[0]).norm()) / norm) if norm > 0 else NOTHING
    if ask.function is not None:
        return _of_function(ask.function, tensors, 2e-2 if p.dtype == "bfloat16" else 1e-5)
    x = oracle.reals(tensors)
    if ask.metric == "saturation":
        is_bounded = record.modules.get(path) == "Tanh" and x.numel()
        return Number(float((x.abs() > 0.95).double().mean()), 1e-9) if is_bounded else NOTHING
    if ask.metric == "dead":
        return NOTHING  # it takes a hundred steps
    if ask.metric == "kurtosis":
        return _kurtosis(x)
    value = oracle.values(x, p.eps).get(ask.metric)
    return NOTHING if value is None else Number(value, oracle.slack(ask.metric, x, value))


def _of_function(function: Callable[[Tensor], Tensor], tensors: list[Tensor], relative: float) -> Number:
    values = [float(function(tensor)) for tensor in tensors]
    return close(sum(values) / len(values), relative)


def _histogram(source: str, name: str, tensors: list[Tensor]) -> Iterator[tuple[Key, Number]]:
    x = oracle.reals([*tensors, torch.zeros(0)])
    x = x[x.isfinite()]
    if not x.numel():
        yield Key(source, name, "log2_histogram"), NOTHING
    exponents = (x[x != 0].abs().frexp()[1] - 1).clamp(-40, 23)
    counts = {str(power): int((exponents == power).sum()) for power in exponents.unique().tolist()}
    for power, count in {**counts, "zero": int((x == 0).sum())}.items():
        yield Key(source, name, f"log2_histogram.{power}"), Number(float(count) if count else None, promised=bool(count))


def _kurtosis(x: Tensor) -> Number:
    if not x.numel():
        return NOTHING
    distance = x - x.mean()
    squares, mean = distance.square().sum(), float(x.mean())
    if not squares > x.numel() * (8 * 2.2e-16 * mean) ** 2:
        return NOTHING if math.isfinite(float(squares)) else Number(math.nan)
    return close(float(x.numel() * distance.pow(4).sum() / squares**2), 1e-5)


_MOMENTS = {"exp_avg_norm": ("exp_avg", "momentum_buffer"), "exp_avg_sq_norm": ("exp_avg_sq", "square_avg")}


def _of_state(state: dict[str, Tensor], metric: str) -> Number:
    kept = next((state[name] for name in _MOMENTS.get(metric, ("exp_avg", "momentum_buffer")) if name in state), None)
    if kept is None:
        return NOTHING
    if metric != "grad_momentum_cosine":
        return close(float(oracle.reals(kept).norm()))
    if state["grad"] is None:
        return NOTHING
    gradient, momentum = oracle.reals(state["grad"]), oracle.reals(kept)
    lengths = float(gradient.norm() * momentum.norm())
    return Number(float(gradient @ momentum) / lengths, 1e-6) if lengths != 0 else NOTHING
