"""Where the gradients of parameters are: in ``.grad``, or where an engine keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.errors import display
from .parameter_refs import Place


class GradientSource:
    """Where the gradient of each parameter is, when it is final, and what the optimizer steps in its place.

    This class describes plain PyTorch. A subclass describes an engine that keeps gradients elsewhere: in buffers of its own
    (``main_grad``), or in flat tensors that each rank steps a part of (ZeRO). Pass it as ``ModuleMonitor(gradient_source=...)``.

    Every method takes a parameter of the watched model and is called a few times in each step that takes values, so it should only look
    things up. It must not communicate, since other ranks may not call it, nor wait for a device. One that raises costs the values
    of the step, with a warning.
    """

    #: Whether gradients are final only when the outermost optimizer steps, as where it reduces them or an engine does so after the last
    #: backward pass. Otherwise they are when a backward pass ends.
    is_final_at_step = False
    #: The object around all optimizers whose ``step`` steps them, such as an engine; None where the loop calls theirs.
    outer: Any = None
    #: An object whose ``step`` runs all passes of a step, after which gradients are final, such as the schedule of a pipeline; None where
    #: the loop runs them.
    boundary: Any = None
    #: Names of its methods that call the model without training it; those that it lacks do not count.
    trials: Sequence[str] = ()
    #: Whether a GradScaler leaves accumulated gradients scaled, since it unscales those that the optimizer uses, which are others.
    stays_scaled = False
    #: Ranks have other parts of the model, which clip and step together.
    is_pipeline = False

    def groups_of(self, optimizer: Optimizer) -> Sequence[Sequence[Tensor]]:
        """What the optimizer steps in each of its groups, whatever these have between two steps."""
        return [group["params"] for group in optimizer.param_groups]

    def tensors_of(self, optimizer: Optimizer) -> Sequence[Tensor]:
        """All that the optimizer steps."""
        return [tensor for group in self.groups_of(optimizer) for tensor in group]

    def stepped(self, parameter: nn.Parameter) -> Tensor:
        """The tensor in the optimizer's groups that stands for the parameter: itself, a master copy, or a flat tensor of many."""
        return parameter

    def value(self, parameter: nn.Parameter) -> Tensor:
        """The elements that the optimizer changes on this rank, of any shape: parameters and updates are measured on them."""
        return self.stepped(parameter)

    def hook_places(self, places: Sequence[Place]) -> Sequence[Place]:
        """The tensors that autograd accumulates gradients of, where these are others than the parameters at ``places``."""
        return places

    def accumulated(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient before the clip, of all micro-batches, or this rank's part of it; None if it has none."""
        return parameter.grad

    def used(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient that the optimizer is about to use; None if it has none, or belongs to a group that it does not step now."""
        return self.stepped(parameter).grad

    def is_part(self, parameter: nn.Parameter) -> bool:
        """Whether other ranks have other elements of the parameter, so that rows of all ranks are merged."""
        return False

    def scale(self) -> float | Tensor | None:
        """By what accumulated gradients are multiplied at this moment, such as a loss scale; None if they are not."""
        return None

    def is_due(self) -> bool:
        """Whether :attr:`outer`, whose step begins, steps the optimizers, and does not only count a micro-batch."""
        return True

    def searches_scale(self) -> bool:
        """Whether infinite gradients may mean no more than that a loss scale is too large, so that they are no spike."""
        return True

    def has_overflowed(self) -> bool:
        """Whether the engine has left out the step that it was just asked for, because gradients were infinite."""
        return False

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return tuple(parameter.shape)


#: Plain PyTorch.
PLAIN_GRADIENTS = GradientSource()


class MainGradSource(GradientSource):
    """Gradients in ``parameter.main_grad``, and the optimizer's copy of each parameter in ``parameter.main_param``, where there is one: the
    names that Megatron-LM uses. It is chosen by itself for a model whose parameters have a ``main_grad``.

    Ranks may reduce gradients after the last backward pass, so they are read when the optimizer steps.
    """

    is_final_at_step = stays_scaled = True

    def stepped(self, parameter: nn.Parameter) -> Tensor:
        """The master copy, or the parameter."""
        found: Tensor | None = getattr(parameter, "main_param", None)
        return parameter if found is None else found

    def accumulated(self, parameter: nn.Parameter) -> Tensor | None:
        """The buffer, or ``.grad`` where there is none; None where the optimizer's gradient is the buffer itself."""
        found: Tensor | None = getattr(parameter, "main_grad", None)
        if found is None:
            return parameter.grad
        stepped = self.stepped(parameter).grad
        # one tensor for both: it may be clipped by now
        return None if stepped is not None and stepped.data_ptr() == found.data_ptr() else found

    def used(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient of the stepped tensor; the buffer where an optimizer reads that."""
        gradient = self.stepped(parameter).grad
        return getattr(parameter, "main_grad", parameter.grad) if gradient is None else gradient

    def is_part(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer has a part of the master copy only."""
        return self.stepped(parameter).numel() != parameter.numel()


def checked(source: object) -> GradientSource | None:
    """The user's source, or None.

    Raises:
        TypeError: it is something else.
    """
    if source is not None and not isinstance(source, GradientSource):
        raise TypeError(f"gradient_source={display(source)} must be an instance of a subclass of torch_gradmon.GradientSource")
    return source
