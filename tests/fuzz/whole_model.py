"""What a monitor has to say of the whole model and of its layers in a step: naive, in float64."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence

import torch

from .. import oracle
from .asks import PRESETS
from .edits import SCALINGS, UNSEEN
from .oracle import NOTHING, Expected, Key, Number, close, logged, norm_of, of_asks, updates
from .plan import LOST
from .program import Program
from .truth import Record, Truth

WINDOW, UPDATE_EVERY = 100, 10


def expected(p: Program, record: Record, truth: Truth, earlier: Sequence[Truth]) -> Expected:
    """Every key that is promised for a monitored step. ``earlier`` are the monitored steps up to this one, itself the last."""
    found: Expected = {}
    parts = _whole_model(p, record, truth, earlier), _layers(p, record, truth), of_asks(p, record, truth)
    for key, number in (item for part in parts for item in part):
        if key not in found or found[key].value is None:  # of two who ask for a value one may get it in a step
            found[key] = number
    if is_doubtful(p, truth, earlier):
        hidden = {
            key: n._replace(promised=False) for key, n in found.items() if key.source in ("gradmon", "gradient_before_clip")
        }
        found.update(hidden)
    return found | logged(truth.logged)


def shown(p: Program, truth: Truth) -> tuple[str, ...]:
    """The whole-model values that a preset shows."""
    return (*PRESETS[truth.tuned or p.preset], *(["steps_skipped"] if p.on_spike == "skip" else []))


def _whole_model(p: Program, record: Record, truth: Truth, earlier: Sequence[Truth]) -> Iterator[tuple[Key, Number]]:
    values = {
        **_of_gradients(p, truth),
        **_of_clips(p, record, truth, earlier),
        **_of_updates(p, record, truth),
        "param_norm": norm_of(t for name, t in truth.parameters.items() if name not in truth.frozen)
        if truth.parameters
        else NOTHING,
        "steps_skipped": Number(0.0),
        "steps_not_applied": Number(
            float(sum(not each.applied for each in record.steps.values() if each.number <= truth.number))
        ),
    }
    for name in shown(p, truth):
        if name in values:
            yield Key("gradmon", "", name), values[name]


def _of_gradients(p: Program, truth: Truth) -> Expected | dict[str, Number]:
    if not truth.before or truth.used.keys() - truth.before.keys():
        return dict.fromkeys(("grad_norm", "grad_max", "grad_nonfinite_count", "grad_top_fraction"), NOTHING)
    x = oracle.reals([*truth.before.values(), torch.zeros(0)])
    finite, total = x[x.isfinite()], float(x.square().sum())
    top = max((float(oracle.reals(t).square().sum()) for t in truth.before.values()), default=0.0)
    return {
        "grad_norm": close(math.sqrt(total)),
        "grad_max": Number(float(finite.abs().max())) if finite.numel() else NOTHING,
        "grad_nonfinite_count": Number(float((~x.isfinite()).sum())),
        "grad_top_fraction": close(top / total) if 0 < total < math.inf else NOTHING,
    }


def is_doubtful(p: Program, truth: Truth, earlier: Sequence[Truth]) -> bool:
    """Whether noise on the gradients after a pass whose gradients were dropped looks as if the loop had set them to a combination of both
    passes: no step so far has shown the noise alone.
    """
    return p.edit == "noise" and _has_dropped(p, truth) and all(_has_dropped(p, each) for each in earlier)


def _has_dropped(p: Program, truth: Truth) -> bool:
    """Whether it began in an iteration that threw its gradients away."""
    return any(at == truth.iteration and kind in LOST for at, kind in p.events)


def norms(truth: Truth) -> tuple[float, float]:
    """Of the gradients that were used, before clipping and then."""
    before = norm_of(t for name, t in truth.before.items() if name in truth.used).value
    return before or 0.0, norm_of(truth.used.values()).value or 0.0


def is_cut(record: Record, truth: Truth) -> bool:
    """Whether gradients of nobody are there, and not every optimizer has stepped, since the monitor was detached before."""
    return len({*truth.stepped}) < len(record.owners) and not truth.before.keys() <= truth.used.keys()


def _of_clips(p: Program, record: Record, truth: Truth, earlier: Sequence[Truth]) -> dict[str, Number]:
    judged = [each for each in earlier if each.applied and each.before and each.used and not is_cut(record, each)][-WINDOW:]
    if not truth.used or is_cut(record, truth) or not any(each.edited for each in judged):
        by_hand = truth.used.keys() - truth.before.keys() and not is_cut(record, truth)
        norm = norm_of(truth.used.values())._replace(promised=False) if by_hand else NOTHING
        return {"grad_norm_after_clip": norm, "clip_fraction": NOTHING}
    pairs = [norms(each) if each.edited else (0.0, 0.0) for each in judged]
    share = sum(used < before * (1 - 1e-5) for before, used in pairs) / len(pairs)
    # an edit that leaves neither a version nor a norm behind may be taken for none; a factor for all is no clip
    seen = p.edit not in UNSEEN or p.mistake == "clip_micro"
    scaled = p.edit in SCALINGS and p.mistake != "clip_micro"
    in_part = scaled and p.optimizer == "muon" and p.edit_at != "loop"  # gradients that no optimizer uses are left as they are
    # no factor shows where every norm is NaN, and no clip either
    blind = not any(math.isfinite(before) for (before, _), each in zip(pairs, judged, strict=True) if each.edited)
    return {
        "grad_norm_after_clip": norm_of(truth.used.values())._replace(promised=seen),
        "clip_fraction": (Number(0.0) if blind else NOTHING)._replace(promised=False)
        if scaled and not in_part
        # noise changes norms by about as much as two factors may differ and still be one, which is then taken for a scaling
        else Number(share, 1.0 if p.edit == "noise" else 1e-12, promised=seen and not in_part and p.edit != "noise"),
    }


def _of_updates(p: Program, record: Record, truth: Truth) -> dict[str, Number]:
    names = ("update_norm", "update_ratio", "update_ratio_p10", "update_ratio_p90")
    if truth.number % UPDATE_EVERY or not truth.applied or not p.attached:
        return dict.fromkeys(names, NOTHING)
    changes = {name: t for name, t in updates(p, truth).items() if name not in truth.frozen}
    base = updates(p, truth, "base")
    norm, whole = (norm_of(found[name] for name in changes).value or 0.0 for found in (changes, base))
    pairs = [
        (float(oracle.reals(t).norm()), float(oracle.reals(base[name]).norm()))
        for name, t in changes.items()
        if record.names[name] >= 2
    ]
    ratios = torch.tensor([change / there for change, there in pairs if there > 0], dtype=torch.float64)
    low, high = torch.quantile(ratios, torch.tensor([0.1, 0.9], dtype=torch.float64)).tolist() if len(ratios) else (None, None)
    return {
        "update_norm": close(norm) if changes else NOTHING,
        "update_ratio": close(norm / whole) if whole > 0 else NOTHING,
        "update_ratio_p10": NOTHING if low is None else close(low, 2e-6),
        "update_ratio_p90": NOTHING if high is None else close(high, 2e-6),
    }


# --- the dashboard of layers --------------------------------------------------------------------------------------------------------


def _layers(p: Program, record: Record, truth: Truth) -> Iterator[tuple[Key, Number]]:
    if not p.layers:
        return
    if p.layers == "top":
        yield from _top(truth)
        return
    changes, base = updates(p, truth), updates(p, truth, "base")
    for name, members in rows(p, record):
        if there := [member for member in members if member in truth.before]:
            yield Key("gradient_before_clip", name, "norm"), norm_of(truth.before[m] for m in there)
        else:
            yield Key("gradient_before_clip", name, "norm"), NOTHING._replace(promised=False)
        changed = [member for member in members if member in changes]
        norm, before = (norm_of(found[m] for m in changed).value or 0.0 for found in (changes, base))
        # where anything measures updates
        yield Key("update", name, "ratio"), (close(norm / before) if before > 0 else NOTHING)._replace(promised=False)


def _top(truth: Truth) -> Iterator[tuple[Key, Number]]:
    squares = {name: float(oracle.reals(t).square().sum()) for name, t in truth.before.items()}
    total = sum(squares.values())
    for name, square in squares.items() if 0 < total < math.inf else ():
        yield Key("gradient_before_clip", name, "share"), close(square / total)._replace(promised=len(squares) <= 10)


def rows(p: Program, record: Record) -> Iterator[tuple[str, list[str]]]:
    """The rows of the dashboard, and the parameters that each is of."""
    if p.layers != "blocks":
        yield from ((name, [name]) for name in record.names if p.layers == "all" or re.search(p.layers, p.name(name)))
        return
    blocks = {name: block_of(name, record.names) for name in record.names}
    for block in dict.fromkeys(blocks.values()):
        yield block, [name for name in record.names if blocks[name] == block]
    for number, owned in enumerate(record.owners if p.attached else ()):
        yield f"group_{number}", [name for name in record.names if name in owned]


def block_of(name: str, names: Collection[str]) -> str:
    """The path up to its first number; without one, the first start of it that is a module, and neither one of all nor of one with a
    number below it.
    """
    if numbered := re.match(r"((?:[^.]+\.)*?\d+)\.", name):
        return numbered[1]
    of_one_module = len({each.rpartition(".")[0] for each in names}) == 1
    for start in (name[: dot.start()] for dot in re.finditer(r"\.", name)):
        within = [each for each in names if each.startswith(f"{start}.")]
        is_wrapper = len(within) == len(names) and not (of_one_module and start == name.rpartition(".")[0])
        if not is_wrapper and not any(re.match(r"(?:[^.]+\.)*?\d+\.", each[len(start) + 1 :]) for each in within):
            return start
    return name
