"""``gradmon demo``: train a small character GPT under watch, then show what its layers did. Needs rich and tqdm.

The training is an ordinary loop; the monitor's part stands between the optimizer and the loop.
"""

from __future__ import annotations

import hashlib
import os
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

from ..core.fence import is_disabled
from .demo_model import CharacterGPT, Sizes, corpus, draw
from .demo_table import DemoResult, picture, report, rows

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


def train(model: CharacterGPT, data: Tensor, sizes: Sizes, steps: int, run_dir: Path, seed: int) -> gradmon.ModuleMonitor:
    """Train ``model`` for ``steps`` steps under watch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    generator = torch.Generator().manual_seed(seed)

    monitor = gradmon.watch(model, optimizer, run_dir=run_dir)  # the one line that is needed; the rest is for the table
    monitor.add_gradient_metric("norm")
    monitor.add_gradient_metric("sparsity", stages=["before_clip"])
    monitor.add_update_metric("norm", every=UPDATE_EVERY)
    monitor.add_parameter_metric("norm", every=UPDATE_EVERY)
    monitor.add_sink(gradmon.JsonlSink(run_dir / "metrics.jsonl"))

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
    return monitor


@contextmanager
def _plain_warnings(replaces: bool) -> Iterator[None]:
    """Print warnings above the progress bar, without the line of code that they come from. ``replaces``: not that an earlier run is
    replaced.
    """
    with warnings.catch_warnings():
        if replaces:
            warnings.filterwarnings("ignore", "torch_gradmon: the run directory .* takes its place")
        warnings.showwarning = lambda message, *_: tqdm.write(f"warning: {message}", file=sys.stderr)
        yield


@contextmanager
def _spoiling(model: CharacterGPT, layer: str) -> Iterator[None]:
    """Within it, the gradient of the layer's weight is too large."""
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
) -> DemoResult:
    """Train, and print the table of layers.

    Args:
        steps: how many to train.
        run_dir: run directory; ``metrics.jsonl`` is written there too.
        svg: file for the printed tables as a picture.
        seed: of parameters and batches.
        sizes: of the model and its batches.

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
    console = Console(highlight=False)
    console.print(
        f"text   Python's help pages: {len(text):,} characters, {characters} different, sha256 {_digest(text)}\n"
        f"model  {sizes.blocks} blocks, {sum(p.numel() for p in model.parameters()):,} parameters"
    )
    spoiled = spoiled_in(steps, sizes)
    if spoiled is not None:
        console.print(f"fault  on purpose: in step {spoiled[0]} one layer's gradient is {FACTOR:,.0f} times too large")
    console.print()
    with _plain_warnings(replaces=run_dir == Path(RUN_DIR)):
        monitor = train(model, data, sizes, steps, run_dir, seed)
    result = _result(monitor, model, steps, run_dir, spoiled)
    report(console, result)
    if svg is not None:
        Path(svg).write_text(picture(result), encoding="utf-8")
    console.print("\nDiagnosis", style="bold cyan")
    console.print(str(gradmon.diagnose(run_dir)), markup=False, soft_wrap=True)
    _write_page(console, run_dir)
    return result


def _write_page(console: Console, run_dir: Path) -> None:
    try:
        from ..analysis.report.page import write
    except ModuleNotFoundError:
        console.print('\nfor a report with pictures: pip install "torch_gradmon[report]"', markup=False)
        return
    console.print("\nReport", style="bold cyan")
    console.print(f"open in a browser: {write(run_dir)}", markup=False, soft_wrap=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _result(
    monitor: gradmon.ModuleMonitor, model: nn.Module, steps: int, run_dir: Path, spoiled: tuple[int, str] | None
) -> DemoResult:
    history = monitor.get_all_metrics()
    step = max(step for step in history if step % UPDATE_EVERY == 0)
    overhead = [values["gradmon/overhead_pct"] for values in history.values()]
    elements = {name: parameter.numel() for name, parameter in model.named_parameters()}
    share = sum(overhead) / len(overhead)
    return DemoResult(step, history[step], rows(history[step], elements), steps, share, run_dir, spoiled)
