"""An LSTM that says whether a sequence of symbols is accepted by a small automaton. The data are (batch, time, features) but nn.LSTM was made without batch_first=True, so it runs along the batch and mixes
strangers. Returns the test accuracy."""
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Automaton(Dataset):
    """Accept if the last 'open' symbol was not followed by a 'close' symbol."""
    def __init__(self, n, seed, T=16):
        g = torch.Generator().manual_seed(seed)
        self.s = torch.randint(5, (n, T), generator=g)
        state = torch.zeros(n, dtype=torch.long)
        for t in range(T):
            state = torch.where(self.s[:, t] == 0, 1, torch.where(self.s[:, t] == 1, 0, state))
        self.y = state

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return nn.functional.one_hot(self.s[i], 5).float(), self.y[i]


class LSTMClassifier(nn.Module):
    def __init__(self, n_in, hidden, n_out, batch_first):
        super().__init__()
        self.lstm = nn.LSTM(n_in, hidden, num_layers=1, batch_first=batch_first)
        self.fc = nn.Linear(hidden, n_out)

    def forward(self, x):
        out, (h, c) = self.lstm(x)
        return self.fc(out[:, -1, :])


def train(watch, mended=False):
    torch.manual_seed(0)
    train_loader = DataLoader(Automaton(3000, 1), batch_size=50, shuffle=True, drop_last=True)
    test_loader = DataLoader(Automaton(1000, 2), batch_size=50)
    model = LSTMClassifier(5, 32, 2, batch_first=mended)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor = watch(model, optimizer)
    for epoch in range(8):
        model.train()
        for x, y in train_loader:
            outputs = model(x)
            loss = criterion(outputs, y)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            monitor.log_scalar("loss", loss.detach())
    model.eval()
    with torch.no_grad():
        return sum((model(x).argmax(1) == y).sum().item() for x, y in test_loader) / 1000
