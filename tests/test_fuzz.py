"""Sixty random training programs, well spread over what ``tests/fuzz`` can draw; a thousand more are slow tests."""

from __future__ import annotations

import pytest
import torch

from .fuzz import drawing, plan, runner

#: ``python -m tests.fuzz --spread 60`` gives these.
SEEDS = [
    61,
    63,
    151,
    157,
    159,
    172,
    177,
    199,
    216,
    227,
    235,
    254,
    262,
    324,
    325,
    342,
    372,
    380,
    385,
    411,
    426,
    499,
    507,
    527,
    541,
    565,
    600,
    629,
    638,
    683,
    692,
    720,
    729,
    738,
    748,
    764,
    765,
    778,
    792,
    884,
    893,
    915,
    920,
    922,
    930,
    937,
    965,
    970,
    987,
    1079,
    1085,
    1090,
    1103,
    1108,
    1116,
    1134,
    1146,
    1187,
    1195,
    1196,
]
#: In every so-manyth program leaks are looked for as well, which takes a collection of garbage.
LEAKS = 6
CHUNK, CHUNKS = 50, 20


@pytest.fixture(autouse=True)
def _its_own_defaults() -> object:
    """Programs switch things on, and off again."""
    state = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.is_autocast_enabled("cpu")
    yield
    assert state == (torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.is_autocast_enabled("cpu"))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_program(seed: int) -> None:
    p = drawing.draw(seed)
    found = runner.problems(p, leaks=SEEDS.index(seed) % LEAKS == 0)
    assert not found, "\n".join([plan.describe(p), *found])


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_thousand_random_programs(chunk: int) -> None:
    failed = {}
    for seed in range(10_000 + chunk * CHUNK, 10_000 + (chunk + 1) * CHUNK):
        if found := runner.problems(drawing.draw(seed), leaks=seed % LEAKS == 0):
            failed[seed] = found
    assert not failed, "\n".join(f"seed {seed}: {drawing.draw(seed)}\n  " + "\n  ".join(found) for seed, found in failed.items())


def test_the_programs_have_every_choice() -> None:
    had = {part for seed in SEEDS for part in drawing.choices(drawing.draw(seed))}
    none = set() if hasattr(torch.optim, "Muon") else {("optimizer", "muon")}
    assert not drawing.all_choices() - had - none, "python -m tests.fuzz --spread 60 gives other seeds"


def test_a_seed_gives_one_program() -> None:
    assert drawing.draw(3) == drawing.draw(3) != drawing.draw(4)
    assert "forward" in plan.describe(drawing.draw(3))
