"""Values of layers in two bytes per cell, as text that the page decodes."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

#: Codes for a missing value, a gradient that there was not, a value that is not finite, and zero on a logarithmic scale.
NONE, NO_GRADIENT, NONFINITE, ZERO = -32768, -32766, 32767, -32767
#: A code is this factor times the logarithm to base ten, or times the value: steps of 0.33 % from 1e-45 to 1e45, or of 1/30000.
LOG_SCALE, SCALE = 700.0, 30000.0
_LARGEST = 32000.0


def packed(values: Tensor, is_log: bool, due: Sequence[bool] = ()) -> str:
    """``values`` as base64 of 16-bit little-endian codes, row by row; NaN is a missing value, infinity one that is not finite.

    ``due``: the rows in which a missing value is a gradient that there was not.
    """
    scaled = values.abs().clamp_min(1e-300).log10() * LOG_SCALE if is_log else values * SCALE
    codes = scaled.nan_to_num(0.0, 0.0, 0.0).round().clamp(-_LARGEST, _LARGEST)
    if is_log:
        codes = torch.where(values == 0, float(ZERO), codes)
    codes = torch.where(values.isinf(), float(NONFINITE), codes)
    missing = torch.tensor([[float(NO_GRADIENT if each else NONE)] for each in due or [False]], device="cpu")
    codes = torch.where(values.isnan(), missing, codes)
    cells = array("h", codes.to(torch.int64).flatten().tolist())
    if sys.byteorder == "big":
        cells.byteswap()
    return base64.b64encode(cells.tobytes()).decode("ascii")
