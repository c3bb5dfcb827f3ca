"""DQN with a replay buffer and a target net on a corridor where a lamp says which end pays. The prediction is q(s).max(1) and not q(s).gather(1, action), so the
value of the action that was taken is never told apart from the others. Returns the mean return of the greedy policy."""
import random
from collections import deque
import torch
from torch import nn


class Corridor:
    """Nine places; the lamp tells which end pays 1, the other pays -0.5; every step may slip."""
    def __init__(self, rng):
        self.rng = rng

    def reset(self):
        self.p, self.t, self.lamp = self.rng.randint(2, 6), 0, self.rng.randint(0, 1)
        return self.state()

    def state(self):
        v = [0.0] * 18
        v[self.p + 9 * self.lamp] = 1.0
        return v

    def step(self, a):
        self.t += 1
        move = 1 if a == 1 else -1
        if self.rng.random() < 0.1:
            move = -move
        self.p += move
        if self.p >= 8:
            self.p = 8
            return self.state(), 1.0 if self.lamp else -0.5, True
        if self.p <= 0:
            self.p = 0
            return self.state(), -0.5 if self.lamp else 1.0, True
        return self.state(), -0.01, self.t >= 30


def greedy_return(q, rng, n=100):
    env, total = Corridor(rng), 0.0
    for _ in range(n):
        s, done = env.reset(), False
        while not done:
            with torch.no_grad():
                a = int(q(torch.tensor([s])).argmax())
            s, r, done = env.step(a)
            total += r
    return total / n


def train(watch, mended=False):
    torch.manual_seed(1)
    rng = random.Random(1)
    q = nn.Sequential(nn.Linear(18, 48), nn.ReLU(), nn.Linear(48, 2))
    target = nn.Sequential(nn.Linear(18, 48), nn.ReLU(), nn.Linear(48, 2))
    target.load_state_dict(q.state_dict())
    optimizer = torch.optim.Adam(q.parameters(), lr=2e-3)
    buffer = deque(maxlen=3000)
    env = Corridor(rng)
    monitor = watch(q, optimizer)
    s, updates, frame = env.reset(), 0, 0
    while updates < 700:
        eps = max(0.1, 1.0 - frame / 1200)
        if rng.random() < eps:
            a = rng.randrange(2)
        else:
            with torch.no_grad():
                a = int(q(torch.tensor([s])).argmax())
        s2, r, done = env.step(a)
        buffer.append((s, a, r, s2, float(done)))
        s = env.reset() if done else s2
        frame += 1
        if len(buffer) < 200 or frame % 2:
            continue
        S, A, R, S2, Dn = (torch.tensor(c) for c in zip(*rng.sample(buffer, 64)))
        with torch.no_grad():
            y = R + 0.95 * (1 - Dn) * target(S2).max(1).values
        if mended:
            pred = q(S).gather(1, A.unsqueeze(1)).squeeze(1)
        else:
            pred = q(S).max(1).values
        loss = nn.functional.smooth_l1_loss(pred, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.log_scalar("loss", loss.detach())
        updates += 1
        if updates % 50 == 0:
            target.load_state_dict(q.state_dict())
    return float(greedy_return(q, random.Random(99)))
