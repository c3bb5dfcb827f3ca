"""Adaptive clips by the naive formulas, in plain Python and float64."""

from __future__ import annotations

import math


class ZClip:
    """Of one norm after the other: what it is limited to."""

    def __init__(self, threshold: float = 2.5, alpha: float = 0.97, warmup: int = 25, eps: float = 1e-6) -> None:
        self.threshold, self.alpha, self.warmup, self.eps = threshold, alpha, warmup, eps
        self.first: list[float] = []
        self.mean = self.variance = 0.0

    def limit(self) -> float | None:
        """The norm above which the next one is clipped."""
        return self.mean + self.threshold * (math.sqrt(self.variance) + self.eps) if len(self.first) == self.warmup else None

    def clipped(self, norm: float) -> float:
        """The norm after the clip; learns it."""
        if not math.isfinite(norm):
            return norm
        if len(self.first) < self.warmup:
            self.first.append(norm)
            self.mean = math.fsum(self.first) / len(self.first)
            self.variance = math.fsum((x - self.mean) ** 2 for x in self.first) / len(self.first)
            return norm
        spread = math.sqrt(self.variance)
        z = (norm - self.mean) / (spread + self.eps)
        if z > self.threshold:
            norm = self.mean + spread * self.threshold / (z / self.threshold)
        self.mean = self.alpha * self.mean + (1 - self.alpha) * norm
        self.variance = self.alpha * self.variance + (1 - self.alpha) * (norm - self.mean) ** 2
        return norm


class AdaGC:
    """Of the norms of all parameters, None where there is no gradient: what each is limited to."""

    def __init__(self, ratio: float = 1.04, beta: float = 0.99, warmup: int = 100, max_norm: float = 1.0) -> None:
        self.ratio, self.beta, self.warmup, self.max_norm = ratio, beta, warmup, max_norm
        self.level: dict[int, float] = {}
        self.count: dict[int, int] = {}

    def clipped(self, norms: list[float | None]) -> list[float | None]:
        """The norms after the clip; learns them."""
        total = math.sqrt(math.fsum(x * x for x in norms if x is not None and math.isfinite(x)))
        return [x if x is None or not 0 < x < math.inf else self._one(i, x, total) for i, x in enumerate(norms)]

    def _one(self, index: int, norm: float, total: float) -> float:
        count, level = self.count.get(index, 0), self.level.get(index, math.inf)
        self.count[index] = count + 1
        if count < self.warmup:
            norm *= min(1.0, self.max_norm / total)
            self.level[index] = min(level, norm)
        else:
            norm = min(norm, self.ratio * level)
            self.level[index] = self.beta * level + (1 - self.beta) * norm
        return norm
