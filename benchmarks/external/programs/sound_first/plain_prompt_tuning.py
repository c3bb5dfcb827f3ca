"""Soft prompt tuning: only eight prompt vectors are optimised (Adam, learning rate 0.1, usual for prompts) in front of a frozen sequence model that can do
several tasks by instruction token. Odd at first sight: one tiny parameter with a huge learning rate, everything else frozen.
Returns accuracy with the learned prompt (eight classes)."""
import torch
from torch import nn
import torch.nn.functional as F


class Seq(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.tok = nn.Embedding(8 + 3, d)             # 8 symbols, 3 instructions
        self.pos = nn.Embedding(9, d)
        layer = nn.TransformerEncoderLayer(d, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(d, 8)

    def forward(self, symbols, instr=None, prompt=None):
        x = self.tok(symbols) + self.pos(torch.arange(symbols.size(1)))
        pre = self.tok(instr + 8)[:, None] if prompt is None else prompt.expand(len(x), -1, -1)
        h = self.enc(torch.cat([pre, x], 1))
        return self.head(h[:, pre.size(1):].mean(1))


def labels(x, task):
    out = torch.stack([x.max(1).values, x.min(1).values, x[:, 0]], 1)
    return out.gather(1, task[:, None]).squeeze(1)


def train(watch):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = Seq()
    pre = torch.optim.Adam(net.parameters(), 2e-3)
    for _ in range(350):
        x, t = torch.randint(0, 8, (96, 5)), torch.randint(0, 3, (96,))
        l = F.cross_entropy(net(x, t), labels(x, t))
        pre.zero_grad(); l.backward(); pre.step()
    print("multi-task loss", l.item())
    net.requires_grad_(False).eval()
    wrapper = nn.Module()
    wrapper.backbone = net
    wrapper.prompt = nn.Parameter(net.tok.weight[torch.randint(0, 8, (8,))].clone()[None])
    opt = torch.optim.Adam([wrapper.prompt], lr=0.1)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, total_iters=200)
    monitor = watch(wrapper, opt)
    zeros = torch.zeros(128, dtype=torch.long)
    for step in range(200):
        x = torch.randint(0, 8, (128, 5))
        loss = F.cross_entropy(net(x, prompt=wrapper.prompt), labels(x, zeros))
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        monitor.log_scalar("loss", loss.detach())
    x = torch.randint(0, 8, (2000, 5))
    with torch.no_grad():
        return (net(x, prompt=wrapper.prompt).argmax(1) == labels(x, torch.zeros(2000, dtype=torch.long))).float().mean().item()
