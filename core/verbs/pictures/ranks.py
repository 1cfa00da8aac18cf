"""Arrange a checkpoint by the ranks that hold it.

Two formats of Megatron are laid out by ranks:

- Rank files: every rank has a directory. Those that the training arguments specify and that cannot
  be read are missing.
- torch_dist: every rank writes ``__RANK_N.distcp``, with the boxes of which it is the main replica.
  The number of a rank gives its coordinates, as Megatron's ``RankGenerator`` numbers them; a cell
  adds up the files of its data and context parallel ranks. It lacks what another tensor rank wrote
  for all, such as norms. A rank is missing if one of its files is.

Not supported: torch_dist whose files contradict the training arguments (ranks of other numbers,
layers in other stages), DeepSpeed, and FSDP without Megatron; these have no grid.

Source: Megatron-LM d98e8a64 ``core/parallel_state.py`` ``RankGenerator``, pinned in tests/golden.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING

from core.arrays.dtypes import itemsize
from core.engine.catalog.facets import DcpFacts, RankFacts
from core.engine.catalog.key_patterns import ranges
from core.errors import CheckpointingException
from core.files.remote_path import location_of
from core.formats.megatron.format import possible_dirs
from core.megatron.model.args import fields_of, parse_facts, topology_of
from core.megatron.model.facts import PREDICTION_STACK
from core.megatron.model.topology import Rank, Topology
from core.megatron.reshard.from_ranks import facts_of_ranks, ranks_of
from core.megatron.reshard.rank_model import merge_ranks
from core.megatron.rules.tables import load_rules
from core.opening.damaged import open_readable_part
from core.opening.objects import loaded
from core.pickle.noted import gc_paused
from core.values import dataclass
from core.verbs.inspect.optimizer_states import is_state

if TYPE_CHECKING:
    from core.arrays.box import Box
    from core.engine.catalog.catalog import Catalog
    from core.megatron.model.facts import ModelFacts
    from core.megatron.rules.rules import Rules
    from core.opening.open import Checkpoint

_DISTCP = re.compile(r"(?:.*/)?__(\d{1,9})_\d+\.distcp")


@dataclass(frozen=True, slots=True)
class RankCell:
    """The content of one rank.

    Args:
        pp, tp, ep: coordinates of the rank.
        layers: global numbers of its decoder layers, such as ``0-3, 8-11``; empty if it has none.
        experts: global numbers of its experts, as ``layers``.
        others: modules outside layers, such as ``embedding`` and ``output_layer``.
        model_bytes, optimizer_bytes: bytes of its files or boxes.
        files: names of its files.
        is_missing: the checkpoint should have this rank and does not.
    """

    pp: int
    tp: int
    ep: int
    layers: str
    experts: str
    others: tuple[str, ...]
    model_bytes: int
    optimizer_bytes: int
    files: tuple[str, ...]
    is_missing: bool = False


@dataclass(frozen=True, slots=True)
class RankGrid:
    """The ranks of a Megatron checkpoint.

    Args:
        pp, tp, ep: parallel sizes.
        vpp: number of virtual stages of each pipeline stage; 1 if there are none.
        cells: one for each rank, ordered by (pp, ep, tp).
    """

    pp: int
    tp: int
    ep: int
    vpp: int
    cells: tuple[RankCell, ...]


Position = tuple[int, int, int]
"""Coordinates of a cell: (pp, ep, tp)."""


@gc_paused()
def rank_grid(checkpoint: Checkpoint) -> RankGrid | None:
    """Arrange a Megatron checkpoint by its ranks; reads metadata only.

    A rank that is missing has the layers and experts that the training arguments give it, and
    ``files`` lists those of its files that exist.

    Returns:
        None if the checkpoint is not laid out by ranks, or is the file of one rank.
    """
    # Without usable training arguments, nothing is known about the ranks.
    with suppress(CheckpointingException):
        if checkpoint.catalog.is_rank_local:
            return _grid_of_rank_files(checkpoint)
        if checkpoint.catalog.facet(DcpFacts) is not None:
            return _grid_of_torch_dist(checkpoint)
    return None


def read_rank_grid(path: str | Path) -> RankGrid | None:
    """Arrange a checkpoint that may be damaged by its ranks; reads metadata only.

    Args:
        path: path or URL of the checkpoint.

    Returns:
        None if nothing can be read, or the checkpoint is not laid out by ranks.
    """
    with suppress(CheckpointingException):
        checkpoint = open_readable_part(location_of(path))
        with closing(checkpoint.store):
            return rank_grid(checkpoint)
    return None


@dataclass(slots=True)
class _CellContent:
    """The content of a cell that is being collected."""

    layers: set[int] = field(default_factory=set)
    experts: set[int] = field(default_factory=set)
    others: dict[str, None] = field(default_factory=dict)
    model_bytes: int = 0
    optimizer_bytes: int = 0
    files: list[str] = field(default_factory=list)
    is_missing: bool = False

    def add_bytes(self, n_bytes: int, *, is_optimizer: bool) -> None:
        """Add the bytes of a tensor or of a box."""
        if is_optimizer:
            self.optimizer_bytes += n_bytes
        else:
            self.model_bytes += n_bytes

    def cell(self, position: Position) -> RankCell:
        """Return the content as a cell."""
        pp, ep, tp = position
        layers, experts = (
            ranges(numbers).replace(",", ", ") for numbers in (self.layers, self.experts)
        )
        return RankCell(
            pp=pp,
            tp=tp,
            ep=ep,
            layers=layers,
            experts=experts,
            others=tuple(self.others),
            model_bytes=self.model_bytes,
            optimizer_bytes=self.optimizer_bytes,
            files=tuple(self.files),
            is_missing=self.is_missing,
        )


def _grid(topology: Topology, contents: Mapping[Position, _CellContent]) -> RankGrid:
    """Build the grid of all cells."""
    cells = tuple(contents[position].cell(position) for position in sorted(contents))
    return RankGrid(topology.pp, topology.tp, topology.ep, topology.vpp, cells)


def _position(rank: Rank) -> Position:
    return rank.pp, rank.ep, rank.tp


def _grid_of_rank_files(checkpoint: Checkpoint) -> RankGrid | None:
    """Arrange rank files.

    Raises:
        CheckpointingException: the training arguments are unusable.
    """
    catalog, store = checkpoint.catalog, checkpoint.store
    rank_facts, topology = catalog.facet(RankFacts), catalog.facet(Topology)
    if rank_facts is None or rank_facts.is_single_rank or topology is None:
        return None
    # Compare the directories with the most similar set that the sizes allow, as ``validate`` does.
    existing = set(store.folders())
    allowed = possible_dirs(catalog.args, topology)
    expected = max(allowed, key=lambda names: (len(names.keys() & existing), -len(names)))
    readable = {folder for folder, _ in rank_facts.ranks.values()}
    positions = {folder: _position(topology.rank_at(coords)) for folder, coords in expected.items()}
    contents = {position: _CellContent() for position in positions.values()}
    for folder, position in positions.items():
        contents[position].is_missing = folder not in readable
        if folder in existing:
            contents[position].files = [f"{folder}/{name}" for name in sorted(store.files(folder))]

    # Add up the bytes; a tied tensor has none of its own.
    ties = catalog.ties
    for key, tensor in catalog.tensors.items():
        folder, _, name = key.partition(":")
        if folder in positions and key not in ties:
            contents[positions[folder]].add_bytes(tensor.n_bytes, is_optimizer=is_state(name))

    # Models that cannot be resharded have bytes, but no layers.
    with suppress(CheckpointingException):
        _add_names_of_ranks(contents, catalog)
    return _grid(topology, contents)


def _add_names_of_ranks(contents: Mapping[Position, _CellContent], catalog: Catalog) -> None:
    """Add the layers, experts and other modules that the files of each rank have.

    Raises:
        CheckpointingException: the layout of the model is not supported.
    """
    rules, ranks = load_rules(), ranks_of(catalog)
    facts = facts_of_ranks(catalog.args, ranks, rules)
    problems: list[CheckpointingException] = []
    model = merge_ranks(catalog, ranks, facts, rules, report=problems.append)
    for name, tensor in model.tensors.items():
        module = _module_of(name, rules)
        for part in tensor.parts:
            content = contents.get(_position(part.rank))
            if content is not None:
                _add_module(content, module, None)
    # What a missing rank should have follows from the arguments.
    for position, content in contents.items():
        if content.is_missing:
            content.layers, content.experts = _expected_numbers(position, facts)


def _expected_numbers(position: Position, facts: ModelFacts) -> tuple[set[int], set[int]]:
    """Return the layers and the experts that a rank should have.

    Raises:
        CheckpointingException: the layers cannot be distributed over the stages.
    """
    pp_rank, ep_rank, _ = position
    topology = facts.topology
    stages, stack = facts.stages(topology.pp, topology.vpp), facts.kind.stacks[0]
    layers: set[int] = set()
    for vp_rank in range(topology.vpp):
        first = stages.offset(stack, vp_rank, pp_rank)
        layers.update(range(first, first + stages.count(stack, vp_rank, pp_rank)))
    n_experts = (facts.n_experts or 0) // topology.ep if layers & facts.moe_layers else 0
    return layers, set(range(ep_rank * n_experts, (ep_rank + 1) * n_experts))


@dataclass(frozen=True, slots=True)
class _Module:
    """The place of a tensor in the model.

    Args:
        layers: number of its layer, or axis of the layers, which are stacked.
        experts: number of its expert, or axis of the experts.
        other: name of its module, if that is not in a layer.
    """

    layers: _Numbers | None = None
    experts: _Numbers | None = None
    other: str | None = None


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The number of a layer or expert, or the axis along which several are stacked."""

    number: int | None = None
    axis: int = 0

    def within(self, box: Box | None) -> range:
        """Return the numbers of those in a box of the tensor; None is the complete tensor."""
        if self.number is not None:
            return range(self.number, self.number + 1)
        if box is None or len(box.shape) <= self.axis:
            return range(0)
        return range(box.offset[self.axis], box.end[self.axis])


def _module_of(name: str, rules: Rules) -> _Module:
    """Return the place of a tensor, given its name in the global form or in torch_dist's."""
    layer, stacked, expert = rules.layer_of(name), rules.stacked_of(name), rules.expert_of(name)
    stack = layer.stack if layer is not None else stacked[0] if stacked is not None else None
    if stack is None:
        # The module outside layers: ``embedding``, ``decoder.final_layernorm``.
        parts = name.split(".")
        is_beside_layers = any(stack_name.startswith(f"{parts[0]}.") for stack_name in rules.stacks)
        return _Module(other=".".join(parts[: 2 if is_beside_layers else 1]))
    if stack == PREDICTION_STACK:
        return _Module(other=PREDICTION_STACK.partition(".")[0])
    layers = _Numbers(None if layer is None else layer.number)
    if expert is None or (expert.number is None and expert.names != "stacked"):
        return _Module(layers)
    return _Module(layers, _Numbers(expert.number, axis=1 if layer is None else 0))


def _add_module(content: _CellContent, module: _Module, box: Box | None) -> None:
    """Add a tensor, or a box of it, to the content of a cell."""
    if module.other is not None:
        content.others[module.other] = None
    if module.layers is not None:
        content.layers.update(module.layers.within(box))
    if module.experts is not None:
        content.experts.update(module.experts.within(box))


def _grid_of_torch_dist(checkpoint: Checkpoint) -> RankGrid | None:
    """Arrange the files of torch_dist by the ranks that wrote them.

    Raises:
        CheckpointingException: the training arguments are unusable.
    """
    catalog = checkpoint.catalog
    if catalog.args is None and "args" in catalog.objects:
        catalog = loaded(catalog, checkpoint.store)
    topology = topology_of(catalog.args)
    contents: dict[Position, _CellContent] = {
        _position(rank): _CellContent() for rank in topology.ranks()
    }
    dcp = catalog.facet(DcpFacts)
    files = () if dcp is None else dcp.item_files
    # Every cell has tensors that no other has, so a converter wrote what has fewer files.
    positions = _positions_of_files(files, catalog, topology)
    if not positions or {*positions.values()} != {*contents}:
        return None
    cells = {file: contents[position] for file, position in positions.items()}
    sizes = checkpoint.store.sizes()
    for file, content in sorted(cells.items()):
        if file in sizes:
            content.files.append(file)
        else:
            content.is_missing = True

    # The boxes of the model name its layers and experts.
    rules = load_rules()
    for key, tensor in catalog.tensors.items():
        is_optimizer = is_state(key)
        module = _Module() if is_optimizer else _module_of(key, rules)
        item_bytes = itemsize(tensor.dtype)
        for fragment in tensor.fragments():
            file = "" if fragment.array is None else fragment.array.extent.file
            if file in cells:
                _add_module(cells[file], module, fragment.box)
            if file in cells and file in sizes:
                n_bytes = fragment.box.n_elements * item_bytes
                cells[file].add_bytes(n_bytes, is_optimizer=is_optimizer)
    if topology.pp > 1 and not _has_expected_layers(contents, parse_facts(catalog.args)):
        return None
    return _grid(topology, contents)


def _positions_of_files(
    files: tuple[str, ...], catalog: Catalog, topology: Topology
) -> dict[str, Position]:
    """Return the cell of each file; {} if their ranks do not fit the training arguments.

    Megatron numbers ranks by tensor, context, data and pipeline rank; with
    ``use_tp_pp_dp_mapping`` by tensor, context, pipeline and data rank.
    """
    fields = fields_of(catalog.args)
    world_size, cp = fields.get("world_size"), fields.get("context_parallel_size") or 1
    numbers = {file: int(match[1]) for file in files if (match := _DISTCP.fullmatch(file))}
    if not isinstance(world_size, int) or not isinstance(cp, int):
        return {}
    n_stage = world_size // topology.pp
    if fields.get("use_tp_pp_dp_mapping"):
        n_stage = topology.tp * cp
    is_possible = n_stage > 0 and n_stage % topology.tp == 0 and world_size % n_stage == 0
    if not is_possible or len(numbers) < len(files) or max(numbers.values()) >= world_size:
        return {}
    return {
        file: _position(topology.rank_of(number % n_stage, number // n_stage % topology.pp))
        for file, number in numbers.items()
    }


def _has_expected_layers(contents: Mapping[Position, _CellContent], facts: ModelFacts) -> bool:
    """Return whether no cell holds a layer of another pipeline stage.

    Raises:
        CheckpointingException: the layers cannot be distributed over the stages.
    """
    return all(
        content.layers <= _expected_numbers(position, facts)[0]
        for position, content in contents.items()
    )
