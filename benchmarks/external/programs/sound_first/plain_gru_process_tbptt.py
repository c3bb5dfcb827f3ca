"""GRU that predicts a plant's temperature from valve positions on endless simulated streams; truncated backpropagation over 40 steps with a carried, detached state.
Odd at first sight: the streams are reset at random, so the loss jumps in single batches, and the loss covers only the second half of each window (burn-in).
Returns one-step prediction RMSE over the noise floor on new streams (1 would be perfect; repeating the last observation gives about 1.5)."""
import torch
from torch import nn


class Plant:
    """batch of second-order lags with dead time, observed with noise"""
    def __init__(self, n, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.n = n
        self.reset(torch.ones(n, dtype=torch.bool))

    def reset(self, mask):
        if not hasattr(self, "x"):
            self.x, self.v, self.u = torch.zeros(self.n), torch.zeros(self.n), torch.zeros(self.n)
        self.x[mask] = torch.randn(int(mask.sum()), generator=self.g)
        self.v[mask], self.u[mask] = 0.0, 0.0

    def window(self, T):
        xs, ys = [], []
        for _ in range(T):
            change = torch.rand(self.n, generator=self.g) < 0.1
            self.u = torch.where(change, torch.rand(self.n, generator=self.g) * 2 - 1, self.u)
            obs = self.x + 0.05 * torch.randn(self.n, generator=self.g)
            self.v = 0.9 * self.v + 0.1 * (torch.tanh(2 * self.u) - 0.5 * self.x)
            self.x = self.x + 0.3 * self.v
            xs.append(torch.stack([obs, self.u], 1)); ys.append(self.x + 0.05 * torch.randn(self.n, generator=self.g))
        return torch.stack(xs), torch.stack(ys)


class Predictor(nn.Module):
    def __init__(self, h=48):
        super().__init__()
        self.gru, self.out = nn.GRU(2, h), nn.Linear(h, 1)

    def forward(self, x, h):
        o, h = self.gru(x, h)
        return self.out(o).squeeze(-1), h


def train(watch):
    torch.manual_seed(7)
    torch.set_num_threads(1)
    model, plant = Predictor(), Plant(64, 0)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-3)
    watch(model, opt)
    h = torch.zeros(1, 64, 48)
    for it in range(350):
        fresh = torch.rand(64) < 0.1
        plant.reset(fresh)
        h = h.detach() * (~fresh)[None, :, None]
        x, y = plant.window(40)
        p, h = model(x, h)
        loss = nn.functional.mse_loss(p[20:], y[20:])
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if it == 250:
            opt.param_groups[0]["lr"] = 5e-4
    x, y = Plant(200, 1).window(120)
    with torch.no_grad():
        p, _ = model(x, torch.zeros(1, 200, 48))
    return ((p[40:] - y[40:]).square().mean().sqrt() / 0.05).item()
