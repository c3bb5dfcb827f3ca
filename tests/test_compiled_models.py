"""Activations of models under torch.compile: exact values, one graph, no compilation of a step's own, and the training's own bits."""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor
from torch_gradmon.capture.compiled import RECOMPUTED
from torch_gradmon.core import torch_modes

METRICS = ("norm", "rms", "mean", "std", "max", "min_value", "max_value", "l1_norm", "sparsity", "zero_count", "nonfinite_count")
# torch hides this warning of the compiler's own, which it cannot where warnings are errors
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning"),
]


class Block(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.up, self.drop, self.act, self.down = nn.Linear(6, 9), nn.Dropout(0.3), nn.ReLU(), nn.Linear(9, 6)
        self.recompute = recompute

    def inner(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.drop(self.up(x))))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = checkpoint(self.inner, x, use_reentrant=False) if self.recompute else self.inner(x)
        return {"sum": x + y, "best": y.argmax(-1)}


class Net(nn.Module):
    """A shared block, outputs in a dict with an integer tensor among them, and a module that is never called."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(recompute), Block(recompute)])
        self.head, self.idle = nn.Linear(6, 2), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)["sum"]
        return self.head(x)


class Trained:
    """What a short training leaves behind."""

    def __init__(
        self,
        backend: str | None,
        monitored: Callable[[nn.Module, nn.Module], ModuleMonitor] | None = None,
        *,
        recompute: bool = False,
        steps: int = 4,
        micro_batches: int = 1,
        sizes: tuple[int, ...] = (5,),
        before_forward: Callable[[nn.Module], object] | None = None,
    ) -> None:
        torch.manual_seed(3)
        self.model = Net(recompute)
        self.run: Any = self.model if backend is None else torch.compile(self.model, backend=backend, fullgraph=True)
        optimizer = torch.optim.AdamW(self.model.parameters(), 0.05)
        self.monitor = None if monitored is None else monitored(self.model, self.run)
        if self.monitor is not None:
            self.monitor.attach(optimizer)
        self.values: list[dict[str, float]] = []
        for step in range(steps):
            for part in range(micro_batches):
                x = torch.randn(sizes[(step + part) % len(sizes)], 6)
                if before_forward is not None:
                    before_forward(self.run)
                (self.run(x).square().mean() / micro_batches).backward()
            optimizer.step()
            optimizer.zero_grad()
            if self.monitor is not None:
                self.values.append(self.monitor.get_step_metrics())
        self.parameters = [parameter.detach().clone() for parameter in self.model.parameters()]


def watching(outer: bool = False, regex: str = ".*", **options: Any) -> Callable[[nn.Module, nn.Module], ModuleMonitor]:
    def make(model: nn.Module, compiled: nn.Module) -> ModuleMonitor:
        monitor = ModuleMonitor(compiled if outer else model, **options)
        for metric in METRICS:
            monitor.add_activation_metric(metric, metric_regex=regex)
        return monitor

    return make


def assert_close(found: list[dict[str, float]], expected: list[dict[str, float]], tolerance: float = 1e-6) -> None:
    assert [step.keys() for step in found] == [step.keys() for step in expected]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=tolerance, abs=1e-7)


# every two of the three choices
@pytest.mark.parametrize(
    ("outer", "recompute", "micro_batches"), [(False, False, 1), (True, True, 1), (True, False, 3), (False, True, 3)]
)
def test_compiled_values_are_those_of_eager_steps_with_the_same_bits(outer: bool, recompute: bool, micro_batches: int) -> None:
    settings: Any = {"recompute": recompute, "micro_batches": micro_batches}
    bare = Trained("aot_eager", **settings)
    counters.clear()
    torch._dynamo.reset()
    compiled = Trained("aot_eager", watching(outer), **settings)
    assert counters["stats"]["unique_graphs"] == 1
    eager = Trained(None, watching(), **settings)
    assert {"activation/blocks.0.sum/norm", "activation/blocks.1.up/std"} <= eager.values[0].keys()
    if recompute and not torch_modes.CHECKPOINTS_WRITE_ONCE:
        inside = {key for key in eager.values[0] if key.split("/")[1].endswith((".up", ".drop", ".act", ".down"))}
        eager.values = [{key: value for key, value in step.items() if key not in inside} for step in eager.values]
        assert compiled.monitor is not None
        assert {compiled.monitor.missing()[key] for key in inside} == {RECOMPUTED}
    assert_close(compiled.values, eager.values, 1e-6)
    assert all(map(torch.equal, compiled.parameters, bare.parameters))


def as_traced(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
    return graph.forward


@pytest.mark.parametrize("backend", ["eager", as_traced])
def test_outputs_inside_a_checkpoint_are_absent_where_the_graph_runs_as_it_was_traced(backend: Any) -> None:
    # the checkpoint recomputes with the graph's inputs, and raises if one of them was written to; it draws other dropout than eager steps
    eager = Trained(None, watching(), recompute=True)
    compiled = Trained(backend, watching(), recompute=True)
    assert all(map(torch.equal, compiled.parameters, Trained(backend, recompute=True).parameters))
    absent = eager.values[0].keys() - compiled.values[0].keys()
    assert absent == {key for key in eager.values[0] if key.split("/")[1].endswith((".up", ".drop", ".act", ".down"))}
    assert compiled.monitor is not None
    assert {compiled.monitor.missing()[key] for key in absent} == {RECOMPUTED}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a compiler")
def test_inductor_has_the_same_values_and_one_graph() -> None:
    def train(backend: str | None) -> list[dict[str, float]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 60), nn.GELU(), nn.Linear(60, 3))  # without dropout, whose numbers are others there
        run: Any = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        monitor = watching()(model, run).attach(optimizer)
        found = []
        for _ in range(4):
            run(torch.randn(300, 40)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(monitor.get_step_metrics())
        return found

    compiled = train("inductor")
    assert counters["stats"]["unique_graphs"] == 1
    assert_close(compiled, train(None), 1e-5)


@pytest.mark.parametrize(("every", "start"), [(2, 0), (3, 1)])
def test_steps_that_are_not_monitored_compile_nothing_and_run_almost_no_python_of_ours(every: int, start: int) -> None:
    ran: dict[int, set[str]] = {}
    step = -1

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("torch_gradmon.capture"):
            ran[step].add(f"{frame.f_globals['__name__'].rpartition('.')[2]}.{frame.f_code.co_name}")

    def profile(run: nn.Module) -> None:
        nonlocal step
        step += 1
        ran[step] = set()
        if step == 2:  # the steps before may compile, which a profile makes twice as slow
            sys.setprofile(note)

    def watch(model: nn.Module, compiled: nn.Module) -> ModuleMonitor:
        return watching(monitor_step_fn=lambda step: step % every == start)(model, compiled)

    try:
        compiled = Trained("eager", watch, steps=7, before_forward=profile)
    finally:
        sys.setprofile(None)
    assert counters["stats"]["unique_graphs"] == 1
    eager = Trained(None, watch, steps=7)
    assert [bool(values) for values in eager.values] == [step % every == start for step in range(7)]
    assert_close(compiled.values, eager.values)
    idle = set().union(*(ran[step] for step in range(2, 7) if step % every != start))
    assert sorted(name for name in idle if name.startswith(("module_values.", "hooks.tensors", "compiled.T", "measurer."))) == [
        "hooks.tensors_of"
    ]
    assert {"compiled.trace", "compiled._allot", "compiled.collect"}.isdisjoint(idle)


def test_other_shapes_share_the_slots_of_one_dynamic_graph() -> None:
    compiled = Trained("eager", watching(), steps=6, sizes=(5, 7, 4, 6))
    assert counters["stats"]["unique_graphs"] == 2  # one for the first shape, one for any
    assert_close(compiled.values, Trained(None, watching(), steps=6, sizes=(5, 7, 4, 6)).values, 1e-6)


def test_evaluation_and_paused_passes_do_not_count() -> None:
    def aside(run: nn.Module) -> None:
        run.eval()
        with torch.no_grad():
            run(torch.full((5, 6), 1e3))
        run.train()

    few = watching(regex="sum$|head")
    plain = Trained("eager", few)
    torch._dynamo.reset()
    assert_close(Trained("eager", few, before_forward=aside).values, plain.values, 1e-12)

    torch._dynamo.reset()
    monitors: list[ModuleMonitor] = []

    def make(model: nn.Module, compiled: nn.Module) -> ModuleMonitor:
        monitors.append(few(model, compiled))
        return monitors[-1]

    def unwatched(run: nn.Module) -> None:
        state = torch.get_rng_state()
        with monitors[-1].no_monitor():
            run(torch.full((5, 6), 1e3))
        torch.set_rng_state(state)

    assert_close(Trained("eager", make, before_forward=unwatched).values, plain.values, 1e-12)


def test_a_nan_on_a_step_that_is_not_monitored_does_not_stay_in_the_slots() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    monitor = ModuleMonitor(model, every=2)
    for metric in METRICS:
        monitor.add_activation_metric(metric, metric_regex="^0$")
    monitor.attach(optimizer)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for step in range(4):
        x = torch.ones(2, 3) if step != 1 else torch.full((2, 3), torch.nan)
        compiled(x).sum().backward()
        if step == 1:
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        values = monitor.get_step_metrics()
        if step % 2 == 0:
            expected = model[0](torch.ones(2, 3)).detach().double()
            assert values["activation/0/norm"] == pytest.approx(expected.norm().item(), rel=1e-6)
            assert values["activation/0/nonfinite_count"] == 0
    with torch.no_grad():
        model[0].weight[0, 0] = torch.inf
    compiled(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    found = monitor.get_step_metrics()
    assert found["activation/0/nonfinite_count"] == 2
    assert found["activation/0/norm"] == torch.inf
    assert found["activation/0/max"] == pytest.approx(expected[:, 1:].abs().max().item(), rel=1e-6)


def test_what_a_graph_cannot_have_is_absent_with_a_reason() -> None:
    def make(model: nn.Module, compiled: nn.Module) -> ModuleMonitor:
        monitor = watching()(model, compiled)
        monitor.add_activation_metric("kurtosis", metric_regex="head")
        monitor.add_activation_metric("mine", lambda x: x.mean().item(), metric_regex="head")  # would break the graph
        monitor.add_activation_metric("l2", torch.norm, metric_regex="head", of=("output_gradient", "input"))
        monitor.add_attention_metric("entropy")
        return monitor

    trained = Trained("eager", make)
    assert trained.monitor is not None
    missing = trained.monitor.missing()
    assert missing["activation/head/kurtosis"].startswith("kurtosis needs the whole output, and inside torch.compile only")
    assert missing["activation/head/mine"].startswith("functions are not called inside torch.compile")
    assert missing["activation_gradient/head/l2"].startswith("gradients of outputs are not measured inside torch.compile")
    assert missing["input/head/l2"].startswith("inputs are not measured inside torch.compile")
    assert "not called" in missing["activation/idle/norm"]
    assert not any("idle" in key or "best" in key for key in trained.values[-1])


def test_attached_too_late_it_says_so_and_what_to_do() -> None:
    torch.manual_seed(0)
    model = Net()
    compiled = torch.compile(model, backend="eager")
    compiled(torch.randn(5, 6)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = watching(regex="head")(model, compiled).attach(optimizer)
    with pytest.warns(gradmon.GradmonWarning, match=r"torch.compile traced the model before.*attach before the first call"):
        compiled(torch.randn(5, 6)).sum().backward()
        optimizer.step()
    assert "before the monitor was attached" in monitor.missing()["activation/head/norm"]
    torch.compiler.reset()  # the remedy that it names
    compiled = torch.compile(model, backend="eager")
    compiled(torch.randn(5, 6)).sum().backward()
    optimizer.step()
    assert "activation/head/norm" in monitor.get_step_metrics()


@pytest.mark.skipif(not torch_modes.TELLS_EXPORT, reason="before torch 2.7 no values in compiled graphs")
def test_a_part_of_a_model_may_be_compiled() -> None:
    def train(compile_part: bool) -> dict[str, float]:
        torch.manual_seed(1)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if compile_part:
            model.blocks[0].compile(backend="aot_eager", fullgraph=True)
            model.blocks[1] = torch.compile(model.blocks[1], backend="aot_eager", fullgraph=True)  # type: ignore[assignment]
        monitor = watching(regex=".*")(model, model).attach(optimizer)
        for _ in range(3):
            model(torch.randn(5, 6)).sum().backward()
            optimizer.step()
        return monitor.get_step_metrics()

    assert_close([train(True)], [train(False)], 1e-6)


def test_a_module_that_logs_values_of_its_own_compiles_without_them() -> None:
    class Logs(nn.Linear, gradmon.MonitorMixin):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if self.is_monitoring:
                monitor = self.get_module_monitor()
                assert monitor is not None
                monitor.log_tensor("own", y)
            return y

    model = nn.Sequential(Logs(3, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = ModuleMonitor(model)
    monitor.add_activation_metric("norm", metric_regex="^0")
    monitor.attach(optimizer)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        compiled(torch.randn(2, 3)).sum().backward()
        optimizer.step()
    assert counters["stats"]["unique_graphs"] == 1
    assert monitor.get_step_metrics().keys() == {"activation/0/norm"}


@pytest.mark.skipif(not torch_modes.TELLS_EXPORT, reason="before torch 2.7 a strict export refuses modules with hooks")
@pytest.mark.filterwarnings("ignore:torch_gradmon. activations are missing")  # a strict export counts as a compilation
@pytest.mark.parametrize("strict", [False, True])
def test_torch_export_takes_nothing_of_ours(strict: bool) -> None:
    model = Net().eval()
    monitor = watching(regex=".*")(model, model)
    monitor.begin_step(0)
    model.train()
    program = torch.export.export(model, (torch.randn(5, 6),), strict=strict)
    names = [str(node.target) for node in program.graph.nodes]
    assert not any("isfinite" in name or "sums" in name for name in names)
    monitor.detach()
    bare = torch.export.export(model, (torch.randn(5, 6),), strict=strict)
    assert names == [str(node.target) for node in bare.graph.nodes]


def test_a_compiled_transform_of_torch_func_takes_nothing_of_ours() -> None:
    model = nn.Linear(3, 1)
    monitor = ModuleMonitor(model)
    monitor.add_activation_metric("norm")
    monitor.begin_step(0)
    monitor._runtime.captures.modules.install(
        model, monitor._runtime.planner.inventory, monitor._runtime.planner.registry.metrics, 99, False
    )  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(torch.func.vmap(model), backend="aot_eager")
        found = compiled(torch.ones(4, 3))
    assert torch.equal(found, model(torch.ones(4, 3)))


def test_hooks_that_come_first_are_inserted_first() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    before = model.register_forward_pre_hook(lambda *_: None)
    monitor = ModuleMonitor(model)
    monitor.add_activation_metric("norm")
    monitor.attach(torch.optim.SGD(model.parameters(), 0.1))
    hooks = model._forward_pre_hooks
    assert [*hooks].index(before.id) > 0, "ours has to see the inputs before a user's hook changes them"
    assert [*dict.keys(hooks)] == [*hooks]
    monitor.detach()
    assert [*hooks] == [before.id]
