"""The width sweep as a whole: what is wrong is said before it starts, what theory says comes out, and the command line."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import width_models as models
from torch_gradmon.analysis.width_sweep import WidthSweep, result, width_sweep
from torch_gradmon.analysis.width_sweep.sweep import usual_loss
from torch_gradmon.cli.main import main

pytestmark = pytest.mark.thorough

INPUTS, CLASSES = torch.randn(4, 6, generator=torch.Generator().manual_seed(3)), torch.tensor([0, 1, 2, 0])


def chain(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))


def quick(factory: Any = chain, data: Any = (INPUTS, CLASSES), **arguments: Any) -> WidthSweep:
    return width_sweep(factory, data, **{"widths": (8, 16, 32), "seeds": 2, "steps": 2, **arguments})


# --- what is wrong is said before the sweep starts -----------------------------------------------------------------------------------


class Counting:
    """A factory that knows what was made of it; the factory gives one more model for each run."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make, self.widths = make, list[int]()

    def __call__(self, width: int) -> Any:
        self.widths.append(width)
        return self.make(width)


def raising(width: int) -> nn.Module:
    if width == 16:
        raise RuntimeError("16 is not divisible by 3")
    return chain(width)


def deeper(width: int) -> nn.Module:
    return nn.Sequential(*chain(width), nn.Linear(3, 3)) if width == 32 else chain(width)


def flat(width: int) -> nn.Module:
    model = chain(width)
    if width == 16:
        model[2] = nn.BatchNorm1d(16)
    return model


class Rigid(nn.Module):
    """Runs at width 8 only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(6, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).view(4, 8)  # type: ignore[no-any-return]


class Single(nn.Module):
    """Insists on float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(6, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.float())  # type: ignore[no-any-return]


class Computed(nn.Module):
    """Holds a weight that is computed from a parameter, as torch.nn.utils.weight_norm does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.root = nn.Parameter(torch.randn(width, 6))
        self.weight = self.root * 2

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


same = chain(8)


@pytest.mark.parametrize(
    ("factory", "error", "message"),
    [
        (raising, ValueError, r"width 16: RuntimeError: 16 is not divisible by 3; leave that width out"),
        (lambda width: width, TypeError, r"must return a torch.nn.Module.* at width 8 it returned 8 of type int"),
        (lambda width: (chain(width), None, 1), TypeError, r"must return a torch.nn.Module"),
        (
            lambda width: same,
            ValueError,
            r"at width 16 the factory returned 0.weight of an earlier model.* make a new model in every call",
        ),
        (
            lambda width: nn.Sequential(chain(width), nn.Linear(3, 8), same[4]) if width < 32 else chain(width),
            ValueError,
            r"at width 16 the factory returned 2.weight of an earlier model.* freeze parameters that all models share",
        ),
        (lambda width: nn.Sequential(nn.LazyLinear(width)), ValueError, r"at width 8 0.weight is not initialised before"),
        (lambda width: chain(width).to("meta"), ValueError, r"at width 8 the model cannot be copied: .* which has no values"),
        (Computed, ValueError, r"at width 8 the model cannot be copied: .* no tensor of the model may be computed from others"),
        (lambda width: chain(8), ValueError, r"widths 8 and 16 have the same sizes: the factory does not use the width"),
        (lambda width: chain(16 if width == 8 else width), ValueError, r"widths 8 and 16 have the same sizes.* rounds both"),
        (
            lambda width: chain(64 // width),
            ValueError,
            r"0.weight has a side of 8 at width 8, but of 4 at width 16; sizes must grow",
        ),
        (deeper, ValueError, r"widths 8 and 32 are not the same: 5.bias is only in that of width 32"),
        (flat, ValueError, r"2.weight has \(8, 8\) at width 8, but \(16,\) at width 16"),
        (
            Rigid,
            ValueError,
            r"at width 16 the model does not run on the batch: RuntimeError: shape .*; the batch must fit all widths",
        ),
        (Single, ValueError, r"at width 8 a copy of the model in torch.float64 does not run: .*, give probe_dtype=torch.float32"),
        (
            lambda width: nn.Linear(7, width),
            ValueError,
            r"at width 8 the model does not run on the batch: .*; fix the factory, or give data= and loss=",
        ),
        (
            lambda width: (chain(width), torch.optim.SGD(same.parameters())),
            ValueError,
            r"optimizer of width 8 holds no parameter",
        ),
        (
            lambda width: (chain(width), "adam"),
            TypeError,
            r"optimizer of width 8 must be one like those of torch.optim, got 'adam'",
        ),
        (lambda width: (m := chain(width), torch.optim.LBFGS(m.parameters())), ValueError, r"step without a closure"),
        (lambda width: nn.ReLU(), ValueError, r"optimizer"),
    ],
)
def test_a_wrong_factory_is_told_with_the_width_and_the_remedy(factory: Any, error: type[Exception], message: str) -> None:
    counting = Counting(factory)
    with pytest.raises(error, match=message):
        width_sweep(counting, (INPUTS, CLASSES), widths=(8, 16, 32), optimizer="sgd")
    assert len(counting.widths) <= 3
    assert counting.widths == sorted(set(counting.widths))  # each width once: no run has begun


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"widths": (8, 16)}, ValueError, r"needs 3 widths or more"),
        ({"widths": (8, 16, 16)}, ValueError, r"names one twice"),
        ({"widths": (0, 8, 16)}, ValueError, r"whole numbers of at least 1"),
        ({"widths": (8, 16.0, 32)}, ValueError, r"whole numbers of at least 1"),
        ({"seeds": 0}, ValueError, r"give at least one"),
        ({"seeds": [1, 1]}, ValueError, r"names one twice"),
        ({"steps": 0}, ValueError, r"steps=0 must be a positive int"),
        ({"tolerance": 0.0}, ValueError, r"tolerance=0.0 must be"),
        ({"confidence": 95}, ValueError, r"confidence=95 must be a share"),
        ({"optimizer": "adma"}, ValueError, r"did you mean adam"),
        ({"optimizer": 3}, TypeError, r"optimizer must be a name or a function"),
        ({"optimizer": lambda model: None}, ValueError, r"at width 8 the optimizer cannot be made: TypeError"),
        ({"lr": 0.0}, ValueError, r"lr=0.0 must be positive"),
        ({"lr_exponent": math.nan}, ValueError, r"lr_exponent=nan"),
        ({"loss": "mse"}, TypeError, r"loss must be a function, got 'mse'"),
        ({"loss": lambda model, batch: model(batch[0])}, TypeError, r"loss at width 8 must be one number .* shape \(4, 3\)"),
        ({"loss": lambda model, batch: 0.5}, TypeError, r"loss at width 8 must be one number with a gradient, got 0.5"),
        ({"loss": lambda model, batch: model(batch[0]).sum() / 0}, ValueError, r"loss at width 8 is -?inf before the first step"),
        ({"expected": "standrd"}, ValueError, r"did you mean standard"),
        ({"expected": {"5": 1.0}}, ValueError, r"matches none of the modules"),
        ({"expected": 0.5}, TypeError, r"expected must be one of stable, standard, or a dict"),
        ({"expected": "standard", "optimizer": lambda m, w: torch.optim.Rprop(m.parameters())}, ValueError, r"not for Rprop"),
        ({"factory": chain(8)}, TypeError, r"factory must be a function of the width"),
        ({"widths": 64}, TypeError, r"widths=64 must be a list of whole numbers"),
        ({"seeds": 2.5}, TypeError, r"seeds=2.5 must be a list of whole numbers"),
        ({"seeds": True}, TypeError, r"seeds=True must be a list"),
        ({"tolerance": "a"}, TypeError, r"tolerance must be a number, got 'a'"),
        ({"confidence": True}, TypeError, r"confidence must be a number, got True"),
        ({"lr": "1e-3"}, TypeError, r"lr must be a number, got '1e-3'"),
        ({"probe_dtype": "float32"}, TypeError, r"probe_dtype must be torch.float64 or another"),
        ({"probe_dtype": torch.int64}, TypeError, r"probe_dtype must be torch.float64 or another"),
        (
            {"data": lambda: (INPUTS, CLASSES)},
            ValueError,
            r"the data of seed 0 cannot be loaded: TypeError: .*a function of the seed",
        ),
        ({"data": []}, ValueError, r"the data of seed 0 has no batch"),
        ({"data": iter([(INPUTS, CLASSES)])}, ValueError, r"empty after the first seed"),
        ({"data": INPUTS}, ValueError, r"there are no targets"),
    ],
)
def test_a_wrong_argument_is_told_before_anything_runs(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    counting = Counting(chain)
    usual = {"factory": counting, "data": (INPUTS, CLASSES), "widths": (8, 16, 32), "optimizer": "sgd"}
    with pytest.raises(error, match=message):
        width_sweep(**{**usual, **arguments})
    assert len(counting.widths) <= 3


# --- what a sweep does ----------------------------------------------------------------------------------------------------------------


def test_a_sweep_trains_as_a_plain_loop_does() -> None:
    sweep = quick(optimizer="sgd", lr=0.5, lr_exponent=-0.5, steps=3)
    assert [(run.width, run.seed) for run in sweep.runs] == [(w, s) for s in (0, 1) for w in (8, 16, 32)]
    torch.manual_seed(1_000_003 + 32)
    model = chain(32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 / 2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(INPUTS), CLASSES)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    run = sweep.runs[-1]
    assert run.losses == losses
    outputs = model.double()(INPUTS.double())
    assert run.steps[-1][""].output == pytest.approx(outputs.abs().mean().item(), rel=1e-12)
    assert set(run.steps[-1]) == {"0", "1", "2", "3", "4", ""}


def test_a_sweep_says_the_same_again_and_leaves_the_generator_alone() -> None:
    def losses(*seeds: int) -> list[list[float]]:
        found = width_sweep(chain, lambda seed: (torch.randn(4, 6), CLASSES), widths=(8, 16, 32), seeds=seeds, steps=2)
        return [run.losses for run in found.runs]

    numbers = torch.get_rng_state()
    one, plain = losses(4), quick(seeds=[4]).to_dict()
    assert torch.equal(torch.get_rng_state(), numbers)
    torch.manual_seed(99)
    assert quick(seeds=[4]).to_dict() == plain
    assert losses(3, 4)[3:] == losses(4) == one
    assert quick(seeds=[5]).to_dict()["runs"] != plain["runs"]


def test_all_widths_of_a_seed_get_the_same_batches_and_batches_come_again() -> None:
    seen: list[tuple[int, float]] = []

    def data(seed: int) -> list[tuple[Tensor, Tensor]]:
        return [(torch.full((4, 6), float(seed + k)) + torch.rand(1), CLASSES) for k in (1, 20, 300)][: 2 if seed == 0 else 3]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if model[0].weight.requires_grad:  # type: ignore[index, union-attr]
            seen.append((model[0].out_features, batch[0][0, 0].item()))  # type: ignore[index]
        return usual_loss(model, batch)

    sweep = width_sweep(chain, data, widths=(8, 16, 32), seeds=2, steps=3, loss=loss, lr=1e-4)
    runs = [[value for w, value in seen[3:][3 * place : 3 * place + 3]] for place in range(6)]
    assert runs[0] == runs[1] == runs[2]
    assert runs[3] == runs[4] == runs[5] != runs[0]
    assert runs[0][2] == runs[0][0] != runs[0][1]  # two batches for three steps
    assert len(set(runs[3])) == 3
    assert sweep.runs[0].steps[0]["0"].input == pytest.approx(runs[0][0])  # measured on the first batch


def test_a_model_that_writes_to_its_inputs_does_not_change_the_batch() -> None:
    class Doubles(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.net = chain(width)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x.mul_(2))  # type: ignore[no-any-return]

    inputs = INPUTS.clone()
    sweep = quick(Doubles, (inputs, CLASSES))
    assert torch.equal(inputs, INPUTS)
    assert len({run.steps[0]["net.0"].input for run in sweep.runs}) == 1


def test_batches_of_other_shapes_are_understood() -> None:
    pair = quick()
    as_list = width_sweep(chain, [INPUTS, CLASSES], widths=(8, 16, 32), seeds=2, steps=2)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(INPUTS, CLASSES), batch_size=4)
    loaded = width_sweep(chain, loader, widths=(8, 16, 32), seeds=2, steps=2)
    assert [run.losses for run in pair.runs] == [run.losses for run in as_list.runs] == [run.losses for run in loaded.runs]


def test_the_usual_loss_is_that_of_the_targets_or_of_the_model() -> None:
    model = nn.Linear(6, 3)
    whole, real = torch.tensor([[0, 1], [2, 0]]), torch.randn(2, 2, 3)
    x = torch.randn(2, 2, 6)
    assert torch.equal(usual_loss(model, (x, whole)), F.cross_entropy(model(x).reshape(4, 3), whole.reshape(4)))
    assert torch.equal(usual_loss(model, (x, real)), F.mse_loss(model(x), real))

    class Own(nn.Module):
        def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": (ids - labels).sum()}

    assert usual_loss(Own(), {"ids": torch.tensor(5.0), "labels": torch.tensor(3.0)}).item() == 2.0


def test_a_factory_may_give_the_optimizer_and_a_dict_may_be_the_batch() -> None:
    class Named(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.body = chain(width)

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.body(x), y)}

    def factory(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Named(width)
        return model, torch.optim.SGD(
            [{"params": model.body[0].parameters(), "lr": 1.0}, {"params": model.body[2].parameters()}], lr=0.1
        )

    sweep = width_sweep(factory, {"x": INPUTS, "y": CLASSES}, widths=(8, 16, 32), seeds=1)
    last = [verdict for verdict in sweep.verdicts if verdict.module == "body.4" and verdict.term == "update"]
    assert [(v.state, v.reason) for v in last] == [("zero", "its parameters do not move")]
    assert sweep.layers["body.4"].lr_exponent is None
    assert sweep.layers["body.0"].lr_exponent == 0.0


def test_a_layer_that_has_a_learning_rate_and_does_not_move_lets_nobody_pass() -> None:
    class Dead(nn.Module):
        def __init__(self, width: int, trained: bool) -> None:
            super().__init__()
            self.body, self.dead = chain(width), nn.Linear(6, width).requires_grad_(trained)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) + 0.0 * self.dead(x).sum()

    def swept(trained: bool) -> Any:
        expected = {"body": None, "dead": (0.0, None)}
        return width_sweep(
            lambda w: Dead(w, trained), (INPUTS, CLASSES), widths=(8, 16, 32), seeds=1, optimizer="sgd", expected=expected
        )

    sweep = swept(True)
    assert sweep.outcome == "undecided"
    assert "no judged term has moved" in sweep.words()
    dead = next(v for v in sweep.verdicts if v.module == "dead" and v.term == "update")
    assert (dead.state, dead.judged) == ("zero", True)
    assert not next(v for v in swept(False).verdicts if v.module == "dead" and v.term == "update").judged


def test_training_that_diverges_fails_and_says_where() -> None:
    def data(seed: int) -> Any:
        return INPUTS, CLASSES, torch.tensor(math.inf if seed == 1 else 1.0)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = usual_loss(model, batch[:2])
        return value * batch[2] if model[0].out_features == 32 else value  # type: ignore[index]

    sweep = width_sweep(chain, data, widths=(8, 16, 32), seeds=2, steps=1, loss=loss)
    assert sweep.outcome == "fails"
    assert "Training diverged in 0 (not finite at width 32 with seed 1)" in sweep.words()
    assert "diverged" not in sweep.of_seeds(0).words()
    text = json.dumps(sweep.to_dict(), allow_nan=False)
    assert json.loads(text)["runs"][-1]["losses"] == [None]


def test_what_is_saved_is_what_was_measured(tmp_path: Path) -> None:
    sweep = quick(expected={"4": (1.0, None)}, tolerance=0.3, confidence=0.9)
    sweep.save(tmp_path / "sweep.json")
    kept = json.loads((tmp_path / "sweep.json").read_text())
    assert kept["outcome"] == sweep.outcome
    assert (kept["tolerance"], kept["confidence"], kept["words"]) == (0.3, 0.9, sweep.words())
    assert kept["settings"] == {
        "widths": [8, 16, 32],
        "seeds": [0, 1],
        "steps": 2,
        "optimizer": "adamw",
        "lr": 0.001,
        "lr_exponent": 0.0,
        "expected": {"4": [1.0, None]},
        "probe_dtype": "float64",
    }
    assert kept["verdicts"][0]["slope"]["exponent"] == sweep.verdicts[0].slope.exponent  # type: ignore[union-attr]
    assert kept["runs"][2]["steps"][1]["2"]["update"] == sweep.runs[2].steps[1]["2"].update
    assert [(v["expected"], v["as_expected"]) for v in kept["verdicts"] if v["module"] == "4"][1] == (None, None)


def test_seeds_and_steps_can_be_looked_at_alone() -> None:
    sweep = quick(seeds=[3, 5])
    alone = sweep.of_seeds(5)
    assert alone.seeds == [5]
    assert alone.verdicts == quick(seeds=[5]).verdicts
    assert sweep.verdicts_at(1) == quick(seeds=[3, 5], steps=1).verdicts
    with pytest.raises(ValueError, match=r"seeds=\[4\] are not among \[3, 5\]"):
        sweep.of_seeds(4)
    with pytest.raises(ValueError, match="name one"):
        sweep.of_seeds()
    with pytest.raises(ValueError, match="step=3 is not one of 1 to 2"):
        sweep.verdicts_at(3)


def test_tied_weights_and_layers_that_do_not_grow_are_no_trouble() -> None:
    class Tied(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.embedding, self.gate = nn.Embedding(9, width), nn.Linear(9, 9)
            self.head = nn.Linear(width, 9, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.gate(self.head(self.embedding(tokens)))  # type: ignore[no-any-return]

    tokens = torch.arange(8)
    sweep = width_sweep(Tied, (tokens, tokens + 1), widths=(8, 16, 32), seeds=1, optimizer="adam", lr_exponent=-1.0)
    kinds = {name: (layer.kind, layer.lr_exponent) for name, layer in sweep.layers.items()}
    assert kinds == {"embedding": ("input", -1.0), "head": ("output", -1.0), "gate": ("fixed", -1.0)}


def test_a_frozen_model_is_not_passed() -> None:
    def factory(width: int) -> nn.Module:
        model = chain(width)
        model.scale = nn.Parameter(torch.ones(()))
        return model

    sweep = width_sweep(
        factory,
        (INPUTS, CLASSES),
        widths=(8, 16, 32),
        seeds=1,
        optimizer=lambda model, width: torch.optim.SGD([model.scale], lr=0.1),  # type: ignore[list-item]
        loss=lambda model, batch: usual_loss(model, batch) * model.scale,  # type: ignore[operator]
    )
    assert sweep.outcome == "undecided"
    assert not sweep.passed
    assert "no judged term has moved" in sweep.words()


def test_weights_used_outside_of_their_modules_are_named(tmp_path: Path) -> None:
    class Loose(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.first, self.hidden = nn.Linear(6, width), nn.Linear(width, width)
            self.listed = nn.ParameterList([torch.randn(width, width) / width])
            self.head = nn.Parameter(torch.randn(3, width) / width)
            self.attention = nn.MultiheadAttention(width, 1)  # has a part that is not called, but is measured as a whole

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(F.linear(torch.tanh(self.first(x)), self.hidden.weight)) @ self.listed[0]
            return F.linear(self.attention(x, x, x)[0], self.head)

    sweep = quick(Loose, (INPUTS, CLASSES))
    assert set(sweep.layers) == {"first", "attention"}
    assert set(sweep.unmeasured) == {"head", "hidden.weight", "hidden.bias", "listed.0"}
    assert all(name in sweep.words().splitlines()[-1] for name in sweep.unmeasured)
    assert sweep.to_dict()["unmeasured"] == list(sweep.unmeasured)
    assert "Not measured" not in quick().words()
    gone = result.words([], 8, 32, ["a", "b", "c", "d", "e", "f"])
    assert "Not measured, and not judged: a, b, c, d and 2 more" in gone


def test_a_layer_that_is_not_measured_in_all_runs_is_undecided() -> None:
    class Routed(nn.Module):
        """After the first step tokens go to the second expert, of another size of batch."""

        def __init__(self, width: int) -> None:
            super().__init__()
            self.expert, self.head = nn.Linear(6, width), nn.Linear(width, 3)

        def forward(self, x: Tensor) -> Tensor:
            moved = bool((self.head.bias != 0).any())
            return self.head(torch.cat([self.expert(x[:2]), self.expert(x[2:])]) if moved else self.expert(x))

    def factory(width: int) -> nn.Module:
        model = Routed(width)
        nn.init.zeros_(model.head.bias)
        return model

    sweep = quick(factory, (INPUTS, CLASSES))
    assert set(sweep.layers) == {"head"}
    assert set(sweep.unmeasured) == {"expert.weight", "expert.bias"}
    few = [result.SweepRun(width, 0, [1.0], [{"expert": result.LayerTerms(1.0, 1.0, 1.0, 1.0)}]) for width in (8, 16)]
    layers, aims = {"expert": result.Layer("hidden", 0.0)}, {"expert": result.Expected()}
    found = WidthSweep(few, layers, aims, 0.25, 0.95, {}).verdicts[0]
    assert (found.state, found.as_expected, found.judged) == ("undecided", None, True)
    assert "measured in only 2 runs" in found.reason


def test_a_compiled_model_is_trained_as_it_was_before() -> None:
    compiled = quick(lambda width: torch.compile(chain(width), backend="eager"), (INPUTS, CLASSES))
    assert compiled.runs == quick().runs


def test_a_model_that_comes_again_with_the_next_seed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at width 8 the factory returned 0.weight of an earlier model"):
        quick(functools.cache(chain), (INPUTS, CLASSES))
    shared = chain(8)[4].requires_grad_(False)
    quick(lambda width: nn.Sequential(chain(width), nn.Linear(3, 8), shared), (INPUTS, CLASSES))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda seed: (INPUTS[:, : 6 - seed], CLASSES), "at width 8 step 1 with seed 1 failed: RuntimeError"),
        ([(INPUTS, CLASSES), (INPUTS[:, :3], CLASSES)], "at width 8 step 2 with seed 0 failed: RuntimeError"),
        (lambda seed: [(INPUTS, CLASSES)] * (1 - seed) or 1 / 0, "the data of seed 1 cannot be loaded: ZeroDivisionError"),
    ],
)
def test_what_fails_later_is_told_with_the_width_and_the_seed(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quick(chain, data)


@pytest.mark.extra
def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    sweep = quick(widths=numpy.array([8, 16, 32]), lr=numpy.float32(0.5))
    assert sweep.runs == quick(widths=(width for width in (8, 16, 32)), lr=0.5).runs
    sweep.save(tmp_path / "sweep.json")
    assert json.loads((tmp_path / "sweep.json").read_text())["settings"]["lr"] == 0.5


# --- what theory says comes out ---------------------------------------------------------------------------------------------------------

CASES = {
    "mlp": (models.perceptron, models.vectors),
    "transformer": (models.Transformer, models.tokens),
}


def _sweep(name: str, mup: bool, widths: tuple[int, ...], seeds: Any, **arguments: Any) -> WidthSweep:
    model, data = CASES[name]
    rates: Any = (lambda net, width: models.mup_adam(net, width, 3e-3)) if mup else "adam"
    return width_sweep(models.of(model, mup), data, widths=widths, seeds=seeds, **{"optimizer": rates, "lr": 3e-3, **arguments})


def _growing(sweep: WidthSweep) -> set[str]:
    return {verdict.kind for verdict in sweep.verdicts if verdict.term == "update" and verdict.state == "grows"}


@pytest.mark.parametrize("name", CASES)
def test_adam_makes_hidden_and_output_layers_grow_in_the_standard_parametrisation_and_none_in_mup(name: str) -> None:
    standard = _sweep(name, False, (64, 128, 256), 3)
    assert standard.outcome == "fails"
    assert _growing(standard) == {"hidden", "output"}
    assert not [v for v in standard.verdicts if v.term == "update" and v.state == "vanishes"]
    mup = _sweep(name, True, (64, 128, 256, 512), 3)
    assert mup.outcome == "passes", mup.table()


def test_one_small_step_has_the_exponents_of_theory() -> None:
    for optimizer, lr in (("adam", 1e-5), ("sgd", 1e-3)):
        sweep = _sweep("mlp", False, (256, 512, 1024), 3, optimizer=optimizer, lr=lr, steps=1, expected="standard")
        assert sweep.outcome == "passes", sweep.table()
        assert {verdict.expected for verdict in sweep.verdicts} > {0.5 if optimizer == "sgd" else 1.5}


def test_with_a_large_rate_hidden_layers_stay_and_logits_grow_under_cross_entropy_only() -> None:
    def found(data: Any, lr: float) -> WidthSweep:
        model = models.of(models.perceptron, False)
        return width_sweep(
            model, models.fresh(data), widths=(64, 128, 256, 512), seeds=3, optimizer="sgd", lr=lr, lr_exponent=-0.5
        )

    ce = found(models.vectors, 0.4)
    states = {(verdict.kind, verdict.state) for verdict in ce.verdicts if verdict.term == "update"}
    assert states == {("input", "vanishes"), ("hidden", "stable"), ("output", "grows")}
    assert "controlled divergence" in ce.words()
    mse = found(models.vectors_and_scores, 0.4 * models.CLASSES / 2)  # steps of the same size
    assert _growing(mse) >= {"output"}
    assert {verdict.state for verdict in mse.verdicts if verdict.kind == "hidden" and verdict.term == "update"} != {"stable"}
    assert "controlled divergence" not in mse.words()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["mlp_standard", "mlp_mup", "transformer_standard", "transformer_mup", "mlp_mup_sgd", "theory_transformer"]
)
def test_five_sweeps_of_five_say_what_theory_says(name: str) -> None:
    from benchmarks.width_sweep import WIDTHS, alone, sweep

    found = alone(sweep(name, WIDTHS, 5))
    assert len(found) == 5
    assert {each.outcome for each in found} == {"fails" if name.endswith("standard") else "passes"}
    if name.endswith("standard"):
        assert all(_growing(each) == {"hidden", "output"} for each in found)


# --- pictures -----------------------------------------------------------------------------------------------------------------------------


def test_the_panels_hold_every_point() -> None:
    sweep = quick(seeds=3)
    update, below, output = sweep.panels().values()
    assert [line.label.split()[0] for line in update] == ["0", "2", "4"]
    assert [line.label.split()[0] for line in below] == ["2", "4"]  # nothing comes from below the first layer
    assert [line.label for line in output] == ["0", "2", "4"]
    points = [[run.steps[-1]["2"].update for run in sweep.runs if run.width == w] for w in (8, 16, 32)]
    assert [update[1].points[w] for w in (8, 16, 32)] == points
    assert update[1].colour == below[0].colour == output[1].colour
    assert update[1].label == f"2 {sweep.verdicts[2].slope.exponent:+.2f}"  # type: ignore[union-attr]


@pytest.mark.extra
def test_a_picture_and_a_figure_are_made(tmp_path: Path) -> None:
    sweep = quick()
    pytest.importorskip("matplotlib")
    sweep.plot(tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    pytest.importorskip("plotly")
    figure = sweep.figure()
    assert len(figure.data) == sum(map(len, sweep.panels().values())) == 8
    assert list(figure.data[1].x) == [8, 16, 32]
    values = [run.steps[-1]["2"].update for run in sweep.runs if run.width == 8]
    assert figure.data[1].y[0] == pytest.approx(math.sqrt(values[0] * values[1]))  # type: ignore[operator]
    assert [trace.showlegend for trace in figure.data] == [True] * 3 + [False] * 5
    assert [trace.name for trace in figure.data[:3]] == ["0", "2", "4"]
    assert list(figure.layout.xaxis.tickvals) == [8, 16, 32]


def test_without_the_packages_pictures_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in ("matplotlib", "matplotlib.figure", "plotly", "plotly.subplots"):
        monkeypatch.setitem(sys.modules, name, None)
    sweep = quick(seeds=1)
    with pytest.raises(ImportError, match=r"pip install .torch_gradmon\[plot\]"):
        sweep.plot("sweep.png")
    with pytest.raises(ImportError, match=r"pip install .torch_gradmon\[report\]"):
        sweep.figure()


# --- the command line ---------------------------------------------------------------------------------------------------------------------

SCRIPT = """
import torch
from torch import nn

def make(width):
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))

def gentle(model, width):
    return torch.optim.SGD(model.parameters(), lr=1e-3)

batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0])

def lost(seed):
    raise KeyError("data")
"""
QUICK = ["--widths", "16", "32", "64", "--seeds", "2", "--steps", "1"]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"script_of_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(SCRIPT)
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    return name


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--optimizer", "adam", "--lr", "1e-2"], 1, "Fails"),
        (["--optimizer", "FILE:gentle", "--expect", "[024]=none"], 1, "Undecided: no judged term"),
        (["--optimizer", "FILE:gentle", "--expect", "standard", "--tolerance", "9"], 0, "Passes: all 5 terms"),
        (["--expect", "0=0,none", "--expect", "[24]=0", "--tolerance", "9"], 0, "Passes: all 5 terms"),
        (["--expect", "0=0", "--expect", "[24]=none", "--tolerance", "9"], 0, "Passes: all 1 terms"),
    ],
)
def test_the_exit_code_says_whether_it_passed(
    script: str, capsys: pytest.CaptureFixture[str], options: list[str], code: int, said: str
) -> None:
    arguments = [option.replace("FILE", f"{script}.py") for option in options]
    assert main(["width-sweep", f"{script}.py:make", "--data", f"{script}:batch", *QUICK, *arguments]) == code
    printed = capsys.readouterr().out
    assert said in printed
    assert printed.splitlines()[0].split()[:3] == ["module", "kind", "term"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["FILE", "--data", "FILE.py:batch"], "must be MODULE:NAME or FILE.py:NAME"),
        (["FILE.py:mak", "--data", "FILE.py:batch"], "AttributeError"),
        (["nowhere.py:make", "--data", "FILE.py:batch"], "there is no file nowhere.py"),
        (["nowhere.at.all:make", "--data", "FILE.py:batch"], "ModuleNotFoundError"),
        (["FILE.py:batch", "--data", "FILE.py:batch"], "factory must be a function"),
        (["FILE.py:make", "--data", "FILE.py:batch", "--widths", "8", "16"], "needs 3 widths"),
        (["FILE.py:make", "--data", "FILE.py:batch", "--optimizer", "adma"], "did you mean adam"),
        (["FILE.py:make", "--data", "FILE.py:batch", "--expect", "0=x"], "give REGEX=EXPONENT"),
        (["FILE.py:make", "--data", "FILE.py:batch", "--expect", "stable", "--expect", "0=1"], "give REGEX=EXPONENT"),
        (["FILE.py:make", "--data", "FILE.py:batch", "--expect", "9=1"], "matches none of the modules"),
        pytest.param(
            ["FILE.py:make", "--data", "FILE.py:batch", "--output", "FILE.py/out.png"],
            "is not a directory",
            marks=pytest.mark.extra,
        ),
        pytest.param(["FILE.py:make", "--data", "FILE.py:batch", "--output", "."], "is a directory", marks=pytest.mark.extra),
        (["FILE.py:make", "--data", "FILE.py:lost"], "the data of seed 0 cannot be loaded: KeyError"),
        (["leaves.py:make", "--data", "FILE.py:batch"], "leaves.py exits when it is imported"),
    ],
)
def test_what_cannot_be_swept_has_another_exit_code(
    script: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["width-sweep", *(argument.replace("FILE", script) for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_the_command_prints_what_it_measured(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["width-sweep", f"{script}:make", "--data", f"{script}:batch", *QUICK]
    code = main([*arguments, "--json"])
    kept = json.loads(capsys.readouterr().out)
    assert code == (0 if kept["outcome"] == "passes" else 1)
    main(arguments)
    assert kept["words"] in capsys.readouterr().out
    assert [(run["width"], run["seed"]) for run in kept["runs"]] == [(w, s) for s in (0, 1) for w in (16, 32, 64)]


@pytest.mark.extra
def test_what_lies_beside_a_file_is_found_and_the_table_comes_before_the_picture(
    script: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / f"helper_{script}.py").write_text(SCRIPT)
    (tmp_path / "inner" / f"main_{script}.py").write_text(f"from helper_{script} import batch, make\n")

    def full(*_: Any) -> None:
        raise OSError("no space left")

    pytest.importorskip("matplotlib")
    monkeypatch.setattr(WidthSweep, "plot", full)
    file = f"inner/main_{script}.py"
    assert main(["width-sweep", f"{file}:make", "--data", f"{file}:batch", *QUICK, "--output", "out.png"]) == 2
    printed = capsys.readouterr()
    assert "out.png cannot be written: no space left" in printed.err
    assert printed.out.startswith("module")


@pytest.mark.extra
def test_a_picture_of_no_known_kind_is_refused_before_the_sweep(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["width-sweep", f"{script}:make", "--data", f"{script}:batch", *QUICK, "--output", "out.xyz"]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert "--output out.xyz must end in " in printed.err
    assert " .png, " in printed.err


@pytest.mark.extra
def test_the_command_draws(script: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    main(["width-sweep", f"{script}:make", "--data", f"{script}:batch", *QUICK, "--output", "new/out.png"])
    assert (tmp_path / "new" / "out.png").read_bytes().startswith(b"\x89PNG")
