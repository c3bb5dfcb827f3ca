"""A plain convolutional classifier of random glyphs with crop and noise augmentation, SGD with momentum and a cosine schedule.
Ordinary in every respect; no loss is logged."""
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Glyphs(Dataset):
    """ten fixed random 10x10 glyphs, placed in 16x16 pictures and partly erased"""
    def __init__(self, n, seed, train):
        g = torch.Generator().manual_seed(seed)
        font = (nn.functional.avg_pool2d(torch.randn(10, 1, 10, 10, generator=torch.Generator().manual_seed(0)), 3, 1, 1) > .08).float()
        self.y = torch.randint(0, 10, (n,), generator=g)
        self.x = torch.zeros(n, 1, 16, 16)
        for i, k in enumerate(self.y):
            r, c = torch.randint(1, 6, (2,), generator=g).tolist()
            self.x[i, :, r:r + 10, c:c + 10] = font[k] * (torch.rand(10, 10, generator=g) > .25)
        self.x = (self.x + .45 * torch.randn(self.x.shape, generator=g) - .2) / .6
        self.train = train

    def __len__(self): return len(self.y)

    def __getitem__(self, i):
        x = self.x[i]
        if self.train:
            x = nn.functional.pad(x, (1, 1, 1, 1))
            r, c = torch.randint(0, 3, (2,)).tolist()
            x = x[:, r:r + 16, c:c + 16] + .1 * torch.randn(1, 16, 16)
        return x, self.y[i]


class LeNetish(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
                                      nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2))
        self.classifier = nn.Sequential(nn.Flatten(), nn.Dropout(.3), nn.Linear(24 * 16, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x): return self.classifier(self.features(x))


def evaluate(model, loader):
    model.eval()
    with torch.no_grad(): n = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    return n / len(loader.dataset)


def train(watch):
    torch.manual_seed(0)
    train_loader = DataLoader(Glyphs(2400, 1, True), batch_size=48, shuffle=True)
    test_loader = DataLoader(Glyphs(800, 2, False), batch_size=400)
    model = LeNetish()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=.03, momentum=.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    watch(model, optimizer)
    for epoch in range(8):
        model.train()
        running = 0.0
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            running += loss.item()
        scheduler.step()
        print(f"[{epoch + 1}] loss {running / len(train_loader):.3f} acc {evaluate(model, test_loader):.3f}")
    return evaluate(model, test_loader)
