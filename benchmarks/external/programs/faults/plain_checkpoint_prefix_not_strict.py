"""Few-shot classification on a frozen encoder from a checkpoint that was saved from DataParallel ('module.' before each key). load_state_dict(strict=False) silences the mismatch and loads nothing, so the encoder
is random; a head is trained on it. Returns the test accuracy."""
import io
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(80, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 8))

    def forward(self, x):
        return self.layers(x)


class World:
    def __init__(self, seed=0):
        self.g = torch.Generator().manual_seed(seed)
        self.lift = torch.randn(5, 80, generator=self.g)
        self.rule = torch.randn(5, 6, generator=self.g)

    def sample(self, n):
        z = torch.randn(n, 5, generator=self.g)
        return torch.sin(z @ self.lift) + 0.4 * torch.randn(n, 80, generator=self.g), z, (z @ self.rule).argmax(1)


def pretrain(world):
    model = nn.DataParallel(Encoder()) if torch.cuda.is_available() else nn.Module()
    model.module = Encoder()
    out = nn.Linear(8, 5)
    opt = torch.optim.Adam([*model.module.parameters(), *out.parameters()], lr=1e-3)
    for _ in range(1200):
        x, z, _ = world.sample(128)
        opt.zero_grad()
        nn.functional.mse_loss(out(model.module(x)), z).backward()
        opt.step()
    file = io.BytesIO()
    torch.save({"state_dict": model.state_dict(), "epoch": 30}, file)
    file.seek(0)
    return file


def train(watch, mended=False):
    torch.manual_seed(0)
    world = World()
    checkpoint = torch.load(pretrain(world), weights_only=True)
    state = checkpoint["state_dict"]
    if mended:
        state = {k.removeprefix("module."): v for k, v in state.items()}
    encoder = Encoder()
    encoder.load_state_dict(state, strict=False)
    for p in encoder.parameters():
        p.requires_grad = False
    model = nn.Sequential(encoder, nn.Linear(8, 6))
    optimizer = torch.optim.Adam(filter(lambda p: p.requires_grad, model.parameters()), lr=2e-2)
    x, _, y = world.sample(400)
    monitor = watch(model, optimizer)
    for epoch in range(25):
        for xb, yb in DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            monitor.log_scalar("loss", loss.detach())
    xt, _, yt = world.sample(2000)
    with torch.no_grad():
        return float((model(xt).argmax(1) == yt).float().mean())
