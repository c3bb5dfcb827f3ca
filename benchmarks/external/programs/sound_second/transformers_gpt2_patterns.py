"""A two-layer GPT-2 from scratch on synthetic arithmetic progressions modulo 13, trained by the Transformers Trainer.
Ordinary causal language modelling with warmup and linear decay; the first tokens of each sequence are unpredictable, so the loss has a floor."""
import tempfile
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Progressions(Dataset):
    def __init__(self, n, seed, length=14, mod=13):
        g = torch.Generator().manual_seed(seed)
        start, step = torch.randint(0, mod, (n, 1), generator=g), torch.randint(1, 6, (n, 1), generator=g)
        x = (start + step * torch.arange(length)) % mod
        bad = torch.rand(n, length, generator=g) < 0.02
        self.x = torch.where(bad, torch.randint(0, mod, (n, length), generator=g), x)

    def __len__(self): return len(self.x)
    def __getitem__(self, i): return {"input_ids": self.x[i], "labels": self.x[i]}


def train(watch):
    set_seed(0)
    config = GPT2Config(vocab_size=13, n_positions=32, n_embd=48, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.05, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(out, max_steps=400, per_device_train_batch_size=32, per_device_eval_batch_size=200, learning_rate=3e-3, warmup_steps=40,
                                 weight_decay=0.01, lr_scheduler_type="linear", report_to=[], save_strategy="no", logging_steps=50, disable_tqdm=True, use_cpu=True)
        trainer = Trainer(model=model, args=args, train_dataset=Progressions(8000, 1), eval_dataset=Progressions(600, 2),
                          callbacks=[*watch.callbacks("transformers")])
        trainer.train()
        return float(trainer.evaluate()["eval_loss"])
