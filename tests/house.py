"""The house in figures: what ``tests/test_house.py`` holds. ``python -W ignore -m tests.house`` prints the tables, ready to paste.

The source is read, not imported, for what it says. Two processes of their own count what a program loads and what a step calls.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
LEDGER = ROOT / "docs" / "contributing" / "ledger.md"

Targets = dict[str, tuple[float, float | None]]

#: Each measure with its target and, while that is missed, what was measured last. The second figure may only move down, and becomes
#: None when the target is met. First what the source says:
SOURCE: Targets = {
    "entries at the top of the package": (15, 17),
    "lines of Python": (40_000, 48_420),
    "files": (165, None),
    "largest file": (1_300, None),
    "functions over 60 lines": (0, None),
    "classes over 450 lines (facade apart)": (0, None),
    "import cycles (all kinds)": (0, None),
    "pairs of rooms that import each other": (0, None),
    "pairs of folders that import each other": (0, None),
    "files that only one neighbour in their folder imports": (10, None),
    "methods of Plugin": (14, None),
}
#: What a program loads, and what a step calls on Python 3.11 with the built kernel.
PROGRAM: Targets = {
    "gradmon --help imports torch": (0, None),
    "files that watch() loads": (80, None),
    "lines that watch() loads": (16_000, 20_503),
    "steady step: files": (25, None),
    "steady step: calls": (200, None),
    "steady step: depth of the stack": (10, None),
    "calls for each further tensor": (2, None),
    "steady step, no sink, no run directory: calls": (100, None),
    "step under audit: files": (50, None),
    "step under audit: calls": (450, None),
    "step that is not monitored: calls": (12, None),
}

_LONG_FUNCTION, _LARGE_CLASS = 60, 450
#: The facade has one method for each thing that a user can ask for.
_FACADE = "ModuleMonitor"


# --- what the source says ----------------------------------------------------------------------------------------------------------


class Package:
    """The Python files of a package, and what they import of it: for types and within functions too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.texts = {self._name(file): file.read_text(encoding="utf-8") for file in sorted(path.rglob("*.py"))}
        self.trees = {name: ast.parse(text) for name, text in self.texts.items()}
        self._packages = {self._name(file) for file in path.rglob("__init__.py")}

    def _name(self, file: Path) -> str:
        return ".".join((self.path.name, *file.relative_to(self.path).with_suffix("").parts)).removesuffix(".__init__")

    @cached_property
    def lines(self) -> dict[str, int]:
        return {name: len(text.splitlines()) for name, text in self.texts.items()}

    @cached_property
    def rooms(self) -> dict[str, int]:
        """Lines of each folder below the package, and under its own name those of the files beside them."""
        found: dict[str, int] = defaultdict(int)
        for name, lines in self.lines.items():
            _, _, room = self.room(name).partition(".")
            found[room if (self.path / room).is_dir() and room else self.path.name] += lines
        return dict(found)

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        return {name: self._imported(name) for name in self.trees}

    def _imported(self, name: str) -> set[str]:
        found = set()
        for node in ast.walk(self.trees[name]):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                above = name.split(".")[: len(name.split(".")) - node.level + (name in self._packages)] if node.level else []
                source = ".".join([*above, *([node.module] if node.module else [])])
                inner = {alias.name: f"{source}.{alias.name}" for alias in node.names}
                found |= {path if path in self.trees else source for path in inner.values()}
        return {
            each for each in found & self.trees.keys() - {name} if not (name in self._packages and each.startswith(f"{name}."))
        }

    @cached_property
    def cycles(self) -> set[frozenset[str]]:
        """Groups of files in which each one imports all others, over some way."""
        reached = {name: self._reached(name) for name in self.imports}
        return {
            frozenset(other for other in reached[name] if name in reached[other]) for name in reached if name in reached[name]
        }

    def _reached(self, name: str) -> set[str]:
        found: set[str] = set()
        waiting = [name]
        while waiting:
            new = self.imports[waiting.pop()] - found
            found |= new
            waiting += new
        return found

    def folder(self, name: str) -> str:
        return name if name in self._packages else name.rpartition(".")[0]

    def room(self, name: str) -> str:
        return ".".join(name.split(".")[:2])

    def mutual(self, place: str) -> set[frozenset[str]]:
        """Pairs of places, ``"folder"`` or ``"room"``, that import each other, and of which none is within the other."""
        place_of = getattr(self, place)
        arrows = {(place_of(name), place_of(other)) for name, others in self.imports.items() for other in others}
        pairs = {frozenset(arrow) for arrow in arrows if arrow[::-1] in arrows and arrow[0] != arrow[1]}
        return {pair for pair in pairs if not any(f"{a}.".startswith(f"{b}.") for a in pair for b in pair - {a})}

    @cached_property
    def with_one_neighbour(self) -> set[str]:
        """Files whose only importer is beside them: parts of it, if they guard no optional import."""
        users: dict[str, set[str]] = defaultdict(set)
        for name, others in self.imports.items():
            for other in others:
                users[other].add(name)
        parents = {name: name.rpartition(".")[0] for name in self.trees}
        alone = {name: next(iter(found)) for name, found in users.items() if len(found) == 1 and name not in self._packages}
        return {name for name, user in alone.items() if parents[name] == parents[user]}

    def _nodes(self, *kinds: type[ast.AST]) -> list[Any]:
        return [node for tree in self.trees.values() for node in ast.walk(tree) if isinstance(node, kinds)]

    @cached_property
    def long_functions(self) -> list[str]:
        functions = self._nodes(ast.FunctionDef, ast.AsyncFunctionDef)
        return [each.name for each in functions if each.end_lineno - each.body[0].lineno >= _LONG_FUNCTION]

    @cached_property
    def large_classes(self) -> list[str]:
        classes = [node for node in self._nodes(ast.ClassDef) if node.name != _FACADE]
        return [node.name for node in classes if node.end_lineno - node.lineno >= _LARGE_CLASS]

    def methods(self, of: str) -> list[str]:
        (found,) = (node for node in self._nodes(ast.ClassDef) if node.name == of)
        return [node.name for node in found.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]

    def entries(self) -> list[str]:
        """What a listing of the package shows, without data."""
        found = [path for path in self.path.iterdir() if path.name != "__pycache__"]
        return [path.name for path in found if path.suffix in (".py", ".typed") or (path.is_dir() and any(path.rglob("*.py")))]


def read() -> dict[str, float]:
    """What the source says, by measure."""
    package = Package(ROOT / "torch_gradmon")
    return {
        "entries at the top of the package": len(package.entries()),
        "lines of Python": sum(package.lines.values()),
        "files": len(package.texts),
        "largest file": max(package.lines.values()),
        "functions over 60 lines": len(package.long_functions),
        "classes over 450 lines (facade apart)": len(package.large_classes),
        "import cycles (all kinds)": len(package.cycles),
        "pairs of rooms that import each other": len(package.mutual("room")),
        "pairs of folders that import each other": len(package.mutual("folder")),
        "files that only one neighbour in their folder imports": len(package.with_one_neighbour),
        "methods of Plugin": len(package.methods("Plugin")),
    }


# --- what a program runs -----------------------------------------------------------------------------------------------------------


def run() -> dict[str, float]:
    """What a program loads and what a step calls, by measure; counted in fresh interpreters."""
    return {**_output("--help"), **_output("--steps")}


def _output(argument: str) -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.house", argument]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _help() -> dict[str, float]:
    from torch_gradmon.cli.main import main

    try:
        main(["--help"])
    except SystemExit:
        pass
    return {"gradmon --help imports torch": int("torch" in sys.modules)}


def _steps() -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    loaded = _loaded()  # before a training loads more
    steady, deep, audited = _Trace(455), _Trace(455, hidden=11), _Trace(55)
    return {
        "files that watch() loads": len(loaded),
        "lines that watch() loads": sum(loaded),
        "steady step: files": len(steady.files),
        "steady step: calls": steady.calls,
        "steady step: depth of the stack": steady.deepest,
        "calls for each further tensor": round((deep.calls - steady.calls) / 20, 1),
        "steady step, no sink, no run directory: calls": _Trace(455, outlets=False).calls,
        "step under audit: files": len(audited.files),
        "step under audit: calls": audited.calls,
        "step that is not monitored: calls": _Trace(455, every=1000).calls,
    }


def _loaded() -> list[int]:
    """Lines of each file of the package that a program with a watched model has loaded."""
    from torch import nn, optim

    import torch_gradmon

    model = nn.Linear(4, 4)
    torch_gradmon.watch(model, optim.AdamW(model.parameters()))
    files = [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "torch_gradmon"]
    return [len(Path(file).read_text(encoding="utf-8").splitlines()) for file in files if file]


class _Trace:
    """Calls of the package's functions in one step of a training: before it the loop is known, and no update is due in it.

    Args:
        at: the step, or one of the two behind it. In step 55 the audit looks at the loop, in step 455 it rests.
        hidden: hidden layers, of two parameters each.
        outlets: with a run directory and a sink.
        every: the cadence.
    """

    def __init__(self, at: int, hidden: int = 1, outlets: bool = True, every: int = 1) -> None:
        import tempfile

        import torch
        from torch import nn

        import torch_gradmon

        self._package = str(Path(torch_gradmon.__file__).parent)
        self.files: set[str] = set()
        self.calls = self.deepest = self._depth = 0
        torch.manual_seed(0)
        widths = [8, *[16] * (hidden + 1)]
        layers = [layer for sizes in pairwise(widths) for layer in (nn.Linear(*sizes), nn.ReLU())]
        model = nn.Sequential(*layers, nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        with (
            tempfile.TemporaryDirectory() as run_dir,
            torch_gradmon.watch(model, optimizer, every=every, run_dir=run_dir if outlets else None) as monitor,
        ):
            if outlets:
                monitor.add_sink(lambda values, step: None)
            found: list[tuple[int, int, set[str]]] = []
            for step in range(at + 3):
                self.calls, self.deepest, self.files = 0, 0, set()
                sys.setprofile(self._event if step >= at else None)
                optimizer.zero_grad()
                model(torch.randn(4, 8)).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                sys.setprofile(None)
                found.append((self.calls, self.deepest, self.files))
        # once a second a step looks at requests of other processes and at its files
        self.calls, self.deepest, self.files = min(found[at:], key=lambda each: each[0])

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if not file.startswith(self._package):
            return
        if event == "call":
            self.files.add(file)
            self.calls += 1
            self._depth += 1
            self.deepest = max(self.deepest, self._depth)
        elif event == "return":
            self._depth -= 1


# --- the tables --------------------------------------------------------------------------------------------------------------------

#: A room's row in the ledger: what is in it, its lines now, and its budget.
_ROW = re.compile(r"^\| `(\w+)/?` \|(.*)\| ([\d,]+) \| ([\d,]+) \|$", re.M)


def ledger() -> dict[str, tuple[int, int]]:
    """Lines now and budget of each room, as the page has them."""
    rows = _ROW.findall(LEDGER.read_text(encoding="utf-8"))
    return {room: (int(now.replace(",", "")), int(budget.replace(",", ""))) for room, _, now, budget in rows}


def tables() -> str:
    """The tables of this file and that of the ledger, with the values measured now."""
    rooms = Package(ROOT / "torch_gradmon").rooms
    page = LEDGER.read_text(encoding="utf-8")
    rows = [_with_lines(match, rooms.get(match[1], 0)) for match in _ROW.finditer(page)]
    return "\n".join([*_table("SOURCE", SOURCE, read()), *_table("PROGRAM", PROGRAM, run()), "", *rows])


def _with_lines(row: re.Match[str], lines: int) -> str:
    start, end = (place - row.start() for place in row.span(3))
    return f"{row[0][:start]}{lines:,}{row[0][end:]}"


def _table(name: str, targets: Targets, measured: dict[str, float]) -> list[str]:
    pairs = {each: (target, measured[each]) for each, (target, _) in targets.items()}
    rows = [f'    "{each}": ({target:_}, {f"{got:_}" if got > target else None}),' for each, (target, got) in pairs.items()]
    return [f"{name}: Targets = {{", *rows, "}"]


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps({"--help": _help, "--steps": _steps}[sys.argv[1]]()))
    else:
        print(tables())
