"""BitFit: after pre-training, only bias and LayerNorm parameters (plus the new head) are trained on a second text-like task.
Odd at first sight: weight matrices are frozen one by one inside otherwise trained modules, and the bias learning rate is 5e-3.
Returns held-out accuracy on the second task (three classes)."""
import torch
from torch import nn


class BagOfWindows(nn.Module):
    def __init__(self, vocab=60, d=32, classes=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.conv = nn.Conv1d(d, 64, 3, padding=1)
        self.norm = nn.LayerNorm(64)
        self.fc = nn.Linear(64, 64)
        self.norm2 = nn.LayerNorm(64)
        self.head = nn.Linear(64, classes)

    def forward(self, t):
        h = self.conv(self.emb(t).transpose(1, 2)).transpose(1, 2).relu()
        h = self.norm(h).max(1).values
        return self.head(self.norm2(self.fc(h).relu()))


def corpus(n, k, seed):
    """each class has ten typical words"""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, k, (n,), generator=g)
    words = torch.randint(0, 60, (n, 16), generator=g)
    topical = (y[:, None] * 10 + torch.randint(0, 10, (n, 16), generator=g) + (0 if k == 4 else 25)) % 60
    return torch.where(torch.rand(n, 16, generator=g) < 0.5, topical, words), y


def train(watch):
    torch.manual_seed(9)
    torch.set_num_threads(1)
    net = BagOfWindows()
    x, y = corpus(4000, 4, 0)
    opt = torch.optim.AdamW(net.parameters(), 2e-3)
    for i in range(200):
        j = torch.randint(0, 4000, (128,))
        loss = nn.functional.cross_entropy(net(x[j]), y[j])
        opt.zero_grad(); loss.backward(); opt.step()

    net.head = nn.Linear(64, 3)
    for name, p in net.named_parameters():
        p.requires_grad = name.startswith("head") or name.endswith("bias") or "norm" in name
    tuned = [p for p in net.parameters() if p.requires_grad]
    print(sum(p.numel() for p in tuned), "of", sum(p.numel() for p in net.parameters()))
    opt = torch.optim.AdamW(tuned, lr=5e-3, weight_decay=0.0)
    mon = watch(net, opt)
    x, y = corpus(2000, 3, 1)
    for i in range(400):
        j = torch.randint(0, 2000, (64,))
        loss = nn.functional.cross_entropy(net(x[j]), y[j])
        opt.zero_grad()
        loss.backward()
        opt.step()
        mon.log_scalar("loss", loss.detach())
    xt, yt = corpus(1500, 3, 2)
    with torch.no_grad():
        return (net(xt).argmax(1) == yt).float().mean().item()
