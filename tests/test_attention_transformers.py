"""Models of Hugging Face's transformers: attention against an eager twin, names, checkpointing, and a reference beside."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_gradmon import ModuleMonitor

from . import loops
from .test_attention_recording import METRICS, Call, altered, expected, watched

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.extra

#: By kind: the class, its configuration, the sizes of a tiny one, and where the modules stand that attend.
KINDS: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16},
        ("transformer.h.0.attn", "transformer.h.1.attn"),
    ),
    "llama": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2},
        ("model.layers.0.self_attn", "model.layers.1.self_attn"),
    ),
    "bert": (
        "BertForTokenClassification",
        "BertConfig",
        {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_labels": 20},
        ("bert.encoder.layer.0.attention.self", "bert.encoder.layer.1.attention.self"),
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"num_layers": 1, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "decoder_start_token_id": 0},
        (
            "encoder.block.0.layer.0.SelfAttention",
            "decoder.block.0.layer.0.SelfAttention",
            "decoder.block.0.layer.1.EncDecAttention",
        ),
    ),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {
            **{f"{part}_{what}": size for part in ("encoder", "decoder") for what, size in (("layers", 1), ("ffn_dim", 24))},
            **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
            "d_model": 16,
            "max_position_embeddings": 16,
        },
        ("model.encoder.layers.0.self_attn", "model.decoder.layers.0.self_attn", "model.decoder.layers.0.encoder_attn"),
    ),
}
NO_CALL = (
    "no call of scaled_dot_product_attention was seen in training; attention that is written out, flex_attention, and a call through an "
    "attribute that holds the function are not seen"
)
_NO_DROPOUT = ("attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout_rate")
_NO_DROPOUT += ("dropout", "attention_dropout", "activation_dropout")


def tiny(kind: str, attention: str = "sdpa", dropout: bool = False) -> Any:
    """Randomly initialised, in training mode; the same whenever it is made."""
    model, configuration, sizes, _ = KINDS[kind]
    torch.manual_seed(1)
    made = getattr(transformers, configuration)(vocab_size=20, use_cache=False, attn_implementation=attention, **sizes)
    for name in _NO_DROPOUT if not dropout else ():
        if isinstance(getattr(made, name, None), float):
            setattr(made, name, 0.0)
    return getattr(transformers, model)(made).train()


def batch(size: int = 3, padded: bool = True) -> dict[str, Tensor]:
    """Token numbers, the labels of a loss, and which tokens are no padding."""
    ids = torch.randint(3, 20, (size, 7))
    lengths = torch.tensor([7, 4, 6, 2, 5])[:size, None] if padded else torch.full((size, 1), 7)
    return {"input_ids": ids, "labels": ids, "attention_mask": (torch.arange(7) < lengths).long()}


class Twin:
    """The same model with attention spelled out, which notes what every module attends with."""

    def __init__(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, self.calls = tiny(kind, "eager"), dict[str, list[Call]]()
        file = sys.modules[type(self.model).__module__]
        self.eager: Callable[..., Any] = file.eager_attention_forward  # type: ignore[attr-defined]
        self.names = {module: name for name, module in self.model.named_modules()}
        monkeypatch.setattr(file, "eager_attention_forward", self.attend)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        added = [m.detach() for m in (mask, options.get("position_bias")) if m is not None]
        call = {"scale": options.get("scaling"), **({"attn_mask": sum(added)} if added else {})}
        self.calls.setdefault(self.names[module], []).append((query.detach(), key.detach(), call))
        return self.eager(module, query, key, value, mask, **options)


def step(model: Any, optimizer: torch.optim.Optimizer, *batches: dict[str, Tensor]) -> None:
    for inputs in batches:
        (model(**inputs).loss / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_value_equals_that_of_an_eager_twin(kind: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = tiny(kind), Twin(kind, monkeypatch)
    monitor, optimizer = watched(model)
    others = torch.optim.SGD(twin.model.parameters(), 0.1)
    for _ in range(2):
        batches = [batch(3, padded), batch(5, padded)]
        twin.calls.clear()
        step(model, optimizer, *batches)
        step(twin.model, others, *batches)
        assert tuple(twin.calls) == KINDS[kind][3]
        assert monitor.get_step_metrics() == pytest.approx(expected(twin.calls), rel=1e-4, abs=1e-5)
        assert not altered()


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_.*` is deprecated")  # what takes its place is not in older ones
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_recomputed_counts_once(kind: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = tiny(kind), Twin(kind, monkeypatch)
    monitor, optimizer = watched(model)
    first, second = batch(3), batch(5)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    passes: list[int] = []
    model.get_submodule(KINDS[kind][3][0]).register_forward_pre_hook(lambda *_: passes.append(1))
    model(**first).loss.backward()
    assert len(passes) == 2
    model.gradient_checkpointing_disable()
    model(**second).loss.backward()  # weighs less in a mean if the one before counts twice
    optimizer.step()
    for inputs in (first, second):
        twin.model(**inputs)
    assert monitor.get_step_metrics() == pytest.approx(expected(twin.calls), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_the_same_bit_for_bit_and_a_copy_differs_by_nothing_at_first(kind: str) -> None:
    left = []
    for monitored in (False, True):
        model = tiny(kind, dropout=True)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        monitor = ModuleMonitor(model)
        if monitored:
            monitor.set_reference_module("init")
            monitor.add_activation_difference_metric("max")
            monitor.add_activation_metric("mean")
            for metric in METRICS:
                monitor.add_attention_metric(metric)
            monitor.attach(optimizer)
        torch.manual_seed(2)
        for number in range(3):
            step(model, optimizer, batch())
            values = monitor.get_step_metrics()
            differences = {key: value for key, value in values.items() if key.startswith("activation_difference/")}
            if monitored:
                assert number or set(differences.values()) == {0.0}
                assert (differences["activation_difference/[root module].logits/max"] == 0) == (number == 0)
                assert {f"attention_entropy/{name}/mean" for name in KINDS[kind][3]} <= values.keys()
                assert {f"activation/[root module].{of}/mean" for of in ("loss", "logits")} <= values.keys()
        left.append({**dict(model.named_parameters()), "rng": torch.get_rng_state()})
    assert loops.differences(*left) == []


@pytest.mark.parametrize("kind", KINDS)
def test_eager_attention_is_absent_with_a_reason(kind: str) -> None:
    model = tiny(kind, "eager")
    monitor, optimizer = watched(model)
    step(model, optimizer, batch())
    assert monitor.get_step_metrics() == {}
    reason = NO_CALL
    assert monitor.missing() == {f"attention_{metric}/.*": reason for metric in METRICS}
