"""Ignite engine around a VAE with free bits (0.25 nats per latent) on correlated binary questionnaires.
Odd at first sight: the KL term is held at a floor by max(), so its gradients are exactly zero for some latents in the beginning.
Returns the held-out reconstruction accuracy of the answers."""
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from ignite.engine import Engine, Events
from ignite.handlers import param_scheduler


def answers(n, seed):
    g0, g = torch.Generator().manual_seed(21), torch.Generator().manual_seed(seed)
    W, b = 3.0 * torch.randn(4, 40, generator=g0), torch.randn(40, generator=g0)
    z = torch.randn(n, 4, generator=g)
    return (torch.rand(n, 40, generator=g) < torch.sigmoid(z @ W + b)).float()


class VAE(nn.Module):
    def __init__(self, d=40, z=8, h=96):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d, h), nn.ELU(), nn.Linear(h, 2 * z))
        self.dec = nn.Sequential(nn.Linear(z, h), nn.ELU(), nn.Linear(h, d))

    def forward(self, x):
        mu, lv = self.enc(x).chunk(2, 1)
        z = mu + torch.exp(0.5 * lv) * torch.randn_like(mu) if self.training else mu
        return self.dec(z), 0.5 * (mu.square() + lv.exp() - lv - 1)


def train(watch):
    torch.manual_seed(6)
    torch.set_num_threads(1)
    model = VAE()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(engine, batch):
        model.train()
        (x,) = batch
        logits, kl = model(x)
        rec = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1).mean()
        loss = rec + kl.mean(0).clamp(min=0.25).sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return {"loss": loss.item(), "rec": rec.item()}

    trainer = Engine(step)
    loader = DataLoader(TensorDataset(answers(6000, 0)), batch_size=128, shuffle=True)
    lin = param_scheduler.LinearCyclicalScheduler(opt, "lr", 3e-3, 3e-4, cycle_size=2 * 12 * len(loader))
    trainer.add_event_handler(Events.ITERATION_STARTED, lin)
    watch.ignite(trainer, model, opt)
    trainer.run(loader, max_epochs=12)
    model.eval()
    x = answers(2000, 1)
    with torch.no_grad():
        return ((model(x)[0] > 0).float() == x).float().mean().item()
