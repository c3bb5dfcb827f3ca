"""Mistakes of the setup: each is found in a loop that makes it, and not in one that does the same on purpose."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon import GradmonWarning, ModuleMonitor
from torch_gradmon.plugins.setup_check import Followed


def rules(monitor: ModuleMonitor) -> list[str]:
    """Of all findings."""
    return [finding.rule for finding in monitor.diagnose().findings]


def train(
    model: nn.Module,
    *optimizers: torch.optim.Optimizer,
    steps: int = 24,
    each: Callable[[], None] = lambda: None,
    **options: Any,
) -> ModuleMonitor:
    """Some steps on random data; ``each`` is called in each."""
    monitor = gradmon.watch(model, *optimizers, on_spike=None, **options)
    loop(monitor, model, optimizers, steps, each)
    return monitor


def loop(
    monitor: ModuleMonitor,
    model: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    steps: int = 24,
    each: Callable[[], None] = lambda: None,
) -> None:
    """The same with a monitor that is there already."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        each()
        loss = model(torch.randn(8, 4, generator=generator)).square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        for optimizer in optimizers:
            optimizer.step()


def net(*layers: nn.Module) -> nn.Sequential:
    """With these layers in the middle."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), *layers, nn.Linear(8, 2))


def sgd(model: nn.Module, **settings: Any) -> torch.optim.SGD:
    """Of a small rate."""
    return torch.optim.SGD(model.parameters(), 0.01, **settings)


@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")
@pytest.mark.parametrize(
    ("rule", "settings"),
    [
        ("eval-mode", {"layer": nn.Dropout(0.1), "eval": True}),
        ("eval-mode", {"layer": nn.BatchNorm1d(8), "eval": True}),
        ("dropout-high", {"layer": nn.Dropout(0.95)}),
        ("batch-norm-frozen", {"layer": nn.BatchNorm1d(8, momentum=0.0)}),
    ],
)
def test_modes_and_settings_of_modules(rule: str, settings: dict[str, Any]) -> None:
    model = net(settings["layer"])
    model.train(not settings.get("eval"))
    monitor = train(model, sgd(model))
    assert rule in rules(monitor)
    monitor.detach()


def _frozen_part() -> nn.Sequential:
    model = net(nn.BatchNorm1d(8))
    model[:2].requires_grad_(False)
    return model.eval()


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: net(nn.ReLU()).eval(), id="evaluation mode without anything that has modes"),
        pytest.param(_frozen_part, id="a frozen part in evaluation mode"),
        pytest.param(lambda: net(nn.Dropout(0.8)), id="much dropout"),
        pytest.param(lambda: net(nn.BatchNorm1d(8, momentum=None)), id="a plain mean"),
        pytest.param(lambda: net(nn.BatchNorm1d(8, track_running_stats=False)), id="no running statistics"),
    ],
)
def test_what_is_meant_is_no_finding(make: Callable[[], nn.Sequential]) -> None:
    model = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor = train(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.01))
    assert not {"eval-mode", "dropout-high", "batch-norm-frozen", "unregistered-parameters"} & set(rules(monitor))
    monitor.detach()


def test_evaluation_between_steps_is_no_evaluation_mode() -> None:
    model = net(nn.Dropout(0.1))
    optimizer = sgd(model)
    monitor = gradmon.watch(model, optimizer, on_spike=None)

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            model(torch.randn(2, 4))
        model.train()

    loop(monitor, model, [optimizer], each=evaluate)
    assert "eval-mode" not in rules(monitor)
    monitor.detach()


class _Hiding(nn.Module):
    """Has layers in a plain container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        layer, scale = nn.Linear(4, 4), torch.ones(4, requires_grad=True)
        self.kept: Any = {"list": [layer], "dict": {"a": layer}, "tensor": scale, "tuple of lists": ([layer],)}.get(kind)
        if kind == "frozen":
            self.kept = [layer.requires_grad_(False)]
        if kind == "registered":
            self.layer = layer
            self.kept = [layer]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        kept = self.kept
        while isinstance(kept, (list, tuple, dict)):
            kept = next(iter(kept.values() if isinstance(kept, dict) else kept))
        return x * kept if isinstance(kept, Tensor) else kept(x)


@pytest.mark.parametrize("kind", ["list", "dict", "tensor", "tuple of lists"])
def test_layers_that_are_no_part_of_the_model(kind: str, tmp_path: Path) -> None:
    model = _Hiding(kind)
    with pytest.warns(GradmonWarning, match="no part of the model"):
        monitor = train(model, sgd(model), run_dir=tmp_path)
    (finding,) = [each for each in monitor.diagnose().findings if each.rule == "unregistered-parameters"]
    assert finding.where.startswith("kept")
    monitor.detach()
    assert "unregistered-parameters" in [each.rule for each in gradmon.load_run(tmp_path).diagnose().findings]


@pytest.mark.parametrize("kind", ["frozen", "registered"])
def test_frozen_or_registered_layers_in_a_list_are_sound(kind: str) -> None:
    model = _Hiding(kind)
    monitor = train(model, sgd(model))
    assert "unregistered-parameters" not in rules(monitor)
    monitor.detach()


class _Copied(nn.Module):
    """A parameter that was moved or copied before it became an attribute, or the last output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.kind = nn.Linear(4, 4), kind
        if kind != "output":
            moved = nn.Parameter(torch.ones(4)).double().float() if kind == "tensor" else nn.Parameter(torch.ones(4)) * 1.0
            self.scale = [moved] if kind == "list" else moved

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.kind == "output":
            self.scale = x
        return x * (self.scale[0] if isinstance(self.scale, list) else self.scale)


@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")  # of that, and of the graph that it keeps
@pytest.mark.parametrize("kind", ["tensor", "product", "output"])
def test_a_copy_of_a_parameter_is_no_parameter(kind: str) -> None:
    model = _Copied(kind)
    if kind == "output":
        model(torch.ones(2, 4))
    optimizer = sgd(model)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    for _ in range(40):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward(retain_graph=True)
        optimizer.step()
    assert ("unregistered-parameters" in rules(monitor)) == (kind != "output")
    monitor.detach()


def test_hidden_layers_with_an_optimizer_are_trained() -> None:
    model = _Hiding("list")
    monitor = train(model, torch.optim.SGD([*model.parameters(), *model.kept[0].parameters()], 0.01))
    assert "unregistered-parameters" not in rules(monitor)
    monitor.detach()


class _Anew(nn.Module):
    """A layer that is made in forward, in the first one, or outside."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.kind = nn.Linear(4, 4), kind
        self.second = nn.LazyLinear(2) if kind == "lazy" else nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "as an attribute":
            self.second = nn.Linear(4, 2)
        last = nn.Linear(4, 2) if self.kind == "anew" else self.second
        out: Tensor = last(self.first(x))
        return out


@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", ["anew", "as an attribute", "once", "lazy"])
def test_a_layer_that_is_made_in_forward(kind: str) -> None:
    torch.manual_seed(0)
    before = hooks_of_all_modules()
    model = _Anew(kind)
    if kind == "lazy":
        model(torch.ones(1, 4))
    optimizer = sgd(model.first) if "a" in kind and kind != "lazy" else sgd(model)
    monitor = train(model, optimizer)
    assert ("unregistered-parameters" in rules(monitor)) == (kind in ("anew", "as an attribute"))
    monitor.detach()
    assert hooks_of_all_modules() == before


def hooks_of_all_modules() -> set[int]:
    """Those that are called when any module registers a parameter; a test that ended in an error may have left some."""
    return set(nn.modules.module._global_parameter_registration_hooks)


@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")
def test_another_head_in_each_forward_is_no_layer_made_anew() -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 4)

        def forward(self, x: Tensor, head: nn.Module) -> Tensor:
            return head(self.body(x).relu())  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, heads = Body(), nn.ModuleList(nn.Linear(4, 2) for _ in range(24))
    optimizer = torch.optim.SGD([*model.parameters(), *heads.parameters()], lr=0.01)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    for head in heads:
        optimizer.zero_grad()
        model(torch.randn(8, 4), head).square().mean().backward()
        optimizer.step()
    assert "unregistered-parameters" not in rules(monitor)
    monitor.detach()


@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")
def test_parameters_that_a_loop_makes_for_each_step_are_its_own() -> None:
    model = net(nn.Tanh())
    optimizer = sgd(model)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    for _ in range(24):
        x = torch.randn(8, 4)
        delta = nn.Parameter(torch.zeros_like(x))
        probe = nn.Linear(2, 2)
        optimizer.zero_grad()
        loss = probe(model(x + delta)).square().mean()
        loss.backward()
        optimizer.step()
    assert "unregistered-parameters" not in rules(monitor)
    monitor.detach()


def test_a_hook_on_all_modules_goes_with_its_monitor() -> None:
    before = hooks_of_all_modules()
    model = net(nn.Tanh())
    optimizer = sgd(model)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    with contextlib.suppress(RuntimeError):
        model(torch.randn(8, 5))
    assert len(hooks_of_all_modules() - before) == 1
    del model, optimizer, monitor
    gc.collect()
    assert hooks_of_all_modules() == before


def test_a_forward_that_raises_leaves_no_hook_behind() -> None:
    before = hooks_of_all_modules()
    model = net(nn.Tanh())
    optimizer = sgd(model)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    with pytest.raises(RuntimeError):
        model(torch.randn(8, 5))
    loop(monitor, model, [optimizer], 2)
    monitor.detach()
    assert hooks_of_all_modules() == before


def test_parameters_of_two_optimizers_are_found_across_monitors() -> None:
    first, second = net(nn.Tanh()), net(nn.Tanh())
    own = sgd(first)
    both = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.01)
    watching = gradmon.watch(first, own, on_spike=None)
    monitor = gradmon.watch(second, both, on_spike=None)
    loop(watching, first, [own], 4)
    assert "parameter-in-two-optimizers" in rules(watching)
    for each in (watching, monitor):
        each.detach()


def test_setup_check_forgets_optimizers_at_detach() -> None:
    model = net(nn.Tanh())
    first, second = sgd(model), sgd(model)  # one after the other, as in a recipe of two phases
    train(model, first).detach()
    monitor = train(model, second)
    assert "parameter-in-two-optimizers" not in rules(monitor)
    monitor.detach()


def test_an_optimizer_for_each_part_is_sound() -> None:
    model = net(nn.Tanh())
    monitor = train(model, sgd(model[0]), sgd(model[2]))
    assert "parameter-in-two-optimizers" not in rules(monitor)
    monitor.detach()


def test_betas_that_are_swapped() -> None:
    model = net()
    with pytest.warns(GradmonWarning, match="first beta is larger"):
        monitor = train(model, torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.999, 0.9)))
    assert "betas-swapped" in rules(monitor)
    monitor.detach()
    monitor = train(model, torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.0, 0.9)))
    assert "betas-swapped" not in rules(monitor)
    monitor.detach()


def test_groups_and_their_settings_are_in_the_run_directory(tmp_path: Path) -> None:
    model = net()
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.5, "weight_decay": 0.1}]
    monitor = train(model, torch.optim.SGD(groups, 0.01, momentum=0.9), run_dir=tmp_path, steps=3)
    monitor.detach()
    found = gradmon.load_run(tmp_path)._reader.meta["optimizers"]
    assert [(each["optimizer"], each["settings"]["lr"], each["settings"]["weight_decay"]) for each in found] == [
        ("SGD", 0.01, 0),
        ("SGD", 0.5, 0.1),
    ]
    assert [each["parameters"] for each in found] == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]


# --- expectations ------------------------------------------------------------------------------------------------------------


def test_what_was_declared_and_holds_is_no_finding() -> None:
    model = net(nn.Tanh())
    model[0].requires_grad_(False)
    optimizer = sgd(model[2])
    checks = gradmon.Checks(frozen=r"^0\.", trained=r"^2\.", dtype={"2": torch.float32}, batch_varies=True)
    monitor = gradmon.watch(model, optimizer, on_spike=None, checks=checks)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop(monitor, model, [optimizer])
    assert "expectation-broken" not in rules(monitor)
    monitor.detach()


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"frozen": r"^0\."}, "parameters that change, declared frozen 2"),
        ({"trained": r"^2\."}, "declared to train 2"),
        ({"dtype": {"^0$": torch.bfloat16}}, r"0 gives torch.float32, expected torch.bfloat16"),
    ],
)
def test_what_was_declared_and_does_not_hold(declared: dict[str, Any], words: str) -> None:
    model = net(nn.Tanh())
    optimizer = sgd(model[0])
    monitor = gradmon.watch(model, optimizer, on_spike=None, checks=gradmon.Checks(**declared))
    with pytest.warns(GradmonWarning, match=words):
        loop(monitor, model, [optimizer])
    assert rules(monitor)[0] == "expectation-broken"
    monitor.detach()


@pytest.mark.parametrize(
    ("declared", "error", "words"),
    [
        ({"frozen": "nothing"}, ValueError, "fits no parameter; the first ones are"),
        ({"trained": "("}, ValueError, "is not a valid regular expression"),
        ({"frozen": 3}, TypeError, "must be a regular expression"),
        ({"dtype": {"nothing": torch.float32}}, ValueError, "fits no module"),
        ({"dtype": {"0": "float32"}}, TypeError, "must have a torch.dtype"),
        ({"dtype": 3}, TypeError, "must be a dict of a torch.dtype"),
        ({"batch_varies": 1}, TypeError, "must be True, False or None"),
    ],
)
def test_what_cannot_be_declared(declared: dict[str, Any], error: type[Exception], words: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=words):
        ModuleMonitor(net(), run_dir=tmp_path / "run", checks=gradmon.Checks(**declared))
    assert not (tmp_path / "run").exists()


def test_a_declaration_that_fits_no_later_model_is_refused() -> None:
    monitor = ModuleMonitor(checks=gradmon.Checks(frozen="nothing"))
    with pytest.raises(ValueError, match="fits no parameter"):
        monitor.set_module(net())
    assert monitor.module is None


# --- who trains what now --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen_first", [False, True])
def test_two_optimizers_one_after_the_other_share_nothing(frozen_first: bool) -> None:
    model = net(nn.Tanh())
    second = torch.optim.SGD(model.parameters(), 0.01)
    model[0].requires_grad_(not frozen_first)
    first = torch.optim.Adam(model[2].parameters() if frozen_first else model.parameters())
    train(model, first).detach()
    model[0].requires_grad_(True)
    monitor = train(model, second, start_step=24)
    assert "parameter-in-two-optimizers" not in rules(monitor)
    monitor.detach()
    assert first.param_groups  # alive


def _by_phases(phases: str) -> list[str]:
    """The findings where one of two optimizers of the same parameters steps for each letter."""
    model = net(nn.Tanh())
    optimizers = {"a": torch.optim.Adam(model.parameters(), 1e-3), "b": torch.optim.SGD(model.parameters(), 1e-3)}
    monitor = gradmon.watch(model, *optimizers.values(), on_spike=None)
    for letter in phases:
        loop(monitor, model, [optimizers[letter]], 1)
    found = rules(monitor)
    monitor.detach()
    assert not any(optimizer._optimizer_step_post_hooks for optimizer in optimizers.values())
    return found


@pytest.mark.parametrize("phases", ["a" * 30 + "b" * 12, "b" * 20 + "a" * 20 + "b" * 3, "a" * 25 + "b" + "a" * 25 + "b"])
def test_phases_of_two_optimizers_are_no_mistake(phases: str) -> None:
    assert "parameter-in-two-optimizers" not in _by_phases(phases)


@pytest.mark.parametrize("phases", ["ab" * 20, "aaab" * 8, "a" * 20 + "ab" * 10])
def test_turns_of_two_optimizers_at_one_parameter_are_named(phases: str) -> None:
    assert "parameter-in-two-optimizers" in _by_phases(phases)


def test_groups_that_are_pointed_elsewhere_own_nothing_here() -> None:
    model, other = net(nn.Tanh()), net(nn.Tanh())
    first, second = sgd(model), sgd(other)
    one = gradmon.watch(other, second, on_spike=None)
    second.param_groups[0]["params"] = list(model.parameters())
    monitor = train(model, first)
    assert "parameter-in-two-optimizers" in rules(monitor)
    second.param_groups[0]["params"] = list(other.parameters())
    assert "parameter-in-two-optimizers" not in rules(monitor)
    for each in (one, monitor):
        each.detach()


def test_followed_optimizers_are_known_from_many_threads() -> None:
    optimizers = [sgd(net(nn.Tanh())) for _ in range(8)]

    def follow(optimizer: torch.optim.Optimizer) -> None:
        for _ in range(200):
            followed = Followed([optimizer])
            assert optimizer in Followed.by_any()
            del followed

    before = len(Followed.by_any())
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(follow, optimizers))
    gc.collect()
    assert len(Followed.by_any()) == before
    kept = Followed(optimizers)
    del optimizers
    gc.collect()
    assert len(Followed.by_any()) == before
    del kept


class _Player(nn.Module):
    """A generator that keeps its critic out of its own parameters."""

    def __init__(self, critic: nn.Module) -> None:
        super().__init__()
        self.layer, self.critic = nn.Linear(4, 4), [critic]

    def forward(self, x: Tensor) -> Tensor:
        return self.critic[0](self.layer(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("trained", ["watched", "unwatched", "never"])
@pytest.mark.filterwarnings("ignore:.*in a plain list")
def test_a_critic_in_a_list_is_one_if_something_trains_it(trained: str) -> None:
    critic = net(nn.Tanh())
    model, of_critic = _Player(critic), sgd(critic)
    if trained == "watched":
        of_critic.param_groups[0]["lr"] = 0.0  # it is known by its monitor alone
    watching = gradmon.watch(critic, of_critic, on_spike=None) if trained == "watched" else None

    def step() -> None:
        if trained != "never":
            of_critic.step()
            of_critic.zero_grad()

    monitor = train(model, sgd(model), each=step)
    assert ("unregistered-parameters" in rules(monitor)) == (trained == "never")
    for each in (watching, monitor):
        if each is not None:
            each.detach()


@pytest.mark.parametrize("copies", ["now and then", "bit by bit", "never"])
def test_a_network_that_nobody_trains_is_no_mistake(copies: str) -> None:
    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.target, self.step = net(nn.Tanh()), net(nn.Tanh()), 0

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                goal = self.target(x)
                for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                    slow.lerp_(fast, {"now and then": float(self.step % 10 == 9), "bit by bit": 0.01, "never": 0.0}[copies])
            self.step += 1
            return self.online(x) - goal - x[:, :1]  # type: ignore[no-any-return]

    model = Agent()
    monitor = train(model, sgd(model.online), steps=30)
    found = [finding for finding in monitor.diagnose().findings if finding.where.startswith("target")]
    assert [(finding.rule, finding.severity) for finding in found] == [("no-gradient", "info")]
    assert "no optimizer has it" in found[0].cause
    monitor.detach()


def test_a_layer_that_an_optimizer_has_without_gradient_is_named() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.left = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).detach())  # type: ignore[no-any-return]

    model = Cut()
    monitor = train(model, torch.optim.SGD([*model.first.parameters(), *model.last.parameters()], 0.01), steps=30)
    found = {finding.where: finding.severity for finding in monitor.diagnose().findings if finding.rule == "no-gradient"}
    assert found == {"first.weight": "warning", "left.weight": "info"}
    monitor.detach()


@pytest.mark.parametrize("hooks", ["none", "lost", "moved"])
def test_replaced_parameters_matter_if_hooks_are_lost(hooks: str) -> None:
    model = net(nn.Tanh())
    optimizer, step = sgd(model), iter(range(100))

    def hook() -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-9, 9))

    def replace() -> None:
        if next(step) == 5:
            model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
            optimizer.param_groups[0]["params"] = list(model.parameters())
            if hooks == "moved":
                hook()

    if hooks != "none":
        hook()
    monitor = train(model, optimizer, steps=40, each=replace)
    assert ("dead-hooks" in rules(monitor)) == (hooks == "lost")
    assert len(monitor.get_all_metrics()) == 40
    assert all("gradmon/grad_norm" in values for values in monitor.get_all_metrics().values())
    monitor.detach()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_copy_that_is_trained_instead_is_named(kind: Callable[..., torch.optim.Optimizer]) -> None:
    watched, trained = net(nn.Tanh()), net(nn.Tanh())
    optimizer = kind(watched.parameters(), lr=0.01)
    monitor = gradmon.watch(watched, optimizer, on_spike=None)
    with pytest.warns(GradmonWarning, match="as where the loop trains another copy of it|no parameter had a gradient") as caught:
        loop(monitor, trained, [optimizer], 12)
    assert len(caught) == 2
    assert rules(monitor)[0] == "another-model-trained"
    assert "trains another copy of it. [" in " ".join(str(monitor.diagnose()).split())
    assert not [reason for reason in monitor.missing().values() if "clip" in reason and "call monitor" in reason]
    loop(monitor, watched, [optimizer], 3)  # it was something else
    assert "another-model-trained" not in rules(monitor)
    monitor.detach()


def test_a_player_that_makes_new_samples_for_its_step_need_not_learn() -> None:
    torch.manual_seed(0)
    generator, critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), net(nn.Tanh())
    of_generator, of_critic = (torch.optim.SGD(player.parameters(), 1e-4) for player in (generator, critic))
    monitors = gradmon.watch(critic, of_critic, on_spike=None), gradmon.watch(generator, of_generator, on_spike=None)
    for _ in range(60):
        of_critic.zero_grad()
        (critic(generator(torch.randn(8, 4)).detach()) - critic(torch.randn(8, 4))).mean().backward()
        of_critic.step()
        of_generator.zero_grad()
        loss = nn.functional.softplus(-critic(generator(torch.randn(8, 4)))).mean()
        loss.backward()
        of_generator.step()
        monitors[1].log_scalar("loss", loss.detach())
    assert not [finding for finding in monitors[1].diagnose().findings if finding.severity != "info"]
    for monitor in monitors:
        monitor.detach()
