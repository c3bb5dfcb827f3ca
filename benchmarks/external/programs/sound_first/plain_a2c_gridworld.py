"""Advantage actor-critic with a shared trunk, n-step returns and an entropy bonus on a 6x6 grid with random goals.
Odd at first sight: the total loss is often negative and its sign means nothing; the entropy falls.
Returns the success rate of the greedy policy within 14 moves from unseen start/goal draws."""
import torch
from torch import nn
import torch.nn.functional as F

MOVES = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])


class Grid:
    def __init__(self, n, size=6):
        self.n, self.size = n, size
        self.pos = torch.randint(0, size, (n, 2))
        self.goal = torch.randint(0, size, (n, 2))
        self.age = torch.zeros(n, dtype=torch.long)

    def obs(self):
        a = F.one_hot(self.pos, self.size).flatten(1)
        b = F.one_hot(self.goal, self.size).flatten(1)
        return torch.cat([a, b], 1).float()

    def step(self, a):
        self.pos = (self.pos + MOVES[a]).clamp(0, self.size - 1)
        self.age += 1
        hit = (self.pos == self.goal).all(1)
        reward = hit.float() - 0.02
        done = hit | (self.age >= 25)
        m = int(done.sum())
        if m:
            self.pos[done] = torch.randint(0, self.size, (m, 2))
            self.goal[done] = torch.randint(0, self.size, (m, 2))
            self.age[done] = 0
        return reward, done, hit


class ActorCritic(nn.Module):
    def __init__(self, obs=24, h=96):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(obs, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU())
        self.actor = nn.Linear(h, 4)
        self.critic = nn.Linear(h, 1)

    def forward(self, o):
        h = self.trunk(o)
        return F.log_softmax(self.actor(h), -1), self.critic(h).squeeze(-1)


def train(watch):
    torch.manual_seed(4)
    torch.set_num_threads(1)
    env, net = Grid(64), ActorCritic()
    opt = torch.optim.RMSprop(net.parameters(), lr=2e-3, eps=1e-5, alpha=0.99)
    monitor = watch(net, opt)
    gamma, horizon = 0.95, 8
    for update in range(700):
        logps, vals, ents, rews, dones = [], [], [], [], []
        for _ in range(horizon):
            logp, v = net(env.obs())
            a = torch.multinomial(logp.detach().exp(), 1).squeeze(1)
            r, d, _ = env.step(a)
            logps.append(logp.gather(1, a[:, None]).squeeze(1))
            ents.append(-(logp.exp() * logp).sum(1))
            vals.append(v); rews.append(r); dones.append(d.float())
        with torch.no_grad():
            ret = net(env.obs())[1]
        returns = []
        for r, d in zip(reversed(rews), reversed(dones)):
            ret = r + gamma * ret * (1 - d)
            returns.append(ret)
        returns = torch.stack(returns[::-1])
        vals = torch.stack(vals)
        adv = (returns - vals).detach()
        loss = -(torch.stack(logps) * adv).mean() + 0.5 * F.mse_loss(vals, returns) - 0.01 * torch.stack(ents).mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        opt.step()
        monitor.log_scalar("loss", loss.detach())
    # evaluation
    torch.manual_seed(1234)
    env = Grid(500)
    ok = torch.zeros(500, dtype=torch.bool)
    first = torch.ones(500, dtype=torch.bool)
    for _ in range(14):
        with torch.no_grad():
            a = net(env.obs())[0].argmax(1)
        _, d, hit = env.step(a)
        ok |= hit & first
        first &= ~d
    return ok.float().mean().item()
