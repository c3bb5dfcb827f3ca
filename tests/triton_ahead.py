"""Compiles the Triton kernels for GPUs of NVIDIA and AMD that need not be there.

``python -m tests.triton_ahead`` prints a line for each: its name, the bytes of its machine code, and for NVIDIA its loads of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from torch_gradmon.statistics import triton as kernels
from torch_gradmon.statistics.triton import _GROUPS, _LANES, CHUNK

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
#: A100, and MI300, for which older releases need a linker from ROCm.
TARGETS = [GPUTarget("cuda", 80, 32), *([GPUTarget("hip", "gfx942", 64)] if VERSION >= (3, 5) else [])]
_TABLES = {"entries": "*i64", "owners": "*i32", "addresses": "*i64"}
_ROWS = {"out": "*fp64", **_TABLES, "scale": "*fp32"}
_SIZES = {"SIZE": CHUNK, "GROUPS": _GROUPS}
#: Each kernel with the types of its arguments and its constants.
KERNELS: list[tuple[Any, Mapping[str, str], Mapping[str, Any]]] = [
    (kernels.rows_of_chunks, _ROWS, {"SCALED": False, "MINUS": False, **_SIZES}),
    (kernels.rows_of_chunks, _ROWS, {"SCALED": True, "MINUS": True, **_SIZES}),
    (kernels.merged_rows, {"out": "*fp64", "entries": "*i64", "parts": "*fp64"}, {"LANES": _LANES}),
    (kernels.products_of_chunks, {"out": "*fp64", **_TABLES}, _SIZES),
    (kernels.merged_sums, {"out": "*fp64", "entries": "*i64", "parts": "*fp64"}, {"LANES": _LANES}),
]


def compiled(target: GPUTarget, kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any]) -> Mapping[str, Any]:
    """The kernel in each language on its way to machine code."""
    names = kernel.arg_names
    if VERSION < (3, 3):
        source = ASTSource(fn=kernel, signature=dict(types), constants=dict(constants))
    else:
        signature = {name: types.get(name, "constexpr") for name in names}
        source = ASTSource(
            fn=kernel, signature=signature, constexprs={(names.index(name),): of for name, of in constants.items()}
        )
    found: Mapping[str, Any] = triton.compile(source, target=target, options={"num_warps": 4, "enable_fp_fusion": True}).asm
    return found


if __name__ == "__main__":
    for each in KERNELS:
        for target in TARGETS:
            asm = compiled(target, *each)
            wide = sum(asm.get("ptx", "").count(f"ld.global.{kind}") for kind in ("v4.b32", "v2.b64"))
            print(target.backend, each[0].__name__, len(asm["cubin" if target.backend == "cuda" else "hsaco"]), wide)
