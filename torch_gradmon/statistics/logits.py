"""The logarithm of the softmax's denominator: how large the logits of a head have grown."""

from __future__ import annotations

import torch
from torch import Tensor


def logsumexp(logits: Tensor) -> Tensor | None:
    """``log(sum(exp(x)))`` over the last dimension, in nats: ``[...]`` without it, float32 or wider; None for 0-d or integer tensors.

    It is the z that PaLM's loss pulls to zero (Chowdhery et al. 2022, arXiv 2204.02311, section 5, 1e-4 times its square), and whose
    growth comes before the loss diverges at high rates (Wortsman et al. 2023, arXiv 2309.14322, section 3.1.2). Does not synchronise.
    """
    if not logits.dim() or not logits.is_floating_point():
        return None
    return logits.detach().to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1)


def logsumexp_square(logits: Tensor) -> Tensor | None:
    """The square of :func:`logsumexp`, whose mean is the z-loss without its factor."""
    z = logsumexp(logits)
    return None if z is None else z.square()
