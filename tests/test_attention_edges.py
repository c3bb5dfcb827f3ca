"""Recorded attention at the edges, each as a small program that once changed the training, gave a wrong number or no reason."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_gradmon import ModuleMonitor, monitor_scaled_dot_product_attention
from torch_gradmon.core import torch_modes

modes = torch._C._len_torch_function_stack
SDPA = [F.scaled_dot_product_attention]
METRICS = ("entropy", "max_logit")


@pytest.fixture(autouse=True)
def clean():
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    for home in (F, torch._C._nn):
        home.scaled_dot_product_attention = SDPA[0]
    while modes():
        torch._C._pop_torch_function_stack()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def split(self, x):
        return self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)

    def forward(self, x):
        return F.scaled_dot_product_attention(*self.split(x)).transpose(1, 2).flatten(-2)


class Multihead(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attn(x, x, x, need_weights=False)[0]


def watched(model, **options):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    monitor = ModuleMonitor(model, **options)
    for metric in METRICS:
        monitor.add_attention_metric(metric)
    return monitor.attach(optimizer), optimizer


def step(model, optimizer, *args):
    model(*args).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def x():
    return torch.randn(3, 5, 8)


# --- training is changed or stopped ----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_frozen_encoder_in_eval_mode_takes_another_path():
    """torch.overrides.has_torch_function() is True under any mode, so torch's fast path is not taken: other outputs."""

    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.backbone = nn.TransformerEncoder(layer, 2).requires_grad_(False).eval()
            self.head = nn.Linear(8, 1)

        def forward(self, x, pad):
            return self.head(self.backbone(x, src_key_padding_mask=pad))

    model, inputs = Frozen(), (x(), torch.arange(5) >= torch.tensor([5, 3, 2])[:, None])
    plain = model(*inputs)
    kept = watched(model)
    difference = (model(*inputs) - plain).abs().max().item()
    assert (difference, len(kept)) == (0, 2)  # 1.3 where the padding is, 1e-7 elsewhere


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_function_that_was_compiled_with_fullgraph_raises_in_training():
    """The compiler traces into the mode; without fullgraph it breaks the graph."""
    attend = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), backend="aot_eager", fullgraph=True)

    class Compiled(Attention):
        def forward(self, x):
            return attend(*self.split(x)).transpose(1, 2).flatten(-2)

    model = Compiled()
    _monitor, optimizer = watched(model)
    step(model, optimizer, x())


def test_a_part_that_was_compiled_after_attach_raises_in_training():
    model = nn.Sequential(Attention(), nn.Linear(8, 8))
    _monitor, optimizer = watched(model)
    model[0].compile(backend="aot_eager", fullgraph=True)
    step(model, optimizer, x())


def test_a_replaced_scaled_dot_product_attention_is_bypassed_in_multihead_attention(monkeypatch):
    """As SageAttention's users do: F.scaled_dot_product_attention = sageattn."""
    model, inputs, original = Multihead(), x(), F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: 2 * original(*args, **kwargs))
    plain = model(inputs)
    kept = watched(model)
    same = torch.equal(model(inputs), plain)
    assert (same, len(kept)) == (True, 2)


class Interrupted(Attention):
    def forward(self, x):
        super().forward(x)
        raise KeyboardInterrupt


def test_after_a_keyboard_interrupt_the_mode_of_somebody_else_stays():
    """always_call hooks are not called for a BaseException; the context of the user then pops our mode for its own."""
    model, inputs = Interrupted(), x()
    kept = watched(model)
    with pytest.raises(KeyboardInterrupt), torch.device("meta"):
        model(inputs)
    assert (torch.empty(1).device.type, len(kept)) == ("cpu", 2)


def test_after_a_keyboard_interrupt_evaluation_is_recorded(monkeypatch):
    """As in a notebook, where one goes on after an interrupt."""
    from torch_gradmon.capture import attention

    gc.collect()  # monitors of earlier tests may still record
    seen, rows = [], attention.attention_rows
    monkeypatch.setattr(attention, "attention_rows", lambda **arguments: seen.append(1) or rows(**arguments))
    model = Interrupted()
    kept = watched(model)
    with pytest.raises(KeyboardInterrupt):
        model(x())
    with pytest.raises(KeyboardInterrupt):
        model.eval()(x())
    assert (len(seen), len(kept)) == (1, 2)


# --- numbers that are wrong, or under a wrong name -------------------------------------------------------------------------------


def test_attention_of_another_model_counts_for_the_module_that_called_it():
    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.teacher = nn.Linear(8, 8), [Attention()]

        def forward(self, x):
            with torch.no_grad():
                target = self.teacher[0](x)
            return self.head(x) - target

    model = Student()
    monitor, optimizer = watched(model)
    step(model, optimizer, x())
    assert monitor.get_step_metrics() == {}


def test_attention_of_an_excluded_module_counts_for_its_parent():
    model = nn.Sequential(Attention(), nn.Linear(8, 8))
    monitor, optimizer = watched(model, excluded_modules_regex="^0$")
    step(model, optimizer, x())
    assert monitor.get_step_metrics() == {}


def test_multihead_attention_is_not_seen_under_a_mode_of_somebody_else():
    """The twin of multi_head_attention_forward asks has_torch_function() and hands itself on to the outer mode, untwinned."""
    model = Multihead()
    monitor, optimizer = watched(model)
    with torch.device("cpu"):
        step(model, optimizer, x())
    assert "attention_entropy/attn/mean" in monitor.get_step_metrics()


def test_the_helper_is_silent_where_nothing_else_speaks():
    """A module that spells attention out and tells the helper, beside add_attention_metric."""

    class Spelt(Attention):
        def forward(self, x):
            q, k, v = self.split(x)
            monitor_scaled_dot_product_attention(self.monitor(), self, q, k, v)
            return (torch.softmax(q @ k.transpose(-2, -1) / 2, -1) @ v).transpose(1, 2).flatten(-2)

    model = nn.Sequential(Spelt())
    monitor, optimizer = watched(model)
    model[0].monitor = lambda: monitor
    step(model, optimizer, x())
    assert "attention_entropy/0/mean" in monitor.get_step_metrics()


def test_heads_of_one_metric_show_those_of_all():
    model = Attention()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = ModuleMonitor(model)
    monitor.add_attention_metric("entropy", heads=True)
    monitor.add_attention_metric("max_logit")
    monitor.attach(optimizer)
    step(model, optimizer, x())
    assert not [key for key in monitor.get_step_metrics() if key.startswith("attention_max_logit") and "head_" in key]


def test_the_time_of_recording_is_not_counted(monkeypatch):
    """Neither overhead_fraction nor max_overhead knows of what costs most. A clock that only attention_rows moves."""
    from torch_gradmon.capture import attention
    from torch_gradmon.core import fence

    now = [0.0]
    rows = attention.attention_rows

    def slow(**arguments):
        now[0] += 10
        return rows(**arguments)

    monkeypatch.setattr(fence.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(attention, "attention_rows", slow)
    model = Attention()
    monitor, optimizer = watched(model)
    step(model, optimizer, x())
    assert monitor._runtime.fence.spent() == 10


def test_under_autocast_it_is_not_what_the_call_attends_with():
    """With query and key norms, or rotations in float32, the call is given float32, which autocast casts inside of it."""

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Parameter(torch.ones(()))

        def forward(self, q, k):
            return F.scaled_dot_product_attention(q * self.one.to(q.dtype), k, k)

    query, key = 3 * torch.randn(1, 2, 6, 64), 3 * torch.randn(1, 2, 6, 64)
    found = []
    for cast in (False, True):
        model = Normed()
        monitor, optimizer = watched(model)
        given = (query.bfloat16(), key.bfloat16()) if cast else (query, key)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(*given)
        assert output.dtype == torch.bfloat16
        output.float().sum().backward()
        optimizer.step()
        found.append(monitor.get_step_metrics())
    assert found[0] == pytest.approx(found[1], rel=1e-4)


# --- reasons ---------------------------------------------------------------------------------------------------------------------


def test_a_refused_tensor_is_not_the_reason():
    with torch.device("meta"):
        model = Attention()
        monitor, optimizer = watched(model)
        step(model, optimizer, x())
    assert {"meta" in reason for reason in monitor.missing().values()} == {True}  # "the model made no call ..."


def test_a_failure_to_measure_is_not_the_reason():
    class Flat(Attention):
        def forward(self, x):
            y = self.qkv(x[0])
            return F.scaled_dot_product_attention(y, y, y)

    model = Flat()
    monitor, optimizer = watched(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(model, optimizer, x())
    assert not any("no call" in reason for reason in monitor.missing().values())


@pytest.mark.skipif(not torch_modes.TELLS_EXPORT, reason="before torch 2.7 no values in compiled graphs")
def test_compiled_after_attach_by_its_wrapper_the_reason_is_not_compilation():
    """torch.compile(model) keeps its wrapper to itself: is_compiled(model) is False."""
    model = nn.Sequential(Attention())
    monitor, optimizer = watched(model)
    step(torch.compile(model, backend="aot_eager"), optimizer, x())
    assert all("compiled" in reason for reason in monitor.missing().values())


def test_no_reference_is_not_the_reason():
    """ModuleSource.begin puts it under (source, ""), and measure_pairs puts another one under each path."""
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = ModuleMonitor(model).attach(optimizer)
    monitor.add_activation_difference_metric("norm")
    step(model, optimizer, x())
    assert {"no reference module is set" in reason for reason in monitor.missing().values()} == {True}


def test_a_reference_with_reentrant_checkpoints_warns_of_gradients_that_nobody_wants():
    """Where warnings are errors, it is off, and GradmonWarning is raised in training."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.part = nn.Embedding(5, 4), nn.Linear(4, 4)

        def forward(self, tokens):
            return checkpoint(self.part, self.embed(tokens), use_reentrant=True)

    model = Checkpointed()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = ModuleMonitor(model).attach(optimizer)
    monitor.set_reference_module("init")
    monitor.add_activation_difference_metric("norm")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step(model, optimizer, torch.arange(5))
    assert [str(warning.message) for warning in said] == []


def test_a_disabled_scaler_is_noticed():
    """By the way: the common GradScaler(enabled=use_amp). Gradients before clipping are missing in step 0, with a warning."""
    model = nn.Linear(8, 8)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", enabled=False)
    monitor = ModuleMonitor(model).attach(optimizer)
    monitor.add_gradient_metric("norm")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        scaler.scale(model(x()).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [str(warning.message) for warning in said] == []
    assert monitor.missing() == {}


# --- since the mode became a stand-in --------------------------------------------------------------------------------------------


class Doubles(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return 2 * result if function is SDPA[0] else result


def test_a_mode_of_somebody_else_sees_the_stand_in_and_not_the_function():
    """torch looks up by name in torch._C._nn what it hands to modes and subclasses; their tables miss it: training is changed."""
    model, inputs = Attention(), x()
    with Doubles():
        plain = model(inputs)
        kept = watched(model)
        same = torch.equal(model(inputs), plain)
    assert (same, len(kept)) == (True, 2)


def test_under_a_device_context_every_call_is_measured_twice(monkeypatch):
    """The mode calls the stand-in that it was handed."""
    from torch_gradmon.capture import attention

    seen, rows = [], attention.attention_rows
    monkeypatch.setattr(attention, "attention_rows", lambda **arguments: seen.append(1) or rows(**arguments))
    model = Attention()
    _monitor, optimizer = watched(model)
    with torch.device("cpu"):
        step(model, optimizer, x())
    assert len(seen) == 1


def test_two_monitors_that_leave_in_the_order_in_which_they_came_recurse():
    """The second one to leave puts back the stand-in of the first, which then takes itself for the original."""
    model = Attention()
    first, optimizer = watched(model)
    kept = watched(model)
    step(model, optimizer, x())
    first.add_activation_metric("norm")  # its hook behind the forward moves behind that of the other
    for _ in range(3):
        step(model, optimizer, x())
    assert F.scaled_dot_product_attention is SDPA[0], kept


def test_who_replaces_the_function_while_a_forward_runs_recurses_in_the_next(monkeypatch):
    """A library that is set up in the first forward keeps the stand-in, whose original is looked up late and is that library by then."""

    class Lazy(Attention):
        def forward(self, x):
            if F.scaled_dot_product_attention in (SDPA[0], self.before):
                kept = F.scaled_dot_product_attention
                F.scaled_dot_product_attention = lambda *args, **kwargs: kept(*args, **kwargs)
            self.before = None
            return super().forward(x)

    model = Lazy()
    _monitor, optimizer = watched(model)
    model.before = None
    hook = model.register_forward_pre_hook(lambda module, _: setattr(module, "before", F.scaled_dot_product_attention))
    step(model, optimizer, x())
    hook.remove()
    step(model, optimizer, x())


def test_a_function_that_an_object_holds_is_not_seen_and_the_reason_says_there_was_no_call():
    """self.attend = F.scaled_dot_product_attention, a default argument, a partial: perhaps only the reason can be had."""

    class Holds(Attention):
        def __init__(self):
            super().__init__()
            self.attend = F.scaled_dot_product_attention

        def forward(self, x):
            return self.attend(*self.split(x)).transpose(1, 2).flatten(-2)

    model = Holds()
    monitor, optimizer = watched(model)
    step(model, optimizer, x())
    assert monitor.get_step_metrics() or not any("made no call" in reason for reason in monitor.missing().values())
