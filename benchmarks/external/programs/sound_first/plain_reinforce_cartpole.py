"""REINFORCE with a learned value baseline on a self-written vectorised cart pole.
Odd at first sight: the policy part of the loss hovers around zero with no trend and the total goes down and up again, while the agent gets better steadily.
Returns the mean episode length (of at most 200) of the greedy policy on fresh episodes."""
import math
import torch
from torch import nn
from torch.distributions import Categorical


class CartPoles:
    def __init__(self, n, seed):
        self.n, self.g = n, torch.Generator().manual_seed(seed)

    def reset(self):
        self.s = (torch.rand(self.n, 4, generator=self.g) - 0.5) * 0.1
        return self.s

    def step(self, a):
        x, v, th, w = self.s.unbind(1)
        f = torch.where(a == 1, 10.0, -10.0)
        c, s = th.cos(), th.sin()
        tmp = (f + 0.05 * w ** 2 * s) / 1.1
        tacc = (9.8 * s - c * tmp) / (0.5 * (4 / 3 - 0.1 * c ** 2 / 1.1))
        acc = tmp - 0.05 * tacc * c / 1.1
        self.s = torch.stack([x + 0.02 * v, v + 0.02 * acc, th + 0.02 * w, w + 0.02 * tacc], 1)
        done = (self.s[:, 0].abs() > 2.4) | (self.s[:, 2].abs() > 12 * 2 * math.pi / 360)
        return self.s, done


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.pi = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.v = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, s):
        return Categorical(logits=self.pi(s)), self.v(s).squeeze(-1)


def train(watch):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    env, net = CartPoles(12, 5), Policy()
    opt = torch.optim.Adam([{"params": net.pi.parameters(), "lr": 6e-3}, {"params": net.v.parameters(), "lr": 1e-2}])
    monitor = watch(net, opt)
    for it in range(75):
        s, alive = env.reset(), torch.ones(12, dtype=torch.bool)
        S, A, M = [], [], []
        for t in range(200):
            with torch.no_grad():
                a = net(s)[0].sample()
            S.append(s); A.append(a); M.append(alive)
            s, done = env.step(a)
            alive = alive & ~done
            if not alive.any():
                break
        S, A, M = torch.stack(S), torch.stack(A), torch.stack(M)
        R, run = torch.zeros(M.shape), torch.zeros(12)
        for t in reversed(range(len(M))):
            run = (1.0 + 0.98 * run) * M[t]
            R[t] = run
        dist, v = net(S[M])
        ret = R[M] / 10
        adv = ret - v.detach()
        adv = (adv - adv.mean()) / (adv.std() + 1e-6)
        pg = -(dist.log_prob(A[M]) * adv).mean()
        vl = (v - ret).square().mean()
        loss = pg + 0.5 * vl - 0.005 * dist.entropy().mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        opt.step()
        monitor.log_scalar("loss", loss.detach())
        monitor.log_scalar("mean_length", M.float().sum(0).mean())
        if it % 40 == 39:
            print(it, M.float().sum(0).mean().item())
    env, total = CartPoles(50, 77), torch.zeros(50)
    s, alive = env.reset(), torch.ones(50, dtype=torch.bool)
    for t in range(200):
        total += alive
        with torch.no_grad():
            s, d = env.step(net(s)[0].logits.argmax(-1))
        alive &= ~d
    return total.mean().item()
