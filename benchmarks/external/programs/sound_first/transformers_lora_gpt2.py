"""Hand-written LoRA on the attention projections of a tiny GPT-2 that was first trained on ascending number sequences; adapted to descending ones with the Trainer.
Odd at first sight: nearly all parameters are frozen, the LoRA "up" matrices are zero at the start, a learning rate of 1e-2.
Returns next-token accuracy on descending sequences (before: about 0.1)."""
import tempfile
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class LoRAConv1D(nn.Module):
    """wraps transformers' Conv1D (weight is in x out)"""
    def __init__(self, base, r=8, alpha=16):
        super().__init__()
        self.base = base
        i, o = base.weight.shape
        self.down = nn.Parameter(torch.randn(i, r) / i ** 0.5)
        self.up = nn.Parameter(torch.zeros(r, o))
        self.scale = alpha / r

    def forward(self, x):
        return self.base(x) + (x @ self.down @ self.up) * self.scale


class Walk(Dataset):
    def __init__(self, n, sign, seed):
        g = torch.Generator().manual_seed(seed)
        start = torch.randint(0, 30, (n, 1), generator=g)
        stride = torch.randint(1, 6, (n, 1), generator=g)
        self.x = (start + sign * stride * torch.arange(10)) % 30

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "labels": self.x[i]}


def accuracy(model, data):
    model.eval()
    with torch.no_grad():
        p = model(data.x).logits[:, 1:-1].argmax(-1)
    return (p == data.x[:, 2:]).float().mean().item()


def train(watch):
    set_seed(1)
    torch.set_num_threads(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=30, n_positions=10, n_embd=48, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))
    up = Walk(5000, 1, 0)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(250):
        b = up.x[torch.randint(0, 5000, (64,))]
        loss = model(b, labels=b).loss
        opt.zero_grad(); loss.backward(); opt.step()
    test = Walk(1000, -1, 3)
    print("base", accuracy(model, Walk(500, 1, 9)), "->", accuracy(model, test))
    model.requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = LoRAConv1D(block.attn.c_attn)
        block.attn.c_proj = LoRAConv1D(block.attn.c_proj)
        block.mlp.c_fc = LoRAConv1D(block.mlp.c_fc)
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(out, max_steps=350, per_device_train_batch_size=64, learning_rate=1e-2, lr_scheduler_type="linear", warmup_steps=20,
                                 save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, logging_steps=50)
        Trainer(model=model, args=args, train_dataset=Walk(4000, -1, 1), callbacks=[*watch.callbacks("transformers")]).train()
    return accuracy(model, test)
