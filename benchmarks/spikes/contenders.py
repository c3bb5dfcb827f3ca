"""The contenders.

Each makes a fresh detector for a kind of signal, which is all that the benchmark uses. One line adds one:
``"Name": always(Rule)`` where a rule takes both kinds alike, else a function of the kind.
"""

from __future__ import annotations

from collections.abc import Callable

from torch_gradmon.spikes import Cusum, EmaZScore, MeanStd, MedianMad, Ratio, RollingZScore, Rule, SpikeDetector, Threshold

from .traces import Kind

Factory = Callable[[Kind], SpikeDetector]
#: The name of each kind of signal in a monitor.
SIGNALS: dict[Kind, str] = {"gnorm": "grad_norm", "loss": "loss"}


def always(rule: Callable[[], Rule]) -> Factory:
    """The same rule for every kind of signal."""
    return lambda kind: SpikeDetector(rule(), signal=SIGNALS[kind])


CONTENDERS: dict[str, Factory] = {
    "default": lambda kind: SpikeDetector(signal=SIGNALS[kind]),
    "MedianMad": always(MedianMad),
    "Cusum": always(Cusum),
    "RollingZScore": always(RollingZScore),
    "EmaZScore": always(EmaZScore),
    "MeanStd": always(MeanStd),
    "Ratio": always(Ratio),
    "Threshold(10)": always(lambda: Threshold(10.0)),
}

#: Printed with every table and kept in the result: figures on what a rule was tuned on are no evidence for it.
TUNED_ON = (
    "default: constants tuned on data/ and on generators much like those of the scenarios, so that its figures there are what it "
    "was fitted to; seeds 1000 to 1029, 2000 to 2029 and 3000 to 3019 were looked at once each, and no constant was changed for "
    "what was seen; "
    "MedianMad and Cusum: conventional constants; the others: constants of the published code that each names as its source.\n"
    "Constants may be tuned on data/ and on seeds below 1000; --traces DIR and --held-out 4000 are for the judgement alone."
)
