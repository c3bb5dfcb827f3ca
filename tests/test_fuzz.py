"""Sixty random training programs, well spread over what ``tests/fuzz`` can draw; a thousand more are slow tests."""

from __future__ import annotations

import pytest
import torch

from .fuzz import drawing, plan, runner

#: ``python -m tests.fuzz --spread 60`` gives these.
SEEDS = [
    14,
    17,
    61,
    81,
    87,
    136,
    172,
    177,
    207,
    210,
    227,
    262,
    306,
    315,
    319,
    325,
    359,
    360,
    406,
    411,
    456,
    484,
    500,
    508,
    526,
    565,
    583,
    600,
    613,
    638,
    656,
    667,
    671,
    683,
    707,
    711,
    729,
    736,
    747,
    748,
    754,
    765,
    773,
    778,
    831,
    839,
    899,
    906,
    920,
    922,
    937,
    949,
    970,
    987,
    1075,
    1107,
    1118,
    1134,
    1146,
    1171,
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
