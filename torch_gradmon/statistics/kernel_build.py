"""Build the C++ kernel. Standard library alone, since the build of a wheel runs this file without torch."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("cpp_kernel.cpp")
#: Where built kernels are, one for each kind of processor.
DIRECTORY = Path(__file__).with_name("kernels")
#: No -ffast-math: a library linked with it makes the whole process flush subnormal numbers to zero.
_FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", "-pthread")
#: A built kernel runs on other machines too, whose C++ library may be older.
_PORTABLE = ("-static-libstdc++", "-static-libgcc", "-s") if sys.platform == "linux" else ()
_ANY = "DEFAULT"
_X86: Mapping[str, Sequence[str]] = {
    "AVX512": ("-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"),
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
}
#: By machine and by what ``torch.backends.cpu.get_cpu_capability()`` returns there: the compiler's options. Every ARM processor
#: of 64 bits has NEON. A processor without AVX2 has no kernel, nor has Windows: its compiler has no such vectors, and GCC aligns
#: them wrongly on its stack.
_VARIANTS: Mapping[str, Mapping[str, Sequence[str]]] = {"x86_64": _X86, "aarch64": {_ANY: ()}, "arm64": {_ANY: ()}}
_TIMEOUT_S = 120


def _path(capability: str) -> Path:
    # the name changes with the source and the options, so that a kernel of another version is never loaded
    digest = hashlib.sha256(SOURCE.read_bytes() + repr((_FLAGS, _X86)).encode()).hexdigest()[:12]
    return DIRECTORY / f"{digest}-{capability.lower()}.so"


def built(capability: str) -> Path | None:
    known = _VARIANTS.get(platform.machine(), {})
    path = _path(capability if capability in known else _ANY)
    return path if path.exists() else None


def build() -> list[Path]:
    """Build the missing kernels for this kind of machine; RuntimeError as :func:`compile_to`. Removes those of other versions."""
    wanted = {_path(name): flags for name, flags in _VARIANTS.get(platform.machine(), {}).items()}
    DIRECTORY.mkdir(exist_ok=True)
    for path in DIRECTORY.glob("*.so"):
        if path not in wanted:
            path.unlink()
    for path, flags in wanted.items():
        if not path.exists():
            part = path.with_suffix(f".{os.getpid()}")  # several builds may run at once
            compile_to(part, [(*flags, *_PORTABLE), flags])
            part.replace(path)
    return list(wanted)


def compile_to(library: Path, extra: Sequence[Sequence[str]]) -> None:
    """Compile the kernel, with the first of the ``extra`` options that the compiler takes; RuntimeError with its output if none."""
    command, output = compiler(), ""
    for options in extra:
        whole = [*command, *_FLAGS, *options, "-o", str(library), str(SOURCE)]
        done = subprocess.run(whole, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode == 0:
            return
        output = output or done.stderr.strip()
    raise RuntimeError(f"{' '.join(command)} failed:\n{output[:2000]}")


def compiler() -> list[str]:
    """The command that compiles, with its first arguments; RuntimeError if there is none."""
    if wanted := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(wanted[0]) is None:
            raise RuntimeError(f"the compiler that $CXX names was not found: {' '.join(wanted)}")
        return wanted
    found = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
    if found is None:
        raise RuntimeError("no C++ compiler was found: neither g++, clang++ nor c++; $CXX may name one")
    return [found]
