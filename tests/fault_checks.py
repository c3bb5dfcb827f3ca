"""For each rule of the fault zoo, naively: what is true of the faulty training and not of the mended one."""

from __future__ import annotations

import math
from collections.abc import Callable

from tests.fault_spy import Spy, mean, median

Sign = Callable[[Spy], float]


def _first_against_last(spy: Spy) -> float:
    """The gradient of the first matrix relative to the matrix itself, over the same for the last."""
    names = spy.matrices()

    def relative(name: str) -> float:
        return median([(s.gradient[name] or 0.0) / max(s.parameter[name], 1e-12) for s in spy.steps])

    return relative(names[0]) / relative(names[-1])


def _largest_norm(spy: Spy) -> float:
    return max(step.norm for step in spy.steps)


def _first_not_finite(kind: str) -> Sign:
    """1 where ``kind`` is what was not finite first, 0 where nothing was or something else."""
    order = ["activation", "loss", "gradient", "parameter"]

    def sign(spy: Spy) -> float:
        found = sorted((step, order.index(what), what) for what, step in spy.first.items())
        return float(bool(found) and found[0][2] == kind)

    return sign


def _tail(values: list[float], share: float = 0.2) -> list[float]:
    return values[-max(1, int(len(values) * share)) :]


def _change(spy: Spy) -> float:
    """The last losses over the first."""
    return mean(_tail(spy.losses)) / mean(spy.losses[:3])


def _stood_still(spy: Spy) -> float:
    """How much the loss fell over the second half, in percent."""
    half = spy.losses[len(spy.losses) // 2 :]
    quarter = len(half) // 2
    return 100 * (1 - mean(half[quarter:]) / mean(half[:quarter]))


def _level(spy: Spy) -> float:
    """1 for a second half on which the loss changes by one percent, and less the more it does."""
    return 1 / max(abs(_stood_still(spy)), 0.1)


def _clipped(spy: Spy) -> float:
    return mean([float(norm > bound) for norm, bound in spy.clips])


def _outliers(spy: Spy) -> float:
    norms = [norm for norm, _ in spy.clips]
    return max(norms) / median(norms)


def _zero_at_end(spy: Spy) -> float:
    return mean([float(step.norm == 0) for step in _tail(spy.steps)])


def _growth(spy: Spy) -> float:
    first, last = spy.steps[0].parameter, spy.steps[-1].parameter
    return max(last[name] / first[name] for name in spy.matrices())


def _without_gradient(spy: Spy) -> float:
    last = spy.steps[-1].gradient
    return sum(all(s.gradient.get(name) is None for s in spy.steps) for name in last)


def _gain(spy: Spy) -> float:
    """How far the worst of all gains, the deviation times sqrt(fan in), is from the range of 0.05 to 3."""
    gains = [gain for name, gain in spy.gains.items() if "embed" not in name and "positions" not in name]
    return max(max(gain / 3, 0.05 / gain) for gain in gains)


def _zeros(spy: Spy) -> float:
    return median([max(step.zeros[name] for name in spy.matrices()) for step in spy.steps])


def _times(pattern: str) -> Sign:
    return lambda spy: float(spy.text().count(pattern))


def _updates(pick: Callable[..., float]) -> Sign:
    return lambda spy: pick(spy.ratios().values())


def _early_updates(spy: Spy) -> float:
    """The median over matrices and the first five steps."""
    return median([step.update[name] for step in spy.steps[:5] for name in spy.matrices()])


def _silent_hooks(spy: Spy) -> float:
    return float(max(spy.fired) < len(spy.steps) - 10)


def _stayed(spy: Spy) -> float:
    """1 where no parameter has moved in any step."""
    return float(all(update == 0 for step in spy.steps for update in step.update.values()))


def _trained(spy: Spy) -> float:
    """1 where a matrix is another one at the end, whoever has stepped."""
    found = {n: float(p.detach().float().std()) * p[0].numel() ** 0.5 for n, p in spy.model.named_parameters() if p.dim() > 1}
    return float(any(abs(found[name] - gain) > 1e-4 for name, gain in spy.gains.items()))


def _exchanges(spy: Spy) -> float:
    """Accumulations with an exchange of gradients, for each parameter and step."""
    return spy.exchanged / len(spy.names) / len(spy.steps)


# rule: a number, above which the faulty one is, and below which the mended one is
ABOVE: dict[str, list[tuple[Sign, float, float]]] = {
    "vanishing-gradients": [(lambda s: 1 / _first_against_last(s), 1e3, 1e2), (_level, 0.2, math.inf), (_change, 0.0, 0.7)],
    "exploding-gradients": [(_largest_norm, 300.0, 30.0)],
    "non-finite-loss": [(_first_not_finite("loss"), 0.5, 0.5)],
    "non-finite-activation": [(_first_not_finite("activation"), 0.5, 0.5)],
    "non-finite-gradient": [(_first_not_finite("gradient"), 0.5, 0.5)],
    "non-finite-parameter": [(_first_not_finite("parameter"), 0.5, 0.5)],
    "dead-units": [(Spy.dead, 0.6, 0.4)],
    "saturated-units": [(Spy.saturated, 0.6, 0.4)],
    "update-ratio-high": [(_updates(max), 0.1, 0.1)],
    "update-ratio-low": [(lambda s: 1 / max(min(s.ratios().values()), 1e-30), 1e6, 1e4), (_updates(max), 1e-4, 1.0)],
    "always-clipped": [(_clipped, 0.99, 0.9), (lambda s: median([n / b for n, b in s.clips]), 50.0, 10.0)],
    "never-clipped": [(lambda s: 1 - _clipped(s), 0.999, 0.99), (_outliers, 10.0, math.inf)],
    "gradient-dropped-to-zero": [(_zero_at_end, 0.5, 0.01), (lambda s: s.steps[0].norm, 1e-6, math.inf)],
    "weight-growth": [(_growth, 10.0, 5.0)],
    "no-gradient": [(_without_gradient, 0.5, 0.5)],
    "initialisation-scale": [(_gain, 1.5, 1.0)],
    "attention-entropy-collapse": [(lambda s: 1 - mean(s.entropy[:20]), 0.75, 0.5)],
    "attention-logit-growth": [
        (lambda s: max(s.logit[-20:]) / max(s.logit[:4]), 10.0, math.inf),
        (lambda s: max(s.logit), 50.0, 50.0),
    ],
    "loss-at-chance": [
        (_level, 0.3, math.inf),
        (lambda s: s.steps[-1].norm, 1e-3, math.inf),
        (_change, 0.8, 0.75),
    ],
    "loss-divergence": [(lambda s: mean(_tail(s.losses)) / min(s.losses), 1.5, math.inf), (_change, 1.05, 0.9)],
    "low-precision-underflow": [(_zeros, 0.5, 0.5)],
    "learning-rate-high": [(_early_updates, 0.3, 0.3), (lambda s: mean(_tail(s.losses)) / s.losses[0], 0.65, 0.65)],
    "learning-rate-low": [(lambda s: 1 / max(*s.ratios(-5).values(), 1e-30), 1e4, 1e4), (_change, 0.8, 0.8)],
    "missing-zero-grad": [(lambda s: float("zero" not in s.events), 0.5, 0.5)],
    "step-without-gradients": [
        (lambda s: mean([float(all(g is None for g in x.gradient.values())) for x in s.steps]), 0.99, 0.01)
    ],
    "micro-batch-discarded": [(_times("backward zero backward"), 50, 0.5)],
    "stepped-twice": [(_times("step step"), 50, 0.5)],
    "backward-twice": [(_times("backward backward"), 50, 0.5)],
    "never-stepped": [(lambda s: s.events.count("backward") / (len(s.steps) + 1), 100, 2)],
    "unattached-optimizer": [
        (lambda s: len(s.fired) / (len(s.steps) + 1), 100, 20),
        (_trained, 0.5, math.inf),
    ],
    "clip-after-step": [(_times("step clip"), 50, 0.5)],
    "clip-per-micro-batch": [(_times("clip backward"), 50, 0.5)],
    "clipped-while-scaled": [(_times("clip unscale"), 50, 0.5)],
    "backward-after-unscale": [(_times("unscale backward"), 50, 0.5)],
    "not-in-optimizer": [(lambda s: s.outside, 0.5, 0.5)],
    "optimizer-before-sharding": [(_stayed, 0.5, 0.5)],
    "sync-every-micro-batch": [(_exchanges, 3.5, 1.5)],
    "frozen-but-moving": [(lambda s: sum(x.frozen_moved for x in s.steps), 20, 0.5)],
    "weights-untied": [(lambda s: float(s.untied), 0.5, 0.5)],
    "dead-hooks": [(_silent_hooks, 0.5, 0.5)],
}
# rules whose fault need not cost anything that the last loss shows
FREE = {
    "non-finite-parameter",
    "gradient-dropped-to-zero",
    "stepped-twice",
    "backward-twice",
    "unattached-optimizer",
    "clip-after-step",
    "clip-per-micro-batch",
    "frozen-but-moving",
    "weights-untied",
    "sync-every-micro-batch",
    "dead-hooks",
}
