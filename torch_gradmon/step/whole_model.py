"""A model whose parts are on different ranks: the names of all its parameters, in the order of its stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import nn

from ..core.keys import ROOT
from .ranks import Ranks


class PartFacts(NamedTuple):
    """A parameter of one part, as its rank describes it to the others.

    Attributes:
        stage: number of the part among all parts of the model.
        name: of the parameter within the part.
        shape: of the whole parameter.
        dtype: as text.
        is_trained: it requires a gradient.
        fan_in: see ``ModelIndex.matrices``; -1 for what is no matrix.
        group: number of its group among those of the optimizers of its stage; -1 if none of them has it.
    """

    stage: int
    name: str
    shape: Sequence[int]
    dtype: str
    is_trained: bool
    fan_in: int
    group: int


class WholeModel:
    """The parameters of all parts.

    Args:
        by_rank: what each rank has, the ranks in ascending order.
        members: their numbers among all processes.
        modules: stage, name and class of each module.
        cards: settings of each group of the optimizers, and stage and name of its parameters.

    Attributes:
        facts: by name, in the order of the stages.
        homes: by name, the first rank that has the parameter, among all processes.
        has_prefix: parts have parameters of equal names, so each name begins with the number of its stage.
        kinds: the class of each module by name.
        cards: as given, with names in the whole model, those of copies once.
    """

    def __init__(
        self,
        by_rank: Sequence[Sequence[PartFacts]],
        members: Sequence[int],
        modules: Iterable[tuple[int, str, str]] = (),
        cards: Iterable[dict[str, Any]] = (),
    ) -> None:
        stages: dict[str, set[int]] = {}
        for facts in by_rank:
            for fact in facts:
                stages.setdefault(fact.name, set()).add(fact.stage)
        self.has_prefix = any(len(of) > 1 for of in stages.values())
        self.facts: dict[str, PartFacts] = {}
        self.homes: dict[str, int] = {}
        ordered = [(fact, rank) for facts, rank in zip(by_rank, members, strict=True) for fact in facts]
        for fact, rank in sorted(ordered, key=lambda each: each[0].stage):  # stable: ranks, then the order in the part
            name = self.prefix(fact.stage) + fact.name
            self.facts.setdefault(name, fact)
            self.homes.setdefault(name, rank)
        ordered_modules = sorted(modules, key=lambda each: each[0])
        self.kinds = {self.prefix(at) + name if name != ROOT else f"stage{at}": kind for at, name, kind in ordered_modules}
        self.cards: list[dict[str, Any]] = []
        for card in cards:
            named = {**card, "parameters": [self.prefix(stage) + name for stage, name in card["parameters"]]}
            if named not in self.cards:
                self.cards.append(named)

    @classmethod
    def gathered(
        cls,
        ranks: Ranks,
        own: Sequence[PartFacts],
        modules: Sequence[tuple[int, str, str]],
        cards: Sequence[dict[str, Any]],
    ) -> WholeModel:
        """From what each rank has. Collective."""
        found = ranks.gathered([own, modules, cards])
        by_rank = [[PartFacts(*fact) for fact in facts] for facts, _, _ in found]
        return cls(by_rank, ranks.members, [each for _, of, _ in found for each in of], [each for *_, of in found for each in of])

    def groups(self) -> list[set[str]]:
        """The parameters of each group of the optimizers; groups of one number in several stages are one."""
        count = 1 + max((fact.group for fact in self.facts.values()), default=-1)
        return [{name for name, fact in self.facts.items() if fact.group == number} for number in range(count)]

    def prefix(self, stage: int) -> str:
        """What names of this stage begin with."""
        return f"stage{stage}." if self.has_prefix else ""

    def name_of(self, parts: nn.Module, name: str) -> str:
        """The name in the whole model of a parameter or module that is called ``name`` among the parts of one rank."""
        number, dot, rest = name.partition(".")
        if not number.isdigit() or number not in parts._modules:
            return name  # the root
        return f"{self.prefix(int(number))}{rest}" if dot else f"stage{number}"
