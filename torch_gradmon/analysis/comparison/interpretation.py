"""What the place and the size of the first difference between two runs point to."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from ...core import keys as n
from ...core.keys import parse_key

#: The largest difference that rounding in float32, and sums of it, can cause.
_ROUNDING = 2e-6
#: A gradient below this share of the largest one may be nothing but rounding.
_NOISE = 1e-6
_OF_FORWARD = "other data, other random numbers such as those of dropout, or other code in the forward pass"
_OF_BACKWARD = (
    "the backward pass, or hooks that change gradients; torch.use_deterministic_algorithms(True) reports operations that "
    "are not deterministic"
)
_OF_OPTIMIZER = "the optimizer's settings, its state (a checkpoint without it, for example), or its code"


def interpret(
    stage: str, key: str, step: int, before: int | None, compared: Container[str], relative: float, is_finite: bool
) -> str:
    """What it means that a value is the first to differ.

    Args:
        stage: of the value.
        key: of the value.
        step: number of the step.
        before: the step that was compared before; None if there is none.
        compared: the stages that were compared in the step.
        relative: relative difference of the values.
        is_finite: whether both values are finite.
    """
    text = _PLACES[stage](key, step, before, compared)
    if not is_finite:
        return f"{text} Not all of the values are finite."
    if stage in ("settings", "other values"):
        return text
    if relative > _ROUNDING:
        return f"{text} At {relative:.1e} it is more than rounding in float32."
    return (
        f"{text} At {relative:.1e} it is of the size of rounding in float32: sums in another order, from kernels that are not "
        "deterministic, another number of threads, or code that is equal in exact arithmetic. Such a difference grows during training."
    )


def interpret_noise(stage: str, key: str, share: float | None) -> str:
    """A sentence on a gradient that may be nothing but rounding; empty for a larger one.

    Args:
        stage: of the value.
        key: of the value.
        share: the value over the largest of its kind in that step; None if it is no metric of a tensor.
    """
    if not stage.startswith("gradients") or share is None or share >= _NOISE:
        return ""
    name = ".".join(parse_key(key).name.split(".")[-2:])
    return (
        f"{key} is {share:.0e} of the largest such gradient: it may be nothing but rounding, as for a bias before a normalisation, or of "
        f"the keys in attention. If so, leave it out, with all that follows from it: ignore={name!r}."
    )


def interpret_gaps(step: int, run: str, keys: Sequence[str]) -> str:
    """A sentence on values that a run lacks in ``step`` but both runs have in others; empty without ``keys``."""
    if not keys:
        return ""
    more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
    return f"In step {step} the {run} run lacks {keys[0]}{more}, which it has in other steps."


def _parameters(key: str, step: int, before: int | None, compared: Container[str]) -> str:
    if before is None:
        return (
            f"The parameters differ in the first compared step ({step}): another seed, initialisation or checkpoint, or the runs "
            "diverged before."
        )
    return (
        f"All values that both runs recorded in step {before} are the same, and then the parameters differ: {_OF_OPTIMIZER}, or another "
        f"change between steps {before} and {step}."
    )


def _activations(key: str, step: int, before: int | None, compared: Container[str]) -> str:
    if key.startswith(f"{n.INPUT}/{n.ROOT}/"):
        return f"{_same(compared, 'parameters')}, and the input of the model differs: other data."
    return f"{_same(compared, 'parameters')}, and this is the first activation that differs: {_of_forward(compared)}."


def _loss(key: str, step: int, before: int | None, compared: Container[str]) -> str:
    if "activations" in compared:
        return f"{_same(compared, 'parameters', 'activations')}, and the loss differs: other targets, or other code of the loss."
    return f'{_same(compared, "parameters")}, and the loss differs: {_of_forward(compared)}. Activations (preset="full") would show more.'


def _gradients(key: str, step: int, before: int | None, compared: Container[str]) -> str:
    known = [stage for stage in ("activations", "loss") if stage in compared]
    if known:
        return f"{_same(compared, 'parameters', *known)}, and gradients differ: {_OF_BACKWARD}."
    return (
        f"{_same(compared, 'parameters')}, and gradients differ: {_of_forward(compared)}, or in the backward pass. A logged loss, or "
        'activations (preset="full"), would show which.'
    )


def _clipped(key: str, step: int, before: int | None, compared: Container[str]) -> str:
    if "gradients before clipping" not in compared:
        return _gradients(key, step, before, compared)
    return "The gradients are the same before clipping, and those that the optimizer uses differ: the clip, or its limit."


def _settings(key: str, step: int, before: int | None, compared: Container[str]) -> str:
    what = {"context/amp_scale": "the loss scale", "context/applied": "whether the step was applied"}.get(
        key, "the learning rate"
    )
    return f"{_same(compared, 'parameters', 'gradients for the optimizer')}, and {what} differs."


def _optimizer(key: str, step: int, before: int | None, compared: Container[str]) -> str:
    return f"{_same(compared, 'parameters', 'gradients for the optimizer')}, and the optimizer's result differs: {_OF_OPTIMIZER}."


def _others(key: str, step: int, before: int | None, compared: Container[str]) -> str:
    return "The step itself does not differ, only values that were logged beside it or follow from earlier steps."


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
    """Which of ``stages`` are the same, and which were not recorded in both runs."""
    known = [_SHORT.get(stage, stage) for stage in stages if stage in compared]
    unknown = " and ".join(_SHORT.get(stage, stage) for stage in stages if stage not in compared)
    if not known:
        return f"{unknown.capitalize()} were not recorded in both runs"
    verb = "is" if known == ["loss"] else "are"
    text = f"The {' and '.join(known)} {verb} the same"
    return f"{text} ({unknown}: not recorded in both runs)" if unknown else text
