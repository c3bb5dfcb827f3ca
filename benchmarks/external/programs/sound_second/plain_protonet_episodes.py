"""Prototypical networks: each step is a fresh 8-way 3-shot episode from sixty training classes; test episodes use twenty new classes.
Looks odd: the training loss jumps strongly from episode to episode because each has other classes and difficulty."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Universe:
    """sequence classes: each class is a motif placed at a random position in noise"""
    def __init__(self, classes=80, length=32):
        g = torch.Generator().manual_seed(11)
        m = torch.randn(classes, 2, 12, generator=g)
        self.motif = F.avg_pool1d(m, 3, 1, 1) * 2.2
        self.length = length

    def draw(self, ids):
        x = .95 * torch.randn(len(ids), 2, self.length)
        for i, (c, p) in enumerate(zip(ids.tolist(), torch.randint(0, self.length - 12, (len(ids),)).tolist())):
            x[i, :, p:p + 12] += self.motif[c]
        return x

    def episode(self, pool, way, shot, query):
        cls = pool[torch.randperm(len(pool))[:way]]
        s = self.draw(cls.repeat_interleave(shot)).view(way, shot, 2, -1)
        q = self.draw(cls.repeat_interleave(query))
        return s, q, torch.arange(way).repeat_interleave(query)


class Embed(nn.Module):
    def __init__(self, c=32, d=32):
        super().__init__()
        def b(i, o, k): return nn.Sequential(nn.Conv1d(i, o, k, padding=k // 2), nn.GroupNorm(4, o), nn.ReLU())
        self.net = nn.Sequential(b(2, c, 7), b(c, c, 5), nn.MaxPool1d(2), b(c, 2 * c, 5))
        self.out = nn.Linear(2 * c, d)

    def forward(self, x): return self.out(self.net(x).amax(-1))


def logits(net, s, q):
    way, shot = s.shape[:2]
    z = net(torch.cat([s.flatten(0, 1), q]))
    proto = z[:way * shot].view(way, shot, -1).mean(1)
    return -torch.cdist(z[way * shot:], proto) ** 2 / z.shape[1] ** .5


def train(watch):
    torch.manual_seed(2)
    world = Universe()
    net = Embed()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, 150, .5)
    monitor = watch(net, opt)
    for ep in range(450):
        s, q, y = world.episode(torch.arange(60), 8, 3, 4)
        loss = F.cross_entropy(logits(net, s, q), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        monitor.log_scalar("loss", loss.detach())
        if ep % 90 == 0: print(ep, loss.item())
    with torch.no_grad():
        acc = []
        for _ in range(40):
            s, q, y = world.episode(torch.arange(60, 80), 8, 3, 6)
            acc.append((logits(net, s, q).argmax(1) == y).float().mean().item())
    return sum(acc) / len(acc)
