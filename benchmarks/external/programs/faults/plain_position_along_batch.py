"""The PositionalEncoding class of the old PyTorch tutorial, which expects (time, batch, dim), in a model with batch_first=True: x + pe[:x.size(0)] adds the number of the sample in the batch, and the encoder has
no idea of order. The task is to say which of two marks comes first. Returns the accuracy."""
import math
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, mended, max_len=500):
        super().__init__()
        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(max_len, 1, d_model)
        pe[:, 0, 0::2] = torch.sin(position * div_term)
        pe[:, 0, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe)
        self.mended = mended

    def forward(self, x):
        if self.mended:
            return x + self.pe[:x.size(1)].transpose(0, 1)
        return x + self.pe[:x.size(0)]


class OrderModel(nn.Module):
    def __init__(self, mended, d=32):
        super().__init__()
        self.d = d
        self.emb = nn.Embedding(20, d)
        self.pos = PositionalEncoding(d, mended)
        layer = nn.TransformerEncoderLayer(d, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(d, 2)

    def forward(self, ids):
        return self.out(self.enc(self.pos(self.emb(ids))).mean(1))


def marks(n, seed):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 20, (n, 10), generator=g)
    where = torch.argsort(torch.rand(n, 10, generator=g), 1)[:, :2]
    ids.scatter_(1, where[:, :1], 0)
    ids.scatter_(1, where[:, 1:], 1)
    return TensorDataset(ids, (where[:, 0] < where[:, 1]).long())


def train(watch, mended=False):
    torch.manual_seed(0)
    model = OrderModel(mended)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(marks(3200, 1), batch_size=32, shuffle=True)
    monitor = watch(model, optimizer)
    for epoch in range(4):
        model.train()
        for ids, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(ids), y)
            loss.backward()
            optimizer.step()
            monitor.log_scalar("loss", loss.detach())
    ids, y = marks(400, 2).tensors
    with torch.no_grad():
        return float((model(ids).argmax(1) == y).float().mean())
