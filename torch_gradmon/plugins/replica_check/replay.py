"""One forward and backward pass again and again, on the same batch and the same random numbers, compared bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...capture.measurer import untouched_rng
from ...capture.reference.isolated_call import unchanged
from ...core.errors import display
from ...core.torch_modes import autocast_cache_kept
from ...statistics.fingerprint import fingerprints
from ...step.ranks import is_dtensor

LOSS = "loss"


@dataclass(frozen=True)
class Replay:
    """The same forward and backward pass several times, compared bit for bit. Print it, or read the attributes.

    Attributes:
        losses: of each pass.
        odd: numbers of the passes that are unlike most, from 0; empty if all are equal, or none is like another.
        differing: what differs between passes: ``"loss"``, and names of parameters whose gradients differ, in the order of the model.
        compared: number of gradients that were compared; 0 where ``GRADMON_DISABLE`` is set, and nothing was run.
        verdict: ``"equal"``; ``"one-off"``: most are equal, and a few are not, as after an error of the hardware;
            ``"non-deterministic"``: passes differ again and again, so this tells nothing about the hardware.
    """

    losses: tuple[float, ...]
    odd: tuple[int, ...]
    differing: tuple[str, ...]
    compared: int
    verdict: str

    def __str__(self) -> str:
        if not self.losses:
            return "nothing was run: GRADMON_DISABLE is set"
        passes, what = len(self.losses), f"the loss and {self.compared:,} gradients"
        if self.verdict == "equal":
            return f"{passes} passes over one batch gave the same bits: {what}"
        where = f"{self.differing[0]}{f' and {len(self.differing) - 1:,} more' if len(self.differing) > 1 else ''}"
        if self.verdict == "one-off":
            numbers = ", ".join(map(str, self.odd))
            return (
                f"pass {numbers} of {passes} over one batch gave other bits than the rest: {where} ({what} were compared). Kernels that "
                "give varying results would differ more often: suspect this device or its memory, and test it"
            )
        return (
            f"{passes} passes over one batch differ from each other: {where} ({what} were compared). Kernels here give varying results, "
            "so errors of the hardware cannot be told apart: call torch.use_deterministic_algorithms(True), and replay again"
        )


def replay(model: nn.Module, compute: Callable[[nn.Module], Tensor], times: int) -> Replay:
    """Run ``compute`` and its backward pass ``times`` times; where results differ, as many times again.

    Nothing of the training changes: gradients are returned, not accumulated, so hooks on accumulated gradients are not called; buffers,
    attributes and random generators are restored. Synchronises the device.

    Raises:
        TypeError, ValueError: the model is sharded by ``fully_shard``, or ``compute`` returned no loss.
    """
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    if any(base.__name__ == "FSDPModule" for module in inner.modules() for base in type(module).__mro__):
        raise TypeError(
            "replay_step() runs a pass on one rank by itself, and a model sharded by fully_shard() needs all ranks for a pass: "
            "replay it on a model that is not sharded, with the same parameters"
        )
    parameters = {name: parameter for name, parameter in inner.named_parameters() if parameter.requires_grad}
    passes = [_pass(inner, compute, parameters) for _ in range(times)]
    if _differ(passes):
        passes += [_pass(inner, compute, parameters) for _ in range(times)]
    counts = Counter(found for _, found in passes)
    usual, most = counts.most_common(1)[0]
    odd = tuple(number for number, (_, found) in enumerate(passes) if found != usual)
    # among results that vary, some may be equal by chance
    verdict = "equal" if not odd else "one-off" if 2 * most > len(passes) and not _differ(passes[times:]) else "non-deterministic"
    by_name = zip((LOSS, *parameters), zip(*(found for _, found in passes), strict=True), strict=True)
    differing = [name for name, values in by_name if len({*values}) > 1]
    return Replay(
        tuple(loss for loss, _ in passes), odd if verdict == "one-off" else (), tuple(differing), len(parameters), verdict
    )


def _differ(passes: list[tuple[float, tuple[int | None, ...]]]) -> bool:
    return len({found for _, found in passes}) > 1


def _pass(
    model: nn.Module, compute: Callable[[nn.Module], Tensor], parameters: Mapping[str, nn.Parameter]
) -> tuple[float, tuple[int | None, ...]]:
    """The loss, and the fingerprints of the loss and of each gradient; None for a gradient that does not exist."""
    with torch.enable_grad(), untouched_rng(), unchanged(model), autocast_cache_kept():
        loss = compute(model)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else display(loss)
            raise TypeError(
                f"replay_step() takes a function of the model that returns the loss, a tensor of one element; got {what}"
            )
        if not loss.requires_grad:
            raise ValueError(
                "the loss that replay_step() got has no graph: compute it from the model's output, without no_grad()"
            )
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    found: list[int | None] = [None] * (1 + len(gradients))
    by_device: dict[torch.device, list[int]] = {}
    tensors = [loss.detach(), *(g.to_local() if g is not None and is_dtensor(g) else g for g in gradients)]  # type: ignore[attr-defined]
    for number, tensor in enumerate(tensors):
        if tensor is not None:
            by_device.setdefault(tensor.device, []).append(number)
    for numbers in by_device.values():
        values = fingerprints([_dense(tensors[number]) for number in numbers]).tolist()
        for number, value in zip(numbers, values, strict=True):
            found[number] = value
    return float(loss.detach()), tuple(found)


def _dense(tensor: Tensor) -> Tensor:
    return tensor.coalesce().to_dense() if tensor.is_sparse else tensor
