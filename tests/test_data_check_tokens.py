"""What tokens, targets and masks show of a model of the user's own, as far as autograd keeps them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import torch_gradmon as gradmon

VOCABULARY, LENGTH, PAD = 12, 9, 0
OURS = {"causal-mask-missing", "attention-mask", "labels-not-shifted", "batch-as-sequence", "classes-mixed"}


def text(step: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (8, LENGTH), generator=torch.Generator().manual_seed(step))


class Attention(nn.Module):
    """One layer, by ``kind`` of how its scores become weights; returns logits of each position."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.tokens, self.places = nn.Embedding(VOCABULARY, 16), nn.Embedding(LENGTH, 16)
        self.maps, self.head = nn.Linear(16, 48), nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        q, k, v = self.maps(x).view(*ids.shape, 3, 2, 8).permute(2, 0, 3, 1, 4)
        if self.kind.startswith("fused"):
            square = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool)
            low = torch.full(square.shape, -1e9)
            masks = {
                "padding": (ids != PAD)[:, None, None],
                "inverted": square.triu(),
                "given": square.tril(),
                "finite": low.triu(1),
            }
            mask = next((mask for name, mask in masks.items() if name in self.kind), None)
            dropout = 0.1 * ("drop" in self.kind)
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal="causal" in self.kind)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(8)
            if "causal" in self.kind:
                scores = scores.masked_fill(torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool(), -math.inf)
            mixed = scores.softmax(-1) @ v
        result: Tensor = self.head(x + mixed.transpose(1, 2).reshape(x.shape))
        return result


def trained(model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor]) -> set[str]:
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with gradmon.watch(model, optimizer, on_spike=None) as monitor:
        for step in range(20):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            monitor.log_scalar("loss", loss.detach())
            optimizer.step()
        return OURS.intersection(finding.rule for finding in monitor.diagnose().findings)


def predicts_next(model: nn.Module, step: int) -> Tensor:
    ids = text(step)
    return F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])


def restores(model: nn.Module, step: int) -> Tensor:
    """The text itself behind masked tokens, as a bidirectional model does."""
    ids = text(step)
    hidden = torch.rand(ids.shape, generator=torch.Generator().manual_seed(step)) < 0.3
    return F.cross_entropy(model(ids.masked_fill(hidden, PAD))[hidden], ids[hidden])


@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")
@pytest.mark.parametrize(
    ("kind", "loss_of", "is_so"),
    [
        ("fused", predicts_next, True),
        ("fused with dropout", predicts_next, False),  # as dropout changes weights, a mask might
        ("by hand", predicts_next, True),
        ("fused, padding", predicts_next, True),
        ("fused, inverted", predicts_next, True),
        ("fused, given", predicts_next, False),
        ("fused, finite", predicts_next, False),
        ("fused causal", predicts_next, False),
        ("fused causal with dropout", predicts_next, False),
        ("by hand, causal", predicts_next, False),
        ("fused", restores, False),
        ("by hand", restores, False),
    ],
)
def test_a_target_that_attention_sees_is_named(kind: str, loss_of: Callable[[nn.Module, int], Tensor], is_so: bool) -> None:
    assert trained(Attention(kind), loss_of) == ({"causal-mask-missing"} if is_so else set())


def test_a_checkpoint_computes_no_more_often_for_them() -> None:
    class Block(Attention):
        calls = 0

        def forward(self, ids: Tensor) -> Tensor:
            result: Tensor = torch.utils.checkpoint.checkpoint(super().forward, ids, use_reentrant=False)
            return result

    model = Block("fused")
    model.maps.register_forward_hook(lambda *args: setattr(Block, "calls", Block.calls + 1))
    assert trained(model, predicts_next) == set()  # what it keeps is not there yet
    assert Block.calls == 2 * 20


@pytest.mark.parametrize("is_inverted", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_padding_mask_that_hides_the_text_is_named(is_inverted: bool, dropout: float) -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 2)
            self.layer = nn.TransformerEncoderLayer(16, 2, 16, dropout, batch_first=True)

        def forward(self, ids: Tensor) -> Tensor:
            result: Tensor = self.head(self.layer(self.tokens(ids), src_key_padding_mask=(ids == PAD) ^ is_inverted)[:, 0])
            return result

    def loss_of(model: nn.Module, step: int) -> Tensor:
        ids = text(step)
        lengths = 3 + torch.arange(8)[:, None] % 4
        return F.cross_entropy(model(ids * (torch.arange(LENGTH) < lengths)), ids[:, 0] % 2)

    # where dropout is computed step by step, autograd does not keep the mask
    assert trained(Classifier(), loss_of) == ({"attention-mask"} if is_inverted and not dropout else set())


@pytest.mark.parametrize(("moved", "is_so"), [(0, True), (1, False)])
def test_a_decoder_that_gets_its_own_targets_is_named(moved: int, is_so: bool) -> None:
    class Copies(nn.Module):
        """An encoder and a decoder, whose task is to give the text back."""

        def __init__(self) -> None:
            super().__init__()
            self.source, self.target = nn.Embedding(VOCABULARY, 16), nn.Embedding(VOCABULARY, 16)
            self.body = nn.Transformer(16, 2, 1, 1, 16, 0.0, batch_first=True)
            self.head = nn.Linear(16, VOCABULARY)

        def forward(self, ids: Tensor, given: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(given.shape[1])
            result: Tensor = self.head(self.body(self.source(ids), self.target(given), tgt_mask=mask))
            return result

    def loss_of(model: nn.Module, step: int) -> Tensor:
        ids = text(step)
        given = torch.cat([torch.full((8, moved), PAD), ids], 1)[:, :LENGTH]
        return F.cross_entropy(model(ids, given).transpose(1, 2), ids)

    assert trained(Copies(), loss_of) == ({"labels-not-shifted"} if is_so else set())


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.body = getattr(nn, kind)(16, 16, batch_first=True)
        self.gate = nn.Linear(16, LENGTH - 1, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        y = self.body(self.tokens(ids))[0]
        result: Tensor = self.head(y * self.gate(y).softmax(-1)[..., :1])
        return result


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_a_recurrent_language_model_needs_no_mask(kind: str) -> None:
    assert trained(Recurrent(kind), predicts_next) == set()


def test_weights_that_are_masked_after_the_softmax_are_masked() -> None:
    class Late(Attention):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.tokens(ids)
            weights = (x @ x.mT / 4).softmax(-1) * torch.ones(ids.shape[1], ids.shape[1]).tril()
            result: Tensor = self.head(x + weights / weights.sum(-1, keepdim=True) @ x)
            return result

    assert trained(Late(""), predicts_next) == set()


def test_an_autoencoder_of_text_may_copy_what_it_sees() -> None:
    class Twice(nn.Module):
        """Its places are given as ids for each row."""

        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places, self.head = nn.Embedding(VOCABULARY, 8), nn.Embedding(LENGTH, 8), nn.Linear(8, VOCABULARY)

        def forward(self, ids: Tensor) -> Tensor:
            places = torch.arange(LENGTH).expand(len(ids), -1).clone()
            result: Tensor = self.head(self.tokens(ids) + self.places(places))
            return result

    assert trained(Twice(), lambda model, step: F.cross_entropy(model(text(step)).transpose(1, 2), text(step))) == set()


@pytest.mark.parametrize("reshaped", [lambda z: z.flatten(1), lambda z: z.view(len(z), -1)])
def test_a_view_of_one_place_mixes_nothing(reshaped: Callable[[Tensor], Tensor]) -> None:
    def loss_of(model: nn.Module, step: int) -> Tensor:
        x = torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(step))
        return F.cross_entropy(reshaped(model(x)), (x[:, 0, 0, 0] > 0).long())

    assert trained(nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1)), loss_of) == set()


def test_attention_of_one_graph_runs_over_its_nodes() -> None:
    class Nodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maps, self.head = nn.Linear(3, 24), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.maps(x).view(len(x), 3, 2, 4).permute(1, 2, 0, 3)
            result: Tensor = self.head(F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1))
            return result

    def loss_of(model: nn.Module, step: int) -> Tensor:
        x = torch.randn(7, 3, generator=torch.Generator().manual_seed(step))
        return F.cross_entropy(model(x), (x[:, 0] > 0).long())

    assert trained(Nodes(), loss_of) == set()


class OverSequence(nn.Module):
    """Of sequences ``[N, T, 3]``, two classes ``[N, 2]``."""

    def __init__(self, kind: str, batch_first: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 8)
        self.kind, self.head = kind, nn.Linear(8, 2)
        if kind == "LSTM":
            self.body: nn.Module = nn.LSTM(8, 8, batch_first=batch_first)
        else:
            dropout = 0.1 if kind == "dropout" else 0.0
            self.body = nn.TransformerEncoderLayer(8, 2, 8, dropout, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(self.inner(x))
        result: Tensor = self.head((y if isinstance(y, Tensor) else y[0])[:, -1])
        return result


@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")
@pytest.mark.parametrize("kind", ["LSTM", "attention", "dropout"])
@pytest.mark.parametrize(("batch_first", "rows"), [(True, 8), (False, 8), (True, LENGTH)])
def test_a_layer_that_runs_over_the_batch_is_named(kind: str, batch_first: bool, rows: int) -> None:
    def loss_of(model: nn.Module, step: int) -> Tensor:
        x = torch.randn(rows, LENGTH, 3, generator=torch.Generator().manual_seed(step))
        return F.cross_entropy(model(x), (x[:, 0, 0] > 0).long())

    assert trained(OverSequence(kind, batch_first), loss_of) == (set() if batch_first else {"batch-as-sequence"})


@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")
@pytest.mark.parametrize(
    ("flat", "is_so"),
    [
        (lambda z: z.view(-1, 4), True),
        (lambda z: z.reshape(-1, 4), True),
        (lambda z: z.permute(0, 2, 3, 1).reshape(-1, 4), False),
        (lambda z: z.movedim(1, -1).flatten(0, 2), False),
        (lambda z: z.flatten(2).transpose(1, 2).reshape(-1, 4), False),
    ],
)
def test_a_view_that_crosses_the_classes_is_named(flat: Callable[[Tensor], Tensor], is_so: bool) -> None:
    def loss_of(model: nn.Module, step: int) -> Tensor:
        x = torch.randn(2, 3, 5, 6, generator=torch.Generator().manual_seed(step))
        return F.cross_entropy(flat(model(x)), (x[:, 0] > 0).long().flatten())

    assert trained(nn.Sequential(nn.Conv2d(3, 4, 1)), loss_of) == ({"classes-mixed"} if is_so else set())
