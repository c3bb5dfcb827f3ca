"""Modules of every kind are watched: nothing raises, training is the same bit for bit, and what cannot be had is absent with its reason."""

from __future__ import annotations

import dataclasses
import functools
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")
BATCH = torch.linspace(-1.0, 1.0, 12).reshape(4, 3)


def encoder() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh())


class Two(nn.Module):
    def __init__(self, first: Any) -> None:
        super().__init__()
        self.encoder, self.head = first, nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


# --- of TorchScript ----------------------------------------------------------------------------------------------------------------


def scripted() -> Any:
    return torch.jit.script(encoder())


def traced() -> Any:
    return torch.jit.trace(encoder(), BATCH)


def loaded(module: nn.Module | None = None) -> Any:
    """Whose parameters are plain tensors."""
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(module or encoder()), file)
    file.seek(0)
    return torch.jit.load(file)


def with_running_statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


OF_SCRIPT: dict[str, Callable[[], Any]] = {
    "script": lambda: Two(scripted()),
    "frozen script": lambda: _frozen(Two(scripted())),
    "trace": lambda: Two(traced()),
    "loaded": lambda: Two(loaded()),
    "freeze": lambda: Two(torch.jit.freeze(scripted().eval())),
    "nested": lambda: Two(nn.Sequential(nn.Sequential(torch.jit.script(nn.Linear(3, 4))), nn.Tanh())),
    "nested in script": lambda: Two(torch.jit.script(nn.Sequential(encoder(), nn.Sequential(nn.Linear(4, 4))))),
    "script as root": lambda: torch.jit.script(Two(encoder())),
    "trace as root": lambda: torch.jit.trace(Two(encoder()), BATCH),
    "loaded as root": lambda: loaded(with_running_statistics()),
    "script with statistics": lambda: torch.jit.script(with_running_statistics()),
}


def _frozen(model: Two) -> Two:
    for parameter in model.encoder.parameters():
        parameter.requires_grad_(False)
    return model


# --- with something of their own -----------------------------------------------------------------------------------------------------


class Slots(nn.Linear):
    __slots__ = ("scale",)

    def forward(self, x: Tensor) -> Tensor:
        self.scale = 2.0
        return super().forward(x) * self.scale


class Forwarding(nn.Module):
    def __init__(self, default: Any) -> None:
        super().__init__()
        self.inner, self.__dict__["default"] = nn.Linear(3, 4), default

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return self.__dict__["default"](name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def _missing(name: str) -> Any:
    raise KeyError(name)


class Contrary(nn.Linear):
    """Nobody may ask it anything."""

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError("do not ask")

    __bool__ = __eq__ = __len__ = __iter__ = __contains__ = __repr__ = __str__ = __lt__ = _refuse
    __hash__ = nn.Module.__hash__


class Empty(nn.Linear):
    """It is equal to all and false."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 1

    def __len__(self) -> int:
        return 0


class ContraryRoot(Two):
    __bool__ = __eq__ = __len__ = __repr__ = Contrary._refuse
    __hash__ = nn.Module.__hash__


class Always(nn.Linear):
    """In training mode whatever is said."""

    @property  # type: ignore[override]
    def training(self) -> bool:
        return True

    @training.setter
    def training(self, value: bool) -> None: ...


# --- with forwards of their own ------------------------------------------------------------------------------------------------------


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)

    def forward(self, *, x: Tensor, scale: float, **others: Any) -> Any:
        return {"y": self.inner(x) * scale, "nothing": None, 3: others, "self": self}


@dataclasses.dataclass
class Output:
    y: Tensor
    rest: Any = None


class Boxed(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        return Output(super().forward(input), self)


class Lazily(nn.Module):
    def forward(self, x: Tensor) -> Iterator[Tensor]:
        yield x


class Nothing(nn.Module):
    def forward(self, *_: Any, **__: Any) -> None:
        return None


class Static(nn.Module):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.named, self.boxed, self.lazily, self.nothing, self.static = Named(), Boxed(4, 4), Lazily(), Nothing(), Static()
        self.starred = nn.Linear(4, 1)
        self.starred.forward = functools.partial(nn.functional.linear, weight=self.starred.weight)  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        self.nothing()
        self.nothing(self, nn.Linear, x=3)
        x = self.boxed(self.named(x=x, scale=2.0, odd=[1])["y"]).y
        return self.starred(next(self.lazily(self.static(x))))


class OfParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([nn.Parameter(torch.ones(3, 4)), None, 3, torch.ones(2)])  # type: ignore[list-item]
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.ones(4, 1)), "b": nn.Parameter(torch.ones(()))})
        self.whole = nn.Parameter(torch.ones(2, dtype=torch.long), requires_grad=False)
        self.register_parameter("none", None)
        self.register_buffer("no_buffer", None)
        self.register_module("no_module", None)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.listed[0]) @ self.named["a"] * self.named["b"]


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((3, 1), 1 + 1j))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.cfloat) @ self.w).abs()


class Listed(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


def quantized_for_training() -> nn.Module:
    model = Two(encoder()).train()
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    return torch.ao.quantization.prepare_qat(model)


def pruned() -> nn.Module:
    model = Two(encoder())
    prune.l1_unstructured(model.head, "weight", 0.5)
    return model


def exported(module: nn.Module) -> Any:
    program = torch.export.export(module, (BATCH,), strict=False)  # a strict one, the default of 2.7, counts as a compilation
    return program.module()


def of_aot_autograd() -> Any:
    from functorch.compile import aot_module, make_boxed_func

    return aot_module(Two(encoder()), fw_compiler=lambda graph, _: make_boxed_func(graph.forward))


OTHERS: dict[str, Callable[[], Any]] = {
    "fx": lambda: torch.fx.symbolic_trace(Two(encoder())),
    "fx inside": lambda: Two(torch.fx.symbolic_trace(encoder())),
    "exported": lambda: exported(Two(encoder())),
    "exported inside": lambda: Two(exported(encoder())),
    "of AOTAutograd": of_aot_autograd,
    "quantized": lambda: Two(torch.ao.quantization.quantize_dynamic(encoder(), {nn.Linear}, dtype=torch.qint8)),
    "quantized for training": quantized_for_training,
    "slots": lambda: Two(Slots(3, 4)),
    "getattr of anything": lambda: Two(Forwarding(lambda name: None)),
    "getattr of a child": lambda: Two(Forwarding(len)),
    "getattr that raises": lambda: Two(Forwarding(_missing)),
    "contrary": lambda: Two(Contrary(3, 4)),
    "empty": lambda: Two(nn.Sequential(Empty(3, 4), Empty(4, 4))),
    "contrary root": lambda: ContraryRoot(encoder()),
    "always training": lambda: Two(Always(3, 4)),
    "odd forwards": Odd,
    "parameters in lists": OfParameters,
    "complex": Complex,
    "list as root": lambda: Listed([nn.Linear(3, 4), nn.Linear(4, 1)]),
    "orthogonal": lambda: Two(parametrizations.orthogonal(nn.Linear(3, 4))),
    "weight norm": lambda: Two(parametrizations.weight_norm(nn.Linear(3, 4))),
    "spectral norm": lambda: Two(parametrizations.spectral_norm(nn.Linear(3, 4))),
    "pruned": pruned,
    "DataParallel": lambda: nn.DataParallel(Two(encoder())),
    "average": lambda: torch.optim.swa_utils.AveragedModel(Two(encoder())),
}


# --- the tests -----------------------------------------------------------------------------------------------------------------------


def watch(model: nn.Module, optimizer: torch.optim.Optimizer) -> ModuleMonitor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*matches nothing in the model")
        monitor = ModuleMonitor(model, layers="all", on_metric_error="raise", preset="full")
        for of in ("output", "input", "output_gradient"):
            monitor.add_activation_metric("rms", of=of)
        monitor.add_activation_metric("mine", lambda x: x.abs().amax())
        monitor.add_gradient_metric("norm", stages=["local", "before_clip", "after_clip"])
        monitor.add_update_metric("norm")
        return monitor.attach(optimizer)


def train(make: Callable[[], Any], watched: bool) -> tuple[Any, ModuleMonitor | None, dict[str, float]]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of what it will give up
        model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    monitor = watch(model, optimizer) if watched else None
    for step in range(3):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(BATCH).square().mean().backward()
        norms = {name: torch.linalg.vector_norm(p.grad).item() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return model, monitor, norms


def _hooks(model: nn.Module) -> int:
    dicts = [h for part in model.modules() for name, h in vars(part).items() if "hooks" in name and isinstance(h, dict)]
    dicts += [getattr(p, name) or {} for p in model.parameters() for name in ("_post_accumulate_grad_hooks", "_backward_hooks")]
    return sum(map(len, dicts))


@pytest.mark.parametrize("kind", {**OF_SCRIPT, **OTHERS})
def test_training_is_the_same_and_gradients_are_right(kind: str) -> None:
    make = {**OF_SCRIPT, **OTHERS}[kind]
    if kind in OF_SCRIPT:  # whose first training in a process may have other bits than any that follows, monitored or not
        train(make, watched=False)
    bare, _, norms = train(make, watched=False)
    model, monitor, _ = train(make, watched=True)
    assert monitor is not None
    expected, actual = bare.state_dict(), model.state_dict()
    assert expected.keys() == actual.keys()
    assert all(torch.equal(actual[name], value) for name, value in expected.items() if isinstance(value, Tensor))
    values = monitor.get_step_metrics()
    assert norms
    for name, norm in norms.items():
        assert values[f"gradient/{name.removeprefix('module.')}/norm"] == pytest.approx(norm, rel=1e-5)
    assert not monitor.warning_counts()
    monitor.detach()
    assert _hooks(model) == _hooks(bare)


@pytest.mark.parametrize("kind", OF_SCRIPT)
def test_of_modules_of_torchscript_the_missing_outputs_have_their_reason_and_all_others_are_there(kind: str) -> None:
    model, monitor, _ = train(OF_SCRIPT[kind], watched=True)
    assert monitor is not None
    values, missing = monitor.get_step_metrics(), monitor.missing()
    for name, module in model.named_modules():
        key = f"activation/{name or '[root module]'}/rms"
        if isinstance(module, torch.jit.ScriptModule):
            assert missing[key] == "a module of TorchScript (torch.jit), which calls no Python hooks"
        else:
            assert key in values
    assert monitor.current_step == 2


def test_a_skipped_step_gives_the_statistics_of_a_scripted_module_back() -> None:
    def run(spike: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = torch.jit.script(with_running_statistics())
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        monitor = gradmon.watch(model, optimizer, on_spike="skip")
        monitor.add_detector(gradmon.SpikeDetector(lambda norm: norm > 100, "grad_norm"))
        for step in range(3):
            if step == 1 and not spike:
                continue
            optimizer.zero_grad()
            loss = model(BATCH + step).square().mean() * (1e6 if step == 1 else 1)
            loss.backward()
            optimizer.step()
        assert monitor.get_step_counts().skipped == spike
        return {name: value.clone() for name, value in model.state_dict().items()}

    with pytest.warns(gradmon.GradmonWarning, match="skipped"):
        spiked = run(True)
    calm = run(False)
    assert all(torch.equal(spiked[name], value) for name, value in calm.items())


def test_a_reference_with_modules_of_torchscript_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    model = Two(torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = ModuleMonitor(model)
    monitor.set_reference_module("init")
    reference = monitor._runtime.captures.modules.reference.module
    assert reference is not None
    before = {name: value.clone() for name, value in reference.state_dict().items()}
    monitor.add_activation_difference_metric("norm")
    gradmon.RefinedCoordinateCheck(monitor)
    monitor.attach(optimizer)
    for _ in range(2):
        model(BATCH).sum().backward()
        optimizer.step()
    values = monitor.get_step_metrics()
    assert values["activation_difference/head/norm"] > 0
    assert values["RCC (W_t-W_0)x_t/head/l2norm"] > 0
    assert all(torch.equal(reference.state_dict()[name], value) for name, value in before.items())
    assert not any(parameter.requires_grad for parameter in reference.parameters())


@pytest.mark.parametrize("how", ["make_fx", "fake"])
def test_a_watched_model_that_is_traced_or_tried_on_fake_tensors_is_as_without_the_monitor(how: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def seen(model: nn.Module) -> Any:
        if how == "make_fx":
            return [str(node.target) for node in make_fx(lambda x: model(x))(BATCH).graph.nodes]
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            output = model(mode.from_tensor(BATCH))
        return output.shape, output.requires_grad

    model = Two(encoder())
    bare = seen(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = watch(model, optimizer)
    assert seen(model) == bare
    assert monitor.current_step is None
    for step in range(2):
        model(BATCH).sum().backward()
        optimizer.step()
        assert seen(model) == bare
        assert monitor.current_step == monitor.last_record.step == step


@pytest.mark.parametrize("preset", ["standard", "full"])
def test_a_watched_model_can_be_scripted(preset: str) -> None:
    model = Two(encoder())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer, preset=preset)
    model(BATCH).sum().backward()
    optimizer.step()
    assert torch.equal(torch.jit.script(model)(BATCH), model(BATCH))
    monitor.detach()
