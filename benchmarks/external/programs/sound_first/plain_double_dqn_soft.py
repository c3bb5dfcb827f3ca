"""Dueling double DQN with a slowly following target network (Polyak 0.01) on a small grid with a pit and one-hot states, off-line data of a random policy.
Ordinary apart from the moving targets; the loss ends at almost exactly zero since this little world is deterministic.
Returns the share of start cells from which the greedy policy reaches the goal."""
import copy
import torch
from torch import nn

N = 5  # 5x5 cells, goal in the corner, a pit in the middle


def step(pos, a):
    d = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])
    new = (pos + d[a]).clamp(0, N - 1)
    goal = (new == N - 1).all(1)
    pit = (new == 2).all(1)
    return new, goal.float() - pit.float() - 0.01, goal | pit, goal


def onehot(pos):
    return nn.functional.one_hot(pos[:, 0] * N + pos[:, 1], N * N).float()


class Dueling(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(N * N, 64), nn.ReLU())
        self.v, self.a = nn.Linear(64, 1), nn.Linear(64, 4)

    def forward(self, x):
        h = self.f(x)
        a = self.a(h)
        return self.v(h) + a - a.mean(1, keepdim=True)


def train(watch):
    torch.manual_seed(21)
    torch.set_num_threads(1)
    pos = torch.randint(0, N, (6000, 2))
    act = torch.randint(0, 4, (6000,))
    nxt, rew, done, _ = step(pos, act)
    net = Dueling()
    slow = copy.deepcopy(net)
    for p in slow.parameters():
        p.requires_grad = False
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=1e-4)
    m = watch(net, opt)
    S, S2 = onehot(pos), onehot(nxt)
    for it in range(800):
        i = torch.randint(0, 6000, (256,))
        with torch.no_grad():
            best = net(S2[i]).argmax(1, keepdim=True)
            y = rew[i] + 0.9 * (~done[i]) * slow(S2[i]).gather(1, best).squeeze(1)
        loss = (net(S[i]).gather(1, act[i, None]).squeeze(1) - y).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for a, b in zip(slow.parameters(), net.parameters()):
                a.mul_(0.99).add_(b, alpha=0.01)
        m.log_scalar("loss", loss.detach())
    cells = torch.tensor([[i, j] for i in range(N) for j in range(N) if (i, j) not in ((2, 2), (N - 1, N - 1))])
    reached, live = torch.zeros(len(cells), dtype=torch.bool), torch.ones(len(cells), dtype=torch.bool)
    p = cells
    for _ in range(12):
        with torch.no_grad():
            a = net(onehot(p)).argmax(1)
        p, _, d, g = step(p, a)
        reached |= g & live
        live &= ~d
    return reached.float().mean().item()
