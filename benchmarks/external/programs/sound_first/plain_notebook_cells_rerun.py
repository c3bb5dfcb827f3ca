"""A notebook turned into a script: the training cell is run three times on the same model (as one does when it "still improves"), each time with a new optimizer and a new watch call.
Odd at first sight: Adam's state is lost at each re-run, and the loss makes a small bump there. Returns R^2 on held-out rows."""
import torch
from torch import nn

# %% cell 1: data
torch.manual_seed(0)


def concrete(n, seed):
    g = torch.Generator().manual_seed(seed)
    cement, water, age, ash = (torch.rand(n, generator=g) for _ in range(4))
    strength = 60 * cement / (0.4 + water) * torch.log1p(20 * age) / 3 + 8 * ash * age + 2 * torch.randn(n, generator=g)
    return torch.stack([cement, water, age, ash], 1), strength[:, None]


def train(watch):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    X, Y = concrete(2000, 0)
    Xte, Yte = concrete(1000, 1)
    mu, sd, my, sy = X.mean(0), X.std(0), Y.mean(), Y.std()

    # %% cell 2: model
    model = nn.Sequential(nn.Linear(4, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1))
    history = []

    # %% cell 3: training  (run again and again)
    def cell_3(epochs, lr):
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        monitor = watch(model, optimizer)
        for epoch in range(epochs):
            for idx in torch.randperm(len(X)).split(100):
                pred = model((X[idx] - mu) / sd)
                loss = nn.functional.mse_loss(pred, (Y[idx] - my) / sy)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                monitor.log_scalar("loss", loss.detach())
            history.append(loss.item())

    cell_3(10, 3e-3)
    cell_3(10, 3e-3)
    cell_3(12, 5e-4)

    # %% cell 4: test
    with torch.no_grad():
        p = model((Xte - mu) / sd) * sy + my
    return (1 - (p - Yte).square().sum() / (Yte - Yte.mean()).square().sum()).item()
