"""Forward hooks on modules that metrics match: which modules these are, and when hooks are installed."""

from __future__ import annotations

import weakref
from collections.abc import Container, Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from ...core import keys as n
from ...core.keys import canonical_names
from ...core.records import Metric
from ...core.torch_modes import TELLS_EXPORT
from ...step.buffer import StepBuffer
from ...step.model_index import ModelIndex
from ..hooks import Handles, ModuleHook, takes_hooks
from .compiled import CompiledHooks, alike, in_graphs, is_compiled, wrapped_by
from .values import ModuleValues

_OUTPUTS = (n.ACTIVATION, n.ACTIVATION_GRADIENT, n.ACTIVATION_DIFFERENCE)
_INPUTS = (n.INPUT, n.INPUT_GRADIENT)
_SCRIPTED = "a module of TorchScript (torch.jit), which calls no Python hooks"
OLD_RELEASE = "inside torch.compile they need torch 2.7 or newer"
_LEFT_OUT = "left out by excluded_modules_regex"
_Place = tuple[str, str]


class RootListener(Protocol):
    """Listener of the hooks on the root."""

    def root_began(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """Called before the root's other forward pre-hooks."""

    def root_ended(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Called after the root has returned or raised, and after the hook on its own output."""


class Listener(Protocol):
    """Listener of the hooks on matched modules, which may include the root."""

    def called(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """A module with a metric of inputs is called."""

    def returned(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A module with a metric of outputs has returned."""


class ForwardHooks:
    """The hooks on a model's modules. Only modules with a metric have one, and the root if needed.

    Args:
        of_root: listens to the root; hooks hold both listeners weakly.
        listener: listens to matched modules.
        eps: an element counts as near zero when ``|x| <= eps``.

    Attributes:
        graphs: what the hooks do in compiled graphs.
        has_compiled_parts: whether the model had any when hooks were installed.
    """

    def __init__(self, of_root: RootListener, listener: Listener, eps: float) -> None:
        self._of_root, self._listener, self.graphs = of_root, listener, CompiledHooks(eps)
        self._before_root, self._after_root = Handles(), Handles()
        # with the module, since another one may take its name, and even its address
        self._hooks: dict[_Place, tuple[weakref.ref[nn.Module], Handles]] = {}
        self._version: int | None = None
        self.has_compiled_parts = False
        self._left_out: list[str] = []  # names of modules that no metric applies to
        self._unhooked: list[str] = []  # names of modules that accept no hooks
        self._root: weakref.ref[nn.Module] | None = None
        self._asked: tuple[ModelIndex, Sequence[Metric], int, bool] | None = None

    def install(self, root: nn.Module, inventory: ModelIndex, metrics: Sequence[Metric], version: int, on_root: bool) -> bool:
        """Install hooks on modules that any of ``metrics`` matches, once per ``version`` of the plan. Returns whether it did.

        ``on_root``: also on the root, in any case.
        """
        if version == self._version:
            return False
        self._version, self._asked = version, (inventory, metrics, version, on_root)
        wanted = _wanted(inventory, metrics)
        measured = {place for place in wanted if _has_views(place, metrics)}
        wanted |= _in_same_graphs(root, inventory, wanted, measured)
        for place, (reference, handles) in list(self._hooks.items()):
            is_kept = place not in wanted and self.graphs.is_traced(*place)  # removal would cause a recompilation
            if not is_kept and (place not in wanted or wanted[place] is not reference()):
                handles.remove()
                self.graphs.remove(*place)
                del self._hooks[place]
        needs_root = (on_root or bool(wanted)) and takes_hooks(root)
        if needs_root and not self._before_root:
            self._before_root.of_module(root.register_forward_pre_hook(self._began_hook(root), prepend=True, with_kwargs=True))
        new, taken = wanted.keys() - self._hooks.keys(), frozenset(inventory.modules)
        for place, module in wanted.items():
            if place in new:
                self._hooks[place] = weakref.ref(module), self._register(*place, module, root, place[1] in taken)
        inside = in_graphs(root)
        compiled = {place for place, module in wanted.items() if id(module) in inside}
        self.graphs.request(metrics, measured, compiled, taken)
        if needs_root and (new or not self._after_root):  # after the hook on the root's own output
            self._after_root.remove()
            self._after_root.of_module(root.register_forward_hook(ModuleHook(self._of_root.root_ended), always_call=True))
        if not needs_root and not self.graphs.has_graphs:
            self._leave_root()
        self.has_compiled_parts = is_compiled(root)
        self._left_out = _left_out(root, inventory)
        modules = ((name, reference()) for name, reference in inventory.modules.items())
        self._unhooked = [name for name, module in modules if module is not None and not takes_hooks(module)]
        self._root = weakref.ref(root)
        return True

    def install_in_compiled(self) -> bool:
        """Parts may have been compiled since hooks were installed, and need more. Returns whether the model has compiled parts."""
        root = None if self._root is None else self._root()
        if self._asked is None or root is None or not is_compiled(root):
            return False
        self._version = None
        return self.install(root, *self._asked)

    def _register(self, kind: str, name: str, module: nn.Module, root: nn.Module, is_heard: bool) -> Handles:
        """``is_heard``: the listener hears of calls outside of graphs."""
        handles = Handles()
        heard = self._listener.called if kind in _INPUTS else self._listener.returned
        hook = ModuleHook(heard if is_heard else self.graphs.ignore, name, tap=self.graphs.add(kind, name, module, root))
        if kind in _INPUTS:
            handles.of_module(module.register_forward_pre_hook(hook, with_kwargs=True))
        else:
            handles.of_module(module.register_forward_hook(hook))
        return handles

    def _began_hook(self, root: nn.Module) -> ModuleHook:
        return ModuleHook(self._of_root.root_began, tap=self.graphs.add("", n.ROOT, root, root))

    def collect(self, buffer: StepBuffer, values: ModuleValues) -> None:
        """See :meth:`CompiledHooks.collect`."""
        if self._asked is not None:
            self.graphs.collect(buffer, values, self._asked[1])

    def explain(self, absent: dict[tuple[str, str], str]) -> None:
        """Add the reasons for modules that have no hooks."""
        if self._unhooked:
            sources = (*n.MODULE_SOURCES, *n.RCC_SOURCES)
            absent.update(((source, name), _SCRIPTED) for source in sources for name in self._unhooked)
        for source in n.ATTENTION_SOURCES.values():
            if (source, "") in absent:  # the caller of a call that was not seen is unknown
                absent.update(((source, name), _LEFT_OUT) for name in self._left_out)

    def silent(self, called: Container[_Place]) -> list[str]:
        """Names of modules in compiled parts whose hooks were not ``called``: to releases before 2.7 no graph has a hook of ours."""
        if TELLS_EXPORT or self._root is None or (root := self._root()) is None:
            return []
        inside = in_graphs(root)
        hooked = ((place, module()) for place, (module, _) in self._hooks.items() if place not in called)
        return [name for (_, name), module in hooked if module is not None and id(module) in inside]

    @property
    def root(self) -> nn.Module | None:
        """The module that hooks were installed for last."""
        return None if self._root is None else self._root()

    @property
    def on_root(self) -> bool:
        """Whether the root has hooks."""
        return bool(self._before_root)

    @property
    def on_root_inputs(self) -> bool:
        """Whether the root's inputs have a hook."""
        return (_INPUTS[0], n.ROOT) in self._hooks

    @property
    def on_parts(self) -> bool:
        """Whether modules other than the root have hooks; the root's are called even if the model was traced."""
        return any(name != n.ROOT for _, name in self._hooks)

    @property
    def has_hooks(self) -> bool:
        """Whether any module has a hook."""
        return self.on_root or self.on_parts

    @property
    def has_hooks_on_parts(self) -> bool:
        """Whether any module, including the root, has hooks on inputs or outputs."""
        return len(self._hooks) > 0

    @property
    def has_removable_hooks(self) -> bool:
        """Whether some hooks are needed on monitored steps only, and the model is not compiled.

        A compiled model would be recompiled whenever a module's hooks change, so its hooks stay, which costs nothing.
        """
        return bool(self._hooks) and not self.has_compiled_parts and not self.graphs.has_graphs

    def uninstall(self, stays_on_root: bool) -> None:
        """Remove the hooks that only monitored steps need; also those on the root, unless it must keep them."""
        for _, handles in self._hooks.values():
            handles.remove()
        self._hooks, self._version, self._asked = {}, None, None
        self.graphs.clear()
        if not stays_on_root:
            self._leave_root()

    def _leave_root(self) -> None:
        self._before_root.remove()
        self._after_root.remove()


def _wanted(inventory: ModelIndex, metrics: Sequence[Metric]) -> dict[_Place, nn.Module]:
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


def _has_views(place: _Place, metrics: Sequence[Metric]) -> bool:
    """Whether a graph can compute any metric of the module's output."""
    kind, name = place
    return kind in _OUTPUTS and any(m.source == n.ACTIVATION and m.function is None and m.matches(name) for m in metrics)


def _in_same_graphs(
    root: nn.Module, inventory: ModelIndex, wanted: Mapping[_Place, nn.Module], measured: set[_Place]
) -> dict[_Place, nn.Module]:
    """The modules that need hooks only because those at the same place of other blocks have them: else the blocks would not share a graph,
    and one with hooks might run the graph of one without. Adds to ``measured`` what their graph computes, too.
    """
    names: dict[int, str] = {}
    found: dict[_Place, nn.Module] = {}
    for members in alike(root):
        names = names or {
            **{id(module): name for name, module in root.named_modules()},  # also those that are excluded
            **{id(module): name for name, reference in inventory.modules.items() if (module := reference()) is not None},
        }
        for kind in (_OUTPUTS[0], _INPUTS[0]):
            places = {(kind, names[id(module)]): module for module in members if takes_hooks(module)}
            if not places.keys().isdisjoint(wanted):
                found.update((place, module) for place, module in places.items() if place not in wanted)
            if not places.keys().isdisjoint(measured):
                measured.update(places)
    return found


def _left_out(root: nn.Module, inventory: ModelIndex) -> list[str]:
    """Canonical names of modules that are not in the index."""
    known = (module for reference in inventory.modules.values() if (module := reference()) is not None)
    there = {id(part) for module in known for part in wrapped_by(module)}
    return list(canonical_names(name for name, module in root.named_modules() if id(module) not in there).values())
