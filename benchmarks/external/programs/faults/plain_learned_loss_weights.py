"""Multi-task net (class of a shape, its size, its angle) with learnable loss weights as bare parameters: total = w0*l0 + w1*l1 + w2*l2. Without the log-term of the uncertainty weighting the cheapest way
is to make the weights negative, and the tasks are then trained upwards. The result is the sum of the three test losses."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Ellipses(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        k = torch.randint(3, (n,), generator=g)
        size, ang = 2 + 4 * torch.rand(n, generator=g), torch.pi * (torch.rand(n, generator=g) - 0.5)
        ratio = torch.tensor([0.25, 0.5, 0.8])[k]
        yy, xx = torch.meshgrid(torch.arange(-7.5, 8), torch.arange(-7.5, 8), indexing="ij")
        c, s = ang.cos().view(-1, 1, 1), ang.sin().view(-1, 1, 1)
        u, v = c * xx + s * yy, -s * xx + c * yy
        d = (u / size.view(-1, 1, 1)) ** 2 + (v / (ratio * size).view(-1, 1, 1)) ** 2
        self.img = torch.sigmoid(4 * (1 - d)).unsqueeze(1) + 0.05 * torch.randn(n, 1, 16, 16, generator=g)
        self.k, self.size, self.ang = k, (size - 4) / 1.2, torch.stack([(2 * ang).cos(), (2 * ang).sin()], 1)

    def __len__(self):
        return len(self.k)

    def __getitem__(self, i):
        return self.img[i], self.k[i], self.size[i], self.ang[i]


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                                   nn.Linear(384, 64), nn.ReLU())
        self.cls, self.size, self.ang = nn.Linear(64, 3), nn.Linear(64, 1), nn.Linear(64, 2)
        self.weights = nn.Parameter(torch.ones(3))

    def forward(self, x):
        h = self.trunk(x)
        return self.cls(h), self.size(h).squeeze(1), self.ang(h)

    def losses(self, img, k, size, ang):
        a, b, c = self(img)
        return torch.stack([F.cross_entropy(a, k), F.mse_loss(b, size), F.mse_loss(c, ang)])


def train(watch, mended=False):
    torch.manual_seed(0)
    model = MultiTask()
    net = [p for n, p in model.named_parameters() if n != "weights"]
    optimizer = torch.optim.Adam([{"params": net}, {"params": [model.weights], "lr": 1e-2}], lr=2e-3)
    loader = DataLoader(Ellipses(2400, 1), batch_size=48, shuffle=True)
    monitor = watch(model, optimizer)
    for epoch in range(9):
        for batch in loader:
            losses = model.losses(*batch)
            total = (model.weights * losses).sum()
            if mended:
                total = total - torch.log(model.weights.clamp(min=1e-3)).sum()
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            monitor.log_scalar("total", total.detach())
    test = Ellipses(500, 2)
    with torch.no_grad():
        return float(model.losses(test.img, test.k, test.size, test.ang).sum())
