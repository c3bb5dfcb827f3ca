"""Discrete soft actor-critic with a learned temperature (three optimizers: actor, critics, log alpha) on a small foraging task.
Odd at first sight: the temperature falls steadily towards zero, and the actor's loss is negative and keeps sinking because the values grow.
Returns the share of evaluation episodes in which the food is found within 10 moves."""
import copy
import math
import torch
from torch import nn
import torch.nn.functional as F


class Forage:
    D = torch.tensor([[1., 0.], [-1., 0.], [0., 1.], [0., -1.]]) * 0.25

    def __init__(self, n):
        self.n = n
        self.p, self.f = torch.rand(n, 2) * 2 - 1, torch.rand(n, 2) * 2 - 1

    def obs(self):
        return torch.cat([self.p, self.f - self.p], 1)

    def step(self, a):
        before = (self.p - self.f).norm(dim=1)
        self.p = (self.p + self.D[a] + 0.02 * torch.randn(self.n, 2)).clamp(-1.2, 1.2)
        dist = (self.p - self.f).norm(dim=1)
        found = dist < 0.25
        rew = (before - dist) + found.float()
        nxt = self.obs()
        if found.any():
            self.f[found] = torch.rand(int(found.sum()), 2) * 2 - 1
        return rew, nxt, found.float()


def head():
    return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def train(watch):
    torch.manual_seed(13)
    torch.set_num_threads(1)
    model = nn.Module()
    model.actor, model.q1, model.q2 = head(), head(), head()
    model.log_alpha = nn.Parameter(torch.tensor(math.log(0.3)))
    tq1, tq2 = copy.deepcopy(model.q1), copy.deepcopy(model.q2)
    tq1.requires_grad_(False); tq2.requires_grad_(False)
    oa = torch.optim.Adam(model.actor.parameters(), 1e-3)
    oq = torch.optim.Adam([*model.q1.parameters(), *model.q2.parameters()], 1e-3)
    ot = torch.optim.Adam([model.log_alpha], 3e-3)
    mon = watch(model, oa, oq, ot)
    env, buf = Forage(16), []
    target_entropy = 0.3 * math.log(4)
    for t in range(600):
        o = env.obs()
        with torch.no_grad():
            a = torch.distributions.Categorical(logits=model.actor(o)).sample()
        r, o2, d = env.step(a)
        buf.append((o, a, r, o2, d))
        if t < 30:
            continue
        o, a, r, o2, d = (torch.cat(x) for x in zip(*[buf[i] for i in torch.randint(0, len(buf), (8,)).tolist()]))
        alpha = model.log_alpha.exp().detach()
        with torch.no_grad():
            lp = F.log_softmax(model.actor(o2), 1)
            v = (lp.exp() * (torch.min(tq1(o2), tq2(o2)) - alpha * lp)).sum(1)
            y = r + 0.9 * (1 - d) * v
        lq = sum(F.mse_loss(q(o).gather(1, a[:, None])[:, 0], y) for q in (model.q1, model.q2))
        oq.zero_grad(); lq.backward(); oq.step()
        lp = F.log_softmax(model.actor(o), 1)
        with torch.no_grad():
            q = torch.min(model.q1(o), model.q2(o))
        la = (lp.exp() * (alpha * lp - q)).sum(1).mean()
        oa.zero_grad(); la.backward(); oa.step()
        ent = -(lp.exp() * lp).sum(1).mean().detach()
        lt = model.log_alpha * (ent - target_entropy)
        ot.zero_grad(); lt.backward(); ot.step()
        mon.log_scalar("critic", lq.detach()); mon.log_scalar("actor", la.detach()); mon.log_scalar("alpha", alpha)
        with torch.no_grad():
            for tp, p in zip([*tq1.parameters(), *tq2.parameters()], [*model.q1.parameters(), *model.q2.parameters()]):
                tp.lerp_(p, 0.02)
    env, ok = Forage(300), torch.zeros(300)
    for _ in range(10):
        with torch.no_grad():
            _, _, f = env.step(model.actor(env.obs()).argmax(1))
        ok = torch.maximum(ok, f)
    return ok.mean().item()
