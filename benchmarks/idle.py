"""Cost of a step that is not monitored, in microseconds, and remaining hooks on parameters: ``python -m benchmarks.idle``."""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon.plugins.loop_audit import LOOKED, MOST_RESTED, RESTED, TRUSTED

from .machine import machine
from .report import RESULTS, figure, with_spread, write_section
from .timing import spread

PARAMETERS = 150
_WARM_UP = 20
#: In the first steps the audit covers every step, see torch_gradmon/plugins/loop_audit.py.
_FIRST = 250
#: From here on the audit rests in most steps.
_SETTLED = 1500
#: Loops of each kind.
INSTANCES = 8
KINDS: dict[str, dict[str, bool]] = {"bare": {}, "once_hooked": {"once_hooked": True}, "watched": {"watched": True}}
#: Steps of a loop's turn, and those at its beginning that are not measured.
TURN, _COLD = 40, 8
#: Step 0 is monitored, which installs hooks; the measured steps are not.
_NEVER_AGAIN = 10**9


class Tiny(nn.Module):
    """150 parameters and hardly any work."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.ones(8) for _ in range(PARAMETERS))

    def forward(self) -> Tensor:
        """A loss."""
        return torch.stack(list(self.parts)).sum()


class Loop:
    """A training loop on its own model, watched or not."""

    def __init__(self, watched: bool = False, once_hooked: bool = False) -> None:
        self.model = Tiny()
        for parameter in self.model.parameters() if once_hooked else ():
            parameter.register_post_accumulate_grad_hook(lambda _: None).remove()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.monitor = gradmon.watch(self.model, self.optimizer, every=_NEVER_AGAIN) if watched else None

    def step(self) -> float:
        """Microseconds of one step."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        self.model().backward()
        self.optimizer.step()
        return 1e6 * (time.perf_counter() - start)


def armed_hooks(model: nn.Module) -> int:
    """Hooks on parameters."""
    return sum(len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def idle(steps: int, instances: int = INSTANCES) -> dict[str, Any]:
    """The Python of a step that is not monitored, and what such a step takes beside a loop without a monitor.

    Where a loop's tensors lie in memory makes it slower or faster than its twin by as much as the monitor does, so there are several
    loops of each kind, made in a random order. They take turns of some steps, so that each has its code and data in the cache as it would
    alone.
    """
    torch.set_num_threads(1)
    order = random.Random(0)
    kinds = [kind for kind in KINDS for _ in range(instances)]
    order.shuffle(kinds)
    loops = [(kind, Loop(**KINDS[kind])) for kind in kinds]
    watched = next(loop for kind, loop in loops if kind == "watched")
    for _, loop in loops:
        for _ in range(_WARM_UP):
            loop.step()
    first, first_hooks = _python(watched, _FIRST)
    for loop in (loop for kind, loop in loops if kind == "watched"):
        for _ in range(_SETTLED - _FIRST * (loop is watched)):
            loop.step()
    later, later_hooks = _python(watched, steps)
    medians = _medians(loops, max(1, steps // TURN), order)
    bare = statistics.median(medians["bare"])
    found = {kind: spread([value - bare for value in values]) for kind, values in medians.items()}
    for _, loop in loops:
        if loop.monitor is not None:
            loop.monitor.detach()
    return {
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "parameters": PARAMETERS,
        "steps": steps,
        "instances": instances,
        "first_python_us": spread(first),
        "first_hooks_on_parameters": first_hooks,
        "hooks_on_parameters": later_hooks,
        "python_us": spread(later),
        "mean_python_us": sum(later) / len(later),
        "difference_us": found["watched"],
        "once_hooked_us": found["once_hooked"],
        "bare_loops_us": found["bare"],
        "step_us": spread(medians["bare"]),
    }


def _medians(loops: Sequence[tuple[str, Loop]], turns: int, order: random.Random) -> dict[str, list[float]]:
    """Microseconds of the median step of each loop, by its kind."""
    times: list[list[float]] = [[] for _ in loops]
    places = [*range(len(loops))]
    gc.collect()
    gc.disable()
    try:
        for _ in range(turns):
            order.shuffle(places)
            for place in places:
                times[place] += [loops[place][1].step() for _ in range(TURN)][_COLD:]
    finally:
        gc.enable()
    return {kind: [statistics.median(of) for (its, _), of in zip(loops, times, strict=True) if its == kind] for kind in KINDS}


def _python(loop: Loop, steps: int) -> tuple[list[float], int]:
    """Microseconds that our hooks take in steps that are not monitored, called as torch calls them; and how many hooks are usual on
    parameters after one.
    """
    before = [hook for _, hook in loop.model._forward_pre_hooks.items()]  # as torch does; values() leaves the monitor's out
    around = [*loop.optimizer._optimizer_step_pre_hooks.values(), *loop.optimizer._optimizer_step_post_hooks.values()]
    times, hooks = [], []
    for _ in range(steps):
        start = time.perf_counter()
        for hook in before:
            hook(loop.model, ())
        for hook in around:
            hook(loop.optimizer, (loop.optimizer,), {})
        times.append(1e6 * (time.perf_counter() - start))
        hooks.append(armed_hooks(loop.model))
    return times, statistics.mode(hooks)


def markdown(result: Mapping[str, Any]) -> str:
    """The section of the documentation."""
    where = result["machine"]
    return (
        f"**A step that is not monitored** ({result['parameters']} parameters): {with_spread(result['python_us'])} µs of Python, "
        f"{result['hooks_on_parameters']} hooks on parameters; {result['mean_python_us']:.3g} µs in the mean, since the audit of the "
        f"loop looks at {LOOKED} steps between pauses of {RESTED} to {MOST_RESTED}; in the "
        f"first {TRUSTED} steps, all of them audited, {with_spread(result['first_python_us'])} µs and "
        f"{result['first_hooks_on_parameters']} hook on a parameter. Beside loops without a "
        f"monitor, whose steps take {with_spread(result['step_us'])} µs, such a step takes "
        f"{with_spread(result['difference_us'])} µs longer; that of loops without a monitor whose parameters once had a hook, since "
        f"removed, {with_spread(result['once_hooked_us'])} µs. Loops without anything differ, too: by "
        f"{figure(result['bare_loops_us']['quartile_1'])} to {figure(result['bare_loops_us']['quartile_3'])} µs from their median "
        f"({result['instances']} loops of each kind).\n\n"
        f"{where['processor']} ({where['cores']} cores), {where['system']}, Python {where['python']}, torch {where['torch']}; "
        f"{result['date']}. Medians, quartiles in brackets."
    )


def main() -> None:
    """Measure, print, and keep the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.idle", description=__doc__)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--quick", action="store_true", help="few steps, nothing kept")
    asked = parser.parse_args()
    result = idle(100 if asked.quick else asked.steps)
    print(markdown(result))
    if not asked.quick:
        (RESULTS / "idle.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        write_section("idle", markdown(result))


if __name__ == "__main__":
    main()
