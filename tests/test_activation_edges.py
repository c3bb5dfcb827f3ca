"""Activations at the edges, each as a small program that once gave a wrong number, no reason, or an error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests import oracle
from tests.test_activation_gradients import GRADIENTS, gradients_of, net
from tests.test_activations import KINDS, ROOT, SGD, Twin, check, watched
from torch_gradmon import ModuleMonitor

# --- a model that is called by its parts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2])
def test_a_model_that_is_called_by_its_parts_has_all_micro_batches_of_every_step(every: int) -> None:
    model = net()
    twin = Twin(model)
    optimizer, monitor = watched(model, *KINDS, every=every)
    for number in range(5):
        twin.values.clear()
        for size in (3, 2):
            twin.forget()
            x = torch.randn(size, 5)
            model[2](model[1](model[0](x))).sum().backward()
            twin.backward(twin.model[2](twin.model[1](twin.model[0](x))).sum())
        optimizer.step()
        check(monitor.get_step_metrics(), twin.values if number % every == 0 else {}, f"step {number}")


def test_parts_that_are_called_without_gradients_or_in_eval_do_not_count() -> None:
    model = net()
    twin = Twin(model)
    optimizer, monitor = watched(model, "output")
    x, large = torch.randn(3, 5), torch.full((2, 5), 100.0)
    for number in range(3):
        twin.values.clear()
        hidden = model[0](x)
        with torch.no_grad():
            model[0](large)
        model[0].eval()(large)
        model[0].train()
        model[2](hidden).sum().backward()
        optimizer.step()
        twin.model[2](twin.model[0](x))
        check(monitor.get_step_metrics(), {k: v for k, v in twin.values.items() if k[0] == "activation"}, f"step {number}")


# --- re-entrant checkpointing with nothing to train outside of it ---------------------------------------------------------------


class Adapted(nn.Module):
    """Frozen but for what is inside of the checkpoint, as with LoRA: embeddings whose output is made to need gradients."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.block = nn.Embedding(5, 4).requires_grad_(False), nn.Linear(4, 4)
        self.act, self.head, self.reentrant = nn.Tanh(), nn.Linear(4, 2).requires_grad_(False), reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).requires_grad_()
        x = self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.head(self.act(x))


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "nonreentrant", "reentrant"])
def test_gradients_outside_of_the_checkpoint_that_has_all_that_is_trained(reentrant: bool | None) -> None:
    model, twin = Adapted(reentrant), Twin(Adapted(None))
    optimizer, monitor = watched(model, *GRADIENTS)
    tokens = torch.tensor([1, 2, 3])
    model(tokens).square().sum().backward()
    twin.backward(twin.model(tokens).square().sum())
    optimizer.step()
    expected = gradients_of(twin.values)
    expected.pop(("activation_gradient", "embed"), None)  # made to need gradients after its hook
    check(monitor.get_step_metrics(), expected)


# --- a path below the name of another module ---------------------------------------------------------------------------------------


class Named(nn.Module):
    """Returns what its layer returns, a tuple, under the layer's name."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(3, 3)

    def forward(self, x: Tensor) -> dict[str, tuple[Tensor, ...]]:
        first, (second, _) = self.rnn(x)
        return {"rnn": (10 * first, second)}


class WithNamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Named()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)["rnn"][0].sum()


def test_a_path_that_only_begins_with_the_name_of_a_module_does_not_mix_with_its_paths() -> None:
    model = WithNamed()
    optimizer, monitor = watched(model, "output", metrics=("norm",))
    x = torch.randn(2, 1, 3)
    model(x).backward()
    optimizer.step()
    first = oracle.values(model.part.rnn(x)[0])["norm"]
    metrics = monitor.get_step_metrics()
    assert metrics["activation/part.rnn[0]/norm"] == pytest.approx(first, rel=1e-6)
    assert sorted(metrics.values())[-1] == pytest.approx(max(10 * first, metrics[f"activation/{ROOT}/norm"]), rel=1e-6)
    assert monitor.missing() == {}  # the part was called, and has values


# --- a GradScaler and two optimizers ----------------------------------------------------------------------------------------------


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor, train_generator: bool) -> Tensor:
        made = self.generator(x)
        return self.critic(made if train_generator else made.detach()).sum()


def test_two_optimizers_that_step_one_after_the_other_under_one_scaler() -> None:
    """A GAN as in torch's documentation: one scaler, one update at the end."""
    model = Adversaries()
    twin = Twin(model)
    of_critic, of_generator = SGD(model.critic.parameters(), lr=0.0), SGD(model.generator.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    monitor = ModuleMonitor(model, on_metric_error="raise")
    for metric in oracle.BUILT_INS:
        monitor.add_activation_metric(metric, of=GRADIENTS)
    monitor.add_gradient_metric("max", metric_regex="critic.bias", stages="local")
    monitor.attach(of_critic, of_generator, scaler=scaler)
    for number in range(2):
        twin.values.clear()
        x = torch.randn(2, 3)
        for train_generator, optimizer in ((False, of_critic), (True, of_generator)):
            twin.forget()
            scaler.scale(model(x, train_generator)).backward()
            twin.backward(twin.model(x, train_generator))
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        of_critic.zero_grad()
        metrics = monitor.get_step_metrics()
        assert metrics.pop("gradient_local/critic.bias/max") == 2.0, number
        check(metrics, gradients_of(twin.values), f"step {number}")


@pytest.mark.filterwarnings("ignore:torch_gradmon. SGD stepped without the GradScaler")
def test_the_first_optimizer_steps_without_the_scaler_and_the_second_with_it() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    plain, scaled = SGD(model[0].parameters(), lr=0.0), SGD(model[1].parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    monitor = ModuleMonitor(model)
    monitor.add_activation_metric("max", metric_regex="^1$", of="output_gradient")
    monitor.attach(plain, scaled, scaler=scaler)
    for number in range(5):
        scaler.scale(model(torch.randn(2, 3)).sum()).backward()
        plain.step()
        scaler.step(scaled)
        scaler.update()
        plain.zero_grad()
        scaled.zero_grad()
        assert monitor.get_step_metrics().get("activation_gradient/1/max", 1.0) == 1.0, number
