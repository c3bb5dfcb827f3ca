"""What is saved and copied of an object that has something of ours on it: all of it but that.

Both ways use that pickle and copy look up ``__reduce_ex__`` and ``__getstate__`` on the object before its class. So no class is
changed, nothing of ours is in the bytes, and they load with ``weights_only=True`` where those of the bare object do.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

_ATTRIBUTES = ("gradmon", "__reduce_ex__", "values")


class Unsaved:
    """Keeps entries of a dict of hooks out of what is pickled and deep-copied of it; the hooks are called as before.

    It hangs on the dict and not on the module: a module may have a ``__getstate__`` of its own, shallow copies share the dict, and
    the handles of others know the dict by its identity, so that none may take its place.

    Args:
        hooks: the dict; it is held weakly.

    Attributes:
        keys: the entries that are left out.
        monitor: what a module with :class:`torch_gradmon.MonitorMixin` is linked to; left out as well.
    """

    def __init__(self, hooks: OrderedDict[int, Any]) -> None:
        self._hooks = weakref.ref(hooks)
        self.keys: set[int] = set()
        self.monitor: weakref.ref[Any] | None = None
        hooks.gradmon, hooks.__reduce_ex__ = self, self._reduce  # type: ignore[attr-defined, method-assign]

    def _bare(self) -> OrderedDict[int, Any]:
        hooks = self._hooks()
        assert hooks is not None  # it is what calls this
        bare = OrderedDict((key, hook) for key, hook in hooks.items() if key not in self.keys)
        vars(bare).update((name, value) for name, value in vars(hooks).items() if name not in _ATTRIBUTES)
        return bare

    def _reduce(self, protocol: Any) -> Any:
        return self._bare().__reduce_ex__(protocol)

    def leave_unscripted(self) -> None:
        """Keep them from ``torch.jit.script`` as well, which compiles the values of a module's dict; the items are what is called."""
        if (hooks := self._hooks()) is not None:
            hooks.values = lambda: self._bare().values()  # type: ignore[method-assign]

    def leave_if_empty(self) -> None:
        """Go from the dict where nothing is left out of it."""
        hooks = self._hooks()
        if hooks is not None and not self.keys and self.monitor is None:
            for name in _ATTRIBUTES:
                vars(hooks).pop(name, None)


def unsaved_of(hooks: Any) -> Unsaved | None:
    """What keeps entries of ``hooks`` out, where any are."""
    return getattr(hooks, "gradmon", None)


def leave_out(handle: RemovableHandle, scripted: bool = True) -> None:
    """Leave the hook of ``handle`` out of what is saved of the module or optimizer that it is on; not ``scripted``, out of what
    ``torch.jit.script`` compiles, too.
    """
    for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
        hooks = reference()
        if isinstance(hooks, OrderedDict) and handle.id in hooks:
            unsaved = unsaved_of(hooks) or Unsaved(hooks)
            unsaved.keys.add(handle.id)
            if not scripted:
                unsaved.leave_unscripted()


def remove(handle: RemovableHandle) -> None:
    """Remove the hook of ``handle``, and what :func:`leave_out` did for it."""
    handle.remove()
    for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
        if (unsaved := unsaved_of(reference())) is not None:
            unsaved.keys.discard(handle.id)
            unsaved.leave_if_empty()


class BareState:
    """Stands on an object as its ``__getstate__``: what the class gives, each attribute as ``bare`` makes it.

    Args:
        owner: the object; it is held weakly.
        bare: the value of an attribute without anything of ours, None where nothing is left of it.
    """

    def __init__(self, owner: Any, bare: Callable[[Any], Any]) -> None:
        self._owner, self._bare = weakref.ref(owner), bare

    def __call__(self) -> Any:
        """The state that is pickled or copied."""
        owner = self._owner()
        of_class = getattr(type(owner), "__getstate__", None)  # from Python 3.11 on every class has it
        state = vars(owner) if of_class is None else of_class(owner)
        if not isinstance(state, dict):
            return state
        bare = {name: self._bare(value) for name, value in state.items() if value is not self}
        return {name: value for name, value in bare.items() if value is not None or state[name] is None}
