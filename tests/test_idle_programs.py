"""Two dozen random programs whose idle steps are counted; three hundred more are slow tests."""

from __future__ import annotations

from typing import Any

import pytest

from . import idle_programs

pytestmark = pytest.mark.thorough

SEEDS = range(24)
CHUNK = 30


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_program_shows_the_same_where_idle_steps_are_counted(seed: int) -> None:
    found, _ = idle_programs.differences(idle_programs.draw(seed))
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1300, CHUNK))
def test_more_programs_show_the_same(first: int) -> None:
    failed = {
        seed: found for seed in range(first, first + CHUNK) if (found := idle_programs.differences(idle_programs.draw(seed))[0])
    }
    assert not failed, "\n".join(f"seed {seed}\n    " + "\n    ".join(found) for seed, found in failed.items())


def test_programs_have_steps_that_are_only_counted_and_every_kind_of_move() -> None:
    programs = [idle_programs.draw(seed) for seed in range(300)]
    assert sum(idle_programs.run(program)[1] for program in programs[:8]) > 50
    assert not {move for kind in idle_programs.ODD.values() for move, *_ in kind} - {
        move for p in programs for move, *_ in p.moves
    }
    assert idle_programs.draw(3) == idle_programs.draw(3) != idle_programs.draw(4)


def test_a_step_that_is_counted_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = idle_programs.StepProgram.idle_step_ended

    def step_ended(self: idle_programs.StepProgram, *arguments: Any) -> bool:
        self._state.attempts += 1
        return original(self, *arguments)

    monkeypatch.setattr(idle_programs.StepProgram, "idle_step_ended", step_ended)
    assert any(idle_programs.differences(idle_programs.draw(seed))[0] for seed in range(8))
