"""The width sweep: train a model at several widths for a few steps, and see how each layer's terms depend on the width."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, pairwise
from numbers import Real
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ...capture.reference import call_isolated, frozen_copy
from ...core import validation as check
from ...core.errors import display, nearest
from ...core.formatting import ProgressBar
from ...core.torch_modes import functions_of, in_use, rng_states, set_rng_states, untouched_generators
from .result import KEYWORDS, Expected, Layer, LayerTerms, SweepRun, WidthSweep, kind_of, standard, user_expectations

# --- The two terms of the refined coordinate check, and the plain check, in float64 ---

_PARAMETRIZATIONS = "parametrizations"  # what torch.nn.utils.parametrize calls them
_COPYABLE = (
    "the terms are measured on copies, so no tensor of the model may be computed from others "
    "(torch.nn.utils.parametrizations.weight_norm can be copied, torch.nn.utils.weight_norm and pruning cannot)"
)


@dataclass(frozen=True)
class _RecordedCall:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor
    generators: dict[str, Tensor]  # the states of the random generators at its start


class TermProbe:
    """Compares a model with its state at the creation of the probe, on copies of ``dtype``: the model itself is never run or changed.

    In float32 the difference of two outputs is noise below a relative 1e-7, and noise has its own exponent: at large widths and small
    learning rates it would hide a vanishing term.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float64) -> None:
        self._reference, self._twin = (_of_dtype(frozen_copy(model, _COPYABLE), dtype) for _ in range(2))

    def measure(self, model: nn.Module, run: Callable[[nn.Module], object]) -> dict[str, LayerTerms]:
        """The terms of ``model`` as it is now; ``run`` runs a model on the batch, in the probe's dtype."""
        states = (chain(each.parameters(), each.buffers()) for each in (self._twin, model))
        with torch.no_grad():
            for kept, live in zip(*states, strict=True):
                kept.copy_(live)
        for part, twin, reference in zip(model.modules(), self._twin.modules(), self._reference.modules(), strict=True):
            twin.training = reference.training = part.training
        return terms(self._twin, self._reference, run)


def terms(model: nn.Module, reference: nn.Module, run: Callable[[nn.Module], object]) -> dict[str, LayerTerms]:
    """The terms of all modules that return one tensor, by name, in the order of their first calls.

    A module that returns a tuple is measured by the first item. One that is called several times has the root mean square over all calls.
    Both models see the same random numbers, and are left as they were, with their buffers. Gradients can be taken with respect to values
    that ``run`` creates, as in the loss of a differential equation, but not with respect to parameters.

    Args:
        model: W_t.
        reference: W_0, of the same class.
        run: runs a model on the batch; its result is not used.
    """
    with torch.no_grad():
        now, before = _record_calls(model, run), _record_calls(reference, run)
        parts = dict(reference.named_modules())
        found = {}
        for name, calls in now.items():
            update = propagated = None
            shapes = [[call.output.shape for call in each] for each in (calls, before.get(name, []))]
            # the whole model has terms only if it is one layer; a parametrization is none, since its output is a weight
            is_whole = name == "" and not parts[name]._modules.keys() <= {_PARAMETRIZATIONS}
            is_layer = bool(own_parameters(parts[name])) and not is_whole and _PARAMETRIZATIONS not in name.split(".")
            if is_layer and shapes[0] == shapes[1]:  # an expert may get other tokens than at first
                mixed = [_moved_output(parts[name], call) for call in calls]
                update = _rms(call.output - output for call, output in zip(calls, mixed, strict=True))
                propagated = _rms(output - call.output for output, call in zip(mixed, before[name], strict=True))
            inputs = [tensor for call in calls if (tensor := _first(call.args)) is not None]
            entered = _rms(inputs) if inputs else None
            found[name] = LayerTerms(update, propagated, entered, _mean((call.output for call in calls), torch.abs))
    return found


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module but not of its submodules, by name; also those behind its parametrizations."""
    found = {name: value for name, value in module._parameters.items() if value is not None}
    inner = module._modules.get(_PARAMETRIZATIONS)
    if inner is not None:
        found |= {f"{_PARAMETRIZATIONS}.{name}": value for name, value in inner.named_parameters()}
    return found


def _moved_output(module: nn.Module, call: _RecordedCall) -> Tensor:
    with call_isolated(module):
        set_rng_states(call.generators)
        output = _first(module(*mapped(call.args, torch.clone), **mapped(call.kwargs, torch.clone)))
    assert output is not None, "gave a tensor before"
    return output


def _record_calls(model: nn.Module, run: Callable[[nn.Module], object]) -> dict[str, list[_RecordedCall]]:
    """The arguments and the output of every module call: copies, because later code may write in place."""
    recorded: dict[str, list[_RecordedCall]] = {}
    # of the running modules, the innermost last: copied arguments and generator states
    running: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], dict[str, Tensor]]] = []

    def keep(name: str, module: nn.Module, _: tuple[Any, ...], output: Any) -> None:
        while running[-1][0] is not module:
            running.pop()  # it raised, and the module around it continued
        args, kwargs, generators = running.pop()[1:]
        tensor = _first(output)
        if tensor is not None:
            recorded.setdefault(name, []).append(_RecordedCall(args, kwargs, _copy(tensor), generators))

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running.append((module, mapped(args, _copy), mapped(kwargs, _copy), rng_states()))

    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(partial(keep, name)).remove)
        stack.enter_context(call_isolated(model))
        torch.manual_seed(0)  # so that dropout selects the same elements
        with torch.enable_grad():
            run(model)
    return recorded


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with ``change`` applied to every tensor in its tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, change) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)([mapped(item, change) for item in value])
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    return value


def _first(value: Any) -> Tensor | None:
    """The first floating-point tensor, possibly nested in tuples, as in a packed sequence."""
    while isinstance(value, (tuple, list)) and value:
        value = value[0]
    return value if isinstance(value, Tensor) and value.is_floating_point() and value.numel() else None


def _mean(tensors: Iterable[Tensor], of: Callable[[Tensor], Tensor]) -> float:
    total, count = 0.0, 0
    for tensor in tensors:
        total += of(tensor.to(torch.float64)).sum().item()
        count += tensor.numel()
    return total / count


def _rms(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(_mean(tensors, torch.square))  # NaN stays NaN


def _of_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """``model`` in ``dtype``. Complex tensors such as rotary embeddings stay complex; nn.Module.to would drop the imaginary part."""

    def cast(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(torch.promote_types(dtype, tensor.dtype))
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return model._apply(cast)  # type: ignore[no-any-return, no-untyped-call]


#: The optimizers that have a name.
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
#: A line through fewer widths has hardly any scatter.
FEWEST = 3


def usual_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that the model returns, else cross-entropy for integer targets and squared error; a dict of inputs is given by name."""
    inputs, targets = batch if isinstance(batch, (tuple, list)) and len(batch) == 2 else (batch, None)
    output = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    if isinstance(output, Mapping) and "loss" in output:
        output = output["loss"]
    if targets is None:
        if isinstance(output, Tensor) and output.numel() == 1:
            return output
        raise TypeError(
            f"there are no targets, and the model returns no loss but {display(output)}; give batches of a pair (inputs, targets), or loss="
        )
    if not isinstance(output, Tensor):
        raise TypeError(f"the model must return a tensor to compare with the targets, got {display(output)}; give loss=")
    if targets.is_floating_point():
        return F.mse_loss(output, targets)
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


@contextlib.contextmanager
def failing(place: str, what: str, remedy: str) -> Iterator[None]:
    """Add the place, such as ``at width 8`` or ``the data of seed 0``, to an error of the user's code; our own errors have it already."""
    try:
        yield
    except Exception as error:
        if " ".join(place.split()[-2:]) in str(error):
            raise
        raise ValueError(f"{place} {what}: {type(error).__name__}: {error}; {remedy}") from error


def placed(batch: Any, model: nn.Module, dtype: torch.dtype | None = None) -> Any:
    """A copy of a batch on the device of ``model``; with ``dtype``, its floating-point tensors have that dtype."""
    device = next((parameter.device for parameter in model.parameters()), None)

    def place(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype, copy=True)

    return mapped(dict(batch) if isinstance(batch, Mapping) else batch, place)


# --- The runs of a sweep: how the model of a width, its optimizer, its data and its loss are made, and a few steps of training ---


@dataclass
class Recipe:
    """Makes and trains the model of a width and a seed; see :func:`width_sweep` for the arguments."""

    factory: Callable[[int], Any]
    data: Any
    optimizer: str | Callable[[nn.Module, int], Any]
    lr: float
    lr_exponent: float
    loss: Callable[[nn.Module, Any], Tensor]
    widths: Sequence[int]  # ascending
    steps: int
    dtype: torch.dtype
    # by id, the parameters of earlier models that still exist
    made: WeakValueDictionary[int, nn.Parameter] = field(default_factory=WeakValueDictionary)

    def check(self, expected: Any) -> None:
        for name, value in (("factory", self.factory), ("loss", self.loss)):
            if not callable(value) or isinstance(value, nn.Module):
                raise TypeError(f"{name} must be a function{' of the width' if name == 'factory' else ''}, got {display(value)}")
        if isinstance(self.optimizer, str):
            if self.optimizer not in OPTIMIZERS:
                near = nearest(self.optimizer, OPTIMIZERS)
                raise ValueError(f"optimizer={self.optimizer!r} is not known{near}; or give a function")
            _check_real(lr=self.lr, lr_exponent=self.lr_exponent)
            if not 0 < self.lr < math.inf or not math.isfinite(self.lr_exponent):
                raise ValueError(f"lr={self.lr!r} must be positive, and lr_exponent={self.lr_exponent!r} a number")
        elif not callable(self.optimizer):
            raise TypeError(f"optimizer must be a name or a function of the model and the width, got {display(self.optimizer)}")
        if isinstance(expected, str) and expected not in KEYWORDS:
            near = nearest(expected, KEYWORDS)
            raise ValueError(f"expected={expected!r} is not known{near}; or give a dict of patterns and exponents")
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise TypeError(f"probe_dtype must be torch.float64 or another floating-point dtype, got {display(self.dtype)}")

    def build(self, width: int, seed: int) -> tuple[nn.Module, Any]:
        """A new model and its optimizer; each width and seed has its own start of the torch generators."""
        torch.manual_seed(1_000_003 * seed + width)
        try:
            made = self.factory(width)
        except Exception as error:
            raise ValueError(
                f"the factory cannot make a model of width {width}: {type(error).__name__}: {error}; leave that width out, or choose "
                "widths that it can make, such as multiples of the number of heads"
            ) from error
        model, optimizer = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"the factory must return a torch.nn.Module, or a pair of one and its optimizer, but at width {width} it returned "
                f"{display(made)}"
            )
        model = model._modules.get("_orig_mod") or model  # a few steps are not worth a compilation
        self._check_new(model, width)
        with failing(
            f"at width {width}",
            "the optimizer cannot be made",
            "the function given as optimizer is called with the model and the width",
        ):
            if optimizer is None and isinstance(self.optimizer, str):
                lr = self.lr * (width / self.widths[0]) ** self.lr_exponent
                optimizer = OPTIMIZERS[self.optimizer](model.parameters(), lr=lr)
            elif optimizer is None:
                optimizer = self.optimizer(model, width)  # type: ignore[operator]
        return model, optimizer

    def _check_new(self, model: nn.Module, width: int) -> None:
        for name, parameter in model.named_parameters():
            if is_lazy(parameter):
                raise ValueError(
                    f"at width {width} {name} is not initialised before the first forward; let the factory run the model once"
                )
            if parameter.requires_grad and self.made.get(id(parameter)) is parameter:
                raise ValueError(
                    f"at width {width} the factory returned {name} of an earlier model, which may be trained already; make a new model in "
                    "every call, and freeze parameters that all models share"
                )
            self.made[id(parameter)] = parameter

    def batches(self, seed: int, steps: int) -> list[Any]:
        """At most ``steps`` batches of a seed, the same for all widths."""
        torch.manual_seed(seed)
        remedy = "give a batch, a list of them, or a function of the seed that returns either"
        with failing(f"the data of seed {seed}", "cannot be loaded", remedy):
            made = self.data(seed) if callable(self.data) else self.data
            pair = isinstance(made, list) and len(made) == 2 and all(isinstance(item, Tensor) for item in made)
            if pair or isinstance(made, (Tensor, Mapping, tuple)) or not isinstance(made, Iterable):
                return [made]
            if made is self.data and isinstance(made, Iterator):
                raise ValueError(
                    f"data is an iterator, which is empty after the first seed {seed}; give a list, or a function of the seed"
                )
            if found := list(islice(made, steps)):
                return found
            raise ValueError(f"the data of seed {seed} has no batch")

    def try_out(self, seed: int) -> tuple[dict[str, Layer], Any, list[str]]:
        """Run every width, and measure a step at the smallest: layers in execution order, its optimizer, and parameters in no layer."""
        batch = self.batches(seed, 1)[0]
        shapes: dict[int, Shapes] = {}
        rates: dict[int, dict[str, float]] = {}
        for width in self.widths:
            model, optimizer = self.build(width, seed)
            shapes[width] = {name: tuple(each.shape) for name, each in model.named_parameters(remove_duplicate=False)}
            _check_names(shapes, self.widths[0], width)
            rates[width] = _rates(model, optimizer, width)
            if len(shapes) == 1:
                first, its_own, terms = model, optimizer, self._try_step(model, optimizer, batch)
            else:
                with failing(f"at width {width}", "the model does not run on the batch", "the batch must fit all widths"):
                    _checked_loss(self.loss(model, placed(batch, model)), width)
        _check_sizes(shapes, self.widths)
        layers = self._layers(first, terms, shapes, rates)
        # a module without them uses the others, or their module returns no tensor
        inside = {id(parameter) for name in layers for parameter in first.get_submodule(name).parameters()}
        trained = ((name, each) for name, each in first.named_parameters() if name in rates[self.widths[0]])
        return layers, its_own, [name for name, parameter in trained if id(parameter) not in inside]

    def _try_step(self, model: nn.Module, optimizer: Any, batch: Any) -> dict[str, LayerTerms]:
        at_width = partial(failing, f"at width {self.widths[0]}")
        with at_width("the model cannot be copied", "fix the factory"):
            probe = TermProbe(model, self.dtype)
        here = placed(batch, model)
        with at_width("the model does not run on the batch", "fix the factory, or give data= and loss= that fit it"):
            loss = _checked_loss(self.loss(model, here), self.widths[0])
        with at_width("a step cannot be made", "the optimizer must step without a closure"):
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        measured = placed(batch, model, self.dtype)
        with at_width(
            f"a copy of the model in {self.dtype} does not run",
            "if it requires another dtype, give probe_dtype=torch.float32, at the cost of accuracy",
        ):
            return probe.measure(model, lambda copy: self.loss(copy, measured))

    def _layers(
        self,
        model: nn.Module,
        terms: Mapping[str, LayerTerms],
        shapes: Mapping[int, Shapes],
        rates: Mapping[int, Mapping[str, float]],
    ) -> dict[str, Layer]:
        narrow, wide = self.widths[0], self.widths[-1]
        found = {}
        for name in (name for name, term in terms.items() if term.update is not None):
            module = model.get_submodule(name)
            own = [f"{name}.{part}" if name else part for part in own_parameters(module)]
            kind = kind_of(module, *({path: shapes[width][path] for path in own} for width in (narrow, wide)))
            pairs = ((rates[narrow].get(path, 0), rates[wide].get(path, 0)) for path in own)
            low, high = next(((low, high) for low, high in pairs if low > 0 and high > 0), (0, 0))
            found[name] = Layer(kind, math.log(high / low, wide / narrow) if low else None)
        if not found:
            raise ValueError("no module has its own parameters and returns a tensor, so there is nothing to measure")
        return found

    def runs(self, seeds: Sequence[int], advance: Callable[[], object]) -> Iterator[SweepRun]:
        for seed in seeds:
            batches = self.batches(seed, self.steps)
            for width in self.widths:
                yield self._run(batches, width, seed)
                advance()

    def _run(self, batches: Sequence[Any], width: int, seed: int) -> SweepRun:
        """Train and measure a new model; a loss that is not finite does not end that, and the terms are not finite either then."""
        model, optimizer = self.build(width, seed)
        probe, measured = TermProbe(model, self.dtype), placed(batches[0], model, self.dtype)
        found = SweepRun(width, seed, [], [])
        for step in range(self.steps):
            with failing(f"at width {width}", f"step {step + 1} with seed {seed} failed", "earlier runs and steps were made"):
                optimizer.zero_grad()
                loss = self.loss(model, placed(batches[step % len(batches)], model))
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                found.losses.append(loss.item())
                found.steps.append(probe.measure(model, lambda copy: self.loss(copy, measured)))
        return found


# --- What the models of all widths have to have in common ---

#: Of parameters by name.
Shapes = dict[str, tuple[int, ...]]


def _check_names(shapes: Mapping[int, Shapes], one: int, other: int) -> None:
    strange = sorted(shapes[one].keys() ^ shapes[other].keys())
    if strange:
        where = one if strange[0] in shapes[one] else other
        raise ValueError(
            f"the models of widths {one} and {other} are not the same: {strange[0]} is only in that of width {where}; "
            "the factory must change sizes, not layers"
        )
    bent = [name for name, shape in shapes[one].items() if len(shape) != len(shapes[other][name])]
    if bent:
        raise ValueError(f"{bent[0]} has {shapes[one][bent[0]]} at width {one}, but {shapes[other][bent[0]]} at width {other}")


def _check_sizes(shapes: Mapping[int, Shapes], widths: Sequence[int]) -> None:
    for narrow, wide in pairwise(widths):
        pairs = [(name, a, b) for name, shape in shapes[narrow].items() for a, b in zip(shape, shapes[wide][name], strict=True)]
        if all(a == b for _, a, b in pairs):
            raise ValueError(
                f"the models of widths {narrow} and {wide} have the same sizes: the factory does not use the width, or rounds both to one"
            )
        shrunk = next(((name, a, b) for name, a, b in pairs if b < a), None)
        if shrunk:
            raise ValueError(
                f"{shrunk[0]} has a side of {shrunk[1]} at width {narrow}, but of {shrunk[2]} at width {wide}; sizes must grow with it"
            )


def _rates(model: nn.Module, optimizer: Any, width: int) -> dict[str, float]:
    groups = getattr(optimizer, "param_groups", None)
    if groups is None or not callable(getattr(optimizer, "step", None)) or not callable(getattr(optimizer, "zero_grad", None)):
        raise TypeError(f"the optimizer of width {width} must be one like those of torch.optim, got {display(optimizer)}")
    by_id = {id(parameter): float(group.get("lr", math.nan)) for group in groups for parameter in group["params"]}
    found = {
        name: by_id[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) in by_id and parameter.requires_grad
    }
    if not found:
        raise ValueError(
            f"the optimizer of width {width} holds no parameter of its model that is trained; make both in the same call of the factory"
        )
    return found


def _checked_loss(loss: Any, width: int) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else display(loss)
        raise TypeError(f"the loss at width {width} must be one number with a gradient, got {what}")
    if not math.isfinite(loss.item()):
        raise ValueError(
            f"the loss at width {width} is {loss.item()} before the first step; initialise the model so that it is finite"
        )
    return loss


def expectations(named: Any, layers: dict[str, Layer], optimizer: Any) -> dict[str, Expected]:
    if named is None or named == "stable":
        return {name: Expected() for name in layers}
    if named == "standard":
        if isinstance(optimizer, torch.optim.SGD):
            return standard(layers, "sgd")
        if isinstance(optimizer, (torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)):
            return standard(layers, "adam")
        kind = type(optimizer).__name__
        raise ValueError(
            f'expected="standard" is known for SGD and Adam, not for {kind}; give the exponents as a dict of patterns'
        )
    if isinstance(named, dict):
        return user_expectations(named, layers)
    raise TypeError(f"expected must be one of {', '.join(KEYWORDS)}, or a dict of patterns and exponents, got {display(named)}")


# --- Checks of a sweep's arguments, before anything is built ---


def whole_numbers(name: str, values: Any) -> list[Any]:
    """The items of ``values``, with the integers of other packages as int."""
    try:
        items = list(values)
    except TypeError:
        raise TypeError(f"{name}={values!r} must be a list of whole numbers, got {display(values)}") from None
    for place, item in enumerate(items):
        with contextlib.suppress(TypeError):
            items[place] = item if isinstance(item, bool) else operator.index(item)
    return items


def check_arguments(widths: Sequence[int], seeds: Sequence[int], steps: int, tolerance: float, confidence: float) -> None:
    for name, values, least in (("widths", widths, 1), ("seeds", seeds, 0)):
        if not all(isinstance(value, int) and not isinstance(value, bool) and value >= least for value in values):
            raise ValueError(f"{name}={list(values)!r} must be whole numbers of at least {least}")
        if len(set(values)) < len(values):
            raise ValueError(f"{name}={list(values)!r} names one twice")
    if len(widths) < FEWEST:
        raise ValueError(
            f"widths={list(widths)!r}: an exponent with an interval needs {FEWEST} widths or more, such as 64, 128, 256"
        )
    if not seeds:
        raise ValueError("seeds=[] runs nothing; give at least one")
    check.positive_int("steps", steps)
    _check_real(tolerance=tolerance, confidence=confidence)
    if not 0 < tolerance < math.inf:
        raise ValueError(
            f"tolerance={tolerance!r} must be a positive number; theoretical exponents are halves, which 0.25 distinguishes"
        )
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence!r} must be a share between 0 and 1, such as 0.95")


def _check_real(**values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} must be a number, got {display(value)}")


def _all_in_use() -> list[torch.device]:
    """All accelerators of the current kind; none if none was used yet."""
    device = in_use()
    if device is None:
        return []
    return [torch.device(device.type, number) for number in range(functions_of(device).device_count())]


def width_sweep(
    factory: Callable[[int], Any],
    data: Any,
    *,
    widths: Sequence[int] = (64, 128, 256, 512, 1024),
    seeds: int | Sequence[int] = 5,
    steps: int = 3,
    optimizer: str | Callable[[nn.Module, int], Any] = "adamw",
    lr: float = 1e-3,
    lr_exponent: float = 0.0,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    expected: str | Mapping[str, Any] | None = None,
    tolerance: float = 0.25,
    confidence: float = 0.95,
    probe_dtype: torch.dtype = torch.float64,
    progress: bool | None = None,
) -> WidthSweep:
    """Fit, for each layer, the exponents over the width of the two terms of the refined coordinate check.

    After t steps a layer's output has changed by its own update, (W_t - W_0) x_t, and by changes from below, W_0 (x_t - x_0) (Haas et al.
    2025, arXiv 2505.22491). If the learning rate and the initialisation suit all widths, the root mean squares of both are independent of
    the width. The mean of ``|output|`` of every module is recorded too, as in the coordinate check of microsoft/mup.

    Wrong arguments are found before the sweep starts, on the first batch of the first seed. The global random generators of torch are left
    as they were. Every measurement synchronises the device.

    Modules with their own parameters that return a tensor are measured. Parameters used outside of such a module are listed in
    :attr:`WidthSweep.unmeasured`; the verdict names them, but does not depend on them.

    Args:
        factory: called with a width, returns a new model, or a pair (model, optimizer).
        data: a batch, a list of batches (or another re-iterable, such as a DataLoader), or a function of the seed that returns either;
            fewer batches than steps are repeated. A batch is a pair (inputs, targets), or an argument of ``loss``. All widths get the same.
            The terms are measured on the first batch.
        widths: three or more.
        seeds: how many, from 0, or which.
        steps: of training in each run; the verdict is on the state after the last.
        optimizer: "sgd", "adam" or "adamw", or a function of the model and the width. Unused if the factory returns one.
        lr: learning rate of a named optimizer at the smallest width.
        lr_exponent: a named optimizer has ``lr * (width / smallest width) ** lr_exponent``.
        loss: a function of the model and a batch that returns a scalar; by default cross-entropy for integer targets, squared error for
            others, or the loss that the model returns.
        expected: "stable" (the default: all exponents about 0, as in muP); "standard": the theory of the standard parametrisation after one
            step; or a dict from patterns of module names to an exponent, a pair (update, propagated), or None for terms that are not
            judged.
        tolerance: how far from the expected exponent a whole confidence interval may reach. Theoretical exponents are halves.
        confidence: of the interval.
        probe_dtype: of the copies on which the terms are measured. In float32, terms below about 1e-6 of the output are noise.
        progress: whether to show a bar (if tqdm is installed); by default if stderr is a terminal.

    Raises:
        ValueError, TypeError: a wrong argument, model, optimizer, batch or loss; with the width and the remedy.
    """
    given = {**locals()}
    numbers = whole_numbers("seeds", range(seeds) if isinstance(seeds, int) and not isinstance(seeds, bool) else seeds)
    sizes = whole_numbers("widths", widths)
    if all(isinstance(width, int) for width in sizes):
        sizes.sort()
    check_arguments(sizes, numbers, steps, tolerance, confidence)
    recipe = Recipe(factory, data, optimizer, lr, lr_exponent, usual_loss if loss is None else loss, sizes, steps, probe_dtype)
    recipe.check(expected)
    with torch.random.fork_rng(devices=[]), untouched_generators(_all_in_use()):
        layers, trained_by, unmeasured = recipe.try_out(numbers[0])
        aims = expectations(expected, layers, trained_by)
        with ProgressBar(len(sizes) * len(numbers), "width sweep", "run", progress) as bar:
            runs = list(recipe.runs(numbers, bar.advance))
    kept = {name: _for_json(given[name]) for name in ("optimizer", "lr", "lr_exponent", "expected")}
    settings = {"widths": sizes, "seeds": numbers, "steps": steps, **kept, "probe_dtype": str(probe_dtype).removeprefix("torch.")}
    return WidthSweep(runs, layers, aims, tolerance, confidence, settings, unmeasured)


def _for_json(value: Any) -> Any:
    """A setting for JSON; a function becomes its name."""
    if isinstance(value, Mapping):
        return {pattern: list(item) if isinstance(item, tuple) else item for pattern, item in value.items()}
    if isinstance(value, Real):
        return float(value)  # JSON cannot hold a number of NumPy
    return getattr(value, "__qualname__", repr(value)) if callable(value) else value
