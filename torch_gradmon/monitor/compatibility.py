"""Names of torch-module-monitor: the mixin, the patched attention, the refined coordinate check."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..core.errors import display
from ..core.keys import RCC_SOURCES
from ..core.torch_modes import is_compiling
from .inspection import name_of
from .manual_loop import ManualLoop
from .monitor import ModuleMonitor
from .runtime import AggregationFunction
from .steps import Linkable, linked

# --- For modules that log values from their own ``forward`` ---


class MonitorMixin(Linkable):
    """Mix into an ``nn.Module`` to reach the monitor from its ``forward``; inert without a monitor.

    Its ``__init__`` need not be called, so it may stand anywhere among the base classes:

    >>> import torch
    >>> class Layer(torch.nn.Linear, MonitorMixin):
    ...     def forward(self, x):
    ...         y = super().forward(x)
    ...         if self.is_monitoring:
    ...             self.get_module_monitor().log_tensor("my_norm", y.norm(dim=-1))
    ...         return y
    >>> Layer(2, 2).is_monitoring
    False
    """

    @property
    def is_monitoring(self) -> bool:
        """Whether a monitor takes values now."""
        if is_compiling():
            return False  # a graph must not depend on the state of a monitor
        monitor = self.get_module_monitor()
        return monitor is not None and monitor.is_monitoring()

    def get_module_monitor(self) -> ModuleMonitor | None:
        """The monitor of the model, or None."""
        return linked(self)  # type: ignore[no-any-return]


# --- The public helper for attention modules that call scaled dot product attention themselves ---


def monitor_scaled_dot_product_attention(
    monitor: ModuleMonitor,
    module: str | nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    activation: Tensor | None = None,
) -> None:
    """Record one call of ``F.scaled_dot_product_attention``, head by head.

    :meth:`ModuleMonitor.add_attention_metric` records calls with no edit of the model; where it does so for this module, and
    inside ``torch.compile``, this function does nothing.

    Keys, with ``{i}`` for the head: ``attention_entropy/{module}.head_{i}`` (nats), ``attention_entropy_normalized/...`` (over
    the logarithm of the number of keys that a query sees) and ``attention_first_key/...`` (weight on the first key that a
    query sees), all means over queries; ``attention_max_logit/...``, the largest of any query; of each the ``min`` and
    ``mean`` over heads, ``attention_entropy/{module}/min``; and for the activation metrics that match them the names
    ``{module}.head_{i}.query``, ``.key``, ``.value`` and ``.activation``. Does not synchronise.

    Args:
        monitor: takes the values; nothing is computed while it is not monitoring.
        module: the calling module, or its name.
        query, key, value, attn_mask, is_causal, scale, enable_gqa: as in the call, ``[..., heads, length, size]``.
        dropout_p: as in the call; dropout does not enter the statistics.
        activation: the call's result.

    Raises:
        ValueError: tensors of fewer than three dimensions, or a module that is not watched.
        TypeError: ``module`` is neither a module nor a name.
    """
    if is_compiling() or not monitor.is_monitoring():
        return
    for label, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 3:
            raise ValueError(f"{label} must have the shape [..., heads, length, size], got {tuple(tensor.shape)}")
    named = {"query": query, "key": key, "value": value, **({} if activation is None else {"activation": activation})}
    arguments = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    ManualLoop(monitor._runtime).record_attention(name_of(monitor._runtime, module), named, arguments)


# --- The public interface of the refined coordinate check ---


class RefinedCoordinateCheck:
    """Splits the movement of each module's output since initialisation: by its own weights, and by its input.

    With weights ``W_t`` and input ``x_t`` now, and ``W_0`` and ``x_0`` of the reference module on the same batch,

        f(x_t; W_t) - f(x_0; W_0) = [f(x_t; W_t) - f(x_t; W_0)] + [f(x_t; W_0) - f(x_0; W_0)]

    the update term ``(W_t-W_0)x_t`` and the propagated term ``W_0(x_t-x_0)`` (Haas et al. 2025, "On the Surprising Effectiveness
    of Large Learning Rates under Standard Width Scaling", arXiv 2505.22491). At width n and depth fixed, a term whose ``rms`` grows
    with n diverges, and one that shrinks with n ends feature learning there. Keys, with ``{m}`` for each module except the root:

    .. code-block:: text

        RCC (W_t-W_0)x_t/{m}/l2norm                        f(x_t; W_t) - f(x_t; W_0)
        RCC W_0(x_t-x_0)/{m}/l2norm                        f(x_t; W_0) - f(x_0; W_0)
        RCC x_t/{m}/l2norm                                 the first input
        RCC (x_t-x_0)/{m}/l2norm                           its difference to the reference's
        of nn.Linear and nn.LayerNorm also, without the bias b:
        RCC (W_t-W_0)x_t/{m}.weight/l2norm                 [f(x_t; W_t) - b_t] - [f(x_t; W_0) - b_0]
        RCC W_0(x_t-x_0)/{m}.weight/l2norm                 [f(x_t; W_0) - b_0] - [f(x_0; W_0) - b_0]
        RCC (W_t-W_0)x_t/{m}.weight/W_t x_t/l2norm         f(x_t; W_t) - b_t
        RCC W_0(x_t-x_0)/{m}.weight/W_0 x_0/l2norm         f(x_0; W_0) - b_0
        of nn.LayerNorm also, with n(x) the input normalised, without weight and bias:
        RCC (W_t-W_0)x_t/{m}.weight/x_t/l2norm             n(x_t)
        RCC W_0(x_t-x_0)/{m}.weight/x_t-x_0/l2norm         n(x_t) - n(x_0)

    Each is the norm over the last dimension, the mean of that over the rest, over calls and over micro-batches. Keys and values
    are those of torch-module-monitor; of an ``nn.Embedding`` there is the update term only. Outputs in containers have their path
    in the key, as in ``RCC (W_t-W_0)x_t/attn[0]/l2norm``.

    Every training forward of a monitored step adds values, by hand or attached, where the reference runs too. For a loop that runs
    the reference itself, on another batch, see :meth:`ModuleMonitor.set_reference_module`. Model and reference keep their state. Each
    run repeats changes outside of the module, such as those of a generator in a global variable. All calls of a module have the
    same random numbers, so without an update the first two terms are zero, with or without dropout; up to rounding where torch has
    other kernels without a graph, as for ``nn.LSTM``.

    A module runs at most once more for each of its calls. The run of a container also runs its parts, on other inputs than those of
    the model. With all modules, the cost is one forward of the model for each level of nested containers; parts with the same inputs
    as their container do not run again. With ``metric_regex`` for the innermost modules only, the cost is one forward.

    Inside ``torch.compile`` nothing is checked, and ``monitor.missing()`` has the reason. Does not synchronise.

    Args:
        monitor: a monitor with a model and a reference module.
        metric_name: last part of the keys; built-in are ``"l2norm"`` and ``"rms"``, which is divided by the root of the width.
        metric_fn: instead of a built-in, a function of each term ``[..., n]``.
        metric_regex: searched in the names of modules.
        metric_aggregation_fn: see :meth:`ModuleMonitor.add_activation_metric`; by default the mean.
        every: only on steps that are divisible by it.

    Raises:
        TypeError: ``monitor`` is no :class:`ModuleMonitor`, or another argument has a wrong type.
        ValueError: the monitor has no module or no reference module, the metric is unknown, or the check was added already.
    """

    def __init__(
        self,
        monitor: ModuleMonitor,
        metric_name: str = "l2norm",
        metric_fn: Callable[..., Any] | None = None,
        metric_regex: str | re.Pattern[str] = ".*",
        metric_aggregation_fn: AggregationFunction = None,
        *,
        every: int = 1,
    ) -> None:
        if not isinstance(monitor, ModuleMonitor):
            raise TypeError(f"RefinedCoordinateCheck takes a ModuleMonitor, got {display(monitor)}")
        if monitor.module is None:
            raise ValueError(
                "there is no module to check. Set the module to monitor first: ModuleMonitor(model), or set_module(model)"
            )
        if not monitor.has_reference_module():
            raise ValueError(
                'there is no reference module to compare with. Set the reference module first: monitor.set_reference_module("init") '
                "before training, or a module with the weights of initialisation"
            )
        monitor._runtime.add_metrics(RCC_SOURCES, metric_name, metric_fn, metric_regex, metric_aggregation_fn, every)
        self._monitor = monitor

    @property
    def module(self) -> nn.Module | None:
        """The module that is checked, while it lives."""
        return self._monitor.module

    @property
    def reference_module(self) -> nn.Module | None:
        """The reference module."""
        return self._monitor.reference_module

    def refined_coordinate_check(self) -> None:
        """For loops that call it after the forward, as with torch-module-monitor: checks that there was one.

        Outside of a monitored step, and in steps in which no check is due, it does nothing.

        Raises:
            ValueError: no training forward was seen in this step.
        """
        modules = self._monitor._runtime.captures.modules
        if modules is not None and modules.awaits_check and self._monitor.is_monitoring():
            raise ValueError(
                f"no forward of the model was seen in step {self._monitor.current_step}; call refined_coordinate_check() after one in "
                "training mode"
            )
