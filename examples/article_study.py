"""One BERT, four learning rates, and the diagnosis of each by ``monitor.diagnose()``.

After an article on gradient norms, which trains a randomly initialised BERT on pairs of sentences, with Adam at 10, 0.1, 0.001 and
0.00005: the first one ends in NaN, two stay on a plateau, the last one learns. Here a small one learns whether the second sentence
is the first one without some words, or another one. Nothing is downloaded. ``--image picture.svg`` needs matplotlib.
"""

from __future__ import annotations

import argparse
import math
import random
import re
from collections import Counter

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

import torch_gradmon as gradmon
from torch_gradmon.cli.demo_model import corpus

RATES = (10.0, 0.1, 0.001, 0.00005)
STEPS, BATCH, PAIRS = 80, 16, 256
#: Size of the vocabulary and of a sentence; share of words that remain in a pair.
WORDS, LENGTH, KEPT = 1000, 8, 0.6
DEPTH, WIDTH, LAYER = 12, 256, "bert.encoder.layer"  # as deep as the article's, a third as wide
PANELS = {"first layer": f"{LAYER}.0", "last layer": f"{LAYER}.{DEPTH - 1}", "pooler": "bert.pooler", "classifier": "classifier"}
COLOURS = ("#d55e00", "#e69f00", "#0072b2", "#009e73")  # after Okabe and Ito, distinct for the colour-blind


def pairs() -> dict[str, Tensor]:
    """Pairs of sentences of Python's documentation: inputs of BERT, each ``[pairs, ...]``. 0 is padding, 1 begins, 2 ends."""
    chosen = random.Random(0)
    sentences = [re.findall(r"[a-z]+", sentence.lower()) for sentence in re.split(r"(?<=[.:])\s+(?=[A-Z])", corpus()[0])]
    sentences = [sentence[:LENGTH] for sentence in sentences if len(sentence) > LENGTH // 2]
    common = Counter(word for sentence in sentences for word in sentence).most_common(WORDS - 4)
    number = {word: 4 + place for place, (word, _) in enumerate(common)}
    ids, sides, labels = [], [], [place % 2 for place in range(PAIRS)]
    chosen.shuffle(labels)
    for is_same in labels:
        first = chosen.choice(sentences)
        second = [word for word in first if chosen.random() < KEPT] if is_same else chosen.choice(sentences)
        row = [1, *(number.get(word, 3) for word in first), 2, *(number.get(word, 3) for word in second), 2]
        ids.append(row + [0] * (2 * LENGTH + 3 - len(row)))
        sides.append([0] * (len(first) + 2) + [1] * (2 * LENGTH + 1 - len(first)))
    columns = {"input_ids": torch.tensor(ids), "token_type_ids": torch.tensor(sides), "labels": torch.tensor(labels)}
    return {**columns, "attention_mask": (columns["input_ids"] > 0).long()}


def train(rate: float, steps: int, data: dict[str, Tensor], run_dir: str) -> gradmon.Diagnosis:
    """Train at one learning rate, all else being equal, and return the diagnosis."""
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": WIDTH // 32, "intermediate_size": 4 * WIDTH}
    # dropout of attention weights would disable torch's fused attention kernel on a CPU
    config = BertConfig(vocab_size=WORDS, max_position_embeddings=2 * LENGTH + 3, attention_probs_dropout_prob=0.0, **sizes)
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    monitor = gradmon.watch(model, optimizer, preset="full", run_dir=run_dir, on_spike=None)
    for step in range(steps):
        rows = torch.arange(step * BATCH, (step + 1) * BATCH) % PAIRS
        loss = model(**{name: column[rows] for name, column in data.items()}).loss
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss)
        optimizer.step()
    diagnosis = monitor.diagnose()
    monitor.detach()
    return diagnosis


def curves(run: gradmon.Run) -> dict[str, dict[int, float]]:
    """The loss, and the norm of the gradient of each part of the model, by step."""
    found = {"loss": run.series("loss")}
    for title, part in PANELS.items():
        is_norm = re.compile(rf"gradient_before_clip/{re.escape(part)}\..*/norm").fullmatch
        norms = [run.series(key) for key in run.keys() if is_norm(key)]  # noqa: SIM118
        found[title] = {step: math.hypot(*(norm[step] for norm in norms)) for step in norms[0]}
    return found


def draw(runs: dict[float, gradmon.Run], file: str) -> None:
    """A panel for each curve, with a line for each rate; a cross is the last value before NaN, and zeros are left out."""
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "article", "axes.spines.top": False, "axes.spines.right": False}
    )
    figure, axes = pyplot.subplots(2, 3, figsize=(10, 5.2), layout="constrained")
    for number, (rate, run) in enumerate(runs.items()):
        style = {"color": COLOURS[number % len(COLOURS)], "linewidth": 1, "marker": "x", "label": f"{rate:g}"}
        for axis, (title, curve) in zip(axes.flat, curves(run).items(), strict=False):
            known = {step: value for step, value in curve.items() if 0 < value < math.inf}
            ends = [-1] if known and any(math.isnan(value) for value in curve.values()) else []
            axis.plot(known.keys(), known.values(), markevery=ends, **style)
            axis.set(title=title if title == "loss" else f"gradient norm: {title}", xlabel="step", yscale="log")
            axis.grid(alpha=0.2)
    axes[-1, -1].axis("off")
    axes[-1, -1].legend(*axes[0, 0].get_legend_handles_labels(), title="learning rate", loc="center", frameon=False)
    figure.savefig(file)


def main() -> None:
    """Train at each rate, and print the diagnosis."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--run-dir", default="runs/article")
    parser.add_argument("--image")
    options = parser.parse_args()
    data = pairs()
    for rate in options.rates:
        print(f"== learning rate {rate:g}\n\n{train(rate, options.steps, data, f'{options.run_dir}/{rate:g}')}\n", flush=True)
    if options.image:
        draw({rate: gradmon.load_run(f"{options.run_dir}/{rate:g}") for rate in options.rates}, options.image)


if __name__ == "__main__":
    main()
