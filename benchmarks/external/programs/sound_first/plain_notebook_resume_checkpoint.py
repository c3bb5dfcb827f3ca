"""Notebook session with a kernel restart: half of the training, checkpoint to memory (model, optimizer, scheduler, RNG), everything rebuilt and continued.
Ordinary, with a second watch call on the new objects. Returns test accuracy on a text-like language identification task (5 languages)."""
import io
import torch
from torch import nn


def sentences(n, seed):
    trans = (2.5 * torch.randn(5, 20, 20, generator=torch.Generator().manual_seed(10))).softmax(-1)
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 5, (n,), generator=g)
    s = [torch.randint(0, 20, (n,), generator=g)]
    for _ in range(13):
        s.append(torch.multinomial(trans[y, s[-1]], 1, generator=g).squeeze(1))
    return torch.stack(s, 1), y


def build():
    model = nn.ModuleDict({"emb": nn.Embedding(400, 32), "fc": nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 5))})
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.02)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=400)
    return model, opt, sched


def forward(model, s):
    bigrams = s[:, :-1] * 20 + s[:, 1:]
    return model["fc"](model["emb"](bigrams).mean(1))


def fit(model, opt, sched, monitor, X, Y, steps):
    model.train()
    for _ in range(steps):
        i = torch.randint(0, len(X), (128,))
        loss = nn.functional.cross_entropy(forward(model, X[i]), Y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        monitor.log_scalar("loss", loss.detach())
    return loss.item()


def train(watch):
    torch.manual_seed(6)
    torch.set_num_threads(1)
    X, Y = sentences(5000, 0)
    model, opt, sched = build()
    print(fit(model, opt, sched, watch(model, opt), X, Y, 200))
    disk = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(), "rng": torch.get_rng_state()}, disk)
    del model, opt, sched

    # ---- kernel restarted ----
    disk.seek(0)
    ck = torch.load(disk)
    model, opt, sched = build()
    model.load_state_dict(ck["model"]); opt.load_state_dict(ck["opt"]); sched.load_state_dict(ck["sched"])
    torch.set_rng_state(ck["rng"])
    print(fit(model, opt, sched, watch(model, opt), X, Y, 200))
    model.eval()
    xt, yt = sentences(2000, 1)
    with torch.no_grad():
        return (forward(model, xt).argmax(1) == yt).float().mean().item()
