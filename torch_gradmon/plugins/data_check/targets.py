"""What the heads of several steps show together: targets, the value of the loss at chance, and mistakes between output and loss."""

from __future__ import annotations

import math

from ..tallies import Tallies
from .head import Head, Origin

#: Rows of a batch, and heads, before labels are judged.
_ROWS, _FEWEST = 8, 5
#: Rows that may have a property by chance.
_FEW = 4
#: Share of heads whose batch has one label, if the data are sorted.
_MOSTLY = 0.8
#: Share of outputs that a ReLU has set to 0, and share of the targets' mean square that lies below 0,
#: or beyond what the output can be: more than noise around the bound.
_ZEROS, _BELOW = 0.02, 0.1
#: The root mean square of targets that are not normalised.
_LARGE = 30.0
#: A loss that is not divided by its micro-batches counts this share of them at least.
_NEARLY = 0.9
#: A loss that counts less than this share of its mean is divided by too much.
_HARDLY = 1 / 30.0
#: A temperature outside divides or multiplies logits far more than any that is learnt: CLIP stops at 100.
_COLD, _HOT = 1 / 150.0, 10.0
#: Targets are differences; where they are this small a part of the error, rounding is all that is left of them but their order.
_CANCELS = 1e-6
#: Labels counted for each class before their entropy is known.
_PER_CLASS = 4


class Targets:
    """Collects heads.

    Args:
        tallies: receive mistakes.

    Attributes:
        chance: the loss of the best constant answer by ``"loss"``, and from how many ``"examples"`` it is known; of a mean square also
            that of the answer 0, by ``"of zero"``; empty without.
    """

    def __init__(self, tallies: Tallies) -> None:
        self._tallies = tallies
        self._heads: list[Head] = []
        self._labels: list[float] = []
        self._of_one_label = 0
        self.chance: dict[str, float] = {}

    def add(self, head: Head, forwards: int, micro_batches: int, is_scaled: bool, output: Origin) -> None:
        """One more head.

        Args:
            head: from the first of several ``forwards`` of a step.
            forwards: of the step, and of the turns of optimizers that rest in it.
            micro_batches: backward passes of the step whose gradients are in one sum.
            is_scaled: gradients are multiplied by a loss scale.
            output: what the output was made by.
        """
        self._heads.append(head)
        self._count("relu-before-loss", output.is_rectified and head.zeros > _ZEROS and (head.is_log or head.negative > _BELOW))
        if head.kind == "mean square":
            outside = head.outside(output.bounds[0]) if output.bounds else 0.0
            self._count("targets-out-of-range", outside > _BELOW, **{"share of their mean square outside": outside})
            size = {"mean": head.mean, "root mean square": math.sqrt(max(head.square, 0.0))}
            self._count("targets-not-normalised", size["root mean square"] > _LARGE, **size)
        if head.is_log:
            self._add_labels(head, forwards)
        self._learn_chance(head)
        if head.is_log and not is_scaled:
            self._judge_scale(head, micro_batches)

    def _count(self, rule: str, is_so: bool, **evidence: float) -> None:
        if is_so:
            self._tallies.seen(rule, evidence=evidence)
        elif not self._tallies.is_empty:
            self._tallies.missed(rule)

    def _add_labels(self, head: Head, forwards: int) -> None:
        if not head.labels or sum(head.labels) < 2:
            return
        if len(self._labels) != len(head.labels):
            self._labels, self._of_one_label = [0.0] * len(head.labels), 0
        self._labels = [a + b for a, b in zip(self._labels, head.labels, strict=True)]
        self._of_one_label += _has_one_label(head)
        seen = [each for each in self._heads if each.labels]
        if forwards > 1 or len(seen) < _FEWEST or self._of_one_label < _MOSTLY * len(seen):
            return
        rule = "labels-not-mixed" if sum(count > 0 for count in self._labels) > 1 else "labels-constant"
        self._tallies.seen(rule, evidence={"batches of one class": float(self._of_one_label), "of": float(len(seen))})
        if rule == "labels-not-mixed":
            self._tallies.retract("labels-constant")

    def _learn_chance(self, head: Head) -> None:
        total = sum(self._labels)
        if head.kind == "mean square":
            known = [each for each in self._heads if each.kind == "mean square"]
            exact = [each for each in known if each.square > _CANCELS * each.error]
            rows = sum(each.rows for each in exact or known)
            mean = sum(each.mean * each.rows for each in exact or known) / rows
            square = sum(each.square * each.rows for each in exact or known) / rows
            chance = {"loss": max(square - mean**2, 0.0)} if exact else {}
            self.chance = {**chance, "examples": rows, "is square": 1.0, "of zero": square}
        elif total >= _PER_CLASS * len(self._labels) and head.labels and abs(head.scale - 1) < 0.1:
            shares = [count / total for count in self._labels if count]
            self.chance = {"loss": -sum(share * math.log(share) for share in shares), "examples": total}

    def _judge_scale(self, head: Head, micro_batches: int) -> None:
        is_cold_or_hot = not _COLD < head.temperature < _HOT
        is_sum = head.rows >= _FEW and abs(head.scale / head.rows - 1) < 0.02
        is_tiny = 0 < head.scale * micro_batches < _HARDLY
        # batches of one label each, as the real and the made ones of a GAN, are terms of one loss
        is_undivided = micro_batches > 1 and abs(head.scale - 1) < 1 - _NEARLY and not _has_one_label(head)
        evidence = {}
        if is_cold_or_hot:
            evidence = {"temperature between output and loss": head.temperature}
        elif is_sum or is_tiny:
            evidence = {"times the gradient of the mean": head.scale}
        elif is_undivided:
            evidence = {"micro-batches that each count as a whole": float(micro_batches)}
        if evidence:
            self._tallies.seen("loss-scale", evidence=evidence)
        else:
            self._tallies.missed("loss-scale")


def _has_one_label(head: Head) -> bool:
    """Whether all rows of a batch that is large enough to show it are of one class."""
    return sum(head.labels) >= _ROWS and max(head.labels) == sum(head.labels)
