"""The backward passes whose gradients are in the sum that an optimizer uses."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...core.torch_modes import outside_dispatch_modes, will_run

if TYPE_CHECKING:
    from torch.autograd.graph import Node


class Passes:
    """Counts backward passes through the outputs of one module, in one step.

    A sum ends where its gradients are dropped or written to, as a clear does; no value is read. One ends as well where the parameters
    move: by an optimizer that has used it, or by sharpness-aware minimisation.

    Args:
        module: held weakly.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._task = -1
        self._count = self._used = 0
        self._calls = 0  # of the module before the last pass
        # a parameter, its version, its gradient's id and version
        self._sum: tuple[weakref.ref[Tensor], int, int, int] | None = None

    @property
    def micro_batches(self) -> int:
        """The most passes in one sum, and at least 1."""
        return max(self._used, self._count, 1)

    def accumulates(self) -> bool:
        """Within a pass: whether it adds to gradients of the module, and does not only return some or stop at an input."""
        module = self._module()
        return module is not None and any(_is_reached(parameter) for parameter in module.parameters() if parameter.requires_grad)

    def was_cleared(self) -> bool:
        """Whether the sum was cleared since the last pass, and not used."""
        if self._sum is None:
            return False
        place, value_version, gradient, version = self._sum
        parameter = place()
        if parameter is None:
            return False
        now, is_used = parameter.grad, parameter._version != value_version
        if not is_used and id(now) == gradient and now is not None and now._version == version:
            return False
        if is_used:
            self._used = max(self._used, self._count)
        self._count, self._sum = 0, None
        return not is_used

    def began(self, calls: int) -> bool:
        """Count the running pass once, unless there was no forward since the last one: several may follow a single forward.

        Args:
            calls: of the module so far.

        Returns:
            Whether the pass is new, so that its end has to be seen.
        """
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return False
        self._task = task
        self._count += calls > self._calls
        self._calls = calls
        return True

    def ended(self) -> None:
        """Note what shows later whether the sum was cleared or used."""
        module = self._module()
        for parameter in () if module is None else module.parameters():
            if (gradient := parameter.grad) is not None:
                self._sum = weakref.ref(parameter), parameter._version, id(gradient), gradient._version
                return


def _is_reached(parameter: Tensor) -> bool:
    """Whether the running pass accumulates into the parameter."""
    with outside_dispatch_modes(), torch.enable_grad():
        view: Node | None = parameter.view_as(parameter).grad_fn
    node = None if view is None else view.next_functions[0][0]
    return node is not None and will_run(node)
