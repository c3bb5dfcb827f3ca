"""Activations at the edges, each as a small program that once gave a wrong number, no reason, or an error."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests import oracle
from tests.test_activation_gradients import GRADIENTS, gradients_of, net
from tests.test_activations import KINDS, ROOT, SGD, Twin, check, watched
from torch_gradmon import ModuleMonitor
from torch_gradmon.core.errors import GradmonWarning

# most loops here are of what is measured, and leave out what the audit of the loop misses
pytestmark = pytest.mark.filterwarnings("ignore:torch_gradmon. Gradients are not cleared")

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


class Encoder(nn.Module):
    """Whose encoder is also called by itself, as for a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder, self.decoder = nn.Linear(5, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


def _by_parts(model: nn.Module, size: int = 2) -> Tensor:
    return model.decoder(model.encoder(torch.randn(size, 5))).sum()


def _parts_first(model: nn.Module) -> Tensor:
    return model.encoder(torch.randn(3, 5)).square().sum() + model(torch.randn(2, 5)).sum()


def _look_around(model: nn.Module, monitor: ModuleMonitor) -> None:
    """What is no training: evaluation of the whole and of parts, in either way, and gradients for nobody's use."""
    large = torch.full((4, 5), 100.0)
    with torch.no_grad():
        model(large)
        _by_parts(model)
    model.eval()
    model(large)
    _by_parts(model)
    model.encoder.train()  # as what drops out in evaluation too
    model(large)
    model.train()
    with monitor.no_monitor():
        _by_parts(model).backward()


def _train(model: nn.Module, loss_of: Callable[[nn.Module], Tensor], passes: int = 1) -> dict[tuple[str, str], list[Tensor]]:
    """Backward passes of ``model``, and what the modules of a copy take and return in the same calls."""
    twin = Twin(model)
    state = torch.get_rng_state()
    for _ in range(passes):
        loss_of(model).backward()
    torch.set_rng_state(state)
    for _ in range(passes):
        twin.backward(loss_of(twin.model))
        twin.forget()
    return twin.values


@pytest.mark.parametrize(("every", "start"), [(1, 0), (2, 0), (2, 1)])
def test_parts_that_come_before_the_whole_count_in_every_step(every: int, start: int) -> None:
    model = Encoder()
    optimizer, monitor = watched(model, *KINDS, every=every)
    monitor.detach()
    monitor.attach(optimizer, start_step=start)
    for number in range(start, 6):
        values = _train(model, _parts_first)
        optimizer.step()
        check(monitor.get_step_metrics(), values if number % every == 0 else {}, f"step {number}")
        assert len(values["activation", "encoder"]) == 2


def test_the_first_of_the_parts_that_come_before_the_whole_may_be_frozen() -> None:
    model = Encoder()
    model.encoder.requires_grad_(False)
    optimizer, monitor = watched(model, "output")
    for number in range(4):
        values = _train(model, lambda m: _by_parts(m) + m(torch.randn(2, 5)).sum())
        optimizer.step()
        check(monitor.get_step_metrics(), {key: v for key, v in values.items() if key[0] == "activation"}, f"step {number}")


def test_where_parts_begin_steps_evaluation_between_two_of_them_does_not() -> None:
    model = Encoder()
    optimizer, monitor = watched(model, *KINDS)
    for number in range(4):
        values = _train(model, _parts_first)
        optimizer.step()
        _look_around(model, monitor)
        monitor.log_scalar("number", number)  # of the step that has just ended
        metrics = monitor.get_step_metrics()
        assert metrics.pop("number") == number
        check(metrics, values, f"step {number}")


def test_a_model_that_was_evaluated_as_a_whole_may_be_trained_by_its_parts() -> None:
    model = Encoder()
    optimizer, monitor = watched(model, *KINDS)
    for number in range(4):
        _look_around(model, monitor)
        values = _train(model, _by_parts, passes=2)
        optimizer.step()
        check(monitor.get_step_metrics(), values, f"step {number}")


@pytest.mark.parametrize("loss_of", [_parts_first, _by_parts], ids=["before the whole", "alone"])
@pytest.mark.parametrize("every", [1, 2])
def test_parts_that_are_trained_after_the_whole_was_lack_one_step_and_say_so(
    loss_of: Callable[[nn.Module], Tensor], every: int
) -> None:
    model = Encoder()
    optimizer, monitor = watched(model, *KINDS, every=every)
    for number in range(7):
        values = _train(model, loss_of if number > 2 else lambda m: m(torch.randn(2, 5)).sum(), passes=2)
        optimizer.step()
        if number == 3 and every == 1:
            assert monitor.get_step_metrics() == {}
            reason = "a part of the model was called in training before the step had begun, so not all calls were measured"
            needs_none = "it needs no gradient: nothing that it is computed from is trained"
            assert set(monitor.missing().values()) - {needs_none} == {reason}
        else:
            check(monitor.get_step_metrics(), values if number % every == 0 else {}, f"step {number}")


class Bystander(Encoder):
    """Has a part that looks compiled, and that nobody calls: all hooks stay when steps are not monitored."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.ModuleDict({"_orig_mod": nn.Linear(1, 1)})


def _whole(model: nn.Module) -> Tensor:
    return model(torch.randn(2, 5)).sum()


def _checkpointed(model: nn.Module) -> Tensor:
    return checkpoint(model, torch.randn(2, 5), use_reentrant=False).sum()


def _part_after(model: nn.Module) -> Tensor:
    return _whole(model) + model.decoder(torch.randn(1, 4)).sum()


def _never(model: nn.Module) -> None:
    """A part, between steps, for nothing."""
    model.encoder(torch.full((4, 5), 100.0))


def _derivative(model: nn.Module) -> None:
    torch.autograd.grad(model.encoder(torch.ones(4, 5)).sum(), list(model.encoder.parameters()))


def _transformed(model: nn.Module) -> None:
    torch.func.vmap(torch.func.grad(lambda x: model.encoder(x).sum()))(torch.ones(4, 5))


def _attacked(model: nn.Module) -> None:
    """The gradient of an input in evaluation mode, by backward()."""
    model.eval().requires_grad_(False)
    model.encoder(torch.ones(4, 5, requires_grad=True)).sum().backward()
    model.train().requires_grad_(True)


def _frozen(model: nn.Module) -> None:
    model.encoder.requires_grad_(False)
    model.encoder(torch.ones(4, 5))
    model.encoder.requires_grad_(True)


@pytest.mark.parametrize("attempt", [_never, _derivative, _transformed, _attacked, _frozen])
@pytest.mark.parametrize("loss_of", [_whole, _checkpointed, _part_after])
@pytest.mark.parametrize(("make", "every"), [(Encoder, 1), (Encoder, 2), (Bystander, 2)])
def test_a_part_that_is_tried_begins_no_step_after_the_whole_was_trained(
    make: Callable[[], nn.Module], every: int, loss_of: Callable[[nn.Module], Tensor], attempt: Callable[[nn.Module], None]
) -> None:
    model = make()
    optimizer, monitor = watched(model, "input", "output", every=every)
    for number in range(5):
        values = _train(model, loss_of)
        optimizer.step()
        attempt(model)
        _never(model)
        _look_around(model, monitor)
        monitor.log_scalar("number", number)
        metrics = monitor.get_step_metrics()
        assert metrics.pop("number", None) == (number if number % every == 0 else None)
        expected = {key: tensors for key, tensors in values.items() if not key[0].endswith("_gradient")}
        check(metrics, expected if number % every == 0 else {}, f"step {number}")


def test_a_recomputation_while_no_step_is_open_is_no_part_in_training() -> None:
    model = Encoder()
    optimizer, monitor = watched(model, "output")
    _train(model, _whole)
    optimizer.step()
    loss = checkpoint(model, torch.ones(2, 5, requires_grad=True), use_reentrant=True).sum()
    for last in (False, True):
        loss.backward(retain_graph=not last)
        optimizer.step()
    _never(model)
    monitor.log_scalar("number", 1)  # of the step that has just ended, which had no forward
    assert monitor.get_step_metrics() == {"number": 1}


def test_no_tensor_is_followed_for_the_sake_of_the_steps_but_those_of_the_graph_and_until_it_is_known() -> None:
    model = Encoder()
    optimizer, _monitor = watched(model, "input", "output")
    _train(model, _whole)
    optimizer.step()
    x = torch.ones(4, 5, requires_grad=True)
    followed = []
    for _ in range(3):
        outputs = [model.encoder(x), model.encoder(x)]
        sum(outputs).sum().backward()
        optimizer.step()
        followed.append([output._backward_hooks is not None for output in outputs])
    assert followed == [[True, True], [False, False], [False, False]]
    assert x._backward_hooks is None


# --- a module in the place of another ----------------------------------------------------------------------------------------


def test_a_module_that_takes_the_place_and_the_address_of_another_has_values() -> None:
    model = net()
    optimizer, monitor = watched(model, *KINDS)
    taken = False
    while not taken:  # it is, as a rule, the second time
        values = _train(model, lambda m: m(torch.ones(2, 5)).sum())
        optimizer.step()
        check(monitor.get_step_metrics(), values)
        assert ("activation", "1") in values
        assert monitor.current_step is not None
        assert monitor.current_step < 100
        address = id(model[1])
        model[1] = nn.Identity()  # which lets go of the one at this address
        model[1] = nn.Tanh()
        taken = id(model[1]) == address
    values = _train(model, lambda m: m(torch.ones(2, 5)).sum())
    optimizer.step()
    check(monitor.get_step_metrics(), values)


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


# --- what is said of modules that are left out -----------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.activation = nn.Linear(4, 4), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.project(x))
        return F.scaled_dot_product_attention(y, y, y)


NO_CALL = (
    "no call of scaled_dot_product_attention was seen in training; attention that is written out, flex_attention, and a call through an "
    "attribute that holds the function are not seen"
)


OUT = "exclude= (excluded_modules_regex=) leaves it out"


@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel], ids=["bare", "wrapped"])
@pytest.mark.parametrize(
    ("excluded", "pattern", "reason"),
    [
        ("^0$", ".*", f"{NO_CALL}; 0 is {OUT}"),
        (r"^\d", ".*", f"{NO_CALL}; 0 is {OUT}; 1 is {OUT}; 2 is {OUT}; and 1 more"),
        ("^0", "^0", f"0 is {OUT}"),
        ("^0", "^3$|root", NO_CALL),
        (None, "^4$", NO_CALL),
        (None, "^3$|root", NO_CALL),
    ],
)
def test_attention_of_modules_that_are_left_out_has_that_for_its_reason(
    wrap: Callable[[nn.Sequential], nn.Module], excluded: str | None, pattern: str, reason: str
) -> None:
    model = wrap(nn.Sequential(Attention(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    optimizer, monitor = watched(model, excluded_modules_regex=excluded)
    with pytest.warns(GradmonWarning, match="matches nothing") if pattern in ("^0", "^4$") else nullcontext():
        monitor.add_attention_metric("entropy", pattern)
    model(torch.randn(2, 3, 4)).sum().backward()
    optimizer.step()
    assert monitor.get_step_metrics() == {}
    assert monitor.missing() == {f"attention_entropy/{pattern}": reason}
