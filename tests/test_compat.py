"""What differs between releases of torch: the names of each are understood."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from torch_gradmon.core import compat


def test_groups_of_fsdp2_by_the_names_of_each_release() -> None:
    assert compat.fsdp_param_groups(SimpleNamespace(_fsdp_param_groups=["a", "b"], _fsdp_param_group="a")) == ["a", "b"]
    assert compat.fsdp_param_groups(SimpleNamespace(_fsdp_param_groups=[], _fsdp_param_group=None)) == []
    assert compat.fsdp_param_groups(SimpleNamespace(_fsdp_param_group="a")) == ["a"]
    assert compat.fsdp_param_groups(SimpleNamespace(_fsdp_param_group=None)) == []


def test_where_export_cannot_be_told_from_compilation_it_may_be_export(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "TELLS_EXPORT", False)
    assert compat.is_exporting()


@pytest.mark.skipif(not hasattr(torch.compiler, "is_exporting"), reason="this torch cannot tell")
def test_elsewhere_it_is_what_torch_says() -> None:
    assert compat.is_exporting() is torch.compiler.is_exporting() is False
