"""``gradmon demo``: train a small character GPT under watch, then show what its layers did. Needs rich and tqdm.

The training is an ordinary loop; the monitor's part stands between the optimizer and the loop.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from tqdm import tqdm

import torch_gradmon as gradmon

from ..core.fence import is_disabled
from ..sinks import JsonlSink
from .demo_model import CharacterGPT, Sizes, corpus, draw

# --- tables ---


class DemoRow(NamedTuple):
    """A row of the table: one matrix, or all norm layers together. Values that were not measured are NaN."""

    layer: str
    before_clip: float
    after_clip: float
    share: float
    update_ratio: float
    sparsity: float


class DemoResult(NamedTuple):
    step: int  # the last step that measured updates; the values are of this step
    values: Mapping[str, float]  # all values of it by key
    rows: Sequence[DemoRow]  # the table of layers
    steps: int  # number of steps
    overhead_fraction: float  # time spent in the monitor, mean over all steps
    run_dir: Path  # the run directory


def rows(values: Mapping[str, float], elements: Mapping[str, int]) -> list[DemoRow]:
    """A row for each matrix, and one for all norm layers; ``elements`` are the sizes of the parameters by name."""
    groups: dict[str, list[str]] = {}
    for name in elements:
        groups.setdefault("all norms" if "norm" in name else name.removesuffix(".weight"), []).append(name)
    groups["all norms"] = groups.pop("all norms")  # to the end
    found = []
    for layer, names in groups.items():
        before, after, update, parameter = (
            math.hypot(*(values.get(f"{source}/{name}/norm", math.nan) for name in names))
            for source in ("gradient_before_clip", "gradient", "update", "parameter")
        )
        near_zero = sum(values[f"gradient_before_clip/{name}/sparsity"] * elements[name] for name in names)
        share, ratio = (before / values["gradmon/grad_norm"]) ** 2, update / parameter if parameter > 0 else math.nan
        found.append(DemoRow(layer, before, after, share, ratio, near_zero / sum(elements[name] for name in names)))
    return found


def report(console: Console, result: DemoResult) -> None:
    values = result.values
    summary = Table.grid(padding=(0, 2))
    for name, meaning in (
        ("grad_norm", "norm of all gradients before the clip"),
        ("clip_fraction", "of the last 100 steps had their gradients clipped"),
        ("update_ratio", "norm of the update over that of the parameters"),
        ("spike_score", "robust deviations of grad_norm above normal"),
    ):
        summary.add_row(f"[bold]{name}", _number(values.get(f"gradmon/{name}", math.nan), name), f"[dim]{meaning}")
    overhead = f"of the time is spent in the monitor, mean of {result.steps} steps"
    summary.add_row("[bold]overhead_fraction", f"{result.overhead_fraction:.1%}", f"[dim]{overhead}")
    console.print(f"\nWhole model, step {result.step}, loss {values['loss']:.3f}", style="bold cyan")
    console.print(summary)

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("layer", no_wrap=True)
    for heading in (
        "gradient\nbefore clip",
        "gradient\nafter clip",
        "share of\nsquared norm",
        "update\nratio",
        "gradient\nsparsity",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    largest = max(result.rows, key=lambda row: row.share)
    for row in result.rows:
        norms, ratio = (_number(row.before_clip), _number(row.after_clip)), _number(row.update_ratio, "update_ratio")
        style = "bold yellow" if row is largest else None
        table.add_row(row.layer, *norms, f"{row.share:.1%}", ratio, f"{row.sparsity:.1%}", style=style)
    console.print(f"\nLayers, step {result.step}", style="bold cyan")
    console.print(table)

    run = json.dumps(str(result.run_dir))
    console.print("\nFrom here", style="bold cyan")
    for what, how in (
        ("read the run", f'torch_gradmon.load_run({run}).series("gradmon/grad_norm")'),
        ("all values", f"{result.run_dir / 'metrics.jsonl'}, one line a step"),
        ("your model", "monitor = torch_gradmon.watch(model, optimizer)"),
    ):
        console.print(f"{what:14}{how}", markup=False, soft_wrap=True)


def picture(result: DemoResult) -> str:
    console = Console(record=True, width=80, file=io.StringIO(), force_terminal=True, highlight=False)
    report(console, result)
    console.print()  # otherwise the frame cuts the underscores of the last line
    drawn = console.export_svg(title="gradmon demo")
    # some viewers drop leading spaces, so move the text instead
    return re.sub(r'x="([0-9.]+)" y="([0-9.]+)" textLength="([0-9.]+)"([^>]*)>((?:&#160;)+)(?=[^<&])', _moved, drawn)


def _moved(match: re.Match[str]) -> str:
    x, y, length = (float(number) for number in match.groups()[:3])
    shift = 12.2 * match[5].count("&")  # the width of a character in rich's pictures
    return f'x="{x + shift:g}" y="{y:g}" textLength="{length - shift:g}"{match[4]}>'


def _number(value: float, kind: str = "") -> str:
    if math.isnan(value):
        return "-"
    if kind == "update_ratio":
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.0%}" if kind == "clip_fraction" else f"{value:.1f}" if kind == "spike_score" else f"{value:.3f}"


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


def train(model: CharacterGPT, data: Tensor, sizes: Sizes, steps: int, run_dir: Path, seed: int) -> gradmon.ModuleMonitor:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    generator = torch.Generator().manual_seed(seed)

    monitor = gradmon.watch(model, optimizer, run_dir=run_dir)  # the one line that is needed; the rest is for the table
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
    return monitor


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
) -> DemoResult:
    """Train, and print the table of layers, which ``svg`` gets as a picture. ``run_dir`` also gets a ``metrics.jsonl``.

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
        history = train(model, data, sizes, steps, run_dir, seed).get_all_metrics()
    step = max(step for step in history if step % UPDATE_EVERY == 0)
    overhead = sum(values["gradmon/overhead_fraction"] for values in history.values()) / len(history)
    elements = {name: parameter.numel() for name, parameter in model.named_parameters()}
    result = DemoResult(step, history[step], rows(history[step], elements), steps, overhead, run_dir)
    report(console, result)
    if svg is not None:
        Path(svg).write_text(picture(result), encoding="utf-8")
    _diagnose(console, run_dir)
    return result


def _diagnose(console: Console, run_dir: Path) -> None:
    console.print("\nDiagnosis", style="bold cyan")
    console.print(str(gradmon.load_run(run_dir).diagnose()), markup=False, soft_wrap=True)
    try:
        from ..analysis.report.page import write
    except ModuleNotFoundError:
        console.print('\nfor a report with pictures: pip install "torch_gradmon[report]"', markup=False)
        return
    console.print("\nReport", style="bold cyan")
    console.print(f"open in a browser: {write(run_dir)}", markup=False, soft_wrap=True)
