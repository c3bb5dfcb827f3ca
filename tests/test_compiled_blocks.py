"""Blocks of one class that are compiled one by one share a graph, whatever is measured in them."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor
from torch_gradmon.core import torch_modes

# torch hides the first of these warnings, which is the compiler's own, but cannot where warnings are errors
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.skipif(not torch_modes.TELLS_EXPORT, reason="before torch 2.7 no values in compiled graphs"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning"),
]
Watch = Callable[[nn.Module, torch.optim.Optimizer], ModuleMonitor]
BLOCKS = 10  # more than the compiler makes graphs of one function, by default


class Block(nn.Module):
    def __init__(self, is_cut: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.is_cut = nn.Linear(4, 6), nn.Linear(6, 4), is_cut

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        if self.is_cut:
            torch._dynamo.graph_break()
        return x + self.down(h)


class Pair(nn.Module):
    """Returns what a module in Transformers' attention does: a tensor in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return torch.tanh(self.inner(x)), None


class PairBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Pair()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x)[0]


class Whole(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def one_by_one(model: Whole) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    return model


def wrapped(model: Whole) -> nn.Module:
    for place, block in enumerate(model.blocks):
        model.blocks[place] = torch.compile(block, backend="eager", fullgraph=True)  # type: ignore[assignment]
    return model


def as_a_whole(model: Whole) -> nn.Module:
    compiled: nn.Module = torch.compile(model, backend="aot_eager", fullgraph=True)  # type: ignore[assignment]
    return compiled


def in_pieces(model: Whole) -> nn.Module:
    compiled: nn.Module = torch.compile(model, backend="eager")  # type: ignore[assignment]
    return compiled


def eager(model: Whole) -> nn.Module:
    return model


def asking(*metrics: str, regex: str = r"\.up$", every: int = 1, **options: Any) -> Watch:
    def watch(model: nn.Module, optimizer: torch.optim.Optimizer) -> ModuleMonitor:
        monitor = gradmon.watch(model, optimizer, every=every, on_spike=None, **options)
        for metric in metrics:
            monitor.add_activation_metric(metric, metric_regex=regex)
        return monitor

    return watch


class Trained:
    """What a few steps of two micro-batches leave behind."""

    def __init__(
        self,
        compile: Callable[[Whole], nn.Module],
        watch: Watch | None = None,
        *,
        block: Callable[[], nn.Module] = Block,
        number: int = BLOCKS,
        steps: int = 3,
        again: bool = False,
        evaluate: bool = False,
    ) -> None:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        self.model = Whole([block() for _ in range(number)])
        self.called = compile(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.monitor: ModuleMonitor | None = None
        self.values: list[dict[str, float]] = []
        for step in range(steps):
            if watch is not None and (again or not step):
                self.monitor = watch(self.called, self.optimizer)
            self.step(evaluate)
        self.graphs, self.breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())

    def step(self, evaluate: bool = False) -> None:
        for _ in range(2):
            x = torch.randn(3, 4)
            self.called(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if evaluate:
            self.called.eval()
            with torch.no_grad():
                self.called(x * 100)
            self.called.train()
        if self.monitor is not None:
            found = self.monitor.get_step_metrics()
            self.values.append({key: value for key, value in found.items() if key.startswith("activation/")})

    def assert_as(self, bare: Trained, monitored: Trained) -> None:
        """The graphs and the bits of ``bare``, and the values of ``monitored``."""
        assert (self.graphs, self.breaks) == (bare.graphs, bare.breaks)
        assert all(map(torch.equal, self.model.parameters(), bare.model.parameters()))
        assert [values.keys() for values in self.values] == [values.keys() for values in monitored.values]
        for found, expected in zip(self.values, monitored.values, strict=True):
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("compile", [one_by_one, wrapped, as_a_whole, in_pieces])
@pytest.mark.parametrize(("every", "evaluate"), [(1, True), (3, False)])
def test_compiled_blocks_share_graphs_as_without_a_monitor(
    compile: Callable[[Whole], nn.Module], every: int, evaluate: bool
) -> None:
    watch = asking("rms", "max", every=every)
    number = 3 if compile is as_a_whole else BLOCKS
    settings: Any = {"steps": 4, "evaluate": evaluate, "number": number}
    monitored = Trained(eager, watch, **settings)
    assert len(monitored.values[0]) == 2 * number
    Trained(compile, watch, **settings).assert_as(Trained(compile, **settings), monitored)


@pytest.mark.parametrize("regex", [r"\.[03]\.up$", r"\.2\.down$|\.5\.up$", r"blocks\.\d+$", r"blocks\.4$"])
def test_modules_selected_in_some_compiled_blocks_have_values(regex: str) -> None:
    watch = asking("rms", "max", regex=regex)
    Trained(one_by_one, watch).assert_as(Trained(one_by_one), Trained(eager, watch))


def test_blocks_compiled_after_the_attach_have_values() -> None:
    # as many sets of hooks as there are blocks: a graph for each would be too many
    watch = asking("rms", regex=r"0\.up|1\.down|2$|3\.(up|down)|4$|4\.up|5$|5\.down|6$|6\.(up|down)")

    def watch_first(model: nn.Module, optimizer: torch.optim.Optimizer) -> ModuleMonitor:
        monitor = watch(model, optimizer)
        one_by_one(model)  # type: ignore[arg-type]
        return monitor

    Trained(eager, watch_first).assert_as(Trained(one_by_one), Trained(eager, watch))


def test_excluded_blocks_share_the_graph_and_have_no_values() -> None:
    watch = asking("rms", exclude=r"blocks\.[13]\b")
    trained = Trained(one_by_one, watch)
    assert len(trained.values[0]) == BLOCKS - 2
    trained.assert_as(Trained(one_by_one), Trained(eager, watch))


def test_pieces_of_some_blocks_never_have_half_a_value() -> None:
    # a graph of a block without a hook also does for one with a hook, from the second micro-batch on
    watch = asking("rms", "max", regex=r"\.[02]\.up$")
    trained = Trained(in_pieces, watch, block=lambda: Block(is_cut=True))
    assert not any(trained.values)
    assert trained.monitor is not None
    missing = trained.monitor.missing()
    assert all("one of the same class that has no hook" in missing[f"activation/blocks.{block}.up/rms"] for block in (0, 2))
    all_blocks = asking("rms", "max")
    cut: Any = {"block": lambda: Block(is_cut=True)}
    Trained(in_pieces, all_blocks, **cut).assert_as(Trained(in_pieces, **cut), Trained(eager, all_blocks, **cut))


@pytest.mark.filterwarnings("ignore:torch_gradmon.*this Whole was watched already")
@pytest.mark.filterwarnings("ignore:torch_gradmon.*this OptimizedModule was watched already")
@pytest.mark.parametrize(("block", "regex"), [(Block, r"\.up$"), (PairBlock, "attention$")])
def test_watching_again_compiles_nothing_again(block: Callable[[], nn.Module], regex: str) -> None:
    settings: Any = {"block": block, "steps": BLOCKS, "again": True, "number": 2}
    trained = Trained(one_by_one, asking("rms", regex=regex), **settings)
    trained.assert_as(Trained(one_by_one, **settings), Trained(eager, asking("rms", regex=regex), **settings))
    assert len(trained.values[-1]) == 2


def test_two_monitors_of_compiled_blocks_have_the_same_values() -> None:
    others: list[ModuleMonitor] = []

    def watch(model: nn.Module, optimizer: torch.optim.Optimizer) -> ModuleMonitor:
        others.append(ModuleMonitor(model))
        others[-1].add_activation_metric("rms", metric_regex=r"\.up$")
        others[-1].attach(optimizer)
        return asking("rms", "max")(model, optimizer)

    trained = Trained(one_by_one, watch)
    assert trained.graphs == Trained(one_by_one).graphs
    found = others[0].get_step_metrics()
    assert {key for key in trained.values[-1] if key.endswith("rms")} == {key for key in found if key.startswith("activation/")}
    assert all(found[key] == trained.values[-1][key] for key in found if key.startswith("activation/"))


def test_slots_are_in_no_state_buffer_copy_or_pickle() -> None:
    trained, bare = Trained(one_by_one, asking("rms")), Trained(one_by_one)
    assert trained.model.state_dict().keys() == bare.model.state_dict().keys()
    assert not list(trained.model.buffers())
    block = trained.model.blocks[0]
    assert vars(block).keys() == vars(bare.model.blocks[0]).keys()
    for module in (copy.deepcopy(block.up), pickle.loads(pickle.dumps(block.up))):  # type: ignore[arg-type]
        assert not any("gradmon" in str(getattr(hook, "func", hook)) for hook in module._forward_hooks.values())


def test_full_preset_with_attention_shares_one_graph(tmp_path: Any) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part.view(1, -1, 2, 2).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, 4))

    found = []
    for name, compile in (("compiled", one_by_one), ("eager", eager)):
        options: Any = {"preset": "full", "run_dir": tmp_path / name}
        trained = Trained(compile, asking(**options), block=Attention)
        assert trained.monitor is not None
        trained.monitor.detach()
        assert trained.graphs == Trained(compile, block=Attention).graphs
        table = gradmon.load_run(tmp_path / name)._reader.table("activation", 2)
        assert table is not None
        found.append(dict(zip(table.names, table.rows.tolist(), strict=True)))
    assert f"blocks.{BLOCKS - 1}.qkv" in found[0]
    assert found[0].keys() == found[1].keys()
    for row, expected in zip((found[0][name] for name in found[1]), found[1].values(), strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-6)


# --- what is asked, and when ---------------------------------------------------------------------------------------------------------


def test_metrics_asked_one_after_the_other_are_all_measured() -> None:
    watch = asking("rms", "max", "sparsity", "mean", "l1_norm", "min_value")
    monitored = Trained(eager, watch, number=2)
    assert len(monitored.values[0]) == 12
    for compile in (one_by_one, as_a_whole):
        Trained(compile, watch, number=2).assert_as(Trained(compile, number=2), monitored)


NOT_COMPUTED = {
    "functions are not called inside torch.compile": {"metric_fn": lambda x: x.abs().amax()},
    "inputs are not measured inside torch.compile": {"of": "input"},
    "gradients of outputs are not measured inside torch.compile": {"of": "output_gradient"},
    "gradients of inputs are not measured inside torch.compile": {"of": "input_gradient"},
    "calls of a module are not told apart inside torch.compile": {"split_calls": True},
}


@pytest.mark.parametrize("compile", [one_by_one, as_a_whole])
@pytest.mark.parametrize("reason", NOT_COMPUTED)
def test_what_graphs_do_not_compute_is_no_late_attach(compile: Callable[[Whole], nn.Module], reason: str) -> None:
    def watch(model: nn.Module, optimizer: torch.optim.Optimizer) -> ModuleMonitor:
        monitor = gradmon.watch(model, optimizer, on_spike=None)
        monitor.add_activation_metric("rms", metric_regex=r"\.up$", **NOT_COMPUTED[reason])  # type: ignore[arg-type]
        return monitor

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained = Trained(compile, watch, number=3)
    assert not [str(warning.message) for warning in caught if "before the first call" in str(warning.message)]
    assert trained.graphs == Trained(compile, number=3).graphs
    assert trained.monitor is not None
    (why,) = {why for key, why in trained.monitor.missing().items() if ".up" in key}
    assert why.startswith(reason)


@pytest.mark.parametrize("compile", [one_by_one, as_a_whole])
def test_a_metric_added_after_the_trace_has_that_reason(compile: Callable[[Whole], nn.Module]) -> None:
    trained = Trained(compile, asking("norm"), number=3)
    monitor = trained.monitor
    assert monitor is not None
    monitor.add_activation_metric("rms", metric_regex=r"\.up$")  # of what the graph computes
    monitor.add_activation_metric("max", metric_regex=r"\.up$")
    monitor.add_activation_metric("norm", metric_regex=r"\.down$")
    for _ in range(2):
        trained.step()
    assert counters["stats"]["unique_graphs"] == trained.graphs
    assert {"activation/blocks.2.up/norm", "activation/blocks.2.up/rms"} <= trained.values[-1].keys()
    missing = monitor.missing()
    for key in ("activation/blocks.1.up/max", "activation/blocks.2.up/max"):
        assert "had traced the model before the metric was added" in missing[key]
    assert "before the metric was added" in missing["activation/blocks.2.down/norm"]
