"""What the place and the size of the first difference between two runs point to, in words."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from ...core import keys as n
from ...core.keys import parse_key

#: Up to here a difference is of the size of rounding in float32, and of what some sums make of it.
_ROUNDING = 2e-6
#: A gradient that is so small beside the largest one may be nothing but rounding, of which the size says nothing.
_NOISE = 1e-6
_OF_FORWARD = "other data, other random numbers, as those of dropout, or other code in the forward pass"
_OF_BACKWARD = (
    "the backward pass, or what hooks do to gradients; torch.use_deterministic_algorithms(True) tells of operations that "
    "are not deterministic"
)
_OF_OPTIMIZER = "the optimizer's settings, its state, as of a checkpoint without it, or its code"


def reading(
    stage: str, key: str, step: int, before: int | None, compared: Container[str], relative: float, is_finite: bool
) -> str:
    """What it points to that a value is the first to differ.

    Args:
        stage: of that value.
        key: which it is.
        step: when.
        before: the step that was compared before; None if there is none.
        compared: the stages of which anything was compared in that step.
        relative: how far the values are apart.
        is_finite: whether both are finite.
    """
    words = _PLACES[stage](key, step, before, compared)
    if not is_finite:
        return f"{words} Not all of the values are finite."
    if stage in ("settings", "other values"):
        return words
    if relative > _ROUNDING:
        return f"{words} At {relative:.1e} it is more than rounding in float32."
    return (
        f"{words} At {relative:.1e} it is of the size of rounding in float32: sums in another order, by kernels that are not "
        "deterministic, by another number of threads, or by code that is the same in exact arithmetic. Such a difference grows as the "
        "training goes on."
    )


def of_noise(stage: str, key: str, share: float | None) -> str:
    """That a gradient may be nothing but rounding; empty if it is not so small.

    Args:
        stage: of the value.
        key: which it is.
        share: how large it is beside the largest of its kind in that step; None where it is no metric of a tensor.
    """
    if not stage.startswith("gradients") or share is None or share >= _NOISE:
        return ""
    name = ".".join(parse_key(key).name.split(".")[-2:])
    return (
        f"{key} is {share:.0e} of the largest such gradient: it may be nothing but rounding, as in a bias before a normalisation, or that "
        f"of the keys in attention. If so, leave it out, with all that follows from it: ignore={name!r}."
    )


def of_gaps(step: int, run: str, keys: Sequence[str]) -> str:
    """That a run lacks something which both have in other steps; empty if ``keys`` are."""
    if not keys:
        return ""
    more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
    return f"In step {step} the {run} run lacks {keys[0]}{more}, which it has in other steps."


def _parameters(key: str, step: int, before: int | None, compared: Container[str]) -> str:
    if before is None:
        return (
            f"The parameters differ in the first step that was compared ({step}): another seed, initialisation or checkpoint, or the "
            "runs parted before."
        )
    return (
        f"All that both runs recorded of step {before} is the same, and then the parameters differ: {_OF_OPTIMIZER}, or whatever else "
        f"changed them between the steps {before} and {step}."
    )


def _activations(key: str, step: int, before: int | None, compared: Container[str]) -> str:
    if key.startswith(f"{n.INPUT}/{n.ROOT}/"):
        return f"{_same(compared, 'parameters')}, and what the model is fed differs: other data."
    return f"{_same(compared, 'parameters')}, and this is the first activation that differs: {_of_forward(compared)}."


def _loss(key: str, step: int, before: int | None, compared: Container[str]) -> str:
    if "activations" in compared:
        return f"{_same(compared, 'parameters', 'activations')}, and the loss differs: other targets, or other code of the loss."
    return f'{_same(compared, "parameters")}, and the loss differs: {_of_forward(compared)}. Activations (preset="full") would tell more.'


def _gradients(key: str, step: int, before: int | None, compared: Container[str]) -> str:
    known = [stage for stage in ("activations", "loss") if stage in compared]
    if known:
        return f"{_same(compared, 'parameters', *known)}, and gradients differ: {_OF_BACKWARD}."
    return (
        f"{_same(compared, 'parameters')}, and gradients differ: {_of_forward(compared)}, or in the backward pass. A logged loss, or "
        'activations (preset="full"), would tell which.'
    )


def _clipped(key: str, step: int, before: int | None, compared: Container[str]) -> str:
    if "gradients before clipping" not in compared:
        return _gradients(key, step, before, compared)
    return "The gradients are the same before clipping, and those that the optimizer uses differ: the clip or its limit."


def _settings(key: str, step: int, before: int | None, compared: Container[str]) -> str:
    what = {"context/amp_scale": "the loss scale", "context/applied": "whether the step was applied"}.get(
        key, "the learning rate"
    )
    return f"{_same(compared, 'parameters', 'gradients for the optimizer')}, and {what} differs."


def _optimizer(key: str, step: int, before: int | None, compared: Container[str]) -> str:
    return f"{_same(compared, 'parameters', 'gradients for the optimizer')}, and what the optimizer makes of them differs: {_OF_OPTIMIZER}."


def _others(key: str, step: int, before: int | None, compared: Container[str]) -> str:
    return "Nothing that belongs to the step itself differs, only what was logged beside it or follows from earlier steps."


_PLACES: dict[str, Callable[[str, int, int | None, Container[str]], str]] = {
    "parameters": _parameters,
    "activations": _activations,
    "loss": _loss,
    "gradients of activations": _gradients,
    "gradients before clipping": _gradients,
    "gradients for the optimizer": _clipped,
    "settings": _settings,
    "optimizer state": _optimizer,
    "updates": _optimizer,
    "other values": _others,
}
_SHORT = {"gradients for the optimizer": "gradients"}


def _of_forward(compared: Container[str]) -> str:
    return _OF_FORWARD if "parameters" in compared else f"other parameters, {_OF_FORWARD}"


def _same(compared: Container[str], *stages: str) -> str:
    """Which of ``stages`` are the same, and which are not known to be."""
    known = [_SHORT.get(stage, stage) for stage in stages if stage in compared]
    unknown = " and ".join(_SHORT.get(stage, stage) for stage in stages if stage not in compared)
    if not known:
        return f"{unknown.capitalize()} were not recorded in both runs"
    verb = "is" if known == ["loss"] else "are"
    words = f"The {' and '.join(known)} {verb} the same"
    return f"{words} ({unknown}: not recorded in both runs)" if unknown else words
