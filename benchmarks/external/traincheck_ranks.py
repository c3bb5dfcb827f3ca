"""Silent errors of TrainCheck (OSDI 2025, arXiv 2506.14813) that need two ranks.

``run`` starts the ranks as new processes and calls ``watch`` in each of them, so the watch has to be picklable: a function of
a module, a ``functools.partial`` of one, or an object of a class that a module has. ``rank_body`` is what each process runs; it
also serves a caller that has processes of its own, where gloo is initialised.
"""

from __future__ import annotations

import functools
import gc
import itertools
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from .case import Case, Watch
from .data_traincheck import (
    DIGITS,
    SENTENCE,
    Residual,
    SentenceEncoder,
    Translator,
    digits,
    generator,
    last,
    numbers,
    sentences,
    shuffled,
    translations,
)
from .tensor_parallel import unclipped_copies

WORLD = 2
LOST = 0.01
PAIRS = 16


def _moved(rank: int, watch: Watch, seed: int, healed: bool) -> float:
    """The model was moved to another device and back after DDP had wrapped it, so DDP's hooks are on nodes out of use.

    Another type and back does the same to the nodes as another device. From then on no gradient is exchanged.
    """
    torch.manual_seed(seed)
    source = generator(seed, rank)
    batches = shuffled(*digits(1024, source, side=8), 32, source)
    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    ddp = DistributedDataParallel(model)
    ddp.double()
    ddp.float()
    if healed:
        ddp = DistributedDataParallel(model)
    monitor = watch(ddp, optimizer)
    losses = []
    for _ in range(120):
        images, labels = next(batches)
        loss = functional.cross_entropy(ddp(images), labels)
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


def _wrapped_at_times(rank: int, watch: Watch, seed: int, healed: bool) -> float:
    """A function gave the model at times with DDP around it and at times without, so half of the steps exchange nothing."""
    torch.manual_seed(seed)
    model = SentenceEncoder()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    monitor = watch(ddp, optimizer)
    stream, source = sentences(seed, rank), generator(seed, rank)
    losses = []
    for step in range(120):
        tokens = torch.tensor([numbers(words) for words in itertools.islice(stream, PAIRS)])
        hidden = torch.rand(2, PAIRS, SENTENCE, generator=source) < 0.15
        network = ddp if healed or step % 2 else model
        ours, theirs = network(torch.cat([tokens.masked_fill(mask, 0) for mask in hidden])).chunk(2)
        loss = functional.cross_entropy(10 * ours @ theirs.T, torch.arange(PAIRS))
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


def _exchange(bucket: Any, share: float, source: random.Random) -> torch.futures.Future[Tensor]:
    """DDP's exchange of a bucket, of which a share arrives as zeros on the second rank."""
    lost = source.random() < share and dist.get_rank() == 1
    future = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True).get_future()

    def arrived(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        return done.value()[0].zero_() if lost else done.value()[0]

    exchanged: torch.futures.Future[Tensor] = future.then(arrived)
    return exchanged


def _lost_in_exchange(rank: int, watch: Watch, seed: int, healed: bool) -> float:
    """Copies between two cards lost data without an error: the reduced gradients of some buckets are zeros on one rank."""
    torch.manual_seed(seed)
    batches = translations(16, seed, rank)
    ddp = DistributedDataParallel(Translator(), bucket_cap_mb=0.02)
    luck = random.Random(seed)
    ddp.register_comm_hook(None, lambda _, bucket: _exchange(bucket, 0.0 if healed else LOST, luck))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    monitor = watch(ddp, optimizer)
    losses = []
    for _ in range(150):
        tokens, target = next(batches)
        loss = functional.cross_entropy(ddp(tokens, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


def _lost_by_hand(rank: int, watch: Watch, seed: int, healed: bool) -> float:
    """The same on other cards, in a loop that averages each gradient with ``all_reduce`` itself, without DDP."""
    torch.manual_seed(seed)
    source, luck = generator(seed, rank), random.Random(seed)
    batches = shuffled(*digits(1024, source, side=8), 32, source)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, DIGITS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    monitor = watch(model, optimizer)
    losses = []
    for _ in range(150):
        images, labels = next(batches)
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        for gradient in [parameter.grad for parameter in model.parameters() if parameter.grad is not None]:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
            if rank == 1 and luck.random() < (0.0 if healed else LOST):
                gradient.zero_()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


BODIES: dict[str, Callable[[int, Watch, int, bool], float]] = {
    "pytorch-104336": _moved,
    "x-jxmnop-ddp-out-of-sync": _wrapped_at_times,
    "pytorch-84803": _lost_in_exchange,
    "pytorch-96600": _lost_by_hand,
    "deepspeed-1801": unclipped_copies,
}


def rank_body(name: str, rank: int, world: int, watch: Watch, seed: int, healed: bool) -> float:
    """The training ``name`` on one of ``world`` ranks, to be called where gloo is initialised; the mean of its last losses."""
    assert world == WORLD == dist.get_world_size(), f"these trainings are for {WORLD} ranks"
    return BODIES[name](rank, watch, seed, healed)


def _process(name: str, rank: int, store: str, watch: Watch, seed: int, healed: bool, answer: str) -> None:
    """A rank: joins the others, trains, and leaves its loss in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD)
    try:
        Path(f"{answer}{rank}").write_text(repr(rank_body(name, rank, WORLD, watch, seed, healed)))
        dist.barrier()
    finally:
        gc.collect()  # DDP's reducer has to be gone before the group that it uses
        dist.destroy_process_group()


def run(name: str, watch: Watch, seed: int, healed: bool) -> float:
    """Two ranks of the training ``name``, each with a monitor of the picklable ``watch``; the loss of the first."""
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answer = f"{folder}/loss"
        processes = [
            context.Process(target=_process, args=(name, rank, f"{folder}/store", watch, seed, healed, answer))
            for rank in range(WORLD)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if not all(Path(f"{answer}{rank}").exists() for rank in range(WORLD)):
            raise RuntimeError(f"{name}: the ranks ended with {[process.exitcode for process in processes]}")
        return float(Path(f"{answer}0").read_text())


def _case(name: str, source: str, rules: tuple[str, ...], bug: str, fix: str, held_back: bool = False) -> Case:
    return Case(name, "traincheck", source, rules, functools.partial(run, name), bug, fix, held_back)


CASES: list[Case] = [
    _case(
        "pytorch-104336",
        "https://github.com/pytorch/pytorch/issues/104336",
        ("ranks-not-synchronised",),
        "the model is converted and converted back after DDP has wrapped it",
        "wrap it again afterwards",
    ),
    _case(
        "x-jxmnop-ddp-out-of-sync",
        "https://x.com/jxmnop/status/1778520637193240892",
        ("ranks-not-synchronised", "ranks-diverged"),
        "every second step calls the model without DDP around it",
        "always call the wrapped model",
    ),
    _case(
        "pytorch-84803",
        "https://github.com/pytorch/pytorch/issues/84803",
        ("ranks-not-synchronised", "ranks-diverged"),
        "1 % of the reduced buckets arrive as zeros on one rank",
        "all arrive whole",
    ),
    _case(
        "pytorch-96600",
        "https://github.com/pytorch/pytorch/issues/96600",
        ("ranks-not-synchronised", "ranks-diverged"),
        "1 % of the reduced gradients arrive as zeros on one rank",
        "all arrive whole",
    ),
    _case(
        "deepspeed-1801",
        "https://github.com/microsoft/DeepSpeed/pull/1801",
        ("ranks-not-synchronised", "ranks-diverged"),
        "the clip leaves out the copies of replicated parameters on all ranks but the first",
        "it scales all gradients of each rank",
    ),
]
