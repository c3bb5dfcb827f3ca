"""What the tokens, masks and labels show that a model of Transformers gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon

transformers = pytest.importorskip("transformers")

PAD, IGNORED = 0, -100
Batch = dict[str, Tensor]


def causal() -> nn.Module:
    """A small GPT-2."""
    config = transformers.GPT2Config(
        vocab_size=30, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2, pad_token_id=PAD
    )
    return transformers.GPT2LMHeadModel(config)


def classifier() -> nn.Module:
    """A small BERT."""
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, pad_token_id=PAD
        )
    )


def text(step: int) -> Batch:
    """Rows of 4 to 12 tokens, padded."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 30, (8, 12), generator=draw)
    mask = (torch.arange(12) < torch.randint(4, 12, (8, 1), generator=draw)).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def of_text(batch: Batch) -> Batch:
    """With the tokens as labels, and none of padding."""
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)}


def shifted(batch: Batch) -> Batch:
    """With the labels of the next tokens."""
    labels = of_text(batch)["labels"]
    return {**batch, "labels": torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], 1)}


def of_rows(batch: Batch) -> Batch:
    """With a class of each row."""
    return {**batch, "labels": batch["input_ids"][:, 0] % 2}


def rules(model: nn.Module, change: Callable[[Batch], Batch]) -> dict[str, str]:
    """Severity by rule."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    for step in range(24):
        loss = model(**change(text(step))).loss
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
    found = {finding.rule: finding.severity for finding in monitor.diagnose().findings}
    monitor.detach()
    return found


OURS = {"attention-mask", "labels-ignored", "loss-on-padding", "labels-shifted-twice"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "change", "rule"),
    [
        (causal, of_text, None),
        (classifier, of_rows, None),
        (causal, shifted, "labels-shifted-twice"),
        (causal, lambda batch: {**batch, "labels": batch["input_ids"]}, "loss-on-padding"),
        (causal, lambda batch: {**batch, "labels": torch.full_like(batch["input_ids"], IGNORED)}, "labels-ignored"),
        (classifier, lambda batch: {**of_rows(batch), "attention_mask": 0 * batch["attention_mask"]}, "attention-mask"),
        (classifier, lambda batch: {**of_rows(batch), "attention_mask": 1 - batch["attention_mask"]}, "attention-mask"),
        # sound: without padding, with one text in all places, and with a loss of answers alone
        (causal, lambda batch: {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}, None),
        (causal, lambda batch: of_text({**batch, "input_ids": 5 * batch["attention_mask"]}), None),
        (
            causal,
            lambda batch: {**of_text(batch), "labels": of_text(batch)["labels"].index_fill(1, torch.arange(3), IGNORED)},
            None,
        ),
    ],
)
def test_arguments_that_are_wrong_are_named_first(make: Any, change: Callable[[Batch], Batch], rule: str | None) -> None:
    torch.manual_seed(0)
    found = rules(make(), change)
    assert OURS.intersection(found) == ({rule} if rule else set())
    if rule:
        assert next(iter(found)) == rule
        assert found[rule] == ("error" if rule == "labels-ignored" else "warning")
        assert not any(other.startswith("non-finite") for other in found)


def test_a_model_of_the_users_own_may_do_what_it_wants_with_a_mask() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 30))

        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
            loss = nn.functional.cross_entropy(self.body(input_ids).transpose(1, 2), labels, reduction="none")
            return transformers.modeling_outputs.CausalLMOutput(loss=(loss * attention_mask).sum() / attention_mask.sum())

    assert not OURS.intersection(rules(Own(), lambda batch: {**batch, "labels": batch["input_ids"]}))


def _loss_outside(
    model: nn.Module, batch: Batch, targets: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], smoothing: float
) -> Tensor:
    labels = batch.pop("labels")
    logits, labels = targets(model(**batch).logits, labels)
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("vocabulary", [30, 5000])
@pytest.mark.parametrize(
    ("targets", "text_of", "smoothing", "is_so"),
    [
        (lambda z, y: (z, y), text, 0.0, True),
        (lambda z, y: (z[:, :-1], y[:, 1:]), text, 0.0, False),
        (lambda z, y: (z[:, :-1], y[:, :-1]), text, 0.0, True),
        # a text of one token, and one whose neighbours are often alike
        (
            lambda z, y: (z[:, :-1], y[:, 1:]),
            lambda step: {**text(step), "input_ids": 5 * text(step)["attention_mask"]},
            0.0,
            False,
        ),
        (lambda z, y: (z[:, :-1], y[:, 1:]), lambda step: {**text(step), "input_ids": text(step)["input_ids"] // 15}, 0.0, False),
        (lambda z, y: (z[:, :-1], y[:, 1:]), text, 0.1, False),
    ],
)
def test_labels_that_are_not_shifted_outside_of_the_model(
    targets: Any, text_of: Any, smoothing: float, is_so: bool, vocabulary: int
) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=vocabulary, n_positions=16, n_embd=16, n_layer=1, n_head=2, pad_token_id=PAD)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with gradmon.watch(model, optimizer, on_spike=None) as monitor:
        for step in range(24):
            loss = _loss_outside(model, of_text(text_of(step)), targets, smoothing)
            optimizer.zero_grad()
            loss.backward()
            monitor.log_scalar("loss", loss.detach())
            optimizer.step()
        found = [finding.rule for finding in monitor.diagnose().findings]
    assert ("labels-not-shifted" in found) is is_so
    if is_so:
        assert found[0] == "labels-not-shifted"
