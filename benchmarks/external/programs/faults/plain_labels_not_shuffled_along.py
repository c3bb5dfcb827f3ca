"""A wine-like tabular classifier in notebook style: the features are shuffled with a permutation each epoch, the labels are not, so inputs and labels do not
belong together. The result is test accuracy (chance is one in three)."""
import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim


def load_wine_like(seed=0):
    rng = np.random.RandomState(seed)
    centers = rng.randn(3, 13) * 1.1
    y = rng.randint(0, 3, 1800)
    X = centers[y] + rng.randn(1800, 13) * 1.5
    X = X * rng.uniform(0.1, 50, 13) + rng.uniform(-5, 300, 13)
    return X.astype(np.float32), y


def train(watch, mended=False):
    torch.manual_seed(0)
    np.random.seed(0)
    X, y = load_wine_like()
    X_train, X_test, y_train, y_test = X[:1400], X[1400:], y[:1400], y[1400:]
    mean, std = X_train.mean(0), X_train.std(0)
    X_train, X_test = (X_train - mean) / std, (X_test - mean) / std
    X_train, y_train = torch.tensor(X_train), torch.tensor(y_train).long()
    X_test, y_test = torch.tensor(X_test), torch.tensor(y_test).long()

    class Net(nn.Module):
        def __init__(self):
            super(Net, self).__init__()
            self.fc1 = nn.Linear(13, 64)
            self.fc2 = nn.Linear(64, 64)
            self.fc3 = nn.Linear(64, 3)
            self.drop = nn.Dropout(0.2)

        def forward(self, x):
            x = self.drop(torch.relu(self.fc1(x)))
            x = self.drop(torch.relu(self.fc2(x)))
            return self.fc3(x)

    net = Net()
    optimizer = optim.Adam(net.parameters(), lr=0.001)
    criterion = nn.CrossEntropyLoss()
    monitor = watch(net, optimizer)
    batch_size, history = 32, []
    for epoch in range(12):
        net.train()
        perm = torch.randperm(len(X_train))
        X_train = X_train[perm]
        if mended:
            y_train = y_train[perm]
        for i in range(0, len(X_train), batch_size):
            xb, yb = X_train[i:i + batch_size], y_train[i:i + batch_size]
            optimizer.zero_grad()
            loss = criterion(net(xb), yb)
            loss.backward()
            optimizer.step()
            history.append(loss.item())
    net.eval()
    with torch.no_grad():
        acc = (net(X_test).argmax(1) == y_test).float().mean().item()
    print("final accuracy", acc)
    return acc
