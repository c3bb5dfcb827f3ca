"""Other experiment trackers, each with its real package and without a network; what it wrote is read back."""

from __future__ import annotations

import csv
import json
import math
import os
import textwrap
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon import GradmonWarning, ModuleMonitor
from torch_gradmon.sinks import MlflowSink
from torch_gradmon.sinks.trackio import KeyRewriter
from torch_gradmon.sinks.wandb import AXIS

from . import forked
from .wandb_files import history

pytestmark = pytest.mark.extra

#: Kept here, since a monitor keeps no model alive.
MODEL = nn.Linear(1, 1)
#: More than MLflow takes at once.
MANY = 1100
ROOT_MEAN = "activation/[root module]/mean"
NORM = "gradmon/grad_norm"

Rows = dict[int, dict[str, float]]


def logged(tensors: int = 2, steps: int = 4) -> Rows:
    """What is logged: keys and values as a monitor has them."""
    return {
        step: {
            "loss": (step + 1) / 3,
            ROOT_MEAN: -(step + 1) / 7,
            "update_ratio/h.0.attn": 1e-30 * (step + 1),
            "nan": math.nan,
            "infinite": math.inf,
            **{f"gradient/h.{index}.weight/norm": index + (step + 1) / 11 for index in range(tensors)},
        }
        for step in range(steps)
    }


def feed(sink: Any, rows: Rows | None = None, **how: Any) -> Rows:
    """Let a monitor send ``rows`` or else a few steps to ``sink``, and return what it had."""
    rows = logged() if rows is None else rows
    monitor = ModuleMonitor(MODEL)
    monitor.add_sink(sink, **how)
    for step, values in rows.items():
        monitor.begin_step(step)
        monitor.log_scalars(values)
        monitor.end_step()
    monitor.detach()
    assert monitor.warning_counts() == {}
    return rows


def _nothing(step: int) -> None:
    pass


@contextmanager
def trained(
    sink: Any, before: Callable[[int], object] = _nothing, after: Callable[[int], object] = _nothing, lost: Mapping[str, int] = {}
) -> Iterator[Rows]:
    """Train for four steps and give what ``sink`` has to get. The last step's row goes out when the block is left.

    The script does what is ``before`` and ``after`` each step; ``lost`` is what the monitor has to say in the end.
    """
    rows: Rows = {}
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    for each in (sink, lambda values, step: rows.update({step: values})):
        monitor.add_sink(each, keys=f"^{NORM}$")
    for step in range(4):
        before(step)
        optimizer.zero_grad()
        model(torch.full((1, 1), float(step))).sum().backward()
        optimizer.step()
        after(step)
    yield rows
    monitor.detach()
    assert list(rows) == [0, 1, 2, 3]
    assert monitor.warning_counts() == lost


def _renamed(rows: Rows, old: str, new: str) -> Rows:
    return {step: {key.replace(old, new): value for key, value in values.items()} for step, values in rows.items()}


def _bits(rows: Rows) -> dict[int, dict[str, str]]:
    """``rows`` in a form in which NaN is equal to NaN and nothing is rounded."""
    return {step: {key: float(value).hex() for key, value in values.items()} for step, values in rows.items()}


def _float32(rows: Rows) -> Rows:
    return {step: {key: torch.tensor(value).item() for key, value in values.items()} for step, values in rows.items()}


# --- what is a sink, and what its names become ---------------------------------------------------------------------------------------


def test_a_built_in_function_is_a_sink() -> None:
    kept: dict[str, float] = {}
    expected = feed(kept.update)
    assert _bits({3: kept}) == _bits({3: {**expected[3], "step": 3}})


def test_an_object_with_a_log_of_other_arguments_is_refused_at_once() -> None:
    class Table:
        def log(self, name: str, value: float, step: int) -> None:
            raise AssertionError

        def __call__(self, *args: Any, **how: Any) -> None:
            raise AssertionError

    with pytest.raises(TypeError, match="a sink needs a method log"):
        ModuleMonitor(MODEL).add_sink(Table())


@pytest.mark.parametrize("clean", [str, str.lower])
@given(keys=st.lists(st.text("aA/", max_size=30)))
def test_a_renaming_gives_each_key_a_name_of_its_own_and_the_same_each_time(clean: Callable[[str], str], keys: list[str]) -> None:
    in_the_way = list(map(KeyRewriter(20, clean), keys))  # keys that look as names do
    rename = KeyRewriter(20, clean)
    names = {key: rename(key) for key in in_the_way + keys}
    assert len(set(names.values())) == len(names)
    assert all(len(name) <= 20 for name in names.values())
    assert {key: rename(key) for key in names} == names


# --- MLflow --------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module with a store of its own. It is imported here since what it may send home is settled on import."""
    uri = (tmp_path / "mlruns").as_uri()
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_ENABLE_ASYNC_LOGGING"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "MLFLOW_TRACKING_URI": uri,
        "MLFLOW_ALLOW_FILE_STORE": "true",  # MLflow's other stores need more than its skinny package
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }.items():
        monkeypatch.setenv(name, value)
    module = pytest.importorskip("mlflow")
    module.set_tracking_uri(uri)
    yield module
    while module.active_run() is not None:
        module.end_run()
    module.set_tracking_uri(None)


def _of_mlflow(mlflow: Any, run_id: str, store: Path) -> Rows:
    """What is in the files, of which the client, who looks through all of them for each metric, has to give the same."""
    (directory,) = store.glob(f"mlruns/*/{run_id}/metrics")
    rows: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for path in filter(Path.is_file, directory.rglob("*")):
        key = path.relative_to(directory).as_posix()
        for line in path.read_text(encoding="utf-8").splitlines():
            _, value, step = line.split()[:3]
            assert key not in rows[int(step)]
            rows[int(step)][key] = float(value)
    for key in list(rows[0])[:3]:
        history = mlflow.MlflowClient().get_metric_history(run_id, key)
        assert _bits({metric.step: {key: metric.value} for metric in history}) == _bits({n: {key: rows[n][key]} for n in rows})
    return dict(rows)


@pytest.mark.parametrize("given", ["the module", "the sink"])
def test_mlflow_has_every_value_of_more_than_a_thousand(given: str, mlflow: Any, tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        expected = feed(mlflow if given == "the module" else MlflowSink(), logged(MANY))
        assert mlflow.active_run().info.run_id == run.info.run_id
    expected = _renamed(expected, ROOT_MEAN, "activation/_root module_/mean")
    assert _bits(_of_mlflow(mlflow, run.info.run_id, tmp_path)) == _bits(expected)


def test_mlflow_itself_refuses_the_name_of_a_root_module(mlflow: Any, tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        with pytest.raises(mlflow.exceptions.MlflowException, match="Names may only contain"):
            mlflow.log_metrics({ROOT_MEAN: 1.0}, step=0)
        MlflowSink().log({ROOT_MEAN: 1.0}, 0)
    assert _of_mlflow(mlflow, run.info.run_id, tmp_path) == {0: {"activation/_root module_/mean": 1.0}}


def _runs(store: Path) -> list[str]:
    return [path.parent.name for path in store.glob("mlruns/*/*/metrics")]


def test_mlflow_in_a_thread_logs_to_the_run_that_was_active(mlflow: Any, tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        expected = _renamed(feed(mlflow, thread=True), ROOT_MEAN, "activation/_root module_/mean")
    assert _bits(_of_mlflow(mlflow, run.info.run_id, tmp_path)) == _bits(expected)
    assert _runs(tmp_path) == [run.info.run_id]


def test_mlflow_has_the_last_row_of_a_run_that_has_ended(mlflow: Any, tmp_path: Path) -> None:
    run = mlflow.start_run()
    with trained(mlflow) as expected:
        mlflow.end_run()
    assert mlflow.active_run() is None
    assert _of_mlflow(mlflow, run.info.run_id, tmp_path) == expected
    assert _runs(tmp_path) == [run.info.run_id]


def test_mlflow_without_an_active_run_is_refused_and_starts_none(mlflow: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no MLflow run is active"):
        ModuleMonitor(MODEL).add_sink(mlflow)
    assert mlflow.active_run() is None
    assert _runs(tmp_path) == []


def test_names_that_would_be_one_in_mlflow_stay_apart(mlflow: Any, tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        feed(mlflow, {0: {"x[0]": 1.0, "x(0)": 2.0, "x_0_": 3.0}})
    assert sorted(_of_mlflow(mlflow, run.info.run_id, tmp_path)[0].values()) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("name", ["a//b", "/a", "a/", "./a", "../a", "..a", "..", "n" * 251], ids=lambda name: name[:4])
def test_a_name_that_mlflow_refuses_is_no_loss(name: str, mlflow: Any, tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        with pytest.raises(mlflow.exceptions.MlflowException):
            mlflow.log_metrics({name: 2.0}, step=0)
        feed(mlflow, {step: {"good": 1.0, name: 2.0} for step in range(4)})
    rows = _of_mlflow(mlflow, run.info.run_id, tmp_path)
    assert {step: sorted(values.values()) for step, values in rows.items()} == {step: [1.0, 2.0] for step in range(4)}
    assert {values["good"] for values in rows.values()} == {1.0}


def test_a_row_that_failed_half_way_goes_on_where_it_stopped(mlflow: Any, tmp_path: Path) -> None:
    class Flaky:
        calls = 0

        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            self.calls += 1
            if self.calls in (2, 5, 6):  # the second half of a row, and that of the next one twice
                raise ConnectionError("the network is down")
            mlflow.log_metrics(metrics, step=step)

    with mlflow.start_run() as run:
        expected = _renamed(feed(MlflowSink(Flaky()), logged(MANY)), ROOT_MEAN, "activation/_root module_/mean")
    assert _bits(_of_mlflow(mlflow, run.info.run_id, tmp_path)) == _bits(expected)


# --- Lightning -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def loggers() -> Any:
    return pytest.importorskip("lightning.pytorch.loggers")


def _of_csv(directory: str) -> Rows:
    with Path(directory, "metrics.csv").open(encoding="utf-8", newline="") as file:
        return {int(row.pop("step")): {key: float(value) for key, value in row.items()} for row in csv.DictReader(file)}


def _of_tensorboard(directory: str | Path) -> Rows:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    rows: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            assert tag not in rows[event.step]
            rows[event.step][tag] = event.value
    return dict(rows)


def test_lightnings_csv_logger_has_every_value(loggers: Any, tmp_path: Path) -> None:
    logger = loggers.CSVLogger(tmp_path)
    expected = feed(logger)
    logger.finalize("success")
    assert _bits(_of_csv(logger.log_dir)) == _bits(expected)


def test_lightnings_tensorboard_logger_has_every_value_as_float32(loggers: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    logger = loggers.TensorBoardLogger(tmp_path)
    expected = feed(logger)
    logger.finalize("success")
    assert _bits(_of_tensorboard(logger.log_dir)) == _bits(_float32(expected))


def test_lightnings_csv_logger_has_the_row_that_comes_after_its_end(loggers: Any, tmp_path: Path) -> None:
    logger = loggers.CSVLogger(tmp_path)
    with trained(logger) as expected:
        logger.finalize("success")  # as Trainer.fit does
    assert _of_csv(logger.log_dir) == expected


def test_a_module_of_lightning_is_refused_at_once() -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    with pytest.raises(TypeError, match="a sink needs a method log"):
        ModuleMonitor(MODEL).add_sink(lightning.LightningModule())


# the logger removes the brackets and says so for each name
@pytest.mark.filterwarnings("ignore:MLFlow only allows:RuntimeWarning")
def test_lightnings_mlflow_logger_has_every_value_of_more_than_a_thousand(loggers: Any, mlflow: Any, tmp_path: Path) -> None:
    logger = loggers.MLFlowLogger(tracking_uri=mlflow.get_tracking_uri())
    expected = feed(logger, logged(MANY))
    logger.finalize("success")
    expected = _renamed(expected, ROOT_MEAN, "activation/root module/mean")
    assert _bits(_of_mlflow(mlflow, logger.run_id, tmp_path)) == _bits(expected)


def test_lightnings_mlflow_logger_in_the_sink_for_mlflow_needs_no_warning(loggers: Any, mlflow: Any, tmp_path: Path) -> None:
    logger = loggers.MLFlowLogger(tracking_uri=mlflow.get_tracking_uri())
    expected = feed(MlflowSink(logger))
    logger.finalize("success")
    expected = _renamed(expected, ROOT_MEAN, "activation/_root module_/mean")
    assert _bits(_of_mlflow(mlflow, logger.run_id, tmp_path)) == _bits(expected)


@pytest.mark.parametrize("given", ["fabric itself", "logger", "log_dict"])
def test_a_logger_of_fabric_has_every_value(given: str, tmp_path: Path) -> None:
    module = pytest.importorskip("lightning.fabric")
    logger = pytest.importorskip("lightning.fabric.loggers.csv_logs").CSVLogger(tmp_path)
    fabric = module.Fabric(accelerator="cpu", devices=1, loggers=logger)
    expected = feed(getattr(fabric, given, fabric))
    logger.finalize("success")
    assert _bits(_of_csv(logger.log_dir)) == _bits(expected)


# --- Accelerate ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def accelerator(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes an Accelerator with the trackers that are named or given."""
    accelerate = pytest.importorskip("accelerate")
    state = pytest.importorskip("accelerate.state")
    made = []

    def make(*trackers: Any) -> Any:
        for name in ("tensorboard", "wandb"):
            if name in trackers:
                pytest.importorskip(name)
        made.append(accelerate.Accelerator(cpu=True, log_with=list(trackers), project_dir=tmp_path))
        made[-1].init_trackers("tests", init_kwargs={"wandb": {"dir": tmp_path}})
        return made[-1]

    yield make
    for each in made:
        each.end_training()
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()


def _own_tracker() -> Any:
    """A tracker that somebody wrote, with all its ``rows``."""
    tracking = pytest.importorskip("accelerate.tracking")

    class Own(tracking.GeneralTracker):
        name, requires_logging_directory, tracker = "own", False, None

        def __init__(self) -> None:
            super().__init__()
            self.rows: Rows = {}

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            pass

        def log(self, values: dict[str, float], step: int | None = None, **how: Any) -> None:
            assert step is not None
            assert step not in self.rows
            self.rows[step] = dict(values)

    return Own()


def _of_wandb(directory: Path) -> Rows:
    rows: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for row in history(directory):
        step = row.pop(AXIS)
        assert step not in rows
        rows[step] = {key: value for key, value in row.items() if not key.startswith("_")}
    return dict(rows)


def test_an_accelerator_gives_every_value_to_each_of_its_trackers(accelerator: Callable[..., Any], tmp_path: Path) -> None:
    own = _own_tracker()
    expected = feed(it := accelerator(own, "tensorboard", "wandb"))
    it.end_training()
    assert _bits(own.rows) == _bits(_of_wandb(tmp_path)) == _bits(expected)
    assert _bits(_of_tensorboard(tmp_path / "tests")) == _bits(_float32(expected))


def test_where_one_tracker_of_an_accelerator_fails_the_others_go_on(accelerator: Callable[..., Any], tmp_path: Path) -> None:
    def refuse(values: dict[str, float], step: int) -> None:
        raise ConnectionError("the network is down")

    own = _own_tracker()
    own.log = refuse
    it = accelerator(own, "tensorboard", "wandb")
    with pytest.warns(GradmonWarning, match="sink Own failed 3 times"), trained(it, lost={"sink:Own": 4}) as expected:
        pass
    it.end_training()
    assert _of_wandb(tmp_path) == expected
    assert _of_tensorboard(tmp_path / "tests") == _float32(expected)


def test_an_accelerator_with_wandb_has_every_row_of_a_script_that_counts_from_one(
    accelerator: Callable[..., Any], tmp_path: Path
) -> None:
    it = accelerator("wandb")
    with trained(it, after=lambda step: it.log({"loss": step / 2}, step=step + 1)) as expected:
        pass
    it.end_training()
    rows = history(tmp_path)
    assert {row[AXIS]: {NORM: row[NORM]} for row in rows if NORM in row} == expected
    assert [row["loss"] for row in rows if "loss" in row] == [0.0, 0.5, 1.0, 1.5]


def test_an_accelerator_with_mlflow_has_every_value(accelerator: Callable[..., Any], mlflow: Any, tmp_path: Path) -> None:
    it = accelerator("mlflow")
    run = it.get_tracker("mlflow", unwrap=True)
    expected = _renamed(feed(it), ROOT_MEAN, "activation/_root module_/mean")
    it.end_training()
    assert _bits(_of_mlflow(mlflow, run.info.run_id, tmp_path)) == _bits(expected)


def test_an_accelerator_of_another_process_than_the_main_one_gets_nothing(accelerator: Callable[..., Any]) -> None:
    own = _own_tracker()
    it = accelerator(own)
    pytest.importorskip("accelerate").PartialState().process_index = 1
    assert not it.is_main_process
    feed(it)
    assert own.rows == {}


# --- trackers with threads and hooks of their own, each in a process of its own ------------------------------------------------------


def _fed_elsewhere(code: str, directory: Path, **environment: str) -> None:
    """Run ``code`` in ``directory``, which is its home as well. There, ``feed`` and ``trained`` are the functions above."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COMET_", "SWANLAB_"))}
    code = f"import sys\nsys.path.append({str(Path(__file__).parents[1])!r})\nfrom {__name__} import feed, trained\n{textwrap.dedent(code)}"
    done = forked.run(code, cwd=directory, environment=kept | {"HOME": str(directory)} | environment)
    assert done.returncode == 0, done.stderr
    assert "GradmonWarning" not in done.stderr


def test_swanlab_has_every_value(tmp_path: Path) -> None:
    pytest.importorskip("swanlab")
    store = pytest.importorskip("swanlab.sdk.internal.core_python.store")
    records = pytest.importorskip("swanlab.proto.swanlab.record.v1.record_pb2")
    probes = ("HARDWARE", "RUNTIME", "REQUIREMENTS", "GIT", "MONITOR")
    code = """
        import swanlab
        swanlab.init(mode="offline", log_dir="logs", project="tests")
        feed(swanlab)
        swanlab.finish()
    """
    _fed_elsewhere(code, tmp_path, SWANLAB_SAVE_DIR=str(tmp_path), **{f"SWANLAB_PROBE_{probe}": "false" for probe in probes})
    (path,) = tmp_path.glob("logs/run-*/*.swanlab")
    reader = store.DataStoreReader()
    reader.open(path)
    rows: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for data in reader:
        record = records.Record.FromString(data)
        if record.WhichOneof("record_type") == "scalar":
            assert record.scalar.key not in rows[record.scalar.step]
            rows[record.scalar.step][record.scalar.key] = record.scalar.value.number
    reader.close()
    assert _bits(rows) == _bits(logged())


@pytest.fixture
def comet(tmp_path: Path) -> Callable[[str], Rows]:
    """Runs code that has an ``experiment`` and gives what that wrote."""
    if find_spec("comet_ml") is None:  # importing it here would leave its hooks behind
        pytest.skip("comet_ml is not installed")
    start = """
        import comet_ml
        off = dict.fromkeys(["log_code", "log_graph", "log_git_metadata", "log_git_patch", "log_env_details", "parse_args"], False)
        experiment = comet_ml.OfflineExperiment(
            offline_directory="logs", project_name="tests", auto_output_logging=False, display_summary_level=0, **off
        )
    """

    def run(code: str) -> Rows:
        code = f"{textwrap.dedent(start)}\n{textwrap.dedent(code)}\nexperiment.end()"
        _fed_elsewhere(code, tmp_path, COMET_DISABLE_AUTO_LOGGING="1", COMET_ERROR_TRACKING_ENABLE="false")
        (path,) = tmp_path.glob("logs/*.zip")
        with zipfile.ZipFile(path) as file:
            messages = [json.loads(line) for line in file.read("messages.json").splitlines()]
        rows: defaultdict[int, dict[str, float]] = defaultdict(dict)
        for message in messages:
            if message["type"] == "metric_msg" and (metric := message["payload"]["metric"])["metricName"] != "process duration":
                assert metric["metricName"] not in rows[metric["step"]]
                rows[metric["step"]][metric["metricName"]] = float(metric["metricValue"])
        return dict(rows)

    return run


def test_comet_has_every_value(comet: Callable[[str], Rows]) -> None:
    assert _bits(comet("feed(experiment)")) == _bits(logged())


def test_comet_keeps_the_step_that_the_script_has_set(comet: Callable[[str], Rows]) -> None:
    rows = comet("""
        with trained(experiment, before=experiment.set_step, after=lambda step: experiment.log_metric("loss", step / 2)):
            pass
    """)
    assert {step: values.pop("loss") for step, values in rows.items()} == {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5}
    assert {step: set(values) for step, values in rows.items()} == {step: {NORM} for step in range(4)}


def test_what_comes_after_the_end_of_an_experiment_of_comet_is_told(comet: Callable[[str], Rows]) -> None:
    rows = comet("""
        import pytest
        from torch_gradmon import GradmonWarning

        told = pytest.warns(GradmonWarning, match="the experiment has ended")
        with told, trained(experiment, lost={"sink:CometSink": 1}):
            experiment.end()
    """)
    assert list(rows) == [0, 1, 2]


def test_names_that_would_be_one_in_comet_stay_apart(comet: Callable[[str], Rows]) -> None:
    rows = comet("""
        long = "gradient/" + "backbone." * 11
        feed(experiment, {0: {f"{long}weight/norm": 1.0, f"{long}bias/norm": 2.0}})
    """)
    assert sorted(rows[0].values()) == [1.0, 2.0]
