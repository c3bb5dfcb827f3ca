"""A small convnet tells circles, squares and crosses apart in noisy 20x20 pictures. optimizer.zero_grad() stands
between backward() and step(), so each step sees gradients that are empty or zero and nothing is learned."""
import math
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def draw(n, gen):
    yy, xx = torch.meshgrid(torch.arange(20.), torch.arange(20.), indexing="ij")
    imgs, labels = [], []
    for _ in range(n):
        k = int(torch.randint(3, (1,), generator=gen))
        cx, cy = (torch.rand(2, generator=gen) * 8 + 6).tolist()
        r = 3 + 2 * torch.rand(1, generator=gen).item()
        dx, dy = xx - cx, yy - cy
        if k == 0:
            im = (torch.sqrt(dx ** 2 + dy ** 2) - r).abs() < 0.8
        elif k == 1:
            im = (torch.maximum(dx.abs(), dy.abs()) - r).abs() < 0.8
        else:
            im = ((dx - dy).abs() < 1.0) & (dx.abs() < r) | ((dx + dy).abs() < 1.0) & (dx.abs() < r)
        imgs.append(im.float() + 0.3 * torch.randn(20, 20, generator=gen))
        labels.append(k)
    return torch.stack(imgs).unsqueeze(1), torch.tensor(labels)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 12, 3, padding=1), nn.Conv2d(12, 24, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(24 * 25, 48), nn.Linear(48, 3)

    def forward(self, x):
        x = torch.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = torch.max_pool2d(torch.relu(self.conv2(x)), 2)
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


def train(watch, mended=False):
    torch.manual_seed(1)
    gen = torch.Generator().manual_seed(11)
    x, y = draw(1600, gen)
    xt, yt = draw(400, gen)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = watch(model, optimizer)
    for epoch in range(6):
        model.train()
        for xb, yb in loader:
            if mended:
                optimizer.zero_grad()
            loss = criterion(model(xb), yb)
            loss.backward()
            if not mended:
                optimizer.zero_grad()
            optimizer.step()
            monitor.log_scalar("loss", loss.detach())
    model.eval()
    with torch.no_grad():
        return float((model(xt).argmax(1) == yt).float().mean())
