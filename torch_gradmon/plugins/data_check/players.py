"""Whether two networks play against each other: which way each pushes what one answers to what the other makes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..tallies import Tallies

RULE = "players-agree"
#: Whether a pass trains the network that answers, on data without a graph, or the one that made them, through it.
ANSWERS, MAKES = "answers", "makes"
ROLES = (ANSWERS, MAKES)
#: Which network made the data, which one answers, and what is trained.
Role = tuple[tuple[int, int], str]

#: The least share of answers that a pass pushes one way, of those that it pushes at all.
_ALIKE = 0.95
#: The fewest steps in which both push clearly, and their least share of those in which both push at all.
_FEWEST, _CLEAR = 8, 0.75
#: The largest deviation of a gradient from the order of its answers, over the largest gradient: its rounding.
_ROUNDING = 1e-3
#: Two losses have one goal if the two differ by at most this share of the way to it: labels of 0.9 and 1 do, by a fifth.
_SAME_GOAL = 0.25

#: Which network made a storage, as long as the user's tensors keep it: a detached output has no graph to note it in.
_makers: weakref.WeakKeyDictionary[torch.UntypedStorage, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


class Network:
    """One whose calls a monitor follows, as long as this object lives. The two of a game may have a monitor each."""

    def __init__(self) -> None:
        _networks.add(self)


_networks: weakref.WeakSet[Network] = weakref.WeakSet()


def are_several() -> bool:
    """Whether there are two networks, of any monitors; else nothing has to be noted."""
    return len(_networks) > 1


def made(maker: nn.Module, result: object) -> None:
    """``maker`` has made this output, with or without a graph."""
    if type(result) is Tensor and torch.is_floating_point(result) and result.layout is torch.strided:
        _makers[result.untyped_storage()] = weakref.ref(maker)


def is_made(data: Tensor) -> bool:
    """Whether a followed network has made it."""
    return data.untyped_storage() in _makers


def role_of(called: nn.Module, tensors: Sequence[Tensor], answers: Tensor) -> Role | None:
    """What a pass from these ``answers`` trains, one or a map of them for each row that another network made; else None."""
    if not tensors or not answers.ndim or answers.shape[0] != tensors[0].shape[0] or (answers.ndim > 1 and answers.shape[1] != 1):
        return None
    maker = _makers.get(tensors[0].untyped_storage(), _nobody)()
    if maker is None or maker is called:
        return None
    return (id(maker), id(called)), MAKES if tensors[0].requires_grad else ANSWERS


def _nobody() -> None:
    """The maker of data."""


class Answers:
    """The answers of one call, which wait for their gradient.

    Args:
        answers: is copied, since the loop may write to it.
        keep: gets what :func:`judge_push` takes, of the first pass that comes back.
    """

    def __init__(self, answers: Tensor, keep: Callable[[Tensor], object]) -> None:
        self._answers, self._keep = answers.detach().flatten().double(), keep

    @torch.no_grad()
    def came_back(self, gradient: Tensor) -> None:
        """A gradient came back, of a loss. Nothing is synchronised."""
        if type(gradient) is not Tensor or gradient.numel() != self._answers.numel():
            return
        answers, order = self._answers.sort()
        pushes = gradient.detach().flatten().double()[order]
        steps, rounding = pushes.diff(), _ROUNDING * pushes.abs().amax()
        disorder = torch.minimum((steps > rounding).sum(), (steps < -rounding).sum())
        centred = answers - answers.mean()
        slope = (centred * pushes).sum() / centred.square().sum()
        bent = (pushes - pushes.mean() - slope * centred).abs().amax() > rounding
        goal = torch.where((slope > 0) & ~bent, answers.mean() - pushes.mean() / slope, torch.nan)
        self._keep(
            torch.stack([(pushes > 0).sum().double(), (pushes < 0).sum().double(), disorder.double(), answers.mean(), goal])
        )


def of_one_pair(pushes: dict[Role, Tensor]) -> dict[str, Tensor]:
    """The passes of two networks that were both trained by their answers, by what they train."""
    pairs = (pair for pair, role in pushes if role == ANSWERS and (pair, MAKES) in pushes)
    return {role: pushes[pair, role] for pair in pairs for role in ROLES}


class Players:
    """Judges, step by step, whether both push the same way.

    Of a game, the one that answers lowers what the other one raises, in every loss of it: of logits, hinges, distances, squares. What is
    pushed to a goal of each row, as a value is that a critic learns, is no game: its gradients do not follow the order of the answers.

    Args:
        tallies: receive the finding.
    """

    def __init__(self, tallies: Tallies) -> None:
        self._tallies = tallies
        self._both = self._clear = 0
        self._differ = False

    def add(self, answers: Sequence[float], makes: Sequence[float], step: int) -> None:
        """Count a step with a pass of each that pushes at all: a hinge that is met does not."""
        if not any(answers[:2]) or not any(makes[:2]):
            return
        self._both += 1
        one, other = _way(answers), _way(makes)
        if not one or not other or answers[2]:
            return
        self._clear += 1
        self._differ |= one != other or not _have_one_goal(answers, makes)
        if self._differ:
            self._tallies.retract(RULE)
        elif self._clear >= max(_FEWEST, _CLEAR * self._both):
            self._tallies.seen(RULE, step=step, evidence={"steps": float(self._clear)})


def _way(push: Sequence[float]) -> int:
    """1 for a pass that raises the answers, -1 for one that lowers them, and 0 if it does neither clearly."""
    lowered, raised = push[0], push[1]
    return int(raised >= _ALIKE * (raised + lowered)) - int(lowered >= _ALIKE * (raised + lowered))


def _have_one_goal(answers: Sequence[float], makes: Sequence[float]) -> bool:
    """False for two squares whose goals differ, on the same side of the answers; of other losses a goal is not known."""
    (at, goal), (other_at, other_goal) = answers[3:], makes[3:]
    return not abs(goal - other_goal) > _SAME_GOAL * max(abs(goal - at), abs(other_goal - other_at))
