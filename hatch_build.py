"""The build of a wheel, and of an installation from source: compiles the C++ kernel where there is a compiler.

The wheel is then for one kind of machine, and for any Python and any torch, since the kernel uses neither. Without a compiler the wheel
has no kernel and is for all machines.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelHook(BuildHookInterface[Any]):
    """Adds the kernels to a wheel; an editable installation has them in the source tree."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the kernels, and name the platform of the wheel."""
        try:
            kernels = _kernel_build(Path(self.root)).build()
        except Exception as error:
            self.app.display_warning(f"no kernel was built, so statistics on a CPU are slower: {error}")
            return
        if kernels and version != "editable":
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
            build_data["force_include"].update({str(path): str(path.relative_to(self.root)) for path in kernels})


def _kernel_build(root: Path) -> ModuleType:
    """The module by its file: its package imports torch, which a build does without."""
    spec = importlib.util.spec_from_file_location("kernel_build", root / "torch_gradmon" / "statistics" / "kernel_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
