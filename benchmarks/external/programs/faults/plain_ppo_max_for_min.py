"""PPO on a small continuous control task: push a point mass to the origin, with GAE and clipped objective. The surrogate takes torch.max of the two terms and not torch.min, so updates are not held back by
the clip but favoured outside of it. The result is the mean episode return of the mean action."""
import torch
from torch import nn
from torch.distributions import Normal


class PointMass:
    def __init__(self, n):
        self.n = n

    def reset(self):
        self.x = torch.rand(self.n, 2) * 4 - 2
        self.v = torch.zeros(self.n, 2)
        return self.obs()

    def obs(self):
        return torch.cat([self.x, self.v], 1)

    def step(self, a):
        a = a.clamp(-1, 1)
        self.v = 0.9 * self.v + 0.15 * a
        self.x = self.x + self.v
        return self.obs(), -(self.x.pow(2).sum(1) * 0.1 + 0.01 * a.pow(2).sum(1))


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.log_std = nn.Parameter(torch.full((2,), -0.5))

    def dist(self, s):
        return Normal(self.actor(s), self.log_std.exp())


@torch.no_grad()
def collect(net, env, T):
    s = env.reset()
    S, A, R, V, LP = [], [], [], [], []
    for _ in range(T):
        d = net.dist(s)
        a = d.sample()
        S.append(s); A.append(a); V.append(net.critic(s).squeeze(1)); LP.append(d.log_prob(a).sum(1))
        s, r = env.step(a)
        R.append(r)
    adv, last, nxt = [], torch.zeros(env.n), net.critic(s).squeeze(1)
    for t in reversed(range(T)):
        delta = R[t] + 0.97 * nxt - V[t]
        last = delta + 0.97 * 0.95 * last
        adv.insert(0, last)
        nxt = V[t]
    adv = torch.stack(adv)
    return [z.flatten(0, 1) for z in (torch.stack(S), torch.stack(A), torch.stack(LP), adv, adv + torch.stack(V))]


def train(watch, mended=False):
    torch.manual_seed(0)
    net, env = ActorCritic(), PointMass(32)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    monitor = watch(net, optimizer)
    for it in range(25):
        S, A, LP, ADV, RET = collect(net, env, 30)
        ADV = (ADV - ADV.mean()) / (ADV.std() + 1e-8)
        for _ in range(5):
            for idx in torch.randperm(len(S)).split(240):
                d = net.dist(S[idx])
                ratio = (d.log_prob(A[idx]).sum(1) - LP[idx]).exp()
                plain, clipped = ratio * ADV[idx], ratio.clamp(0.8, 1.2) * ADV[idx]
                pick = torch.min if mended else torch.max
                loss = -pick(plain, clipped).mean() + 0.5 * (net.critic(S[idx]).squeeze(1) - RET[idx]).pow(2).mean() - 0.001 * d.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                monitor.log_scalar("loss", loss.detach())
    test, total = PointMass(200), 0.0
    s = test.reset()
    with torch.no_grad():
        for _ in range(30):
            s, r = test.step(net.actor(s))
            total += r.mean().item()
    return total
