"""Detection of two rare faults in machine vibration windows, with class weights in the loss. The weights are the class frequencies and not their inverse,
so the rare classes are ignored even more. The result is the balanced accuracy."""
from collections import Counter
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Vibration(Dataset):
    def __init__(self, n, seed, probs=(0.92, 0.05, 0.03)):
        rng = np.random.default_rng(seed)
        self.labels = rng.choice(3, n, p=probs)
        t = np.arange(64)
        self.x = np.zeros((n, 1, 64), dtype=np.float32)
        for i, k in enumerate(self.labels):
            w = np.sin(0.3 * t + rng.uniform(0, 6)) + 0.7 * rng.normal(size=64)
            if k == 1:
                w += 0.6 * np.sin(1.5 * t + rng.uniform(0, 6))
            if k == 2:
                w[rng.integers(0, 60):][:4] += 2.4
            self.x[i, 0] = w

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return torch.from_numpy(self.x[i]), int(self.labels[i])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv1d(1, 16, 9, padding=4), nn.Conv1d(16, 32, 5, padding=2)
        self.bn1, self.bn2 = nn.BatchNorm1d(16), nn.BatchNorm1d(32)
        self.fc = nn.Linear(64, 3)

    def forward(self, x):
        x = torch.max_pool1d(torch.relu(self.bn1(self.c1(x))), 2)
        x = torch.relu(self.bn2(self.c2(x)))
        return self.fc(torch.cat([x.mean(-1), x.amax(-1)], 1))


def train(watch, mended=False):
    torch.manual_seed(3)
    data, test = Vibration(4000, 1), Vibration(900, 2, (1 / 3, 1 / 3, 1 / 3))
    counts = Counter(data.labels.tolist())
    if mended:
        weights = torch.tensor([len(data) / (3 * counts[k]) for k in range(3)])
    else:
        weights = torch.tensor([3 * counts[k] / len(data) for k in range(3)])
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    criterion = nn.CrossEntropyLoss(weight=weights.float())
    monitor = watch(model, optimizer)
    for epoch in range(5):
        model.train()
        for x, y in DataLoader(data, batch_size=64, shuffle=True):
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            monitor.log_scalar("loss", loss.detach())
    model.eval()
    with torch.no_grad():
        pred = model(torch.from_numpy(test.x)).argmax(1).numpy()
    return float(np.mean([(pred[test.labels == k] == k).mean() for k in range(3)]))
