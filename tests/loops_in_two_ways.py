"""Random training loops in which anything may happen, each run twice: followed by the general path alone, and by straight programs
wherever they apply. What training leaves and all that the monitor says must be the same, bit for bit.

A :class:`Case` is a program of :mod:`tests.fuzz` and changes of single iterations. What raises ends its iteration, as in a loop that
catches errors, and the error is a part of what is compared. ``python -m tests.loops_in_two_ways 0 1000`` runs the seeds from 0 to 999,
and prints the smallest case of the first difference.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib.util
import io
import math
import random
import re
import shutil
import sys
import tempfile
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor
from torch_gradmon.core.records import StepRecord, StepView
from torch_gradmon.monitor import steps
from torch_gradmon.monitor.runtime import FollowedLoop
from torch_gradmon.sinks import delivery

from .fuzz import drawing, models, optimizers, plan, runner
from .fuzz.loop import Deliberate, Loop
from .fuzz.plan import Op, op
from .fuzz.program import Program
from .fuzz.rules import excluded
from .fuzz.watcher import Collecting, Watcher
from .loops import differences

# --- cases -----------------------------------------------------------------------------------------------------------------------

#: What may be added, as expressions of ``loop`` and its ``monitor``: what loops do,
ADDED = """
    loop.stop() loop.handles.pop().remove() loop.micro() loop.freeze() loop.thaw() loop.transform() loop.model.double() loop.reload()
    loop.fail('gradient') loop.fail('accumulated') loop.fail('before') loop.fail('after') loop.fail('forward') loop.fail('everywhere')
    loop.hang('gradient') loop.hang('accumulated') loop.hang('before') loop.hang('after') loop.hang('forward') loop.hang('everywhere')
    loop.hang('pre_forward') loop.hang('full_backward') loop.micro(copy.deepcopy(loop.model)) loop.schedule() loop.exchange()
    (loop.monitor('leave'),loop.exchange(),monitor.attach(*loop.optimizers,scaler=loop.scaler)) loop.forward(6000)
    loop.forward(6000,spoil='nan') loop.forward(6000,spoil='1e4') loop.step(0) loop.step(1) loop.backward() loop.backward('same')
    loop.backward('one') loop.backward('','loss') loop.backward('','parameter') loop.zero_grad(True) loop.zero_grad(False)
    loop.first.grad.fill_(torch.nan) loop.first.grad.fill_(torch.inf) loop.edit('clip_norm') loop.edit('clip_norm_loose')
    loop.edit('clip_value') loop.edit('by_hand') loop.edit('data_clamp') loop.edit('data_flip') loop.edit('data_neg') loop.edit('scale')
    loop.edit('replace') loop.edit('noise') loop.edit('drop_one') loop.evaluate('eval') loop.evaluate('eval_grad') loop.evaluate('train')
    loop.evaluate('train_grad') loop.penalise('look') loop.penalise('graph') loop.renew(False) loop.renew(True)
    setattr(loop.model,'body',copy.deepcopy(loop.model.body)) loop.model.add_module('late',torch.nn.Linear(2,2)) loop.log('forward')
    loop.log('backward') loop.log('late') loop.save() loop.monitor('detach_attach') loop.monitor('leave') loop.monitor('resume')
    loop.monitor('detail_full') loop.model.eval() loop.model.train() loop.optimizers[0].step(loop.micro)
    loop.optimizers[0].step(closure=loop.micro) loop.optimizers[0].param_groups[0].update(lr=torch.tensor(0.1))
    loop.optimizers[0].param_groups[0].update(lr=1) loop.hang('accumulated',lambda*_:loop.step(0))
    loop.hang('before',lambda*_:loop.evaluate('train_grad')) loop.hang('before',lambda*_:loop.edit('scale'))
"""
#: what they read of it,
READS = """
    monitor.get_step_metrics() monitor.missing() monitor.last_record monitor.get_step_counts() monitor.step_was_skipped
    monitor.current_step monitor.is_monitoring() monitor.state_dict() monitor.__str__() monitor.get_all_metrics() monitor.warning_counts()
    monitor.describe() monitor.diagnose()
"""
#: and what they ask it for, some of which is refused;
ASKS = """
    monitor.log_context(batch=[loop.number]) monitor.log_scalar('loss',loop.loss.detach()) monitor.log_sample_losses([1,2],torch.ones(2))
    monitor.clip_grad_norm_(0.1) monitor.clip_grad_norm_('zclip') monitor.log_tensor('some',torch.ones(3))
    monitor.attach(*loop.optimizers,scaler=loop.scaler) monitor.load_state_dict(monitor.state_dict()) monitor.begin_step(loop.number+7)
    monitor.end_step() monitor.monitor_gradients(True) monitor.monitor_parameters() monitor.add_gradient_metric('rms',every=2)
    monitor.add_parameter_metric('std') monitor.add_update_metric('ratio',every=3) monitor.add_activation_metric('std')
    monitor.add_micro_batch_metrics() monitor.add_sink(loop.sink) monitor.add_detector(gradmon.SpikeDetector(signal='loss'))
    monitor.set_reference_module('init') monitor.remove_reference_module() monitor.set_detail(every=2) monitor.set_detail(preset='minimal')
    monitor.set_detail(reset=True)
"""
#: arguments that are put into an operation,
PUT = """
    forward(spoil='nan') forward(spoil='inf') forward(spoil='1e4') forward(spoil='1e-4') forward(fails=True) forward(fails_back=True)
    backward(twice='same') backward(twice='one') backward(fails='loss') backward(fails='parameter') zero_grad(set_to_none=True)
    zero_grad(set_to_none=False) step_by_closure(fails=True)
"""
#: and what is around one.
AROUND = "thread torch.no_grad() torch.autograd.set_detect_anomaly(True) torch.autocast('cpu') monitor.no_monitor()"
#: What some loops do in each iteration.
HABITS = [*READS.split()[:3], *ASKS.split()[:4]]


#: What is drawn more often than in programs of the fuzzer: several optimizers, closures, wrappers.
SEVERAL: list[dict[str, Any]] = [
    {"players": "halves"},
    {"players": "turns"},
    {"players": "gan", "architecture": "gan"},
    {"optimizer": "sgd_closure"},
    {"optimizer": "lbfgs"},
    {"wrapped": "holder"},
    {"wrapped": "lookahead"},
]


@dataclass(frozen=True)
class Change:
    """Of iteration ``at``, or of every one if that is None, at a ``place`` from 0 to 1. ``how``: ``add``, ``put`` or ``around``, with an
    expression; or ``drop``, ``double``, or ``swap`` with the next.
    """

    at: int | None
    place: float
    how: str
    what: str = ""

    def apply(self, ops: list[Op]) -> None:
        name, _, args = self.what.partition("(")
        lists = [ops, *(each.inner for each in ops if each.inner)]  # those of closures too
        found = [(some, index) for some in lists for index in range(len(some) + (self.how == "add"))]
        found = [(some, index) for some, index in found if self.how != "put" or some[index].name == name]
        if not found:
            return
        some, index = found[min(int(self.place * len(found)), len(found) - 1)]
        if self.how == "put":
            some[index] = replace(some[index], args={**some[index].args, **eval(f"dict({args}")})
            return
        two, rest = some[index : index + 2], some[index + 1 : index + 2]
        changed = {"add": [op("do", what=self.what), *two], "drop": rest, "double": [*two[:1], *two], "swap": two[::-1]}
        some[index : index + 2] = changed.get(self.how, [op("do_in", *two[:1], what=self.what), *rest])


@dataclass(frozen=True)
class Case:
    """A loop. ``after``: the number of usual steps before a program is made."""

    program: Program
    changes: tuple[Change, ...] = ()
    after: int = 0

    def script(self) -> list[list[Op]]:
        found = copy.deepcopy(plan.iterations(self.program))
        for change in self.changes:
            for ops in found if change.at is None else found[change.at : change.at + 1]:
                change.apply(ops)
        return found


def draw(seed: int) -> Case:
    """The case of a seed. Most have few choices and few changes, so that most of their steps are as usual."""
    numbers = random.Random(seed)
    p, wanted = drawing.draw(seed), numbers.choice((0, 1, 2, 2, 3, 3, 4, 5, 7))
    while len(drawing.choices(p)) > wanted:
        plainer = drawing.plainer(p)
        p = next((q for q in numbers.sample(plainer, len(plainer)) if not excluded(q)), Program(seed))
    more: dict[str, Any] = {
        "poll": "never",
        "max_overhead": 0.0,
        "steps": numbers.randint(*numbers.choice(((5, 9), (5, 9), (8, 20)))),
    }
    more |= {"every": numbers.choice((1, 1, 1, 1, 2, 5)), "log": p.log or numbers.choice(((), (), ("forward",), ("backward",)))}
    if p.architecture == "mlp" and p.players == "one" and not p.extras and numbers.random() < 0.1:
        more["architecture"] = "single"
    if p.on_spike == "warn" and numbers.random() < 0.2 and not excluded(replace(p, on_spike="skip")):
        more["on_spike"] = numbers.choice(("raise", "skip", gradmon.Rollback(every=3)))
    p = p if excluded(replace(p, **more)) else replace(p, **more)
    q = replace(p, **dict(numbers.choice(SEVERAL))) if numbers.random() < 0.3 and p.architecture == "mlp" else p
    p = p if excluded(q) else q
    habit = Change(None, numbers.choice((0.0, numbers.random(), 1.0)), "add", numbers.choice(HABITS))
    return Case(p, (*[habit] * numbers.choice((0, 0, 1)), *_changes(numbers, p.steps)), numbers.choice((0, 0, 1, 2)))


def _changes(numbers: random.Random, count: int) -> Iterator[Change]:
    kinds = [(10, "add", ADDED), (4, "add", READS), (4, "add", ASKS), (3, "put", PUT), (2, "around", AROUND)]
    kinds += [(2, "drop", ""), (1, "double", ""), (1, "swap", ""), (2, "put", "forward(spoil='1e4')")]
    for _ in range(numbers.choice((0, 1, 1, 2, 2, 3, 4, 6))):
        ((_, how, table),) = numbers.choices(kinds, weights=[weight for weight, *_ in kinds])
        yield Change(numbers.randrange(count), numbers.random(), how, numbers.choice(table.split() or [""]))


# --- the loop --------------------------------------------------------------------------------------------------------------------


class OddLoop(Loop):
    """A loop that goes on after any error."""

    observer: ReadWatcher

    def run_script(self, script: list[list[Op]]) -> list[str]:
        """The errors."""
        errors, self.handles, self.sink = [], list[Any](), Collecting(self.observer.seen.rows)
        with self.around(), contextlib.ExitStack() as stack:
            stack.callback(lambda: [each.remove() for each in self.handles])
            for number, ops in enumerate(script):
                try:
                    self._do(ops)
                except Exception as error:
                    errors.append(f"{number}: {type(error).__name__}: {error}")
        return errors

    def do(self, what: str) -> Any:
        names = {"loop": self, "monitor": self.observer.monitor, "gradmon": gradmon, "torch": torch, "copy": copy}
        found = eval(what, names)
        self.observer.read.append((what, plain(found)))
        return found

    def do_in(self, inner: list[Op], what: str) -> None:
        if what == "thread":
            with ThreadPoolExecutor(1) as pool:
                pool.submit(self._do, inner).result()
        else:
            with self.do(what):
                self._do(inner)

    @property
    def first(self) -> nn.Parameter:
        return next(q for q in self.model.parameters() if q.requires_grad)

    def micro(self, model: nn.Module | None = None) -> None:
        models.mean_square((model or self.model)(*models.batch(self.p, 6_000 + self.number))).backward()

    def stop(self, *_: object) -> None:
        raise Deliberate

    def fail(self, where: str) -> None:
        """Raise in a forward pass, a backward pass or a step that are added."""
        self.hang(where, self.stop)
        try:
            self.micro()
            optimizers.inner(self.optimizers[0]).step()
        finally:
            self.handles.pop().remove()

    def hang(self, where: str, hook: Callable[..., Any] = lambda *_: None) -> None:
        optimizer = optimizers.inner(self.optimizers[0])
        register = {
            "gradient": self.first.register_hook,
            "accumulated": self.first.register_post_accumulate_grad_hook,
            "before": optimizer.register_step_pre_hook,
            "after": optimizer.register_step_post_hook,
            "forward": self.model.register_forward_hook,
            "pre_forward": [*self.model.modules()][-1].register_forward_pre_hook,
            "full_backward": self.model.register_full_backward_hook,
            "everywhere": nn.modules.module.register_module_forward_pre_hook,
        }[where]
        self.handles.append(register(hook))

    def transform(self) -> None:
        values, batch = {name: q.detach() for name, q in self.model.named_parameters()}, models.batch(self.p, 6_500)
        torch.func.grad(lambda some: models.mean_square(torch.func.functional_call(self.model, some, batch)))(values)

    def renew(self, is_owned: bool) -> None:
        """Replace a parameter, and give the new one to an optimizer, or to none."""
        part = next(each for each in self.model.modules() if [*each.parameters(recurse=False)])
        name, q = next(part.named_parameters(recurse=False))
        setattr(part, name, nn.Parameter(q.detach().clone()))
        if is_owned:
            optimizers.inner(self.optimizers[0]).add_param_group({"params": [getattr(part, name)]})

    def exchange(self) -> None:
        """Train with other optimizers from here on, and forget those of before."""
        self.optimizers, self.schedulers = optimizers.build(self.p, self.model), []
        gc.collect()


class ReadWatcher(Watcher):
    """Keeps what is read of its monitors as plain data."""

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self.monitors: list[ModuleMonitor] = []
        self.read: list[Any] = []

    def _made(self) -> ModuleMonitor:
        self.monitors.append(super()._made())
        return self.monitors[-1]

    def over(self) -> None:
        self.loop.do("monitor.state_dict()")
        for monitor in [*self.monitors, *([self.companion] if self.companion is not None else [])]:
            with contextlib.suppress(gradmon.SpikeError):
                monitor.detach()
            self.monitor = monitor
            for what in (*READS.split(), "monitor._runtime.pipeline.history.sampled()"):
                self.loop.do(what)
        self.read.append(plain(self.seen.events))


# --- comparing -------------------------------------------------------------------------------------------------------------------

#: Of clocks.
_CLOCKED = re.compile(r'"?[^"]*overhead_fraction"?(: [^,}]+)?')


def plain(x: Any) -> Any:
    """Data that can be compared bit for bit, with the order of what is in mappings; without times."""
    if isinstance(x, Tensor):
        return x.detach().clone()
    if isinstance(x, StepView):
        x = {name: getattr(x, name) for name in dir(x)} | {"top": x.top_gradients(3)}
    elif isinstance(x, StepRecord):
        x = {name: value for name, value in x._asdict().items() if name != "time"}
    elif is_dataclass(x) and not isinstance(x, type):
        x = {each.name: getattr(x, each.name) for each in fields(x) if each.name != "time"}
    if isinstance(x, Mapping):
        kept = {"/".join(key) if isinstance(key, tuple) else str(key): plain(value) for key, value in x.items()}
        kept = {key: value for key, value in kept.items() if not _CLOCKED.match(key)}
        return {**kept, "(order)": [*kept]}
    if isinstance(x, (set, frozenset)):
        return sorted(map(str, x))
    if isinstance(x, (list, tuple)):
        return [plain(each) for each in x]
    return repr(x) if isinstance(x, float) else x if isinstance(x, (str, int, bytes, type(None))) else type(x).__name__


def _stored(place: Path) -> Any:
    if place.is_file():
        return _CLOCKED.sub("", place.read_text())
    with gradmon.load_run(place) as run:
        facts = run.segments, run.spikes, run.damage, run.keys(), str(run.diagnose()), run._reader.trained_parts
        return plain([*facts, *run._reader.records()])


def outcome(case: Case, place: Path) -> dict[str, Any]:
    """All that a run leaves and says."""
    with warnings.catch_warnings(record=True) as told, contextlib.redirect_stderr(io.StringIO()) as printed:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        place.mkdir()
        watcher = ReadWatcher(place)
        loop = OddLoop(case.program, watcher)
        errors = loop.run_script(case.script())
        left = plain(loop.left())
        watcher.over()
        files = {each.name: _stored(each) for each in sorted(place.iterdir())}
    shutil.rmtree(place)
    said = [(each.category.__name__, str(each.message), Path(each.filename).name, each.lineno) for each in told]
    texts = {"warnings": said, "errors": errors, "printed": printed.getvalue().splitlines()}
    saved = [torch.load(io.BytesIO(each), weights_only=False).state_dict() for each in watcher.seen.saved]
    seen = {"read": watcher.read, "rows": plain(watcher.seen.rows), "saved": saved}
    return {"training": left, **seen, "files": files, **texts}


_PROGRAM = "torch_gradmon.monitor.program"


def has_programs() -> bool:
    return importlib.util.find_spec(_PROGRAM) is not None


def programs(after: int) -> Any:
    """Straight programs after so many usual steps. Without effect where the package has none."""
    return mock.patch(f"{_PROGRAM}.AFTER", after) if has_programs() else contextlib.nullcontext()


@contextlib.contextmanager
def counted(counts: Counter[str], way: str) -> Iterator[None]:
    """Count the steps that the general path follows; programs have the rest of them."""
    original = FollowedLoop.step_ended

    def count(*args: Any) -> None:
        counts[way] += 1
        original(*args)

    # warnings name the innermost line that is not of the package
    count = types.FunctionType(count.__code__, {"__name__": "torch_gradmon.counted"}, closure=count.__closure__)
    with mock.patch.object(FollowedLoop, "step_ended", count):
        yield


def difference(case: Case, counts: Counter[str], around: Any = contextlib.nullcontext) -> list[str]:
    """Where the two ways differ; ``around`` the second."""
    found = []
    gc.disable()  # what is collected in the middle of a run would be so in one of them only
    torch.set_warn_always(True)  # and what torch tells once in a process
    try:
        with tempfile.TemporaryDirectory() as place:
            for way, after, context in (("general", sys.maxsize, contextlib.nullcontext), ("programs", case.after, around)):
                with programs(after), counted(counts, way), context():
                    found.append(outcome(case, Path(place) / "loop"))
    finally:
        gc.enable()
        torch.set_warn_always(False)
    return differences(*found)


def smallest(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The case that still fails with as few changes, and choices, as can be."""
    for change in case.changes:
        fewer = replace(case, changes=tuple(each for each in case.changes if each is not change))
        case = fewer if fails(fewer) else case
    return replace(case, program=runner.smaller(case.program, lambda p: fails(replace(case, program=p))))


def check(seeds: Iterable[int], counts: Counter[str]) -> str:
    """The first difference, as text."""
    for seed in seeds:
        if found := difference(case := draw(seed), counts):
            small = smallest(case, lambda each: bool(difference(each, Counter())))
            script = (f"{i}: {'; '.join(map(str, ops))}" for i, ops in enumerate(small.script()))
            return "\n".join(
                [f"seed {seed}: {small}", *(each[:500] for each in (difference(small, Counter()) or found)[:20]), *script]
            )
    return ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    steps.PATIENCE = delivery.SLOW = math.inf
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()
    tally: Counter[str] = Counter()
    text = check(range(*map(int, sys.argv[1:3])), tally)
    print(dict(tally), text or "no difference", sep="\n")
    raise SystemExit(bool(text))
