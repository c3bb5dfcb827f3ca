"""What a rank of a test does under Lightning: train without the callback and with it. Run by ``torch.distributed.run``."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from tests import trainer_oracle as oracle
from tests.test_integration_lightning import Everything, Net


class Sharded(Net):
    """The same under FSDP2."""

    def configure_model(self) -> None:
        if not hasattr(self, "sharded"):
            self.sharded = True
            for layer in (self.net[0], self.net[3], self.net):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])


class Share(torch.utils.data.Dataset[oracle.Batch]):
    """Every other batch, of 16."""

    def __init__(self, rank: int) -> None:
        self.own = oracle.batches(16)[rank::2]

    def __len__(self) -> int:
        return len(self.own)

    def __getitem__(self, index: int) -> oracle.Batch:
        return self.own[index]


def trained(kind: str, rank: int, directory: Path, watched: bool) -> tuple[list[Any], Any, float | None]:
    """The parameters after an epoch; with the callback also all values, and under DDP the score of a checkpoint by an epoch's value."""
    strategies = {
        "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
        "fsdp2": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    }
    callbacks: list[Any] = [Everything()] if watched else []
    if watched and kind == "ddp":
        callbacks.append(ModelCheckpoint(directory, monitor="gradmon_epoch/grad_norm"))
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategies[kind](),
        max_epochs=1,
        accumulate_grad_batches=2,
        gradient_clip_val=oracle.CLIP if kind == "ddp" else None,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=len(callbacks) > 1,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    net = {"ddp": Net, "fsdp2": Sharded}[kind]()
    trainer.fit(net, torch.utils.data.DataLoader(Share(rank), batch_size=None))
    whole = [(p.full_tensor() if hasattr(p, "full_tensor") else p).tolist() for p in net.parameters()]
    values = callbacks[0].monitor.get_all_metrics() if watched else None
    return whole, values, float(callbacks[1].best_model_score) if len(callbacks) > 1 else None


def main() -> None:
    """Train twice, and leave what came of it in a file of this rank."""
    warnings.filterwarnings("ignore")
    kind, directory, rank = sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"])
    plain, _, _ = trained(kind, rank, directory, watched=False)
    watched, values, score = trained(kind, rank, directory, watched=True)
    (directory / f"{rank}.json").write_text(json.dumps([plain == watched, values, score]))


if __name__ == "__main__":
    main()
