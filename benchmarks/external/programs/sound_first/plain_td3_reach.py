"""TD3: two critics, delayed actor (updated on every second step), smoothed target actions, three target networks; task: a 1-D cart that reaches a random set point.
Odd at first sight: the actor has no gradient on half of the steps and its loss (minus Q) is just the level of the values.
Returns the mean final distance to the set point (start: about 1.0)."""
import copy
import torch
from torch import nn


def mlp(i, o, *tail):
    return nn.Sequential(nn.Linear(i, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, o), *tail)


class World:
    def __init__(self, n):
        self.n = n
        self.reset()

    def reset(self):
        self.s = torch.stack([torch.rand(self.n) * 2 - 1, torch.zeros(self.n), torch.rand(self.n) * 2 - 1], 1)
        return self.s

    def step(self, a):
        x, v, g = self.s.unbind(1)
        v = 0.8 * v + 0.2 * a.squeeze(1)
        x = x + 0.5 * v
        self.s = torch.stack([x, v, g], 1)
        return self.s, -(x - g).abs()


class TD3(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = mlp(3, 1, nn.Tanh())
        self.q1, self.q2 = mlp(4, 1), mlp(4, 1)


def train(watch):
    torch.manual_seed(8)
    torch.set_num_threads(1)
    net = TD3()
    tgt = copy.deepcopy(net).requires_grad_(False)
    opt_a = torch.optim.Adam(net.actor.parameters(), lr=1e-3)
    opt_q = torch.optim.Adam(list(net.q1.parameters()) + list(net.q2.parameters()), lr=1e-3)
    monitor = watch(net, opt_a, opt_q)
    world, memory, gamma, tau = World(16), [], 0.9, 0.02
    for t in range(800):
        if t % 20 == 0:
            world.reset()
        s = world.s
        with torch.no_grad():
            a = (net.actor(s) + 0.3 * torch.randn(16, 1)).clamp(-1, 1) if t > 50 else torch.rand(16, 1) * 2 - 1
        s2, r = world.step(a)
        memory.append((s, a, r[:, None], s2))
        if t < 20:
            continue
        idx = torch.randint(0, len(memory), (8,)).tolist()
        bs, ba, br, bs2 = (torch.cat(c) for c in zip(*[memory[i] for i in idx]))
        with torch.no_grad():
            a2 = (tgt.actor(bs2) + (0.2 * torch.randn_like(ba)).clamp(-0.4, 0.4)).clamp(-1, 1)
            x2 = torch.cat([bs2, a2], 1)
            y = br + gamma * torch.min(tgt.q1(x2), tgt.q2(x2))
        x = torch.cat([bs, ba], 1)
        lq = nn.functional.mse_loss(net.q1(x), y) + nn.functional.mse_loss(net.q2(x), y)
        opt_q.zero_grad()
        lq.backward()
        opt_q.step()
        monitor.log_scalar("q_loss", lq.detach())
        if t % 2 == 0:
            net.q1.requires_grad_(False)
            la = -net.q1(torch.cat([bs, net.actor(bs)], 1)).mean()
            opt_a.zero_grad()
            la.backward()
            opt_a.step()
            net.q1.requires_grad_(True)
            monitor.log_scalar("actor_loss", la.detach())
            with torch.no_grad():
                for p, q in zip(tgt.parameters(), net.parameters()):
                    p.lerp_(q, tau)
    w = World(200)
    s = w.reset()
    for _ in range(25):
        with torch.no_grad():
            s, r = w.step(net.actor(s))
    return -r.mean().item()
