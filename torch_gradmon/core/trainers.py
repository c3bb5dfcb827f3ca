"""What to do in a trainer, whose loop the script does not write, where a plain loop has another remedy."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

_IN_THE_LOOP = 'log the loss with monitor.log_scalar("loss", loss)'


class TrainerAdvice(NamedTuple):
    """The remedies in one trainer.

    Attributes:
        loss: how a run gets a loss.
        remedies: other remedies of findings, by rule, without their full stop.
    """

    loss: str = _IN_THE_LOOP
    remedies: Mapping[str, str] = MappingProxyType({})


#: By the fact ``trainer`` of a run, which the adapters write.
TRAINERS: dict[str, TrainerAdvice] = {
    "lightning": TrainerAdvice(
        'return the loss from training_step(), or log it there with callback.monitor.log_scalar("loss", loss)',
        {
            "loss-scale": "Use reduction='mean'; Lightning divides the loss by accumulate_grad_batches itself, and a loop with manual "
            "optimisation has to"
        },
    ),
    "transformers": TrainerAdvice(
        "train on: the loss that the Trainer computes is recorded in each monitored step",
        {
            "loss-scale": "A model whose forward() takes **kwargs has to divide its loss by num_items_in_batch, since the Trainer does not "
            "divide it by gradient_accumulation_steps then: if it does not, set trainer.model_accepts_loss_kwargs = False before "
            "trainer.train(), or pass a compute_loss_func that divides; and use reduction='mean'"
        },
    ),
    "ignite": TrainerAdvice(
        "return the loss from the update function of the trainer, alone or as 'loss' of a dict, or log it there with "
        'handler.monitor.log_scalar("loss", loss)'
    ),
}


def advice_for(trainer: object) -> TrainerAdvice:
    """The remedies in this trainer; those of a plain loop where there is none."""
    return TRAINERS.get(trainer, TrainerAdvice()) if isinstance(trainer, str) else TrainerAdvice()
