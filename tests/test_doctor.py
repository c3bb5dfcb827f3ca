"""``gradmon doctor`` says what is in use, and fails where numbers are wrong or nothing is measured."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

import pytest
import torch

from torch_gradmon.cli.commands import doctor
from torch_gradmon.cli.main import main
from torch_gradmon.statistics import cpp, kernel_build


def facts(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_it_names_versions_kernels_and_packages(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = facts(capsys)
    assert code == 0
    assert found["torch"].startswith(torch.__version__)
    assert found["difference"] < 1e-6
    assert {"Python", "CPU", "trackers", "trainers", "reports", "terminal", "browser"} <= found.keys()
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in printed] == [name for name in found if name not in ("difference", "disabled")]


@pytest.mark.parametrize(
    ("kernel", "compiler", "expected"),
    [
        ((object(), "AVX2"), "g++", "the C++ kernel that came with the package, built for AVX2"),
        ((None, "no kernel"), "g++", "torch's operations: no kernel; GRADMON_KERNEL=build compiles it with g++"),
        ((None, "no kernel"), None, "torch's operations: no kernel; no C++ compiler was found"),
    ],
)
def test_it_says_what_measures_on_the_cpu_and_why(
    kernel: tuple[Any, str], compiler: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def named() -> list[str]:
        if compiler is None:
            raise RuntimeError("no C++ compiler was found")
        return [compiler]

    monkeypatch.setattr(cpp, "found", lambda: kernel)
    monkeypatch.setattr(kernel_build, "compiler", named)
    assert doctor._on_cpu() == expected


def test_wrong_numbers_and_a_switched_off_monitor_are_failures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRADMON_DISABLE", "1")
    code, found = facts(capsys)
    assert (code, found["disabled"]) == (1, True)
    assert "GRADMON_DISABLE" in found["torch_gradmon"]
    monkeypatch.delenv("GRADMON_DISABLE")
    monkeypatch.setattr(doctor.Statistics, "measure", lambda self, tensors, columns: torch.ones(1, 8, dtype=torch.float64))
    code, found = facts(capsys)
    assert code == 1
    assert found["difference"] > 0.1


def test_what_is_not_installed_is_named_with_its_extra() -> None:
    assert doctor._installed(("no-such-package",), "plot") == 'not installed: no-such-package: pip install "torch_gradmon[plot]"'
    assert doctor._installed(("torch",), None) == f"torch {version('torch')}"
