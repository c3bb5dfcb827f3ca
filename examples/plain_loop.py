"""Watch a plain training loop: a small network on a linear problem, with torch's own clipping."""

from __future__ import annotations

import torch
from torch import nn

import torch_gradmon as gradmon


def main() -> None:
    """Train, and print values of the monitor."""
    torch.manual_seed(0)
    inputs = torch.randn(512, 16)
    targets = inputs @ torch.randn(16, 1) + 0.1 * torch.randn(512, 1)

    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    monitor = gradmon.watch(model, optimizer)  # the one line
    monitor.add_gradient_metric("norm", metric_regex="weight")  # one more: two layers in detail

    for step in range(101):
        batch = torch.randint(len(inputs), (64,))
        loss = nn.functional.mse_loss(model(inputs[batch]), targets[batch])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        monitor.log_scalar("loss", loss.detach())

        if step % 20 == 0:
            values = monitor.get_step_metrics()
            print(
                f"step {step:3}  loss {values['loss']:7.3f}  "
                f"gradient norm {values['gradmon/grad_norm']:6.3f}  "
                f"update ratio {values['gradmon/update_ratio']:.1e}  "
                f"first layer {values['gradient_before_clip/0.weight/norm']:.3f}"
            )

    print("\nlargest shares of the squared gradient norm:")
    for name, share in monitor.last_record.top_gradients(3):
        print(f"  {name:10} {share:.0%}")


if __name__ == "__main__":
    main()
