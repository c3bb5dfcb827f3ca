"""Accelerate with gradient_accumulation_steps=4 and accelerator.accumulate: a small language model of nested brackets.
Ordinary; odd only that loss.backward goes through the accelerator and optimizer.step is called on each micro-batch (skipped inside).
Returns accuracy of predicting which closing bracket follows, on held-out strings (chance 0.33)."""
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import Dataset, DataLoader
from accelerate import Accelerator
from accelerate.utils import set_seed


class Brackets(Dataset):
    """0 pad, 1-3 open, 4-6 close"""
    def __init__(self, n, seed, length=16):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.zeros(n, length, dtype=torch.long)
        self.closing = torch.zeros(n, length, dtype=torch.bool)
        for i in range(n):
            stack = []
            for t in range(length):
                must_close = len(stack) >= length - t
                if stack and (must_close or torch.rand((), generator=g) < 0.45):
                    self.x[i, t] = stack.pop() + 3
                    self.closing[i, t] = True
                else:
                    k = int(torch.randint(1, 4, (), generator=g))
                    stack.append(k)
                    self.x[i, t] = k

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.closing[i]


class LM(nn.Module):
    def __init__(self, h=80):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(7, 24), nn.LSTM(24, h, batch_first=True), nn.Linear(h, 7)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def train(watch):
    set_seed(3)
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = LM()
    opt = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.01)
    loader = DataLoader(Brackets(1600, 0), batch_size=16, shuffle=True)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 8 * 25, eta_min=3e-4)
    model, opt, loader, sched = accelerator.prepare(model, opt, loader, sched)
    monitor = watch(model, opt)
    for epoch in range(8):
        model.train()
        for x, _ in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                sched.step()
                opt.zero_grad()
            monitor.log_scalar("loss", loss.detach())
    model.eval()
    t = Brackets(400, 1)
    with torch.no_grad():
        logits = model(t.x[:, :-1])
    m = t.closing[:, 1:]
    return ((logits[..., 4:].argmax(-1) + 4)[m] == t.x[:, 1:][m]).float().mean().item()
