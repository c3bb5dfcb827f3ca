"""What differs between releases of torch, from 2.6 on. Names that not all of them have are here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch

#: How long a second connection to a store is waited for.
_PATIENCE = timedelta(seconds=20)
#: Whether ``torch.export`` can be distinguished from ``torch.compile``. In releases before 2.7 it cannot, so no graph gets statistics.
TELLS_EXPORT = hasattr(torch.compiler, "is_exporting")
#: Whether a compiled graph writes once where a checkpoint in it writes. Before 2.9 it does again where it recomputes.
CHECKPOINTS_WRITE_ONCE = torch.__version__ >= "2.9"


def is_exporting() -> bool:
    """Whether ``torch.export`` may be tracing."""
    # The flag behind torch.compiler.is_exporting(): to the compiler of 2.9.1 the function is True everywhere.
    return not TELLS_EXPORT or torch.compiler._is_exporting_flag or _is_strict_export()


def _is_strict_export() -> bool:
    """Called while tracing, but not traced. A strict export, the default of 2.7, does not set the flag there."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return bool(InstructionTranslator.current_tx().output.export)
    except AttributeError:  # nothing is being traced
        return False


# as torch.compiler.assume_constant_result does, but without importing the compiler, which takes a second
_is_strict_export._dynamo_marked_constant = True  # type: ignore[attr-defined]


def accelerator_kind() -> torch.device | None:
    """The kind of accelerator that this build of torch is for, whether there is one or not; None for a build for the CPU."""
    try:
        return torch.accelerator.current_accelerator()
    except RuntimeError:  # 2.6, where there is none
        return None


def fsdp_param_groups(state: Any) -> Sequence[Any]:
    """The groups of parameters of a module under ``fully_shard``, from its state. In older releases a module has at most one."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    group = getattr(state, "_fsdp_param_group", None)
    return [] if group is None else [group]


def second_connection(store: Any) -> Any:
    """The default store of ``torch.distributed`` once more, with a connection of its own, so that no thread waits for another one's answer.

    Raises:
        ValueError, RuntimeError: there can be no second one.
    """
    return store.clone() if hasattr(store, "clone") else connected_again(store)


def connected_again(store: Any) -> Any:
    """The same before torch 2.8, where a store cannot be cloned.

    The second store is below a prefix of its own, which the ranks agree on: those of ``store`` keep other worlds apart, and cannot be read.
    """
    kinds: Any = torch.distributed
    prefix, base = store.compare_set("torch_gradmon/again", "", uuid4().hex).decode(), store
    while isinstance(base, kinds.PrefixStore):
        base = base.underlying_store
    if isinstance(base, kinds.FileStore):
        return kinds.PrefixStore(prefix, kinds.FileStore(base.path, kinds.get_world_size()))
    if isinstance(base, kinds.TCPStore):
        patience = min(base.timeout, _PATIENCE)
        again = kinds.TCPStore(base.host, base.port, is_master=False, wait_for_workers=False, timeout=patience)
        return kinds.PrefixStore(prefix, again)
    raise ValueError(f"a {type(base).__name__} cannot be connected to again")
