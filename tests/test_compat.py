"""What differs between releases of torch: the names of each are understood."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

import torch_gradmon as gradmon
from torch_gradmon.capture import module_source
from torch_gradmon.core import torch_modes
from torch_gradmon.step import exchange


def test_groups_of_fsdp2_by_the_names_of_each_release() -> None:
    assert torch_modes.fsdp_param_groups(SimpleNamespace(_fsdp_param_groups=["a", "b"], _fsdp_param_group="a")) == ["a", "b"]
    assert torch_modes.fsdp_param_groups(SimpleNamespace(_fsdp_param_groups=[], _fsdp_param_group=None)) == []
    assert torch_modes.fsdp_param_groups(SimpleNamespace(_fsdp_param_group="a")) == ["a"]
    assert torch_modes.fsdp_param_groups(SimpleNamespace(_fsdp_param_group=None)) == []


def test_where_export_cannot_be_told_from_compilation_it_may_be_export(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_modes, "TELLS_EXPORT", False)
    assert torch_modes.is_exporting()


@pytest.mark.skipif(not hasattr(torch.compiler, "is_exporting"), reason="this torch cannot tell")
def test_elsewhere_it_is_what_torch_says() -> None:
    assert torch_modes.is_exporting() is torch.compiler.is_exporting() is False


@pytest.mark.parametrize("connect", [exchange.second_connection, exchange.connected_again])
def test_a_second_connection_is_to_the_same_keys_and_not_to_those_of_another_world(
    connect: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "get_world_size", lambda: 1)
    server = TCPStore("localhost", 0, 1, is_master=True, wait_for_workers=False)
    for store in (server, FileStore(str(tmp_path / "store"), 1)):
        worlds = [PrefixStore("default_pg", PrefixStore(name, store)) for name in ("one", "other")]
        first, again, other = connect(worlds[0]), connect(worlds[0]), connect(worlds[1])
        first.set("key", "value")
        assert again.get("key") == b"value"
        assert not other.check(["key"])


def test_no_second_connection_to_a_store_of_another_kind() -> None:
    with pytest.raises(ValueError, match="a HashStore cannot be connected to again"):
        exchange.connected_again(PrefixStore("default_pg", HashStore()))


class Part(nn.Sequential):  # the compiler of 2.7 skips the forward of torch's own class
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[1](self[0](x))


def test_parts_compiled_in_place_are_named_where_graphs_have_no_hooks_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (torch_modes, module_source):
        monkeypatch.setattr(module, "TELLS_EXPORT", False)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), Part(nn.Linear(4, 4), nn.GELU()), nn.Linear(4, 1))
    model[1].compile(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer)
    monitor.add_activation_metric("rms")
    with pytest.warns(gradmon.GradmonWarning, match=r"some activations are missing: inside torch\.compile they need torch 2\.7"):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            monitor.get_step_metrics()
    why = {key: reason for key, reason in monitor.missing().items() if key.startswith("activation/")}
    why.pop("activation/1/rms", None)  # newer releases call the hooks on the part itself outside of the graph
    assert why == {f"activation/{name}/rms": module_source.OLD_RELEASE for name in ("1.0", "1.1")}
    monitor.detach()
