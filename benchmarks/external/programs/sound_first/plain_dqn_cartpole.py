"""DQN with replay, epsilon-greedy exploration and a target network copied every 50 updates, on a self-written balancing pole.
Odd at first sight: the TD loss goes down only slowly and jumps after each copy, because the values it chases grow all the time.
Returns the mean number of balanced steps (of 150) of the greedy policy."""
import math
import random
import torch
from torch import nn
import torch.nn.functional as F


class Replay:
    def __init__(self, cap, dim):
        self.s = torch.zeros(cap, dim); self.s2 = torch.zeros(cap, dim)
        self.a = torch.zeros(cap, dtype=torch.long); self.r = torch.zeros(cap); self.d = torch.zeros(cap)
        self.cap, self.n, self.i = cap, 0, 0

    def add(self, s, a, r, s2, d):
        for j in range(len(s)):
            i = self.i
            self.s[i], self.a[i], self.r[i], self.s2[i], self.d[i] = s[j], a[j], r[j], s2[j], d[j]
            self.i = (i + 1) % self.cap
            self.n = min(self.n + 1, self.cap)

    def sample(self, k):
        i = torch.randint(0, self.n, (k,))
        return self.s[i], self.a[i], self.r[i], self.s2[i], self.d[i]


def physics(s, a):
    th, w = s.unbind(1)
    u = (a.float() - 1.0) * 6.0
    w2 = w + 0.04 * (9.8 * th.sin() + u * th.cos())
    th2 = th + 0.04 * w2
    return torch.stack([th2, w2], 1), th2.abs() > 0.5


def start(n):
    return (torch.rand(n, 2) - 0.5) * 0.3


def train(watch):
    random.seed(0); torch.manual_seed(0); torch.set_num_threads(1)
    q = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    target = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)).requires_grad_(False)
    target.load_state_dict(q.state_dict())
    opt = torch.optim.Adam(q.parameters(), lr=1e-3)
    monitor = watch(q, opt)
    buf, n = Replay(8000, 2), 8
    s, age = start(n), torch.zeros(n)
    gamma, updates = 0.97, 0
    for t in range(860):
        eps = max(0.05, 1 - t / 400)
        with torch.no_grad():
            a = q(s).argmax(1)
        explore = torch.rand(n) < eps
        a = torch.where(explore, torch.randint(0, 3, (n,)), a)
        s2, fail = physics(s, a)
        r = 1.0 - 2 * s2[:, 0].abs() - fail.float()
        buf.add(s, a, r, s2, fail.float())
        age += 1
        over = fail | (age >= 150)
        s = torch.where(over[:, None], start(n), s2)
        age[over] = 0
        if t < 60:
            continue
        bs, ba, br, bs2, bd = buf.sample(128)
        with torch.no_grad():
            y = br + gamma * (1 - bd) * target(bs2).max(1).values
        loss = F.smooth_l1_loss(q(bs).gather(1, ba[:, None]).squeeze(1), y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(q.parameters(), 10.0)
        opt.step()
        monitor.log_scalar("loss", loss.detach())
        updates += 1
        if updates % 50 == 0:
            target.load_state_dict(q.state_dict())
    s, alive, total = start(100), torch.ones(100, dtype=torch.bool), torch.zeros(100)
    for _ in range(150):
        total += alive
        with torch.no_grad():
            s, f = physics(s, q(s).argmax(1))
        alive &= ~f
    return total.mean().item()
