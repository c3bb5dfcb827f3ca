"""REINFORCE on a small grid: walk to the goal, reward 1 minus a cost for each step, eight grids in parallel. The log-probability is computed for a second dist.sample()
and not for the action that was taken, so the policy gradient is only noise. Returns the mean return of new episodes."""
import torch
from torch import nn
from torch.distributions import Categorical

MOVES = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])


class Grids:
    def __init__(self, n, size=6):
        self.n, self.size = n, size

    def reset(self):
        self.pos = torch.randint(self.size, (self.n, 2))
        self.goal = torch.randint(self.size, (self.n, 2))
        self.done = torch.zeros(self.n, dtype=torch.bool)
        return self.obs()

    def obs(self):
        return torch.cat([self.pos, self.goal], 1).float() / self.size * 2 - 1

    def step(self, a):
        new = (self.pos + MOVES[a]).clamp(0, self.size - 1)
        self.pos = torch.where(self.done.unsqueeze(1), self.pos, new)
        hit = (self.pos == self.goal).all(1)
        r = torch.where(self.done, torch.zeros(self.n), torch.where(hit, torch.ones(self.n), torch.full((self.n,), -0.05)))
        alive = ~self.done
        self.done = self.done | hit
        return self.obs(), r, alive


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))

    def forward(self, s):
        return Categorical(logits=self.net(s))


def rollout(policy, env, mended, horizon=16):
    s = env.reset()
    logps, rewards, alives = [], [], []
    for _ in range(horizon):
        dist = policy(s)
        action = dist.sample()
        logps.append(dist.log_prob(action if mended else dist.sample()))
        s, r, alive = env.step(action)
        rewards.append(r)
        alives.append(alive.float())
    ret, out = torch.zeros(env.n), []
    for r in reversed(rewards):
        ret = r + 0.97 * ret
        out.insert(0, ret)
    return torch.stack(logps), torch.stack(out), torch.stack(alives), torch.stack(rewards).sum(0)


def train(watch, mended=False):
    torch.manual_seed(8)
    env, policy = Grids(48), Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    monitor = watch(policy, optimizer)
    for update in range(300):
        logp, ret, alive, total = rollout(policy, env, mended)
        adv = ret - (ret * alive).sum() / alive.sum()
        loss = -(logp * adv * alive).sum() / alive.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.log_scalar("loss", loss.detach())
        monitor.log_scalar("return", total.mean())
    test = Grids(600)
    with torch.no_grad():
        return float(rollout(policy, test, True)[3].mean())
