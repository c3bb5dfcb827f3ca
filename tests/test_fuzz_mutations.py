"""The fuzzer can fail: each defect that is put into the package on purpose is found by it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torch_gradmon import GradmonWarning, ModuleMonitor, Run
from torch_gradmon.capture.gradients import GradientCapture
from torch_gradmon.monitor.runtime import FollowedLoop, Runtime
from torch_gradmon.monitor.steps import StepLifecycle

from .fuzz import runner
from .fuzz.drawing import plainer
from .fuzz.program import Program

pytestmark = pytest.mark.thorough

Patch = pytest.MonkeyPatch
RICH = Program(
    edit="clip_norm", optimizer="adamw", dropout=0.25, metrics=("gradient", "update", "activation"), run_dir=True, layers="all"
)
_KEPT: list[Any] = []


def _wrap(patch: Patch, owner: Any, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda self, *args, **kwargs: around(original, self, *args, **kwargs))


def _draws_random_numbers(patch: Patch) -> None:
    def around(original: Any, self: StepLifecycle, *args: Any, **kwargs: Any) -> Any:
        torch.rand(())
        return original(self, *args, **kwargs)

    _wrap(patch, StepLifecycle, "open", around)


def _writes_to_a_parameter(patch: Patch) -> None:
    def around(original: Any, self: FollowedLoop, optimizer: Any, *args: Any) -> Any:
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].view(-1)[0].nextafter_(torch.tensor(9.0))
        return original(self, optimizer, *args)

    _wrap(patch, FollowedLoop, "step_ended", around)


def _measures_before_the_clip(patch: Patch) -> None:
    measure = GradientCapture.after_clip

    def around(original: Any, self: FollowedLoop, *args: Any) -> Any:
        original(self, *args)
        with torch.no_grad():
            measure(self.lifecycle.captures.gradients, self.ownership.all_positions, None)

    _wrap(patch, FollowedLoop, "backward_ended", around)
    patch.setattr(GradientCapture, "after_clip", lambda self, positions, inverse_scale: None)


def _gives_values_of_the_step_before(patch: Patch) -> None:
    given: list[dict[str, float]] = [{}]

    def around(original: Any, self: ModuleMonitor) -> Any:
        given.append(original(self))
        return given[-2]

    _wrap(patch, ModuleMonitor, "get_step_metrics", around)


def _has_a_phantom_step(patch: Patch) -> None:
    _wrap(patch, ModuleMonitor, "get_all_metrics", lambda original, self: {**original(self), 999: {}})


def _loses_a_step(patch: Patch) -> None:
    _wrap(patch, ModuleMonitor, "get_all_metrics", lambda original, self: dict(list(original(self).items())[1:]))


def _loses_a_value(patch: Patch) -> None:
    def without(values: dict[str, float]) -> dict[str, float]:
        return {key: value for key, value in values.items() if not key.endswith("grad_max")}

    _wrap(
        patch, ModuleMonitor, "get_all_metrics", lambda original, self: {step: without(v) for step, v in original(self).items()}
    )


def _is_a_little_wrong(patch: Patch) -> None:
    def spoilt(values: dict[str, float]) -> dict[str, float]:
        return {key: value * (1 + 3e-6) if key.endswith("norm") else value for key, value in values.items()}

    _wrap(patch, ModuleMonitor, "get_step_metrics", lambda original, self: spoilt(original(self)))


def _gives_a_false_reason(patch: Patch) -> None:
    reason = "the step was not applied"
    _wrap(patch, ModuleMonitor, "missing", lambda original, self: dict.fromkeys(original(self), reason))


def _warns_of_what_is_not(patch: Patch) -> None:
    def around(original: Any, self: FollowedLoop, *args: Any) -> Any:
        warnings.warn("torch_gradmon: the optimizer steps twice on the same gradient", GradmonWarning, stacklevel=2)
        return original(self, *args)

    _wrap(patch, FollowedLoop, "backward_ended", around)


def _raises(patch: Patch) -> None:
    def around(original: Any, self: ModuleMonitor) -> Any:
        raise RuntimeError("of the monitor's own")

    _wrap(patch, ModuleMonitor, "get_step_metrics", around)


def _keeps_the_model(patch: Patch) -> None:
    def around(original: Any, self: Runtime, module: Any, *args: Any) -> Any:
        _KEPT.append(module)
        return original(self, module, *args)

    _wrap(patch, Runtime, "_follow", around)


def _stores_other_numbers(patch: Patch) -> None:
    def around(original: Any, self: Run, key: str) -> Any:
        return {step: value + 1e-3 for step, value in original(self, key).items()}

    _wrap(patch, Run, "series", around)


DEFECTS: dict[Callable[[Patch], None], str] = {
    _draws_random_numbers: "training is changed",
    _writes_to_a_parameter: "training is changed",
    _measures_before_the_clip: "gradient/body.0.weight/norm is",
    _gives_values_of_the_step_before: "poll of step 1",
    _has_a_phantom_step: "never were",
    _loses_a_step: "steps [0] have no record",
    _loses_a_value: "gradmon/grad_max is absent",
    _is_a_little_wrong: "gradmon/grad_norm is",
    _gives_a_false_reason: "the reason is untrue",
    _warns_of_what_is_not: "warning",
    _raises: "the loop raises",
    _keeps_the_model: "a Net is still alive",
    _stores_other_numbers: "run directory:",
}


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__.strip("_"))
def test_a_defect_is_found(defect: Callable[[Patch], None], monkeypatch: Patch) -> None:
    with monkeypatch.context() as patch:
        defect(patch)
        found = runner.problems(RICH, leaks=defect is _keeps_the_model)
    _KEPT.clear()
    assert any(DEFECTS[defect] in problem for problem in found), found


def test_without_a_defect_nothing_is_found() -> None:
    assert runner.problems(RICH, leaks=True) == []


def test_a_program_that_fails_is_made_smaller(monkeypatch: Patch) -> None:
    def fails(p: Program) -> bool:
        return p.optimizer == "adamw" and p.steps > 2 and "update" in p.metrics

    small = runner.smaller(RICH, fails)
    assert small == Program(steps=3, optimizer="adamw", metrics=("update",))
    assert not any(fails(p) for p in plainer(small))
