"""Hooks on the forward of the modules that metrics match: which modules those are, and when hooks come and go."""

from __future__ import annotations

import weakref
from collections.abc import Container, Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from ...core import keys as n
from ...core.keys import canonical_names
from ...core.metric import Metric
from ...core.moments import Column
from ...step.model_index import ModelIndex
from ..hooks import Handles, ModuleHook, takes_hooks
from .compiled import RecordingFlag, TracedStatistics, is_compiled, wrapped_by

_OUTPUTS = (n.ACTIVATION, n.ACTIVATION_GRADIENT, n.ACTIVATION_DIFFERENCE)
_INPUTS = (n.INPUT, n.INPUT_GRADIENT)
_Place = tuple[str, str]


class RootListener(Protocol):
    """What the hooks on the root tell."""

    def root_began(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """It is called; told before any other hook of its own."""

    def root_ended(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """It has returned or raised; told behind the hook on its own output."""


class Listener(Protocol):
    """What the hooks on modules with a metric tell, the root among them."""

    def called(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """One with a metric of inputs is called."""

    def returned(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """One with a metric of outputs has returned."""


class ForwardHooks:
    """The hooks on a model's modules; no module without a metric has one, but the root where it is needed.

    Args:
        of_root: told of the root; like the other, hooks hold it weakly.
        listener: told of the modules that metrics match.
        eps: an element counts as near zero when ``|x| <= eps``.

    Attributes:
        gate: lets through what graphs with hooks of ours in them write.
        taps: what each hook does in such a graph, by kind and name.
        has_compiled_parts: whether the model had any when hooks were hung.
        left_out: names of the modules that no metric applies to.
        unhooked: names of the modules that take no hooks.
    """

    def __init__(self, of_root: RootListener, listener: Listener, eps: float) -> None:
        self._of_root, self._listener, self._eps = of_root, listener, eps
        self.gate = RecordingFlag()
        self.taps: dict[tuple[str, str], TracedStatistics] = {}
        self._before_root, self._after_root = Handles(), Handles()
        # with the module, since another one may come to its name, and to its address as well
        self._hooks: dict[_Place, tuple[weakref.ref[nn.Module], Handles]] = {}
        self._version: int | None = None
        self.has_compiled_parts = False
        self.left_out: list[str] = []
        self.unhooked: list[str] = []

    def install(self, root: nn.Module, inventory: ModelIndex, metrics: Sequence[Metric], version: int, on_root: bool) -> bool:
        """Hang hooks on the modules that any of ``metrics`` matches; once for each ``version`` of the plan, else False.

        ``on_root``: on the root in any case.
        """
        if version == self._version:
            return False
        self._version = version
        wanted = _wanted(inventory, metrics)
        for place, (reference, handles) in list(self._hooks.items()):
            is_kept = place not in wanted and self.taps[place].is_traced  # else its graph would be compiled again
            if not is_kept and (place not in wanted or wanted[place] is not reference()):
                handles.remove()
                del self._hooks[place]
        needs_root = (on_root or bool(wanted)) and takes_hooks(root)
        if needs_root and not self._before_root:
            self._before_root.of_module(root.register_forward_pre_hook(self._began_hook(root), prepend=True, with_kwargs=True))
        new, taken = wanted.keys() - self._hooks.keys(), frozenset(inventory.modules)
        for (kind, name), module in wanted.items():
            if (kind, name) in new:
                handles = self._hang(kind, name, module, root, _columns_of(kind, name, metrics), taken)
                self._hooks[kind, name] = weakref.ref(module), handles
        if needs_root and (new or not self._after_root):  # behind the hook on the root's own output
            self._after_root.remove()
            self._after_root.of_module(root.register_forward_hook(ModuleHook(self._of_root.root_ended), always_call=True))
        if not needs_root and not self.has_graphs:
            self._leave_root()
        self.has_compiled_parts = is_compiled(root)
        self.left_out = _left_out(root, inventory)
        modules = ((name, reference()) for name, reference in inventory.modules.items())
        self.unhooked = [name for name, module in modules if module is not None and not takes_hooks(module)]
        return True

    def _hang(
        self, kind: str, name: str, module: nn.Module, root: nn.Module, columns: frozenset[Column], taken: Container[str]
    ) -> Handles:
        handles = Handles()
        tap = TracedStatistics(name, self.gate, root, self._eps, columns, taken)
        self.taps[kind, name] = tap
        if kind in _INPUTS:
            handles.of_module(
                module.register_forward_pre_hook(ModuleHook(self._listener.called, name, tap=tap), with_kwargs=True)
            )
        else:
            handles.of_module(module.register_forward_hook(ModuleHook(self._listener.returned, name, tap=tap)))
        return handles

    def _began_hook(self, root: nn.Module) -> ModuleHook:
        tap = self.taps["", n.ROOT] = TracedStatistics(n.ROOT, self.gate, root, self._eps, frozenset(), ())
        return ModuleHook(self._of_root.root_began, tap=tap)

    @property
    def has_graphs(self) -> bool:
        """Whether any graph has a hook of ours in it."""
        if not self.taps:  # asked in every step
            return False
        return any(tap.is_traced for tap in self.taps.values())

    @property
    def on_root(self) -> bool:
        """Whether the root has hooks."""
        return bool(self._before_root)

    @property
    def on_root_inputs(self) -> bool:
        """Whether what the root takes has a hook."""
        return (_INPUTS[0], n.ROOT) in self._hooks

    @property
    def on_parts(self) -> bool:
        """Whether modules besides the root have; the root's are called whatever was traced."""
        return any(name != n.ROOT for _, name in self._hooks)

    @property
    def has_hooks_on_parts(self) -> bool:
        """Whether any module, the root among them, has hooks for what it takes or returns."""
        return len(self._hooks) > 0

    @property
    def may_rest(self) -> bool:
        """Whether there are hooks that only monitored steps need, and the model is not compiled.

        A compiled model would be compiled again whenever a module's hooks change, so there they stay, which costs it nothing.
        """
        return bool(self._hooks) and not self.has_compiled_parts and not self.has_graphs

    def rest(self, stays_on_root: bool) -> None:
        """Take away the hooks that only monitored steps need; those on the root too, unless it has to keep them."""
        for _, handles in self._hooks.values():
            handles.remove()
        self._hooks, self.taps, self._version = {}, {}, None
        if not stays_on_root:
            self._leave_root()

    def _leave_root(self) -> None:
        self._before_root.remove()
        self._after_root.remove()


def _wanted(inventory: ModelIndex, metrics: Sequence[Metric]) -> Mapping[_Place, nn.Module]:
    """The modules that need hooks, by kind of hook and name."""
    wanted: dict[_Place, nn.Module] = {}
    for name, reference in inventory.modules.items():
        module = reference()
        if module is None or not takes_hooks(module):
            continue
        for sources in (_OUTPUTS, _INPUTS):
            if any(metric.source in sources and metric.matches(name) for metric in metrics):
                wanted[sources[0], name] = module
    return wanted


def _columns_of(kind: str, name: str, metrics: Sequence[Metric]) -> frozenset[Column]:
    """The statistics that a graph can have for the module's output."""
    views = [m for m in metrics if m.source == n.ACTIVATION and m.function is None and m.matches(name)]
    return frozenset[Column]().union(*(view.columns for view in views)) if kind in _OUTPUTS else frozenset()


def _left_out(root: nn.Module, inventory: ModelIndex) -> list[str]:
    """Canonical names of the modules that the inventory does not have."""
    known = (module for reference in inventory.modules.values() if (module := reference()) is not None)
    there = {id(part) for module in known for part in wrapped_by(module)}
    return list(canonical_names(name for name, module in root.named_modules() if id(module) not in there).values())
