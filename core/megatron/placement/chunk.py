"""A model chunk of one rank: its entries, and their names in the complete model.

Layers are numbered anew in every chunk, experts in every expert parallel rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field, replace
from math import prod

from core.engine.catalog.stored import StoredArray, narrow_array
from core.errors import CorruptError, MissingShardError
from core.megatron.extras.common_state import is_chunk
from core.megatron.model.facts import ModelFacts
from core.megatron.model.pipeline import Stages
from core.megatron.model.topology import Rank
from core.megatron.rules.experts import Expert, unpacked
from core.megatron.rules.rules import Rules
from core.pickle.inert import as_mapping
from core.values import dataclass, n_text


@dataclass(frozen=True, slots=True)
class ModelChunk:
    """A model chunk of one rank, which makes its local names global.

    Args:
        folder: the rank's directory.
        where: (vp_rank, pp_rank).
        stages: the distribution of the source's layers over chunks.
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
    """Cache: name → (name with its layer renumbered, its expert); shared by ranks of a stage."""

    @property
    def position(self) -> int:
        """Number of the chunk in the order of the model."""
        return self.stages.number_of(*self.where)

    @property
    def n_experts(self) -> int:
        """Number of experts of a layer on this rank."""
        return (self.facts.n_experts or 0) // self.facts.topology.ep

    def places(self, names: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Return name → (index of the first parameter of the layer's experts, index of the name).

        Sorting by (first index, expert, index) puts the experts of all ranks one after the other,
        at the position of a rank's experts in its file. Both indices are equal for other names.
        """
        first_index: dict[str, int] = {}
        places = {}
        for index, name in enumerate(names):
            expert = self.rules.expert_of(name)
            first = index if expert is None else first_index.setdefault(expert.before, index)
            places[name] = (first, index)
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
                offset = self.stages.offset(layer.stack, *self.where)
                global_name = str(replace(layer, number=layer.number + offset))
            entry = self.known[name] = (global_name, self.rules.expert_of(global_name))
        return entry

    def global_names(self, name: str) -> list[tuple[int, str]]:
        """Return (global number of the expert or 0, global name) of each tensor in an entry.

        An entry for all experts of the rank has one tensor per expert, any other has one.

        Raises:
            CorruptError: the expert's number is too high for the rank.
        """
        global_name, expert = self._renumbered(name)
        if expert is None:
            return [(0, global_name)]
        if expert.number is not None and expert.number >= self.n_experts:
            raise CorruptError(
                f"expert number {expert.number} is out of range: each rank should have "
                f"{n_text(self.n_experts, 'expert')} (num_experts / EP)",
                key=name,
                rank=self.folder,
            )

        # Experts are numbered anew in every expert parallel rank.
        local_numbers = range(self.n_experts) if expert.number is None else [expert.number]
        numbers = [self.rank.ep * self.n_experts + number for number in local_numbers]
        return [(number, expert.numbered(number)) for number in numbers]

    def arrays(self, name: str, array: StoredArray) -> list[tuple[int, str, StoredArray]]:
        """Return (global number of the expert or 0, global name, array) of each tensor in an array.

        Raises:
            CorruptError: the shape or strides are not those of a tensor for all experts of the
                rank, or the expert's number is too high.
        """
        global_name, expert = self._renumbered(name)
        if expert is None:
            return [(0, global_name, array)]
        views: Iterable[StoredArray] = [array]
        if expert.number is None:
            # The packed extra state of a rank's experts cannot be separated: it stays one tensor.
            if self.rules.is_packed_state(name):
                return [(0, global_name, array)]
            if expert.names == "grouped":
                views = unpacked(array, expert.rest, n=self.n_experts, key=name, rank=self.folder)
            else:
                views = self._unstacked(name, array)
        return [
            (number, global_name, view)
            for (number, global_name), view in zip(self.global_names(name), views, strict=True)
        ]

    def _unstacked(self, name: str, array: StoredArray) -> list[StoredArray]:
        """Return the arrays of the experts that are stacked on the first axis."""
        if len(array.shape) < 2 or array.shape[0] != self.n_experts:
            raise CorruptError(
                f"the tensor should stack {n_text(self.n_experts, 'expert')} on its first axis, "
                f"but its shape is {array.shape}",
                key=name,
                rank=self.folder,
            )
        shape = array.shape[1:]
        return [
            narrow_array(array, number * prod(shape), shape) for number in range(self.n_experts)
        ]


def find_chunk(root: object, vp_rank: int, *, vpp: int, rank: str) -> object:
    """Return the state dict of one model chunk; {} for an empty stage of several.

    Args:
        root: content of the rank's file.
        rank: the rank's directory, for messages.

    Raises:
        MissingShardError: the file has no model chunk of this name.
        CorruptError: the file has model chunks of another VPP.
    """
    entries = as_mapping(root) or {}
    name = "model" if vpp == 1 else f"model{vp_rank}"
    chunks = [str(key) for key in entries if is_chunk(key)]
    if name not in entries:
        if vpp > 1 and chunks:
            return {}
        problem = f"there is no entry {name!r}"
        if not chunks:
            raise MissingShardError(problem, rank=rank)
        raise MissingShardError(
            f"{problem}; the file contains only {', '.join(chunks)}",
            rank=rank,
            hint="check virtual_pipeline_model_parallel_size in the training arguments",
        )

    # Chunks of another VPP would be dropped silently.
    if (len(chunks) > 1) if vpp == 1 else ("model" in chunks):
        raise CorruptError(f"the file contains {', '.join(chunks)}, but VPP is {vpp}", rank=rank)
    return entries[name]
