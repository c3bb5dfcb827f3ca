"""Several trainings in threads of one process: each is measured as it is alone, and none disturbs the others."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.test_spying import CallObserver
from tests.watching import watch_with
from torch_gradmon.capture import measurer, reference
from torch_gradmon.capture.attention import ATTENTION_PATCH
from torch_gradmon.core.torch_modes import SharedContext
from torch_gradmon.plugins.setup_check import Followed, MadeInForward

#: In a list, where no replacement of the function reaches.
ORIGINAL = [F.scaled_dot_product_attention]
STEPS = 12


class Attention(nn.Module):
    """Causal, of two heads; ``pause`` is called within its forward."""

    def __init__(self, pause: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.project, self.pause = nn.Linear(8, 24), pause

    def forward(self, x: Tensor) -> Tensor:
        self.pause()
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        result = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        self.pause()
        return result.transpose(1, 2).flatten(2)


def trained(seed: int, pause: Callable[[], None] = lambda: None, **options: Any) -> tuple[list[dict[str, float]], list[Tensor]]:
    """The values of all steps, without the time, and the parameters at the end."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), Attention(pause), nn.Linear(8, 1))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    optimizer = torch.optim.SGD(
        model.parameters(), 1e-2, momentum=0.9
    )  # Adam itself computes otherwise while any thread compiles
    monitor = watch_with(model, optimizer, on_spike=None, on_metric_error="raise", **options)
    for metric in ("entropy", "first_key"):
        monitor.add_attention_metric(metric, heads=True)
    monitor.add_activation_metric("kurtosis")
    monitor.add_parameter_metric("spectral_norm")
    steps = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(2, 5, 4, generator=generator)).square().mean().backward()
        optimizer.step()
        steps.append({key: value for key, value in monitor.get_step_metrics().items() if key != "gradmon/overhead_fraction"})
    monitor.detach()
    return steps, [parameter.detach() for parameter in model.parameters()]


def at_once(*programs: Callable[[], object]) -> None:
    """Run each in a thread of its own; the first error of any is raised."""
    errors: list[BaseException] = []

    def run(program: Callable[[], object]) -> None:
        try:
            program()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(program,), daemon=True) for program in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns often."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def equal(one: tuple[list[dict[str, float]], list[Tensor]], other: tuple[list[dict[str, float]], list[Tensor]]) -> None:
    """The same values in each step, and the same bits."""
    assert one[0] == other[0]
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


# --- whole trainings ---------------------------------------------------------------------------------------------------------------


def test_threads_measure_attention_in_overlapping_forwards() -> None:
    alone = [trained(seed) for seed in range(2)]
    both, found, depths = threading.Barrier(2), {}, []

    def pause() -> None:
        both.wait(30)  # each is within its forward, before and after its call
        function, depth = F.scaled_dot_product_attention, 0
        while function is not ORIGINAL[0]:
            function, depth = function.original, depth + 1
        depths.append(depth)

    at_once(*(lambda seed=seed: found.update({seed: trained(seed, pause)}) for seed in range(2)))  # type: ignore[misc]
    for seed in range(2):
        equal(found[seed], alone[seed])
        assert all(f"attention_first_key/1.head_{head}" in step for step in found[seed][0] for head in range(2))
    assert set(depths) == {1}
    assert F.scaled_dot_product_attention is ORIGINAL[0]


@pytest.mark.usefixtures("switching")
def test_threads_measure_everything_as_alone() -> None:
    alone = [trained(seed, preset="full") for seed in range(3)]
    found: dict[int, Any] = {}
    at_once(*(lambda seed=seed: found.update({seed: trained(seed, preset="full")}) for seed in range(3)))  # type: ignore[misc]
    for seed in range(3):
        equal(found[seed], alone[seed])


def test_hooks_work_while_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = trained(0, preset="full")
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)  # as it is then, for all threads
    equal(trained(0, preset="full"), alone)


# --- the patch of attention --------------------------------------------------------------------------------------------------------


def test_patch_waits_for_the_compiler_of_another_thread() -> None:
    from torch._dynamo.convert_frame import compile_lock

    observer, entered = CallObserver(lambda *_: None), threading.Event()
    thread = threading.Thread(target=lambda: (observer.enter(), entered.set()), daemon=True)
    with compile_lock:
        thread.start()
        assert not entered.wait(0.1)
        assert F.scaled_dot_product_attention is ORIGINAL[0]
    assert entered.wait(30)
    observer.leave()
    assert F.scaled_dot_product_attention is ORIGINAL[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_patch_of_other_threads_is_gone_in_a_fork() -> None:
    from torch._dynamo.convert_frame import compile_lock

    inside, done = threading.Event(), threading.Event()
    seen: list[object] = []
    observer = CallObserver(lambda *_: seen.append(1))

    def forward() -> None:
        observer.enter()
        with compile_lock, ATTENTION_PATCH._lock:
            inside.set()
            done.wait(30)
        observer.leave()

    thread = threading.Thread(target=forward, daemon=True)
    thread.start()
    assert inside.wait(30)
    if not (child := os.fork()):
        own = CallObserver(lambda *_: None)
        was_restored = F.scaled_dot_product_attention is ORIGINAL[0]
        own.enter()  # the lock that the other thread held is not there either
        own.leave()
        os._exit(0 if was_restored and F.scaled_dot_product_attention is ORIGINAL[0] else 1)
    assert os.waitpid(child, 0)[1] == 0
    done.set()
    thread.join(30)
    assert F.scaled_dot_product_attention is ORIGINAL[0]


# --- other state of the process ----------------------------------------------------------------------------------------------------


def hooks_of_all_modules() -> Any:
    return nn.modules.module._global_parameter_registration_hooks


def test_hook_on_all_modules_leaves_iterations_alone() -> None:
    """As of a thread that makes a module while the forward of another begins or ends."""
    handle, made = nn.modules.module.register_module_parameter_registration_hook(lambda *_: None), MadeInForward()
    before = hooks_of_all_modules()
    for _ in before.values():
        made.begin(nn.Linear(1, 1))
    for _ in hooks_of_all_modules().values():
        assert made.end() == 0
    assert hooks_of_all_modules() is before
    made.begin(nn.Linear(1, 1))
    other = nn.modules.module.register_module_parameter_registration_hook(lambda *_: None)
    made.end()
    assert len(hooks_of_all_modules()) == 2  # one that came meanwhile stays, and can be removed
    other.remove()
    assert len(hooks_of_all_modules()) == 1
    nn.modules.module._global_parameter_registration_hooks = before
    handle.remove()


def test_layers_of_another_thread_are_not_made_in_forward() -> None:
    made, model = MadeInForward(), nn.Linear(1, 1)
    for _ in range(5):
        made.begin(model)
        at_once(lambda: nn.Linear(2, 2))
        assert made.end() == 0
    for number in range(5):
        made.begin(model)
        nn.Linear(2, 2)
        assert (made.end() > 0) == (number >= 2)


@pytest.mark.usefixtures("switching")
def test_followed_optimizers_are_read_while_others_come() -> None:
    kept = [torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1) for _ in range(50)]
    alive: list[Followed] = []

    def come() -> None:
        for _ in range(40):
            alive.extend(Followed([optimizer]) for optimizer in kept)

    def read() -> None:
        for _ in range(200):
            Followed.by_any()

    at_once(come, read, come, read)
    place = weakref.ref(alive[0])
    alive.clear()
    assert place() is None  # and so nobody follows them
    assert not set(kept) & set(Followed.by_any())


def test_shared_context_is_restored_by_the_last_to_leave() -> None:
    events: list[str] = []

    class Context:
        def __enter__(self) -> None:
            events.append("enter")

        def __exit__(self, *_: object) -> None:
            events.append("exit")

    context = SharedContext(Context)
    for expected in (["enter", "exit"], ["enter", "exit", "enter", "exit"]):
        context.__enter__()
        at_once(context.__enter__)  # the first leaves before the second
        context.__exit__()
        assert events == expected[:-1]
        at_once(context.__exit__)
        assert events == expected


def test_isolated_calls_that_overlap_leave_nothing_behind() -> None:
    from torch._dynamo import eval_frame
    from torch.utils import checkpoint

    advice, stance = checkpoint.check_backward_validity, eval_frame._stance.stance
    compiled = torch.compile(nn.Linear(1, 1))
    first, second = (reference.call_isolated(compiled) for _ in range(2))
    first.__enter__()
    at_once(second.__enter__)
    assert eval_frame._stance.stance == "force_eager"
    first.__exit__(None, None, None)
    at_once(lambda: second.__exit__(None, None, None))
    assert checkpoint.check_backward_validity is advice
    assert eval_frame._stance.stance == stance


def test_built_in_metrics_leave_generators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """To restore one that another thread draws from would repeat its numbers there."""

    def restored() -> None:
        raise AssertionError

    monkeypatch.setattr(measurer, "untouched_rng", restored)
    monkeypatch.setattr("torch_gradmon.capture.module_values.untouched_rng", restored)
    steps, _ = trained(0, preset="full")
    assert {"parameter/0.weight/spectral_norm", "activation/0/kurtosis"} <= steps[-1].keys()
