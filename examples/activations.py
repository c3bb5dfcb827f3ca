"""Look inside a network while it trains: sizes, tails, dead units and saturated gates, and gradients of outputs.

The network has two faults on purpose: a layer whose units die because of a large negative bias, and a gate that saturates
because its input is far too large. Both show in a few lines, and the values are those of training forwards only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import torch_gradmon as gradmon


class Net(nn.Module):
    """Two layers and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act = nn.Linear(16, 64), nn.ReLU()
        self.second, self.gate, self.head = nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 1)
        with torch.no_grad():
            self.first.bias[:24] = -100.0  # a fault: these 24 of 64 units never fire
            self.second.weight *= 40.0  # another: most gates stay open or closed

    def forward(self, x: Tensor) -> Tensor:
        """One number for each row of ``x``, ``[batch, 16]``."""
        hidden = self.act(self.first(x))
        return self.head(hidden[:, :64] * self.gate(self.second(hidden)))


def main() -> None:
    """Train, and print statistics of the activations."""
    torch.manual_seed(0)
    inputs = torch.randn(512, 16)
    targets = inputs @ torch.randn(16, 1)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    monitor = gradmon.watch(model, optimizer)
    monitor.add_activation_metric("rms", of=("output", "output_gradient"))  # one pass gives all built-ins
    monitor.add_activation_metric("kurtosis", metric_regex="first|second")
    monitor.add_activation_metric("dead", metric_regex="act")
    monitor.add_activation_metric("saturation", metric_regex="gate")
    # any function of the output; its values are merged over micro-batches
    monitor.add_activation_metric("top_unit", lambda x: x.abs().mean(dim=0).max(), metric_regex="first")

    for step in range(120):
        batch = torch.randint(len(inputs), (64,))
        loss = nn.functional.mse_loss(model(inputs[batch]), targets[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (0, 119):
            print(f"step {step}")
            for key, value in monitor.get_step_metrics().items():
                if not key.startswith("gradmon/"):
                    print(f"  {key:36} {value:10.4g}")
            for key, reason in monitor.missing().items():
                if key.startswith("activation"):
                    print(f"  {key:36}     absent: {reason}")
        with torch.no_grad():
            model.eval()
            model(inputs)  # an evaluation pass: it does not count
            model.train()


if __name__ == "__main__":
    main()
