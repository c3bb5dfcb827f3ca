"""Every example runs as it stands, and does what it says."""

from __future__ import annotations

import os
import re
import socket
import statistics
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

import torch_gradmon as gradmon

from . import forked

pytestmark = pytest.mark.thorough

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
#: Those of many ranks: one as torchrun starts it, and one whose ranks are forked.
BY_TORCHRUN, FORKED_RANKS = {"ddp"}, {"fsdp2"}
#: torchrun, of which a fork has imported already what it needs.
_TORCHRUN = "from torch.distributed.run import main; main()"
#: What makes them quick: arguments, or constants that are smaller here.
ARGUMENTS = {
    "skip": ["--seeds", "1", "--accidents", "overflow"],
    "article_study": ["--steps", "6", "--rates", "10", "--image", "study.svg"],
}
SMALLER = {
    "skip": {
        "STEPS, RATE, SIZES = 180, 2e-3, Sizes(blocks=2, width=64, heads=2, context=32)": (
            "STEPS, RATE, SIZES = 80, 2e-3, Sizes(blocks=1, width=32, heads=2, context=16)"
        ),
        '"overflow": 150': '"overflow": 66',
    },
    "spikes": {"STEPS = 180": "STEPS = 90", "HUGE_RATE, OVERFLOW = 80, 120, 170": "HUGE_RATE, OVERFLOW = 40, 60, 85"},
    "fsdp2": {"range(61)": "range(21)"},
    "two_runs": {"STEPS, SLIP = 300, 120": "STEPS, SLIP = 50, 20", "range(6)": "range(3)"},
}
NEEDS = {
    "wandb_run": ("wandb",),
    "tensorboard_run": ("tensorboard",),
    "lightning_trainer": ("lightning",),
    "transformers_trainer": ("transformers",),
    "article_study": ("transformers", "matplotlib"),
    "ignite_trainer": ("ignite", "sklearn"),
    "accelerate_loop": ("accelerate", "sklearn"),
}


def _marked(path: Path) -> object:
    needs = NEEDS.get(path.stem, ())
    absent = [package for package in needs if find_spec(package) is None]
    marks = [pytest.mark.extra, pytest.mark.skipif(bool(absent), reason=f"not installed: {', '.join(absent)}")] if needs else []
    return pytest.param(path, id=path.stem, marks=marks)


#: What torch says now and then when everything is done and the interpreter ends: a thread of gloo still lets go of a tensor, for
#: which it needs the interpreter. A plain DDP loop without any monitor ended so in 3 of 30 runs.
_ABORTED = "terminate called without an active exception"


Ran = Callable[[str], tuple[str, Path]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Runs the example of that name, once for all tests: what it prints, and the directory that it ran in."""
    known: dict[str, tuple[str, Path]] = {}

    def run(name: str) -> tuple[str, Path]:
        if name not in known:
            directory = tmp_path_factory.mktemp(name)
            known[name] = _run(_quick(name, directory), directory, *ARGUMENTS.get(name, [])), directory
        return known[name]

    return run


def _quick(name: str, directory: Path) -> Path:
    """The example, with constants that make it quick."""
    (example,) = [path for path in EXAMPLES if path.stem == name]
    text = example.read_text(encoding="utf-8")
    for constant, smaller in SMALLER.get(name, {}).items():
        assert text.count(constant) == 1, f"{name}: {constant}"
        text = text.replace(constant, smaller)
    if name not in SMALLER:
        return example
    (directory / example.name).write_text(text, encoding="utf-8")
    return directory / example.name


def _run(example: Path, directory: Path, *arguments: str, seconds: int = 240) -> str:
    settings = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(3):
        if example.stem in BY_TORCHRUN:
            done = forked.run(_TORCHRUN, "--standalone", "--nproc-per-node", 2, example, cwd=directory, environment=settings)
        elif example.stem in FORKED_RANKS:
            done = _on_forked_ranks(example, directory, settings)
        else:
            done = forked.run(example, *arguments, cwd=directory, timeout=seconds, environment=settings)
        if _ABORTED not in done.stderr or example.stem not in BY_TORCHRUN | FORKED_RANKS:
            break
    assert done.returncode == 0, done.stderr
    assert "GradmonWarning" not in done.stderr
    return done.stdout


def _on_forked_ranks(example: Path, directory: Path, settings: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Two ranks, which find in their environment what torchrun puts there."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    group = {**settings, "MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    outputs = [directory / f"rank{rank}" for rank in range(2)]
    ranks = []
    for rank, output in enumerate(outputs):
        with output.open("wb") as file:
            own = {**group, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(forked.start(example, streams=[file.fileno()] * 3, cwd=directory, environment=own))
    codes = [started.wait() for started in ranks]
    printed = "".join(output.read_text(encoding="utf-8") for output in outputs)
    return subprocess.CompletedProcess([str(example)], max(map(abs, codes)), printed, printed)


def test_there_are_examples_and_they_are_short() -> None:
    assert {path.stem for path in EXAMPLES} >= {"plain_loop", "wandb_run", "tensorboard_run", "amp_accumulation_clip"}
    assert all(len(path.read_text(encoding="utf-8").splitlines()) < 120 for path in EXAMPLES)


@pytest.mark.parametrize("example", [_marked(path) for path in EXAMPLES if path.stem not in ARGUMENTS])
def test_an_example_runs_and_prints_something(example: Path, ran: Ran) -> None:
    assert ran(example.stem)[0].strip()


def test_the_overflow_of_the_mixed_precision_example_is_marked_and_passes_by(ran: Ran) -> None:
    rows = [line.split() for line in ran("amp_accumulation_clip")[0].splitlines() if line.strip()[:1].isdigit()]
    assert [(row[0], row[5], row[6]) for row in rows][3:6] == [("24", "0", "1024"), ("25", "1", "512"), ("26", "1", "512")]
    assert all(float(row[3]) <= 1.0 < float(row[2]) for row in rows if row[0] != "25")


@pytest.mark.extra
@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_the_wandb_example_loses_no_row_and_alerts(ran: Ran) -> None:
    from .wandb_files import history, records

    printed, directory = ran("wandb_run")
    assert "largest gradient norm was in step 300" in printed
    rows = history(directory)
    assert [row["_step"] for row in rows] == [row["gradmon/step"] for row in rows] == list(range(320))
    assert all("train/loss" in row and "gradmon/grad_norm" in row for row in rows)
    alerts = [record.alert for record in records(directory) if record.WhichOneof("record_type") == "alert"]
    assert alerts
    assert alerts[0].text.startswith("step 300")


def test_the_example_of_skipping_saves_the_run_from_an_overflow(ran: Ran) -> None:
    rows = [line[20:].rsplit(maxsplit=5) for line in ran("skip")[0].splitlines() if line.startswith("overflow")]
    above = {row[0].strip(): float(row[1]) for row in rows}
    assert {name for name, loss in above.items() if loss != loss} == {"nothing", "clip at 1", "clip by zclip"}
    assert all(abs(loss) < 0.1 for name, loss in above.items() if "skip" in name or "back" in name)


@pytest.mark.extra
@pytest.mark.skipif(any(find_spec(each) is None for each in NEEDS["ignite_trainer"]), reason="Ignite or scikit-learn is missing")
def test_the_ignite_example_is_spoiled_by_a_batch_unless_that_is_skipped(ran: Ran) -> None:
    lines = ran("ignite_trainer")[0].splitlines()
    ends = [line.split() for line in lines if "held-out" in line]
    clean, poisoned, skipped = (float(words[0].rstrip("%")) for words in ends)
    assert poisoned < 60 < 80 < min(clean, skipped)
    assert [words[5:8] for words in ends] == [["0", "of", "88"], ["0", "of", "88"], ["1", "of", "88"]]
    assert sum("iteration 40:" in line and "a spike" in line for line in lines) == 2


@pytest.mark.extra
@pytest.mark.skipif(
    any(find_spec(each) is None for each in NEEDS["accelerate_loop"]), reason="Accelerate or scikit-learn is missing"
)
def test_the_accelerate_example_gives_the_tracker_every_row_and_holds_the_rate_at_a_skip(ran: Ran) -> None:
    lines = ran("accelerate_loop")[0].splitlines()
    rows = [line.split() for line in lines if line.strip()[:1].isdigit()][:8]
    assert [row[0] for row in rows] == ["0", "20", "36", "37", "38", "60", "100", "173"]
    assert [row[4] for row in rows] == ["0", "0", "0", "0", "1", "1", "1", "1"]
    assert all(float(row[3]) <= 1.0 for row in rows)
    rates = next(line.split() for line in lines if line.startswith("lr "))
    assert rates[4] == rates[5] != rates[3]
    assert "attempted=174, applied=173, skipped=1" in "".join(lines)


def test_under_ddp_every_rank_says_the_same_of_a_batch_that_only_one_had(ran: Ran) -> None:
    printed, directory = ran("ddp")
    assert "step 60: loss = " in printed
    assert "the same on every rank: True" in printed
    assert (directory / "runs" / "ddp" / "gradmon.000001.values").exists()


def test_under_fsdp2_the_norm_of_a_layer_is_that_of_its_whole_gradient(ran: Ran) -> None:
    rows = [line.split() for line in ran("fsdp2")[0].splitlines() if line.startswith("step")]
    assert [row[1] for row in rows] == ["0", "20"]
    assert all(row[-3].rstrip(",") == row[-1] for row in rows)


def test_the_width_sweep_fails_the_standard_parametrisation_and_passes_mup(ran: Ran) -> None:
    standard, mup = ran("width_sweep")[0].split("== muP")
    assert "Fails: " in standard
    assert "too large in wide models in 2 (width^+0." in standard
    assert "Passes: all 5 terms have the expected exponent from width 64 to 512." in mup


NO_STUDY = any(find_spec(each) is None for each in NEEDS["article_study"])
#: What is to be said first of each learning rate of the article, and what besides it.
SAID: dict[str, tuple[str, set[str]]] = {
    "10": (r"non-finite-\w+|learning-rate-high|loss-divergence", set()),
    "0.1": ("learning-rate-high", {"loss-plateau"}),
    "0.001": ("vanishing-gradients|learning-rate-high|loss-plateau", {"vanishing-gradients"}),
}


def _said(printed: str) -> dict[str, list[tuple[str, str]]]:
    """Severity and rule of each finding, in order, by learning rate."""
    rates = re.split(r"^== learning rate (\S+)$", printed, flags=re.MULTILINE)[1:]
    found = [re.findall(r"^(ERROR|WARNING|INFO) +(\S+)", text, flags=re.MULTILINE) for text in rates[1::2]]
    return dict(zip(rates[::2], found, strict=True))


@pytest.mark.extra
@pytest.mark.skipif(NO_STUDY, reason="Transformers or matplotlib is missing")
def test_the_study_of_the_article_names_the_largest_rate_and_draws_it(ran: Ran) -> None:
    printed, directory = ran("article_study")
    said = _said(printed)
    assert list(said) == ["10"]
    severity, rule = said["10"][0]
    assert severity != "INFO"
    assert re.fullmatch(SAID["10"][0], rule)
    losses = gradmon.load_run(directory / "runs" / "article" / "10").series("loss")
    assert list(losses) == list(range(6))
    assert losses[0] < 1 < 20 < max(losses[1], losses[2])
    picture = (directory / "study.svg").read_text(encoding="utf-8")
    assert all(
        title in picture for title in ("loss", *(f"gradient norm: {part}" for part in ("last layer", "pooler", "classifier")))
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.extra
@pytest.mark.skipif(NO_STUDY, reason="Transformers or matplotlib is missing")
@pytest.mark.parametrize("rate", ["10", "0.1", "0.001", "5e-05"])
def test_the_study_of_the_article_finds_what_ails_each_rate(rate: str, tmp_path: Path) -> None:
    (example,) = [path for path in EXAMPLES if path.stem == "article_study"]
    findings = _said(_run(example, tmp_path, "--rates", rate, seconds=850))[rate]
    grave = [rule for severity, rule in findings if severity != "INFO"]
    losses = list(gradmon.load_run(tmp_path / "runs" / "article" / rate).series("loss").values())
    end = statistics.median(losses[-20:])
    if rate == "5e-05":
        assert not grave
        assert end < 0.4 < 0.6 < losses[0]
        return
    first, besides = SAID[rate]
    assert re.fullmatch(first, grave[0]), grave
    assert besides <= set(grave)
    assert not end < 0.6  # nor is it where it is NaN
