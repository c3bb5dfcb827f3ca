"""Attention recorded with no edit of the model: whose calls, with which values, and what it leaves alone."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention as imported
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor, load_run, monitor_scaled_dot_product_attention
from torch_gradmon.core.moments import Column
from torch_gradmon.statistics import attention
from torch_gradmon.statistics.attention import QUANTITIES

from . import loops
from .families import BY_NAME, Family
from .test_attention_statistics import oracle

NO_CALL = (
    "no call of scaled_dot_product_attention was seen in training; attention that is written out, flex_attention, and a call through an "
    "attribute that holds the function are not seen"
)
METRICS = ("entropy", "entropy_normalized", "max_logit", "first_key")
Call = tuple[Tensor, Tensor, dict[str, Any]]
modes = torch._C._len_torch_function_stack
#: In a list, where no replacement of the function reaches.
ORIGINAL = [F.scaled_dot_product_attention]


def altered() -> bool:
    """Whether anything of torch is other than it was, for the recording's sake."""
    names = (F.scaled_dot_product_attention, imported, torch._C._nn.scaled_dot_product_attention)
    return any(function is not ORIGINAL[0] for function in names) or modes() > 0


class Attention(nn.Module):
    """Two heads of self attention; what it gives to the call is noted beside."""

    def __init__(self, attend: Callable[..., Tensor] | None = None, **call: Any) -> None:
        super().__init__()
        self.qkv, self.attend, self.call, self.met = nn.Linear(8, 24), attend, call, []

    def split(self, x: Tensor) -> list[Tensor]:
        q, k, v = [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)]
        if torch._C._current_graph_task_id() == -1 and self.training:  # no recomputation
            self.met.append((q.detach().clone(), k.detach().clone(), {n: c for n, c in self.call.items() if n != "dropout_p"}))
        return [q, k, v]

    def forward(self, x: Tensor) -> Tensor:
        attend = self.attend or F.scaled_dot_product_attention
        return attend(*self.split(x), **self.call).transpose(1, 2).flatten(-2)


def expected(calls: dict[str, list[Call]], heads: bool = True, metrics: tuple[str, ...] = METRICS) -> dict[str, float]:
    """What every key is worth by naive arithmetic in float64, all queries of a module's calls taken together."""
    found: dict[str, float] = {}
    for name, of in calls.items():
        rows = [oracle(query, key, **call) for query, key, call in of]
        for quantity in (q for q in QUANTITIES if q.removeprefix("attention_") in metrics):
            each = torch.stack([row[quantity] for row in rows])
            sums = each[..., Column.SUM].sum(0) / each[..., Column.COUNT].sum(0)
            is_largest = quantity == "attention_max_logit"
            values = each[..., Column.MAX].amax(0) if is_largest else sums
            found |= {f"{quantity}/{name}.head_{head}": v.item() for head, v in enumerate(values) if heads}
            found |= {f"{quantity}/{name}/min": values.min().item(), f"{quantity}/{name}/mean": values.mean().item()}
            found |= {f"{quantity}/{name}/max": values.max().item()} if is_largest else {}
    return found


def check(found: dict[str, float], calls: dict[str, list[Call]]) -> None:
    assert found == pytest.approx(expected(calls), rel=1e-5, abs=1e-6)


def watched(model: nn.Module, heads: bool = True, **options: Any) -> tuple[ModuleMonitor, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    monitor = ModuleMonitor(model, **options)
    for metric in METRICS:
        monitor.add_attention_metric(metric, heads=heads)
    return monitor.attach(optimizer), optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
    model(*args, **kwargs).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# --- values -----------------------------------------------------------------------------------------------------------------------


def _visible(*shape: int) -> Tensor:
    return (torch.rand(shape) > 0.4).index_fill(-1, torch.tensor([0]), True)


#: By kind: heads of queries and keys, queries, keys, and the other arguments for a batch of a dtype.
KINDS: dict[str, tuple[int, int, int, int, Callable[[int, torch.dtype], dict[str, Any]]]] = {
    "plain": (4, 4, 6, 6, lambda b, d: {}),
    "causal": (4, 4, 6, 6, lambda b, d: {"is_causal": True}),
    "boolean mask": (4, 4, 6, 6, lambda b, d: {"attn_mask": _visible(b, 1, 6, 6)}),
    "additive mask": (4, 4, 6, 6, lambda b, d: {"attn_mask": torch.randn(6, 6).masked_fill(~_visible(6, 6), -math.inf).to(d)}),
    "scale": (4, 4, 6, 6, lambda b, d: {"scale": 0.7}),
    "grouped queries": (6, 2, 6, 6, lambda b, d: {"enable_gqa": True}),
    "cross attention": (4, 4, 5, 9, lambda b, d: {}),
    "causal, L < S": (4, 4, 5, 9, lambda b, d: {"is_causal": True}),
    "KV cache": (4, 4, 1, 17, lambda b, d: {}),
}


class Given(nn.Module):
    """Hands what it gets to attention."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, query: Tensor, key: Tensor, call: dict[str, Any]) -> Tensor:
        return F.scaled_dot_product_attention(query * self.one.to(query.dtype), key, key.sin(), dropout_p=0.1, **call)


class Holder(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.layer(*args, **kwargs)


@pytest.mark.parametrize("sizes", [(2,), (3, 1, 2)], ids=["whole", "micro-batches"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_key_of_every_kind_of_call(kind: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    heads, key_heads, length, keys, rest = KINDS[kind]
    calls = [
        (torch.randn(b, heads, length, 8).to(dtype), torch.randn(b, key_heads, keys, 8).to(dtype), rest(b, dtype)) for b in sizes
    ]
    model = Holder(Given())
    monitor, optimizer = watched(model)
    for call in calls:
        model(*call).float().square().mean().backward()
    optimizer.step()
    check(monitor.get_step_metrics(), {"layer": calls})
    assert monitor.missing() == {}


def test_under_autocast_it_is_what_the_call_attends_with() -> None:
    model, query, key = Holder(Given()), torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8)
    monitor, optimizer = watched(model)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(query, key, {})  # given in float32, as behind a norm or a rotation
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    optimizer.step()
    check(monitor.get_step_metrics(), {"layer": [(query.bfloat16(), key.bfloat16(), {})]})


# --- who made the call ------------------------------------------------------------------------------------------------------------


class Imported(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return imported(*self.split(x)).transpose(1, 2).flatten(-2)


def helper(query: Tensor, *others: Tensor) -> Tensor:
    return (lambda: F.scaled_dot_product_attention(query, *others))()


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def around(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return around


class Core(nn.Module):
    """Attends in a method that is not its forward, and so without hooks."""

    @decorated
    def attend(self, *qkv: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*qkv)


class ByMethod(Attention):
    def __init__(self) -> None:
        core = Core()
        super().__init__(core.attend)
        self.core = core


def _replaced() -> Attention:
    layer = Attention()
    layer.forward = lambda x: Attention.forward(layer, x) + imported(*layer.split(x)).transpose(1, 2).flatten(-2)
    return layer


class Twice(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(3 * x) + x)


class Checkpointed(Attention):
    """Called once plainly and once under a checkpoint: what is counted twice weighs more."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(9 * x) + checkpoint(super().forward, self.qkv(x)[..., :8], use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


class Differentiated(Attention):
    """Recomputes within its forward, where it takes a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(9 * x)
        z = checkpoint(super().forward, y, use_reentrant=False)
        return z + torch.autograd.grad(z.sum(), y, retain_graph=True)[0]


CALLERS: dict[str, tuple[Callable[[], Attention], str]] = {
    "F": (Attention, "layer"),
    "imported": (Imported, "layer"),
    "function": (lambda: Attention(helper), "layer"),
    "method": (ByMethod, "layer.core"),
    "replaced forward": (_replaced, "layer"),
    "two calls": (Twice, "layer"),
    "reentrant checkpoint": (Reentrant, "layer"),
    "checkpoint": (Checkpointed, "layer"),
    "gradient inside": (Differentiated, "layer"),
    "dropout": (lambda: Attention(dropout_p=0.5, is_causal=True), "layer"),
}


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("kind", CALLERS)
def test_who_makes_the_call(kind: str, autocast: bool) -> None:
    make, name = CALLERS[kind]
    layer = make()
    model = Holder(layer)
    monitor, optimizer = watched(model)
    for _ in range(2):
        layer.met.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            step(model, optimizer, torch.randn(3, 5, 8))
        assert layer.met[0][0].dtype == (torch.bfloat16 if autocast else torch.float32)
        check(monitor.get_step_metrics(), {name: layer.met})


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.other = Attention(), Attention(is_causal=True)
        self.blocks = nn.ModuleList([self.first, self.other])

    def forward(self, x: Tensor) -> Tensor:
        return self.first(9 * self.other(self.first(x)))


def test_a_shared_module_is_one_however_often_it_is_called() -> None:
    model = Shared()
    monitor, optimizer = watched(model)
    step(model, optimizer, torch.randn(3, 5, 8))
    assert len(model.first.met) == 2
    check(monitor.get_step_metrics(), {"first": model.first.met, "other": model.other.met})


def _projected(module: nn.MultiheadAttention, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """What torch's module gives to attention."""
    weights, biases = module.in_proj_weight.detach().chunk(3), module.in_proj_bias.detach().chunk(3)
    both = [F.linear(x.detach(), weights[i], biases[i]).unflatten(-1, (module.num_heads, -1)) for i, x in enumerate((query, key))]
    return tuple(x.transpose(1, 2) if module.batch_first else x.permute(1, 2, 0, 3) for x in both)  # type: ignore[return-value]


PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["self", "cross", "causal", "padding", "additive"])
def test_multihead_attention_of_torch(kind: str, batch_first: bool) -> None:
    model = Holder(nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=batch_first))
    query, added = torch.randn(3, 5, 8), torch.randn(5, 5)
    key = torch.randn(3, 7, 8) if kind == "cross" else query
    options, mask = {
        "causal": ({"is_causal": True, "attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1)}, {"is_causal": True}),
        "padding": ({"key_padding_mask": PADDING}, {"attn_mask": ~PADDING[:, None, None]}),
        "additive": ({"attn_mask": added}, {"attn_mask": added}),
    }.get(kind, ({}, {}))
    if not batch_first:
        query, key = (x.transpose(0, 1).contiguous() for x in (query, key))
    monitor, optimizer = watched(model)
    for weights in (False, True):
        calls = {"layer": [(*_projected(model.layer, query, key), mask)]}
        model(query, key, key, need_weights=weights, **options)[0].sum().backward()
        optimizer.step()
        check(monitor.get_step_metrics(), {} if weights else calls)
    assert set(monitor.missing()) == {f"attention_{metric}/.*" for metric in METRICS}
    assert set(monitor.missing().values()) == {NO_CALL}


class Layers(nn.Module):
    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decoder(target, self.encoder(source))


@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_layers_of_torch(norm_first: bool) -> None:
    options: Any = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "batch_first": True, "norm_first": norm_first}
    model = Layers(nn.TransformerEncoderLayer(**options), nn.TransformerDecoderLayer(**options))
    calls: dict[str, list[Call]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            noted = calls.setdefault(name, [])
            module.register_forward_pre_hook(lambda m, args, noted=noted: noted.append((*_projected(m, *args[:2]), {})))
    monitor, optimizer = watched(model)
    step(model, optimizer, torch.randn(3, 5, 8), torch.randn(3, 4, 8))
    assert list(calls) == ["encoder.self_attn", "decoder.self_attn", "decoder.multihead_attn"]
    check(monitor.get_step_metrics(), calls)


def _outside(model: nn.Module, monitor: ModuleMonitor, x: Tensor) -> None:
    F.scaled_dot_product_attention(x, x, x)


def _another_model(model: nn.Module, monitor: ModuleMonitor, x: Tensor) -> None:
    Holder(Attention())(x)


def _evaluation(model: nn.Module, monitor: ModuleMonitor, x: Tensor) -> None:
    model.eval()(x)
    model.train()


def _without_gradients(model: nn.Module, monitor: ModuleMonitor, x: Tensor) -> None:
    with torch.no_grad():
        model(x)


def _paused(model: nn.Module, monitor: ModuleMonitor, x: Tensor) -> None:
    with monitor.no_monitor():
        model(x)


@pytest.mark.parametrize("aside", [_outside, _another_model, _evaluation, _without_gradients, _paused])
def test_what_is_no_training_of_the_model_is_not_recorded(aside: Callable[..., None]) -> None:
    model = Holder(Attention())
    monitor, optimizer = watched(model)
    for _ in range(2):
        x = torch.randn(3, 5, 8)
        aside(model, monitor, 9 * x)
        model.layer.met.clear()
        loss = model(x).square().mean()
        met = list(model.layer.met)
        aside(model, monitor, 9 * x)
        loss.backward()
        aside(model, monitor, 9 * x)
        optimizer.step()
        aside(model, monitor, 9 * x)
        check(monitor.get_step_metrics(), {"layer": met})
        assert not altered()


def test_calls_of_others_inside_of_the_forward_are_nobodys() -> None:
    model, other = Shared(), Attention()
    model.first.register_forward_pre_hook(lambda module, args: (args[0] + other(9 * args[0]),))
    monitor, optimizer = watched(model, excluded_modules_regex="other")
    step(model, optimizer, torch.randn(3, 5, 8))
    assert (len(other.met), len(model.other.met)) == (2, 1)
    check(monitor.get_step_metrics(), {"first": model.first.met})


def test_steps_that_are_not_monitored_and_metrics_that_are_not_due_or_do_not_match() -> None:
    model = Shared()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = ModuleMonitor(model, every=2).attach(optimizer)
    monitor.add_attention_metric("entropy", "other", every=4)
    monitor.add_attention_metric("first_key", "^first$")
    seen: list[bool] = []
    model.other.register_forward_hook(lambda *_: seen.append(altered()))
    for number in range(5):
        model.first.met, model.other.met = [], []
        step(model, optimizer, torch.randn(3, 5, 8))
        calls = {"first": model.first.met} if number % 2 == 0 else {}
        entropy = expected({"other": model.other.met}, heads=False, metrics=("entropy",)) if number % 4 == 0 else {}
        first = expected(calls, heads=False, metrics=("first_key",))
        assert monitor.get_step_metrics() == pytest.approx({**entropy, **first}, rel=1e-5)
        if number % 2:
            assert set(monitor.missing().values()) == {f"step {number} was not monitored"}
        else:
            late = {"attention_entropy/other": "measured on steps divisible by 4"}
            assert monitor.missing() == (late if number == 2 else {})
    assert seen == [True, False, True, False, True]


# --- where the values go ----------------------------------------------------------------------------------------------------------


def _norms(calls: list[Call], name: str) -> dict[str, float]:
    query, key = (torch.cat([call[i] for call in calls]).double() for i in (0, 1))
    found = {f"activation/{name}.head_{h}.query/norm": query[:, h].norm().item() for h in range(query.size(1))}
    return found | {f"activation/{name}.head_{h}.key/norm": key[:, h].norm().item() for h in range(key.size(1))}


@pytest.mark.parametrize("heads", [False, True])
def test_heads_are_in_the_run_directory_and_shown_where_asked_for(heads: bool, tmp_path: Path) -> None:
    model = Holder(Attention())
    monitor, optimizer = watched(model, heads=heads, run_dir=tmp_path)
    monitor.add_activation_metric("norm", metric_regex=r"layer\.(head_\d\.)?(query|key)")
    step(model, optimizer, torch.randn(3, 5, 8))
    calls = model.layer.met
    (query, key, _), shown = calls[0], expected({"layer": calls}, heads=heads)
    whole = {f"activation/layer.{of}/norm": x.double().norm().item() for of, x in (("query", query), ("key", key))}
    shown |= _norms(calls, "layer") if heads else whole
    assert monitor.get_step_metrics() == pytest.approx(shown, rel=1e-5)
    monitor.detach()
    kept = load_run(tmp_path).record(0).metrics
    assert {k: v for k, v in kept.items() if "attention" in k} == pytest.approx(expected({"layer": calls}), rel=1e-5)


def test_what_the_preset_measures_of_attention_is_for_the_run_directory(tmp_path: Path) -> None:
    model = Holder(Attention())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = ModuleMonitor(model, run_dir=tmp_path, preset="full")
    monitor.attach(optimizer)
    step(model, optimizer, torch.randn(3, 5, 8))
    assert not [key for key in monitor.get_step_metrics() if not key.startswith("gradmon/")]
    monitor.detach()
    kept = expected({"layer": model.layer.met})
    kept = {
        key: value for key, value in kept.items() if key.startswith(("attention_max_logit/", "attention_entropy_normalized/"))
    }
    assert {key: value for key, value in load_run(tmp_path).record(0).metrics.items() if "attention" in key} == pytest.approx(
        kept, rel=1e-5
    )


def test_of_queries_without_a_finite_logit_there_is_no_largest() -> None:
    model = Holder(Attention())
    monitor, optimizer = watched(model, heads=True)
    step(model, optimizer, torch.full((3, 5, 8), torch.nan))
    found = {key: value for key, value in monitor.get_step_metrics().items() if key.startswith("attention_max_logit/")}
    assert len(found) == 5  # of two heads, and over them
    assert all(math.isnan(value) for value in found.values()), found


class Tells(Attention):
    """As in the README of torch-module-monitor; of two calls it tells the first one only."""

    monitor: Any = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        y = F.scaled_dot_product_attention(q, k, v, **self.call)
        if self.monitor is not None:
            monitor_scaled_dot_product_attention(self.monitor, self, query=q, key=k, value=v, activation=y, **self.call)
        return y.transpose(1, 2).flatten(-2) + super().forward(3 * x)


def test_the_explicit_helper_says_the_same_and_counts_nothing_twice() -> None:
    found = []
    for recorded, tells in ((False, True), (True, False), (True, True)):
        torch.manual_seed(5)
        model = Holder(Tells(is_causal=True))
        monitor = ModuleMonitor(model)
        if recorded:
            monitor, _ = watched(model)
        model.layer.monitor = monitor if tells else None
        monitor.add_activation_metric("norm", metric_regex=r"head_\d\.(query|key)")
        monitor.begin_step(0)
        model(torch.randn(3, 5, 8)).square().mean().backward()
        monitor.end_step()
        calls = model.layer.met if recorded else model.layer.met[:1]
        found.append(monitor.get_step_metrics())
        assert found[-1] == pytest.approx({**expected({"layer": calls}), **_norms(calls, "layer")}, rel=1e-5)
    assert found[1] == found[2]


# --- training is left alone -------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Dropout inside of attention, torch's own module beside one's own call, and recomputation."""

    recompute = ""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.torchs = nn.Linear(8, 24), nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)

    def part(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3).transpose(1, 2).flatten(-2)
        return y + self.torchs(y, y, y, need_weights=False)[0]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.qkv.bias[:8]
        for _ in range(2):
            x = checkpoint(self.part, x, use_reentrant=self.recompute == "reentrant") if self.recompute else self.part(x)
        return x


@pytest.mark.parametrize("recompute", ["", "reentrant", "nonreentrant"])
@pytest.mark.parametrize("amp", [False, True], ids=["float32", "AMP"])
def test_training_is_the_same_bit_for_bit(recompute: str, amp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = BY_NAME["mlp"].loss
    family = Family("attends", Net, lambda g: (torch.randn(3, 5, 8, generator=g),), lambda m, b: loss(m, b[:1]))
    monkeypatch.setitem(BY_NAME, "attends", family)
    monitors: list[ModuleMonitor] = []

    def watch(model: Any, optimizer: Any, scaler: Any) -> ModuleMonitor:
        monitors.append(gradmon.watch(model, optimizer, scaler=scaler))
        for metric in METRICS:
            monitors[0].add_attention_metric(metric, heads=True)
        return monitors[0]

    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        plain, watched = (loops.train("attends", recompute=recompute, scaler=amp, monitored=w) for w in (None, watch))
    assert loops.differences(plain, watched) == []
    assert not altered()
    for found in monitors[0].get_all_metrics().values():
        assert {f"attention_{m}/{of}.head_1" for m in METRICS for of in ("[root module]", "torchs")} <= found.keys()


def _whole(model: Any) -> Any:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def _in_place(model: Any) -> Any:
    model.compile(backend="aot_eager", fullgraph=True)
    return model


def _part(model: Any) -> Any:
    _in_place(model.layer)
    return model


@pytest.mark.thorough
@pytest.mark.parametrize("compiled", [_whole, _in_place, _part])
def test_in_a_compiled_model_it_is_absent_and_compiles_nothing(compiled: Callable[[Any], Any]) -> None:
    graphs = []
    for monitored in (False, True):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(3)
        model = compiled(Holder(Net()))
        monitor, optimizer = watched(model, every=2)
        if not monitored:
            monitor.detach()
        for _ in range(3):
            step(model, optimizer, torch.randn(3, 5, 8))
        left = [p.detach().clone() for p in model.parameters()]
        graphs.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), left))
    assert [found[:2] for found in graphs] == [(1, 0)] * 2
    assert all(map(torch.equal, graphs[0][2], graphs[1][2]))
    assert monitor.get_step_metrics() == {}
    assert set(monitor.missing()) == {f"attention_{metric}/.*" for metric in METRICS}
    assert all("in a model with a compiled part" in reason for reason in monitor.missing().values())


def _forward_of(model: nn.Module, x: Tensor) -> tuple[int, int]:
    """How many products a forward makes that are no linear layers', and the most bytes that it allocates at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model(x)
    events = profiler.profiler.kineto_results.events()
    products = sum(event.name() in ("aten::bmm", "aten::baddbmm", "aten::baddbmm_") for event in events)
    return products, max(event.nbytes() for event in events if event.name() == "[memory]")


@pytest.mark.parametrize("blocks", [1, 4])
def test_a_call_costs_one_product_of_blocks(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = 2 * 2 * 128 * 128
    monkeypatch.setattr(attention, "LOGITS_PER_BLOCK", logits // blocks)
    model, x = Holder(Attention()), torch.randn(2, 128, 8)
    assert _forward_of(model, x) == (0, pytest.approx(24 * 4 * 2 * 128, rel=0.1))
    kept = watched(model)
    products, most = _forward_of(model, x)
    assert products == blocks
    assert most <= max(4 * logits // blocks, 24 * 4 * 2 * 128)
    assert kept


class Jagged(Attention):
    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x).unflatten(-1, (2, 12)).transpose(1, 2)
        return F.scaled_dot_product_attention(y, y, y).transpose(1, 2).flatten(-2).values()


class Mapped(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda y: Attention.forward(self, y[None])[0])(x)

    def split(self, x: Tensor) -> list[Tensor]:
        return [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)]


class Flat(Attention):
    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x[0])
        return F.scaled_dot_product_attention(y, y, y)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:There is a performance drop")
@pytest.mark.parametrize("kind", ["meta", "fake", "nested", "vmap"])
def test_tensors_that_cannot_be_measured_are_left_alone(kind: str) -> None:
    with {"meta": torch.device("meta"), "fake": FakeTensorMode()}.get(kind, contextlib.nullcontext()):
        model = Holder({"nested": Jagged, "vmap": Mapped}.get(kind, Attention)())
        monitor, optimizer = watched(model)
        x = torch.randn(2, 5, 8)
        if kind == "nested":
            x = torch.nested.nested_tensor([x[0], x[1, :3]], layout=torch.jagged)
        for _ in range(2):
            step(model, optimizer, x)
    assert monitor.get_step_metrics() == {}
    assert set(monitor.missing()) == {f"attention_{metric}/.*" for metric in METRICS}
    assert monitor.warning_counts() == {}


def test_a_call_without_heads_is_one_complaint() -> None:
    model = Holder(Flat())
    monitor, optimizer = watched(model)
    with pytest.warns(gradmon.GradmonWarning, match="attention of layer could not be measured"):
        step(model, optimizer, torch.randn(2, 5, 8))
    step(model, optimizer, torch.randn(2, 5, 8))
    assert monitor.warning_counts() == {"attention:layer": 2}


# --- modes, one's own and others' -------------------------------------------------------------------------------------------------


class Sees(TorchFunctionMode):
    """Another's mode; it doubles what attention returns."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.calls += function is ORIGINAL[0]
        return 2 * result if function is ORIGINAL[0] else result


@pytest.mark.parametrize("inner", [False, True], ids=["around", "inside"])
@pytest.mark.parametrize("kind", ["device", "own", "default device"])
def test_other_modes_work_and_nest(kind: str, inner: bool) -> None:
    sees = Sees()

    @contextlib.contextmanager
    def default_device() -> Iterator[None]:
        torch.set_default_device("cpu")
        yield
        torch.set_default_device(None)

    mode = {"device": lambda: torch.device("cpu"), "own": lambda: sees, "default device": default_device}[kind]
    within, around = (mode, contextlib.nullcontext) if inner else (contextlib.nullcontext, mode)

    def attend(*qkv: Tensor) -> Tensor:
        with within():
            return F.scaled_dot_product_attention(*qkv)

    model, x = Holder(Attention(attend)), torch.randn(3, 5, 8)
    with around():
        plain = model(x)
        monitor, optimizer = watched(model)
        before = modes()
        found = model(x)
        assert modes() == before
    assert not altered()
    assert torch.equal(found, plain)
    assert sees.calls == (2 if kind == "own" else 0)
    optimizer.step()
    check(monitor.get_step_metrics(), {"layer": model.layer.met[1:]})


def test_the_mode_is_gone_when_the_forward_raises() -> None:
    model = Holder(Attention())
    model.layer.register_forward_hook(lambda *_: 1 // 0)
    monitor, optimizer = watched(model)
    with torch.device("meta"):
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                model(torch.randn(3, 5, 8, device="cpu"))
            assert modes() == 1
    assert not altered()
    assert torch.empty(1).device.type == "cpu"
    optimizer.step()
    check(monitor.get_step_metrics(), {})  # such a forward is no part of the step


def test_monitored_models_inside_of_each_other() -> None:
    inner, outer = Holder(Attention()), Shared()
    outer.other = Holder(inner)
    monitors = [ModuleMonitor(model) for model in (outer, inner, outer)]
    for monitor in monitors:
        for metric in METRICS:
            monitor.add_attention_metric(metric, heads=True)
        monitor.begin_step(0)
    outer(torch.randn(3, 5, 8))
    assert not altered()
    for monitor, prefix in zip(monitors, ("other.layer.", "", "other.layer."), strict=True):
        monitor.end_step()
        first = {"first": outer.first.met} if prefix else {}
        check(monitor.get_step_metrics(), {**first, f"{prefix}layer": inner.layer.met})


class WrittenOutAttention(Attention):
    """Scores, softmax and product, with no call of torch's function."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return ((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("is_seen", [True, False])
def test_missing_tells_why_attention_of_preset_is_unseen(tmp_path: Path, is_seen: bool) -> None:
    model = nn.Sequential(Attention() if is_seen else WrittenOutAttention(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    monitor = gradmon.watch(model, optimizer, on_spike=None, preset="full", run_dir=tmp_path)
    keys = {"attention_entropy_normalized/.*", "attention_max_logit/.*"}
    for step in range(14):
        optimizer.zero_grad()
        model(torch.randn(2, 4, 8)).square().mean().backward()
        optimizer.step()
        told = {key: why for key, why in monitor.missing().items() if key.startswith("attention")}
        last = "" if step % 10 == 0 else "measured on steps divisible by 10; in the last of them "
        assert told == ({} if is_seen else dict.fromkeys(keys, f"{last}{NO_CALL}"))
    advice = monitor.diagnose().unseen.get("attention")
    assert advice == (None if is_seen else f"attention was not measured: {NO_CALL}")
    assert NO_CALL not in monitor.why(10)
    monitor.detach()
    assert gradmon.load_run(tmp_path).diagnose().unseen.get("attention") == advice


def test_missing_is_silent_on_attention_of_models_without() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    monitor = gradmon.watch(model, optimizer, on_spike=None, preset="full")
    model(torch.randn(2, 8)).square().mean().backward()
    optimizer.step()
    assert not any(key.startswith("attention") for key in monitor.missing())
    monitor.detach()
