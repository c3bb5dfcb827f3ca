"""What modules take, return and get back: every number against plain hooks and ``autograd.grad`` on a twin that nobody watches."""

from __future__ import annotations

import collections
import copy
import dataclasses
import gc
import math
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torch_gradmon as gradmon
from tests import oracle
from tests.families import BY_NAME
from tests.test_copies import through_bytes, through_torch
from torch_gradmon import ModuleMonitor
from torch_gradmon.core.keys import KEY_ORDERS, Key, format_key, parse_key

# most loops here are of what is measured, and leave out what the audit of the loop misses
pytestmark = pytest.mark.filterwarnings("ignore:torch_gradmon.*Gradients are not cleared")

KINDS = {"output": "activation", "output_gradient": "activation_gradient", "input": "input", "input_gradient": "input_gradient"}
ROOT = "[root module]"
SGD = torch.optim.SGD


def tensors_in(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of real numbers in a tensor, tuple or dict."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield path, value
    elif isinstance(value, (tuple, dict)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors_in(item, f"{path}.{key}" if isinstance(key, str) else f"{path}[{key}]")


class Twin:
    """A copy of a model whose hooks take clones of everything.

    ``values`` holds for each source and path the tensors of all calls; with ``split`` paths have the number of the call.
    """

    def __init__(self, model: nn.Module, split: bool = False) -> None:
        self.model, self.split = copy.deepcopy(model), split
        self.values: dict[tuple[str, str], list[Tensor]] = {}
        self._taken: list[tuple[str, str, Tensor]] = []
        self._calls: Counter[tuple[str, str]] = Counter()
        for name, module in self.model.named_modules():
            module.register_forward_pre_hook(self._pre(name or ROOT), with_kwargs=True)
            module.register_forward_hook(self._post(name or ROOT))

    def _pre(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._take("input", name, args[0] if len(args) == 1 and not kwargs else {**dict(enumerate(args)), **kwargs})

        return hook

    def _post(self, name: str) -> Callable[..., None]:
        return lambda module, args, output: self._take("activation", name, output)

    def _take(self, source: str, name: str, value: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        call = f"@{self._calls[source, name]}" if self.split else ""
        self._calls[source, name] += 1
        for path, tensor in tensors_in(value, name + call):
            self.values.setdefault((source, path), []).append(tensor.detach().clone())
            self._taken.append((source, path, tensor))

    def backward(self, loss: Tensor, **arguments: Any) -> None:
        """Backward pass of a forward, by ``autograd.grad``, then for the parameters."""
        asked = [(source, path, tensor) for source, path, tensor in self._taken if tensor.requires_grad]
        gradients = torch.autograd.grad(loss, [tensor for *_, tensor in asked], allow_unused=True, retain_graph=True)
        for (source, path, _), gradient in zip(asked, gradients, strict=True):
            if gradient is not None:
                self.values.setdefault((f"{source}_gradient", path), []).append(gradient.detach().clone())
        loss.backward(**arguments)

    def forget(self) -> None:
        """The next forward begins."""
        self._taken.clear()
        self._calls.clear()


def watched(model: nn.Module, *of: str, metrics: tuple[str, ...] = oracle.BUILT_INS, **options: Any) -> tuple[SGD, ModuleMonitor]:
    """An optimizer that changes nothing and a monitor that raises, with ``metrics`` of these kinds on all modules."""
    optimizer = SGD(model.parameters(), lr=0.0)
    monitor = ModuleMonitor(model, on_metric_error="raise", **options)
    for metric in metrics if of else ():
        monitor.add_activation_metric(metric, of=of)
    monitor.attach(optimizer)
    return optimizer, monitor


def check(metrics: dict[str, float], values: dict[tuple[str, str], list[Tensor]], where: str = "") -> None:
    """``metrics`` holds every built-in of all these tensors, those of one path taken as one, and nothing else."""
    expected: set[str] = set()
    for (source, path), tensors in values.items():
        own = f"{source}/{path}/"
        found = {metric: metrics[own + metric] for metric in oracle.BUILT_INS if own + metric in metrics}
        oracle.check(found, tensors, f"{where} {own}")
        expected |= {own + metric for metric in found}
    assert metrics.keys() == expected, where


# --- all sources ---------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Modules that are called twice, on batches of different sizes, one whose result nobody uses, and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.pair = nn.Linear(4, 4), Pair()
        self.idle, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)
        self.holder = nn.ModuleList([nn.Linear(4, 2)])

    def forward(self, x: Tensor) -> Tensor:
        first = self.twice(x).relu()
        second = self.twice(torch.cat([first, first.sin()]))
        a, b = self.pair(second, by=first[:1])
        c, _ = self.pair(first, by=x[:1] * x[:1])
        self.unused(x.exp())
        return self.holder[0](a).square().sum() + b.cos().sum() + c.square().sum()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, 1.0, 2.0, 3.0]))

    def forward(self, x: Tensor, *, by: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.scale, by * self.scale.exp()


def _loss(name: str, model: nn.Module, size: int, generator: torch.Generator) -> Tensor:
    if name == "net":
        return model(torch.randn(size, 4, generator=generator))
    if name == "gpt_tied":
        return BY_NAME[name].loss(model, (torch.randint(23, (size, 12), generator=generator),))
    shape = (10,) if name == "mlp" else (3, 6, 6)
    return model(torch.randn(size, *shape, generator=generator)).square().mean()


def _model(name: str) -> nn.Module:
    torch.manual_seed(5)
    return Net() if name == "net" else BY_NAME[name].model()


@pytest.mark.parametrize("sizes", [(4,), (5, 2, 3)], ids=["one micro-batch", "three"])
@pytest.mark.parametrize("name", ["mlp", "gpt_tied", "conv_batchnorm", "net"])
def test_all_sources_of_all_modules_in_all_built_ins(name: str, sizes: tuple[int, ...]) -> None:
    model = _model(name)
    twin = Twin(model)
    optimizer, monitor = watched(model, *KINDS)
    asked = {f"{s}/{m or ROOT}/{b}" for s in KINDS.values() for m, _ in model.named_modules() for b in oracle.BUILT_INS}
    for step in range(2):
        twin.values.clear()
        for net in (model, twin.model):
            generator = torch.Generator().manual_seed(step)
            for size in sizes:
                loss = _loss(name, net, size, generator)
                if net is model:
                    loss.backward()
                else:
                    twin.backward(loss)
                    twin.forget()
        optimizer.step()
        check(monitor.get_step_metrics(), twin.values, f"step {step}")
        there = {f"{source}/{path.replace('pair[0]', 'pair').replace('pair[1]', 'pair')}" for source, path in twin.values}
        assert monitor.missing().keys() == {key for key in asked if key.rpartition("/")[0] not in there}


@pytest.mark.parametrize(
    "metrics",
    [oracle.BUILT_INS, ("norm", "zero_count", "sparsity"), ("zero_count", "max"), ("mean", "nonfinite_count"), ("l1_norm",)],
    ids=["all", "squares and zeros", "zero_count", "mean", "l1_norm"],
)
def test_large_and_small_tensors_of_one_step(metrics: tuple[str, ...]) -> None:
    """Those that wait for each other, until they are too many, those that are measured at once, and what has NaN or gaps."""

    class Halves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, ::2]  # not contiguous

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), Halves(), nn.Linear(64, 64))
    twin = Twin(model)
    optimizer, monitor = watched(model, *KINDS, metrics=metrics, zero_threshold=0.25)
    for step, sizes in enumerate([(900, 3, 2100, 1500), (1000, 1000, 1), (2100,)]):
        twin.values.clear()
        for size in sizes:
            twin.forget()
            x = torch.randn(size, 64).mul(4).round() / 4  # some of it is eps itself
            if step == 2:
                x[3, 5], x[7, 9] = math.nan, -math.inf
            for net in (model, twin.model):
                loss = (net(x) * torch.linspace(-2, 2, 64)).sum()
                loss.backward() if net is model else twin.backward(loss)
        optimizer.step()
        found = monitor.get_step_metrics()
        for (source, path), tensors in twin.values.items():
            truth, numbers = oracle.values(tensors, 0.25), oracle.reals(tensors)
            for metric in metrics:
                oracle.check_value(metric, found.pop(f"{source}/{path}/{metric}"), truth[metric], numbers, f"{source}/{path}")
        assert found == {}


@pytest.mark.parametrize("kind", KINDS)
def test_one_source_alone_gives_its_own_keys_only(kind: str) -> None:
    model = _model("mlp")
    twin = Twin(model)
    optimizer, monitor = watched(model, kind)
    x = torch.randn(3, 10)
    model(x).square().mean().backward()
    twin.backward(twin.model(x).square().mean())
    optimizer.step()
    check(monitor.get_step_metrics(), {key: value for key, value in twin.values.items() if key[0] == KINDS[kind]})


@pytest.mark.parametrize("split", [False, True])
def test_sources_of_different_metrics_do_not_mix(split: bool) -> None:
    """Each module has statistics of its own choice, some with functions, some on certain steps, and they share one pass."""
    model = _model("mlp")
    optimizer, monitor = watched(model)
    monitor.add_activation_metric("norm", metric_regex="^0$", of=("output", "input_gradient", "input"), split_calls=split)
    monitor.add_activation_metric("mean", metric_regex="^[02]$", of="output_gradient", every=2)
    monitor.add_activation_metric("widest", lambda t: t.abs().amax(), "^2$", "max", of=["input", "output_gradient"])
    twin, call = Twin(model), "@0" if split else ""
    for step in range(4):
        twin.values.clear()
        for size in (1, 4):
            twin.forget()
            x = torch.randn(size, 10)
            model(x).square().mean().backward()
            twin.backward(twin.model(x).square().mean())
        optimizer.step()
        taken = {f"{source}/{path}": oracle.reals(tensors) for (source, path), tensors in twin.values.items()}
        expected = {f"{s}/0{call}/norm": float(taken[f"{s}/0"].square().sum().sqrt()) for s in ("activation", "input")}
        expected |= {f"{s}/2/widest": float(taken[f"{s}/2"].abs().max()) for s in ("input", "activation_gradient")}
        if step % 2 == 0:
            expected |= {f"activation_gradient/{n}/mean": float(taken[f"activation_gradient/{n}"].mean()) for n in "02"}
        assert monitor.get_step_metrics() == pytest.approx(expected, rel=1e-6)
        because = {key: reason.split(" ")[0] for key, reason in monitor.missing().items()}
        late = {f"activation_gradient/{n}/mean": "measured" for n in "02"} if step % 2 else {}
        assert because == {"input_gradient/0/norm": "it", **late}


@pytest.mark.parametrize(
    ("of", "said"),
    [("outputs", "output"), ((), "empty"), (("output", "gradient"), "gradient"), (("output", "output"), "already")],
)
def test_what_no_module_has_is_refused_and_nothing_is_added(of: Any, said: str) -> None:
    monitor = ModuleMonitor(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=said):
        monitor.add_activation_metric("norm", of=of)
    assert monitor.describe() == {}


@pytest.mark.parametrize("of", [5, None])
def test_what_is_no_kind_at_all_is_refused_with_the_value_and_the_remedy(of: Any) -> None:
    with pytest.raises(TypeError, match=f"of must.* output, .*{of}"):
        ModuleMonitor(nn.Linear(2, 2)).add_activation_metric("norm", of=of)


def test_units_are_of_outputs_only_and_a_refusal_adds_nothing() -> None:
    monitor = ModuleMonitor(nn.Linear(2, 2))
    for metric in ("dead", "saturation"):
        with pytest.raises(ValueError, match=f"no built-in input metric '{metric}'"):
            monitor.add_activation_metric(metric, of=("output", "input"))
    assert monitor.describe() == {}


# --- paths -----------------------------------------------------------------------------------------------------------------------

Point = collections.namedtuple("Point", "first second")  # as in code without annotations


@dataclasses.dataclass
class Plain:
    hidden: Any
    logits: Any = None


@dataclasses.dataclass
class Output(collections.OrderedDict):  # type: ignore[type-arg]
    """As transformers' ModelOutput: a dataclass that is a mapping of its fields that are not None."""

    logits: Any = None
    hidden_states: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


class Returns(nn.Module):
    """Makes a container of the input times 1, 2 and 3."""

    def __init__(self, make: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.make = nn.Parameter(torch.ones(())), make

    def forward(self, x: Tensor) -> Any:
        return self.make(x * self.weight, 2 * x * self.weight, 3 * x * self.weight)


FORMS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Any], dict[str, int]]] = {
    "tensor": (lambda a, b, c: b, {"": 2}),
    "tuple": (lambda a, b, c: (a, c), {"[0]": 1, "[1]": 3}),
    "list": (lambda a, b, c: [c, b, a], {"[0]": 3, "[1]": 2, "[2]": 1}),
    "namedtuple": (lambda a, b, c: Point(c, a), {"[0]": 3, "[1]": 1}),
    "dict": (lambda a, b, c: {"loss": a, 7: c}, {".loss": 1, "[7]": 3}),
    "ModelOutput": (lambda a, b, c: Output(a, (b, c)), {".logits": 1, ".hidden_states[0]": 2, ".hidden_states[1]": 3}),
    "part of a ModelOutput": (lambda a, b, c: Output(hidden_states=c), {".hidden_states": 3}),
    "dataclass": (lambda a, b, c: Plain(b, {"x": c}), {".hidden": 2, ".logits.x": 3}),
    "nested": (lambda a, b, c: {"a": [c, (b, {"d": a})]}, {".a[0]": 3, ".a[1][0]": 2, ".a[1][1].d": 1}),
    "with other things": (lambda a, b, c: (None, b, "text", 4, b.long(), b > 0), {"[1]": 2}),
    "the same twice": (lambda a, b, c: (a, a), {"[0]": 1, "[1]": 1}),
}


class Around(nn.Module):
    """Weights the tensors that its module returns by 10 times their factor each."""

    def __init__(self, inner: nn.Module, factors: dict[str, int]) -> None:
        super().__init__()
        self.inner, self.factors = inner, factors

    def forward(self, x: Tensor) -> Tensor:
        output = self.inner(x)
        found = [t for _, t in gradmon.capture.hooks.tensors_of(output, "") if t.is_floating_point()]
        return sum(10 * factor * t.sum() for factor, t in zip(self.factors.values(), found, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_tensors_in_containers_are_named_by_their_path(form: str) -> None:
    make, paths = FORMS[form]
    model = Around(Returns(make), paths)
    optimizer, monitor = watched(model, "output", "output_gradient", metrics=("norm", "l1_norm"))
    x = torch.tensor([[3.0, -4.0]])
    model(x).backward()
    optimizer.step()
    expected = {f"activation/inner{path}/norm": 5.0 * factor for path, factor in paths.items()}
    expected |= {f"activation/inner{path}/l1_norm": 7.0 * factor for path, factor in paths.items()}
    shared = len(paths) if form == "the same twice" else 1  # the gradient of that one tensor has both shares
    of_each = {path: 10.0 * factor * shared for path, factor in paths.items()}
    expected |= {f"activation_gradient/inner{path}/norm": g * math.sqrt(2) for path, g in of_each.items()}
    expected |= {f"activation_gradient/inner{path}/l1_norm": 2 * g for path, g in of_each.items()}
    metrics = {key: value for key, value in monitor.get_step_metrics().items() if ROOT not in key}
    assert metrics == pytest.approx(expected, rel=1e-6)
    assert monitor.missing() == {}  # least of all the module itself, whose tensors stand under their paths


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda a, b, c: a.long(), "dtype torch.int64"),
        (lambda a, b, c: a > 0, "dtype torch.bool"),
        (lambda a, b, c: None, "NoneType"),
        (lambda a, b, c: "text", "str"),
        (lambda a, b, c: (), "tuple"),
        (lambda a, b, c: {"ids": a.long()}, "dict"),
    ],
    ids=["integers", "booleans", "None", "text", "nothing", "integers in a dict"],
)
def test_a_module_that_returns_no_real_numbers_has_no_key_but_a_reason(make: Callable[..., Any], reason: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Returns(make)

        def forward(self, x: Tensor) -> Tensor:
            self.inner(x)
            return x.sum() * self.inner.weight

    model = Model()
    optimizer, monitor = watched(model, "output", "output_gradient", metrics=("norm",))
    model(torch.ones(2)).backward()
    optimizer.step()
    assert monitor.get_step_metrics().keys() == {f"{source}/{ROOT}/norm" for source in ("activation", "activation_gradient")}
    missing = monitor.missing()
    assert missing.keys() == {f"{source}/inner/norm" for source in ("activation", "activation_gradient")}
    assert reason in missing["activation/inner/norm"]


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        found = [t for _, t in gradmon.capture.hooks.tensors_of([args, kwargs], "") if t.is_floating_point()]
        return sum((place + 1) * t.sum() for place, t in enumerate(found)) * self.weight


@pytest.mark.parametrize(
    ("call", "paths"),
    [
        (lambda m, a, b: m(a), ("",)),
        (lambda m, a, b: m(a, b), ("[0]", "[1]")),
        (lambda m, a, b: m(a, True, b, None), ("[0]", "[2]")),
        (lambda m, a, b: m(a, mask=b), ("[0]", ".mask")),
        (lambda m, a, b: m(a, mask=None), ("[0]",)),
        (lambda m, a, b: m(x=a, y=b), (".x", ".y")),
        (lambda m, a, b: m(x=a), (".x",)),
        (lambda m, a, b: m((a, b)), ("[0]", "[1]")),
        (lambda m, a, b: m((a, {"k": b})), ("[0]", "[1].k")),
        (lambda m, a, b: m([b, a][::-1], flag=3), ("[0][0]", "[0][1]")),
        (lambda m, a, b: m(Plain(a, b)), (".hidden", ".logits")),
    ],
)
def test_inputs_are_named_by_their_place_or_keyword(call: Callable[..., Tensor], paths: tuple[str, ...]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.takes = Takes()

        def forward(self, x: Tensor) -> Tensor:
            return call(self.takes, x * self.takes.weight, 2 * x * self.takes.weight)

    model = Model()
    optimizer, monitor = watched(model, "input", "input_gradient", metrics=("norm",))
    model(torch.tensor([3.0, 4.0])).backward()
    optimizer.step()
    expected = {f"input/takes{path}/norm": 5.0 * (place + 1) for place, path in enumerate(paths)}
    expected |= {f"input_gradient/takes{path}/norm": math.sqrt(2) * (place + 1) for place, path in enumerate(paths)}
    assert monitor.get_step_metrics() == pytest.approx({**expected, f"input/{ROOT}/norm": 5.0}, rel=1e-6)
    assert monitor.missing().keys() == {f"input_gradient/{ROOT}/norm"}


class Head(nn.Module):
    """Returns under the name of its own layer, as {"logits": self.logits(x)}, and is called with that name too."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Linear(3, 2)

    def forward(self, *, logits: Tensor) -> dict[str, Tensor]:
        return {"logits": 10 * self.logits(logits + 1)}


class WithHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = Head()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(logits=x)["logits"].sum()


def test_values_of_a_path_and_of_a_module_of_that_name_do_not_mix() -> None:
    model = WithHead()
    twin = Twin(model)
    optimizer, monitor = watched(model, "output", "input", "output_gradient", metrics=("norm",))
    x = torch.randn(4, 3)
    model(x).backward()
    twin.backward(twin.model(x))
    optimizer.step()
    expected = {}
    for source in ("activation", "activation_gradient", "input"):
        # plain hooks have both under this name: of outputs the layer's comes first, of inputs that of what it is in
        pair = twin.values[source, "head.logits"]
        for tensor, path in zip(pair[::-1] if source == "input" else pair, ("head.logits", "head[logits]"), strict=True):
            expected[f"{source}/{path}/norm"] = oracle.values(tensor)["norm"]
    metrics = {key: value for key, value in monitor.get_step_metrics().items() if ROOT not in key}
    assert metrics == pytest.approx(expected, rel=1e-6)
    assert monitor.missing() == {}


def test_a_container_that_was_not_called_is_missing_whatever_its_children_have() -> None:
    model = nn.Sequential(collections.OrderedDict(a=nn.Module(), b=nn.Linear(3, 3)))
    model.a.b, model.a.b2 = nn.LSTM(3, 3), nn.Identity()
    model.forward = lambda x: model.b(model.a.b(x)[0])  # type: ignore[method-assign]
    optimizer, monitor = watched(model, "output", "input", metrics=("norm",))
    model(torch.randn(2, 1, 3)).sum().backward()
    optimizer.step()
    outputs = {"a.b[0]", "a.b[1][0]", "a.b[1][1]", "b", ROOT}
    expected = {f"activation/{path}/norm" for path in outputs} | {f"input/{path}/norm" for path in ("a.b", "b", ROOT)}
    assert monitor.get_step_metrics().keys() == expected
    assert monitor.missing() == {
        f"{source}/{name}/norm": "the module was not called in a training forward that hooks can see"
        for source in ("activation", "input")
        for name in ("a", "a.b2")
    }


# --- calls -----------------------------------------------------------------------------------------------------------------------


def test_calls_of_a_shared_module_merge_by_elements_or_have_keys_of_their_own_or_both() -> None:
    model = _model("net")
    merged, split = Twin(model), Twin(model, split=True)
    optimizer, monitor = watched(model)
    for metric in oracle.BUILT_INS:
        monitor.add_activation_metric(metric, of=tuple(KINDS))
        monitor.add_activation_metric(metric, of=tuple(KINDS), split_calls=True)
    for _ in range(2):
        merged.values.clear()
        split.values.clear()
        for size in (3, 1, 2):  # call numbers start again with each forward
            x = torch.randn(size, 4)
            model(x).backward()
            for twin in (merged, split):
                twin.backward(twin.model(x))
                twin.forget()
        optimizer.step()
        metrics = monitor.get_step_metrics()
        check(metrics, {**merged.values, **split.values})
        assert {"activation/twice@1/norm", "activation_gradient/pair@1[0]/rms", "input/pair@0.by/std"} <= metrics.keys()
        assert not any(f"@{call}" in key for key in metrics for call in (2, 3))
        assert not [key for key in monitor.missing() if "/pair/" in key or "/twice/" in key]


def test_metrics_with_functions_split_too() -> None:
    model = _model("net")
    twin = Twin(model, split=True)
    optimizer, monitor = watched(model)
    monitor.add_activation_metric("widest", lambda t: t.abs().amax(), "^twice$", "max", of=tuple(KINDS), split_calls=True)
    for size in (3, 1):
        x = torch.randn(size, 4)
        model(x).backward()
        twin.backward(twin.model(x))
        twin.forget()
    optimizer.step()
    expected = {
        f"{source}/{path}/widest": max(float(t.abs().max()) for t in tensors)
        for (source, path), tensors in twin.values.items()
        if path.startswith("twice@")
    }
    assert len(expected) == 7  # of two calls, whose first input needs no gradient
    assert monitor.get_step_metrics() == pytest.approx(expected, rel=1e-6)


def test_a_model_that_is_called_by_its_parts_by_hand_counts_calls_anew_in_each_step() -> None:
    model = _model("mlp")
    monitor = ModuleMonitor(model, on_metric_error="raise")
    monitor.add_activation_metric("norm", metric_regex="^0$", split_calls=True)
    for number in range(3):
        monitor.begin_step(number)
        model[0](torch.randn(2, 10))
        monitor.end_step()
        assert monitor.get_step_metrics().keys() == {"activation/0@0/norm"}


def test_a_metric_of_the_roots_input_that_comes_in_mid_step_has_all_of_the_next_one() -> None:
    model = _model("mlp")
    optimizer, monitor = watched(model)
    monitor.add_activation_metric("mean")
    model(torch.randn(2, 10)).sum().backward()
    monitor.add_activation_metric("norm", of="input")  # the step is open, as in a callback
    optimizer.step()
    batches = [torch.full((2, 10), 1.0), torch.full((2, 10), 2.0)]
    for x in batches:
        model(x).sum().backward()
    optimizer.step()
    assert monitor.get_step_metrics()[f"input/{ROOT}/norm"] == pytest.approx(oracle.values(batches)["norm"], rel=1e-6)


# --- what does not count -----------------------------------------------------------------------------------------------------------


def _in_eval(model: nn.Module, monitor: ModuleMonitor, x: Tensor) -> None:
    model.eval()
    model(x)
    model.train()


def _without_gradients(model: nn.Module, monitor: ModuleMonitor, x: Tensor) -> None:
    with torch.no_grad():
        model(x)


def _in_inference_mode(model: nn.Module, monitor: ModuleMonitor, x: Tensor) -> None:
    with torch.inference_mode():
        model(x)


def _not_monitored(model: nn.Module, monitor: ModuleMonitor, x: Tensor) -> None:
    with monitor.no_monitor():
        model(x).sum().backward()


def _vmapped(model: nn.Module, monitor: ModuleMonitor, x: Tensor) -> None:
    torch.func.vmap(model)(x.unsqueeze(0))


def _differentiated(model: nn.Module, monitor: ModuleMonitor, x: Tensor) -> None:
    torch.func.grad(lambda x: model(x).sum())(x)


def _differentiated_by_parameters(model: nn.Module, monitor: ModuleMonitor, x: Tensor) -> None:
    parameters = dict(model.named_parameters())  # the input is then a plain tensor
    torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(parameters)


def _traced(model: nn.Module, monitor: ModuleMonitor, x: Tensor) -> None:
    with warnings.catch_warnings():  # torch's own; those of a tracer that sees something strange are another category
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.trace(model, x)


PASSES = [_in_eval, _without_gradients, _in_inference_mode, _not_monitored]
TRANSFORMS = [_vmapped, _differentiated, _differentiated_by_parameters, _traced]


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(
    ("other", "by_hand"),
    [
        (other, by_hand)
        for other in (*PASSES, *TRANSFORMS)
        for by_hand in (False, True)
        if not (by_hand and other in (_without_gradients, _in_inference_mode))  # which count: see the test behind this one
    ],
)
def test_passes_that_are_no_training_do_not_count(other: Callable[..., None], by_hand: bool, first: bool) -> None:
    model = _model("mlp")
    twin = Twin(model)
    optimizer, monitor = watched(model, *KINDS)
    x, large = torch.randn(3, 10), torch.full((2, 10), 100.0)
    for step in range(2):
        twin.values.clear()
        twin.forget()
        if by_hand:
            monitor.begin_step(step)
        if first:
            other(model, monitor, large)
        model(x).square().mean().backward()
        if not first:
            other(model, monitor, large)
        twin.backward(twin.model(x).square().mean())
        optimizer.step()
        if by_hand:
            monitor.end_step()
        check(monitor.get_step_metrics(), twin.values)


@pytest.mark.parametrize("other", [_without_gradients, _in_inference_mode])
def test_in_a_step_begun_by_hand_training_mode_alone_decides(other: Callable[..., None]) -> None:
    model, x = _model("mlp"), torch.randn(3, 10)
    _, monitor = watched(model, "output", "input", metrics=("norm",))
    monitor.begin_step(0)
    other(model, monitor, x)
    monitor.end_step()
    values = monitor.get_step_metrics()
    monitor.begin_step(1)
    model(x)
    monitor.end_step()
    assert values == monitor.get_step_metrics() != {}
    monitor.begin_step(2)
    model.eval()
    other(model, monitor, x)
    monitor.end_step()
    assert monitor.get_step_metrics() == {}


def test_passes_in_transforms_alone_leave_no_value_but_a_reason() -> None:
    model = _model("mlp")
    _, monitor = watched(model, "output", "input", metrics=("norm",))
    monitor.begin_step(0)
    _vmapped(model, monitor, torch.ones(2, 10))
    monitor.end_step()
    assert monitor.get_step_metrics() == {}
    assert set(monitor.missing().values()) == {"inside a torch.func transform"}
    assert len(monitor.missing()) == 2 * 6


def test_what_is_not_batched_inside_of_vmap_does_not_count_either() -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.place, self.read = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.read(x) + self.place(torch.ones(1, 3))

    model = Placed()
    _, monitor = watched(model, "output", "input", metrics=("norm",))
    monitor.begin_step(0)
    torch.func.vmap(model)(torch.ones(4, 2, 3))
    monitor.end_step()
    assert monitor.get_step_metrics() == {}


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_functional_call_is_a_forward(by_hand: bool) -> None:
    model = _model("mlp")
    twin = Twin(model)
    optimizer, monitor = watched(model, "output", "input")
    monitor.add_gradient_metric("norm", stages="after_clip")
    if by_hand:
        monitor.begin_step(0)
    x = torch.randn(3, 10)
    doubled = {name: 2 * p for name, p in model.named_parameters()}
    torch.func.functional_call(model, doubled, (x,)).sum().backward()
    torch.func.functional_call(twin.model, {name: p.detach() for name, p in doubled.items()}, (x,))
    optimizer.step()
    monitor.end_step()
    metrics = monitor.get_step_metrics()
    for name, parameter in model.named_parameters():
        assert metrics.pop(f"gradient/{name}/norm") == pytest.approx(float(parameter.grad.norm()), rel=1e-6)
    check(metrics, twin.values)


class Distilled(nn.Module):
    """A student and its frozen teacher in evaluation mode, whose outputs are targets."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0)
        self.student, self.teacher = nn.TransformerEncoder(layer, 2), nn.TransformerEncoder(layer, 2).requires_grad_(False)
        self.error: type[BaseException] | None = None

    def train(self, mode: bool = True) -> Distilled:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        if self.error is not None:
            raise self.error
        return self.student(x) - target


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_torchs_fused_encoder_layers_run_where_they_ran_before(compiled: bool) -> None:
    """torch leaves their kernel where a module has a hook, and under autocast on a CPU the outputs differ in the third digit."""

    def trained(watched: bool) -> tuple[list[Tensor], list[float]]:
        torch.manual_seed(0)
        model = Distilled()
        optimizer = SGD(model.parameters(), lr=0.1)
        call: Callable[[Tensor], Tensor] = torch.compile(model, backend="eager") if compiled else model
        monitor = gradmon.watch(model, optimizer) if watched else None
        if monitor is not None:
            monitor.add_activation_metric("norm")
        x, seen, norms = torch.randn(3, 5, 8), [], []
        for model.error in (None, KeyboardInterrupt, ValueError, None):
            for is_training in (True, False):
                optimizer.zero_grad()
                model.train(is_training)
                with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(is_training):
                    try:
                        y = call(x)
                    except (KeyboardInterrupt, ValueError):
                        continue
                seen.append(y.detach())
                if is_training:
                    y.float().square().mean().backward()
                    optimizer.step()
                    if monitor is not None:
                        norms.append(monitor.get_step_metrics()["activation/student.layers.0.linear1/norm"])
        return seen, norms

    (plain, _), (watched, norms) = trained(False), trained(True)
    assert all(map(torch.equal, plain, watched))
    assert len(norms) == 2  # the hooks came back after each evaluation
    assert all(norm > 0 for norm in norms)


def test_hooks_in_an_encoder_layer_that_torch_does_not_fuse_stay() -> None:
    """In evaluation mode with gradients, as for a fine-tuning without dropout."""
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0)).eval()
    optimizer = SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer)
    monitor.add_activation_metric("norm")
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(3, 5, 8)).square().mean().backward()
        optimizer.step()
        assert monitor.get_step_metrics()["activation/0.linear1/norm"] > 0


def test_a_part_without_gradients_or_in_eval_of_a_training_model_counts() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                features = self.backbone(x)
            return self.head(features)

    model = Model()
    model.backbone[1].eval()
    twin = Twin(model)
    optimizer, monitor = watched(model, *KINDS)
    x = torch.randn(5, 4)
    model(x).square().sum().backward()
    twin.backward(twin.model(x).square().sum())
    optimizer.step()
    check(monitor.get_step_metrics(), twin.values)
    assert "activation/backbone.1/norm" in monitor.get_step_metrics()


class Checkpointed(nn.Module):
    """The same numbers whether its middle is checkpointed or not; the last of its layers is not recomputed to the end."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last, self.reentrant = nn.Linear(4, 4), nn.Linear(4, 2), reentrant
        self.middle = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):  # the middle is called twice
            x = self.middle(x) if self.reentrant is None else checkpoint(self.middle, x, use_reentrant=self.reentrant)
        return self.last(x)


@pytest.mark.parametrize("sizes", [(4,), (3, 1)], ids=["one micro-batch", "two"])
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "nonreentrant", "reentrant"])
def test_recomputation_does_not_count_and_its_gradients_do(reentrant: bool | None, sizes: tuple[int, ...]) -> None:
    model, twin = Checkpointed(reentrant), Twin(Checkpointed(None))
    optimizer, monitor = watched(model, *KINDS)
    monitor.add_activation_metric("calls", lambda t: torch.ones(()), "^middle.0$", "sum", of=tuple(KINDS))
    for _ in range(2):
        twin.values.clear()
        for size in sizes:
            x = torch.randn(size, 4)
            model(x).square().sum().backward()
            twin.backward(twin.model(x).square().sum())
            twin.forget()
        optimizer.step()
        metrics = monitor.get_step_metrics()
        calls = {metrics.pop(f"{source}/middle.0/calls") for source in KINDS.values()}
        assert calls == {2.0 * len(sizes)}
        check(metrics, twin.values)


@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_single_calls_of_what_is_recomputed_are_told_apart_or_absent(reentrant: bool) -> None:
    model, twin = Checkpointed(reentrant), Twin(Checkpointed(None), split=True)
    optimizer, monitor = watched(model)
    for metric in oracle.BUILT_INS:
        monitor.add_activation_metric(metric, of=("output", "output_gradient"), split_calls=True)
    x = torch.randn(3, 4)
    model(x).square().sum().backward()
    twin.backward(twin.model(x).square().sum())
    optimizer.step()
    expected = {key: tensors for key, tensors in twin.values.items() if key[0].startswith("activation")}
    if reentrant:  # the tensors that get gradients are made in the recomputation
        inside = {key for key in expected if "gradient" in key[0] and key[1].startswith("middle")}
        expected = {key: tensors for key, tensors in expected.items() if key not in inside}
        missing = {key: reason for key, reason in monitor.missing().items() if "middle" in key}
        assert set(missing.values()) == {"in a recomputation the number of the call is unknown"}
        assert len(missing) == 5 * len(oracle.BUILT_INS)
    check(monitor.get_step_metrics(), expected)


# --- what it costs -----------------------------------------------------------------------------------------------------------------


def _hooked(model: nn.Module) -> dict[str, int]:
    """How many hooks each module has that has any."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    counts = {name or ROOT: sum(len(getattr(module, kind)) for kind in kinds) for name, module in model.named_modules()}
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize(
    ("of", "pattern", "expected"),
    [
        (("output",), "^1$", {"1": 1}),
        (("input",), "^[03]$", {"0": 1, "3": 1}),
        (("output_gradient",), "^2$", {"2": 1}),
        (("output", "output_gradient"), "^2$", {"2": 1}),
        (tuple(KINDS), "^4$", {"4": 2}),
        (("output",), "nowhere", {}),
    ],
)
@pytest.mark.filterwarnings("ignore:torch_gradmon.*the pattern 'nowhere'")
def test_a_module_that_no_metric_matches_has_no_hook(of: tuple[str, ...], pattern: str, expected: dict[str, int]) -> None:
    model = _model("mlp")
    optimizer, monitor = watched(model)
    at_rest = _hooked(model)
    monitor.add_activation_metric("norm", metric_regex=pattern, of=of)
    monitor.add_activation_metric("std", metric_regex=pattern, of=of)
    for _ in range(3):
        model(torch.randn(2, 10)).sum().backward()
        found = _hooked(model)
        assert found.pop(ROOT) - at_rest[ROOT] == (2 if expected else 0)  # on the root: when a forward begins and ends
        assert found == expected
        optimizer.step()
    monitor.detach()
    assert _hooked(model) == {}


def test_on_steps_that_are_not_monitored_modules_have_no_hooks() -> None:
    torch._dynamo.utils.counters.clear()  # where anything was compiled, modules keep their hooks
    model = _model("mlp")
    optimizer, monitor = watched(model, *KINDS, every=10)
    model.train()
    for step in range(23):
        model(torch.randn(2, 10)).sum().backward()
        modules = {name: count for name, count in _hooked(model).items() if name != ROOT}
        assert modules == (dict.fromkeys("01234", 2) if step % 10 == 0 else {})
        assert step % 10 == 0 or not any(p._backward_hooks for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        assert bool(monitor.get_step_metrics()) == (step % 10 == 0)


def _clones(model: nn.Module, optimizer: SGD, x: Tensor) -> int:
    """How many tensors of at least the size of ``x`` a step clones."""
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        model(x).square().mean().backward()
        optimizer.step()
    copies = [e for e in profile.function_events if e.name in ("aten::clone", "aten::contiguous", "aten::_to_copy")]
    return sum(math.prod(e.input_shapes[0]) >= x.numel() for e in copies if e.input_shapes)


@pytest.mark.parametrize("batch", [128, 2100], ids=["small", "large"])
def test_nothing_is_cloned_for_the_statistics(batch: int) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    x = torch.randn(batch, 64)
    bare = net()
    model = net()
    optimizer, monitor = watched(model, *KINDS, checks=gradmon.Checks(data=False))
    for _ in range(2):
        assert _clones(model, optimizer, x) == _clones(bare, SGD(bare.parameters(), lr=0.0), x)
    monitor.add_activation_metric("mine", lambda t: t.sum(), "^0$")
    assert _clones(model, optimizer, x) > _clones(bare, SGD(bare.parameters(), lr=0.0), x), "the search finds nothing any more"


def test_outputs_inputs_and_gradients_are_not_kept() -> None:
    model = _model("mlp")
    kept: list[weakref.ref[Tensor]] = []

    def look(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        kept.extend([weakref.ref(args[0]), weakref.ref(output)])
        if output.requires_grad:
            output.register_hook(lambda gradient: kept.append(weakref.ref(gradient)))

    for layer in model:
        layer.register_forward_hook(look)
    _optimizer, monitor = watched(model, *KINDS)
    model(torch.randn(3, 10)).square().mean().backward()
    gc.collect()
    assert len(kept) == 15
    assert [reference() for reference in kept] == [None] * 15
    assert monitor.is_monitoring()  # the step has not ended yet


@pytest.mark.parametrize("layers", [1, 9])
def test_all_of_all_modules_goes_to_the_host_in_one_copy(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals: list[int] = []

    class Counted(gradmon.step.buffer.DeviceToHostCopy):
        def __init__(self, tensors: list[Tensor]) -> None:
            arrivals.append(len(tensors))
            super().__init__(tensors)

    monkeypatch.setattr(gradmon.step.buffer, "DeviceToHostCopy", Counted)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    optimizer, monitor = watched(model, *KINDS)
    monitor.add_activation_metric("kurtosis", of=tuple(KINDS))
    monitor.add_activation_metric("norm", of=tuple(KINDS), split_calls=True)
    for step in range(3):
        for _ in range(2):
            model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        assert f"input_gradient/{layers - 1}@0/norm" in monitor.get_step_metrics() or layers == 1
        assert len(arrivals) == step + 1


# --- where values go ---------------------------------------------------------------------------------------------------------------


def test_a_run_directory_reads_back_what_was_shown(tmp_path: Path) -> None:
    model = _model("net")
    optimizer, monitor = watched(model, *KINDS, run_dir=tmp_path)
    monitor.add_activation_metric("kurtosis", of=tuple(KINDS))
    monitor.add_activation_metric("rms", of=tuple(KINDS), split_calls=True)
    monitor.add_activation_metric("mine", lambda t: t.abs().amax(), "pair", of=("input", "input_gradient"))
    monitor.add_activation_metric("saturation")
    shown = []
    model.unused = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    for size in (3, 2):
        for _ in range(2):
            model(torch.randn(size, 4)).backward()
        optimizer.step()
        shown.append(monitor.get_step_metrics())
    run = gradmon.load_run(tmp_path)
    assert {"input/pair.by/mine", "activation/unused.1/saturation", "input_gradient/twice@1/rms"} <= shown[0].keys()
    for key in shown[0].keys() | shown[1].keys():
        expected = {step: metrics[key] for step, metrics in enumerate(shown) if key in metrics}
        assert run.series(key) == pytest.approx(expected, rel=1e-6, abs=1e-7), key
    assert set(shown[0]) <= set(run.keys())


def test_the_full_preset_keeps_activations_off_the_dashboard_but_for_those_asked_for(tmp_path: Path) -> None:
    model = _model("mlp")
    twin = Twin(model)
    optimizer = SGD(model.parameters(), lr=0.0)
    monitor = gradmon.watch(model, optimizer, preset="full", run_dir=tmp_path)
    monitor.add_activation_metric("std", metric_regex="^0$")
    monitor.add_activation_metric("rms", metric_regex="^2$", of=("input", "output_gradient"))
    monitor.add_activation_metric("mean", metric_regex="^4$", split_calls=True)
    x = torch.randn(6, 10)
    model(x).square().mean().backward()
    twin.backward(twin.model(x).square().mean())
    optimizer.step()
    shown = {key for key in monitor.get_step_metrics() if not key.startswith("gradmon/")}
    assert shown == {"activation/0/std", "input/2/rms", "activation_gradient/2/rms", "activation/4@0/mean"}
    run = gradmon.load_run(tmp_path)
    for name in ("0", "1", "2", "3", "4", ROOT):
        truth = oracle.values(twin.values["activation", name])
        for metric in ("norm", "std", "max", "sparsity"):
            assert run.series(f"activation/{name}/{metric}")[0] == pytest.approx(truth[metric], rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("rows", [6, 20_000])
def test_a_metric_of_single_calls_takes_nothing_from_the_run_directory(rows: int, tmp_path: Path) -> None:
    """``rows``: of inputs that are measured together, and each for itself."""
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 16))
    optimizer = SGD(model.parameters(), lr=0.0)
    monitor = gradmon.watch(model, optimizer, preset="full", run_dir=tmp_path)
    monitor.add_activation_metric("std", metric_regex="^0$")
    monitor.add_activation_metric("rms", metric_regex="^2$", of=("input", "output_gradient"))
    monitor.add_activation_metric("mean", metric_regex="^2$", split_calls=True)
    x = torch.randn(rows, 10)
    model(x).square().mean().backward()
    optimizer.step()
    monitor.detach()
    truth = oracle.values(torch.tanh(model[0](x).detach()).double())
    run = gradmon.load_run(tmp_path)
    for metric in ("norm", "std", "max", "sparsity"):
        assert run.series(f"activation/1/{metric}")[0] == pytest.approx(truth[metric], rel=1e-6, abs=1e-12)


# --- names -------------------------------------------------------------------------------------------------------------------------

NEW_KEYS = [
    Key("activation", "encoder.layer@1[0].hidden", "kurtosis"),
    Key("activation", "h.0", "dead"),
    Key("activation", f"{ROOT}.logits", "saturation"),
    Key("activation_gradient", "h.0@12", "norm"),
    Key("activation_gradient", ROOT, "log2_histogram.-12"),
    Key("input", "h.0[1].k", "norm"),
    Key("input", "block.attention_mask", "sparsity"),
    Key("input_gradient", "h.0", "min_value"),
    Key("input_gradient", "input_gradient", "input"),
    *(Key(s, "h.0.attn", m) for s in gradmon.core.keys.ATTENTION_SOURCES.values() for m in ("min", "mean", "max")),
    *(Key(source, "h.0.attn.head_3", "") for source in gradmon.core.keys.ATTENTION_SOURCES.values()),
]


@pytest.mark.parametrize("prefix", ["", "train/", "input/"])
@pytest.mark.parametrize("style", KEY_ORDERS)
def test_keys_of_what_modules_take_and_return_come_back_from_their_text(style: str, prefix: str) -> None:
    texts = [format_key(key, style, prefix) for key in NEW_KEYS]
    assert [parse_key(text, style, prefix) for text in texts] == NEW_KEYS
    assert len(set(texts)) == len(NEW_KEYS)


def test_the_text_of_keys_in_both_styles() -> None:
    found = [tuple(format_key(key, style) for style in KEY_ORDERS) for key in (NEW_KEYS[3], NEW_KEYS[9], NEW_KEYS[-1])]
    assert found == [
        ("activation_gradient/h.0@12/norm", "activation_gradient_norm/h.0@12"),
        ("attention_entropy/h.0.attn/min", "attention_entropy_min/h.0.attn"),
        ("attention_first_key/h.0.attn.head_3", "attention_first_key/h.0.attn.head_3"),
    ]


@pytest.mark.parametrize("style", KEY_ORDERS)
def test_a_monitor_gives_these_keys_in_its_style(style: str) -> None:
    model = _model("net")
    optimizer, monitor = watched(model, *KINDS, metrics=("norm", "min_value"), key_order=style, prefix="a/")
    model(torch.randn(2, 4)).backward()
    optimizer.step()
    keys = {parse_key(text, style, "a/") for text in monitor.get_step_metrics()}
    assert {key.source for key in keys} == set(KINDS.values())
    assert {key.metric for key in keys} == {"norm", "min_value"}
    assert {format_key(key, style, "a/") for key in keys} == monitor.get_step_metrics().keys()


def test_two_values_never_share_a_key() -> None:
    monitor = ModuleMonitor(nn.Linear(2, 2), key_order="metric_first")
    with pytest.raises(ValueError, match="'gradient_norm' of 'input' reads like a metric of 'input_gradient'"):
        monitor.add_activation_metric("gradient_norm", lambda t: t.norm(), of="input")
    monitor.add_activation_metric("norm", of="input_gradient")


# --- copies, and the end -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("take", [copy.deepcopy, through_bytes, through_torch])
def test_a_copy_feeds_no_monitor_and_works(take: Callable[[nn.Module], nn.Module]) -> None:
    model = _model("net")
    twin = Twin(model)
    optimizer, monitor = watched(model, *KINDS)
    monitor.add_activation_metric("mine", lambda t: t.sum(), "^twice$", of=tuple(KINDS), split_calls=True)
    names = list(model.state_dict())
    x, y = torch.randn(3, 4), torch.randn(2, 4)
    for _ in range(2):
        twin.values.clear()
        loss = model(x)
        taken = take(model)  # with the gradients of this forward still to come
        assert list(taken.state_dict()) == list(model.state_dict()) == names
        taken(y).backward()
        assert all(p.grad is not None for name, p in taken.named_parameters() if name.startswith("twice"))
        loss.backward()
        twin.backward(twin.model(x))
        twin.forget()
        optimizer.step()
        check({key: value for key, value in monitor.get_step_metrics().items() if not key.endswith("/mine")}, twin.values)
    assert torch.equal(taken(x), model(x))


def test_detaching_in_mid_step_leaves_no_hook_and_the_backward_pass_goes_on() -> None:
    model = _model("net")
    leaf = torch.randn(2, 4, requires_grad=True)
    before = [dict(vars(module)) for module in model.modules()]
    _, monitor = watched(model, *KINDS)
    monitor.add_activation_metric("kurtosis", of=tuple(KINDS), split_calls=True)
    taken: list[Tensor] = []
    handle = model.twice.register_forward_hook(lambda module, args, output: taken.append(output))
    loss = model(leaf)
    handle.remove()
    assert taken[0]._backward_hooks
    assert leaf._backward_hooks
    monitor.detach()
    assert not any(tensor._backward_hooks for tensor in (*taken, leaf, *model.parameters()))
    assert _hooked(model) == {}
    for was, module in zip(before, model.modules(), strict=True):
        assert {name: dict(hooks) for name, hooks in vars(module).items() if "hook" in name and isinstance(hooks, dict)} == {
            name: dict(hooks) for name, hooks in was.items() if "hook" in name and isinstance(hooks, dict)
        }
    assert monitor.get_step_metrics() == {}  # of a step that no optimizer has taken
    loss.backward()
    assert monitor.get_step_metrics() == {}


@pytest.mark.parametrize("in_a_step", [False, True], ids=["between steps", "in a step"])
def test_with_the_monitor_gone_the_model_goes_on_and_can_be_collected(in_a_step: bool) -> None:
    model = _model("net")
    optimizer, monitor = watched(model, *KINDS)
    model(torch.randn(2, 4)).backward()
    optimizer.step()
    x = torch.randn(2, 4, requires_grad=True)
    loss = model(x)
    if not in_a_step:
        loss.backward()
        optimizer.step()
    gone = weakref.ref(monitor._runtime)
    del monitor, optimizer  # the optimizer is what keeps a session alive
    gc.collect()
    assert gone() is None
    if in_a_step:
        loss.backward()
    assert x.grad is not None
    model(x).backward()
    left = [weakref.ref(thing) for thing in (model, *model.modules(), *model.parameters())]
    del model, loss
    gc.collect()
    assert [reference() for reference in left] == [None] * len(left)
