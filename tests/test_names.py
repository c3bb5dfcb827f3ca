"""Names: canonical ones, and keys that can be taken apart again."""

from __future__ import annotations

import string

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.watching import watch_with
from torch_gradmon import ModuleMonitor
from torch_gradmon.core.keys import (
    KEY_ORDERS,
    NAME_SOURCES,
    ROOT,
    SUMMARY,
    TENSOR_SOURCES,
    WRAPPERS,
    Key,
    blocks_of,
    canonical_name,
    canonical_names,
    format_key,
    parse_key,
)

# a tensor's name may hold a slash: format_module_name_fn and monitor_activations take any name
_PART = st.text(alphabet=string.ascii_letters + string.digits + "_-[]. ()é", min_size=1, max_size=8)
_NAME = st.lists(_PART, min_size=1, max_size=4).map(".".join)
_PREFIX = st.sampled_from(["", "train/", "run 1/", "gradient/", "x"])
_KEYS = st.one_of(
    st.builds(Key, st.sampled_from(TENSOR_SOURCES), _NAME, _PART),
    st.builds(lambda source, name: Key(source, name, ""), st.sampled_from(NAME_SOURCES), _NAME),
    st.builds(lambda metric: Key(SUMMARY, "", metric), _PART),
    st.builds(lambda name: Key("", name, ""), _NAME),
)


@given(key=_KEYS, style=st.sampled_from(KEY_ORDERS), prefix=_PREFIX)
def test_a_key_comes_back_from_its_text(key: Key, style: str, prefix: str) -> None:
    assert parse_key(format_key(key, style, prefix), style, prefix) == key


@given(
    source=st.sampled_from(TENSOR_SOURCES),
    name=st.lists(_NAME, min_size=2, max_size=3).map("/".join),
    metric=_PART,
    prefix=_PREFIX,
)
@pytest.mark.parametrize("style", KEY_ORDERS)
def test_a_name_with_slashes_comes_back_too(source: str, name: str, metric: str, prefix: str, style: str) -> None:
    key = Key(source, name, metric)
    assert parse_key(format_key(key, style, prefix), style, prefix) == key


@given(first=_KEYS, second=_KEYS, style=st.sampled_from(KEY_ORDERS))
def test_two_keys_never_share_a_text(first: Key, second: Key, style: str) -> None:
    assert (format_key(first, style) == format_key(second, style)) == (first == second)


@given(key=st.builds(Key, st.sampled_from(TENSOR_SOURCES), _NAME, _PART))
def test_metric_first_has_one_slash_so_that_a_dashboard_makes_one_section_per_metric(key: Key) -> None:
    assert format_key(key, "metric_first").count("/") == 1
    assert format_key(key, "metric_first").split("/") == [f"{key.source}_{key.metric}", key.name]
    assert format_key(key, "name_first").split("/") == [key.source, key.name, key.metric]


@pytest.mark.parametrize(
    ("raw", "canonical"),
    [
        ("module.h.0.weight", "h.0.weight"),
        ("_orig_mod.h.0.weight", "h.0.weight"),
        ("module._orig_mod._fsdp_wrapped_module.h.0._checkpoint_wrapped_module.weight", "h.0.weight"),
        ("_forward_module.module.fc.bias", "fc.bias"),
        ("my_module.fc.bias", "my_module.fc.bias"),
        ("modules.fc.bias", "modules.fc.bias"),
        ("", ROOT),
        ("module", ROOT),
        ("module._orig_mod", ROOT),
    ],
)
def test_canonical_names_lose_what_wrappers_add(raw: str, canonical: str) -> None:
    assert canonical_name(raw) == canonical


@given(st.lists(st.lists(st.sampled_from(["a", "b", "0", *sorted(WRAPPERS)]), min_size=1, max_size=4).map(".".join), unique=True))
def test_canonical_names_are_as_many_as_the_names(names: list[str]) -> None:
    canonical = canonical_names(names)
    assert list(canonical) == names
    assert len(set(canonical.values())) == len(names)


def test_names_that_would_fall_together_stay_as_they_are() -> None:
    assert canonical_names(["module.a.weight", "a.weight", "module.b"]) == {
        "module.a.weight": "module.a.weight",
        "a.weight": "a.weight",
        "module.b": "b",
    }


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("h.0.attn.weight", "h.0"),
        ("a.b.11.c.2.weight", "a.b.11"),
        ("lm_head.weight", "lm_head"),
        ("weight", "weight"),
        ("layers.3", "layers"),
    ],
)
def test_a_block_is_the_path_up_to_the_first_number(name: str, block: str) -> None:
    assert blocks_of([name, "head.weight"])[name] == block


@pytest.mark.parametrize(
    ("names", "found"),
    [
        # a wrapper around a model with and without numbered blocks, which has a parameter of its own
        (["m.wte.weight", "m.h.0.w", "m.h.1.w", "m.norm.weight"], ["m.wte", "m.h.0", "m.h.1", "m.norm"]),
        (["m.n.a.weight", "m.n.a.bias", "m.n.b.weight", "m.n.token"], ["m.n.a", "m.n.a", "m.n.b", "m.n.token"]),
        # a module that holds blocks, beside one that does not
        (
            ["bert.emb.w", "bert.enc.0.w", "bert.pool.d.w", "head.a.w", "head.b.w"],
            ["bert.emb", "bert.enc.0", "bert.pool", "head", "head"],
        ),
        (["fc.weight", "fc.bias"], ["fc", "fc"]),
        (["m.fc.weight", "m.fc.bias"], ["m.fc", "m.fc"]),
        ([], []),
    ],
)
def test_what_wraps_or_holds_blocks_is_opened(names: list[str], found: list[str]) -> None:
    assert list(blocks_of(names).values()) == found


class _Wrapped(nn.Module):
    """What DDP and FSDP1 do to names, without a process group."""

    def __init__(self, attribute: str, module: nn.Module) -> None:
        super().__init__()
        self.add_module(attribute, module)
        self.attribute = attribute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.attribute)(x)


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def _compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda m: m, id="bare"),
        pytest.param(_compiled, id="compile"),
        pytest.param(lambda m: nn.DataParallel(m), id="DataParallel"),
        *[pytest.param(lambda m, a=a: _Wrapped(a, m), id=a) for a in sorted(WRAPPERS)],
        pytest.param(lambda m: _Wrapped("module", _compiled(m)), id="DDP of compile"),
        pytest.param(lambda m: _compiled(_Wrapped("module", m)), id="compile of DDP"),
    ],
)
def test_keys_and_patterns_know_the_names_of_the_bare_model(wrap) -> None:
    model = _net()
    wrapped = wrap(model)
    monitor = ModuleMonitor(wrapped, on_metric_error="raise")
    monitor.add_parameter_metric("norm", metric_regex=r"^0\.weight$")
    monitor.begin_step(0)
    monitor.monitor_parameters()
    monitor.end_step()
    expected = model[0].weight.detach().double().norm().item()
    assert monitor.get_step_metrics() == {"parameter/0.weight/norm": pytest.approx(expected, rel=1e-6)}


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({}, "gradient/0.weight/norm"),
        ({"prefix": "train/"}, "train/gradient/0.weight/norm"),
        ({"key_order": "metric_first"}, "gradient_norm/0.weight"),
        ({"key_order": "metric_first", "prefix": "a/"}, "a/gradient_norm/0.weight"),
        ({"format_module_name_fn": lambda name: f"net.{name}"}, "gradient/net.0.weight/norm"),
    ],
)
def test_a_monitor_names_its_keys_as_it_was_told(options: dict, key: str) -> None:
    model = _net()
    monitor = ModuleMonitor(model, on_metric_error="raise", **options)
    monitor.add_gradient_metric("norm", metric_regex=r"0\.weight$", stages="after_clip")
    monitor.begin_step(3)
    model(torch.ones(1, 2)).sum().backward()
    monitor.monitor_gradients()
    monitor.end_step()
    assert list(monitor.get_step_metrics()) == [key]


class _Name(str):
    """Counts how often it is compared with another name."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        _Name.compared += 1
        return str.__eq__(self, other)


def _comparisons(count: int) -> int:
    """How often names are compared in a run over so many tensors, of which half are frozen and have no values."""
    tensors = nn.ParameterList([nn.Parameter(torch.ones(2), requires_grad=place % 2 == 0) for place in range(count)])
    optimizer = torch.optim.SGD(tensors.parameters(), lr=0.1)
    monitor = watch_with(tensors, optimizer, preset="full", layers="all", format_module_name_fn=_Name)
    monitor.add_gradient_metric("sum", lambda gradient: gradient.sum())
    _Name.compared = 0
    for _ in range(2):
        torch.stack(list(tensors)).sum().backward()
        nn.utils.clip_grad_norm_(tensors.parameters(), 1.0)
        optimizer.step()
    assert monitor.get_step_metrics()
    assert len(monitor.missing()) > count
    return _Name.compared


def test_names_are_compared_no_more_often_than_there_are_tensors() -> None:
    few, many = _comparisons(100), _comparisons(200)
    assert many < 3 * max(few, 1000)  # where a list of names is searched for each name: 20,000 and 80,000 for one search
