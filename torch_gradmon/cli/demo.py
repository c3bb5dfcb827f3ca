"""``gradmon demo``: train a small character GPT under watch, then show what its layers did. Needs rich and tqdm.

The training is an ordinary loop; the monitor's part stands between the optimizer and the loop.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from tqdm import tqdm

import torch_gradmon as gradmon

from ..analysis.diagnosis import Diagnosis
from ..core.fence import is_disabled
from ..sinks import JsonlSink
from .demo_model import CharacterGPT, Sizes, corpus, draw
from .terminal.layer_table import RunSummary, summarize
from .terminal.tables import show_summary

# --- tables ---


def report(console: Console, summary: RunSummary) -> None:
    """What ``gradmon summary`` shows of the run, and what to do from here."""
    console.print()
    show_summary(console, summary)
    console.print("\nFrom here", style="bold cyan")
    for what, how in (
        ("read the run", f'torch_gradmon.load_run({json.dumps(summary.name)}).series("gradmon/grad_norm")'),
        ("all values", f"{Path(summary.name) / 'metrics.jsonl'}, one line a step"),
        ("your model", "monitor = torch_gradmon.watch(model, optimizer)"),
    ):
        console.print(f"{what:14}{how}", markup=False, soft_wrap=True)


def picture(summary: RunSummary) -> str:
    console = Console(record=True, width=80, file=io.StringIO(), force_terminal=True, highlight=False)
    report(console, summary)
    console.print()  # otherwise the frame cuts the underscores of the last line
    drawn = console.export_svg(title="gradmon demo")
    # some viewers drop leading spaces, so move the text instead
    return re.sub(r'x="([0-9.]+)" y="([0-9.]+)" textLength="([0-9.]+)"([^>]*)>((?:&#160;)+)(?=[^<&])', _moved, drawn)


def _moved(match: re.Match[str]) -> str:
    x, y, length = (float(number) for number in match.groups()[:3])
    shift = 12.2 * match[5].count("&")  # the width of a character in rich's pictures
    return f'x="{x + shift:g}" y="{y:g}" textLength="{length - shift:g}"{match[4]}>'


# --- the training ---

RUN_DIR = "runs/demo"
STEPS = 601  # steps 0 to 600, so that the last one measures updates
UPDATE_EVERY = 10
LEARNING_RATE, WARM_UP, MAX_NORM = 2e-3, 50, 1.0
#: In this step, or after two thirds of a shorter run, the gradient of one layer is this many times too large, as after a flipped bit, so
#: that there is something to find. Runs of fewer steps are not spoiled.
SPOILED, FACTOR, FEWEST = 400, 1000.0, 60


def spoiled_in(steps: int, sizes: Sizes) -> tuple[int, str] | None:
    """The step and the layer that are spoiled on purpose in a run of ``steps``; None if it is too short."""
    if steps < FEWEST:
        return None
    return (SPOILED if steps > SPOILED + 50 else steps * 2 // 3), f"blocks.{min(2, sizes.blocks - 1)}.up"


def train(model: CharacterGPT, data: Tensor, sizes: Sizes, steps: int, run_dir: Path, seed: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    generator = torch.Generator().manual_seed(seed)

    monitor = gradmon.watch(model, optimizer, run_dir=run_dir)  # the one line that is needed; the rest is for metrics.jsonl
    monitor.add_gradient_metric("norm")
    monitor.add_gradient_metric("sparsity", stages=["before_clip"])
    monitor.add_update_metric("norm", every=UPDATE_EVERY)
    monitor.add_parameter_metric("norm", every=UPDATE_EVERY)
    monitor.add_sink(JsonlSink(run_dir / "metrics.jsonl"))

    spoiled = spoiled_in(steps, sizes)
    progress = tqdm(range(steps), desc="training", unit="step", mininterval=0.5)
    for step in progress:
        loss = model(*draw(data, sizes, generator))
        optimizer.zero_grad()
        with _spoiling(model, spoiled[1]) if spoiled is not None and step == spoiled[0] else nullcontext():
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        schedule.step()
        monitor.log_scalar("loss", loss.detach())
        progress.set_postfix(loss=f"{loss.item():.2f}", grad_norm=f"{norm.item():.2f}", refresh=False)
    monitor.detach()


@contextmanager
def _spoiling(model: CharacterGPT, layer: str) -> Iterator[None]:
    weight = model.get_parameter(f"{layer}.weight")
    hook = weight.register_hook(lambda gradient: gradient * FACTOR)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        hook.remove()


def demo(
    steps: int = STEPS,
    run_dir: str | os.PathLike[str] = RUN_DIR,
    svg: str | os.PathLike[str] | None = None,
    seed: int = 0,
    sizes: Sizes | None = None,
) -> RunSummary:
    """Train, and print the tables, which ``svg`` gets as a picture. ``run_dir`` also gets a ``metrics.jsonl``.

    Raises:
        ValueError: ``GRADMON_DISABLE`` is set, so there is nothing to show.
        OSError: ``run_dir`` or ``svg`` cannot be written.
    """
    if is_disabled():
        raise ValueError("GRADMON_DISABLE is set, so the monitor does nothing; unset it for the demo")
    sizes, run_dir = sizes or Sizes(), Path(run_dir)
    if svg is not None:  # checked before a minute of training, not after it
        Path(svg).parent.mkdir(parents=True, exist_ok=True)
        if Path(svg).is_dir():
            raise IsADirectoryError(f"{os.fspath(svg)!r} is a directory; give a file, such as 'table.svg'")
    torch.set_num_threads(1)  # faster than several for matrices of this size
    torch.manual_seed(seed)
    text, data, characters = corpus()
    model = CharacterGPT(characters, sizes)
    console, digest = Console(highlight=False), hashlib.sha256(text.encode()).hexdigest()[:8]
    console.print(
        f"text   Python's help pages: {len(text):,} characters, {characters} different, sha256 {digest}\n"
        f"model  {sizes.blocks} blocks, {sum(p.numel() for p in model.parameters()):,} parameters"
    )
    spoiled = spoiled_in(steps, sizes)
    if spoiled is not None:
        console.print(f"fault  on purpose: in step {spoiled[0]} one layer's gradient is {FACTOR:,.0f} times too large")
    console.print()
    with warnings.catch_warnings():
        if run_dir == Path(RUN_DIR):  # whose earlier run may be replaced
            warnings.filterwarnings("ignore", "torch_gradmon: the run directory .* takes its place")
        # above the progress bar, without the line of code that they come from
        warnings.showwarning = lambda message, *_: tqdm.write(f"warning: {message}", file=sys.stderr)
        train(model, data, sizes, steps, run_dir, seed)
    with gradmon.load_run(run_dir) as run:
        summary, diagnosis = summarize(run._reader, os.fspath(run_dir)), run.diagnose()
    report(console, summary)
    if svg is not None:
        Path(svg).write_text(picture(summary), encoding="utf-8")
    _diagnose(console, run_dir, diagnosis)
    return summary


def _diagnose(console: Console, run_dir: Path, diagnosis: Diagnosis) -> None:
    console.print("\nDiagnosis", style="bold cyan")
    console.print(str(diagnosis), markup=False, soft_wrap=True)
    try:
        from ..analysis.report.page import write
    except ModuleNotFoundError:
        console.print('\nfor a report with pictures: pip install "torch_gradmon[report]"', markup=False)
        return
    console.print("\nReport", style="bold cyan")
    console.print(f"open in a browser: {write(run_dir)}", markup=False, soft_wrap=True)
