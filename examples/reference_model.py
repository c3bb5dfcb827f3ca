"""Distance of a model from its initialisation: parameters, and outputs on the same inputs with the same dropout.

The reference here is a frozen copy at initialisation; any module with the same names works, such as an EMA of the weights or
a teacher.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_gradmon as gradmon


def cosine(output: Tensor, reference: Tensor) -> Tensor:
    """Between two outputs, row by row."""
    return F.cosine_similarity(output, reference, dim=-1)


def main() -> None:
    """Train, and print the distance to the initialisation."""
    torch.manual_seed(0)
    inputs = torch.randn(512, 16)
    targets = torch.sin(3 * inputs @ torch.randn(16, 1))

    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = gradmon.watch(model, optimizer)
    monitor.set_reference_module("init")
    monitor.add_activation_difference_metric("rms", metric_regex=r"^[035]$", every=25)
    monitor.add_activation_difference_metric("cosine", cosine, metric_regex=r"^[035]$", every=25)
    monitor.add_parameter_difference_metric("norm", metric_regex="weight", every=25)

    print("step  loss   ", "  ".join(f"layer {layer}: rms, cosine, |W - W0|" for layer in (0, 3, 5)))
    for step in range(101):
        batch = torch.randint(len(inputs), (64,))
        loss = F.mse_loss(model(inputs[batch]), targets[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0:
            values = monitor.get_step_metrics()
            columns = [
                f"{values[f'activation_difference/{layer}/rms']:12.4f}  {values[f'activation_difference/{layer}/cosine']:6.3f}"
                f"  {values[f'parameter_difference/{layer}.weight/norm']:8.4f}"
                for layer in (0, 3, 5)
            ]
            print(f"{step:4}  {loss.item():5.3f}  ", "  ".join(columns))


if __name__ == "__main__":
    main()
