"""Ignite with a hand-written update function and the EMAHandler: labels are 25 % wrong, the student also follows its own EMA teacher's predictions after a warm-up.
Odd at first sight: the target of the loss drifts, because it is mixed with the EMA's output; the loss levels out high due to label noise.
Returns the EMA model's accuracy on clean data (four classes)."""
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from ignite.engine import Engine, Events
from ignite.handlers import EMAHandler


def make(n, seed, noise):
    g0, g = torch.Generator().manual_seed(70), torch.Generator().manual_seed(seed)
    W1, W2 = torch.randn(12, 10, generator=g0), torch.randn(10, 4, generator=g0)
    x = torch.randn(n, 12, generator=g)
    y = (torch.tanh(x @ W1 * 0.3) @ W2).argmax(1)
    wrong = torch.rand(n, generator=g) < noise
    return x, torch.where(wrong, torch.randint(0, 4, (n,), generator=g), y)


def train(watch):
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(12, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4))
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    ema = EMAHandler(model, momentum=0.02)

    def update(engine, batch):
        model.train()
        x, y = batch
        hard = F.one_hot(y, 4).float()
        with torch.no_grad():
            soft = ema.ema_model(x).softmax(1)
        mix = 0.5 * min(1.0, max(0.0, (engine.state.iteration - 100) / 100))
        logp = model(x).log_softmax(1)
        loss = -(((1 - mix) * hard + mix * soft) * logp).sum(1).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    trainer = Engine(update)
    ema.attach(trainer, event=Events.ITERATION_COMPLETED)
    watch.ignite(trainer, model, opt)
    trainer.run(DataLoader(TensorDataset(*make(12000, 0, 0.25)), batch_size=160, shuffle=True), max_epochs=7)
    x, y = make(3000, 1, 0.0)
    ema.ema_model.eval()
    with torch.no_grad():
        return (ema.ema_model(x).argmax(1) == y).float().mean().item()
