"""The demo's table says what plain torch says, and the command line helps or fails in one line."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import warnings
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_gradmon as gradmon

from . import forked

pytestmark = pytest.mark.extra

STEPS, SEED = 23, 7  # the last step that measures updates is number 20
_SEEN = ("before", "after", "parameter", "update")
_BLOCKED = "import sys\nsys.modules[{name!r}] = None\nfrom torch_gradmon.cli.main import main\nsys.exit(main(['demo']))"


def _sizes() -> Any:
    from torch_gradmon.cli.demo_model import Sizes

    return Sizes(blocks=2, width=16, heads=2, context=12, batch=3)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from torch_gradmon.cli.demo import demo

    run_dir = tmp_path_factory.mktemp("demo") / "run"
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.delenv("GRADMON_DISABLE", raising=False)
        # the text, and with it the course of the training, is another one in each version of Python
        warnings.filterwarnings("ignore", r"torch_gradmon: .*step \d+: grad_norm", gradmon.GradmonWarning)
        yield demo(STEPS, run_dir, run_dir.parent / "pictures" / "table.svg", SEED, _sizes())


@pytest.fixture(scope="module")
def plain() -> tuple[list[dict[str, dict[str, Tensor]]], list[float]]:
    """The same training without a monitor: by step gradients before and after the clip, parameters and updates, and its loss."""
    from torch_gradmon.cli.demo import LEARNING_RATE, MAX_NORM, WARM_UP
    from torch_gradmon.cli.demo_model import CharacterGPT, corpus, draw

    torch.manual_seed(SEED)
    _, data, characters = corpus()
    model, generator = CharacterGPT(characters, _sizes()), torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    steps, losses = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(*draw(data, _sizes(), generator))
        loss.backward()
        named = dict(model.named_parameters())
        seen = {"before": {name: p.grad.double() for name, p in named.items()}}  # double() copies
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        seen["after"] = {name: p.grad.double() for name, p in named.items()}
        seen["parameter"] = {name: p.detach().double() for name, p in named.items()}
        optimizer.step()
        seen["update"] = {name: p.detach().double() - seen["parameter"][name] for name, p in named.items()}
        schedule.step()
        steps.append(seen)
        losses.append(loss.item())
    return steps, losses


def _all(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def _middle(values: list[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


def test_every_number_in_the_table_is_that_of_a_plain_loop(finished: Any, plain: Any) -> None:
    steps, _ = plain
    assert sorted(row.name for row in finished.rows) == sorted(steps[0]["before"])
    for row in finished.rows:
        before, after, parameter, update = ([seen[what][row.name] for seen in steps] for what in _SEEN)
        norms = [each.norm().item() for each in before]
        shares = [norm**2 / _all(seen["before"]).norm().item() ** 2 for norm, seen in zip(norms, steps, strict=True)]
        ratios = [(update[step].norm() / parameter[step].norm()).item() for step in (0, 10, 20) if parameter[step].norm() > 0]
        assert row.norm == pytest.approx(_middle(norms), rel=1e-6), row
        assert (row.largest, row.at) == (pytest.approx(max(norms), rel=1e-6), norms.index(max(norms))), row
        assert row.clipped == pytest.approx(_middle([each.norm().item() for each in after]), rel=1e-6), row
        assert row.share == pytest.approx(sum(shares) / STEPS, rel=1e-6), row
        assert row.update == pytest.approx(_middle(ratios), rel=1e-6), row
        assert row.zeros == pytest.approx(_middle([(each.abs() <= 1e-8).double().mean().item() for each in before]), rel=1e-6), (
            row
        )
    assert sum(row.share for row in finished.rows) == pytest.approx(1)


def test_the_test_sees_a_clip_and_some_sparsity(finished: Any, plain: Any) -> None:
    assert all(row.clipped < 0.999 * row.norm for row in finished.rows)
    expected = {name: (tensor.abs() <= 1e-8).double().mean().item() for name, tensor in plain[0][20]["before"].items()}
    with gradmon.load_run(finished.name) as run:
        sparsity = {name: run.series(f"gradient_before_clip/{name}/sparsity")[20] for name in expected}
    assert sparsity == pytest.approx(expected, rel=1e-6)
    assert any(share > 0 for share in sparsity.values())


def test_the_whole_model_values_are_those_of_a_plain_loop(finished: Any, plain: Any) -> None:
    seen, loss = plain[0][20], plain[1][20]
    whole = {what: _all(tensors).norm().item() for what, tensors in seen.items()}
    with gradmon.load_run(finished.name) as run:
        values = run.record(20).metrics
    assert values["gradmon/grad_norm"] == pytest.approx(whole["before"], rel=1e-6)
    assert values["gradmon/grad_norm_after_clip"] == pytest.approx(whole["after"], rel=1e-6)
    assert values["gradmon/update_ratio"] == pytest.approx(whole["update"] / whole["parameter"], rel=1e-6)
    assert values["loss"] == pytest.approx(loss, rel=1e-6)


def test_the_run_and_the_lines_hold_every_step(finished: Any) -> None:
    text = (Path(finished.name) / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    with gradmon.load_run(finished.name) as run:
        assert run.steps == [line["step"] for line in lines] == list(range(STEPS))
        for key in ("loss", "gradmon/grad_norm", "gradient/blocks.0.up.weight/norm", "update/blocks.0.up.weight/norm"):
            assert run.series(key)[20] == pytest.approx(lines[20][key], rel=1e-6)


def test_the_printed_tables_and_the_picture_hold_the_rows(finished: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from torch_gradmon.cli.demo import report
    from torch_gradmon.core.formatting import number, percent

    report(Console(width=80, highlight=False), finished)
    printed = capsys.readouterr().out
    assert all(len(line) <= 80 for line in printed.splitlines() if finished.name not in line)
    assert "overhead_fraction" in printed
    picture = Path(finished.name).parent / "pictures" / "table.svg"
    drawn = "".join(xml.etree.ElementTree.parse(picture).getroot().itertext())
    for row in finished.rows:
        for text in (row.name, number(row.norm), percent(row.share)):
            assert text.replace(" ", "\N{NO-BREAK SPACE}") in drawn
            assert text in printed


@pytest.mark.parametrize("steps", [1, 5])
def test_a_run_too_short_for_a_score_is_shown_all_the_same(steps: int, tmp_path: Path) -> None:
    from torch_gradmon.cli.demo import demo

    assert demo(steps, tmp_path, None, 0, _sizes()).overview.steps == steps


# --- the command line ------------------------------------------------------------------------------------------------------------


def _run(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return forked.run(program, *arguments, environment={**os.environ, "COLUMNS": "80", **environment}, timeout=120)


def _gradmon(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return _run("import sys; from torch_gradmon.cli.main import main; sys.exit(main())", *arguments, **environment)


@pytest.mark.parametrize(("arguments", "told"), [(["--help"], "examples:"), (["demo", "--help"], "-o FILE")])
def test_help_is_printed(arguments: list[str], told: str) -> None:
    done = _gradmon(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert told in done.stdout


def test_the_version_is_printed() -> None:
    assert _gradmon("--version").stdout == f"torch_gradmon {gradmon.__version__}\n"


def test_help_loads_nothing_that_only_the_demo_needs() -> None:
    code = (
        "import sys; from torch_gradmon.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
        "print('loaded', *sorted({'rich', 'pydoc_data', 'torch_gradmon.cli.demo'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.endswith("loaded\n")


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        ([], 2, "name a command"),
        (["dmeo"], 2, "invalid choice: 'dmeo'; did you mean demo?"),
        (["why", "runs/demo", "--stp", "3"], 2, "unrecognized arguments: --stp 3; did you mean --step"),
        (["--foo", "status", "runs/demo"], 2, "gradmon: error: unrecognized arguments: --foo; known are"),
        (["--foo"], 2, "unrecognized arguments: --foo; known are --help, --version"),
        (["demo", "--steps", "0"], 2, "'0' is not a positive whole number"),
        (["demo", "--steps", "many"], 2, "'many' is not a positive whole number"),
        (["demo", "--sgv", "a.svg"], 2, "--sgv"),
        (["demo", "--run-dir", __file__], 1, "is a file; give a directory"),
        (["demo", "--output", os.path.dirname(__file__)], 2, "is a directory; name a file in it"),
    ],
)
def test_a_wrong_request_fails_in_one_line(arguments: list[str], code: int, told: str, tmp_path: Path) -> None:
    if arguments[:1] == ["demo"] and "--run-dir" not in arguments:
        arguments = [*arguments, "--run-dir", str(tmp_path / "run")]
    done = _gradmon(*arguments)
    assert done.returncode == code
    assert told in done.stderr
    assert done.stderr.startswith("gradmon")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["rich", "tqdm"])
def test_a_missing_package_is_named_in_one_line(name: str) -> None:
    done = _run(_BLOCKED.format(name=name))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f'gradmon: error: the demo needs {name}: pip install "torch_gradmon[cli]"\n'


def test_a_switched_off_monitor_is_told(tmp_path: Path) -> None:
    done = _gradmon("demo", "--run-dir", str(tmp_path / "run"), GRADMON_DISABLE="1")
    assert done.returncode == 1
    assert "GRADMON_DISABLE is set" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_command_has_the_defaults_of_the_function() -> None:
    from torch_gradmon.cli.demo import RUN_DIR, STEPS, demo
    from torch_gradmon.cli.main import command_parser

    options = vars(command_parser().parse_args(["demo"]))
    defaults = {name: parameter.default for name, parameter in inspect.signature(demo).parameters.items()}
    assert (options["steps"], options["run_dir"]) == (STEPS, RUN_DIR)
    names = {"steps": "steps", "run_dir": "run_dir", "output": "svg", "seed": "seed"}
    assert {option: options[option] for option in names} == {option: defaults[name] for option, name in names.items()}
    assert (STEPS - 1) % 10 == 0
