"""A tiny GPT-2 from scratch learns modular counting sequences with the Hugging Face Trainer. The dataset shifts the labels by one although the model shifts them itself,
so it learns to say the token after the next one. The result is the accuracy of the greedy next token on new sequences."""
import tempfile
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Counting(Dataset):
    """start, step, then start + k * step mod 17"""
    def __init__(self, n, seed, mended):
        g = torch.Generator().manual_seed(seed)
        a, s = torch.randint(17, (n, 1), generator=g), torch.randint(1, 17, (n, 1), generator=g)
        self.seq = (a + s * torch.arange(14)) % 17
        self.mended = mended

    def __len__(self):
        return len(self.seq)

    def __getitem__(self, i):
        ids = self.seq[i]
        if self.mended:
            labels = ids.clone()
        else:
            labels = torch.cat([ids[1:], torch.tensor([-100])])
        return {"input_ids": ids, "labels": labels}


def train(watch, mended=False):
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=17, n_positions=16, n_embd=48, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
                                       resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0))
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(output_dir=out, max_steps=350, per_device_train_batch_size=32, learning_rate=3e-3, warmup_steps=30, lr_scheduler_type="cosine",
                                 report_to=[], save_strategy="no", logging_steps=50, disable_tqdm=True, use_cpu=True, seed=0)
        Trainer(model=model, args=args, train_dataset=Counting(2000, 1, mended), callbacks=[*watch.callbacks("transformers")]).train()
    model.eval()
    seq = Counting(300, 2, True).seq
    with torch.no_grad():
        pred = model(input_ids=seq).logits[:, 2:-1].argmax(-1)
    return float((pred == seq[:, 3:]).float().mean())
