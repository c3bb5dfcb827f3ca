"""What the documentation shows runs, and what it names exists."""

from __future__ import annotations

import ast
import doctest
import importlib
import math
import pkgutil
import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_gradmon as gradmon
from examples.plugins.headroom import Headroom
from torch_gradmon.core import formatting
from torch_gradmon.plugins.clipping import ZClip
from torch_gradmon.sinks.delivery import LARGEST
from torch_gradmon.sinks.wandb import AXIS
from torch_gradmon.step import summary
from torch_gradmon.step.planner import PRESETS

from .families import BY_NAME
from .shown_outputs import Printer, agrees, differences, shown, unchecked, uncommented

ROOT = Path(__file__).parent.parent
#: The pages whose blocks run, each in a namespace of its own.
PAGES = {str(path.relative_to(ROOT)): path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))}
_FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>```+|~~~+)(?P<language>[^\n`]*)\n(?P<body>.*?)^(?P=indent)(?P=fence)[ ]*$", re.M | re.S
)
_NOT_RUN = re.compile(r"<!--\s*not run:\s*(?P<reason>[^>]*?)\s*-->\s*\Z")
_MODULES = [gradmon.__name__, *(found.name for found in pkgutil.walk_packages(gradmon.__path__, "torch_gradmon."))]
_PYTHON = {"python", "py", "python3"}
_OPTIONAL = {
    "numpy",  # of triton
    "triton",
    "rich",
    "tqdm",
    "wandb",
    "tensorboard",
    "trackio",
    "lightning",
    "ignite",
    "transformers",
    "accelerate",
    "mcp",
    "plotly",
    "matplotlib",
    "pandas",
    "pyarrow",
    "jinja2",
}


def _blocks(text: str) -> list[tuple[str, str, int, str | None]]:
    """Fenced blocks as (language, code, line number of the code, why it is not run)."""
    found = []
    for match in _FENCE.finditer(text):
        mark = _NOT_RUN.search(text[: match.start()].rstrip())
        code = re.sub(rf"^{match['indent']}", "", match["body"], flags=re.M)
        language = (match["language"].split() or [""])[0].lower()
        found.append((language, code, text[: match.start("body")].count("\n") + 1, mark["reason"] if mark else None))
    return found


def _text(page: str) -> str:
    return PAGES[page].read_text(encoding="utf-8")


def _all() -> str:
    return "\n".join(map(_text, PAGES))


# what Ignite imports of torch.distributed says this of torch itself
@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", _MODULES)
def test_the_examples_in_docstrings_run(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in _OPTIONAL:
            raise
        pytest.skip(f"{error.name} is not installed")
    assert doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS).failed == 0


def test_there_are_examples_in_docstrings() -> None:
    modules = [
        importlib.import_module(f"torch_gradmon.{name}")
        for name in ("core.keys", "core.errors", "core.formatting", "monitor.compatibility", "spikes.detector")
    ]
    found = [test for module in modules for test in doctest.DocTestFinder(exclude_empty=True).find(module)]
    assert sum(bool(test.examples) for test in found) >= 6


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ([formatting.factor_text(factor) for factor in (1.2345, 987.6, 12345.6, 1.2e9)], ["1.23", "988", "12,346", "1.2e+09"]),
        (formatting.times(1.2345), "1.23 times"),
        (
            [formatting.is_multiple(3.0, 1.0), formatting.is_multiple(0.5, 1.0), formatting.is_multiple(1.0, 1e-165)],
            [True, False, False],
        ),
        ([formatting.is_multiple(1.0, 0.0), formatting.is_multiple(1.0, None)], [False, False]),
        ([formatting.significant(0.123456), formatting.significant(None)], ["0.1235", "-"]),
        ([formatting.number(value) for value in (0.0, 1.0, 1.23456, 120.0, 1234.6)], ["0", "1.00", "1.23", "120", "1235"]),
        ([formatting.number(value) for value in (0.000123, -1.5e-11, math.nan, None)], ["1.23e-4", "-1.5e-11", "nan", "-"]),
        ([formatting.percent(share) for share in (0.0, 0.00004, 0.004, 0.123)], ["0%", "<0.1%", "0.4%", "12.3%"]),
        ([formatting.percent(share) for share in (1.0, None)], ["100%", "-"]),
        ([formatting.part_of(2, 5), formatting.part_of(0, 5), formatting.part_of(0, 0)], ["2 of 5", "5 same", "-"]),
        ([formatting.duration(seconds) for seconds in (-1, 0.2, 42, 60, 125)], ["0 s", "0 s", "42 s", "1 min 0 s", "2 min 5 s"]),
        ([formatting.duration(seconds) for seconds in (3600, 7325, 180_000)], ["1 h 0 min", "2 h 2 min", "2 d 2 h"]),
        ([formatting.step_range(3, 3), formatting.step_range(3, 5)], ["step 3", "steps 3 to 5"]),
        ([formatting.listed("abcd", 2), formatting.listed("ab", 2)], ["a, b and 2 more", "a, b"]),
        ([formatting.also_in("abc"), formatting.also_in("a")], [" Also in b, c.", ""]),
        (
            [formatting.placed("spike", "fc.weight"), formatting.placed("loss-plateau", "")],
            ["spike in fc.weight", "loss-plateau"],
        ),
        (formatting.printable("layer\x1b[31m\nis well"), r"layer\x1b[31m\nis well"),
        (formatting.cut_start("blocks.11.attention.weight", 16), "…ttention.weight"),
        (formatting.cut_middle("blocks.11.attention.weight", 16), "blocks.…n.weight"),
    ],
)
def test_what_messages_and_tables_are_made_of(written: object, expected: object) -> None:
    assert written == expected


# --- pages -------------------------------------------------------------------------------------------------------------------------


def test_the_extractor_finds_blocks_and_their_marks() -> None:
    text = (
        "a\n```python\nx = 1\n```\n\n<!-- not run: needs a GPU -->\n```py\ny\n```\n\n"
        "- item\n\n  ```python\n  z = 2\n    \n  ```\n```\nplain\n```\n"
    )
    assert _blocks(text) == [
        ("python", "x = 1\n", 3, None),
        ("py", "y\n", 8, "needs a GPU"),
        ("python", "z = 2\n  \n", 14, None),
        ("", "plain\n", 18, None),
    ]


def _world() -> dict[str, Any]:
    """Names that a reader's own program has: a page need not make a model in every block."""
    model = BY_NAME["mlp"].model()
    return {
        "__name__": "page",
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "dataloader": [(torch.randn(8, 10), torch.randn(8, 3)) for _ in range(5)],
        "criterion": torch.nn.MSELoss(),
    }


@pytest.mark.parametrize("page", PAGES)
def test_a_page_uses_what_its_blocks_define(page: str) -> None:
    code = "\n".join(code for language, code, _, why in _blocks(_text(page)) if language in _PYTHON and why is None)
    defined = [node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)]
    assert [name for name in defined if len(re.findall(rf"\b{name}\b", code)) < 2] == []


@pytest.mark.parametrize("page", [page for page in PAGES if any(of in _PYTHON for of, *_ in _blocks(_text(page)))])
def test_the_python_of_a_page_runs_from_top_to_bottom_and_prints_what_it_shows(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # run directories that the page makes
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "plugins"))  # files that the page has the reader copy
    torch.manual_seed(0)
    printer = Printer()
    namespace = {**_world(), "print": printer}
    wrong: list[str] = []
    before: tuple[str, int] | None = None  # the block of Python right above, and its line
    for language, code, line, reason in _blocks(_text(page)):
        if language == "text" and before is not None and before[1] + before[0].count("\n") + 3 == line:
            printed = uncommented(before[0], printer, before[1] - 1)
            if not agrees(f"e.g. {code}", printed):
                wrong.append(f"line {line}: the text block is not what is printed:\n{printed}")
        before = None
        if language in _PYTHON and reason is None:
            with warnings.catch_warnings():
                if 'on_spike="skip"' in code:  # where a skip is shown, it is told
                    warnings.filterwarnings("ignore", "torch_gradmon: .*(step 30: .*; skipped$|after the spike of step 30)")
                if "# the fault" in code:  # the README shows the default, which warns
                    warnings.filterwarnings("ignore", "torch_gradmon: .*(step 150: |after the spike of step 150)")
                if "Foresight()" in code:
                    warnings.filterwarnings("ignore", "torch_gradmon: .*step 265: a divergence may be near")
                # line numbers of the page in a traceback
                exec(compile("\n" * (line - 1) + code, str(PAGES[page]), "exec"), namespace)
            wrong += differences(code, printer, line - 1)
            before = code, line
    assert not wrong, "\n".join(wrong)


def test_outputs_that_nobody_checks_are_not_shown_as_such() -> None:
    not_run = {
        f"{page}, block at line {line}": code
        for page in PAGES
        for of, code, line, why in _blocks(_text(page))
        if of in _PYTHON and why
    }
    files = [*ROOT.glob("examples/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]
    assert unchecked({**not_run, **{str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}}) == []


@pytest.mark.parametrize(
    ("comment", "printed", "is_right"),
    [
        ("60", "60\n", True),
        ("31", "60\n", False),
        ("a  b", "a\nb\n", True),
        ("0.12", "0.121\n", False),
        ("about 0.12", "0.121\n", True),
        ("about 0.12", "0.14\n", False),
        ("about 0.12", "-0.12\n", False),
        ("about 0", "0.0001\n", False),
        ("about 0.12 of 3", "0.13 of 3\n", True),
        ("about 0.12 of 3", "0.13 from 3\n", False),
        ("about [('4.weight', 0.49), ...]", "[('4.weight', 0.487), ('4.bias', 0.17)]\n", True),
        ("e.g. step 3: 1.5e-3", "step 7: 12,000\n", True),
        ("e.g. step 3: 1.5e-3", "stop 7: 12,000\n", False),
        ("e.g. 1 ... 2", "7 apples and 8\n", True),
        ("...", "whatever\n", True),
    ],
)
def test_a_shown_output_is_compared_as_its_mark_says(comment: str, printed: str, is_right: bool) -> None:
    assert agrees(comment, printed) is is_right


def test_the_checker_of_outputs_finds_what_is_printed_where() -> None:
    code = (
        "for i in range(3):\n    print(i)  # 2\nprint(\n    1,\n    2,\n)  # 1 3\nif True:\n    print('x')\n"
        "print('never') if False else None\ny = 1  # not an output\nwhile False:\n    print(y)  # 1\n"
    )
    printer = Printer()
    exec(compile("\n\n" + code, "code", "exec"), {"print": printer})
    assert [each.comment for each in shown(code)] == ["2", "1 3", None, "1"]
    assert differences(code, printer, 2) == [
        "line 8: shows '1 3' and prints '1 2\\n'",
        "line 14: shows '1' and prints None",
    ]
    assert uncommented(code, printer, 2) == "x\n"
    assert unchecked({"place": code, "other": "print(1)  # e.g. 2\nprint(2)\n"}) == ["place:2: 2", "place:6: 1 3", "place:12: 1"]


def test_blocks_that_do_not_run_compile_and_say_why() -> None:
    for page in PAGES:
        for language, code, line, reason in _blocks(_text(page)):
            if language in _PYTHON and reason is not None:
                assert len(reason) > 5, f"{page}:{line}: the mark needs a reason"
                compile(code, f"{page}:{line}", "exec")


def _commands(page: str) -> list[tuple[int, list[str]]]:
    """The lines of shell blocks, word by word; of a console those behind a prompt, for the others are its answers."""
    found = []
    for language, code, line, _ in _blocks(_text(page)):
        if language in {"bash", "sh", "shell", "console"}:
            for offset, text in enumerate(code.splitlines()):
                if language == "console" and not text.startswith("$ "):
                    continue
                words = shlex.split(text.strip().removeprefix("$ "), comments=True)
                if words:
                    found.append((line + offset, words))
    return found


def test_the_make_targets_that_pages_name_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {name for names in re.findall(r"^([a-z][a-z -]*):", makefile, re.M) for name in names.split()}
    named = {
        word
        for page in PAGES
        for _, words in _commands(page)
        if words[0] == "make"
        for word in words[1:]
        if "=" not in word and not word.startswith("-")
    }
    named |= {target for span in re.findall(r"`make ([a-z-]+)", _all()) for target in [span]}
    assert named <= targets
    phony = re.search(r"^\.PHONY:(.*)$", makefile, re.M)
    assert phony is not None
    assert set(phony[1].split()) <= targets


@pytest.mark.ranks
def test_the_console_command_that_pages_name_is_installed_by_us() -> None:
    scripts = re.search(
        r"^\[project\.scripts\]\n(.*?)(?:\n\n|\n\[)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M | re.S
    )
    assert scripts is not None
    ours = dict(re.findall(r'^(\S+) = "(\S+)"$', scripts[1], re.M))
    for place, words in [(f"{page}:{line}", words) for page in PAGES for line, words in _commands(page)]:
        known = {
            "make",
            "git",
            "cd",
            "pip",
            "python",
            "python3",
            "uv",
            "pytest",
            "ruff",
            "mypy",
            "export",
            "torchrun",
            "ssh",
            "rsync",
            *ours,
        }
        program = next((word for word in words if "=" not in word), "export")
        assert program in known, f"{place}: what is {program}?"
    for target in ours.values():
        module, _, function = target.partition(":")
        assert (ROOT / (module.replace(".", "/") + ".py")).is_file(), f"{module} of {function} is missing"


@pytest.mark.parametrize("page", PAGES)
def test_the_files_and_pages_that_a_page_names_exist(page: str) -> None:
    text = _text(page)
    prose = _FENCE.sub("", text)
    links = re.findall(r"\]\(([^)\s]+)", prose) + re.findall(r'(?:src|href|srcset)="([^"\s]+)"', prose)
    local = {link.partition("#")[::2] for link in links if not re.match(r"[a-z]+:", link)}
    folder = PAGES[page].parent
    missing = {path for path, _ in local if path and not (folder / path).exists()}
    folders = "torch_gradmon|tests|examples|images|benchmarks|docs"
    named = {path.rstrip("/.") for path in re.findall(rf"`((?:{folders})/[^`\s*<{{]*)`", prose)}
    missing |= {path for path in named if not (ROOT / path).exists()}
    assert sorted(missing) == []
    for path, anchor in local:
        target = folder / path if path else PAGES[page]
        assert not anchor or anchor in _anchors(target.read_text(encoding="utf-8")), f"{page}: {path}#{anchor}"


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+?)\s*$", _FENCE.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_picture_has_its_command_beside_it() -> None:
    rules = (ROOT / "Makefile").read_text(encoding="utf-8")
    makes = dict(re.findall(r"!\[[^\]]*\]\((?:\.\./)*images/(\S+)\)\n\n_Made by `([^`]+)`", _all()))
    made = set(re.findall(r"!\[[^\]]*\]\(pictures/(\S+)\)\n\n_Made by `make gallery`", _all()))
    assert made == {path.name for path in (ROOT / "docs" / "gallery" / "pictures").iterdir()}
    assert set(makes) == {path.name for path in (ROOT / "images").iterdir()}
    for picture, command in makes.items():
        rule = (
            rf"^{command[5:]}:"
            if command.startswith("make ")
            else rf"^\t\$\(VENV\)/bin/{re.escape(command.removeprefix('.venv/bin/'))}$"
        )
        assert re.search(rule, rules, re.M), picture


def test_methods_of_monitors_and_runs_that_pages_name_exist() -> None:
    named = set(re.findall(r"\b(monitor|run)\.([a-z]\w*)", re.sub(r"by hand: [\w.]+|\bmonitor\.py\b", "", _all())))
    known = {"monitor": dir(gradmon.ModuleMonitor), "run": dir(gradmon.Run)}
    assert sorted(f"{owner}.{name}" for owner, name in named if name not in known[owner]) == []


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = set()
    for page in PAGES:
        for code in re.findall(r"```\{toctree\}\n(.*?)```", _text(page), re.S):
            names = [line for line in code.splitlines() if line and not line.startswith(":")]
            listed |= {str((PAGES[page].parent / f"{name}.md").resolve().relative_to(ROOT)) for name in names}
    assert listed == PAGES.keys() - {"README.md", "docs/index.md"}


_PUBLIC = {
    "torch_gradmon": gradmon,
    "torch_gradmon.sinks": gradmon.sinks,
    "torch_gradmon.spikes": gradmon.spikes,
    "torch_gradmon.plugins": importlib.import_module("torch_gradmon.plugins"),
    "torch_gradmon.testing": gradmon.testing,
}


def test_the_reference_has_every_public_name_and_no_private_module() -> None:
    described = set(re.findall(r"^\.\. auto\w+:: ([\w.]+)$", _text("docs/reference/api.md"), re.M))
    public = {f"{name}.{each}" for name, module in _PUBLIC.items() for each in getattr(module, "__all__", ())}
    # the same classes under a second name, and what feeds a sink
    public -= {"torch_gradmon.spikes.SpikeDetector", "torch_gradmon.plugins.SpikeEvent", "torch_gradmon.sinks.FilteredSink"}
    assert public <= described
    modules = {name.rpartition(".")[0] for name in described}
    trainers = {f"torch_gradmon.integrations.{name}" for name in ("lightning", "transformers", "ignite", "accelerate")}
    of_results = {f"torch_gradmon.{name}" for name in ("plugins.reactions", "plugins.determinism", "analysis.diff")}
    assert modules == {*_PUBLIC, *trainers, *of_results, "torch_gradmon.plugins.clipping", "torch_gradmon.analysis.width_sweep"}


def test_the_gallery_has_a_page_for_every_rule_and_for_families_of_healthy_runs() -> None:
    from benchmarks.faults import FAULTS
    from benchmarks.gallery.healthy import FAMILIES
    from benchmarks.gallery.texts import WHY

    rules = {training.rule for training in FAULTS}
    assert rules == WHY.keys()
    pages = {path.stem for path in (ROOT / "docs" / "gallery").glob("*.md")}
    assert pages == {"index", *rules, *FAMILIES}
    assert len(rules) >= 38
    assert len(FAMILIES) >= 8
    for rule in rules:
        assert f" {rule} " in _text(f"docs/gallery/{rule}.md").partition("```text")[2]
    assert all(path.stat().st_size < 150_000 for path in (ROOT / "docs" / "gallery" / "pictures").iterdir())


def test_the_readme_is_one_page() -> None:
    text = _text("README.md")
    assert len(text.splitlines()) <= 250
    assert len(text.encode()) <= 14_000


# --- keys ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [False, True])
def test_every_documented_whole_model_key_appears(clip: bool) -> None:
    model = BY_NAME["mlp"].model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    seen: set[str] = set()
    for batch in BY_NAME["mlp"].batches(25):
        optimizer.zero_grad()
        BY_NAME["mlp"].loss(model, batch).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        seen |= monitor.get_step_metrics().keys()
    clipping = {"gradmon/grad_norm_after_clip", "gradmon/clip_fraction"}
    assert seen == {f"gradmon/{name}" for name in summary.STANDARD} - (set() if clip else clipping)
    for preset in PRESETS.values():
        assert set(preset.keys) <= set(summary.KEY_DOCUMENTATION)
    assert (len(PRESETS["minimal"].keys), len(PRESETS["standard"].keys)) == (9, 14)
    assert all(text.strip() and "\n" not in text for text in summary.KEY_DOCUMENTATION.values())


def test_pages_name_no_key_that_does_not_exist() -> None:
    named = set(re.findall(r"\bgradmon/([a-z][a-z0-9_]*)", _all()))
    of_sinks = {AXIS.removeprefix("gradmon/"), f"grad_norm{LARGEST}"}
    assert named <= set(summary.KEY_DOCUMENTATION) | set(summary.ON_REQUEST) | set(summary.BATCH_DOCUMENTATION) | of_sinks


def test_what_is_there_on_request_is_described() -> None:
    model = BY_NAME["mlp"].model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = BY_NAME["mlp"].batches(1)[0]
    headroom = Headroom(lambda: BY_NAME["mlp"].loss(model, batch), every=1)
    monitor = gradmon.watch(model, optimizer, preset="minimal", on_spike="skip", plugins=[headroom])
    for batch in BY_NAME["mlp"].batches(2):
        BY_NAME["mlp"].loss(model, batch).backward()
        monitor.clip_grad_norm_(ZClip(max_norm=1.0))
        monitor.clip_grad_norm_("adagc")
        optimizer.step()
    described = monitor.describe()
    assert {f"gradmon/{name}" for name in summary.ON_REQUEST} <= described.keys() & monitor.get_step_metrics().keys()


# --- figures of the README -----------------------------------------------------------------------------------------------------------


def test_readme_comparison_has_figures_of_benchmark_page() -> None:
    page = _text("docs/benchmarks.md").partition("**CPU, 1 thread**")[2].partition("**CPU, 2 threads**")[0]
    rows = [row for row in page.partition("times as fast as")[0].splitlines() if row.startswith("| ")]
    table = {row.split(" | ")[0].strip("| "): re.findall(r"([\d.]+) \(", row) for row in rows}
    readme = _text("README.md")
    row = next(line for line in readme.splitlines() if line.startswith("| time for the gradients of GPT-2"))
    shown = re.findall(r"(?<= )\d+\.\d+(?= for)", row)
    contenders = (
        "torch_gradmon.ModuleMonitor, five metrics by key",
        "torch-module-monitor, five metrics",
        "wandb.watch, its hooks",
    )
    norms = "Lightning grad_norm, norms only"
    assert shown == [table[name][0] for name in (*contenders, norms)]
    ours = table[contenders[0]]
    assert f"({table[norms][1]}, ours {ours[1]})" in readme
    assert f"take {table['torch_gradmon, eager, all statistics, no keys'][0]}." in readme


def test_first_hundred_lines_show_what_package_is_for() -> None:
    for page in ("README.md", "docs/getting-started.md"):
        lines = "\n".join(_text(page).splitlines()[:100])
        for text in (
            'add_gradient_metric("norm", metric_regex=',
            "lambda g:",
            "gradient_before_clip/",
            "get_step_metrics()",
            'log_to="wandb"',
            "SummaryWriter(",
        ):
            assert text in lines, (page, text)
