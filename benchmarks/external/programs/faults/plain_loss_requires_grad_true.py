"""Learning to count: the loss is built from the rounded predictions with torch.tensor(...), and when backward() complained, loss.requires_grad = True was added (as a forum answer says). Nothing raises any
more, and no parameter ever gets a gradient. The result is the mean absolute error of the counts."""
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Dots(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.count = torch.randint(0, 9, (n,), generator=g)
        self.img = 0.1 * torch.randn(n, 1, 16, 16, generator=g)
        for i, c in enumerate(self.count.tolist()):
            cells = torch.randperm(16, generator=g)[:c]
            for k in cells.tolist():
                r, q = 4 * (k // 4) + 1, 4 * (k % 4) + 1
                self.img[i, 0, r:r + 2, q:q + 2] += 1

    def __len__(self):
        return len(self.count)

    def __getitem__(self, i):
        return self.img[i], self.count[i].float()


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 24, 3, padding=1), nn.ReLU())
        self.fc = nn.Sequential(nn.Flatten(), nn.Linear(24 * 64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.fc(self.conv(x)).squeeze(1)


def count_error(pred, target, mended):
    if mended:
        return (pred - target).abs().mean()
    loss = torch.tensor([abs(round(p) - t) for p, t in zip(pred.tolist(), target.tolist())]).mean()
    loss.requires_grad = True
    return loss


def train(watch, mended=False):
    torch.manual_seed(0)
    model = Counter()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(Dots(1500, 1), batch_size=32, shuffle=True)
    monitor = watch(model, optimizer)
    for epoch in range(6):
        for x, y in loader:
            optimizer.zero_grad()
            loss = count_error(model(x), y, mended)
            loss.backward()
            optimizer.step()
            monitor.log_scalar("mae", loss.detach())
    test = Dots(400, 2)
    with torch.no_grad():
        return float((model(test.img) - test.count).abs().mean())
