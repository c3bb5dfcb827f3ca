"""Checks of public arguments. Each raises with the value and the remedy, before anything is changed."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from .errors import display, nearest
from .keys import SUMMARY

_ENDS, _AROUND = 50, 3


def subsample_steps(steps: Sequence[int], around: Iterable[int], most: int, liked: Sequence[int] = ()) -> list[int]:
    """Some of ``steps``, ascending: both ends, the neighbourhood of steps in ``around``, and evenly spaced ones, up to ``most`` in all.

    Each even interval prefers a step in ``liked``, ascending and among ``steps``: a loss logged every hundred steps would rarely be hit by
    chance. Distances are of step numbers, so a subsample can be subsampled again.
    """
    if len(steps) <= most:
        return list(steps)
    ends = min(_ENDS, most // 8)
    chosen = {*steps[:ends], *steps[-ends:]}
    for step in around:
        at = bisect_left(steps, step)
        if len(chosen) + 2 * _AROUND + 1 > most * 3 // 4:
            break
        chosen.update(steps[max(at - _AROUND, 0) : at + _AROUND + 1])
    left = most - len(chosen)
    distance = (steps[-1] - steps[0]) / (left - 1)
    for number in range(left):
        due = steps[0] + number * distance
        at = bisect_left(liked, due)
        is_near = at < len(liked) and liked[at] < due + distance
        chosen.add(liked[at] if is_near else steps[min(bisect_left(steps, due), len(steps) - 1)])
    return sorted(chosen)


def cadence(every: object, monitor_step_fn: Any) -> Callable[[int], bool]:
    """Which steps are monitored; ``every`` may be a function, too."""
    if every is not None and monitor_step_fn is not None:
        raise ValueError("give either every= or monitor_step_fn=, not both")
    function("monitor_step_fn", monitor_step_fn, "the step's number")
    chosen = every if callable(every) else monitor_step_fn
    if chosen is not None:
        return chosen
    interval = 1 if every is None else every
    positive_int("every", interval)
    return lambda step: step % interval == 0  # type: ignore[operator]


def positive_int(name: str, value: object, else_: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r} must be a positive int{f', {else_}' if else_ else ''}")


def positive_int_or_zero(name: str, value: object) -> None:
    if value != 0 or isinstance(value, bool):
        positive_int(name, value, "or 0 for none")


def not_negative(name: str, value: object, example: str) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise ValueError(f"{name}={value!r} must be a number of at least 0, {example}")


def string(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, got {display(value)}")


def function(name: str, value: object, argument: str) -> None:
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be a function of {argument}, got {display(value)}")


_Number = TypeVar("_Number", int, float)


def positive(name: str, value: _Number, *, above: float = 0.0, whole: bool = False) -> _Number:
    """Return ``value`` if it is a finite number above ``above``; with ``whole`` it must be an int."""
    kinds = (int,) if whole else (int, float)
    wanted = f"{'an int' if whole else 'a number'} above {above:g}" if above else f"a positive {'int' if whole else 'number'}"
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError(f"{name} must be {wanted}, got {display(value)}")
    if not above < value < math.inf:
        raise ValueError(f"{name} must be {wanted}, got {display(value)}")
    return value if whole else float(value)  # type: ignore[return-value]


def share(name: str, value: float) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1:
        raise ValueError(f"{name}={value!r} must be a number between 0 and 1, such as 0.01")
    return float(value)


def reaction(on_spike: object, actions: tuple[type, ...]) -> None:
    if on_spike is None or callable(on_spike) or isinstance(on_spike, actions):
        if isinstance(on_spike, type) and issubclass(on_spike, actions):
            raise TypeError(f"on_spike must be an instance, {on_spike.__name__}(), got the class")
        return
    hint = "; to go back to a snapshot, give a torch_gradmon.Rollback()" if "roll" in str(on_spike).lower() else ""
    try:
        one_of("on_spike", on_spike, ("warn", "skip", "raise"))
    except ValueError as error:
        raise ValueError(f"{error}{hint}") from None


def flag(**named: object) -> bool:
    ((name, value),) = named.items()
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {display(value)}")
    return value


def step_number(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {display(value)}")
    if value < 0:
        raise ValueError(f"{name}={value} must not be negative")


def process_group(group: object) -> None:
    if group is None:
        return
    if not torch.distributed.is_available() or not isinstance(group, torch.distributed.ProcessGroup):
        raise TypeError(
            f"process_group must be one of torch.distributed, such as mesh.get_group(), or None for all, got {display(group)}"
        )
    if torch.distributed.get_rank(group) < 0:
        raise ValueError("process_group does not include this process; give the group of the ranks that train the model together")


def one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        hint = nearest(str(value), known)
        meant = hint if "did you mean" in hint else ""
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, known))}{meant}")


def log_key(key: object) -> None:
    if not isinstance(key, str):
        raise TypeError(f"a key must be a str, got {display(key)}")
    if not key:
        raise ValueError("a key must not be empty")
    if key.startswith(f"{SUMMARY}/"):
        raise ValueError(f"the key {key!r} is in the monitor's own section {SUMMARY}/; choose another")


def module(value: object) -> None:
    if type(value).__module__.startswith("torch.distributed.pipelining"):
        raise TypeError(
            f"a {type(value).__name__} is not measured as a whole; pass the schedule that calls it, on every rank: "
            "watch(schedule, optimizer)"
        )
    if isinstance(value, type) and issubclass(value, nn.Module):
        raise TypeError(f"expected a module, got the class {value.__name__}; pass an instance of it")
    if isinstance(value, torch.optim.Optimizer):
        raise TypeError(f"expected a torch.nn.Module, got the optimizer {type(value).__name__}: the model comes first")
    if not isinstance(value, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {display(value)}")


_DEEPSPEED = (
    "from ZeRO 1 on, and with fp16 or bf16, DeepSpeed steps flat copies of the parameters, whose gradients no hook of torch sees; "
    "pass the engine itself, which knows where they are: gradmon.watch(engine)"
)
#: Attributes that DeepSpeed sets on the parameters of a model under ZeRO.
_ZERO_MARKS = ("_hp_mapping", "ds_id")


def is_deepspeed(model: object) -> bool:
    return is_of(model, "DeepSpeedEngine", "deepspeed.")


def is_schedule(model: object) -> bool:
    return is_of(model, "_PipelineSchedule", "torch.distributed.pipelining")


def is_of(model: object, name: str, package: str) -> bool:
    """Whether a class of this name is among the classes of ``model``, without an import of the package."""
    return any(kind.__name__ == name and kind.__module__.startswith(package) for kind in type(model).__mro__)


def measurable(model: nn.Module) -> None:
    for path, child in model.named_modules():
        if is_deepspeed(child):
            where = f" (at {path!r})" if path else ""
            raise ValueError(
                f"a DeepSpeedEngine{where} cannot be watched: it steps by itself; call gradmon.watch(engine), which takes its model "
                "and its optimizer"
            )


def initialised(model: nn.Module) -> None:
    if any(torch.nn.parameter.is_lazy(parameter) for parameter in model.parameters()):
        raise ValueError(f"this {type(model).__name__} has lazy parameters without a shape; run one batch through it first")


def grad_scaler(value: object) -> None:
    if value is not None and not isinstance(value, torch.amp.GradScaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, got {display(value)}")


def _parameters_of(optimizer: Any) -> set[int]:
    return {id(parameter) for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]}


def _wrapped(optimizer: Any) -> Optimizer | None:
    """An optimizer in an attribute with the same parameters, as in SAM, Lookahead and the wrappers of trainers."""
    kept = [value for value in getattr(optimizer, "__dict__", {}).values() if isinstance(value, Optimizer)]
    own = _parameters_of(optimizer) if kept else set()
    return next((value for value in kept if value is not optimizer and _parameters_of(value) == own), None)


def chain(optimizer: Any) -> list[Any]:
    """The optimizer and all nested ones inside it, outermost first."""
    found = [optimizer]
    while (inner := _wrapped(found[-1])) is not None and inner not in found:
        found.append(inner)
    return found


def inside(optimizer: Any) -> Any:
    return chain(optimizer)[-1]


def wrappers(named: Sequence[Any]) -> list[tuple[Any, Optimizer]]:
    return [(outer, found[-1]) for found in map(chain, named) for outer in found[:-1]]


def scaler_around(named: Sequence[Any]) -> torch.amp.GradScaler | None:
    """The GradScaler of a trainer's wrapper around an optimizer, such as Accelerate's, or None."""
    scalers = [getattr(each, "scaler", None) for optimizer in named for each in chain(optimizer)]
    return next((scaler for scaler in scalers if isinstance(scaler, torch.amp.GradScaler)), None)


def bare_optimizer(optimizer: Any) -> Optimizer:
    inner = inside(optimizer)
    if isinstance(inner, (list, tuple)) and any(isinstance(each, Optimizer) for each in inner):
        raise TypeError(
            f"expected optimizers one by one, got a {type(inner).__name__} of {len(inner)}: write watch(model, *optimizers)"
        )
    if not isinstance(inner, Optimizer):
        raise TypeError(
            f"expected a torch.optim.Optimizer, got {display(optimizer)}; pass the optimizer itself. Where the loop steps without one, use "
            "ModuleMonitor(model) with begin_step() and end_step()"
        )
    return inner


def optimizers(model: nn.Module, named: Sequence[Any], source: Any, remedy: str = "") -> list[Optimizer]:
    """The innermost optimizer of each of ``named``. ``source``: the :class:`.GradientSource` of the model; ``remedy``: for optimizers of
    another model, where a trainer makes them.
    """
    if not named:
        raise ValueError("the optimizer is missing, as in watch(model, optimizer) or monitor.attach(optimizer)")
    measurable(model)
    kinds = [kind for each in named for it in (each, getattr(each, "optimizer", None)) for kind in type(it).__mro__]
    is_zero = any(hasattr(parameter, mark) for parameter in model.parameters() for mark in _ZERO_MARKS)
    is_zero = is_zero and source.outer is None
    if is_zero or any(kind.__module__.startswith("deepspeed.runtime") for kind in kinds):
        raise ValueError(f"an optimizer under DeepSpeed cannot be followed: {_DEEPSPEED}")
    bare = [bare_optimizer(optimizer) for optimizer in named]
    if len({id(optimizer) for optimizer in bare}) < len(bare):
        raise ValueError(
            f"the same {type(bare[0]).__name__} is named twice; name each optimizer once, in the order in which they step"
        )
    owned = {id(tensor) for optimizer in bare for tensor in source.tensors_of(optimizer)}
    if owned.isdisjoint(id(source.stepped(p)) for p in model.parameters()):
        made = f"this {type(bare[0]).__name__} was" if len(bare) == 1 else f"these {len(bare)} optimizers were"
        otherwise = (
            "If the optimizer was made for this model, the parameters were replaced afterwards (fully_shard, to_empty, "
            "load_state_dict(assign=True)): make the optimizer after that. If it steps copies, such as master weights in float32, pass "
            "gradient_source=, or watch one module that has both: whole-model values then count both"
        )
        raise ValueError(
            f"{made} made for another model: no parameter of this {type(model).__name__} is in there. {remedy or otherwise}"
            + (f". If DeepSpeed has taken the optimizer: {_DEEPSPEED}" if "deepspeed.runtime.engine" in sys.modules else "")
        )
    return bare
