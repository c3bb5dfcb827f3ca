"""What the arguments of a model of Transformers show: tokens, which of them are attended to, and which have a label; with the gradient
at its output also what a loss outside of the model compares it with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..tallies import Tallies
from .head import looked_at, rows_of

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
_OF_OUTPUT = ("labels-not-shifted", 1.0, "share of targets that are the token itself")


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
        if labels.shape == ids.shape and not _has_encoder(model):
            if is_attended is not None:
                found[2] = _share(counts & ~is_attended, ~is_attended)
            if _predicts_next(model) and kwargs.get("shift_labels") is None:
                found[3] = _share_of_next(ids, labels, counts)
    return torch.stack(found)


def tokens_of(module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> Tensor | None:
    """The tokens that a language model of Transformers gets, if it gets no labels and so takes no loss itself."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or kwargs.get("labels") is not None:
        return None
    model = next(_from_transformers(module), None)
    return ids if model is not None and _predicts_next(model) and not _has_encoder(model) else None


@torch.no_grad()
def share_of_own(ids: Tensor, gradient: Tensor) -> Tensor | None:
    """The share of targets that are the token in their own place instead of the next one, float64 ``[1]``; NaN where that is not known.

    The gradient of cross-entropy is negative for the target alone.

    Args:
        ids: ``[N, T]``.
        gradient: of the output, ``[N, T, classes]``.
    """
    if (
        gradient.ndim != 3
        or gradient.shape[:2] != ids.shape
        or gradient.device != ids.device
        or ids.device.type in ("meta", "mps")
    ):
        return None
    g, classes = looked_at(rows_of(gradient)), gradient.shape[2]
    own, following = (looked_at(each.reshape(-1, 1), classes)[:, 0] for each in (ids, torch.cat([ids[:, 1:], ids[:, -1:]], 1)))
    tells = (g < 0).sum(1) == 1
    is_own = (g.argmin(1) == own) & tells
    is_known = (tells.sum() >= _FEWEST) & (is_own & (own != following)).any()
    return _share(is_own, tells).where(is_known, math.nan).view(1)


def judge(shares: list[float], tallies: Tallies) -> None:
    """Report what is odd about one batch."""
    rules = (_OF_OUTPUT,) if len(shares) == 1 else _RULES
    for (rule, fault, words), share in zip(rules, shares, strict=True):
        if not math.isnan(share):
            tallies.check(rule, None, share == fault, "", **{words: share})


def _from_transformers(module: nn.Module) -> Iterator[nn.Module]:
    """The models of Transformers itself in the watched one, the outermost first."""
    return (each for each in module.modules() if type(each).__module__.startswith("transformers.models."))


def _predicts_next(model: nn.Module) -> bool:
    return getattr(model, "loss_type", "") in _SHIFTS


def _has_encoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return part.sum().double() / whole.sum()


def _share_of_next(ids: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """NaN where too few labels count, or none of them differs from its own token."""
    counts = counts[:, :-1]
    own, following = (labels[:, :-1] == ids[:, :-1]) & counts, (labels[:, :-1] == ids[:, 1:]) & counts
    tells = (counts.sum() >= _FEWEST) & (own.sum() < counts.sum())
    return _share(following, counts).where(tells, math.nan)
