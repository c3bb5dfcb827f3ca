"""From a program to the operations of its loop, iteration by iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .optimizers import BY_CLOSURE
from .program import Program

_BETWEEN = ("freeze", "thaw", "reload", "save")
_OF_MONITOR = ("detach_attach", "leave", "resume", "detail_minimal", "detail_full")
#: Iterations whose gradients are thrown away.
LOST = ("skip", "raise_backward")


@dataclass
class Op:
    """A call of a method of :class:`tests.fuzz.loop.Loop`, with operations inside for what takes a closure."""

    name: str
    args: dict[str, Any] = field(default_factory=dict)
    inner: list[Op] = field(default_factory=list)

    def __str__(self) -> str:
        given = [f"{key}={value!r}" for key, value in self.args.items()] + [f"lambda: [{_line(self.inner)}]"] * bool(self.inner)
        return f"{self.name}({', '.join(given)})"


def op(name: str, *inner: Op, **args: Any) -> Op:
    return Op(name, args, list(inner))


def iterations(p: Program) -> list[list[Op]]:
    """What the loop does, in order."""
    done = [_iteration(p, i, [kind for at, kind in p.events if at == i]) for i in range(p.steps)]
    if p.has_event("phantom"):  # a training forward and a backward pass that no optimizer follows
        stepped = [op("attempt_over")] * (p.players == "in_backward")  # unless that pass itself steps
        done.append([op("forward", batch=10_000), op("backward"), *stepped])
    return done


def _iteration(p: Program, i: int, events: list[str]) -> list[Op]:
    ops = [op(kind) for kind in events if kind in _BETWEEN] + [op("iteration", number=i)]
    ops += [op("monitor", what=kind) for kind in events if kind in _OF_MONITOR]
    ops += _logged(p, "start") + _training(p, i, events) + _logged(p, "step")
    ops += [op("schedule")] * bool(p.scheduler) + [op("follow")] * p.ema
    ops += [op("evaluate", how=p.evaluation)] * bool(p.evaluation and i % 2 == 0) + _logged(p, "late")
    return ops + [op("poll")] * (p.poll == "always" or (p.poll == "sometimes" and i % 3 == 1))


def _training(p: Program, i: int, events: list[str]) -> list[Op]:
    zero, unzero = _zeroed(p, "before", events), _zeroed(p, "after", events)
    if p.players in ("turns", "gan"):
        turns = [0] * (p.critic_steps if p.players == "gan" else 1) + [1]
        ops: list[Op] = []
        for place, index in enumerate(turns):
            ops += (
                zero
                + _gradients(p, 10 * i + place, index, events)
                + _stepped(p, [index], events, place == len(turns) - 1)
                + unzero
            )
        return ops
    if p.optimizer in BY_CLOSURE:
        inside = (zero or [op("zero_grad", set_to_none=True)]) + _gradients(p, i, 0, events) + _edited(p)
        return [op("step_by_closure", *inside, **({"fails": True} if "raise_closure" in events else {}))]
    if p.players == "in_backward":
        return [*_gradients(p, i, 0, events), op("attempt_over")]
    return zero + _gradients(p, i, 0, events) + _stepped(p, [0, 1] if p.players == "halves" else [0], events, True) + unzero


def _gradients(p: Program, i: int, index: int, events: Sequence[str]) -> list[Op]:
    """Forward and backward passes of one step of one optimizer."""
    count = p.micro_batches - (p.unfinished and i == p.steps - 1)
    ops: list[Op] = []
    spoil = next((kind for kind in events if kind in ("nan", "inf")), "")
    for micro in range(count):
        number = i * p.micro_batches + micro
        fails = micro == p.seed % count
        if "raise_forward" in events and fails:
            ops += [op("forward", batch=5_000 + number, player=index, fails=True)]
        more: dict[str, Any] = {"spoil": spoil} if spoil else {}
        more |= {"fails_back": True} if fails and "raise_backward" in events and _where(p) == "output" else {}
        ops += [op("forward", batch=number, player=index, share=p.micro_batches, **more)]
        ops += [op("penalise", by=p.penalty)] * bool(p.penalty) + _logged(p, "forward")
        ops += [op("backward", **({"twice": p.twice} if p.twice else {}))]
        ops += [op("edit", how="clip_norm")] * (p.mistake == "clip_micro")
        if "raise_backward" in events and fails:
            return [*ops[:-1], op("backward", fails=_where(p))]
    return ops + _logged(p, "backward")


def _where(p: Program) -> str:
    """Where a backward pass raises: at the loss, at the output of the last module, or once the first parameter has its gradient."""
    return "parameter" if p.penalty or "jit" in p.extras else ("parameter", "loss", "output")[p.seed // 3 % 3]


def _edited(p: Program) -> list[Op]:
    return [op("edit", how=p.edit)] if p.edit and p.edit_at == "loop" else []


def _stepped(p: Program, indices: list[int], events: list[str], is_last: bool) -> list[Op]:
    if any(kind in LOST for kind in events):
        return [op("zero_grad", set_to_none=True)]
    ops = [op("monitor", what="detach_attach")] * ("detach_attach_mid" in events)
    if p.scaler and p.edit and p.edit_at == "loop" and p.mistake != "clip_scaled":
        ops += [op("unscale", index=index) for index in indices]
    ops += [op("zero_grad", set_to_none=True)] * (p.mistake == "zero_before_step")
    steps = [op("step", index=index) for index in indices] + [op("update_scale")] * p.scaler
    ops += _edited(p) + steps + [op("attempt_over")] * is_last
    if p.mistake == "step_twice":
        ops += [*steps, op("attempt_over")]
    return ops + [op("edit", how="clip_norm")] * (p.mistake == "clip_after_step")


def _zeroed(p: Program, when: str, events: list[str]) -> list[Op]:
    how, _, at = p.zero.partition("_")
    if at != when:
        return []
    return [op("zero_grad", set_to_none=(how == "none") != ("zero_otherwise" in events))]


def _logged(p: Program, when: str) -> list[Op]:
    return [op("log", when=when)] * (when in p.log)


def describe(p: Program) -> str:
    """The program as a script that a person can read; iterations that are the same stand together."""
    lines = [f"# {p}", *(f"{name} = {value!r}" for name, value in p.choices().items())]
    before, first, shown = "", 0, ""
    done = [*iterations(p), []]
    for i, ops in enumerate(done):
        text = _line([each for each in ops if each.name != "iteration"]).replace("; ", "\n    ")
        shape = "".join(c for c in text if not c.isdigit())
        if i and (shape != before or i == len(done) - 1):
            lines += [f"for i in range({first}, {i}):", f"    {shown}"]
        if shape != before:
            before, first, shown = shape, i, text
    return "\n".join(lines)


def _line(ops: list[Op]) -> str:
    return "; ".join(map(str, ops))
