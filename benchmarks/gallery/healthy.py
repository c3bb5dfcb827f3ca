"""Trainings that are as they should be, by family, for the gallery."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

import torch_gradmon as gradmon

from ..faults import HEALTHY
from ..faults.families import Task
from ..faults.training import Training, Watch, train
from .pictures import series


class Family(NamedTuple):
    """A page about healthy runs.

    Attributes:
        title: of the page.
        training: its run.
        text: what to see in it.
    """

    title: str
    training: Training
    text: str


class _Denoiser(nn.Module):
    """Predicts the noise in a point of the plane from the point and the time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2 + 16, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 2))

    def forward(self, points: Tensor, times: Tensor) -> Tensor:
        """The noise, ``[n, 2]``, for points ``[n, 2]`` and times ``[n]`` between 0 and 1."""
        angles = times.unsqueeze(1) * 2.0 ** torch.arange(8)
        return self.layers(torch.cat([points, angles.sin(), angles.cos()], dim=1))


def _diffusion(watch: Watch, seed: int, fixed: bool) -> float:
    """Denoising diffusion of points on a circle, with a cosine schedule."""
    torch.manual_seed(seed)

    def batches() -> Iterator[Tensor]:
        while True:
            angle = 2 * math.pi * torch.rand(256)
            yield torch.stack([angle.cos(), angle.sin()], dim=1)

    def loss(model: nn.Module, points: Tensor) -> Tensor:
        times, noise = torch.rand(len(points)), torch.randn_like(points)
        signal = (0.5 * math.pi * times).cos().unsqueeze(1)
        predicted = model(signal * points + (1 - signal**2).sqrt() * noise, times)
        return nn.functional.mse_loss(predicted, noise)

    task = Task(_Denoiser(), batches(), loss)
    return train(task, watch, torch.optim.AdamW(task.model.parameters(), lr=1e-3), steps=300, max_norm=1.0)


_KNOWN = {training.name: training for training in HEALTHY}
FAMILIES: Mapping[str, Family] = {
    "gpt": Family(
        "GPT pre-training",
        _KNOWN["warm-up-and-cosine/gpt"],
        "The rate warms up and then decays, and the update ratio follows it. The clip acts in most of the first "
        "steps and in few of the later ones, so its share falls over the run. One tensor holds more than half of "
        "the squared norm, which is usual where an embedding is large.",
    ),
    "lora": Family(
        "Fine-tuning with low-rank adapters",
        _KNOWN["low-rank-from-zero/mlp"],
        "The second matrix of each adapter starts at zero, so in the first step the first one has no gradient: "
        "the update ratio over matrices begins at almost nothing, and is that of an ordinary training a few steps "
        "later.",
    ),
    "gan": Family(
        "GAN",
        _KNOWN["adversarial/gan"],
        "Two players push each other, so the gradient norm does not settle as in other trainings, and the losses "
        "mean little. A spike now and then is information and no warning.",
    ),
    "diffusion": Family(
        "Diffusion",
        Training("denoising/mlp", "", "mlp", _diffusion),
        "The loss has a floor, since noise can never be predicted in full, and it is noisy because each batch "
        "draws its own times. The gradient norm falls in the first steps and then stays. A clip at 1 never acts "
        "here; that is information.",
    ),
    "rl": Family(
        "Reinforcement learning",
        _KNOWN["bandit/mlp"],
        "Rewards are noisy, and a policy that is sure of itself has nearly no gradient: norms span more than a "
        "factor of a hundred, and single steps stand out. Such spikes are information here, since the training "
        "recovers from each at once.",
    ),
    "cnn": Family(
        "CNN with one-cycle rate",
        _KNOWN["one-cycle/cnn"],
        "The rate rises and falls in one cycle, and the update ratio with it, over a factor of about a hundred. "
        "The gradient norm changes far less.",
    ),
    "vit": Family(
        "Vision transformer",
        _KNOWN["warm-up-and-cosine/vit"],
        "The update ratio starts below a thousandth, because the rate warms up. The largest gradient norm is five "
        "times the median, and still no spike: norms vary that much from batch to batch.",
    ),
    "vae": Family(
        "Variational autoencoder",
        _KNOWN["variational/autoencoder"],
        "Two terms add up to the loss, and the gradient norm is steady: four of five steps lie within a factor of "
        "two of the median.",
    ),
    "lstm": Family(
        "LSTM",
        _KNOWN["two-layers-of-lstm/rnn"],
        "The first updates are several percent of the weights, because Adam moves each weight by about the rate "
        "at first, and the weights are small. Later they are less than a hundredth.",
    ),
}

_VALUES = {
    "gradient norm": "grad_norm",
    "the same after the clip": "grad_norm_after_clip",
    "share of clipped steps": "clip_fraction",
    "update ratio": "update_ratio",
    "its 10th percentile over matrices": "update_ratio_p10",
    "its 90th percentile over matrices": "update_ratio_p90",
    "parameter norm": "param_norm",
    "largest share of the squared gradient norm": "grad_top_fraction",
}


def table(run: gradmon.Run) -> str:
    """Quantiles of the whole-model values of a run, and how often its gradient norm spiked."""
    rows = ["| value | first | 10 % | median | 90 % | largest |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    for title, name in _VALUES.items():
        values = [value for value in series(run, f"gradmon/{name}").values() if math.isfinite(value)]
        if values:
            low, middle, high = torch.quantile(
                torch.tensor(values, dtype=torch.float64), torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
            ).tolist()
            cells = " | ".join(f"{value:.3g}" for value in (values[0], low, middle, high, max(values)))
            rows.append(f"| {title} | {cells} |")
    steps = len(run.series("gradmon/grad_norm"))
    spikes = len(run.spikes)
    text = f"The run has {steps} steps and {spikes or 'no'} spike{'' if spikes == 1 else 's'} of the gradient norm."
    return "\n".join([*rows, "", text])
