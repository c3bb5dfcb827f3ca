"""A background thread prepares and augments batches into a bounded queue while the main thread trains a small CNN on the direction of moving dots.
Odd at first sight: threading and a queue around the loop, with a sentinel at the end; autograd is used in the main thread only.
Returns direction accuracy on fresh clips (four directions)."""
import queue
import threading
import torch
from torch import nn
import torch.nn.functional as F


def clips(n, g):
    y = torch.randint(0, 4, (n,), generator=g)
    d = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])[y]
    p = torch.randint(0, 10, (n, 3, 2), generator=g)
    x = torch.zeros(n, 3, 10, 10)
    for t in range(3):
        q = (p + t * d[:, None]) % 10
        for k in range(3):
            x[torch.arange(n), t, q[:, k, 0], q[:, k, 1]] = 1.0
    return x + 0.15 * torch.randn(x.shape, generator=g), y


class Producer(threading.Thread):
    def __init__(self, q, n):
        super().__init__(daemon=True)
        self.q, self.n = q, n

    def run(self):
        g = torch.Generator().manual_seed(3)
        for _ in range(self.n):
            x, y = clips(64, g)
            keep = (torch.rand(64, 1, 10, 10, generator=g) > 0.03).float()
            self.q.put((x * keep, y))
        self.q.put(None)


def train(watch):
    torch.manual_seed(24)
    torch.set_num_threads(1)
    net = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1, padding_mode="circular"), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(),
                        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 4))
    opt = torch.optim.Adam(net.parameters(), lr=4e-3)
    watch(net, opt)
    q = queue.Queue(maxsize=4)
    producer = Producer(q, 400)
    producer.start()
    while (item := q.get()) is not None:
        x, y = item
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
    producer.join()
    x, y = clips(1500, torch.Generator().manual_seed(99))
    with torch.no_grad():
        return (net(x).argmax(1) == y).float().mean().item()
