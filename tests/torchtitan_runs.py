"""torchtitan's own ``Trainer`` on a CPU, and the same by one process, for :mod:`tests.test_integration_torchtitan`."""

from __future__ import annotations

import os
import tempfile
import types
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from zlib import crc32

import torch
import torch._utils
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

import torch_gradmon as gradmon

ROWS, LENGTH, WORDS, STEPS, MAX_NORM = 4, 16, 64, 4, 0.5


class _Cpu(types.ModuleType):
    """``torch.cpu``, with what torchtitan asks an accelerator."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, device: Any = None) -> str:
        """Its name."""
        return "CPU"

    def get_device_properties(self, device: Any = None) -> Any:
        """Its memory."""
        return types.SimpleNamespace(total_memory=2**33)

    def set_device(self, device: Any) -> None:
        """There is one only."""

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """Nothing is known."""
        return {}

    reset_peak_memory_stats = empty_cache = staticmethod(lambda: None)


class _Text:
    """Random words, the same for all ranks that have the same data; of all data ranks where one process stands for them."""

    def __init__(self, ranks: list[int], rows: int) -> None:
        self.ranks, self.rows = ranks, rows

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        generators = [torch.Generator().manual_seed(100 + rank) for rank in self.ranks]
        while True:
            text = torch.cat([torch.randint(0, WORDS, (self.rows, LENGTH + 1), generator=each) for each in generators])
            yield {"input": text[:, :-1].contiguous()}, text[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """Nothing to save."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""


def trainer_of(schedule: str, pipeline: int, shards: int, tensor: int, stands_for: int = 1) -> Any:
    """A ``Trainer`` of a llama of four layers; with ``stands_for`` it has the data of so many ranks."""
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda name: _Cpu("cpu")
    os.environ["LOCAL_RANK"] = str(dist.get_rank()) if dist.is_initialized() else "0"
    from torchtitan.config import JobConfig
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.protocols import train_spec
    from torchtitan.protocols.train_spec import get_train_spec
    from torchtitan.train import Trainer

    def loss(prediction: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(prediction.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum")

    # a pipeline of 0.2.2 steps with the gradients of the sum over tokens, anything else with those of the mean
    tokens = ROWS * LENGTH * stands_for
    spec = replace(
        get_train_spec("llama3"),
        model_args={"small": TransformerModelArgs(dim=32, n_layers=4, n_heads=4, vocab_size=WORDS, multiple_of=16)},
        build_tokenizer_fn=None,
        build_dataloader_fn=lambda dp_rank, **_: _Text(list(range(stands_for)) if stands_for > 1 else [dp_rank], ROWS),
        build_loss_fn=lambda config, parallel_dims: (
            loss if pipeline > 1 else lambda prediction, labels: tokens * loss(prediction, labels)
        ),
        state_dict_adapter=None,
    )
    train_spec.get_train_spec = lambda name: spec  # of which the trainer asks the module

    config = JobConfig()
    config.model.name, config.model.flavor = "llama3", "small"
    config.job.dump_folder = tempfile.gettempdir()
    config.optimizer.implementation, config.optimizer.lr = "for-loop", 1e-2
    config.lr_scheduler.warmup_steps = 2
    config.training.local_batch_size, config.training.seq_len, config.training.steps = ROWS * stands_for, LENGTH, STEPS
    config.training.max_norm, config.training.mixed_precision_param = MAX_NORM, "float32"
    config.parallelism.pipeline_parallel_schedule = schedule
    config.parallelism.pipeline_parallel_degree = pipeline
    config.parallelism.data_parallel_shard_degree = shards
    config.parallelism.tensor_parallel_degree = tensor
    config.activation_checkpoint.mode = "none"
    config.metrics.log_freq = 1000
    trainer = Trainer(config)
    for part in trainer.model_parts:
        _draw(part)
        for module in part.modules():
            if hasattr(module, "set_force_sum_reduction_for_comms"):  # gloo has no PREMUL_SUM, with which FSDP2 divides otherwise
                module.set_force_sum_reduction_for_comms(True)
    return trainer


@torch.no_grad()
def _draw(part: torch.nn.Module) -> None:
    """Weights that depend on the name alone, since torchtitan draws those of each stage with another seed."""
    for name, parameter in part.named_parameters():
        generator = torch.Generator().manual_seed(crc32(name.encode()))
        whole = 0.1 * torch.randn(parameter.shape, generator=generator) + ("norm" in name)
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        parameter.copy_(whole)


def add_metrics(monitor: gradmon.ModuleMonitor) -> None:
    """Those that are compared."""
    monitor.add_gradient_metric("norm", stages=["before_clip", "after_clip"])
    monitor.add_gradient_metric("max")
    monitor.add_update_metric("norm")


def run(trainer: Any, watched: bool) -> dict[str, Any]:
    """Some of its train steps: the parameters at the end, the norm that it clips by, and the values of each step."""
    is_pipeline = trainer.parallel_dims.pp_enabled
    monitor = None
    if watched:
        model = trainer.pp_schedule if is_pipeline else trainer.model_parts[0]
        monitor = gradmon.watch(model, *trainer.optimizers.optimizers)
        add_metrics(monitor)
    norms, values = _norms(), []
    data = trainer.batch_generator(trainer.dataloader)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(1, STEPS + 1):
            trainer.step = step
            trainer.train_step(data)
            if monitor is not None:
                values.append({key: value for key, value in monitor.get_step_metrics().items() if "overhead" not in key})
    if monitor is not None:
        monitor.detach()
    state = {name: _full(tensor) for part in trainer.model_parts for name, tensor in part.named_parameters()}
    messages = [str(each.message) for each in warned if issubclass(each.category, gradmon.GradmonWarning)]
    trainer.close()
    return {"state": state, "values": values, "norms": norms, "warnings": messages}


def _norms() -> list[float]:
    """A list to which torchtitan's clip adds the norm that it finds."""
    from torchtitan.distributed import utils

    original, norms = utils.clip_grad_norm_, []

    def clip(*args: Any, **kwargs: Any) -> Tensor:
        norm = getattr(original, "inner", original)(*args, **kwargs)
        norms.append(float(norm))
        return norm

    clip.inner = getattr(original, "inner", original)  # type: ignore[attr-defined]
    utils.clip_grad_norm_ = clip
    return norms


def _full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(rank: int, schedule: str, pipeline: int, shards: int, tensor: int, watched: bool) -> dict[str, Any]:
    """On ranks."""
    return run(trainer_of(schedule, pipeline, shards, tensor), watched)


def whole(rank: int, replicas: int) -> dict[str, Any]:
    """One process with the data of all."""
    return run(trainer_of("1F1B", 1, 1, 1, replicas), True)
