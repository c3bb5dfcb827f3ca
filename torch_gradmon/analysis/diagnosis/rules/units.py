"""Units that are always zero, and units at the ends of their range."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....core import keys as n
from ....core.formatting import also_in
from ....core.moments import Column
from ....core.records import StatsTable
from ..findings import Finding, NotMeasured
from ..history import History

#: Share of a layer's units that are dead, by gradients and by activations.
_DEAD, _SILENT = 0.5, 0.85
#: A layer without a unit that fires matters, however the loss falls, if it keeps all gradients from this share of the elements.
_CUT_OFF = 0.1
#: Below this largest element, a gradient has rows of zeros for other reasons.
_CLEAR = 1e-5
#: Mean square of tanh, or of a sigmoid rescaled to its range; 0.8 if outputs are within 0.1 of the ends.
_SATURATED = 0.8
_TANH = frozenset({"Tanh", "RNN", "Hardtanh", "Softsign"})
_SIGMOID = frozenset({"Sigmoid", "Hardsigmoid"})
_RELU = frozenset({"ReLU", "ReLU6", "Threshold"})
_NEVER_FLAT = frozenset({"GELU", "LeakyReLU", "SiLU", "ELU", "PReLU", "Mish"})


def check_units(history: History) -> list[Finding]:
    """By activations if they were measured; dead units also by gradients alone."""
    dead, saturated = _dead(history), _saturated(history)
    if history.matrix(n.ACTIVATION, "rms") is None and not dead:
        raise NotMeasured("activations were not measured: preset='full'")
    return [*dead, *saturated]


def _dead(history: History) -> list[Finding]:
    sparsity = history.gradients("sparsity")
    usual = {} if sparsity is None else sparsity.part(0.5, 1).medians()
    largest = history.gradients("max")
    sizes = {} if largest is None else largest.part(0.5, 1).medians()
    # gradients that vanished altogether also count as near zero
    usual = {name: share for name, share in usual.items() if sizes.get(name, 0.0) > _CLEAR}
    rows = {  # a dead unit leaves a row of zeros in the gradient, and a zero in that of the bias
        name.rpartition(".")[0]: min(usual[name], usual[bias])
        for name in usual
        if name in history.matrices and (bias := f"{name.rpartition('.')[0]}.bias") in usual
    }
    outputs = history.matrix(n.ACTIVATION, "sparsity")
    silent = {} if outputs is None else outputs.part(0.5, 1).medians()
    kinds = set(history.kinds.values())
    if kinds & (_NEVER_FLAT | _TANH | _SIGMOID) and not kinds & _RELU:  # zeros in gradients have other reasons
        rows = {}
    found = {name: share for name, share in rows.items() if _DEAD < share < 1}  # all zeros may have other reasons
    silent = {name: share for name, share in silent.items() if history.kinds.get(name) in _RELU and share > _SILENT}
    found.update(silent)
    if not found:
        return []
    worst = sorted(found, key=lambda name: -found[name])
    measured = outputs if worst[0] in silent else sparsity
    return history.finding(
        "dead-units",
        worst[0],
        {"share of silent units": found[worst[0]], "layers like this": float(len(worst))},
        f"Most units of this layer are zero for all inputs; no gradient reaches them, so they stay so.{also_in(worst)}",
        "Start biases at 0, use LeakyReLU or GELU, or lower the learning rate.",
        76.0,
        severity="warning" if found[worst[0]] == 1 and _cut_off(history) > _CUT_OFF else None,
        steps=None if measured is None else _span(measured.part(0.5, 1).steps),
    )


def _cut_off(history: History) -> float:
    """The share of all elements whose gradients are exactly 0 in the second half of the run; 0 if it is all of them."""
    norms, sizes = history.gradients("norm"), history.sizes(n.PARAMETER)
    largest = {} if norms is None else norms.part(0.5, 1).largest()
    share = sum(sizes.get(name, 0) for name, norm in largest.items() if norm == 0) / max(sum(sizes.values()), 1)
    return share if share < 1 else 0.0


def saturated(history: History) -> dict[str, float]:
    """The mean square of the outputs of layers that lie at the ends of their range; empty where outputs were not measured."""
    sums: dict[str, list[float]] = {}
    for _, table in _late_outputs(history):
        count = table.rows[:, Column.COUNT].clamp(min=1)
        mean, square = table.rows[:, Column.SUM] / count, table.rows[:, Column.SQUARE_SUM] / count
        kinds = [history.kinds.get(name.partition("[")[0], "") for name in table.names]  # one name for each of several outputs
        is_sigmoid = torch.tensor([kind in _SIGMOID for kind in kinds], dtype=torch.bool, device="cpu")
        stretched = torch.where(is_sigmoid, 4 * (square - mean) + 1, square)  # 2 x - 1 lies between -1 and 1
        for name, kind, value in zip(table.names, kinds, stretched.tolist(), strict=True):
            if kind in _TANH | _SIGMOID:
                sums.setdefault(name, []).append(value)
    usual = {name: sorted(values)[len(values) // 2] for name, values in sums.items()}
    return {name: value for name, value in usual.items() if value > _SATURATED}


def _late_outputs(history: History) -> list[tuple[int, StatsTable]]:
    """The last three quarters of the steps in which outputs were measured, which may be a few after a spike."""
    tables = [(record.step, record.tables[n.ACTIVATION]) for record in history.records if n.ACTIVATION in record.tables]
    tables = [(step, table) for step, table in tables if {Column.SUM, Column.SQUARE_SUM} <= table.columns]
    return tables[len(tables) // 4 :]


def _span(steps: Sequence[int]) -> tuple[int, int]:
    return steps[0], steps[-1]


def _saturated(history: History) -> list[Finding]:
    usual = saturated(history)
    worst = sorted(usual, key=lambda name: -usual[name])
    if not worst:
        return []
    return history.finding(
        "saturated-units",
        worst[0],
        {"mean square of outputs, at most 1": usual[worst[0]], "layers like this": float(len(worst))},
        f"The outputs of this layer lie at the ends of their range, where its slope is zero.{also_in(worst)}",
        "Normalise the inputs, draw the weights smaller, or put a norm before it.",
        77.0,
        steps=_span([step for step, _ in _late_outputs(history)]),
    )
