"""The ``Trainer`` of Hugging Face Transformers with one more callback: a small BERT learns which of two sentences follow each other.

Nothing is downloaded: the sentences are those of Python's own documentation, words are hashed, and the model starts from random weights
and memorises the 256 pairs.
"""

from __future__ import annotations

import random
import re
import zlib
from pydoc_data.topics import topics

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import torch_gradmon as gradmon
from torch_gradmon.integrations.transformers import GradmonCallback

STEPS, WORDS, LENGTH = 80, 2000, 24
RUN = "runs/transformers"


def words(sentence: str) -> list[int]:
    """A number for each word; 0 is padding, 1 separates two sentences."""
    found = re.findall(r"\w+", sentence.lower())[:LENGTH]
    return [2 + zlib.crc32(word.encode()) % (WORDS - 2) for word in found]


def pair(first: str, second: str, follows: bool) -> dict[str, torch.Tensor]:
    """Two sentences as input of BERT."""
    a, b = [*words(first), 1], words(second)
    padding = 2 * LENGTH + 1 - len(a) - len(b)
    return {
        "input_ids": torch.tensor(a + b + [0] * padding),
        "token_type_ids": torch.tensor([0] * len(a) + [1] * (len(b) + padding)),
        "attention_mask": torch.tensor([1] * (len(a) + len(b)) + [0] * padding),
        "labels": torch.tensor(int(follows)),
    }


def pairs(count: int) -> list[dict[str, torch.Tensor]]:
    """Sentences of the documentation, every other one with the sentence that follows it, the rest with any."""
    sentences = [text for topic in topics.values() for text in re.split(r"(?<=[.:])\s+(?=[A-Z])", topic) if len(words(text)) > 3]
    chosen = random.Random(0)
    found = []
    for number in range(count):
        at = chosen.randrange(len(sentences) - 1)
        follows = number % 2 == 0
        found.append(pair(sentences[at], sentences[at + 1] if follows else chosen.choice(sentences), follows))
    return found


def main() -> None:
    """Train for a while, and print values of the monitor."""
    torch.manual_seed(0)
    config = BertConfig(vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
    callback = GradmonCallback(layers="blocks", run_dir=RUN, log_keys=("grad_norm", "grad_norm_after_clip", "clip_fraction"))
    options = TrainingArguments(
        "runs/trainer",
        max_steps=STEPS,
        per_device_train_batch_size=32,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        max_grad_norm=0.5,
        logging_steps=10,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    model = BertForSequenceClassification(config)
    trainer = Trainer(model, options, train_dataset=pairs(256), callbacks=[callback])
    trainer.train()  # prints its own lines, with the values of log_keys in them

    monitor = callback.monitor
    assert monitor is not None
    names = ("bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1", "classifier")
    print("\nnorm of the gradient of each block, before the clip\n")
    print("step" + "".join(f"{name:>23}" for name in names))
    for step, values in monitor.get_all_metrics().items():
        if step % 10 == 0:
            print(f"{step:>4}" + "".join(f"{values[f'gradient_before_clip/{name}/norm']:>23.4f}" for name in names))
    print("\nwho holds the gradient")
    for name, share in monitor.last_record.top_gradients(3):
        print(f"  {name:<44} {share:.0%}")
    print(f"\n{gradmon.load_run(RUN)}")


if __name__ == "__main__":
    main()
