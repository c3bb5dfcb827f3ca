"""The rules of the house: values reach the host in one place, the step machine holds no tensor, what is public is explained.

``lint-imports`` checks that imports go down, and ``tests/test_house.py`` the sizes.
"""

from __future__ import annotations

import ast
import functools
import gc
import inspect
import re
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon.core.records import StepRecord
from torch_gradmon.monitor.machine import StepMachine

from .reads import HostReads
from .test_step_machine import Phase

ROOT = Path(__file__).parent.parent

PACKAGE = Path(gradmon.__file__).parent

FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path for path in PACKAGE.rglob("*.py")
}
OPTIONAL = {
    *(
        "rich",
        "triton",
        "tqdm",
        "wandb",
        "tensorboard",
        "trackio",
        "lightning",
        "pytorch_lightning",
        "ignite",
        "transformers",
        "accelerate",
        "mcp",
        "prometheus_client",
        "opentelemetry",
    ),
    *("plotly", "jinja2", "pandas", "pyarrow", "matplotlib", "scipy"),
}


#: Optional packages that a file may import.
ALSO = {
    "core.formatting": {"tqdm"},
    "cli.commands.common": {"rich"},
    "cli.demo": {"rich", "tqdm"},
    "runs.export": {"pyarrow"},
    "integrations.accelerate": {"accelerate"},
    "integrations.ignite": {"ignite"},
    "integrations.lightning": {"lightning"},
    "integrations.transformers": {"transformers"},
    "analysis.plots.plotly": {"plotly"},
    "analysis.plots.matplotlib": {"matplotlib"},
    "analysis.report.page": {"jinja2", "plotly"},
    "statistics.triton": {"triton"},
    "cli.terminal.tables": {"rich"},
    "cli.terminal.live_loop": {"rich"},
    "server.agents": {"mcp"},
    "analysis.width_sweep.result": {"matplotlib", "plotly"},
}


@functools.cache
def _tree(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text(encoding="utf-8"))


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes except those under ``if TYPE_CHECKING:``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _running(node)


def _imports(name: str) -> set[str]:
    """Absolute dotted names of what a file imports, also inside functions; ``from x import y`` counts as ``x.y``."""
    is_package = FILES[name].name == "__init__.py"
    own = [] if name == "__init__" else name.split(".")
    found = set()
    for node in _running(_tree(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base: list[str] = []
            if node.level:
                inside = own if is_package else own[:-1]
                base = ["torch_gradmon", *inside[: len(inside) - (node.level - 1)]]
            base += node.module.split(".") if node.module else []
            found |= {".".join([*base, alias.name]) for alias in node.names}
    return found


@pytest.mark.parametrize("name", sorted(n for n in FILES if n.split(".")[0] in {"sinks", "spikes", "runs"}))
def test_what_takes_records_knows_no_modules(name: str) -> None:
    assert not [path for path in _imports(name) if path.startswith("torch.nn")]
    assert "nn" not in {node.attr for node in _running(_tree(name)) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_imports_the_standard_library_torch_numpy_and_us(name: str) -> None:
    foreign = {path.split(".")[0] for path in _imports(name)} - set(sys.stdlib_module_names) - {"torch", "numpy", "torch_gradmon"}
    assert foreign <= ALSO.get(name, set())


def test_importing_the_package_imports_no_optional_package() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import torch_gradmon;"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    new = set(
        subprocess.run(
            [sys.executable, "-W", "error", "-W", "ignore:Failed to initialize NumPy", "-c", code],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
    )
    assert "torch_gradmon" in new
    assert new.isdisjoint(OPTIONAL | {"numpy"})  # numpy only where torch brought it in itself


# --- one way to the host -----------------------------------------------------------------------------------------------------------

#: (file, function, call): why it may read a value back
HOST_READS = {
    ("statistics.eager", "_measure", "tolist"): "rows of a first pass, on CPU only",
    ("statistics.cpp", "at_once", "tolist"): "rows of the kernel, on CPU only, where one is not finite",
    ("statistics.cpp", "_scale", "item"): "of a scale that is on the CPU",
    ("statistics.eager", "_row", "item"): "sums of a block, on CPU only",
    ("statistics.eager", "_of_block", "item"): "whether a block has small squares, on CPU only",
    ("statistics.request", "threshold", "float"): "of a number made on the host, once",
    ("statistics.request", "threshold_of_squares", "float"): "of a number made on the host, once",
    ("capture.module_source", "_accumulates", "bool"): "of a list",
    ("capture.module_source", "has_removable_hooks", "bool"): "of a dict",
    ("capture.module_values", "wants", "bool"): "of a tuple",
    ("capture.module_values", "evaluator", "tolist"): "of a table, which is on the host",
    ("capture.module_values", "evaluate", "tolist"): "the same, of the function in it",
    ("capture.module_values", "flush", "tolist"): "of batched small tensors, on CPU only",
    ("capture.hooks", "__bool__", "bool"): "of a list",
}
_READING_METHODS = {"item", "cpu", "tolist", "numpy", "nonzero_static"}


def _host_reads(name: str) -> set[tuple[str, str, str]]:
    found = set()
    for function in ast.walk(_tree(name)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Attribute) and call.func.attr in _READING_METHODS:
                found.add((name, function.name, call.func.attr))
            if isinstance(call.func, ast.Attribute) and call.func.attr == "to" and "cpu" in ast.unparse(call):
                found.add((name, function.name, "to cpu"))
            if isinstance(call.func, ast.Name) and call.func.id in {"float", "int", "bool"} and call.args:
                argument = call.args[0]
                if not isinstance(argument, (ast.Name, ast.Constant)) and not ast.unparse(argument).endswith("numel()"):
                    found.add((name, function.name, call.func.id))
    return found


def test_only_the_arrival_brings_values_to_the_host() -> None:
    measuring = [name for name in FILES if name.startswith(("capture", "statistics"))]
    assert set().union(*(_host_reads(name) for name in measuring)) == set(HOST_READS)
    assert _host_reads("step.buffer"), "the search finds nothing any more"


def _reads_per_step(layers: int, device: str, activations: bool) -> list[Counter[str]]:
    width = 6
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    monitor.add_gradient_metric("std")
    if activations:
        monitor.add_activation_metric("norm")
    counts = []
    for _ in range(5):
        with HostReads(device) as reads:
            optimizer.zero_grad()
            model(torch.randn(4, width, device=device)).square().mean().backward()
            optimizer.step()
            monitor.get_step_metrics()
        counts.append(reads.counts)
    assert "gradient/0.weight/std" in monitor.get_step_metrics()
    return counts


@pytest.mark.parametrize(("activations", "flags_per_layer"), [(False, 0), (True, 1)])
def test_reads_do_not_grow_with_the_number_of_layers(activations: bool, flags_per_layer: int) -> None:
    # on the CPU, where reading is free, each measuring call looks at one flag, and each module's output is a call
    small, large = (_reads_per_step(layers, "cpu", activations) for layers in (2, 12))
    for few, many in zip(small[1:], large[1:], strict=True):  # the first step also measures updates
        assert few["scalar"] > 0, "the search finds nothing any more"
        assert many["scalar"] <= few["scalar"] + 10 * flags_per_layer
        assert few["scalar"] <= 30


@pytest.mark.gpu
@pytest.mark.parametrize("activations", [False, True])
def test_one_copy_brings_a_step_to_the_host(activations: bool) -> None:
    for counts in _reads_per_step(12, "cuda", activations)[1:]:
        assert counts == Counter(copy=1)


# --- the step machine ----------------------------------------------------------------------------------------------------------


def _held(start: object) -> list[object]:
    """All that ``start`` holds, directly or in containers and objects that are defined beside its class."""
    home = type(start).__module__.rpartition(".")[0]
    seen: dict[int, object] = {}
    waiting = [start]
    while waiting:
        if id(each := waiting.pop()) not in seen:
            seen[id(each)] = each
            is_container = isinstance(each, (dict, list, tuple, set, frozenset, deque)) and not isinstance(each, StepRecord)
            if is_container or type(each).__module__.startswith(home):
                waiting += gc.get_referents(each)
    return list(seen.values())


def test_step_machine_holds_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    machines: list[StepMachine] = []
    make = StepMachine.__init__

    def remember(machine: StepMachine, *arguments: Any, **options: Any) -> None:
        machines.append(machine)
        make(machine, *arguments, **options)

    monkeypatch.setattr(StepMachine, "__init__", remember)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in model]
    gradmon.watch(model, *optimizers, on_spike=None)
    (machine,) = machines
    for _ in range(3):
        for moment in (
            lambda: model(torch.randn(4, 6)).square().mean().backward(),
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
            *(optimizer.step for optimizer in optimizers),
            model.zero_grad,
        ):
            moment()
            assert not [each for each in _held(machine) if isinstance(each, torch.Tensor)]
    loss = torch.zeros(())
    monkeypatch.setattr(machine.state, "stride", [loss])
    assert any(each is loss for each in _held(machine)), "the search finds nothing any more"


# --- what is public is explained -----------------------------------------------------------------------------------------------


def _public() -> Iterator[tuple[str, object]]:
    for module in (gradmon, gradmon.plugins, gradmon.sinks, gradmon.spikes, gradmon.testing):
        for name in module.__all__:
            thing = getattr(module, name)
            yield f"{module.__name__}.{name}", thing
            if inspect.isclass(thing):
                for base in thing.__mro__:
                    if base.__module__.startswith("torch_gradmon"):
                        for method, value in vars(base).items():
                            if not method.startswith("_") and (callable(value) or isinstance(value, property)):
                                yield f"{module.__name__}.{name}.{method}", value


def test_every_public_name_has_a_docstring_of_its_own() -> None:
    named = dict(_public())
    assert len(named) > 50
    assert not [name for name, thing in named.items() if not (getattr(thing, "__doc__", None) or "").strip()]


def test_docstring_linter_covers_files_of_public_names() -> None:
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pattern = re.search(r'^"!torch_gradmon/\{(.*)\}" = \["D"\]$', settings, re.M)
    assert pattern is not None
    covered = set(pattern[1].split(","))
    public = [getattr(gradmon, name) for name in gradmon.__all__]
    homes = {thing.__name__ if inspect.ismodule(thing) else thing.__module__ for thing in public}
    files = {str(FILES[home.removeprefix("torch_gradmon.")].relative_to(PACKAGE)) for home in homes}
    assert covered == {"__init__.py", "sinks/**", "integrations/**", *(file for file in files if not file.startswith("sinks/"))}


def test_all_lists_what_the_package_offers_in_order() -> None:
    assert gradmon.__all__ == sorted(gradmon.__all__)
    assert all(hasattr(gradmon, name) for name in gradmon.__all__)


def test_architecture_page_has_every_room_and_existing_files() -> None:
    text = (ROOT / "docs" / "contributing" / "architecture.md").read_text(encoding="utf-8")
    named = {path for path in re.findall(r"`([\w./]+(?:\.py|/))`", text) if "/" in path}
    missing = sorted(path for path in named if not ((ROOT / path).exists() or (PACKAGE / path).exists()))
    assert missing == []
    assert {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")} <= named


def test_the_page_of_the_architecture_has_every_phase_of_a_step() -> None:
    text = (ROOT / "docs" / "contributing" / "architecture.md").read_text(encoding="utf-8")
    assert {phase.name for phase in Phase} <= set(re.findall(r"\b[A-Z]+\b", text))
