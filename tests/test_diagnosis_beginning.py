"""Rules that compare: with the beginning of a training, parameters with each other, and a name before with the same name after."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import torch_gradmon as gradmon
from tests.synthetic_run import Rows, history
from torch_gradmon import Diagnosis
from torch_gradmon.analysis.diagnosis.diagnose import diagnose_history
from torch_gradmon.analysis.diagnosis.history import History
from torch_gradmon.analysis.diagnosis.rules.depth import check_attention, check_depth
from torch_gradmon.analysis.diagnosis.rules.loss import check_learning_rate, check_units
from torch_gradmon.analysis.diagnosis.rules.nonfinite import check_certain
from torch_gradmon.analysis.diagnosis.rules.unused_parameters import check_unused_parameters, check_weights
from torch_gradmon.analysis.diagnosis.series import Matrix
from torch_gradmon.core.moments import ALL_COLUMNS
from torch_gradmon.core.records import StatsTable

LAYERS = [f"{place}.weight" for place in range(9)]
Model = nn.Sequential


def flat(step: int) -> float:
    return 2.0 + (step * 37 % 11) / 100


def comes_down(step: int) -> float:
    return 30.0 * 0.9**step + 1.0


def since(first: int, rms: float) -> Callable[[int], float | None]:
    return lambda step: rms if step >= first else None


def _without(run: History, is_out: Callable[[int], bool]) -> History:
    """The run without the values of some steps."""
    return History([record._replace(values={}) if is_out(record.step) else record for record in run.records])


def rules(run: History) -> list[str]:
    return [finding.rule for finding in diagnose_history(run).findings]


def mlp(*widths: int) -> Model:
    layers = [nn.Linear(into, out) for into, out in pairwise(widths)]
    return Model(*[part for layer in layers for part in (layer, nn.ReLU())][:-1])


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    at: Callable[[int], None] = lambda step: None,
    loss_of: Callable[[int, Tensor], Tensor] = lambda step, loss: loss,
    **options: object,
) -> Diagnosis:
    monitor = gradmon.watch(model, optimizer, on_spike=None, checks=gradmon.Checks(data=False), **options)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        at(step)
        x = torch.randn(32, 8, generator=generator)
        y = x[:, :3].sum(1, keepdim=True).tanh() + 0.5 * torch.randn(32, 1, generator=generator)
        optimizer.zero_grad()
        loss = loss_of(step, nn.functional.mse_loss(model(x), y))
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
    found = monitor.diagnose()
    monitor.detach()
    return found


# --- the beginning -----------------------------------------------------------------------------------------------------------


def _loud(outputs: Rows) -> History:
    rows = dict.fromkeys(LAYERS, 1e-3)
    return history(loss=comes_down, gradient_before_clip=rows, parameter=dict.fromkeys(LAYERS, 0.1), activation=outputs)


def test_outputs_measured_from_a_spike_on_are_not_the_first() -> None:
    assert rules(_loud({"head": 12.0, "[root module]": 12.0})) == ["initialisation-scale"]
    late = diagnose_history(_loud({"head": since(61, 43.0), "[root module]": since(61, 43.0)}))
    assert late.findings == ()
    assert late.unseen["beginning"] == "outputs of modules were first measured in step 61"


def test_outputs_that_grow_over_depth_are_those_of_the_beginning() -> None:
    def of(first: int) -> list[str]:
        return rules(_loud({"0": since(first, 1.0), "1": since(first, 150.0)}))

    assert of(0) == ["exploding-gradients"]
    assert of(61) == []


@pytest.mark.parametrize("batch", [16, 1])
def test_a_loss_that_the_model_computes_is_no_loud_output(batch: int) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(8, 16, 16, 4)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.body(x)
            return {"loss": 100 * nn.functional.mse_loss(logits, labels), "logits": logits}

    torch.manual_seed(0)
    model = Own()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    monitor = gradmon.watch(model, optimizer, on_spike=None, preset="full")
    for _ in range(100):
        x = torch.randn(batch, 8).sign()
        loss = model(x, x[:, :4])["loss"]
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
    found = monitor.diagnose()
    monitor.detach()
    assert not {"initialisation-scale", "exploding-gradients"}.intersection(finding.rule for finding in found.findings)


def test_weights_measured_later_do_not_show_how_they_began() -> None:
    def of(first: int) -> list[str]:
        parameters = {name: since(first, 1.0) for name in LAYERS}
        return rules(history(loss=flat, gradient_before_clip=dict.fromkeys(LAYERS, 1e-3), parameter=parameters))

    assert "initialisation-scale" in of(0)
    assert "initialisation-scale" not in of(10)


def test_a_run_that_goes_on_says_that_its_beginning_is_unknown() -> None:
    rows = dict.fromkeys(LAYERS, 1.0)
    run = history(
        loss=flat, gradient_before_clip=rows, parameter=rows, context=lambda step: {"goes_on": 1.0} if step == 0 else {}
    )
    found = diagnose_history(run)
    assert "initialisation-scale" not in [finding.rule for finding in found.findings]
    assert found.unseen["beginning"] == "the training began before step 0, the first of this run"


@pytest.mark.parametrize(("overflowed", "every", "known"), [(0, 1, True), (3, 1, True), (3, 10, False)])
def test_steps_that_were_not_applied_are_still_the_beginning(overflowed: int, every: int, known: bool) -> None:
    """A GradScaler searches its scale first; of ten steps between two records, others may have been applied."""
    parameters = {"a.weight": since(every if overflowed else 0, 0.1)}
    run = history(applied=lambda step: step // every >= overflowed, every=every, parameter=parameters)
    matrix = run.matrix("parameter", "rms")
    assert matrix is not None
    assert (run.beginning(matrix.steps) is not None) == known


def test_steps_numbered_from_one_are_those_of_a_beginning() -> None:
    records = [record for record in history(steps=50).records if record.step >= 1]
    assert not History(records).is_resumed
    assert History(records[1:]).is_resumed


@pytest.mark.parametrize(("first", "every", "severity"), [(0, 1, "warning"), (500, 1, "info"), (10, 10, "warning")])
def test_a_loss_logged_late_may_have_fallen_before(first: int, every: int, severity: str) -> None:
    run = _without(history(1000, loss=flat), lambda step: step < first or step % every > 0)
    (finding,) = [each for each in diagnose_history(run).findings if each.rule == "loss-plateau"]
    assert finding.severity == severity


def test_attention_measured_later_does_not_show_its_beginning() -> None:
    low = {("attention_entropy_normalized", "attn", "mean"): lambda step: 0.1}
    (finding,) = check_attention(history(loss=comes_down, heads=low))
    assert (finding.severity, finding.evidence["at the beginning"]) == ("warning", 0.1)
    (finding,) = check_attention(_without(history(loss=comes_down, heads=low), lambda step: step < 40))
    assert "at the beginning" not in finding.evidence
    assert "from the start on" not in finding.cause
    assert finding.severity == "info"


def test_units_seen_after_a_spike_have_the_steps_that_were_seen() -> None:
    def of(step: int) -> dict[str, float] | None:
        return {"rms": 0.95, "zero_count": 0.97} if 60 <= step < 70 else None

    run = history(loss=flat, activation={"1": of, "2": of}, kinds={"1": "ReLU", "2": "Tanh"})
    assert {finding.rule: finding.steps for finding in check_units(run)} == {"dead-units": (65, 69), "saturated-units": (62, 69)}


def test_updates_measured_later_are_not_called_the_first() -> None:
    def of(first: int) -> str:
        updates = {name: since(first, 0.025) for name in LAYERS}
        run = history(loss=flat, update=updates, parameter=dict.fromkeys(LAYERS, 0.1))
        return next(finding.cause for finding in check_learning_rate(run) if finding.rule == "learning-rate-high")

    assert of(0).startswith("The first updates are")
    assert of(61).startswith("The first measured updates, from step 61 on, are")


def test_a_fade_is_made_by_training_only_if_the_start_is_known() -> None:
    def of(first: int) -> str:
        fading = {name: since(first, 0.3 ** (8 - place)) for place, name in enumerate(LAYERS)}
        even = {name: (lambda step, of=of: 1.0 if step == first else of(step)) for name, of in fading.items()}
        late = {name: (lambda step, of=of: None if step < first else of(step)) for name, of in even.items()}
        (finding,) = check_depth(history(loss=flat, gradient_before_clip=late, parameter=dict.fromkeys(LAYERS, 0.1)))
        return finding.cause

    assert "so the training caused it" in of(0)
    assert "so the training caused it" not in of(30)


# --- beside zero -------------------------------------------------------------------------------------------------------------


class Lora(nn.Module):
    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.lora_A = nn.Linear(layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 2 * self.lora_B(self.lora_A(x))


class Branch(nn.Module):
    """A residual branch whose last matrix begins at zero, with a gain in the shape of a matrix."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)
        self.gain = nn.Parameter(torch.full((width, 1, 1), 1e-6))
        nn.init.zeros_(self.outer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.relu(self.inner(x))) + self.gain[:, 0, 0] * torch.relu(self.inner(x))


def _tuned(model: Model, change: Callable[[Model], None], optimizer: str, **options: object) -> Diagnosis:
    """Trained until the loss rests, changed, and tuned on more of the same."""
    generator = torch.Generator().manual_seed(2)
    before = torch.optim.AdamW([p for name, p in model.named_parameters() if "gain" not in name], 1e-2)
    for _ in range(80):
        x = torch.randn(64, 8, generator=generator)
        before.zero_grad()
        nn.functional.mse_loss(model(x), x[:, :3].sum(1, keepdim=True).tanh()).backward()
        before.step()
    model.zero_grad()
    change(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    made = torch.optim.AdamW(trained, 1e-4) if optimizer == "adamw" else torch.optim.SGD(trained, 1e-3)
    return train(model, made, 60, **options)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("has_head", [False, True])
def test_adapters_of_low_rank_do_not_fade(optimizer: str, has_head: bool) -> None:
    def adapted(model: Model) -> None:
        model.requires_grad_(False)
        for place in (2, 4, 6):
            model[place] = Lora(model[place])
        if has_head:
            model[8] = nn.Linear(16, 1)

    torch.manual_seed(0)
    found = _tuned(mlp(8, 16, 16, 16, 16, 1), adapted, optimizer).findings
    assert {finding.rule for finding in found} <= {"loss-plateau", "loss-at-chance", "frozen"}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_residual_branches_that_begin_at_zero_are_no_fault(optimizer: str, tmp_path: Path) -> None:
    def branched(model: Model) -> None:
        for place in (1, 3):
            model[place] = Branch(16)

    torch.manual_seed(0)
    found = _tuned(mlp(8, 16, 16, 1), branched, optimizer, run_dir=tmp_path).findings
    assert {finding.rule for finding in found} <= {"loss-plateau", "loss-at-chance"}


def test_matrices_near_zero_count_once_they_have_grown() -> None:
    """The fade of the first layers is seen as soon as the last ones are no longer beside zero."""

    def of(steps: int) -> list[str]:
        fading = {name: 0.3 ** (8 - place) for place, name in enumerate(LAYERS)}
        grows = {name: (lambda step: 0.0 if step < 50 else 0.1) if place > 2 else 0.1 for place, name in enumerate(LAYERS)}
        return [finding.rule for finding in check_depth(history(steps, loss=flat, gradient_before_clip=fading, parameter=grows))]

    assert of(49) == []
    assert of(100) == ["vanishing-gradients"]


def test_a_matrix_that_shrinks_was_not_near_zero() -> None:
    shrinks = {name: (lambda step: 0.1 * 0.9**step) if name == "0.weight" else 0.1 for name in LAYERS}
    run = history(parameter=shrinks)
    norms = run.matrix("parameter", "norm")
    assert norms is not None
    assert run.settled(norms) is norms


def test_weights_that_grow_from_near_zero_do_not_run_away() -> None:
    def of(first: float) -> list[str]:
        rows = {**dict.fromkeys(LAYERS, 0.1), "0.weight": lambda step: first * 1.1**step}
        fan_ins = {**dict.fromkeys(LAYERS, 100), "0.weight": 0}  # a parameter of no layer that torch has
        return [finding.rule for finding in check_weights(history(60, loss=flat, parameter=rows, matrices=fan_ins))]

    assert of(1e-6) == []
    assert of(2e-2) == ["weight-growth"]


def test_a_gain_in_the_shape_of_a_matrix_is_none() -> None:
    shapes = {"gain": {"shape": [16, 1, 1]}, "table": {"shape": [16, 4]}, "last.weight": {"shape": [1, 16]}}
    run = History([], matrices={"gain": 0, "table": 0, "last.weight": 16}, parameters=shapes)
    assert run.matrices == {"table": 0, "last.weight": 16}


@pytest.mark.parametrize(("gradient", "found"), [(0.1, []), (0.0, ["equal-units"])])
def test_zeros_that_get_a_gradient_at_once_are_no_fault(gradient: float, found: list[str]) -> None:
    """As those of a linear probe, a logistic regression, or of adapters that train their second matrix alone."""
    run = history(loss=flat, gradient_before_clip={"head.weight": gradient}, parameter={"head.weight": 0.0})
    assert [finding.rule for finding in check_certain(run)] == found


# --- names -------------------------------------------------------------------------------------------------------------------


def _pruned(model: Model) -> None:
    prune.l1_unstructured(model[0], "weight", 0.5)


def _normalised(model: Model) -> None:
    parametrizations.weight_norm(model[0])


def _nested(model: Model) -> None:
    model[0] = nn.Sequential(model[0], nn.Identity())


@pytest.mark.parametrize("change", [_pruned, _normalised, _nested])
@pytest.mark.parametrize("stored", [False, True])
def test_a_parameter_with_another_name_was_not_frozen(change: Callable[[Model], None], stored: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp(8, 16, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def at(step: int) -> None:
        if step == 15:
            change(model)
            optimizer.param_groups[0]["params"] = list(model.parameters())

    found = train(model, optimizer, 50, at, **({"run_dir": tmp_path} if stored else {}))
    assert found.findings == ()
    if stored:
        assert gradmon.load_run(tmp_path).diagnose().findings == ()


def test_names_that_come_later_have_their_place_in_the_model() -> None:
    """As when layers are thawed from the last to the first, or a weight in the middle gets another name."""

    def table(*names: str) -> StatsTable:
        return StatsTable(names, torch.ones(len(names), 8, dtype=torch.float64), ALL_COLUMNS)

    tables = [(0, table("c", "d")), (1, table("b", "c", "d")), (2, table("a", "b", "new", "d", "e"))]
    matrix = Matrix.of_tables(tables, "norm")
    assert matrix is not None
    assert matrix.names == ("a", "b", "new", "c", "d", "e")
    assert matrix.values.isnan().tolist() == [[name not in of.names for name in matrix.names] for _, of in tables]


# --- frozen, and exactly zero -----------------------------------------------------------------------------------------------------


def test_a_part_that_is_frozen_is_told_with_its_share() -> None:
    model = mlp(8, 16, 16, 1)
    model[2].requires_grad_(False)
    (finding,) = train(model, torch.optim.AdamW([*model[0].parameters(), *model[4].parameters()], 1e-2), 60).findings
    assert (finding.rule, finding.severity, finding.where) == ("frozen", "info", "2")
    assert finding.evidence == {"parameters": 2.0, "share of all elements": pytest.approx(272 / 433)}
    assert "62.8% of all elements are frozen, by requires_grad=False: 2." in finding.cause


class _Adapted(nn.Module):
    """A frozen matrix and two of low rank beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("trains_head", [True, False])
def test_adapters_leave_the_rest_frozen_unless_the_head_is_new(trains_head: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(_Adapted(nn.Linear(16, 32)), nn.ReLU(), _Adapted(nn.Linear(32, 32)), nn.ReLU(), nn.Linear(32, 3))
    model[4].requires_grad_(trains_head)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-3)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    for _ in range(220):
        loss = nn.functional.cross_entropy(model(torch.randn(32, 16)), torch.randint(0, 3, (32,)))
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
    found = {finding.rule: finding for finding in monitor.diagnose().findings}
    monitor.detach()
    frozen = found["frozen"]
    if trains_head:
        assert frozen.severity == "info"
        assert found["loss-at-chance"].severity == "warning"
    else:
        assert (frozen.severity, frozen.where) == ("warning", "4.weight")
        assert frozen.advice.startswith("Adapters train, and the last layer, 4, is frozen")


def test_a_part_that_a_resume_freezes_again_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp(8, 16, 16, 1)
    assert train(model, torch.optim.AdamW(model.parameters(), 1e-2), 40, run_dir=tmp_path).findings == ()
    model = mlp(8, 16, 16, 1)
    model[0].requires_grad_(False)
    train(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2), 8, run_dir=tmp_path, start_step=40)
    (finding,) = [each for each in gradmon.load_run(tmp_path).diagnose().findings if each.rule == "gradient-dropped-to-zero"]
    assert (finding.severity, finding.where, finding.steps) == ("info", "0.weight", (40, 47))
    assert "It trained until step 39, and is frozen since step 40, by requires_grad=False. Also in 0.bias." in finding.cause


def test_gradients_of_exactly_zero_are_told_from_none() -> None:
    def cause(**gradients: float | None) -> tuple[str, str]:
        rows = {f"{name}.weight": rms for name, rms in gradients.items()}
        (finding,) = check_unused_parameters(history(gradient_before_clip=rows, parameter=dict.fromkeys(rows, 0.1)))
        return finding.cause, finding.advice

    zero, advice = cause(a=0.0, b=0.0, c=1.0)
    assert zero.startswith(
        "Its gradient was exactly 0 in every step: dead ReLUs behind it, a multiplication by 0, a mask, or an input of zeros."
    )
    assert "preset='full' tells" in advice
    assert "detach" not in advice
    none, advice = cause(a=None, b=None, c=1.0)
    assert none.startswith("No gradient reached this parameter in any step")
    assert "detach()" in advice
    both, advice = cause(a=0.0, b=None, c=1.0)
    assert "1 of these parameters had one of exactly 0 in every step" in both
    assert "detach()" in advice
    assert "a factor that is 0" in advice


def test_a_dead_relu_is_no_detach_under_the_default_preset() -> None:
    torch.manual_seed(0)
    model = mlp(8, 16, 16, 1)
    nn.init.constant_(model[2].bias, -20.0)
    (finding, *_) = train(model, torch.optim.AdamW(model.parameters(), 1e-3), 60).findings
    assert (finding.rule, finding.where) == ("no-gradient", "0.weight")
    assert "exactly 0" in finding.cause
    assert "detach" not in str(finding)
