"""One forward and backward pass again and again, on the same batch and the same random numbers, compared bit for bit."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..capture.hooks import unwrapped
from ..capture.measurer import untouched_rng
from ..core import torch_modes
from ..core import validation as check
from ..core.errors import display
from ..core.formatting import ShownAsText
from ..statistics.fingerprint import fingerprints
from ..step.ranks import local_part

LOSS = "loss"
#: The fingerprints of one pass by name, the loss first.
_Found = dict[str, int]


@dataclass(frozen=True, repr=False)
class DeterminismReport(ShownAsText):
    """The same forward and backward pass several times, compared bit for bit. Print it, or read the attributes.

    Attributes:
        losses: of each pass.
        odd: the number of the pass that is unlike all others, from 0; empty for any other verdict than ``"one-off"``.
        differing: what differs between passes: ``"loss"``, and names of parameters whose gradients differ, in the order of the model.
        compared: number of gradients that were compared.
        verdict: ``"equal"``; ``"one-off"``: one pass is unlike all before and after it, as after an error of the hardware;
            ``"changed"``: from some pass on all are alike, and unlike those before; ``"non-deterministic"``: passes differ again and
            again. The last two are no sign of faulty hardware.
    """

    losses: tuple[float, ...]
    odd: tuple[int, ...]
    differing: tuple[str, ...]
    compared: int
    verdict: str

    def __str__(self) -> str:
        passes, what = f"{len(self.losses)} passes over one batch", f"the loss and {self.compared:,} gradients"
        if self.verdict == "equal":
            return f"{passes} gave the same bits: {what}"
        where = f"{self.differing[0]}{f' and {len(self.differing) - 1:,} more' if len(self.differing) > 1 else ''}"
        if self.verdict == "one-off":
            return (
                f"of {passes} number {self.odd[0]} gave other bits than all before and after it: {where} ({what} were compared). Kernels "
                "that give varying results would differ more often: suspect this device or its memory, and test it"
            )
        if self.verdict == "changed":
            return (
                f"{passes} gave two results, one after the other: {where} ({what} were compared). The first of them have changed "
                "something that the next ones use, such as a cache or the choice of a kernel: check again"
            )
        return (
            f"{passes} differ from each other: {where} ({what} were compared). Kernels here give varying results, "
            "so errors of the hardware cannot be distinguished: call torch.use_deterministic_algorithms(True), and check again"
        )


def check_determinism(model: nn.Module, compute: Callable[[nn.Module], Tensor], times: int = 3) -> DeterminismReport:
    """Run forward and backward of one batch several times with the same random numbers, and compare the results bit for bit, to
    distinguish a faulty device from a faulty program: ``print(check_determinism(model, lambda model: loss_fn(model(x), y)))``.

    Each pass runs on a new copy of the model without DDP and ``torch.compile``, so nothing of the training changes, and nothing is
    exchanged between ranks; random generators are restored. It takes the time of ``times`` passes, twice that if results differ, and the
    memory of one more model with its gradients. Synchronises the device.

    Args:
        model: that trains, with or without a monitor.
        compute: takes the copy and returns the loss, a tensor of one element. What else it changes stays changed.
        times: how many passes, at least 2. Where their results differ, as many again show whether they differ each time, as those of
            non-deterministic kernels do.

    Raises:
        TypeError: a model that cannot be copied, sharded by ``fully_shard``, or with DDP inside; a ``compute`` that is no function or
            returns no loss.
        ValueError: there is no trained parameter; ``times`` is no integer from 2 on; ``compute`` called the model itself or returned a
            loss without a graph or gradients.
    """
    check.module(model)
    check.positive_int("times", times)
    if times < 2:
        raise ValueError(f"check_determinism(times={times}) compares nothing; give at least 2")
    if not callable(compute):
        raise TypeError(f"check_determinism() takes a function of the model that returns the loss, got {display(compute)}")
    inner = unwrapped(model)
    _check(inner)
    passes = [_pass(model, inner, compute) for _ in range(times)]
    verdict, odd = _verdict(passes)
    if verdict != "equal":
        passes += [_pass(model, inner, compute) for _ in range(times)]
        verdict, odd = _verdict(passes)
    found = [values for _, values in passes]
    differing = tuple(name for name in dict.fromkeys(chain(*found)) if len({values.get(name) for values in found}) > 1)
    compared = len({name for values in found for name in values} - {LOSS})
    return DeterminismReport(tuple(loss for loss, _ in passes), odd, differing, compared, verdict)


#: Classes of modules whose parameters are in parts on all ranks.
_SHARDED = ("FSDPModule", "FullyShardedDataParallel", "PipelineParts")


def _check(inner: nn.Module) -> None:
    in_parts = any(base.__name__ in _SHARDED for module in inner.modules() for base in type(module).__mro__)
    if in_parts or any(hasattr(parameter, "ds_id") for parameter in inner.parameters()):
        raise TypeError(
            "check_determinism() runs a pass on one rank by itself, and a model in parts (fully_shard(), FSDP1, ZeRO 3, stages of a "
            "pipeline) "
            "needs all ranks for a pass: replay it on a model that is not sharded, with the same parameters"
        )
    for module in inner.modules():
        if isinstance(module, DistributedDataParallel):
            raise TypeError(
                "check_determinism() runs a pass on one rank by itself, and DistributedDataParallel inside of the model would exchange "
                "with "
                "others: wrap the whole model in it, or watch the part below"
            )
    if not any(parameter.requires_grad for parameter in inner.parameters()):
        raise ValueError("no parameter of the model requires a gradient, so check_determinism() has nothing to compare")


@contextlib.contextmanager
def _untouched(*modules: nn.Module) -> Iterator[None]:
    """Refuse calls of the modules themselves, which would change them, and may exchange with ranks that do not call them."""

    def refuse(*_: object) -> None:
        raise ValueError(
            "check_determinism() gives a copy of the model to its function, which called the model itself: write "
            "check_determinism(lambda model: loss_fn(model(x), y)) and use that argument"
        )

    with contextlib.ExitStack() as hooks:
        for module in {id(each): each for each in modules}.values():
            hooks.enter_context(module.register_forward_pre_hook(refuse, prepend=True))
        yield


def _verdict(passes: list[tuple[float, _Found]]) -> tuple[str, tuple[int, ...]]:
    found = [tuple(values.items()) for _, values in passes]
    usual, count = Counter(found).most_common(1)[0]
    if count == len(found):
        return "equal", ()
    odd = tuple(number for number, values in enumerate(found) if values != usual)
    if len(odd) == 1 and 0 < odd[0] < len(found) - 1:
        return "one-off", odd
    first = found.index(found[-1])
    changes_once = len({*found[:first]}) == 1 and len({*found[first:]}) == 1
    return "changed" if changes_once else "non-deterministic", ()


def _pass(outer: nn.Module, inner: nn.Module, compute: Callable[[nn.Module], Tensor]) -> tuple[float, _Found]:
    """The loss, and the fingerprints of the loss and of each gradient that exists."""
    try:
        model = torch_modes.copied_module(inner)
    except Exception as error:
        raise TypeError(
            f"check_determinism() runs on a copy of the model, which cannot be made ({type(error).__name__}: "
            f"{error}); call it between two steps"
        ) from error
    devices = {tensor.device for tensor in chain(model.parameters(), model.buffers())}
    with torch.enable_grad(), untouched_rng(), torch_modes.untouched_generators(devices), _untouched(outer, inner):
        loss = compute(model)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else display(loss)
            raise TypeError(
                f"check_determinism() takes a function of the model that returns the loss, a tensor of one element; got {what}"
            )
        if not loss.requires_grad:
            raise ValueError(
                "the loss that check_determinism() got has no graph: compute it from the model's output, without "
                "no_grad() or inference_mode()"
            )
        loss.backward()  # type: ignore[no-untyped-call]
    tensors: dict[str, Tensor] = {LOSS: loss.detach()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = local_part(parameter.grad)
            tensors[name] = gradient.coalesce().to_dense() if gradient.is_sparse else gradient
    if len(tensors) == 1:
        raise ValueError(
            "the loss that check_determinism() got has no gradient of any parameter of the model that its function was given"
        )
    return float(loss.detach()), {name: int(fingerprints([tensor])) for name, tensor in tensors.items()}
