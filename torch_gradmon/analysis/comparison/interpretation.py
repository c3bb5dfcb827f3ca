"""What the place and the size of the first difference between two runs point to."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

from ...core import keys as n
from ...core.formatting import listed
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


class Onset(NamedTuple):
    """The first value that differs.

    Attributes:
        stage: of the value.
        key: of the value.
        step: number of the step.
        before: the step that was compared before; None if there is none.
        compared: the stages that were compared in the step.
        relative: relative difference of the values.
        is_finite: whether both values are finite.
        settings: of optimizers that differ.
    """

    stage: str
    key: str
    step: int
    before: int | None
    compared: Container[str]
    relative: float
    is_finite: bool
    settings: Sequence[str] = ()

    def same(self, *stages: str) -> str:
        """Which of ``stages`` are the same, and which were not recorded in both runs."""
        known = [_SHORT.get(stage, stage) for stage in stages if stage in self.compared]
        unknown = " and ".join(_SHORT.get(stage, stage) for stage in stages if stage not in self.compared)
        if not known:
            return f"{unknown.capitalize()} were not recorded in both runs"
        text = f"The {' and '.join(known)} {'is' if known == ['loss'] else 'are'} the same"
        return f"{text} ({unknown}: not recorded in both runs)" if unknown else text

    @property
    def of_forward(self) -> str:
        """Possible causes in the forward pass."""
        return _OF_FORWARD if "parameters" in self.compared else f"other parameters, {_OF_FORWARD}"


def interpret(onset: Onset) -> str:
    """What it means that this value is the first to differ."""
    text = _PLACES[onset.stage](onset)
    if not onset.is_finite:
        return f"{text} Not all of the values are finite."
    if onset.settings and onset.stage in _OF_STEP and (onset.stage != "parameters" or onset.before is not None):
        return f"{text} The optimizers differ in {listed(onset.settings, 3)}, which may be the cause."
    if onset.stage in ("settings", "other values"):
        return text
    if onset.relative > _ROUNDING:
        return f"{text} At {onset.relative:.1e} it is more than rounding in float32."
    return (
        f"{text} At {onset.relative:.1e} it is of the size of rounding in float32: sums in another order, from kernels that are not "
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


def _parameters(onset: Onset) -> str:
    if onset.before is None:
        return (
            f"The parameters differ in the first compared step ({onset.step}): another seed, initialisation or checkpoint, or the runs "
            "diverged before."
        )
    return (
        f"All values that both runs recorded in step {onset.before} are the same, and then the parameters differ: {_OF_OPTIMIZER}, or "
        f"another change between steps {onset.before} and {onset.step}."
    )


def _activations(onset: Onset) -> str:
    if onset.key.startswith(f"{n.INPUT}/{n.ROOT}/"):
        return f"{onset.same('parameters')}, and the input of the model differs: other data."
    return f"{onset.same('parameters')}, and this is the first activation that differs: {onset.of_forward}."


def _loss(onset: Onset) -> str:
    if "activations" in onset.compared:
        return f"{onset.same('parameters', 'activations')}, and the loss differs: other targets, or other code of the loss."
    hint = 'Activations (preset="full") would show more.'
    return f"{onset.same('parameters')}, and the loss differs: {onset.of_forward}. {hint}"


def _gradients(onset: Onset) -> str:
    known = [stage for stage in ("activations", "loss") if stage in onset.compared]
    if known:
        return f"{onset.same('parameters', *known)}, and gradients differ: {_OF_BACKWARD}."
    hint = 'A logged loss, or activations (preset="full"), would show which.'
    return f"{onset.same('parameters')}, and gradients differ: {onset.of_forward}, or in the backward pass. {hint}"


def _clipped(onset: Onset) -> str:
    if "gradients before clipping" not in onset.compared:
        return _gradients(onset)
    return "The gradients are the same before clipping, and those that the optimizer uses differ: the clip, or its limit."


def _settings(onset: Onset) -> str:
    names = {"context/amp_scale": "the loss scale", "context/applied": "whether the step was applied"}
    return f"{onset.same('parameters', 'gradients for the optimizer')}, and {names.get(onset.key, 'the learning rate')} differs."


def _optimizer(onset: Onset) -> str:
    return f"{onset.same('parameters', 'gradients for the optimizer')}, and the optimizer's result differs: {_OF_OPTIMIZER}."


def _others(onset: Onset) -> str:
    return "The step itself does not differ, only values that were logged beside it or follow from earlier steps."


_PLACES: dict[str, Callable[[Onset], str]] = {
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
#: Stages that follow from the optimizer's step, or from the one before.
_OF_STEP = frozenset({"parameters", "settings", "optimizer state", "updates"})
_SHORT = {"gradients for the optimizer": "gradients"}
