"""An image-like classifier whose data lie sorted by class on disk, and the DataLoader is used with shuffle=False. The net sees one class for a long time and forgets the others.
The result is test accuracy."""
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Folder(Dataset):
    """As ImageFolder does it: all files of class 0, then all of class 1, ..."""
    def __init__(self, per_class, seed, n_class=8):
        proto = torch.randn(n_class, 3, 10, 10, generator=torch.Generator().manual_seed(123))
        g = torch.Generator().manual_seed(seed)
        self.samples = [(0.5 * proto[c] + torch.randn(3, 10, 10, generator=g), c) for c in range(n_class) for _ in range(per_class)]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        return self.samples[i]


def conv_block(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(4, o), nn.ReLU(), nn.MaxPool2d(2))


class SmallNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(conv_block(3, 16), conv_block(16, 32))
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(32 * 4, 64), nn.ReLU(), nn.Linear(64, 8))

    def forward(self, x):
        return self.classifier(self.features(x))


def train(watch, mended=False):
    torch.manual_seed(0)
    train_loader = DataLoader(Folder(250, 1), batch_size=32, shuffle=mended)
    test_loader = DataLoader(Folder(60, 2), batch_size=240)
    net = SmallNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    monitor = watch(net, optimizer)
    for epoch in range(6):
        running_loss = 0.0
        for i, data in enumerate(train_loader, 0):
            inputs, labels = data
            optimizer.zero_grad()
            outputs = net(inputs)
            loss = criterion(outputs, labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
        print(f"[{epoch + 1}] loss: {running_loss / (i + 1):.3f}")
    correct = total = 0
    with torch.no_grad():
        for inputs, labels in test_loader:
            correct += (net(inputs).argmax(1) == labels).sum().item()
            total += len(labels)
    return correct / total
