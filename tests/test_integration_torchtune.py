"""torchtune's optimizer in backward, with a model of its own: the values of a plain loop, and the same training."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon

pytest.importorskip("torchtune", exc_type=ImportError)
pytestmark = pytest.mark.integration

STEPS, WORDS = 5, 32


def model_of() -> nn.Module:
    """A llama of two layers."""
    from torchtune.models.llama3 import llama3

    torch.manual_seed(0)
    return llama3(vocab_size=WORDS, num_layers=2, num_heads=2, num_kv_heads=1, embed_dim=16, max_seq_len=16, intermediate_dim=24)


def loss_of(model: nn.Module, step: int) -> Tensor:
    """Of the next words in random text."""
    text = torch.randint(0, WORDS, (4, 13), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def watch(model: nn.Module, optimizers: Any, **options: Any) -> gradmon.ModuleMonitor:
    """A monitor with what is compared."""
    monitor = gradmon.watch(model, *optimizers, **options)
    monitor.add_gradient_metric("norm")
    monitor.add_gradient_metric("max")
    monitor.add_update_metric("norm")
    monitor.add_parameter_metric("norm")
    return monitor


def in_backward(watched: bool) -> tuple[dict[str, Tensor], list[dict[str, float]], list[str]]:
    """torchtune's pattern, as its recipes of full fine-tuning have it, with its scheduler."""
    from torchtune.training import create_optim_in_bwd_wrapper, get_cosine_schedule_with_warmup, register_optim_in_bwd_hooks

    model = model_of()
    optimizers = {p: torch.optim.AdamW([p], lr=1e-2, foreach=False) for p in model.parameters()}
    register_optim_in_bwd_hooks(model=model, optim_dict=optimizers)
    wrapper = create_optim_in_bwd_wrapper(model=model, optim_dict=optimizers)
    first = next(iter(optimizers.values()))
    wrapper.set_lr_scheduler(get_cosine_schedule_with_warmup(first, num_warmup_steps=2, num_training_steps=10))
    for optimizer in optimizers.values():  # of which torchtune's scheduler tells the first alone how it begins
        optimizer.param_groups[0]["lr"] = first.param_groups[0]["lr"]
    monitor = watch(model, wrapper.optim_map.values()) if watched else None
    values = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(STEPS):
            loss = loss_of(model, step)
            if monitor is not None:
                monitor.log_scalar("loss", loss.detach())
            loss.backward()
            wrapper.step_lr_scheduler()
            if monitor is not None:
                values.append(monitor.get_step_metrics())
    if monitor is not None:
        monitor.detach()
    messages = [str(each.message) for each in warned if issubclass(each.category, gradmon.GradmonWarning)]
    return model.state_dict(), values, messages


def plain() -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """One optimizer behind the backward pass."""
    from torchtune.training import get_cosine_schedule_with_warmup

    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=10)
    monitor = watch(model, [optimizer])
    values = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        monitor.log_scalar("loss", loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        values.append(monitor.get_step_metrics())
    monitor.detach()
    return model.state_dict(), values


def test_values_are_those_of_a_plain_loop_and_training_is_the_same() -> None:
    state, _, _ = in_backward(False)
    watched, values, messages = in_backward(True)
    other, expected = plain()
    assert messages == []
    for name, tensor in state.items():
        assert torch.equal(watched[name], tensor), name
        assert torch.equal(other[name], tensor), name
    for found, true in zip(values, expected, strict=True):
        compared = {key: value for key, value in true.items() if "overhead" not in key}
        assert {key: found[key] for key in compared} == pytest.approx(compared, rel=1e-6)
