"""The callback in real trainings by the Trainer of Hugging Face Transformers, beside the same trainings without it."""

from __future__ import annotations

import copy
import gc
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon

from . import trainer_oracle as oracle
from .trainer_oracle import Setting

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from torch_gradmon.integrations.transformers import LOG_KEYS, GradmonCallback, run_directory  # noqa: E402
from torch_gradmon.spikes import MedianMad  # noqa: E402

pytestmark = pytest.mark.integration

MICRO, STEPS = 8, 6
#: Of the Trainer's own lines: what no two runs share.
_TIMES = ("runtime", "samples_per_second", "steps_per_second")


@pytest.fixture(scope="module", autouse=True)
def _what_is_imported_is_not_searched() -> Iterator[None]:
    """The Trainer collects garbage before each training, which takes a third of a second with all that is imported here."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Classifier(nn.Sequential):
    """The oracle's model, as the Trainer would have it."""

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        logits = super().forward(inputs)
        return {"loss": oracle.loss_of(logits, labels), "logits": logits}


def model() -> Classifier:
    return Classifier(*oracle.model())


def rows(batches: list[oracle.Batch]) -> list[dict[str, torch.Tensor]]:
    return [{"inputs": x, "labels": y} for inputs, labels in batches for x, y in zip(inputs, labels, strict=True)]


class Ordered(Trainer):  # type: ignore[misc]
    """Takes the batches in their order."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Half(Ordered):
    """In half precision on a CPU, which Accelerate refuses by itself: all else is as it would be on a GPU."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.state._mixed_precision = "fp16"
        self.accelerator.native_amp = True
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=oracle.SCALE)


def trainer(
    directory: Path,
    *callbacks: Any,
    setting: Setting | None = None,
    kind: type[Any] = Ordered,
    net: nn.Module | None = None,
    batches: list[oracle.Batch] | None = None,
    data: Any = None,
    held_out: Any = None,
    optimizers: Any = None,
    **arguments: Any,
) -> Any:
    """A Trainer of the oracle's model on the oracle's data."""
    setting = setting or Setting(clip=oracle.CLIP)
    net = net or model()
    optimizers = optimizers or (oracle.OPTIMIZERS[setting.optimizer](net.parameters()), None)
    options: dict[str, Any] = {
        "report_to": "none",
        "per_device_train_batch_size": MICRO,
        "gradient_accumulation_steps": setting.accumulation,
        "max_steps": STEPS,
        "logging_steps": 1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": setting.clip or 0.0,
        "bf16": setting.precision == "bf16",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        **arguments,
    }
    if data is None:
        data = rows(oracle.batches(options["max_steps"] * setting.accumulation) if batches is None else batches)
    arguments_ = TrainingArguments(str(directory), **options)
    return kind(net, arguments_, train_dataset=data, eval_dataset=held_out, optimizers=optimizers, callbacks=list(callbacks))


def own_lines(trained: Any) -> list[dict[str, float]]:
    """What the Trainer logs by itself."""
    return [
        {key: value for key, value in line.items() if not key.startswith("gradmon/") and not key.endswith(_TIMES)}
        for line in trained.state.log_history
    ]


def same(first: nn.Module, second: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def records(callback: Any) -> dict[int, dict[str, float]]:
    """All that is shown but how long it took."""
    found = callback.monitor.get_all_metrics()
    return {
        step: {k: v for k, v in values.items() if not k.endswith("gradmon/overhead_fraction")} for step, values in found.items()
    }


def whole(steps: Sequence[oracle.Step]) -> list[oracle.Step]:
    """Without the values of layers."""
    return [oracle.Step({k: v for k, v in s.values.items() if k.startswith("gradmon/")}, s.applied) for s in steps]


# --- the numbers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", oracle.SETTINGS, ids=str)
def test_every_number_is_that_of_the_plain_loop_and_training_is_the_same(setting: Setting, tmp_path: Path) -> None:
    kind = Half if setting.precision == "fp16" else Ordered
    plain = trainer(tmp_path, setting=setting, kind=kind)
    plain.train()

    monitor = gradmon.ModuleMonitor(preset="standard")
    monitor.add_gradient_metric("norm")
    watched = trainer(tmp_path, GradmonCallback(monitor), setting=setting, kind=kind)
    watched.train()

    expected = oracle.by_hand(oracle.model(), oracle.batches(STEPS * setting.accumulation), setting)
    compared = oracle.assert_logged(monitor.get_all_metrics(), expected)
    applied = sum(step.applied for step in expected)
    assert applied == STEPS if setting.precision != "fp16" else 0 < applied < STEPS
    # 6 parameters before and after the clip; of a step that is refused what the oracle compares, and an update in the first one
    assert compared == applied * (3 + 12 + bool(setting.clip)) + (STEPS - applied) * (2 + 6) + expected[0].applied
    assert monitor.get_step_counts().overflowed == STEPS - applied
    assert same(plain.model, watched.model)
    assert repr(own_lines(plain)) == repr(own_lines(watched))
    assert len(own_lines(plain)) == STEPS + 1


def test_on_a_cpu_the_trainer_passes_over_fp16_and_the_numbers_are_those_of_full_precision(tmp_path: Path) -> None:
    callback = GradmonCallback()
    watched = trainer(tmp_path, callback, fp16=True)
    watched.train()
    assert watched.accelerator.scaler is None
    expected = oracle.by_hand(oracle.model(), oracle.batches(STEPS), Setting(clip=oracle.CLIP))
    assert oracle.assert_logged(callback.monitor.get_all_metrics(), whole(expected)) == 1 + STEPS * 4


def test_several_epochs_each_with_a_last_incomplete_window(tmp_path: Path) -> None:
    callback = GradmonCallback()
    setting = Setting(accumulation=4, clip=oracle.CLIP)
    watched = trainer(tmp_path, callback, setting=setting, batches=oracle.batches(6), max_steps=-1, num_train_epochs=3)
    watched.train()
    found = records(callback)
    lines = own_lines(watched)[:-1]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert list(found) == [0, 1, 2, 3, 4, 5]
    for step, line in enumerate(lines):  # the norm that the Trainer's own clip returned
        assert found[step]["gradmon/grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-6)
        assert found[step]["gradmon/grad_norm_after_clip"] == pytest.approx(oracle.CLIP, rel=1e-4)


def test_checkpointing_of_activations_and_evaluation_in_between_change_no_number(tmp_path: Path) -> None:
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    # without dropout, for which an evaluation draws other numbers
    config = transformers.BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=4)
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(50, (STEPS * MICRO, 10), generator=generator)
    data = [{"input_ids": text, "labels": text[0] % 4} for text in texts]

    def trained(*callbacks: Any, **arguments: Any) -> Any:
        torch.manual_seed(0)
        net = transformers.BertForSequenceClassification(config)
        made = trainer(tmp_path, *callbacks, net=net, data=data, held_out=data[:MICRO], **arguments)
        made.train()
        return made

    simple, both = GradmonCallback(layers="all"), GradmonCallback(layers="all")
    more = {"activation_checkpointing": True, "eval_strategy": "steps", "eval_steps": 2}
    first, second, plain = trained(simple), trained(both, **more), trained(**more)
    assert len(simple.monitor.get_step_metrics()) > 40
    assert records(both) == records(simple)
    assert same(first.model, second.model)
    assert own_lines(second) == own_lines(plain)
    assert sum("eval_loss" in line for line in own_lines(plain)) == 3


def test_the_gradient_norm_of_every_parameter_in_one_line(tmp_path: Path) -> None:
    callback = GradmonCallback(layers="all")
    trainer(tmp_path, callback).train()
    expected = [
        oracle.Step({key: value for key, value in step.values.items() if key.startswith("gradient_before_clip/")}, True)
        for step in oracle.by_hand(oracle.model(), oracle.batches(STEPS), Setting(clip=oracle.CLIP))
    ]
    assert oracle.assert_logged(callback.monitor.get_all_metrics(), expected) == STEPS * 6


# --- the Trainer's own log line ----------------------------------------------------------------------------------------------


def test_what_a_subclass_does_at_the_end_is_done_then(tmp_path: Path) -> None:
    ended = []

    class Own(GradmonCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            ended.append(state.global_step)
            super().on_train_end(args, state, control, **more)

    trainer(tmp_path, Own()).train()
    assert ended == [STEPS]


def test_whole_model_values_join_the_line_with_the_loss_and_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 3, "max_steps": 8}

    def trained(*callbacks: Any) -> Any:
        made = trainer(tmp_path, *callbacks, held_out=rows(oracle.batches(1)), **options)
        made.train()
        return made

    plain = trained()
    printed_before = capsys.readouterr().out
    callback = GradmonCallback(layers="all")
    watched = trained(callback)
    printed = capsys.readouterr().out.splitlines()

    assert own_lines(watched) == own_lines(plain)
    found = callback.monitor.get_all_metrics()
    for line in watched.state.log_history:
        mine = {key: value for key, value in line.items() if key.startswith("gradmon/")}
        if "loss" not in line:
            assert not mine
            continue
        step = line["step"] - 1
        assert mine == {
            f"gradmon/{name}": found[step][f"gradmon/{name}"] for name in LOG_KEYS if f"gradmon/{name}" in found[step]
        }
        assert {"gradmon/grad_norm", "gradmon/grad_norm_after_clip", "gradmon/steps_not_applied"} <= mine.keys()
        assert line["grad_norm"] == pytest.approx(mine["gradmon/grad_norm"], rel=1e-6), "the Trainer's own is still there"
    assert not any("gradient" in key for line in watched.state.log_history for key in line)
    assert [("'loss'" in line, "gradmon/grad_norm'" in line) for line in printed] == [
        ("'loss'" in line, "'loss'" in line) for line in printed_before.splitlines()
    ]
    assert sum("'loss'" in line for line in printed) == 2


def test_a_line_has_what_was_measured_since_the_line_before(tmp_path: Path) -> None:
    callback = GradmonCallback(log_keys=("update_norm", "grad_norm"))
    watched = trainer(tmp_path, callback, max_steps=12, logging_steps=4)
    watched.train()
    found = callback.monitor.get_all_metrics()
    lines = [line for line in watched.state.log_history if "loss" in line]
    # updates are measured in the steps 0 and 10
    assert [line.get("gradmon/update_norm") for line in lines] == [found[s].get("gradmon/update_norm") for s in (0, 7, 10)]
    assert lines[1].get("gradmon/update_norm") is None
    assert [line["gradmon/grad_norm"] for line in lines] == [found[step]["gradmon/grad_norm"] for step in (3, 7, 11)]


def test_what_is_measured_in_the_step_of_a_line_is_in_that_line_only(tmp_path: Path) -> None:
    watched = trainer(tmp_path, GradmonCallback(log_keys=["update_norm"]), max_steps=3)
    watched.train()
    lines = [line for line in watched.state.log_history if "loss" in line]
    assert ["gradmon/update_norm" in line for line in lines] == [True, False, False]


@pytest.mark.parametrize("strategy", ["epoch", "no"])
def test_other_times_of_logging(strategy: str, tmp_path: Path) -> None:
    callback = GradmonCallback(prefix="net/")
    options: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 2, "logging_strategy": strategy}
    plain, watched = (trainer(tmp_path, *own, batches=oracle.batches(3), **options) for own in ((), (callback,)))
    plain.train()
    watched.train()
    assert [{key: value for key, value in line.items() if "gradmon" not in key} for line in own_lines(watched)] == own_lines(
        plain
    )
    lines = [line for line in watched.state.log_history if "loss" in line]
    steps = [2, 5] if strategy == "epoch" else []
    assert [line["net/gradmon/grad_norm"] for line in lines] == [
        callback.monitor.get_all_metrics()[step]["net/gradmon/grad_norm"] for step in steps
    ]


def test_lines_of_the_scripts_own_in_the_middle_of_a_step_are_left_alone(tmp_path: Path) -> None:
    class Talks(Ordered):
        def compute_loss(self, *given: Any, **named: Any) -> Any:
            self.log({"aux": 1.0})
            return super().compute_loss(*given, **named)

    callback = GradmonCallback()
    plain, watched = (trainer(tmp_path, *own, kind=Talks) for own in ((), (callback,)))
    plain.train()
    watched.train()
    assert own_lines(watched) == own_lines(plain)
    assert [set(line) for line in watched.state.log_history if "aux" in line] == [{"aux", "epoch", "step"}] * STEPS
    assert list(records(callback)) == list(range(STEPS))


def test_no_keys_for_the_line(tmp_path: Path) -> None:
    watched = trainer(tmp_path, GradmonCallback(log_keys=()))
    watched.train()
    assert not any(key.startswith("gradmon") for line in watched.state.log_history for key in line)


# --- reporters ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    package = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    yield package
    package.finish()


def test_a_run_of_wandb_has_every_step_and_all_that_the_trainer_logs(wandb: Any, tmp_path: Path) -> None:
    from .wandb_files import history

    callback = GradmonCallback(layers="all")
    watched = trainer(tmp_path, callback, max_steps=12, logging_steps=4, report_to="wandb", run_name="run")
    watched.train()
    wandb.finish()
    found = history(tmp_path)
    theirs = [(row["train/global_step"], row["train/loss"], row["train/grad_norm"]) for row in found if "train/loss" in row]
    assert theirs == [(line["step"], line["loss"], line["grad_norm"]) for line in watched.state.log_history if "loss" in line]
    assert len(theirs) == 3
    mine = [
        {key: value for key, value in row.items() if not key.startswith(("train/", "_"))}
        for row in found
        if "gradmon/step" in row
    ]
    assert [row.pop("gradmon/step") for row in mine] == list(range(12))
    assert mine == list(callback.monitor.get_all_metrics().values())
    assert "gradient_before_clip/0.weight/norm" in mine[0]
    assert [row["_step"] for row in found] == sorted(row["_step"] for row in found)
    assert "train/loss" not in found[0], "nothing waits for the Trainer's first line"


def test_the_last_step_is_sent_before_reporters_close_their_runs(tmp_path: Path) -> None:
    class Closes(TrainerCallback):  # type: ignore[misc]
        def on_train_end(self, *_: Any, **__: Any) -> None:
            known.append(sink.steps)

    known: list[list[int]] = []
    sink = gradmon.testing.RecordingSink()
    monitor = gradmon.ModuleMonitor(preset="minimal")
    monitor.add_sink(sink)
    trainer(tmp_path, Closes(), GradmonCallback(monitor)).train()
    assert known == [sink.steps] == [list(range(STEPS))]


def test_a_reporter_that_has_no_run_is_told_of_and_nothing_else_happens(wandb: Any, tmp_path: Path) -> None:
    class WithoutReporter(Ordered):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self.remove_callback(transformers.integrations.WandbCallback)

    callback = GradmonCallback()
    watched = trainer(tmp_path, callback, kind=WithoutReporter, report_to="wandb")
    with pytest.warns(gradmon.GradmonWarning, match="does not report to wandb .*no W&B run is active"):
        watched.train()
    assert len(callback.monitor.get_all_metrics()) == STEPS


def _events(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


@pytest.mark.parametrize("place", ["its own", "from the environment"])
def test_tensorboard_shows_a_run_beside_the_trainers(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    if place != "its own":
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    monitor = gradmon.ModuleMonitor(preset="standard")
    monitor.add_gradient_metric("norm")  # of each parameter, before and after the clip
    callback = GradmonCallback(monitor)
    watched = trainer(tmp_path / "out", callback, report_to="tensorboard")
    watched.train()
    (mine,) = tmp_path.rglob("gradmon")
    theirs = _events(mine.parent)
    assert mine.parent == tmp_path / "board" if place != "its own" else mine.parent.parent == tmp_path / "out" / "runs"
    assert [step for step, _ in theirs["train/loss"]] == [1, 2, 3, 4, 5, 6]
    assert not any("gradmon/grad" in tag or "gradient" in tag for tag in theirs)
    found = _events(mine)
    for key in ("gradmon/grad_norm", "gradient_before_clip/3.bias/norm", "gradient/3.bias/norm"):
        expected = [(step, values[key]) for step, values in callback.monitor.get_all_metrics().items()]
        assert found[key] == [(step, pytest.approx(value, rel=1e-6)) for step, value in expected]

    watched.train()  # once more: each training reports by itself, and none twice
    assert [step for step, _ in _events(mine)["gradmon/grad_norm"]] == list(range(2 * STEPS))


@pytest.mark.parametrize(("trial", "place"), [(None, "board/gradmon"), ("run-3", "board/run-3/gradmon")])
def test_the_directory_that_older_releases_are_given_is_the_trainers(trial: str | None, place: str, tmp_path: Path) -> None:
    arguments = SimpleNamespace(logging_dir=str(tmp_path / "board"), output_dir=str(tmp_path / "out"))
    assert run_directory(arguments, SimpleNamespace(trial_name=trial)) == tmp_path / place


def test_the_trainers_directory_is_found_beside_one_of_ours_of_the_same_moment(tmp_path: Path) -> None:
    for place, moment in (("old", 1), ("new", 2), ("new/gradmon", 2), ("old/gradmon", 3)):
        directory = tmp_path / "runs" / place
        directory.mkdir(parents=True)
        (directory / "events.out.tfevents.1").touch()
        os.utime(directory / "events.out.tfevents.1", (moment, moment))
    arguments, state = TrainingArguments(str(tmp_path), report_to="none"), trainer(tmp_path).state
    assert run_directory(arguments, state) == tmp_path / "runs" / "new" / "gradmon"


def test_no_report_where_none_is_wanted(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    trainer(tmp_path, GradmonCallback(report=False), report_to="tensorboard").train()
    assert list(tmp_path.rglob("events.out*"))
    assert not list(tmp_path.rglob("gradmon"))


_TRACKIO = """
import sys, warnings
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.test_integration_transformers import *

callback = GradmonCallback(layers="all")
watched = trainer(Path("out"), callback, report_to="trackio", project="tests", run_name="run", logging_steps=3)
watched.train()
watched.args.run_name = "second"
watched.train()  # in a run of its own
from trackio.sqlite_storage import SQLiteStorage
names = ("run", "second")
every = callback.monitor.get_all_metrics()
print("FOUND", json.dumps([[SQLiteStorage.get_logs("tests", name) for name in names], every, watched.state.log_history]))
"""


def test_a_run_of_trackio_has_every_step_also_the_last(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    root = str(Path(__file__).parent.parent)
    home = str(tmp_path)
    settings = {"HF_HOME": home, "HF_HUB_OFFLINE": "1", "HOME": home, "PATH": "", "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _TRACKIO.format(root=root)]
    done = subprocess.run(command, env=settings, cwd=home, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "GradmonWarning" not in done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    runs, every, history = json.loads(line.removeprefix("FOUND"))
    for run, first in zip(runs, (0, STEPS), strict=True):
        mine = {row["step"]: row for row in run if "gradmon/grad_norm" in row}
        assert list(mine) == list(range(first, first + STEPS))
        for step, row in mine.items():
            assert {key: value for key, value in row.items() if "/" in key and "train" not in key} == every[str(step)]
    losses = [row["train/loss"] for row in runs[1] if "train/loss" in row]
    assert losses == [line["loss"] for line in history if "loss" in line]
    assert len(losses) == 2


# --- checkpoints -------------------------------------------------------------------------------------------------------------


class Clipping(Ordered):
    """Clips by what the monitor has learned."""

    by = ""

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        callback = next(each for each in self.callback_handler.callbacks if isinstance(each, GradmonCallback))
        return callback.monitor.clip_grad_norm_(self.by) if self.by else super()._clip_grad_norm(model)


def _resumed(tmp_path: Path, kind: type[Any], again: Any, **arguments: Any) -> tuple[Any, Any, Any]:
    """A training of 12 steps, its callback, and the Trainer that goes on with its sixth step."""
    options: dict[str, Any] = {"max_steps": 12, "save_strategy": "steps", "save_steps": 6, "batches": oracle.batches(8)}
    callback = GradmonCallback(layers="all")
    whole = trainer(tmp_path / "whole", callback, kind=kind, **options)
    whole.train()
    resumed = trainer(tmp_path / "again", again, kind=kind, **{**options, **arguments})
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-6"))
    return whole, callback, resumed


@pytest.mark.parametrize("by", ["", "zclip", "adagc"])
def test_a_resumed_training_goes_on_as_if_it_had_not_been_interrupted(by: str, tmp_path: Path) -> None:
    kind = type("Kind", (Clipping,), {"by": by})
    again = GradmonCallback(layers="all")
    whole, callback, resumed = _resumed(tmp_path, kind, again)
    assert same(whole.model, resumed.model)
    assert records(again) == {step: values for step, values in records(callback).items() if step >= 6}
    assert again.state() == callback.state()
    learned = again.state()["monitor"]
    assert learned["next_step"] == 12
    assert learned["detectors"]["grad_norm"]["rule"]
    assert list(learned["clipping"]) == ([by] if by else [])
    saved = json.loads((tmp_path / "again" / "checkpoint-12" / "trainer_state.json").read_text(encoding="utf-8"))
    assert repr(saved["stateful_callbacks"]["GradmonCallback"]) == repr(json.loads(json.dumps(again.state(), sort_keys=True)))


def test_one_that_the_trainer_makes_anew_has_the_same_arguments_and_goes_on_too(tmp_path: Path) -> None:
    # here other arguments than in the checkpoint, whose own it gets
    passed = GradmonCallback(log_keys=["grad_max"])
    whole, callback, resumed = _resumed(tmp_path, Ordered, passed, restore_callback_states_from_checkpoint=True)
    (made,) = (each for each in resumed.callback_handler.callbacks if isinstance(each, GradmonCallback))
    assert made is not passed
    assert passed.monitor.module is None
    assert records(made) == {step: values for step, values in records(callback).items() if step >= 6}
    assert made.state() == callback.state()
    assert same(whole.model, resumed.model)
    lines = [line for line in resumed.state.log_history if "loss" in line]
    assert [line["gradmon/grad_norm"] for line in lines] == [values["gradmon/grad_norm"] for values in records(callback).values()]


@pytest.mark.parametrize(
    ("named", "arguments"),
    [("monitor", {"monitor": gradmon.ModuleMonitor()}), ("on_spike", {"on_spike": gradmon.Skip(), "run_dir": Path("runs")})],
)
def test_what_json_cannot_hold_is_refused_before_training_where_it_would_be_lost(
    named: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    callback = GradmonCallback(**arguments)
    with pytest.raises(ValueError, match=f"recreates callbacks from JSON, which cannot hold {named}; leave it out"):
        trainer(tmp_path, callback, restore_callback_states_from_checkpoint=True)
    trainer(tmp_path, callback)
    assert callback.state()["args"].get("run_dir", "runs") == "runs"


def test_a_checkpoint_without_the_callback_can_be_resumed_with_it_and_saved_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    trainer(tmp_path, **options).train()
    callback = GradmonCallback()
    resumed = trainer(tmp_path, callback, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert list(records(callback)) == [2, 3], "numbered as the Trainer's steps"
    saved = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text(encoding="utf-8"))
    assert saved["stateful_callbacks"]["GradmonCallback"]["monitor"]["next_step"] == 4


def test_of_two_callbacks_each_goes_on_with_its_own_state(tmp_path: Path) -> None:
    def both() -> list[GradmonCallback]:
        return [GradmonCallback(), GradmonCallback(prefix="other/", on_spike=None)]

    whole = both()
    trainer(tmp_path, *whole, max_steps=12, save_strategy="steps", save_steps=10).train()
    resumed = both()
    trainer(tmp_path, *resumed, max_steps=12).train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    for first, second in zip(whole, resumed, strict=True):
        assert records(second) == {step: values for step, values in records(first).items() if step >= 10}
        assert any(key.endswith("gradmon/spike_score") for key in records(second)[10]), "the detector knows what is usual"

    changed = [GradmonCallback(layers="all"), GradmonCallback(prefix="other/", on_spike=None)]
    with pytest.warns(
        gradmon.GradmonWarning, match="several GradmonCallbacks, none with these arguments; this one starts without a state"
    ):
        trainer(tmp_path, *changed, max_steps=12).train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert records(changed[1]) == records(resumed[1])


def test_what_a_loop_logs_late_is_learned_before_a_checkpoint(tmp_path: Path) -> None:
    class LogsTheLoss(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                callback.monitor.log_scalar("loss", logs["loss"])

    def monitor() -> gradmon.ModuleMonitor:
        made = gradmon.ModuleMonitor()
        made.add_detector(gradmon.SpikeDetector(signal="loss"))
        return made

    callback = GradmonCallback(monitor())
    options: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    trainer(tmp_path, callback, LogsTheLoss(), **options).train()
    whole = callback.state()
    callback = GradmonCallback(monitor())
    resumed = trainer(tmp_path, callback, LogsTheLoss(), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert callback.state() == whole
    assert [values["loss"] for values in records(callback).values()] == [
        line["loss"] for line in resumed.state.log_history if "loss" in line
    ][2:]


def test_a_rule_with_a_state_that_is_no_json_costs_no_checkpoint(tmp_path: Path) -> None:
    class Tensors(MedianMad):
        def state_dict(self) -> dict[str, Any]:
            return {"tensor": torch.zeros(2)}

    monitor = gradmon.ModuleMonitor(preset="minimal")
    monitor.add_detector(gradmon.SpikeDetector(Tensors()))
    with pytest.warns(gradmon.GradmonWarning, match="the monitor's state is left out of the checkpoint") as told:
        trainer(tmp_path, GradmonCallback(monitor), save_strategy="steps", save_steps=STEPS).train()
    assert len(told) == 1
    assert (tmp_path / f"checkpoint-{STEPS}" / "trainer_state.json").exists()


# --- what is done about spikes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", ["made by the Trainer", "given"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_after_a_skipped_step_everything_is_as_if_the_batch_had_never_come(
    accumulation: int, scheduler: str, tmp_path: Path
) -> None:
    setting = Setting(accumulation=accumulation, clip=oracle.CLIP)
    batches = oracle.batches(8 * accumulation)
    at = 5 * accumulation
    bad = [(torch.full_like(x, math.inf), y) for x, y in batches[:accumulation]]

    def trained(steps: int, data: list[oracle.Batch], *callbacks: Any) -> Any:
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        own = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)) if scheduler == "given" else None
        made = trainer(
            tmp_path,
            *callbacks,
            setting=setting,
            net=net,
            batches=data,
            optimizers=(optimizer, own),
            max_steps=steps,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=20,
        )
        made.train()
        return made

    plain = trained(8, batches)
    callback = GradmonCallback(on_spike="skip")
    with pytest.warns(gradmon.GradmonWarning, match="step 5: "):
        skipped = trained(9, batches[:at] + bad + batches[at:], callback)
    assert callback.monitor.get_step_counts().skipped == 1
    assert same(plain.model, skipped.model)
    assert repr(plain.optimizer.state_dict()) == repr(skipped.optimizer.state_dict())
    assert plain.lr_scheduler.state_dict() == skipped.lr_scheduler.state_dict()
    rates = [[line["learning_rate"] for line in own_lines(each)[:-1]] for each in (plain, skipped)]
    assert rates[1] == rates[0][:5] + rates[0][5:6] + rates[0][5:]
    assert len(set(rates[0])) == 8


# --- a life with many trainings ----------------------------------------------------------------------------------------------


def test_a_second_training_of_the_model_goes_on_and_another_model_gets_another_monitor(tmp_path: Path) -> None:
    callback = GradmonCallback()
    watched = trainer(tmp_path, callback)
    watched.train()
    first = callback.monitor
    watched.train()
    assert callback.monitor is first
    assert list(records(callback)) == list(range(2 * STEPS))
    assert [line["gradmon/grad_norm"] for line in watched.state.log_history if "loss" in line] == [
        records(callback)[step]["gradmon/grad_norm"] for step in range(STEPS, 2 * STEPS)
    ]

    made = trainer(tmp_path, callback, net=model())
    made.train()
    assert callback.monitor is not first
    assert list(records(callback)) == list(range(STEPS))


def test_trials_with_a_model_each(tmp_path: Path) -> None:
    callback = GradmonCallback()
    made = Ordered(
        args=trainer(tmp_path).args,
        model_init=model,
        train_dataset=rows(oracle.batches(STEPS)),
        callbacks=[callback],
    )
    found = []
    for _ in range(2):
        made.train()
        found.append(records(callback))
    assert found[0] == found[1]
    assert list(found[0]) == list(range(STEPS))


def test_a_training_that_was_broken_off_can_be_begun_again(tmp_path: Path) -> None:
    class Fails(Ordered):
        calls = 0

        def compute_loss(self, *given: Any, **named: Any) -> Any:
            self.calls += 1
            if self.calls == 4:
                raise RuntimeError("out of memory")
            return super().compute_loss(*given, **named)

    callback = GradmonCallback()
    watched = trainer(tmp_path, callback, kind=Fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        watched.train()
    watched.train()
    assert len(watched.optimizer.optimizer._optimizer_step_post_hooks) == 0, "nothing is left behind"
    assert not callback.monitor._runtime.pipeline.publisher.sinks
    assert callback.monitor.current_step == 3 + STEPS - 1 + (list(records(callback))[3] - 3)
    losses = [line["gradmon/grad_norm"] for line in watched.state.log_history if "loss" in line]
    assert losses == [values["gradmon/grad_norm"] for values in records(callback).values()][-STEPS:]


def test_another_trainer_takes_over_a_model_that_the_first_one_left_watched(tmp_path: Path) -> None:
    class Interrupted(Ordered):
        def compute_loss(self, *given: Any, **named: Any) -> Any:
            if self.state.global_step == 2:
                raise KeyboardInterrupt
            return super().compute_loss(*given, **named)

    net, left, callbacks = model(), GradmonCallback(), [GradmonCallback(), GradmonCallback(prefix="b/")]
    with pytest.raises(KeyboardInterrupt):  # which the Trainer tells nobody of
        trainer(tmp_path, left, net=net, kind=Interrupted).train()
    with pytest.warns(gradmon.GradmonWarning, match="this Classifier was watched already"):
        trainer(tmp_path, *callbacks, net=net).train()
    assert [list(records(callback)) for callback in (left, *callbacks)] == [[0, 1], list(range(STEPS)), list(range(STEPS))]
    norms = [values["gradmon/grad_norm"] for values in records(callbacks[0]).values()]
    assert norms == [values["b/gradmon/grad_norm"] for values in records(callbacks[1]).values()]


def test_it_does_nothing_where_monitors_are_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = trainer(tmp_path)
    plain.train()
    monkeypatch.setenv("GRADMON_DISABLE", "1")
    callback = GradmonCallback(run_dir=tmp_path / "run", layers="all")
    watched = trainer(tmp_path, callback, save_strategy="steps", save_steps=3)
    watched.train()
    assert own_lines(watched) == own_lines(plain)
    assert not any(key.startswith("gradmon") for line in watched.state.log_history for key in line)
    assert callback.monitor.module is None
    assert callback.state()["monitor"] == {}
    assert not (tmp_path / "run").exists()


# --- bad arguments -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"log_keys": "grad_norm"}, TypeError, r"log_keys must be names of whole-model values, such as .*got 'grad_norm'"),
        ({"log_keys": ["grad_nrm"]}, ValueError, r"log_keys='grad_nrm' is not one of .*did you mean grad_norm"),
        ({"report": "wandb"}, TypeError, "report must be True or False, got 'wandb'"),
        ({"on_spke": "skip"}, TypeError, r"there is no argument 'on_spke'; did you mean on_spike"),
        ({"scaler": None}, TypeError, "scaler= is not needed here: the trainer has the GradScaler"),
    ],
)
def test_what_is_wrong_is_said_when_the_callback_is_made(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        GradmonCallback(**arguments)


def test_an_engine_of_deepspeed_that_is_not_found_is_named(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    wrapper = DeepSpeedOptimizerWrapper(oracle.OPTIMIZERS["sgd"](made.model.parameters()))
    with pytest.raises(ValueError, match="the Trainer's DeepSpeed engine was not found"):
        GradmonCallback().on_train_begin(made.args, made.state, made.control, model=made.model, optimizer=wrapper)


# --- ranks -------------------------------------------------------------------------------------------------------------------

_RANKS = """
import sys, warnings
from pathlib import Path
from tests.test_integration_transformers import *

warnings.simplefilter("error", gradmon.GradmonWarning)
setting = Setting(accumulation=2, clip=oracle.CLIP)
callback = GradmonCallback(layers="all", run_dir="run", log_keys=["grad_norm", "update_norm"])
options = {"setting": setting, "batches": oracle.batches(2 * 2 * STEPS)}  # two batches of a step are each rank's
more = {**options, "save_strategy": "steps", "save_steps": 4, "logging_steps": 2}
plain = trainer(Path("plain"), **more)
watched = trainer(Path("watched"), callback, report_to="tensorboard,wandb".split(","), **more)
plain.train()
watched.train()
assert torch.distributed.get_world_size() == 2
assert same(plain.model, watched.model)
assert own_lines(plain) == own_lines(watched)
lines = [[(key, line[key]) for key in line if key.startswith("gradmon/")] for line in watched.state.log_history]
every = [None, None]
torch.distributed.all_gather_object(every, lines)
assert every[0] == every[1]
assert ("gradmon/update_norm" in dict(lines[0])) and len(lines) == 4
again = GradmonCallback(layers="all")
resumed = trainer(Path("again"), again, **options)
resumed.train(resume_from_checkpoint="watched/checkpoint-4")
assert same(resumed.model, watched.model)
assert records(again) == {step: values for step, values in records(callback).items() if step >= 4}
if torch.distributed.get_rank() == 0:
    print("FOUND", json.dumps(callback.monitor.get_all_metrics()))
    pytest.importorskip("wandb").finish()
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def test_on_two_ranks_the_values_are_those_of_both_and_the_first_one_reports(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("tensorboard")
    from .wandb_files import history

    (tmp_path / "script.py").write_text(_RANKS, encoding="utf-8")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    settings = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launch], env=settings, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    found = {int(step): values for step, values in json.loads(line.removeprefix("FOUND")).items()}
    setting = Setting(accumulation=4, clip=oracle.CLIP)
    expected = oracle.by_hand(oracle.model(), oracle.batches(4 * STEPS), setting)
    shown = [oracle.Step({k: v for k, v in step.values.items() if not k.startswith("gradient/")}, True) for step in expected]
    assert oracle.assert_logged(found, shown, rel=1e-5) == 1 + STEPS * (4 + 6)  # the same sum in another order
    assert gradmon.load_run(tmp_path / "run").steps == list(range(STEPS))
    assert [row["gradmon/step"] for row in history(tmp_path) if "gradmon/step" in row] == list(range(STEPS))
    (board,) = (tmp_path / "watched").rglob("gradmon")
    assert [step for step, _ in _events(board)["gradmon/grad_norm"]] == list(range(STEPS))


# --- the loss ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("logging_steps", [1, 3])
def test_the_loss_of_each_step_is_in_the_run(accumulation: int, logging_steps: int, tmp_path: Path) -> None:
    setting = Setting(accumulation=accumulation)
    callback = GradmonCallback(run_dir=tmp_path / "run")
    watched = trainer(tmp_path, callback, setting=setting, logging_steps=logging_steps)
    watched.train()
    run = gradmon.load_run(tmp_path / "run")
    losses = list(run.series("loss").values())
    assert len(losses) == STEPS
    lines = [line["loss"] for line in watched.state.log_history if "loss" in line]
    means = [sum(losses[at : at + logging_steps]) / logging_steps for at in range(0, STEPS, logging_steps)]
    assert means == pytest.approx(lines, rel=1e-5), "the Trainer's line is a mean over its interval, rounded"
    assert "training_step" not in vars(watched), "the Trainer has its own method back"
    assert "loss" not in callback.monitor.get_step_metrics(), "reporters get it from the Trainer"


def test_two_callbacks_of_one_trainer_both_record_the_loss(tmp_path: Path) -> None:
    callbacks = [GradmonCallback(run_dir=tmp_path / name) for name in ("one", "other")]
    watched = trainer(tmp_path, *callbacks)
    for _ in range(2):
        watched.train()
        assert "training_step" not in vars(watched)
    one, other = (gradmon.load_run(tmp_path / name).series("loss") for name in ("one", "other"))
    assert one == other
    assert list(one.values())[:STEPS] == pytest.approx(
        [line["loss"] for line in watched.state.log_history if "loss" in line], rel=0.5
    )


class Rewards(Ordered):
    """Adds values to the line as the trainers of TRL do."""

    def log(self, logs: dict[str, float], *more: Any) -> None:
        super().log({**logs, "reward": 0.5, "rewards/chosen": 1.5, "kl": 0.25, "entropy": 2.0, "what": "text"}, *more)


def test_rewards_of_the_trainers_own_line_are_in_the_run(tmp_path: Path) -> None:
    watched = trainer(tmp_path, GradmonCallback(run_dir=tmp_path / "run"), kind=Rewards, logging_steps=2)
    watched.train()
    run = gradmon.load_run(tmp_path / "run")
    for key, value in {"reward": 0.5, "rewards/chosen": 1.5, "kl": 0.25, "entropy": 2.0}.items():
        assert run.series(key) == {1: value, 3: value, 5: value}
    assert list(run.series("learning_rate")) == [1, 3, 5]
    assert not {"what", "grad_norm", "epoch"} & set(run.keys())


@pytest.mark.parametrize("when", ["in the forward", "when a line is logged"])
def test_a_loss_that_the_script_logs_replaces_the_trainers(when: str, tmp_path: Path) -> None:
    class Logs(Classifier):
        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            if when == "in the forward":
                callback.monitor.log_scalar("loss", 7.0)
            return super().forward(inputs, labels)

    class Line(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if when != "in the forward" and "loss" in logs:
                callback.monitor.log_scalar("loss", 7.0)

    callback = GradmonCallback(run_dir=tmp_path / "run")
    trainer(tmp_path, callback, Line(), net=Logs(*oracle.model()), logging_steps=3).train()
    losses = gradmon.load_run(tmp_path / "run").series("loss")
    assert list(losses) == list(range(STEPS))
    assert [step for step, loss in losses.items() if loss == 7.0] == ([*range(STEPS)] if when == "in the forward" else [2, 5])


def test_where_the_trainer_is_not_found_its_line_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_gradmon.integrations.transformers._trainer_of", lambda control: None)
    watched = trainer(tmp_path, GradmonCallback(run_dir=tmp_path / "run"), logging_steps=3)
    watched.train()
    lines = {line["step"] - 1: line["loss"] for line in watched.state.log_history if "loss" in line}
    assert gradmon.load_run(tmp_path / "run").series("loss") == pytest.approx(lines)


def test_each_trial_of_a_search_has_a_run_directory_of_its_own(tmp_path: Path) -> None:
    callback = GradmonCallback(run_dir=tmp_path / "run")
    with pytest.warns(gradmon.GradmonWarning, match="the run of this one is in .*trial-1'"):
        for number in range(3):
            one = trainer(tmp_path, callback, max_steps=number + 2)
            monitored = one.callback_handler.on_train_begin

            def begin(args: Any, state: Any, control: Any, call: Any = monitored) -> Any:
                state.is_hyper_param_search = True
                return call(args, state, control)

            one.callback_handler.on_train_begin = begin
            one.train()
    lengths = [len(gradmon.load_run(tmp_path / "run" / f"trial-{number}").steps) for number in (1, 2, 3)]
    assert lengths == [2, 3, 4]


# --- remedies ---------------------------------------------------------------------------------------------------------------------


def test_an_optimizer_of_a_copy_is_refused_before_any_step(tmp_path: Path) -> None:
    net = model()
    other = torch.optim.SGD(copy.deepcopy(net).parameters(), lr=0.1)
    watched = trainer(tmp_path, GradmonCallback(), net=net, optimizers=(other, None))
    with pytest.raises(ValueError, match=r"for another model: .* Give the Trainer optimizers=\(optimizer, scheduler\)"):
        watched.train()
    assert watched.state.global_step == 0


class _OfForward(Ordered):
    """Takes the loss that the model returns, whatever else it was given."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Any:
        return model(**inputs)["loss"]


@pytest.mark.parametrize("has_function", [False, True])
def test_the_run_knows_whether_the_trainer_divides_the_loss(has_function: bool, tmp_path: Path) -> None:
    callback = GradmonCallback()
    watched = trainer(tmp_path, callback, max_steps=2, kind=_OfForward)
    if has_function:
        watched.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: outputs["loss"]
    watched.train()
    assert callback.monitor._runtime.pipeline.directory.facts["trainer"] == "transformers" + ", compute_loss_func" * has_function


@pytest.mark.parametrize("bound", [0.0, 0.5])
def test_the_run_knows_the_bound_of_the_clip(bound: float, tmp_path: Path) -> None:
    callback = GradmonCallback()
    trainer(tmp_path, callback, max_steps=2, max_grad_norm=bound).train()
    assert callback.monitor._runtime.pipeline.directory.facts["clip_bound"] == bound
