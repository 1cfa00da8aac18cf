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
from core.megatron.model.facts import ModelFacts
from core.megatron.model.stages import Stages
from core.megatron.model.topology import Rank
from core.megatron.rules.experts import Expert, unpacked
from core.megatron.rules.rules import Rules
from core.pickle.inert import as_mapping


@dataclass(frozen=True, slots=True)
class ModelChunk:
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
    facts: ModelFacts
    rules: Rules
    known: dict[str, tuple[str, Expert | None]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """Name → (name with its layer renumbered, the expert in that); for all ranks of one
    ``where``.
    """

    @property
    def n_experts(self) -> int:
        """Number of experts that the rank holds of a layer."""
        return (self.facts.n_experts or 0) // self.facts.topology.ep

    def places(self, names: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Return for every name (place of the first parameter of its experts, own place).

        The first number is the name's own place for other parameters.

        Experts of all ranks are to stand one after the other, where those of one rank stand in its
        file.
        """
        first: dict[str, int] = {}
        places = {}
        for place, name in enumerate(names):
            expert = self.rules.expert_of(name)
            places[name] = (
                place if expert is None else first.setdefault(expert.before, place),
                place,
            )
        return places

    def layer_name(self, name: str) -> str:
        """Return a name with its layer renumbered."""
        return self._renumbered(name)[0]

    def _renumbered(self, name: str) -> tuple[str, Expert | None]:
        """Return (name with its layer renumbered, the expert in it or None)."""
        entry = self.known.get(name)
        if entry is None:
            layer = self.rules.layer_of(name)
            global_name = name
            if layer is not None:
                global_name = str(
                    replace(
                        layer, number=layer.number + self.stages.offset(layer.stack, *self.where)
                    )
                )
            entry = self.known[name] = (global_name, self.rules.expert_of(global_name))
        return entry

    def global_names(self, name: str) -> list[tuple[int, str]]:
        """Return (expert or 0, global name) of each tensor in an entry.

        That is one, or one for each expert of the rank.

        Raises:
            CorruptError: an expert is beyond those of the rank.
        """
        global_name, expert = self._renumbered(name)
        if expert is None:
            return [(0, global_name)]
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
        """Return (expert or 0, global name, array) of each tensor in a stored one.

        Raises:
            CorruptError: a tensor of several experts does not have as many as the rank.
        """
        global_name, expert = self._renumbered(name)
        if expert is None:
            return [(0, global_name, array)]
        views: Iterable[StoredArray] = [array]
        if expert.number is None:
            if self.rules.is_packed_state(name):
                return [(0, self.layer_name(name), array)]
            if expert.names != "grouped":
                views = self._stacked(name, array)
            else:
                views = unpacked(array, expert.rest, n=self.n_experts, key=name, rank=self.folder)
        return [
            (number, global_name, view)
            for (number, global_name), view in zip(self.global_names(name), views, strict=True)
        ]

    def _stacked(self, name: str, array: StoredArray) -> list[StoredArray]:
        """Return the experts on the first axis of a tensor."""
        if len(array.shape) < 2 or array.shape[0] != self.n_experts:
            raise CorruptError(
                f"a tensor of {self.n_experts} experts has the shape {array.shape}",
                key=name,
                rank=self.folder,
            )
        shape = array.shape[1:]
        return [part_of(array, number * prod(shape), shape) for number in range(self.n_experts)]


def chunk_of(root: object, vp_rank: int, *, vpp: int, rank: str) -> object:
    """Return one model chunk of a rank; an absent one of several is an empty stage."""
    entries = as_mapping(root) or {}
    name = "model" if vpp == 1 else f"model{vp_rank}"
    chunks = [str(key) for key in entries if is_chunk(key)]
    if name in entries:
        # Chunks of another VPP would be left out silently.
        if (vpp == 1 and len(chunks) > 1) or (vpp > 1 and "model" in chunks):
            raise CorruptError(
                f"there are the model chunks {', '.join(chunks)}, but VPP is {vpp}", rank=rank
            )
        return entries[name]
    if vpp == 1 or not chunks:
        raise MissingShardError(
            f"there is no entry {name!r}" + (f", only {', '.join(chunks)}" if chunks else ""),
            rank=rank,
            hint="is virtual_pipeline_model_parallel_size in the arguments right?"
            if chunks
            else None,
        )
    return {}
