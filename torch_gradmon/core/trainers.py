"""What to do in a trainer, whose loop the script does not write, where a plain loop has another remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

_IN_THE_LOOP = 'log the loss with monitor.log_scalar("loss", loss)'


class TrainerAdvice(NamedTuple):
    """The remedies in one trainer."""

    loss: str = _IN_THE_LOOP  # how a run gets a loss
    remedies: Mapping[str, str] = MappingProxyType({})  # other remedies of findings, by rule, without their full stop
    terms: Mapping[str, str] = MappingProxyType({})  # what the trainer calls what a remedy names by the words of a plain loop
    # what to do about an optimizer that has no parameter of the model; empty for the remedies of a plain loop
    another_model: str = ""

    def in_terms(self, advice: str) -> str:
        """A remedy in the words of the trainer; where two of its terms overlap, the longer one counts."""
        if not self.terms:
            return advice
        found = "|".join(rf"(?<!\w){re.escape(term)}(?!\w)" for term in sorted(self.terms, key=len, reverse=True))
        return re.sub(found, lambda term: self.terms[term[0]], advice)


#: By the fact ``trainer`` of a run, which the adapters write.
TRAINERS: dict[str, TrainerAdvice] = {
    "lightning": TrainerAdvice(
        'return the loss from training_step(), or log it there with callback.monitor.log_scalar("loss", loss)',
        {
            "loss-scale": "Use reduction='mean'; Lightning divides the loss by accumulate_grad_batches itself, and a loop with manual "
            "optimisation has to"
        },
        {
            "max_norm": "gradient_clip_val of the Trainer",
            "clip_grad_norm_": "Trainer(gradient_clip_val=...)",
            "clip the gradient norm": "clip the gradient norm, Trainer(gradient_clip_val=...)",
            "Clip the gradient norm": "Clip the gradient norm, Trainer(gradient_clip_val=...)",
            "compute under torch.autocast": "compute in bfloat16, Trainer(precision='bf16-mixed')",
            "Scale the loss with torch.amp.GradScaler": "Scale the loss, Trainer(precision='16-mixed')",
            "use bfloat16": "Trainer(precision='bf16-mixed')",
            "DataLoader(..., shuffle=True)": "DataLoader(..., shuffle=True) in train_dataloader()",
            "before the optimizer is made": "before configure_optimizers() makes the optimizer",
            "call optimizer.add_param_group()": "call optimizer.add_param_group(), of self.optimizers(),",
        },
        "Return an optimizer of self.parameters() from configure_optimizers()",
    ),
    "transformers": TrainerAdvice(
        "train on: the loss that the Trainer computes is recorded in each monitored step",
        {
            "loss-scale": "A model whose forward() takes **kwargs has to divide its loss by num_items_in_batch, since the Trainer does not "
            "divide it by gradient_accumulation_steps then: if it does not, set trainer.model_accepts_loss_kwargs = False before "
            "trainer.train(), or pass a compute_loss_func that returns the loss with reduction='sum' divided by num_items_in_batch"
        },
        {
            "max_norm": "max_grad_norm",
            "clip_grad_norm_": "max_grad_norm",
            "clip the gradient norm": "clip the gradient norm (max_grad_norm)",
            "Clip the gradient norm": "Clip the gradient norm (max_grad_norm)",
            "Clip the norm of all gradients": "Set max_grad_norm",
            "compute under torch.autocast": "compute in bfloat16 with bf16=True",
            "Scale the loss with torch.amp.GradScaler": "Set fp16=True, which scales the loss",
            "use bfloat16": "bf16=True",
            "Lower the learning rate": "Lower learning_rate",
            "Raise the learning rate": "Raise learning_rate",
            "raise the learning rate": "raise learning_rate",
            "Raise the learning rate of this": "Give the Trainer optimizers=(optimizer, scheduler), with a higher learning rate for this",
            "Lower the learning rate of this": "Give the Trainer optimizers=(optimizer, scheduler), with a lower learning rate for this",
            "add a warm-up": "add a warm-up (warmup_steps)",
            "shorten the warm-up": "shorten the warm-up (warmup_steps)",
            "DataLoader(..., shuffle=True)": "which the Trainer does unless _get_train_sampler or get_train_dataloader is overridden",
            "before the optimizer is made": "before the Trainer is made",
            "Make the optimizer after the last change of the model": "Change the model before the Trainer is made, or give it "
            "optimizers=(optimizer, scheduler) made after that",
            "call optimizer.add_param_group()": "call trainer.optimizer.add_param_group()",
        },
        "Give the Trainer optimizers=(optimizer, scheduler) made of the parameters of the model that it trains, or leave optimizers out",
    ),
    "accelerate": TrainerAdvice(
        remedies={
            "loss-scale": "Use reduction='mean' and accelerator.backward(loss), which divides by gradient_accumulation_steps within "
            "accelerator.accumulate(model)"
        },
        terms={
            "clip_grad_norm_": "accelerator.clip_grad_norm_",
            "compute under torch.autocast": "compute in bfloat16, Accelerator(mixed_precision='bf16')",
            "Scale the loss with torch.amp.GradScaler": "Scale the loss, Accelerator(mixed_precision='fp16')",
            "use bfloat16": "Accelerator(mixed_precision='bf16')",
            "before the optimizer is made": "before the optimizer is made and both go through accelerator.prepare()",
        },
    ),
    "ignite": TrainerAdvice(
        "return the loss from the update function of the trainer, alone or as 'loss' of a dict, or log it there with "
        'handler.monitor.log_scalar("loss", loss)'
    ),
}


#: The Trainer of Transformers divides nothing itself where it is given one of these, whatever its other settings.
WITH_LOSS_FUNCTION = "transformers, compute_loss_func"
TRAINERS[WITH_LOSS_FUNCTION] = TRAINERS["transformers"]._replace(
    remedies={
        "loss-scale": "Let compute_loss_func return the loss with reduction='sum' divided by num_items_in_batch, the number of examples or "
        "tokens of the whole step: the Trainer divides nothing itself then"
    }
)


def advice_for(trainer: object) -> TrainerAdvice:
    """The remedies in this trainer; those of a plain loop where there is none."""
    return TRAINERS.get(trainer, TrainerAdvice()) if isinstance(trainer, str) else TrainerAdvice()
