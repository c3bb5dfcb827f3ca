"""What the ranks of a test do when they clip by exact norms, beside the same in float64 on whole tensors."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor
from torch_gradmon.plugins.clipping import AdaGC, ZClip

from . import clip_oracle
from .rank_runs import WRAPS, Net, full
from .ranks import impatient

#: By which the loss is multiplied in each step.
SCALES = (1.0, 1.3, 0.8, 1.0, 40.0, 1.1, 300.0, 0.9)


def _clip(how: str) -> dict[str, Any]:
    if how == "zclip":
        return {"max_norm": ZClip(warmup=3)}
    if how == "adagc":
        return {"max_norm": AdaGC(warmup=3, max_norm=0.5)}
    order = float(how.partition("-")[2] or 2)
    return {"max_norm": 0.5, "norm_type": order, "exact": True}


def _naive(how: str) -> Any:
    return clip_oracle.ZClip(warmup=3) if how == "zclip" else clip_oracle.AdaGC(warmup=3, max_norm=0.5)


def _wanted(how: str, naive: Any, gradients: list[Tensor]) -> tuple[float, list[float]]:
    """The total norm and the norm of each gradient after the clip, from whole gradients in float64."""
    order = float(how.partition("-")[2] or 2)
    norms = [g.norm().item() for g in gradients]
    total = float(torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in gradients]), order))
    if how == "adagc":
        return total, naive.clipped(norms)
    factor = min(1.0, naive.clipped(total) / total if how == "zclip" else 0.5 / (total + 1e-6))
    return total, [norm * factor for norm in norms]


def clipped(rank: int, wrap: str, how: str) -> list[tuple[float, float, list[float], list[float]]]:
    """For each step the total norm as returned and in truth, and the norms of the gradients after the clip, found and wanted."""
    wrapped = WRAPS["tp"](sequence=True) if wrap == "sequence" else WRAPS[wrap]()
    model = wrapped.model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = gradmon.watch(model, optimizer, on_spike=None, every=2)
    clip, naive, steps = _clip(how), _naive(how), []
    features = 5 if isinstance(getattr(model, "module", model), Net) else 8
    generator = torch.Generator().manual_seed(1)
    share, shares = wrapped.part
    for step, scale in enumerate(SCALES):
        batch = torch.randn(8, 4, features, generator=generator).tensor_split(shares)[share]
        optimizer.zero_grad()
        (model(batch).square().mean() * scale).backward()
        parameters = [p for p in model.parameters() if p.grad is not None]
        gradients = [full(p.grad).double() for p in parameters if p.grad is not None]
        whole = [g.norm().item() for g in gradients]
        total, norms = _wanted(how, naive, gradients)
        found = monitor.clip_grad_norm_(**clip)
        after = [full(p.grad).double().norm().item() for p in parameters if p.grad is not None]
        steps.append((found.item(), total, after, norms))
        optimizer.step()
        if step % 2 == 0:
            values = monitor.get_step_metrics()
            before = math.hypot(*whole)
            assert math.isclose(values["gradmon/grad_norm"], before, rel_tol=1e-5)
            # of a DTensor only the values tell whether it was clipped
            assert math.isclose(values.get("gradmon/grad_norm_after_clip", before), math.hypot(*after), rel_tol=1e-5)
            assert ("gradmon/clip_limit" in values) == (how == "zclip" and step >= 3)
            assert ("gradmon/clipped_parameters" in values) == (how == "adagc")
    monitor.detach()
    return steps


def experts(rank: int, how: str) -> tuple[float, float, float]:
    """A total norm with plain parameters that are other ones on each rank, one of them without a gradient on one rank."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"shared": nn.Linear(4, 3), "expert": nn.Linear(4, 3), "idle": nn.Linear(4, 3)})
    monitor = ModuleMonitor(model, distributed=gradmon.Distributed(distinct="expert|idle"), preset="standard")
    monitor.begin_step(0)
    for name, parameter in model.named_parameters():
        if not name.startswith("idle") or rank == 1:
            distinct = rank if not name.startswith("shared") else 0
            parameter.grad = torch.full_like(parameter, 2.0 + distinct)
    total = monitor.clip_grad_norm_(**_clip(how)).item()
    monitor.end_step()
    values = monitor.get_step_metrics()
    monitor.detach()
    return total, math.sqrt(15 * (4 + 4 + 9 + 9)), values["gradmon/grad_norm"]


@impatient(0.5)
def alone(rank: int) -> tuple[list[str], bool]:
    """What is said where the first rank alone has a monitor."""
    model = WRAPS["fsdp2"]().model
    model(torch.ones(4, 3, 5)).square().mean().backward()
    said: list[str] = []
    unchanged = True
    if rank == 0:
        before = {name: p.grad.to_local().clone() for name, p in model.named_parameters() if p.grad is not None}
        monitor = ModuleMonitor(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for how in ("exact", "zclip", "adagc"):
                try:
                    monitor.clip_grad_norm_(**_clip(how))
                except ValueError as error:
                    said.append(str(error))
        unchanged = all(torch.equal(p.grad.to_local(), before[n]) for n, p in model.named_parameters() if p.grad is not None)
    dist.barrier()
    return said, unchanged
