"""Trainings under DeepSpeed, and the same by one process in plain PyTorch, for :mod:`tests.test_integration_deepspeed`."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torch_gradmon as gradmon

from .ranks import refusals

MAX_NORM, STEPS, MICRO, ROWS = 0.05, 5, 2, 4


def make_model() -> nn.Module:
    """Sizes that no number of ranks divides, and a frozen layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5), nn.Tanh(), nn.Linear(5, 3))
    model[2].requires_grad_(False)
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, which DeepSpeed steps one after the other."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1}
    return torch.optim.AdamW([decayed, {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0}], lr=1e-2)


def batch(step: int, micro: int, rank: int) -> Tensor:
    """That of one rank."""
    return torch.randn(ROWS, 7, generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))


def add_metrics(monitor: gradmon.ModuleMonitor) -> None:
    """Those that are compared."""
    for metric in ("norm", "mean", "sparsity", "max"):
        monitor.add_gradient_metric(metric, stages=["before_clip", "after_clip"])
    monitor.add_update_metric("norm")
    monitor.add_parameter_metric("norm")


def plain(ranks: int) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """One process with the data of all ranks: the parameters at the end, and the values of each step."""
    model = make_model()
    optimizer = make_optimizer(model)
    monitor = gradmon.watch(model, optimizer, on_spike=None, layers="blocks")
    add_metrics(monitor)
    values = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO):
            for rank in range(ranks):
                (model(batch(step, micro, rank)).square().mean() / (ranks * MICRO)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        values.append(monitor.get_step_metrics())
    monitor.detach()
    return model.state_dict(), values


def settings(stage: int) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": MAX_NORM,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }


def make_engine(rank: int, stage: int, config: dict[str, Any]) -> Any:
    """The engine on this rank."""
    _be_launched(rank)
    import deepspeed

    # refused on CPUs, though torch computes in half precision there
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = make_model()
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **config.get("zero_optimization", {})}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=make_optimizer(model),
        config={**settings(stage), **config, "zero_optimization": zero},
    )
    return engine


def _be_launched(rank: int) -> None:
    """As by ``deepspeed`` or ``torchrun``."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(dist.get_world_size()))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1", DS_ACCELERATOR="cpu")
    import deepspeed

    deepspeed.utils.logging.logger.setLevel(logging.ERROR)


def train(rank: int, stage: int, watched: bool, config: dict[str, Any]) -> dict[str, Any]:
    """The parameters at the end, the values of each step, the engine's own norms, and what was warned of."""
    engine = make_engine(rank, stage, config)
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    monitor = gradmon.watch(engine, on_spike=None, layers="blocks") if watched else None
    if monitor is not None:
        add_metrics(monitor)
    values, norms, steps = [], [], []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(STEPS):
            for micro in range(MICRO):
                rows = batch(step, micro, rank).to(next(engine.module.parameters()).dtype)
                loss = engine(rows).float().square().mean()
                engine.backward(loss)
                engine.step()
            norms.append(float(engine.get_global_grad_norm() or 0.0))
            if monitor is not None:
                values.append(monitor.get_step_metrics())
                steps.append(monitor.last_record.step)
    absent = {} if monitor is None else monitor.missing()
    names = [(name, parameter) for name, parameter in engine.module.named_parameters()]
    if stage == 3:
        with deepspeed.zero.GatheredParameters([parameter for _, parameter in names]):
            state = {name: parameter.detach().clone() for name, parameter in names}
    else:
        state = {name: parameter.detach().clone() for name, parameter in names}
    masters = {name: safe_get_full_fp32_param(parameter) for name, parameter in names if stage and parameter.requires_grad}
    if monitor is not None:
        monitor.detach()
    engine.destroy()
    return {
        "state": state,
        "masters": {name: tensor.clone() for name, tensor in masters.items() if tensor is not None},
        "values": values,
        "norms": norms,
        "steps": steps,
        "missing": absent,
        "warnings": [str(each.message) for each in warned if issubclass(each.category, gradmon.GradmonWarning)],
    }


def by_accelerate(rank: int, stage: int) -> dict[str, Any]:
    """A loop with Accelerate: the norms of three steps, and those of the engine."""
    _be_launched(rank)
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState, GradientState

    plugin = DeepSpeedPlugin(hf_ds_config=settings(stage))
    accelerator = Accelerator(deepspeed_plugin=plugin)
    model = make_model()
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    norms, true, steps = [], [], []
    for step in range(3):
        for micro in range(MICRO):
            with accelerator.accumulate(model):
                loss = model(batch(step, micro, rank)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        norms.append(monitor.get_step_metrics()["gradmon/grad_norm"])
        own = model.get_global_grad_norm()
        true.append(plain(2)[1][step]["gradmon/grad_norm"] if own is None else float(own))
        steps.append(monitor.last_record.step)
    monitor.detach()
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return {"norms": norms, "true": true, "steps": steps}


def by_trainer(rank: int, stage: int, folder: str) -> dict[str, Any]:
    """Three steps of the Trainer with and without the callback: whether parameters are the same, and the norms."""
    _be_launched(rank)
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import Trainer, TrainingArguments

    from torch_gradmon.integrations.transformers import GradmonCallback

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": self.net(x).square().mean()}

    rows = [{"x": row} for row in torch.randn(3 * MICRO * ROWS * 2, 7, generator=torch.Generator().manual_seed(5))]
    states, norms, true = [], [], []
    for callbacks in ([], [GradmonCallback(on_spike=None)]):
        arguments = TrainingArguments(
            output_dir=f"{folder}/{rank}",
            use_cpu=True,
            deepspeed=settings(stage),
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=MICRO,
            max_grad_norm=MAX_NORM,
            max_steps=3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        model = Model()
        trainer = Trainer(
            model=model, args=arguments, train_dataset=rows, callbacks=callbacks, optimizers=(make_optimizer(model), None)
        )
        trainer.train()
        states.append({name: tensor.detach().clone() for name, tensor in trainer.model_wrapped.module.named_parameters()})
        lines = [line for line in trainer.state.log_history if "loss" in line]
        if callbacks:
            norms = [line["gradmon/grad_norm"] for line in lines]
            history = callbacks[0].monitor.get_all_metrics()
            own = [line.get("grad_norm") or history[step]["gradmon/grad_norm"] for step, line in enumerate(lines)]
            true = [float(norm) for norm in own]
        for each in (AcceleratorState, PartialState):
            each._reset_state()
        GradientState._reset_state()
    same = all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    return {"same": same, "norms": norms, "true": true}


def refused(rank: int) -> list[str]:
    """The messages for an engine that is passed in a wrong way."""
    engine = make_engine(rank, 1, {})
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1)
    attempts: list[Callable[[], object]] = [
        lambda: gradmon.watch(engine, other),
        lambda: gradmon.ModuleMonitor(engine),
        lambda: gradmon.watch(engine.module, engine.optimizer),
        lambda: gradmon.watch(engine, on_spike="skip"),
    ]
    messages = refusals(attempts)
    engine.destroy()
    return messages


def refused_pipeline(rank: int) -> list[str]:
    """The message for an engine that has a stage of a pipeline."""
    _be_launched(rank)
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(2)]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    config = {**settings(0), "gradient_clipping": 0.0}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return refusals([lambda: gradmon.watch(engine)])


def nan_from(rank: int, stage: int, config: dict[str, Any]) -> list[str]:
    """The spikes of a training whose inputs are NaN from the third step on."""
    engine = make_engine(rank, stage, config)
    monitor = gradmon.watch(engine, on_spike=lambda event: None)
    found = []
    for step in range(8):
        for micro in range(MICRO):
            rows = batch(step, micro, rank).to(next(engine.module.parameters()).dtype)
            loss = engine(rows if step < 2 else rows * torch.nan).float().square().mean()
            engine.backward(loss)
            engine.step()
        found += [f"{event.step} {event.signal}" for event in monitor.last_record.spikes]
    monitor.detach()
    engine.destroy()
    return found
