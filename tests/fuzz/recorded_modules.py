"""What modules take and return in a loop that is recorded, and the gradients of that."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .observer import Observer
from .truth import Truth

if TYPE_CHECKING:
    from .loop import Loop

ROOT = "[root module]"


def paths(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Each tensor in nested tuples, lists and dicts, named by its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from paths(item, f"{path}.{key}")
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from paths(item, f"{path}[{index}]")


def copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def divided(gradient: Tensor, by: float) -> Tensor:
    """Scales are powers of two, so that this is exact where the exponent has room."""
    wide = gradient.float() if gradient.dtype == torch.float16 else gradient
    return copied(gradient) if by == 1.0 else wide.detach() / by


class RecordedModules(Observer):
    """Hooks on modules and parameters. A subclass knows which step is in flight."""

    loop: Loop

    def __init__(self) -> None:
        self.open: Truth | None = None
        self.in_backward = self.has_arrived = False
        self._trains = False
        self._stack: list[str] = []
        self._numbers: Counter[str] = Counter()
        self._reference: nn.Module | None = None
        self._others: dict[str, list[Tensor]] = {}

    def ensure(self) -> Truth | None:
        raise NotImplementedError

    def scale_of(self, part: int) -> float:
        raise NotImplementedError

    @contextlib.contextmanager
    def forward(self, trains: bool) -> Iterator[None]:
        if not trains:
            yield
            return
        self.ensure()
        real = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = self._attending(real)
        self._trains = True
        self._numbers.clear()
        before = None if self.open is None else self.open.measured()
        try:
            yield
        except BaseException:
            if self.open is not None and before is not None:
                self.open.drop(before)
            raise
        finally:
            self._trains = False
            F.scaled_dot_product_attention = real

    def hang(self, model: nn.Module, reference: nn.Module | None) -> None:
        """Hang hooks on the model, and on the reference that it is compared with."""
        self._reference = reference
        for name, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                module.register_forward_pre_hook(self._entering(name or ROOT))
                module.register_forward_hook(self._leaving(name or ROOT), always_call=True)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._arriving(name))
        for name, module in reference.named_modules() if reference is not None else ():
            module.register_forward_hook(self._keeping(name or ROOT))

    # --- hooks -----------------------------------------------------------------------------------------------------------------

    def _arriving(self, name: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor | None) -> None:
            self.has_arrived |= self.in_backward
            if self.in_backward and self.open is not None and gradient is not None:
                self.open.local.setdefault(name, []).append(divided(gradient, self.scale_of(0)))

        return hook

    def _entering(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            self._stack.append(name)
            if self.open is not None and self._trains:
                for path, tensor in paths(args[0] if len(args) == 1 else args, name):
                    self.open.inputs.setdefault(path, []).append(copied(tensor))
                if name == ROOT and self._reference is not None:
                    self._refer(self._reference, args)

        return hook

    def _leaving(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._stack.pop()
            if self.open is None or not (self._trains or self.in_backward):
                return
            with torch.no_grad():
                for path, tensor in paths(output, name):
                    if self._trains:
                        self._returned(self.open, name, path, tensor)
                    if tensor.requires_grad:
                        tensor.register_hook(self._returning(path))
            self._numbers[name] += self._trains

        return hook

    def _returned(self, truth: Truth, name: str, path: str, tensor: Tensor) -> None:
        truth.outputs.setdefault(path, []).append(copied(tensor))
        truth.calls.setdefault(f"{name}@{self._numbers[name]}{path[len(name) :]}", []).append(copied(tensor))
        if self._others.get(path):
            truth.differences.setdefault(path, []).append((copied(tensor), self._others[path].pop(0)))

    def _returning(self, path: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            if self.in_backward and self.open is not None:
                self.open.output_gradients.setdefault(path, []).append(divided(gradient, self.scale_of(0)))

        return hook

    # --- the reference ---------------------------------------------------------------------------------------------------------

    def _refer(self, reference: nn.Module, args: Any) -> None:
        """Run the reference on the same inputs with the same random numbers, and leave it as it was."""
        reference.train(self.loop.model.training)
        buffers = {name: copied(b) for name, b in reference.named_buffers()}
        random, self._others, self._trains = torch.get_rng_state(), {}, False
        with torch.no_grad():
            reference(*args)
            for name, buffer in reference.named_buffers():
                buffer.copy_(buffers[name])
        torch.set_rng_state(random)
        self._trains = True

    def _keeping(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for path, tensor in paths(output, name):
                self._others.setdefault(path, []).append(copied(tensor))

        return hook

    # --- attention -------------------------------------------------------------------------------------------------------------

    def _attending(self, real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            result = real(query, key, value, *args, **kwargs)
            if self.open is not None and self._trains:
                named = dict(zip(("attn_mask", "dropout_p", "is_causal", "scale"), args, strict=False))
                tensors = {"query": query, "key": key, "value": value, "activation": result}
                call = {**named, **kwargs, **{label: copied(tensor) for label, tensor in tensors.items()}}
                self.open.attention.setdefault(self._stack[-1], []).append(call)
            return result

        return attend
