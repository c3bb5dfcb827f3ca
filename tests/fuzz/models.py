"""Small models of many kinds, with extras that any of them can have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .program import Program

Batch = tuple[Tensor, ...]
DTYPES = {"float64": torch.float64, "bfloat16": torch.bfloat16}


class Checkpointed(nn.Module):
    """Blocks one after the other, recomputed in the backward pass if the program says so."""

    def __init__(self, recompute: str, *blocks: nn.Module) -> None:
        super().__init__()
        self.recompute, self.blocks = recompute, nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant") if self.recompute else block(x)
        return x


class Residual(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Attending(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        return x + self.out(attended.transpose(1, 2).flatten(-2))


class Language(nn.Module):
    """A GPT whose head is tied to its embedding."""

    def __init__(self, p: Program) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = Checkpointed(p.checkpoint, Attending(8, 2, p.dropout), Residual(8, p.dropout))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))


class Called(nn.Module):
    """One module that is called several times, and one that stands in two places."""

    def __init__(self, p: Program) -> None:
        super().__init__()
        self.enter, self.again, self.act = nn.Linear(5, 6), nn.Linear(6, 6), nn.Tanh()
        self.same, self.dropout, self.leave = self.again, nn.Dropout(p.dropout), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for _ in range(3):
            x = self.act(self.again(x))
        return self.leave(self.dropout(self.act(self.same(x))))


class Recurrent(nn.Module):
    """Outputs in containers."""

    def __init__(self, p: Program) -> None:
        super().__init__()
        self.lstm, self.leave = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden, (last, _) = self.lstm(x)
        return {"each": self.leave(hidden), "last": last}


class Sparse(nn.Module):
    def __init__(self, p: Program) -> None:
        super().__init__()
        self.embed, self.leave = nn.Embedding(20, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.leave(self.embed(tokens))


class Odd(nn.Module):
    """Parameters with odd strides, used without modules of their own."""

    def __init__(self, p: Program) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(5, 7).t())
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.gaps = nn.Parameter(torch.randn(6, 8)[:, ::2])

    def forward(self, image: Tensor) -> Tensor:
        features = self.conv(image.contiguous(memory_format=torch.channels_last)).mean(dim=(2, 3))
        return features @ self.gaps[:4] @ self.transposed[:4]


class Complex(nn.Module):
    def __init__(self, p: Program) -> None:
        super().__init__()
        wide = torch.complex128 if p.dtype == "float64" else torch.complex64
        self.spectrum, self.leave = nn.Parameter(torch.randn(4, 5, dtype=wide)), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave((x.to(self.spectrum.dtype) @ self.spectrum).abs())


class Gan(nn.Module):
    """Two players, called one by one and never as a whole."""

    def __init__(self, p: Program) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4))
        self.critic = nn.Sequential(nn.Linear(4, 6), nn.LeakyReLU(), nn.Dropout(p.dropout), nn.Linear(6, 1))


def _mlp(p: Program) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(p.dropout), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def _conv(p: Program) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(p.dropout), nn.Linear(36, 3)
    )


def _encoder(p: Program) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 12, dropout=p.dropout, batch_first=True)


def _residual(p: Program) -> nn.Module:
    blocks = Checkpointed(p.checkpoint, Residual(6, p.dropout), Residual(6, p.dropout))
    return nn.Sequential(nn.Linear(5, 6), blocks, nn.Linear(6, 2))


def _normal(*shape: int) -> Callable[[torch.Generator], Batch]:
    return lambda generator: (torch.randn(*shape, generator=generator, dtype=torch.float64),)


def _tokens(vocabulary: int, *shape: int) -> Callable[[torch.Generator], Batch]:
    return lambda generator: (torch.randint(vocabulary, shape, generator=generator),)


@dataclass(frozen=True)
class Architecture:
    make: Callable[[Program], nn.Module]
    batch: Callable[[torch.Generator], Batch]


ARCHITECTURES = {
    "mlp": Architecture(_mlp, _normal(5, 6)),
    "conv": Architecture(_conv, _normal(3, 2, 5, 5)),
    "language": Architecture(Language, _tokens(11, 2, 5)),
    "encoder": Architecture(_encoder, _normal(2, 4, 8)),
    "sparse": Architecture(Sparse, _tokens(20, 3, 4)),
    "recurrent": Architecture(Recurrent, _normal(2, 3, 4)),
    "residual": Architecture(_residual, _normal(4, 5)),
    "called": Architecture(Called, _normal(4, 5)),
    "odd": Architecture(Odd, _normal(2, 2, 4, 4)),
    "complex": Architecture(Complex, _normal(3, 4)),
    "gan": Architecture(Gan, _normal(4, 4)),
    "single": Architecture(lambda p: nn.Linear(4, 2, bias=False), _normal(3, 4)),  # one parameter; not drawn
}
#: What any model can have besides: a parameter of no elements, a scalar, a layer that is never used, one that is frozen, a buffer.
EXTRAS = ("empty", "scalar", "unused", "frozen", "buffer", "jit")


class Net(nn.Module):
    """A body with extras."""

    def __init__(self, body: nn.Module, extras: tuple[str, ...]) -> None:
        super().__init__()
        self.body, self.extras = body, extras
        if "empty" in extras:
            self.empty = nn.Parameter(torch.empty(0, 3))
        if "scalar" in extras:
            self.scalar = nn.Parameter(torch.tensor(1.5))
        if "unused" in extras:
            self.unused = nn.Linear(3, 3)
        if "frozen" in extras:
            self.frozen = nn.Linear(1, 1).requires_grad_(False)
        if "buffer" in extras:
            self.register_buffer("calls", torch.zeros(()))
        if "jit" in extras:
            self.script = torch.jit.script(nn.Linear(1, 1).requires_grad_(False))

    def forward(self, *args: Tensor) -> Tensor | dict[str, Tensor]:
        out = self.body(*args)
        return {name: self._extra(part) for name, part in out.items()} if isinstance(out, dict) else self._extra(out)

    def _extra(self, x: Tensor) -> Tensor:
        if "scalar" in self.extras:
            x = x * self.scalar
        if "empty" in self.extras:
            x = x + self.empty.sum()
        if "frozen" in self.extras:
            x = x + self.frozen(torch.ones(1, 1, dtype=self.frozen.weight.dtype)).sum()
        if "jit" in self.extras:
            x = x + self.script(torch.ones(1, 1, dtype=self.script.weight.dtype)).sum()
        if "buffer" in self.extras and self.training:
            self.calls.add_(1)
        return x


def build(p: Program) -> nn.Module:
    """The model of a program, always with the same weights."""
    torch.manual_seed(p.seed)
    body = ARCHITECTURES[p.architecture].make(p)
    model = body if p.architecture == "gan" else Net(body, p.extras)
    return model.to(DTYPES[p.dtype]) if p.dtype in DTYPES and p.architecture != "complex" else _converted(model, p)


def _converted(model: nn.Module, p: Program) -> nn.Module:
    """``Module.to`` would drop imaginary parts."""
    if p.dtype in DTYPES:
        for part in model.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and not parameter.is_complex():
                    part._parameters[name] = nn.Parameter(parameter.detach().to(DTYPES[p.dtype]), parameter.requires_grad)
    return model


def batch(p: Program, number: int) -> Batch:
    """The batch of this number; it depends on no global generator."""
    generator = torch.Generator().manual_seed(1000 * p.seed + number)
    drawn = ARCHITECTURES[p.architecture].batch(generator)
    wide = DTYPES.get(p.dtype, torch.float32)
    return tuple(x.to(wide) if x.is_floating_point() else x for x in drawn)


def mean_square(output: Tensor | dict[str, Tensor], target: float = 0.5) -> Tensor:
    """A loss of any output."""
    parts = output.values() if isinstance(output, dict) else [output]
    return sum(((part if part.dtype == torch.float64 else part.float()) - target).square().mean() for part in parts)
