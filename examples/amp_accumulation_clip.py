"""Mixed precision, accumulation over micro-batches and torch's own clipping: the loop is unchanged, the numbers are right.

The monitor follows the GradScaler: gradients are reported unscaled, accumulated, before and after clipping, and a step that
the scaler skips is marked and left out of the baseline.
"""

from __future__ import annotations

import torch
from torch import nn

import torch_gradmon as gradmon

MICRO_BATCHES, STEPS = 4, 40
BAD_STEP = 25


def main() -> None:
    """Train with one batch that overflows, and print values of the monitor."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = torch.randn(1024, 16, device=device)
    targets = inputs @ torch.randn(16, 1, device=device)

    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
    monitor = gradmon.watch(model, optimizer, scaler=scaler)  # the one line

    print("step   loss    before clip  after clip  clipped  not applied  loss scale")
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(MICRO_BATCHES):
            batch = torch.randint(len(inputs), (32,), device=device)
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = nn.functional.mse_loss(model(inputs[batch]).float(), targets[batch]) / MICRO_BATCHES
            if step == BAD_STEP:
                loss = loss * float("inf")  # one overflow, as in half precision
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        monitor.log_scalar("loss", total)

        if step % 8 == 0 or step in (BAD_STEP, BAD_STEP + 1):
            values = monitor.get_step_metrics()
            print(
                f"{step:4}  {total:6.3f}  {values['gradmon/grad_norm']:11.3f}  {values.get('gradmon/grad_norm_after_clip', 0):10.3f}"
                f"  {values['gradmon/clip_fraction']:7.0%}  {values['gradmon/steps_not_applied']:11.0f}  {scaler.get_scale():10.0f}"
            )

    for key, reason in sorted(monitor.missing().items()):
        print(f"no {key}: {reason}")
    monitor.detach()


if __name__ == "__main__":
    main()
