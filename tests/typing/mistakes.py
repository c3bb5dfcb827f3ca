"""Mistakes that a type checker has to refuse: each line that ends with ``# wrong``, and no other. It is never run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import torch_gradmon as gradmon

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = torch.ones(())

gradmon.watch(model, 3)  # wrong
gradmon.watch(optimizer, model)  # wrong
gradmon.watch(model, optimizer, evry=2)  # wrong
gradmon.watch(model, optimizer, preset="stadnard")  # wrong
gradmon.watch(model, optimizer, on_spike="skp")  # wrong
gradmon.watch(model, optimizer, layers=3)  # wrong
gradmon.watch(model, optimizer, every="10")  # wrong
gradmon.watch(model, optimizer, log_to=3)  # wrong
gradmon.watch(model, optimizer, log_to="wandbb")  # wrong
gradmon.watch(model, optimizer, run_dir=3)  # wrong
gradmon.watch(model, optimizer, checks="data")  # wrong
gradmon.watch(model, optimizer, checks=gradmon.Checks(frozn="a"))  # wrong
gradmon.watch(model, optimizer, checks=gradmon.Checks(dtype={"a": "bfloat16"}))  # wrong
gradmon.watch(model, optimizer, distributed=gradmon.Distributed(sync_every="4"))  # wrong
gradmon.watch(model, optimizer, scaler=True)  # wrong
gradmon.watch(model, optimizer, history=10)  # wrong
gradmon.watch(model, optimizer, plugins=["mine"])  # wrong
gradmon.ModuleMonitor(model, key_order="sede")  # wrong
gradmon.ModuleMonitor(model, on_metric_error="rais")  # wrong
gradmon.ModuleMonitor(model, spike_capture=3)  # wrong
gradmon.ModuleMonitor(model, zero_threshold="small")  # wrong

monitor = gradmon.watch(model, optimizer, log_to=print, every=lambda step: step < 10)
monitor.add_gradient_metric("norm", stages=["befor_clip"])  # wrong
monitor.add_gradient_metric(3)  # wrong
monitor.add_gradient_metric("norm", metric_aggregation_fn="median")  # wrong
monitor.add_parameter_metric("norm", evry=2)  # wrong
monitor.add_update_metric("norm", metric_fn="norm")  # wrong
monitor.add_optimizer_metric("exp_avg_norm", every=1.5)  # wrong
monitor.add_activation_metric("norm", of="outptu")  # wrong
monitor.add_activation_difference_metric("norm", shardwise="yes")  # wrong
monitor.add_parameter_difference_metric("norm", metric_regex=3)  # wrong
monitor.add_attention_metric("entrpy")  # wrong
monitor.set_reference_module("initial")  # wrong
monitor.add_sink(3)  # wrong
monitor.add_sink(print, "grad_norm")  # wrong
monitor.add_detector("grad_norm")  # wrong
monitor.set_detail(preset="ful")  # wrong
monitor.clip_grad_norm_("zclipp")  # wrong
monitor.log_scalar("loss", loss, dist_reduce="average")  # wrong
monitor.log_scalar(3, loss)  # wrong
monitor.log_sample_losses(loss)  # wrong
monitor.plot("hetmap")  # wrong
monitor.plot("heatmap", engine="bokeh")  # wrong
monitor.step_was_skipped()  # wrong
print(monitor.last_record.step)  # wrong
if monitor.last_record is not None:
    monitor.last_record.top_gradients("ten")  # wrong
    number: int | None = monitor.last_record.step

gradmon.load_run(3)  # wrong
gradmon.load_run("run").plot("hetmap")  # wrong
gradmon.load_run("run").record("3")  # wrong
gradmon.check_determinism(model)  # wrong
gradmon.diff_runs("one")  # wrong
gradmon.SpikeCapture(before="3")  # wrong
gradmon.wach(model, optimizer)  # wrong


def right(values: Any) -> None:
    gradmon.watch(model, optimizer, log_to=["wandb", print], on_spike=gradmon.Skip(), layers="blocks").add_attention_metric(
        "entropy"
    )
    with monitor.set_detail(preset="full"), gradmon.load_run("run") as run:
        print(run.diagnose().exit_code, run.why(), run.record(3).metrics)
    monitor.add_sink(gradmon.sinks.JsonlSink("rows.jsonl"), keys="loss").remove()
