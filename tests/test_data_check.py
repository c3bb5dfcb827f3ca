"""What the first batches and the gradient at the output show."""

from __future__ import annotations

import copy
import io
import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor
from torch_gradmon.plugins.data_check import _identities, _makers, push_of, sampled
from torch_gradmon.plugins.output_gradient import CLASSES, ROWS, Head, facts_of, origin_of, output_of, recognised, sample_of

pytestmark = pytest.mark.thorough

Batch = tuple[Tensor, Tensor]


def head(loss_of: Callable[[Tensor], Tensor], output: Tensor) -> Head | None:
    """What is recognised of a loss, from one output."""
    output = output.clone().requires_grad_()
    result = output * 1.0
    kept: list[Tensor] = []
    result.register_hook(lambda gradient: kept.append(gradient))
    loss = loss_of(result)
    loss.backward()
    sample = sample_of(result)
    facts = None if sample is None else facts_of(sample, kept[0])
    return None if facts is None else recognised(facts.tolist(), loss.item())


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(rows: int, classes: int) -> Tensor:
    """Random ones."""
    return torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("scale", [1.0, 0.25, 32.0])
def test_cross_entropy_is_recognised_with_its_scale_and_its_labels(classes: int, scale: float) -> None:
    y = labels(32, classes)
    found = head(lambda z: scale * F.cross_entropy(z, y), draw(32, classes))
    assert found is not None
    assert (found.kind, found.rows, found.temperature) == ("cross-entropy", 32, 1.0)
    assert found.scale == pytest.approx(scale, rel=1e-4)
    assert list(found.labels) == torch.bincount(y, minlength=classes).tolist()


def test_answers_that_are_certain_and_right_tell_nothing_of_the_loss() -> None:
    """Their gradients are 0 or rounding alone; the others are gradients of a mean over all rows."""
    output, y = 300 * draw(64, 8), labels(64, 8)
    y[:20] = output[:20].argmax(1)
    found = head(lambda z: F.cross_entropy(z, y), output)
    assert found is not None
    assert (found.kind, found.scale) == ("cross-entropy", pytest.approx(1.0))
    assert sum(found.labels) < 50
    twice = head(lambda z: 2 * F.cross_entropy(z, y), output)
    assert twice is not None
    assert 1.0 < twice.scale <= 2.0
    assert head(lambda z: F.cross_entropy(z, y), 1e6 * F.one_hot(y, 8).float()) is None


@pytest.mark.parametrize("temperature", [0.01, 0.5, 1000.0])
def test_a_temperature_between_output_and_loss(temperature: float) -> None:
    found = head(lambda z: F.cross_entropy(z.double() / temperature, labels(32, 8)), draw(32, 8) * min(temperature, 1) * 3)
    assert found is not None
    assert found.temperature == pytest.approx(temperature, rel=1e-3)
    assert found.scale == pytest.approx(1.0, rel=1e-2)


@pytest.mark.parametrize("classes", [1, 2])
@pytest.mark.parametrize(
    "loss_of", [lambda z: z.mean(), lambda z: (z[:, 0] - z[:, -1]).mean() + z.sum(), lambda z: z[::2].sum() - z[1::2].sum()]
)
def test_gradients_that_are_all_alike_fit_no_formula(classes: int, loss_of: Callable[[Tensor], Tensor]) -> None:
    found = head(loss_of, 0.5 + 0.01 * draw(32, classes))
    assert found is None or found.kind == "mean square"


def test_ignored_rows_images_and_sequences() -> None:
    y = labels(32, 4)
    y[:8] = -100
    found = head(lambda z: F.cross_entropy(z, y), draw(32, 4))
    assert found is not None
    assert (found.rows, sum(found.labels)) == (24, 24)
    assert found.scale == pytest.approx(1.0, rel=1e-4)
    pixels = labels(2 * 36, 3).view(2, 6, 6)
    found = head(lambda z: F.cross_entropy(z, pixels), draw(2, 3, 6, 6))
    assert found is not None
    assert (found.kind, found.rows) == ("cross-entropy", 72)
    words = labels(2 * 9, 5)
    found = head(lambda z: F.cross_entropy(z.flatten(0, 1), words), draw(2, 9, 5))
    assert found is not None
    assert (found.kind, found.rows) == ("cross-entropy", 18)


def test_a_mean_square_and_its_targets() -> None:
    y = 3 + 2 * draw(64, seed=5)
    found = head(lambda z: F.mse_loss(z[:, 0], y), draw(64, 1))
    assert found is not None
    assert found.kind == "mean square"
    assert found.mean == pytest.approx(y.mean().item(), rel=1e-4)
    assert found.square - found.mean**2 == pytest.approx(y.var(correction=0).item(), rel=1e-4)


def test_a_square_of_each_output_with_each_target_has_the_variance_of_the_targets_as_chance() -> None:
    y = 3 + 2 * draw(64, seed=5)
    found = head(lambda z: (z - y[None]).square().mean(), draw(64, 1))
    assert found is not None
    assert found.kind == "mean square"
    assert found.mean == pytest.approx(y.mean().item(), rel=1e-4)
    assert found.square - found.mean**2 == pytest.approx(y.var(correction=0).item(), rel=1e-4)


def test_targets_below_zero_of_an_output_that_never_is() -> None:
    y = draw(64, seed=5)
    found = head(lambda z: F.mse_loss(z[:, 0], y), draw(64, 1).relu())
    assert found is not None
    assert found.negative == pytest.approx((y.clamp(max=0).square().sum() / y.square().sum()).item())
    assert found.zeros > 0.3


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda z: F.cross_entropy(z, labels(32, 4), label_smoothing=0.1),
        lambda z: F.cross_entropy(z, labels(32, 4), weight=torch.tensor([1.0, 2.0, 3.0, 4.0])),
        lambda z: z.square().mean(),
        lambda z: F.smooth_l1_loss(z, draw(32, 4, seed=3)),
        lambda z: -(z.log_softmax(1)[torch.arange(32), labels(32, 4)] * draw(32, seed=9)).mean(),
    ],
    ids=["label smoothing", "class weights", "a penalty", "smooth l1", "a policy gradient"],
)
def test_other_losses_are_left_alone(loss_of: Callable[[Tensor], Tensor]) -> None:
    found = head(loss_of, draw(32, 4))
    assert found is None or found.kind == "mean square"


def test_no_more_of_an_output_is_kept_than_is_looked_at() -> None:
    logits = draw(2000, 4)
    sample = sample_of(logits)
    assert sample is not None
    assert sample.shape == (ROWS, 4)
    assert sample.untyped_storage().nbytes() == ROWS * 4 * 4
    assert sample_of(draw(2, CLASSES + 1)) is None
    found = head(lambda z: F.cross_entropy(z, labels(2000, 4)), logits)
    assert found is not None
    assert (found.rows, round(found.scale, 3)) == (2000, 1.0)


def test_the_output_of_a_loss() -> None:
    x = torch.ones(2, 2, requires_grad=True) * 2
    assert output_of(x) is x
    assert output_of((x, 3)) is x
    assert output_of({"logits": x}) is x
    assert output_of(x.detach()) is None
    assert output_of(3) is None
    assert output_of(x.sum()) is None


# --- in a loop -----------------------------------------------------------------------------------------------------------------


def batch(step: int) -> Batch:
    """Of three classes that can be learnt."""
    x = draw(24, 6, seed=step)
    return x, x[:, :3].argmax(1)


def train(
    data: Callable[[int], Batch] = batch,
    loss_of: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    last: nn.Module | None = None,
    steps: int = 80,
    lr: float = 1e-2,
    micro: int = 1,
    watched: bool = True,
    **options: Any,
) -> tuple[ModuleMonitor | None, dict[str, Tensor]]:
    """A small classifier."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3), *([] if last is None else [last]))
    optimizer = torch.optim.Adam(model.parameters(), lr)
    monitor = gradmon.watch(model, optimizer, on_spike=None, **options) if watched else None
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(micro):
            x, y = data(micro * step + part)
            loss = loss_of(model(x), y)
            loss.backward()
        if monitor is not None:
            monitor.log_scalar("loss", loss.detach())
        optimizer.step()
    return monitor, model.state_dict()


def rules(monitor: ModuleMonitor | None) -> dict[str, str]:
    """Severity by rule."""
    assert monitor is not None
    found = {finding.rule: finding.severity for finding in monitor.diagnose().findings}
    monitor.detach()
    return found


def test_a_sound_loop_has_no_finding_and_the_same_bits() -> None:
    monitor, state = train()
    assert rules(monitor) == {}
    _, alone = train(watched=False)
    assert all(torch.equal(state[name], alone[name]) for name in alone)


@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")
@pytest.mark.parametrize(
    ("rule", "severity", "settings"),
    [
        ("softmax-before-loss", "error", {"last": nn.Softmax(1)}),
        (
            "softmax-before-loss",
            "error",
            {"last": nn.Sigmoid(), "loss_of": lambda z, y: F.binary_cross_entropy_with_logits(z, F.one_hot(y, 3).float())},
        ),
        ("relu-before-loss", "warning", {"last": nn.ReLU()}),
        ("log-softmax-missing", "error", {"loss_of": F.nll_loss}),
        ("loss-scale", "info", {"loss_of": lambda z, y: F.cross_entropy(z, y) / 500}),
        ("inputs-not-normalised", "info", {"data": lambda step: (0.004 * batch(step)[0], batch(step)[1]), "steps": 30}),
        ("inputs-not-normalised", "info", {"data": lambda step: (0.01 * batch(step)[0] - 1, batch(step)[1])}),
        ("labels-not-mixed", "warning", {"data": lambda step: (batch(step)[0], torch.full((24,), step // 20 % 3))}),
        ("labels-constant", "warning", {"data": lambda step: (batch(step)[0], torch.zeros(24, dtype=torch.long))}),
        ("loss-scale", "info", {"micro": 4}),
        ("repeated-batch", "info", {"data": lambda step: batch(0)}),
        ("repeated-batch", "info", {"data": lambda step: batch(step // 2)}),
        ("loss-at-chance", "warning", {"data": lambda step: (batch(step)[0], batch(step + 500)[1]), "steps": 200, "lr": 1e-3}),
        ("inputs-not-normalised", "info", {"data": lambda step: (100 + batch(step)[0], batch(step)[1]), "lr": 1e-3}),
    ],
)
def test_what_is_wrong_between_data_model_and_loss(rule: str, severity: str, settings: dict[str, Any]) -> None:
    monitor, _ = train(**settings)
    found = rules(monitor)
    assert rule in found
    if severity != "info":  # which a loss that is stuck makes a warning
        assert found[rule] == severity


@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")
@pytest.mark.parametrize("name", ["labels", "batch"])
def test_targets_that_the_model_gets_are_no_input(name: str) -> None:
    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 1)

        def forward(self, ids: Tensor, labels: Tensor | None = None, batch: dict[str, Tensor] | None = None) -> Tensor:
            answer = self.head(self.embed(ids).mean(1)).squeeze(1)
            return F.mse_loss(answer, labels if batch is None else batch["labels"])

    torch.manual_seed(0)
    model = Regression()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    for _ in range(30):
        ids = torch.randint(0, 9, (24, 5))
        targets = ids.float().mean(1) * 500 + 20_000
        loss = model(ids, **({"labels": targets} if name == "labels" else {"batch": {"labels": targets}}))
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
    assert "inputs-not-normalised" not in rules(monitor)


@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")
def test_a_relu_before_a_square_of_targets_below_zero() -> None:
    monitor, _ = train(last=nn.ReLU(), loss_of=lambda z, y: F.mse_loss(z, F.one_hot(y, 3) - 0.5))
    assert rules(monitor)["relu-before-loss"] == "warning"
    monitor, _ = train(last=nn.ReLU(), loss_of=lambda z, y: F.mse_loss(z, F.one_hot(y, 3) + 0.5))
    assert "relu-before-loss" not in rules(monitor)
    noise = draw(24, 3, seed=7)
    monitor, _ = train(last=nn.ReLU(), loss_of=lambda z, y: F.mse_loss(z, F.one_hot(y, 3) + 0.1 * noise))
    assert "relu-before-loss" not in rules(monitor)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")
@pytest.mark.parametrize(
    ("last", "low", "high", "is_so"),
    [
        (nn.Tanh(), -3.0, 3.0, True),
        (nn.Tanh(), -1.0, 1.0, False),
        (nn.Sigmoid(), -1.0, 1.0, True),
        (nn.Sigmoid(), 0.0, 1.0, False),
        (nn.Identity(), -3.0, 3.0, False),
    ],
)
def test_targets_that_the_last_function_cannot_reach(last: nn.Module, low: float, high: float, is_so: bool) -> None:
    def loss_of(z: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(z, low + (high - low) * F.one_hot(y, 3) + 0.05 * draw(24, 3, seed=7))

    monitor, _ = train(last=last, loss_of=loss_of, preset="full", lr=3e-2, steps=300)
    assert rules(monitor).get("targets-out-of-range") == ("warning" if is_so else None)


def test_the_mean_square_of_many_pixels_is_recognised_from_some_of_them() -> None:
    images = 2 * draw(8, 3, 20, 20, seed=5) + torch.arange(20.0)  # brighter to the right
    found = head(lambda z: F.mse_loss(z, images), draw(8, 3, 20, 20))
    assert found is not None
    assert found.kind == "mean square"
    assert found.square - found.mean**2 == pytest.approx(images.var(correction=0).item(), rel=0.15)
    assert head(lambda z: F.l1_loss(z, images), draw(8, 3, 20, 20)) is None


@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")
@pytest.mark.parametrize("kind", ["parts", "twice", "unused first"])
def test_parts_in_a_dict_that_nobody_calls_as_a_whole(kind: str) -> None:
    torch.manual_seed(0)
    first, last, other = nn.Linear(6, 24), nn.Sequential(nn.Linear(24, 3), nn.Tanh()), nn.Linear(6, 2)
    parts = nn.ModuleDict({"first": first, "last": last, "other": other})
    if kind == "twice":
        parts["all"] = nn.ModuleList([first, last])
    optimizer = torch.optim.Adam(parts.parameters(), 3e-2)
    monitor = gradmon.watch(parts, optimizer, on_spike=None, preset="full")
    for step in range(80):
        x, y = batch(step)
        optimizer.zero_grad()
        values = last(first(x).relu())
        if kind == "unused first":
            other(x)
        loss = F.mse_loss(values, 6.0 * F.one_hot(y, 3) - 3)
        loss.backward()
        optimizer.step()
        monitor.log_scalar("loss", loss.detach())  # too late for this step's record
    assert rules(monitor)["targets-out-of-range"] == "warning"


@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")
def test_the_bounds_are_those_of_the_part_whose_gradient_comes_back() -> None:
    torch.manual_seed(0)
    critic, actor = nn.Linear(6, 1), nn.Sequential(nn.Linear(6, 2), nn.Tanh())
    both = nn.ModuleDict({"critic": critic, "actor": actor})
    optimizer = torch.optim.SGD(both.parameters(), 1e-2)
    monitor = gradmon.watch(both, optimizer, on_spike=None)
    for step in range(60):
        x, _ = batch(step)
        optimizer.zero_grad()
        value, action = critic(x), actor(x)
        F.mse_loss(value, 5 * x[:, :1]).backward()
        F.mse_loss(action, x[:, :2].tanh()).backward()
        optimizer.step()
    assert "targets-out-of-range" not in rules(monitor)


@pytest.mark.parametrize(
    ("make", "is_bounded"),
    [
        (lambda z: z.tanh(), True),
        (lambda z: z.sigmoid().view(2, 12).t(), True),
        (lambda z: z.softmax(1)[:, 0], True),
        (lambda z: 1 + z.sigmoid(), False),
        (lambda z: z.tanh() + torch.ones_like(z), False),
        (lambda z: torch.cat([z.sigmoid(), z], 1), False),
    ],
)
def test_bounds_are_those_of_the_last_function_alone(make: Callable[[Tensor], Tensor], is_bounded: bool) -> None:
    assert (origin_of(make(draw(6, 4).requires_grad_())).bounds is not None) == is_bounded


@pytest.mark.parametrize("shape", [(512, 33), (8, 64, 101), (8, 128, 128), (4, 1021), (1024, 2)])
def test_rows_from_all_over_the_output(shape: tuple[int, ...]) -> None:
    places = torch.arange(shape[-1]).float().expand(shape)  # the column of a pixel, the place of a word
    sample = sample_of(torch.stack([places] * 3, 1 if len(shape) == 3 else -1))
    assert sample is not None
    assert len(sample) == ROWS
    assert sample[:, 0].unique().numel() >= 0.8 * min(shape[-1], ROWS)
    assert sample[:, 0].mean().item() == pytest.approx((shape[-1] - 1) / 2, rel=0.1)


def test_float64_is_looked_at_too() -> None:
    found = head(lambda z: F.mse_loss(z[:, 0], draw(64, seed=5).double()), draw(64, 1).double())
    assert found is not None
    assert found.kind == "mean square"


def test_absolute_errors_whose_mean_is_a_quarter_are_no_mean_square() -> None:
    sign = 2.0 * labels(64, 2) - 1
    found = head(lambda z: F.l1_loss(z[:, 0], (z[:, 0] + 0.25 * sign).detach()), draw(64, 1))
    assert found is None


@pytest.mark.parametrize("is_joint", [True, False])
def test_two_forwards_with_one_backward_are_no_micro_batches(is_joint: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    for step in range(40):
        optimizer.zero_grad()
        losses = [F.cross_entropy(model(x), y) for x, y in (batch(2 * step), batch(2 * step + 1))] if is_joint else []
        if is_joint:
            sum(losses).backward()
        for x, y in () if is_joint else (batch(2 * step), batch(2 * step + 1)):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert ("loss-scale" in rules(monitor)) != is_joint


@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")
def test_noise_of_targets_beyond_the_range_is_information() -> None:
    def loss_of(z: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(z, 0.3 * F.one_hot(y, 3) + torch.randn(24, 3))

    monitor, _ = train(last=nn.Sigmoid(), loss_of=loss_of, preset="full")
    assert rules(monitor)["targets-out-of-range"] == "info"


@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")
@pytest.mark.parametrize(("size", "severity"), [(1e5, "warning"), (100.0, "warning"), (3.0, None)])
def test_targets_that_are_large_numbers(size: float, severity: str | None) -> None:
    monitor, _ = train(loss_of=lambda z, y: F.mse_loss(z, size * (5 + F.one_hot(y, 3).float())), lr=1e-3, steps=220)
    assert rules(monitor).get("targets-not-normalised") == severity


BINARY = F.binary_cross_entropy_with_logits


@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")
@pytest.mark.parametrize(
    ("last", "loss_of", "is_so"),
    [
        (nn.Identity(), lambda z, y: F.cross_entropy(z.softmax(1), y), True),
        (nn.Identity(), lambda z, y: -torch.distributions.Categorical(logits=z.softmax(1)).log_prob(y).mean(), True),
        (nn.Identity(), lambda z, y: -torch.distributions.Categorical(logits=z).log_prob(y).mean(), False),
        (nn.Identity(), lambda z, y: F.cross_entropy(z.sigmoid() * 1.0, y), False),  # a temperature
        (nn.Softmax(1), lambda z, y: 0.5 * F.cross_entropy(z.clamp(1e-6, 1), y) + 0.1 * z.square().mean(), True),
        (nn.Identity(), lambda z, y: BINARY(z.sigmoid().double(), F.one_hot(y, 3).double()), True),
        (nn.Sigmoid(), lambda z, y: BINARY(z[:4, 0], (y[:4] > 0).float()), True),
        (nn.Hardsigmoid(), lambda z, y: F.multilabel_soft_margin_loss(z, F.one_hot(y, 3).float()), True),
        (nn.Sigmoid(), lambda z, y: F.binary_cross_entropy(z, F.one_hot(y, 3).float()), False),
        (nn.Sigmoid(), lambda z, y: F.mse_loss(z, F.one_hot(y, 3).float()), False),
        (nn.LogSoftmax(1), F.nll_loss, False),
        (nn.Identity(), lambda z, y: F.nll_loss(z - z.logsumexp(1, True), y), False),
        (nn.LogSoftmax(1), F.cross_entropy, False),  # twice is the same as once
        (nn.Softmax(1), lambda z, y: F.nll_loss((z + 1e-9).log(), y), False),
        (nn.Sigmoid(), lambda z, y: F.cross_entropy(z @ torch.ones(3, 3), y), False),  # gates of a head in the loss
    ],
)
def test_a_loss_that_takes_logits_gets_what_was_squashed(last: nn.Module, loss_of: Callable[..., Tensor], is_so: bool) -> None:
    monitor, _ = train(last=last, loss_of=loss_of, steps=30)
    found = rules(monitor)
    assert ("softmax-before-loss" in found) == is_so
    assert "log-softmax-missing" not in found


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("a temperature", {"loss_of": lambda z, y: F.cross_entropy(200 * z, y)}),
        ("by nothing but", {"loss_of": lambda z, y: F.cross_entropy(z, y) / 500}),
        ("by the number of micro-batches", {"micro": 4}),
    ],
)
def test_the_advice_about_a_scale_is_for_what_was_seen(words: str, settings: dict[str, Any]) -> None:
    monitor, _ = train(**settings)
    assert monitor is not None
    (finding,) = [each for each in monitor.diagnose().findings if each.rule == "loss-scale"]
    assert words in finding.advice


TEACHER = torch.softmax(torch.randn(24, 3, generator=torch.Generator().manual_seed(1)), 1)


@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning", "ignore:Using a target size")
@pytest.mark.parametrize(
    ("rule", "loss_of", "is_so"),
    [
        ("log-softmax-missing", lambda z, y: 9 * F.kl_div(z.softmax(1), TEACHER, reduction="batchmean"), True),
        ("log-softmax-missing", lambda z, y: F.kl_div((z / 3).softmax(1), TEACHER, reduction="sum") / 24, True),
        ("log-softmax-missing", lambda z, y: F.kl_div(z.log_softmax(1), TEACHER, reduction="batchmean"), False),
        (
            "log-softmax-missing",
            lambda z, y: F.kl_div(z.log_softmax(1), TEACHER.log(), reduction="batchmean", log_target=True),
            False,
        ),
        ("log-softmax-missing", lambda z, y: 1 - (TEACHER * z.softmax(1)).sum(1).mean() - 5, False),  # an overlap
        ("log-softmax-missing", lambda z, y: (TEACHER - 3 - z.softmax(1) * TEACHER).mean(), False),  # a reward and its baseline
        ("classes-mixed", lambda z, y: F.cross_entropy(z.view(4, 3, 6).reshape(-1, 3), y), False),  # no output of the model
        ("rows-paired", lambda z, y: F.mse_loss(z[:, :1], y.float()), True),
        ("rows-paired", lambda z, y: F.huber_loss(z[:, 0], y.float()[:, None]), True),
        ("rows-paired", lambda z, y: (z[:, 0] - y.float()[:, None]).abs().mean(), False),  # as of an energy distance
        ("rows-paired", lambda z, y: F.softplus(z[:, :1] - z[:, 0].detach()).mean(), False),
        ("rows-paired", lambda z, y: 3 * F.smooth_l1_loss(z[:, :1], y.float()) + 1e-3 * z.square().mean(), True),
        ("rows-paired", lambda z, y: F.mse_loss(z[:, 0], y.float()), False),
        ("rows-paired", lambda z, y: F.mse_loss(z, y[:, None].float().expand(-1, 3)), False),
        ("rows-paired", lambda z, y: (1 - (z[:, :1] - z[:, 1])).relu().mean(), False),  # of all pairs of two outputs
        ("rows-paired", lambda z, y: F.cross_entropy(z @ z.T, torch.arange(24)), False),
        # a partial likelihood, whose mask says who is still at risk
        ("rows-paired", lambda z, y: ((z[:, 0].exp() * (y <= y[:, None])).sum(1).log() - z[:, 0]).mean(), False),
        ("rows-paired", lambda z, y: (z[:, :1] - TEACHER).square().mean(), False),
    ],
)
def test_what_a_loss_makes_of_shapes_and_probabilities(rule: str, loss_of: Callable[..., Tensor], is_so: bool) -> None:
    monitor, _ = train(loss_of=loss_of, steps=30)
    assert (rule in rules(monitor)) == is_so


def test_the_mean_of_the_output_is_no_loss_with_labels() -> None:
    """The gradient of -mean(z) is that of a binary cross-entropy whose labels are all 1, where z is far below 0."""

    class Low(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return z - 6

    monitor, _ = train(last=Low(), loss_of=lambda z, y: -z.mean(), steps=30, lr=1e-4)
    assert monitor is not None
    assert monitor._runtime.built_in.data.chance == {}
    assert "labels-constant" not in rules(monitor)


def test_gates_within_the_model_are_its_own() -> None:
    class Gated(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return z + z.sigmoid().log_softmax(1)

    monitor, _ = train(last=Gated(), steps=30)
    assert "softmax-before-loss" not in rules(monitor)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_output_that_is_a_leaf_or_nested_gets_no_hook() -> None:
    kept = draw(6, 3).requires_grad_()
    assert output_of(kept) is None
    nested = torch.nested.nested_tensor([draw(2, 3), draw(4, 3)], requires_grad=True) * 2
    assert output_of(nested) is None


def test_of_large_inputs_a_part_is_looked_at() -> None:
    """So that the check costs the same, whatever the size."""
    large = torch.randn(1 << 10, 1 << 10)
    assert (1 << 15) < sampled(large).numel() <= (1 << 16)
    assert sampled(large[:8, :8]).shape == (8, 8)
    assert torch.equal(sampled(large), sampled(large.clone()))
    assert not torch.equal(sampled(large), sampled(large.roll(1, 0)))
    few = _identities(large.repeat(8, 1))
    assert few.numel() == 4096


def test_a_transformation_after_the_forward_of_a_step_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    monitor = gradmon.watch(model, optimizer, on_spike=None)

    def f(row: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(model, dict(model.named_parameters()), (row,))
        return found

    for step in range(4):  # a failure of the monitor would be a warning, which fails the test
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y) + 0.1 * torch.func.vmap(torch.func.jacrev(f))(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    monitor.detach()


def test_one_label_in_one_batch_is_a_goal() -> None:
    monitor, _ = train(data=lambda step: (batch(0)[0], torch.zeros(24, dtype=torch.long)))
    assert "labels-constant" not in rules(monitor)


def test_one_odd_input_is_no_fault_of_all() -> None:
    monitor, _ = train(data=lambda step: (batch(step)[0] + (100 if step in (3, 18) else 0), batch(step)[1]))
    assert "inputs-not-normalised" not in rules(monitor)


@pytest.mark.parametrize(
    ("kind", "acts"),
    [
        ("policy", True),
        ("replay", True),
        ("policy in inference mode", True),
        ("a preview of some rows", False),
        ("policy of images", True),
        ("validation", False),
        ("validation on new rows", False),
        ("validation on padded rows", False),
        ("validation in parts of what is trained", False),
        ("accuracy", False),
        ("tokens", False),
        ("evaluation mode", False),
        ("once", False),
    ],
)
def test_a_model_that_acts_between_its_steps(kind: str, acts: bool) -> None:
    """It is trained on rows that it was called on before, for the first time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 6), nn.Flatten(), nn.Linear(12, 3)) if kind == "tokens" else nn.Linear(6, 3)
    if kind == "policy of images":
        model = nn.Sequential(nn.Flatten(), nn.Linear(24, 3))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    held, y, shape = draw(8, 6, seed=99), labels(64, 3), (2, 3, 4) if kind == "policy of images" else (6,)
    known = [draw(8, *shape, seed=1000 + each) for each in range(8)]
    for step in range(60):
        x = torch.randint(0, 5, (64, 2)) if kind == "tokens" else draw(64, *shape, seed=step)
        if "padded" in kind:
            x[:20] = 0
        with torch.inference_mode() if "inference" in kind and step % 8 else torch.no_grad():
            model.train(kind != "evaluation mode")
            for turn in range(8 if step % 4 == 0 and (step == 0 or kind != "once") else 0):
                rows = draw(8, *shape, seed=1000 + turn + 8 * step)
                if kind == "validation":
                    rows = held
                elif kind == "validation on padded rows":
                    rows[:4] = 0
                elif kind == "validation in parts of what is trained":
                    rows = draw(64, 6, seed=0)[8 * turn : 8 * turn + 8]
                elif kind == "accuracy":
                    rows = x
                elif kind == "a preview of some rows":
                    rows = x[turn : turn + 1]
                elif kind == "tokens":
                    rows = torch.randint(0, 5, (8, 2))
                model(rows)
                known.append(rows)
            model.train()
        if "policy" in kind or kind == "evaluation mode":
            x = torch.cat(known[-8:])
        elif kind == "replay":
            x = torch.cat([known[(7 * each + 3 * step) % len(known)] for each in range(8)])
        elif kind == "validation in parts of what is trained":
            x = draw(64, 6, seed=step % 3)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).mul(1 + step).backward()
        optimizer.step()
        monitor.log_scalar("loss", 1.0 + step)
    found = {finding.rule: finding.severity for finding in monitor.diagnose().findings}
    assert found["loss-divergence"] == ("info" if acts else "warning")
    monitor.detach()


@pytest.mark.parametrize(
    "kind", ["generator", "generator behind true ones", "generator and frozen", "part behind another", "adversarial examples"]
)
def test_a_discriminator_that_is_watched_alone(kind: str) -> None:
    """Its loss need not fall, and what goes back through it to the generator shows nothing about its own labels."""
    torch.manual_seed(0)
    model, generator = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1)), nn.Linear(2, 2)
    ours, theirs = torch.optim.Adam(model.parameters(), 2e-3), torch.optim.Adam(generator.parameters(), 2e-3)
    monitor = gradmon.watch(model, ours, on_spike=None)
    bce = F.binary_cross_entropy_with_logits
    for step in range(120):
        real = 0.7 * draw(64, 2, seed=step) + 0.3
        made = generator(draw(64, 2, seed=500 + step))
        if kind != "part behind another":
            made = made.detach()
        if kind == "adversarial examples":
            x = torch.cat([real, made])
            away = torch.zeros_like(x, requires_grad=True)
            bce(model(x + away)[:, 0], torch.cat([torch.ones(64), torch.zeros(64)])).backward()
            real, made = (x + 0.01 * away.grad.sign()).chunk(2)
        loss = bce(model(torch.cat([real, made]))[:, 0], torch.cat([torch.ones(64), torch.zeros(64)]))
        ours.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        ours.step()
        if "generator" in kind:
            model.requires_grad_(kind != "generator and frozen")
            theirs.zero_grad()
            behind = model(real)[:, 0] if kind == "generator behind true ones" else 0.0
            bce(model(generator(draw(64, 2, seed=900 + step)))[:, 0] - behind, torch.ones(64)).backward()
            theirs.step()
            model.requires_grad_(True)
    check = monitor._runtime.built_in.data
    assert check.acts == ("generator" in kind)
    assert check.chance.get("loss", math.log(2)) == pytest.approx(math.log(2), rel=0.01)
    assert {finding.rule for finding in monitor.diagnose().findings if finding.severity != "info"} == set()
    monitor.detach()


def test_two_players_that_are_watched_each_for_itself() -> None:
    """The generator hears from the discriminator that its output goes there; two parts of one model are no players."""
    for is_game in (True, False):
        torch.manual_seed(0)
        first, second = (
            nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2)),
            nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)),
        )
        optimizers = [torch.optim.SGD(model.parameters(), 1e-3) for model in (first, second)]
        monitors = [gradmon.watch(model, o, on_spike=None) for model, o in zip((first, second), optimizers, strict=True)]
        for step in range(60):
            made = first(draw(16, 2, seed=step))
            if is_game:
                optimizers[1].zero_grad()
                (second(draw(16, 2, seed=900 + step)).mean() - second(made.detach()).mean()).backward()
                optimizers[1].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            second(made.clamp(-5, 5) + 0.01 if is_game else made).square().mean().backward()
            for optimizer in optimizers[: 1 if is_game else 2]:
                optimizer.step()
        assert [monitor._runtime.built_in.data.acts for monitor in monitors] == [is_game] * 2
        for monitor in monitors:
            monitor.detach()


@pytest.mark.parametrize(
    "settings",
    [
        {"micro": 4, "loss_of": lambda z, y: F.cross_entropy(z, y) / 4},
        {"data": lambda step: batch(step % 6), "steps": 60},
        {"every": 3},
    ],
    ids=["divided micro-batches", "a few batches in turn", "every third step"],
)
def test_what_is_right(settings: dict[str, Any]) -> None:
    monitor, _ = train(**settings)
    assert {rule for rule, severity in rules(monitor).items() if severity != "info"} == set()


def test_the_loss_at_chance_is_that_of_the_labels() -> None:
    monitor, _ = train(steps=50)
    assert monitor is not None
    assert monitor._runtime.built_in.data.chance["loss"] == pytest.approx(math.log(3), rel=0.02)
    monitor.detach()


def test_a_loss_of_several_terms_has_no_known_chance() -> None:
    """That of one output says nothing about the sum, such as that of three heads."""
    monitor, _ = train(loss_of=lambda z, y: F.cross_entropy(z, y) + 0.3, steps=50)
    assert monitor is not None
    assert "loss" not in monitor._runtime.built_in.data.chance
    monitor.detach()


def test_hooks_go_when_enough_was_seen_and_when_the_monitor_leaves() -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    before = len(model._forward_hooks)
    for step in range(60):
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert len(model._forward_hooks) == before - 1
    monitor.detach()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


# --- what goes backward into one sum -------------------------------------------------------------------------------------------

Step = Callable[[nn.Module, torch.optim.Optimizer, Tensor, Tensor], Tensor]


def loop(step: Step, steps: int = 60) -> dict[str, dict[str, float]]:
    """The evidence by rule of a training with these steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    for number in range(steps):
        monitor.log_scalar("loss", step(model, optimizer, *batch(number)).detach())
    found = {finding.rule: dict(finding.evidence) for finding in monitor.diagnose().findings}
    monitor.detach()
    return found


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


def sharpness_aware(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, by: str = "backward", to_none: bool = True
) -> Tensor:
    """Sharpness-aware minimisation, with a first gradient of ``backward()`` or ``autograd.grad``."""
    parameters = list(model.parameters())
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad(to_none)
    if by == "grad":
        moves = [0.05 * gradient for gradient in torch.autograd.grad(loss, parameters)]
    else:
        loss.backward()
        moves = [0.05 * p.grad for p in parameters]
    with torch.no_grad():
        torch._foreach_add_(parameters, moves)
    optimizer.zero_grad(to_none)
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        torch._foreach_sub_(parameters, moves)
    optimizer.step()
    return loss


def attacked(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, by: str, reduction: str = "mean"
) -> Tensor:
    """Trains on adversarial examples, whose gradients come ``by`` one of the ways."""
    moved = torch.zeros_like(x, requires_grad=True)
    for _ in range(3):
        loss = F.cross_entropy(model(x + moved), y, reduction=reduction)
        if by == "grad":
            gradient = torch.autograd.grad(loss, moved)[0]
        else:
            loss.backward(inputs=[moved] if by == "inputs" else None)
            gradient = moved.grad
            model.zero_grad()
        moved = (moved + 0.05 * gradient.sign()).clamp(-0.1, 0.1).detach().requires_grad_()
    loss = _trained(model, optimizer, x + moved.detach(), y)
    optimizer.step()
    return loss


def looked_at(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, by: str) -> Tensor:
    """Trains, and calls the model once more between the backward pass and the step."""
    loss = _trained(model, optimizer, x, y)
    if by == "saliency":
        inputs = x.clone().requires_grad_()
        torch.autograd.grad(F.cross_entropy(model(inputs), y), inputs)
    else:
        F.cross_entropy(model(x), y).item()
    optimizer.step()
    return loss


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(lambda *at: sharpness_aware(*at), id="sharpness-aware"),
        pytest.param(lambda *at: sharpness_aware(*at, to_none=False), id="sharpness-aware, zeros"),
        pytest.param(lambda *at: sharpness_aware(*at, by="grad"), id="sharpness-aware by grad"),
        *(pytest.param(lambda *at, by=by: attacked(*at, by), id=f"attack by {by}") for by in ("grad", "inputs", "backward")),
        pytest.param(lambda *at: attacked(*at, "grad", "sum"), id="attack by the grad of a sum"),
        pytest.param(lambda *at: looked_at(*at, "saliency"), id="saliency"),
        pytest.param(lambda *at: looked_at(*at, "forward"), id="a forward for the log"),
    ],
)
def test_passes_that_add_to_no_gradient_that_is_used_are_no_micro_batches(step: Step) -> None:
    assert loop(step) == {}


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("by", ["plain", "attacked", "inputs="])
def test_micro_batches_that_are_not_divided_are_counted_as_they_go_backward(by: str, to_none: bool) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad(to_none)
        for part, target in zip(x.chunk(3), y.chunk(3), strict=True):
            if by == "attacked":
                moved = torch.zeros_like(part, requires_grad=True)
                part = part + 0.1 * torch.autograd.grad(F.cross_entropy(model(part + moved), target), moved)[0].sign()
            loss = F.cross_entropy(model(part), target)
            loss.backward(inputs=list(model.parameters()) if by == "inputs=" else None)
        optimizer.step()
        return loss

    assert loop(step)["loss-scale"]["micro-batches that each count as a whole"] == 3


@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")
def test_real_and_made_examples_that_go_backward_one_by_one_are_terms_of_one_loss() -> None:
    """As in PyTorch's tutorial of the DCGAN, with a loss that is logged and does not fall."""
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    judge = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(), nn.Linear(32, 1))
    of_maker, of_judge = (torch.optim.Adam(part.parameters(), 2e-4, betas=(0.5, 0.999)) for part in (maker, judge))
    both = nn.ModuleDict({"maker": maker, "judge": judge})
    monitor = gradmon.watch(both, of_judge, of_maker, on_spike=None)
    score, ones, zeros = F.binary_cross_entropy_with_logits, torch.ones(64, 1), torch.zeros(64, 1)
    for step in range(60):
        of_judge.zero_grad()
        score(judge(0.5 * draw(64, 2, seed=step) + 2), ones).backward()
        made = maker(draw(64, 4, seed=1000 + step))
        score(judge(made.detach()), zeros).backward()
        of_judge.step()
        of_maker.zero_grad()
        loss = score(judge(made), ones)
        loss.backward()
        of_maker.step()
        monitor.log_scalar("loss", loss.detach())
    assert "loss-scale" not in rules(monitor)


Score = Callable[[Tensor], Tensor]


def play(of_real: Score, of_made: Score, of_maker: Score, *, apart: bool = False) -> dict[str, str]:
    """The rules that are found in a game of a maker of rows and a judge with these losses, watched together or ``apart``."""
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    judge = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(), nn.Linear(16, 1))
    of_judge, of_other = (torch.optim.Adam(part.parameters(), 1e-3, betas=(0.5, 0.999)) for part in (judge, maker))
    if apart:
        monitors = [gradmon.watch(judge, of_judge, on_spike=None), gradmon.watch(maker, of_other, on_spike=None)]
    else:
        monitors = [gradmon.watch(nn.ModuleDict({"maker": maker, "judge": judge}), of_judge, of_other, on_spike=None)]
    for step in range(30):
        with torch.no_grad():
            made = maker(draw(32, 4, seed=1000 + step))
        of_judge.zero_grad()
        (of_real(judge(0.5 * draw(32, 2, seed=step) + 2)) + of_made(judge(made))).backward()
        of_judge.step()
        of_other.zero_grad()
        of_maker(judge(maker(draw(32, 4, seed=2000 + step)))).backward()
        of_other.step()
    return {rule: severity for monitor in monitors for rule, severity in rules(monitor).items()}


def is_one(answer: Tensor) -> Tensor:
    """The loss of a judge that is to say yes."""
    return F.binary_cross_entropy_with_logits(answer, torch.ones_like(answer))


def is_zero(answer: Tensor) -> Tensor:
    """And no."""
    return F.binary_cross_entropy_with_logits(answer, torch.zeros_like(answer))


def near(goal: float) -> Score:
    """The loss of least squares."""
    return lambda answer: (answer - goal).square().mean()


def down(answer: Tensor) -> Tensor:
    """The mean, which falls."""
    return answer.mean()


def up(answer: Tensor) -> Tensor:
    """The mean, which rises."""
    return -answer.mean()


@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("of_real", "of_made", "of_maker"),
    [
        (is_one, is_one, is_one),  # one label for all
        (is_zero, is_one, is_one),  # labels the other way round
        (is_one, is_zero, is_zero),  # the maker asks for a no
        (is_one, is_zero, lambda answer: -is_one(answer)),  # a sign
        (lambda answer: -is_one(answer), lambda answer: -is_zero(answer), is_one),
        (down, up, up),
        (up, down, down),
        (lambda answer: F.relu(1 + answer).mean(), lambda answer: F.relu(1 - answer).mean(), up),
        (near(1), near(4), near(4)),
    ],
)
def test_players_that_push_answers_the_same_way(of_real: Score, of_made: Score, of_maker: Score, apart: bool) -> None:
    assert play(of_real, of_made, of_maker, apart=apart)["players-agree"] == "warning"


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("of_real", "of_made", "of_maker"),
    [
        (is_one, is_zero, is_one),
        (is_one, is_zero, lambda answer: -is_zero(answer)),
        (up, down, up),
        (lambda answer: F.relu(1 - answer).mean(), lambda answer: F.relu(1 + answer).mean(), up),
        (near(1), near(0), near(1)),
        (near(8), near(5), near(8)),  # both begin far above the answers
        (near(0), lambda answer: (answer - draw(32, 1) - 3).square().mean(), up),  # a goal of each row, as of a value
    ],
)
def test_players_of_a_game_are_no_finding(of_real: Score, of_made: Score, of_maker: Score, apart: bool) -> None:
    assert "players-agree" not in play(of_real, of_made, of_maker, apart=apart)


@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")
def test_players_of_a_game_in_each_of_several_threads() -> None:
    found: dict[bool, dict[str, str]] = {}

    def playing(is_sound: bool) -> None:
        found[is_sound] = play(is_one, is_zero, is_one if is_sound else is_zero, apart=True)

    threads = [threading.Thread(target=playing, args=(is_sound,)) for is_sound in (False, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {is_sound: "players-agree" in rules for is_sound, rules in found.items()} == {False: True, True: False}


def test_outputs_of_players_carry_no_mark_and_are_not_kept() -> None:
    known = len(_makers)
    players = nn.ModuleDict({"maker": nn.Linear(4, 2), "judge": nn.Linear(2, 1)})
    optimizer = torch.optim.SGD(players.parameters(), 0.1)
    monitor = gradmon.watch(players, optimizer, on_spike=None)
    made = players["maker"](draw(8, 4)).detach()
    assert len(_makers) == known + 1
    assert not vars(made.untyped_storage())
    torch.save(copy.deepcopy(made), saved := io.BytesIO())
    assert torch.equal(torch.load(io.BytesIO(saved.getvalue())), made)
    del made
    assert len(_makers) == known
    monitor.detach()


def test_outputs_of_one_network_alone_are_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_gradmon.plugins.data_check._networks", weakref.WeakSet[Any]())
    known = len(_makers)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    output = model(draw(8, 4))
    assert len(_makers) == known
    assert output.grad_fn is not None
    monitor.detach()


@pytest.mark.parametrize("penalty", [0.0, 1e5])
def test_a_mean_beside_a_large_penalty_is_no_mean_square(penalty: float) -> None:
    critic = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(critic.parameters(), 1e-9)
    monitor = gradmon.watch(critic, optimizer, on_spike=None)
    for step in range(8):
        x = draw(32, 2, seed=step).requires_grad_()
        optimizer.zero_grad()
        loss = critic(draw(32, 2, seed=100 + step)).mean() - critic(draw(32, 2, seed=200 + step)).mean()
        (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        loss = loss + penalty * (gradient.norm(dim=1) - 1).square().mean()
        loss.backward()
        optimizer.step()
        monitor.log_scalar("loss", loss.detach())
    assert "targets-not-normalised" not in rules(monitor)


def parts_of_game(fault: str = "") -> dict[str, tuple[str, ...]]:
    """Which parts of a container without a forward have which findings."""
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    judge = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
    other = nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16))  # a feature network that nothing trains
    of_judge, of_maker = (torch.optim.Adam(part.parameters(), 1e-3, betas=(0.5, 0.999)) for part in (judge, maker))
    parts = nn.ModuleDict({"maker": maker, "judge": judge, "other": other})
    monitor = gradmon.watch(parts, of_judge, of_maker, on_spike=None)
    other.eval()
    for step in range(40):
        judge.train(fault != "judge in eval" and (fault != "by turns"))
        noise = 0 * draw(32, 4) if fault == "noise of 0" else draw(32, 4, seed=1000 + step)
        real = draw(32, 2, seed=0 if fault == "same batch" else step) * (100 if fault == "pixels" else 1)
        made = maker(noise)
        of_judge.zero_grad()
        (is_zero(judge(made.detach())) + is_one(judge(real))).backward()
        of_judge.step()
        of_maker.zero_grad()
        judge.train(fault != "judge in eval")
        (is_one(judge(made)) + 0 * other(made).sum()).backward()
        of_maker.step()
    known = ("eval-mode", "constant-input", "inputs-not-normalised", "repeated-batch", "non-finite-input")
    return {fact.rule: fact.where for fact in monitor._runtime.built_in.data.facts() if fact.rule in known}


@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")
@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("", {}),
        ("by turns", {}),  # in evaluation mode in one of its two turns
        ("judge in eval", {"eval-mode": ("judge",)}),
        ("noise of 0", {"constant-input": ("maker",), "repeated-batch": ("maker",)}),
        ("pixels", {"inputs-not-normalised": ("judge",)}),
        ("same batch", {"repeated-batch": ("judge",)}),
    ],
)
def test_parts_of_a_container_are_looked_at_like_models(fault: str, found: dict[str, tuple[str, ...]]) -> None:
    assert parts_of_game(fault) == found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_goal_of_a_square_is_known_in_any_precision(dtype: torch.dtype) -> None:
    """Else two squares with the goals 0 and 1 seem to have one goal while the answers lie on the same side of both."""
    answers = torch.tensor([-0.31, -0.17, -0.052, -0.44, -0.23]).to(dtype)
    push = push_of(answers, (2 / 5 * (answers - 1.0)).to(dtype))
    assert push is not None
    assert push[4].item() == pytest.approx(1.0, abs=0.1)
