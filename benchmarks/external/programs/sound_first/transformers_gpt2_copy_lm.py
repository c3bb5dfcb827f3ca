"""A tiny GPT-2 from scratch with the Hugging Face Trainer learns to continue a sequence that repeats after a separator; prompt tokens are masked out of the loss.
Ordinary. Returns token accuracy of the second half on unseen sequences."""
import tempfile
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

SEP = 12


class Copy(Dataset):
    def __init__(self, n, seed, length=6):
        g = torch.Generator().manual_seed(seed)
        s = torch.randint(0, 12, (n, length), generator=g)
        self.x = torch.cat([s, torch.full((n, 1), SEP), s], 1)
        self.y = self.x.clone()
        self.y[:, :length + 1] = -100

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "labels": self.y[i]}


def train(watch):
    set_seed(0)
    torch.set_num_threads(1)
    config = GPT2Config(vocab_size=13, n_positions=16, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=SEP, eos_token_id=SEP)
    model = GPT2LMHeadModel(config)
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(out, max_steps=350, per_device_train_batch_size=64, learning_rate=3e-3, warmup_steps=40, lr_scheduler_type="cosine", weight_decay=0.01,
                                 logging_steps=50, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, seed=0)
        trainer = Trainer(model=model, args=args, train_dataset=Copy(20000, 0), callbacks=[*watch.callbacks("transformers")])
        trainer.train()
    model.eval()
    t = Copy(500, 1)
    with torch.no_grad():
        logits = model(t.x).logits[:, 6:-1]
    return (logits.argmax(-1) == t.x[:, 7:]).float().mean().item()
