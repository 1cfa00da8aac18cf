"""A model chunk of one rank: which entries it has, and what they are called in the whole model.

Layers are numbered anew in every chunk, experts in every expert parallel rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import prod

from core.catalog.stored import StoredArray, part_of
from core.errors import CorruptError, MissingShardError
from core.megatron.extras.common_state import is_chunk
from core.megatron.model.facts import Facts
from core.megatron.model.stages import Stages
from core.megatron.model.topology import Rank
from core.megatron.rules.experts import Expert, unpacked
from core.megatron.rules.rules import Rules
from core.pickle.inert import as_mapping


@dataclass(frozen=True, slots=True)
class Chunk:
    """One model chunk of one rank, and how its names become global.

    Args:
        folder: the rank's directory.
        where: (vp_rank, pp_rank).
        stages: where the source's layers live.
    """

    folder: str
    rank: Rank
    where: tuple[int, int]
    stages: Stages
    facts: Facts
    rules: Rules
    known: dict[str, tuple[str, Expert | None]] = field(default_factory=dict, repr=False, compare=False)
    """Name → (name with its layer renumbered, the expert in that); for all ranks of one ``where``."""

    @property
    def n_experts(self) -> int:
        """Experts of the rank."""
        return (self.facts.n_experts or 0) // self.facts.topology.ep

    def places(self, names: Iterable[str]) -> dict[str, tuple[int, int]]:
        """For every name its place, after that of the first parameter of the same experts (else its own).

        Experts of all ranks are to stand one after the other, where those of one rank stand in its file.
        """
        first: dict[str, int] = {}
        found = {}
        for place, name in enumerate(names):
            expert = self.rules.expert_of(name)
            found[name] = (place if expert is None else first.setdefault(expert.before, place), place)
        return found

    def layer_name(self, name: str) -> str:
        """A name with its layer renumbered."""
        return self._renumbered(name)[0]

    def _renumbered(self, name: str) -> tuple[str, Expert | None]:
        known = self.known.get(name)
        if known is None:
            found = self.rules.layer_of(name)
            whole = name
            if found is not None:
                whole = str(replace(found, number=found.number + self.stages.offset(found.stack, *self.where)))
            known = self.known[name] = (whole, self.rules.expert_of(whole))
        return known

    def global_names(self, name: str) -> list[tuple[int, str]]:
        """(expert or 0, global name) of what an entry holds: one, or one for each expert of the rank.

        Raises:
            CorruptError: an expert is beyond those of the rank.
        """
        whole, expert = self._renumbered(name)
        if expert is None:
            return [(0, whole)]
        if expert.number is not None and expert.number >= self.n_experts:
            raise CorruptError(
                f"expert {expert.number} is beyond the {self.n_experts} that a rank should hold (num_experts / EP)",
                key=name,
                rank=self.folder,
            )
        local = range(self.n_experts) if expert.number is None else [expert.number]
        numbers = [self.rank.ep * self.n_experts + number for number in local]
        return [(number, expert.numbered(number)) for number in numbers]

    def arrays(self, name: str, array: StoredArray) -> list[tuple[int, str, StoredArray]]:
        """(expert or 0, global name, array) of what a tensor holds.

        Raises:
            CorruptError: a tensor of several experts does not have as many as the rank.
        """
        whole, expert = self._renumbered(name)
        if expert is None:
            return [(0, whole, array)]
        views: Iterable[StoredArray] = [array]
        if expert.number is None:
            if self.rules.is_packed_state(name):
                return [(0, self.layer_name(name), array)]
            if expert.names != "grouped":
                views = self._stacked(name, array)
            else:
                views = unpacked(array, expert.rest, n=self.n_experts, key=name, rank=self.folder)
        return [(number, whole, view) for (number, whole), view in zip(self.global_names(name), views, strict=True)]

    def _stacked(self, name: str, array: StoredArray) -> list[StoredArray]:
        """The experts on the first axis of a tensor."""
        if len(array.shape) < 2 or array.shape[0] != self.n_experts:
            raise CorruptError(
                f"a tensor of {self.n_experts} experts has the shape {array.shape}", key=name, rank=self.folder
            )
        shape = array.shape[1:]
        return [part_of(array, number * prod(shape), shape) for number in range(self.n_experts)]


def chunk_of(root: object, vp_rank: int, *, vpp: int, rank: str) -> object:
    """One model chunk of a rank; an absent one of several is an empty stage."""
    entries = as_mapping(root) or {}
    name = "model" if vpp == 1 else f"model{vp_rank}"
    others = [str(key) for key in entries if is_chunk(key)]
    if name in entries:
        if (vpp == 1 and len(others) > 1) or (vpp > 1 and "model" in others):
            raise CorruptError(f"there are the model chunks {', '.join(others)}, but VPP is {vpp}", rank=rank)
        return entries[name]
    if vpp == 1 or not others:
        raise MissingShardError(
            f"there is no entry {name!r}" + (f", only {', '.join(others)}" if others else ""),
            rank=rank,
            hint="is virtual_pipeline_model_parallel_size in the arguments right?" if others else None,
        )
    return {}
