"""Keep hooks and attributes of the monitor out of pickles and copies.

pickle and copy look up ``__reduce_ex__`` and ``__getstate__`` on the object before its class, so both are set on the object. No class is
changed, the bytes hold nothing of the monitor, and they load with ``weights_only=True`` if those of the bare object do.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

_ATTRIBUTES = ("gradmon", "__reduce_ex__", "values")


class Unsaved:
    """Keeps entries of a dict of hooks out of pickles and deep copies; the hooks still run.

    It is attached to the dict, not the module: a module may have its own ``__getstate__``, shallow copies share the dict, and handles know
    the dict by its identity, so it cannot be replaced.

    Args:
        hooks: the dict; held weakly.

    Attributes:
        keys: the entries to leave out.
        monitor: the link of a module with :class:`torch_gradmon.MonitorMixin`; also left out.
    """

    def __init__(self, hooks: OrderedDict[int, Any]) -> None:
        self._hooks = weakref.ref(hooks)
        self.keys: set[int] = set()
        self.monitor: weakref.ref[Any] | None = None
        hooks.gradmon, hooks.__reduce_ex__ = self, self._reduce  # type: ignore[attr-defined, method-assign]

    def _bare(self) -> OrderedDict[int, Any]:
        hooks = self._hooks()
        assert hooks is not None  # this is a method of the dict
        bare = OrderedDict((key, hook) for key, hook in hooks.items() if key not in self.keys)
        vars(bare).update((name, value) for name, value in vars(hooks).items() if name not in _ATTRIBUTES)
        return bare

    def _reduce(self, protocol: Any) -> Any:
        return self._bare().__reduce_ex__(protocol)

    def leave_unscripted(self) -> None:
        """Hide the entries from ``torch.jit.script`` too, which compiles the dict's values; calls use its items."""
        if (hooks := self._hooks()) is not None:
            hooks.values = lambda: self._bare().values()  # type: ignore[method-assign]

    def leave_if_empty(self) -> None:
        """Detach from the dict if nothing is left out of it."""
        hooks = self._hooks()
        if hooks is not None and not self.keys and self.monitor is None:
            for name in _ATTRIBUTES:
                vars(hooks).pop(name, None)


def unsaved_of(hooks: Any) -> Unsaved | None:
    """The :class:`Unsaved` of ``hooks``, or None."""
    return getattr(hooks, "gradmon", None)


def leave_out(handle: RemovableHandle, scripted: bool = True) -> None:
    """Keep the hook of ``handle`` out of pickles of its module or optimizer; not ``scripted``: also out of ``torch.jit.script``."""
    for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
        hooks = reference()
        if isinstance(hooks, OrderedDict) and handle.id in hooks:
            unsaved = unsaved_of(hooks) or Unsaved(hooks)
            unsaved.keys.add(handle.id)
            if not scripted:
                unsaved.leave_unscripted()


def remove(handle: RemovableHandle) -> None:
    """Remove the hook of ``handle`` and undo :func:`leave_out`."""
    handle.remove()
    for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
        if (unsaved := unsaved_of(reference())) is not None:
            unsaved.keys.discard(handle.id)
            unsaved.leave_if_empty()


class BareState:
    """A replacement for an object's ``__getstate__`` that applies ``bare`` to each attribute.

    Args:
        owner: the object; held weakly.
        bare: an attribute's value without anything of the monitor; None if nothing remains.
    """

    def __init__(self, owner: Any, bare: Callable[[Any], Any]) -> None:
        self._owner, self._bare = weakref.ref(owner), bare

    def __call__(self) -> Any:
        """The state to pickle or copy."""
        owner = self._owner()
        of_class = getattr(type(owner), "__getstate__", None)  # from Python 3.11 on every class has it
        state = vars(owner) if of_class is None else of_class(owner)
        if not isinstance(state, dict):
            return state
        bare = {name: self._bare(value) for name, value in state.items() if value is not self}
        return {name: value for name, value in bare.items() if value is not None or state[name] is None}
