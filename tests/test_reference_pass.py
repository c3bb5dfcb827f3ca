"""The reference beside the model: it sees what the model sees, and leaves no trace in the training or in itself."""

from __future__ import annotations

import copy
import dataclasses
import random
import sys
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from torch_gradmon.capture.hooks import PassTracker, tensors_of
from torch_gradmon.capture.reference import ReferencePass, frozen_copy
from torch_gradmon.core.errors import GradmonWarning, SpikeError, WarningLog
from torch_gradmon.core.fence import Fence
from torch_gradmon.core.keys import ROOT, canonical_names

Met = list[tuple[str, Tensor, Tensor | None]]


def everything(name: str) -> bool:
    return True


def make(reference: nn.Module, follows: bool = False, raising: bool = True) -> ReferencePass:
    beside = ReferencePass(PassTracker(), Fence(WarningLog(raising), inert=False))
    beside.set(reference, str, follows)
    return beside


def run(beside: ReferencePass, root: nn.Module, *args: Any, **kwargs: Any) -> None:
    beside.run(root, everything, args, kwargs)


def took(beside: ReferencePass, path: str) -> Tensor:
    tensor = beside.take(path)
    assert tensor is not None, (path, beside.reason)
    return tensor


def both(beside: ReferencePass, model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Met]:
    """The model's output, and each output of its modules as it was returned, with what the reference has for it."""
    met: Met = []

    def returned(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            met.extend((path, tensor.detach().clone(), beside.take(path)) for path, tensor in tensors_of(output, name))

        return hook

    def began(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        beside.run(module, everything, args, kwargs)

    modules = dict(model.named_modules())
    names = canonical_names(modules)
    handles = [part.register_forward_hook(returned(names[raw])) for raw, part in modules.items()]
    handles.append(model.register_forward_pre_hook(began, prepend=True, with_kwargs=True))
    output = model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    return output, met


def differing(met: Met) -> list[str]:
    assert met
    return [path for path, own, other in met if other is None or not torch.equal(own, other)]


class Noise(nn.Module):
    """Draws from every generator that there may be."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x) * random.random()
        numpy = sys.modules.get("numpy")
        return x + (noise if numpy is None else noise * numpy.random.rand())


def noisy_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), Noise(), nn.Dropout(0.3), nn.ReLU(inplace=True), nn.Linear(8, 3))


def rng_states() -> list[Any]:
    numpy = sys.modules.get("numpy")
    drawn = None if numpy is None else [x.tolist() if hasattr(x, "tolist") else x for x in numpy.random.get_state()]
    return [torch.get_rng_state().tolist(), random.getstate(), drawn]


def state_of(module: nn.Module) -> list[Any]:
    """All that a pass must leave alone: values, flags and identities, how often a tensor was written to, and attributes."""
    found: list[Any] = []
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        found.append((name, id(tensor), tensor._version, tensor.requires_grad, tensor.grad, tensor.tolist()))
    for name, part in module.named_modules():
        found.append((name, part.training, list(part._buffers), {key: id(value) for key, value in vars(part).items()}))
        found.append(list(part._forward_hooks.items()))
    return found


# --- exactly what the model has, where the model is the same --------------------------------------------------------------------


def test_a_copy_gives_exactly_what_the_model_gives() -> None:
    model = noisy_model()
    beside = make(frozen_copy(model), follows=True)
    _, met = both(beside, model, torch.randn(6, 5))
    assert [path for path, _, _ in met] == ["0", "1", "2", "3", "4", "5", ROOT]
    assert differing(met) == []
    assert beside.reason is None
    with torch.no_grad():
        model[5].bias[0] += 1  # a weight has no effect behind a unit that is off for all rows
    assert differing(both(beside, model, torch.randn(6, 5))[1]) == ["5", ROOT]


DATA = torch.randn(64, 17)


@pytest.mark.parametrize(
    "x",
    [
        DATA[3:36],
        DATA[:33, 1:6],
        DATA[:33, ::3][:, :5],
        DATA.t()[:5, :33].t(),
        DATA[:1, :5].expand(33, 5),
        DATA[:0, :5],
        DATA.view(8, 8, 17).transpose(0, 1),
    ],
    ids=["misaligned", "columns", "every third column", "transposed", "expanded", "empty", "permuted"],
)
def test_the_layout_of_an_input_is_kept_for_it_decides_how_results_are_rounded(x: Tensor) -> None:
    for width in (1, 2, 5, 16, 33):
        model = nn.Linear(x.shape[-1], width)
        assert differing(both(make(frozen_copy(model), follows=True), model, x)[1]) == []


def trained(watched: bool) -> tuple[list[Tensor], list[Any]]:
    torch.manual_seed(3)
    random.seed(3)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(3)
    model = noisy_model()
    beside = make(frozen_copy(model), follows=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(4):
        x = torch.randn(6, 5)
        output = both(beside, model, x)[0] if watched else model(x)
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.state_dict().values()), rng_states()


def test_training_is_the_same_bit_for_bit() -> None:
    (plain, plain_rng), (watched, watched_rng) = trained(False), trained(True)
    assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))
    assert plain_rng == watched_rng


def test_it_runs_under_the_autocast_of_the_model_and_leaves_nothing_in_its_cache() -> None:
    model = nn.Linear(4, 3)
    reference = copy.deepcopy(model)  # whose weight requires grad, and would be cached
    beside = make(reference)
    x = torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert differing(both(beside, model, x)[1]) == []
        with torch.no_grad():
            reference.weight.zero_()
            reference.bias.zero_()
        assert torch.is_autocast_cache_enabled()
        run(beside, model, x)
        output = took(beside, ROOT)
    assert output.dtype == torch.bfloat16
    assert output.tolist() == [[0.0] * 3] * 2


def test_modes_follow_part_by_part_or_stay() -> None:
    model = noisy_model()
    reference = frozen_copy(model)
    model[3].eval()
    model[1].eval()
    reference.eval()
    x = torch.randn(6, 5)
    assert differing(both(make(reference, follows=True), model, x)[1]) == []
    assert not any(part.training for part in reference.modules())
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    run(make(reference, follows=False), model, x)
    model.eval()
    beside = make(reference.train(), follows=True)
    assert differing(both(beside, model, x)[1]) == []
    assert all(part.training for part in reference.modules())
    assert "3" in differing(both(make(reference, follows=False), model, x)[1])


# --- the inputs are the model's -------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    nested: list[Tensor]


@dataclasses.dataclass
class Output(OrderedDict):  # type: ignore[type-arg]
    """As the outputs of Hugging Face's models are: a dataclass that is a mapping of its fields too."""

    logits: Tensor | None = None
    hidden: tuple[Tensor, ...] | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            super().__setitem__(field.name, getattr(self, field.name))


class Cache:
    """Neither a container nor known to anybody; holds what came out of a graph."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.calls, self.itself = x * 1, 0, self


class Spoils(nn.Module):
    """Writes to all that it gets, and remembers of which types it was."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.seen: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.seen.append((args, dict(kwargs)))
        for value in [*args, *kwargs.values()]:
            for _, tensor in tensors_of(value, ""):
                tensor.mul_(3)
            if isinstance(value, list):
                value.clear()
            if isinstance(value, dict):
                value["more"] = 1
            if isinstance(value, Cache):
                value.x.mul_(3)
                value.calls += 1
        kwargs.clear()
        return self.scale * 1


def inputs() -> dict[str, Any]:
    x = torch.randn(2, 3, requires_grad=True)
    ints = torch.arange(3)
    return {
        "tensor": x * 1,
        "same": ints,
        "again": ints,
        "list": [torch.ones(2), [torch.ones(1)]],
        "dict": {"a": torch.ones(2), 1: None},
        "pair": Pair(torch.ones(1), x * 2),
        "frozen": Frozen(torch.ones(3), [torch.ones(1)]),
        "output": Output(torch.ones(2), (torch.ones(1), x * 3)),
        "cache": Cache(x),
        "space": SimpleNamespace(deep={"x": x * 4}),
        "packed": pack_padded_sequence(torch.ones(2, 3, 1), torch.tensor([3, 1]), batch_first=True),
        "sparse": torch.ones(2, 2).to_sparse(),
        "strided": torch.ones(4, 4)[:, ::2],
        "spread": torch.ones(4, 9)[:, 1],
        "constants": (1, 2.5, "a", None, torch.float16, torch.device("cpu"), slice(1, 2), len),
    }


def test_the_model_never_sees_what_the_reference_does_to_its_inputs() -> None:
    root, reference, given = nn.Linear(1, 1), Spoils(), inputs()
    every = [t for value in given.values() for _, t in tensors_of(value, "")] + [given["cache"].x, given["space"].deep["x"]]
    before = [(t._version, t.to_dense().tolist() if t.is_sparse else t.tolist()) for t in every]
    beside = make(reference)
    for _ in range(3):  # what was harmless once may do harm another time
        run(beside, root, [given["tensor"]], given["tensor"], **given)
    assert [(t._version, t.to_dense().tolist() if t.is_sparse else t.tolist()) for t in every] == before
    assert list(given) == list(inputs())
    assert (len(given["list"]), list(given["dict"]), given["cache"].calls) == (2, ["a", 1], 0)
    assert len(reference.seen) == 3
    x = -torch.ones(2)
    run(make(nn.ReLU(inplace=True)), root, x)  # which lies nowhere
    assert x.tolist() == [-1, -1]


def test_the_reference_gets_inputs_of_the_same_types() -> None:
    reference, given = Spoils(), inputs()
    run(make(reference), nn.Linear(1, 1), given["tensor"], **given)
    (first,), seen = reference.seen[0]
    assert {name: type(value) for name, value in seen.items()} == {name: type(value) for name, value in given.items()}
    assert first is seen["tensor"]
    assert not first.requires_grad
    assert seen["same"] is seen["again"]
    assert seen["constants"] == given["constants"]
    assert seen["output"]["hidden"] is seen["output"].hidden
    assert isinstance(seen["packed"], PackedSequence)
    assert seen["strided"].stride() == (4, 2)
    assert seen["spread"].untyped_storage().nbytes() == seen["spread"].numel() * 4  # where most would be gaps, there are none
    assert type(seen["pair"].second) is Tensor


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_inputs(layout: torch.layout) -> None:
    reference = Spoils()
    run(make(reference), nn.Linear(1, 1), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout))
    ((seen,), _) = reference.seen[0]
    assert [part.tolist() for part in seen.unbind()] == [[3] * 2, [3] * 3]


class Opaque(Tensor):
    """As subclasses that keep their numbers elsewhere: not to be looked at as memory."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.as_strided:
            raise NotImplementedError("as_strided")
        return super().__torch_function__(function, types, args, kwargs or {})


def test_inputs_of_other_tensor_types() -> None:
    reference = Spoils()
    run(make(reference), nn.Linear(1, 1), torch.ones(2).as_subclass(Opaque))
    assert type(reference.seen[0][0][0]) is Opaque


def test_inputs_that_cannot_be_copied_switch_it_off() -> None:
    model = nn.Linear(2, 2)
    beside = make(copy.deepcopy(model), raising=False)
    with pytest.warns(GradmonWarning, match="reference module failed") as caught:
        run(beside, model, torch.ones(1, 2), stream=(x for x in (1, 2)))
    assert len(caught) == 1
    assert beside.reason is not None
    assert "an input cannot be copied" in beside.reason
    assert "generator" in beside.reason


class Somewhere(nn.Module):
    """Remembers where its input lies."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, device=device))
        self.devices: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.devices.append(x.device.type)
        return self.weight * 1


class Parallel(DistributedDataParallel):
    """DDP as far as it is looked at: a module, and devices to which it moves its inputs."""

    def __init__(self, module: nn.Module, device_ids: list[int] | None) -> None:
        nn.Module.__init__(self)
        self.module, self.device_ids = module, device_ids


@pytest.mark.parametrize(
    ("root", "reference", "ends_on"),
    [
        (Somewhere("cpu"), Somewhere("meta"), "meta"),
        (Somewhere("meta"), Somewhere("cpu"), "cpu"),
        (Somewhere("meta"), Somewhere("meta"), "cpu"),
        (nn.ReLU(), Somewhere("meta"), "cpu"),
        (Parallel(Somewhere("meta"), None), Somewhere("meta"), "cpu"),
        (Parallel(Somewhere("meta"), [0]), Somewhere("meta"), "meta"),
        (torch.compile(Parallel(Somewhere("meta"), [0]), backend="eager"), Somewhere("meta"), "meta"),
    ],
    ids=["moved", "comes from elsewhere", "same device", "nowhere", "DDP", "DDP moves inputs", "compiled DDP"],
)
def test_inputs_on_the_models_device_go_to_that_of_the_reference(root: nn.Module, reference: Somewhere, ends_on: str) -> None:
    run(make(reference), root, torch.ones(2))
    assert reference.devices == [ends_on]


@pytest.mark.gpu
@pytest.mark.parametrize(("here", "there"), [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
def test_a_reference_on_another_device(here: str, there: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).to(here)
    beside = make(frozen_copy(model).to(there), follows=True)
    x = torch.randn(4, 3, device=here)
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    run(beside, model, x)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(torch.cuda.get_rng_state(), states[1])
    assert torch.allclose(took(beside, "0").to(here), model[0](x), atol=1e-5)
    assert took(beside, "1").device.type == there
    if here == there:
        assert differing(both(beside, model, x)[1]) == []


# --- the reference stays what it is ---------------------------------------------------------------------------------------------


class Restless(nn.Module):
    """Changes everything about itself in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.embed, self.large = nn.BatchNorm1d(4), nn.Embedding(5, 4, max_norm=0.5), nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.register_buffer("none", None)
        self.length, self.fails = 1, False

    def forward(self, tokens: Tensor) -> Tensor:
        if self.length < len(tokens):
            self.cache, self.length = torch.zeros(len(tokens)), len(tokens)
        assert self.cache.shape == (self.length,)
        self.cache += 1
        self.late = self.norm(self.embed(tokens)) + self.cache[: len(tokens), None]
        self.register_buffer("later", torch.ones(1))
        self.grown = nn.Identity()
        assert isinstance(self.large.weight, nn.Parameter)  # nobody writes to it, so it is no copy
        self.eval()
        if self.fails:
            raise RuntimeError("on purpose")
        return self.head(self.late)


def test_a_pass_leaves_the_reference_as_it_was() -> None:
    reference = Restless()
    reference.norm.register_forward_hook(lambda *_: None)
    before = state_of(reference)
    beside = make(reference, raising=False)
    for tokens in (torch.arange(3), torch.arange(5)):
        run(beside, copy.deepcopy(reference), tokens)
        assert (state_of(reference), beside.reason) == (before, None)
    own = copy.deepcopy(reference)
    assert differing(both(beside, own, torch.arange(5))[1]) == []  # the tied head too sees the rows that max_norm shrank
    reference.fails = True
    before = state_of(reference)
    with pytest.warns(GradmonWarning, match="on purpose"):
        run(beside, own, torch.arange(3))
    assert state_of(reference) == before


def test_its_own_hooks_run() -> None:
    model = nn.Linear(2, 2)
    reference, calls = copy.deepcopy(model), []
    reference.register_forward_hook(lambda module, args, output: calls.append(1) or output + 1)
    beside = make(reference)
    x = torch.ones(1, 2)
    run(beside, model, x)
    assert calls == [1]
    assert torch.equal(took(beside, ROOT), model(x) + 1)


class Slope(nn.Module):
    """Builds a graph whatever the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return self.inner(x.detach().requires_grad_())


def test_no_graph_is_built_and_none_is_kept() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Slope())
    model[0].register_forward_hook(lambda module, args, output: graphs.append(output.requires_grad))
    graphs: list[bool] = []
    beside = make(model[:1])
    run(beside, model, torch.ones(1, 2, requires_grad=True))
    assert graphs == [False]
    beside = make(model[1])
    run(beside, model, torch.ones(1, 2))
    assert not took(beside, "inner").requires_grad


def test_parts_that_the_model_has_too_train_as_without_it() -> None:
    """A batch norm saves its statistics for the backward pass, which fails where they were written to since."""
    shared = nn.BatchNorm1d(3)
    model = nn.Sequential(nn.Linear(3, 3), shared)
    reference = nn.Sequential(nn.Linear(3, 3), shared, model[0])
    alone = copy.deepcopy(model)
    beside = make(reference)
    batches = [torch.randn(4, 3) for _ in range(2)]
    outputs = [both(beside, model, x)[0] for x in batches]
    sum(output.square().sum() for output in outputs).backward()
    sum(alone(x).square().sum() for x in batches).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True))
    assert all(torch.equal(p, q) for p, q in zip(model.buffers(), alone.buffers(), strict=True))
    assert all(not part._forward_hooks for part in model.modules())


# --- what is kept ---------------------------------------------------------------------------------------------------------------


class Many(nn.Module):
    """One layer called three times; outputs in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.relu, self.parts = nn.Linear(2, 2), nn.ReLU(inplace=True), Parts()

    def forward(self, *, x: Tensor) -> Any:
        for _ in range(3):
            x = self.relu(self.layer(x) - 0.1)
        return {"last": x, "all": self.parts(x), "nested": torch.nested.nested_tensor([x[0]], layout=torch.jagged)}


class Parts(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Frozen, Output]:
        return x + 1, Frozen(x + 2, [x + 3]), Output(x + 4)


def test_outputs_are_kept_as_they_were_returned_in_the_order_of_calls() -> None:
    model = Many()
    beside = make(frozen_copy(model))
    _, met = both(beside, model, x=torch.randn(4, 2))
    inner = ["[0]", "[1].x", "[1].nested[0]", "[2].logits"]
    paths = ["layer", "relu"] * 3 + [f"parts{path}" for path in inner]
    paths += [f"{ROOT}.last", *(f"{ROOT}.all{path}" for path in inner), f"{ROOT}.nested"]
    assert [path for path, _, _ in met] == paths
    assert differing(met) == [f"{ROOT}.nested"]  # of a kind that is not measured
    layers = [own for path, own, _ in met if path == "layer"]
    assert len({tuple(own.flatten().tolist()) for own in layers}) == 3
    assert all(bool((own < 0).any()) for own in layers)  # the ReLU that works in place came later
    assert beside.take("layer") is None


def test_only_what_is_wanted_is_kept_until_it_is_forgotten() -> None:
    model = noisy_model()
    beside = ReferencePass(PassTracker(), Fence(WarningLog(raising=True), inert=False))
    beside.set(frozen_copy(model), lambda name: f"net.{name}")
    x = torch.randn(4, 5)
    beside.run(model, lambda name: name in ("net.0", "net.5"), (x,), {})
    assert [beside.take(path) is None for path in ("0", "net.1", "net.0", "net.0", "elsewhere")] == [
        True,
        True,
        False,
        True,
        True,
    ]
    beside.forget()
    assert beside.take("net.5") is None
    beside.run(model, everything, (x,), {})
    beside.run(model, lambda name: name == "net.0", (x,), {})
    assert beside.take("net.5") is None  # of the pass before
    assert took(beside, "net.0").shape == (4, 8)


def test_why_there_is_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Module())
    beside = make(model)
    calls: list[int] = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    beside.run(model, lambda name: name == "3", (torch.ones(1, 2),), {})
    assert beside.reason == "the reference module has none of the modules that are measured"
    assert calls == []  # so it did not run
    model[1] = nn.Identity()
    model[1].unused = nn.Linear(2, 2)
    beside.run(model, lambda name: name == "1.unused", (torch.ones(1, 2),), {})
    assert beside.reason == "none of the modules that are measured ran in the reference module"
    run(beside, model, torch.ones(1, 2))
    assert beside.reason is None


def test_parameters_by_name_and_the_end_of_it() -> None:
    module = Parallel(nn.Sequential(nn.Linear(2, 2)), None)
    beside = ReferencePass(PassTracker(), Fence(WarningLog(raising=True), inert=False))
    assert not beside
    run(beside, module, torch.ones(1, 2))
    beside.set(module, str.upper)
    assert beside
    assert list(beside.parameters) == ["0.WEIGHT", "0.BIAS"]
    assert beside.parameters["0.WEIGHT"] is module.module[0].weight
    run(beside, module, torch.ones(1, 2))
    beside.remove()
    beside.remove()
    assert not beside
    assert beside.parameters == {}
    assert beside.take("0") is None


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(3, 3), nn.Dropout(0.5), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: self.second(self.first(y)), x, use_reentrant=self.reentrant)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # which is meant so here
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_reference_counts_once(reentrant: bool) -> None:
    model = Checkpointed(reentrant)
    beside = make(frozen_copy(model), follows=True)
    output, met = both(beside, model, torch.randn(2, 3, requires_grad=True))
    assert [path for path, _, _ in met] == ["first", "second", ROOT]
    assert differing(met) == []
    output.sum().backward()
    assert [beside.take(path) for path in ("first", "second", ROOT)] == [None] * 3


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(function)] += 1
        return function(*args, **(kwargs or {}))


def test_modes_around_the_model_do_not_see_it() -> None:
    model = noisy_model()
    beside = make(frozen_copy(model))
    x = torch.randn(4, 5)
    with Operations() as operations:
        run(beside, model, x)
    assert not operations.seen
    assert took(beside, ROOT).shape == (4, 3)


# --- when it goes wrong ---------------------------------------------------------------------------------------------------------


class Breaks(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.layer, self.error, self.calls = nn.Linear(2, 2), error, []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        self.layer(x)
        raise self.error


def test_one_that_raises_is_off_after_one_complaint() -> None:
    complaints = WarningLog()
    beside = ReferencePass(PassTracker(), Fence(complaints, inert=False))
    reference = Breaks(ZeroDivisionError("too small"))
    beside.set(reference, str)
    with pytest.warns(GradmonWarning, match=r"the reference module failed.*ZeroDivisionError: too small") as caught:
        run(beside, nn.ReLU(), torch.ones(1, 2))
    states = rng_states()
    run(beside, nn.ReLU(), torch.ones(1, 2))
    assert len(caught) == 1
    assert complaints.counts == {"reference": 1}
    assert reference.calls == [1]
    assert beside.take("layer") is None
    assert beside.reason == "the reference module is off, because it raised ZeroDivisionError: too small"
    assert beside
    assert rng_states() == states
    assert torch.is_grad_enabled()
    beside.set(nn.ReLU(), str)  # another one has a chance of its own
    run(beside, nn.ReLU(), torch.ones(1, 2))
    assert torch.equal(took(beside, ROOT), torch.ones(1, 2))
    assert beside.reason is None


def test_where_complaints_raise_the_error_comes_out() -> None:
    reference = Breaks(ZeroDivisionError("too small"))
    beside = make(reference)
    with pytest.raises(ZeroDivisionError, match="too small"):
        run(beside, nn.ReLU(), torch.ones(1, 2))
    assert not reference.layer._forward_hooks
    assert torch.is_autocast_cache_enabled()
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("error", [SpikeError("a spike"), GradmonWarning("made an error")], ids=["spike", "warning"])
def test_what_the_user_asked_to_be_raised_is_raised(error: Exception) -> None:
    reference = Breaks(error)
    beside = make(reference, raising=False)
    for _ in range(2):
        with pytest.raises(type(error), match=str(error)):
            run(beside, nn.ReLU(), torch.ones(1, 2))
    assert reference.calls == [1, 1]
    assert beside.take("layer") is None
    assert not reference.layer._forward_hooks


# --- compiled references --------------------------------------------------------------------------------------------------------


@pytest.fixture
def graphs() -> Iterator[Callable[[], int]]:
    """How many graphs torch.compile made."""
    torch._dynamo.reset()
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


class _Chain(nn.Sequential):
    """With a forward of its own: one of torch's compiled in place is no graph."""

    def forward(self, x: Tensor) -> Tensor:
        for part in self:
            x = part(x)
        return x


def _whole(model: nn.Sequential) -> nn.Module:
    return torch.compile(model, backend="eager")


def _in_place(model: nn.Sequential) -> nn.Module:
    model.compile(backend="eager")
    return model


def _blocks(model: nn.Sequential) -> nn.Module:
    model[1] = torch.compile(model[1], backend="eager")
    return model


@pytest.mark.parametrize("compiled", [_whole, _in_place, _blocks])
def test_a_compiled_reference_shows_all_its_modules_and_compiles_nothing(
    compiled: Callable[[nn.Sequential], nn.Module], graphs: Callable[[], int]
) -> None:
    model = _Chain(nn.Linear(3, 3), _Chain(nn.Linear(3, 3), nn.Tanh()))
    reference = compiled(copy.deepcopy(model))
    x = torch.randn(2, 3)
    with torch.no_grad():
        reference(x)  # before there are hooks
    before = graphs()
    assert before > 0
    beside = make(reference)
    run(beside, model, x)
    assert torch.equal(took(beside, "0"), model[0](x))
    assert torch.equal(took(beside, "1.0"), model[1][0](model[0](x)))
    assert graphs() == before
    with torch.no_grad():
        reference(x)  # and it is compiled as before
    assert graphs() == before


# --- the copy at initialisation -------------------------------------------------------------------------------------------------


def test_a_frozen_copy_has_the_values_of_that_moment_and_no_gradients() -> None:
    model = noisy_model().eval()
    model[0].weight.grad = torch.ones(8, 5)
    frozen = frozen_copy(model)
    values = [tensor.clone() for tensor in model.state_dict().values()]
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(1)
    assert all(torch.equal(one, other) for one, other in zip(frozen.state_dict().values(), values, strict=True))
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in frozen.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model[0].weight.grad is not None
    assert not frozen.training


def test_wrappers_are_not_copied() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    wrapped = torch.compile(Parallel(model, None), backend="eager")
    frozen = frozen_copy(wrapped)
    assert type(frozen) is nn.Sequential
    beside = make(frozen, follows=True)
    model.eval()  # of which DDP itself knows nothing
    assert wrapped.training
    modes: list[bool] = []
    frozen.register_forward_hook(lambda module, *_: modes.append(module.training))
    run(beside, wrapped, torch.ones(1, 2))
    assert modes == [False]
    assert torch.equal(took(beside, "0"), model(torch.ones(1, 2)))


def test_a_method_that_replaces_forward_is_one_of_the_copy_there() -> None:
    model = nn.Linear(2, 2)
    model.forward = MethodType(lambda self, x: self.weight @ x, model)
    frozen = frozen_copy(model)
    before = model.weight.detach().clone()
    nn.init.zeros_(model.weight)
    assert torch.equal(frozen(torch.ones(2)), before @ torch.ones(2))


class Sharded(Tensor):
    _local_tensor = None


def _with(**attributes: Any) -> nn.Module:
    module = nn.Linear(2, 2)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def _fsdp() -> nn.Module:
    module = nn.Module()
    module._fsdp_wrapped_module = nn.Linear(2, 2)
    return module


@pytest.mark.parametrize(
    ("make_module", "message"),
    [
        (lambda: _with(weight=nn.Parameter(torch.ones(1).as_subclass(Sharded))), "weight is a tensor that is sharded over ranks"),
        (lambda: nn.Linear(2, 2, device="meta"), "weight is a tensor on the meta device"),
        (lambda: nn.LazyLinear(2), "weight is not initialised before the first forward"),
        (_fsdp, "_fsdp_wrapped_module.weight is sharded by FSDP"),
        (lambda: _with(cache=torch.ones(1, requires_grad=True) * 2), "Only Tensors created explicitly by the user"),
        (lambda: _with(stream=(x for x in ())), "generator"),
        (lambda: _with(forward=lambda x: x), r"forward\(\) of a Linear was replaced by a function"),
    ],
    ids=["DTensor", "meta", "lazy", "FSDP", "out of a graph", "generator", "forward"],
)
def test_what_cannot_be_copied_is_refused_with_a_remedy(make_module: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=rf"cannot be copied: .*{message}.*; use as reference a module that you made"):
        frozen_copy(make_module())
