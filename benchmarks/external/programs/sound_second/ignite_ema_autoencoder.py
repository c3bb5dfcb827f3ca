"""Ignite with EMAHandler and a warmed-up cosine schedule from create_lr_scheduler_with_warmup for a denoising autoencoder of curves.
Looks odd: the bottleneck is 3 wide so that the reconstruction loss has a floor, and the evaluated weights are not those that are trained but their running average."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from ignite.engine import Engine, Events
from ignite.handlers import CosineAnnealingScheduler, EMAHandler, create_lr_scheduler_with_warmup
from torch.utils.data import DataLoader, TensorDataset


def curves(n, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.linspace(-1, 1, 40)
    c, w, a = (torch.rand(n, 1, generator=g) for _ in range(3))
    clean = (.5 + a) * torch.exp(-(t - (c - .5)) ** 2 / (.03 + .15 * w))
    return clean, clean + .15 * torch.randn(n, 40, generator=g)


def train(watch):
    torch.manual_seed(8)
    clean, noisy = curves(4000, 0)
    model = nn.Sequential(nn.Linear(40, 64), nn.SiLU(), nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 3), nn.Linear(3, 32), nn.SiLU(), nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 40))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(engine, batch):
        y, x = batch
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    dl = DataLoader(TensorDataset(clean, noisy), 64, shuffle=True)
    epochs = 10
    trainer = Engine(step)
    cos = CosineAnnealingScheduler(optimizer, "lr", 3e-3, 1e-4, epochs * len(dl))
    trainer.add_event_handler(Events.ITERATION_STARTED, create_lr_scheduler_with_warmup(cos, warmup_start_value=1e-4, warmup_end_value=3e-3, warmup_duration=30))
    ema = EMAHandler(model, momentum=.01)
    ema.attach(trainer, name="ema_momentum", event=Events.ITERATION_COMPLETED)
    watch.ignite(trainer, model, optimizer)
    trainer.run(dl, max_epochs=epochs)
    c, x = curves(1000, 1)
    with torch.no_grad():
        return float(1 - F.mse_loss(ema.ema_model(x), c) / F.mse_loss(x, c))
