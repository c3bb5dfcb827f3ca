"""PyTorch Lightning: one callback, on scikit-learn's digits, with one batch whose pixels are a million times too large.

pip install "torch_gradmon[lightning]" scikit-learn
"""

from __future__ import annotations

import logging
import warnings

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn

from torch_gradmon.integrations.lightning import GradmonCallback

EPOCHS, BATCH, BROKEN = 6, 64, 80


class Residual(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))

    def forward(self, images: Tensor) -> Tensor:
        """Images ``[batch, width, 8, 8]`` to the same."""
        return torch.relu(images + self.inner(images))


class Digits(pl.LightningModule):
    """A small residual network that reads digits."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.breaks = breaks
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.blocks = nn.Sequential(Residual(16), Residual(16))
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Scores ``[batch, 10]`` of images ``[batch, 1, 8, 8]``."""
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """The loss of a batch."""
        images, digits = batch
        if self.breaks and self.global_step == BROKEN:
            images = images * 1e6
        loss = nn.functional.cross_entropy(self(images), digits)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """The share of digits that are read correctly."""
        images, digits = batch
        self.log("accuracy", (self(images).argmax(1) == digits).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam with decoupled weight decay."""
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


def train(breaks: bool, callback: pl.Callback | None) -> float:
    """The share of held-out digits that are read correctly after training."""
    images, digits = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    data = torch.utils.data.TensorDataset(inputs, torch.tensor(digits))
    seen, held_out = torch.utils.data.random_split(data, [1500, len(data) - 1500], torch.Generator().manual_seed(0))
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        callbacks=[callback] if callback else [],
        logger=CSVLogger("runs", name="lightning"),
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Digits(breaks),
        torch.utils.data.DataLoader(seen, BATCH, shuffle=True),
        torch.utils.data.DataLoader(held_out, 297),
    )
    return float(trainer.callback_metrics["accuracy"])


def main() -> None:
    """Train without the broken batch, with it, and with it and the callback."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    print(f"accuracy of a clean run               {train(breaks=False, callback=None):.3f}")
    print(f"with one broken batch                 {train(breaks=True, callback=None):.3f}")
    callback = GradmonCallback(on_spike="skip", layers="blocks", run_dir="runs/lightning_gradmon")
    print(f"with one broken batch, and a callback {train(breaks=True, callback=callback):.3f}\n")
    assert callback.monitor is not None
    print(callback.monitor.why())


if __name__ == "__main__":
    main()
