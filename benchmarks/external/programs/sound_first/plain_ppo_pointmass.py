"""PPO with a Gaussian policy (learned log-std) on a 2-D point mass that should stop at the origin; sixteen minibatch steps on each rollout.
Odd at first sight: the clipped surrogate is exactly minus the mean advantage (about 0) at the first step of each rollout, and after the value net has settled the loss stays around zero.
Returns the mean return of the deterministic policy on fresh starts (closer to 0 is better; the untrained policy: about -61)."""
from dataclasses import dataclass
import torch
from torch import nn
from torch.distributions import Normal


@dataclass
class PPO:
    envs: int = 32
    horizon: int = 40
    iters: int = 40
    epochs: int = 4
    minibatches: int = 4
    gamma: float = 0.97
    lam: float = 0.95
    clip: float = 0.2
    lr: float = 2e-3


def reset(n):
    return torch.cat([torch.rand(n, 2) * 4 - 2, torch.zeros(n, 2)], 1)


def dynamics(s, a):
    a = a.clamp(-1, 1)
    v = 0.9 * s[:, 2:] + 0.3 * a
    p = (s[:, :2] + 0.3 * v).clamp(-4, 4)
    s2 = torch.cat([p, v], 1)
    return s2, -(p.norm(dim=1) + 0.1 * a.square().sum(1))


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        def body(o, gain):
            m = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, o))
            for i in (0, 2):
                nn.init.orthogonal_(m[i].weight, 2 ** 0.5); nn.init.zeros_(m[i].bias)
            nn.init.orthogonal_(m[4].weight, gain); nn.init.zeros_(m[4].bias)
            return m
        self.mu, self.value = body(2, 0.01), body(1, 1.0)
        self.log_std = nn.Parameter(torch.full((2,), -0.5))

    def dist(self, s):
        return Normal(self.mu(s), self.log_std.exp())


def evaluate(agent, seed=99):
    g = torch.random.get_rng_state()
    torch.manual_seed(seed)
    s, total = reset(200), 0
    with torch.no_grad():
        for _ in range(40):
            s, r = dynamics(s, agent.mu(s))
            total = total + r
    torch.random.set_rng_state(g)
    return total.mean().item()


def train(watch):
    cfg = PPO()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    agent = Agent()
    opt = torch.optim.Adam(agent.parameters(), lr=cfg.lr, eps=1e-5)
    total_steps = cfg.iters * cfg.epochs * cfg.minibatches
    sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.05, total_steps)
    monitor = watch(agent, opt)
    print("before", evaluate(agent))
    for it in range(cfg.iters):
        s = reset(cfg.envs)
        S, A, L, R, V = [], [], [], [], []
        with torch.no_grad():
            for t in range(cfg.horizon):
                d = agent.dist(s)
                a = d.sample()
                S.append(s); A.append(a); L.append(d.log_prob(a).sum(1)); V.append(agent.value(s).squeeze(1))
                s, r = dynamics(s, a)
                R.append(r * 0.1)
            V.append(agent.value(s).squeeze(1))
            adv, gae = [], torch.zeros(cfg.envs)
            for t in reversed(range(cfg.horizon)):
                delta = R[t] + cfg.gamma * V[t + 1] - V[t]
                gae = delta + cfg.gamma * cfg.lam * gae
                adv.insert(0, gae)
        adv = torch.cat(adv); S, A, L = torch.cat(S), torch.cat(A), torch.cat(L)
        ret = adv + torch.cat(V[:-1])
        for _ in range(cfg.epochs):
            for idx in torch.randperm(len(S)).chunk(cfg.minibatches):
                d = agent.dist(S[idx])
                ratio = (d.log_prob(A[idx]).sum(1) - L[idx]).exp()
                ad = (adv[idx] - adv[idx].mean()) / (adv[idx].std() + 1e-8)
                pg = -torch.min(ratio * ad, ratio.clamp(1 - cfg.clip, 1 + cfg.clip) * ad).mean()
                vl = 0.5 * (agent.value(S[idx]).squeeze(1) - ret[idx]).square().mean()
                loss = pg + 0.5 * vl - 0.001 * d.entropy().sum(1).mean()
                opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                opt.step()
                sched.step()
                monitor.log_scalar("loss", loss.detach())
    return evaluate(agent)
