"""What the arguments of a model of Transformers show: tokens, which of them are attended to, and which have a label."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ..tallies import Tallies

#: The label without a loss.
_IGNORED = -100
#: The fewest labels that show a shift.
_FEWEST = 8
#: The losses that shift labels themselves; the default is the same.
_SHIFTS = ("ForCausalLM", None)
#: For each share its rule, the value that is a fault, and its name.
_RULES = (
    ("attention-mask", 0.0, "share of the text that is attended to"),
    ("labels-ignored", 0.0, "share of labels that count"),
    ("loss-on-padding", 1.0, "share of the padding with a label"),
    ("labels-shifted-twice", 1.0, "share of labels that are the next token"),
)


@torch.no_grad()
def shares_of(module: nn.Module, kwargs: Mapping[str, object]) -> Tensor | None:
    """Numbers on the device of the tokens, float64 ``[4]``, NaN where there is none: the share of tokens other than padding that are
    attended to, of labels that count, of masked tokens whose label counts, and of labels that are the next token instead of their own.

    None for other models: what they do with a mask and a label is not known.
    """
    model, ids = next(_from_transformers(module), None), kwargs.get("input_ids")
    if model is None or not isinstance(ids, Tensor) or ids.ndim != 2 or not ids.numel() or ids.device.type in ("meta", "mps"):
        return None
    config = getattr(model, "config", None)
    found = [torch.full((), math.nan, dtype=torch.float64, device=ids.device)] * 4
    mask, labels = kwargs.get("attention_mask"), kwargs.get("labels")
    is_attended = mask != 0 if isinstance(mask, Tensor) and mask.shape == ids.shape else None
    if is_attended is not None:
        pad = getattr(config, "pad_token_id", None)
        is_text = ids != pad if isinstance(pad, int) else torch.ones_like(ids, dtype=torch.bool)
        found[0] = _share(is_attended & is_text, is_text)
    if isinstance(labels, Tensor) and labels.numel() and not labels.is_floating_point():
        counts = labels != _IGNORED
        found[1] = counts.double().mean()
        if labels.shape == ids.shape and not getattr(config, "is_encoder_decoder", False):
            if is_attended is not None:
                found[2] = _share(counts & ~is_attended, ~is_attended)
            if getattr(model, "loss_type", "") in _SHIFTS and kwargs.get("shift_labels") is None:
                found[3] = _share_of_next(ids, labels, counts)
    return torch.stack(found)


def judge(shares: list[float], tallies: Tallies) -> None:
    """Report what is odd about one batch."""
    for (rule, fault, words), share in zip(_RULES, shares, strict=True):
        if not math.isnan(share):
            tallies.check(rule, None, share == fault, "", **{words: share})


def _from_transformers(module: nn.Module) -> Iterator[nn.Module]:
    """The models of Transformers itself in the watched one, the outermost first."""
    return (each for each in module.modules() if type(each).__module__.startswith("transformers.models."))


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return part.sum().double() / whole.sum()


def _share_of_next(ids: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """NaN where too few labels count, or none of them differs from its own token."""
    counts = counts[:, :-1]
    own, following = (labels[:, :-1] == ids[:, :-1]) & counts, (labels[:, :-1] == ids[:, 1:]) & counts
    tells = (counts.sum() >= _FEWEST) & (own.sum() < counts.sum())
    return _share(following, counts).where(tells, math.nan)
