"""The combined plans of all ranks, and the part that each rank writes; no data.

::

    SavePlans ── combine_plans ──▶ PlannedSave: regions of global tensors, and the ranks that
                                   write them
              ── lay_out ────────▶ SaveLayout: target catalog, file images
              ── split_by_rank ──▶ one RankSave for each rank, to be sent to it

Only the coordinator needs memory for the complete save, which may have 10⁵ tensors on 10³ ranks.

Source: torch 2.13 ``torch/distributed/checkpoint/planner.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from core.arrays.box import Box, full_box
from core.arrays.coverage import first_hole, first_overlap, is_tiled
from core.dist_checkpointing._engine.torch_dtypes import dtype_name
from core.dist_checkpointing._live.share import HOLDER, clip_fragments, has_one_holder
from core.dist_checkpointing._live.tensors import Chunk, metas_of_chunks
from core.engine.catalog.catalog import Catalog, StoredObject, TargetCatalog
from core.engine.catalog.file_image import FileImage, PlacedArray, no_literals
from core.engine.catalog.stored import Extent, PlannedArray, StoredArray, array_name
from core.engine.catalog.tensor import (
    Fragment,
    TargetFragment,
    TargetTensor,
    Tensor,
    bind_argument,
    without_fragments,
)
from core.engine.plan.plan import make_plan
from core.engine.plan.positions import described
from core.errors import MissingShardError, UnsupportedError, UsageError
from core.formats.format import Format
from core.opening.target import source_and_target, tensors_only
from core.pickle.inert import ObjectLeaf, TensorLeaf
from core.pickle.nesting import ListIndex, nest_leaves

if TYPE_CHECKING:
    from core.pickle.nesting import Path as KeyPath

Paths = Mapping[str, tuple[str | int, ...]]
"""From key to the entry's path in a nested state dict."""


@dataclass(frozen=True, slots=True)
class PlannedSave:
    """The tensors and other entries of a save, and the ranks that write them.

    Args:
        tensors: the global tensors, by key.
        pieces: for each key, its regions and the rank that writes each. Regions are disjoint, and
            not empty unless the tensor is.
        objects: keys of the other entries.
        paths: paths of the entries; None if the state dict was not nested.
        n_ranks: number of ranks.
    """

    tensors: dict[str, Tensor]
    pieces: dict[str, dict[Box, int]]
    objects: tuple[str, ...]
    paths: Paths | None
    n_ranks: int

    def catalog(
        self, objects: Mapping[str, StoredObject], arrays: Mapping[str, StoredArray]
    ) -> Catalog:
        """Return the source catalog.

        Args:
            objects: the other entries, by key.
            arrays: positions of the tensors inside the other entries, by key.
        """

        # A fragment's file is named after the rank that has it in memory; it is never opened.
        def list_pieces(key: str) -> Sequence[Fragment]:
            dtype = self.tensors[key].dtype
            return tuple(
                Fragment(
                    box,
                    StoredArray(array_name(key, box), dtype, box.shape, Extent(str(rank), 0)),
                    _zeros(box),
                )
                for box, rank in self.pieces[key].items()
            )

        catalog = Catalog(
            "live",
            None,
            {
                key: replace(tensor, tiling=bind_argument(list_pieces, key))
                for key, tensor in self.tensors.items()
            },
            objects=objects,
            skeleton=self._skeleton(objects),
        )
        return catalog.with_hidden(arrays)

    def _skeleton(self, objects: Mapping[str, StoredObject]) -> object:
        """Return the nested containers with leaves, or None for a flat state dict."""
        if self.paths is None:
            return None
        leaves: dict[KeyPath, object] = {}
        for key in (*self.tensors, *objects):
            path = tuple(
                ListIndex(part) if isinstance(part, int) else part
                for part in self.paths.get(key, (key,))
            )
            leaves[path] = TensorLeaf(key) if key in self.tensors else ObjectLeaf(key)
        return nest_leaves(leaves)


def combine_plans(plans: Sequence[SavePlan]) -> PlannedSave:
    """Combine the save plans of all ranks.

    Raises:
        UsageError: ranks disagree on a tensor, or two of them write the same elements.
        MissingShardError: no rank writes a region.
        UnsupportedError: checkpoints do not support the dtype of a tensor.
    """
    # Collect the global tensors.
    chunks_by_rank = [
        [build_item_chunk(item) for item in plan.items if is_tensor(item)] for plan in plans
    ]
    tensors = metas_of_chunks(chunk for chunks in chunks_by_rank for chunk in chunks)
    # Assign every region to one rank, and check that the regions cover each tensor once.
    pieces: dict[str, dict[Box, int]] = {key: {} for key in tensors}
    for rank, chunks in enumerate(chunks_by_rank):
        for chunk in chunks:
            if not chunk.box.is_empty:
                pieces[chunk.key].setdefault(chunk.box, rank)
            elif tensors[chunk.key].n_elements == 0 and not pieces[chunk.key]:
                pieces[chunk.key][full_box(chunk.shape)] = rank
    for key, writers in pieces.items():
        boxes = [box for box in writers if not box.is_empty]
        overlap = first_overlap(boxes)
        if overlap is not None:
            first, second = (f"{described(boxes[n])} of rank {writers[boxes[n]]}" for n in overlap)
            raise UsageError(
                f"{first} and {second} overlap, so two ranks would write the same elements",
                key=key,
            )
        region = full_box(tensors[key].shape)
        if not region.is_empty and not is_tiled(region, boxes):
            raise MissingShardError(
                f"no rank holds {described(first_hole(region, boxes))} of the tensor", key=key
            )
    # Collect the other entries, and the paths that torch's planner has recorded.
    objects = dict.fromkeys(
        item.index.fqn for plan in plans for item in plan.items if not is_tensor(item)
    )
    paths_by_rank = [plan.planner_data for plan in plans if plan.planner_data is not None]
    paths = {key: path for of_rank in paths_by_rank for key, path in of_rank.items()}
    return PlannedSave(
        tensors, pieces, tuple(objects), paths if paths_by_rank else None, len(plans)
    )


def is_tensor(item: WriteItem) -> bool:
    """Return whether an item is (a region of) a tensor."""
    return bool(item.type != WriteItemType.BYTE_IO)


def build_item_chunk(item: WriteItem) -> Chunk:
    """Return the region that an item stands for.

    Raises:
        UnsupportedError: checkpoints do not support the dtype of the tensor.
    """
    key, data = item.index.fqn, item.tensor_data
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    return Chunk(key, dtype_name(data.properties.dtype, key=key), tuple(data.size), box)


@dataclass(frozen=True, slots=True)
class SaveLayout:
    """The files of a save.

    Args:
        source: catalog of the planned save, under the target's keys.
        target: the target catalog.
        images: the target's files.
    """

    source: Catalog
    target: TargetCatalog
    images: tuple[FileImage, ...]

    def positions(self) -> dict[str, tuple[str, int]]:
        """Return the file and the byte offset of every array, by the array's name."""
        return {
            placed.array.name: (image.path, placed.offset)
            for image in self.images
            for placed in image.arrays
        }

    @property
    def n_bytes(self) -> int:
        """Size of all files together, in bytes."""
        return sum(image.size for image in self.images)


def lay_out(
    save: PlannedSave,
    format: Format,
    dst: Path,
    *,
    objects: Mapping[str, StoredObject] | None = None,
    arrays: Mapping[str, StoredArray] | None = None,
    max_file_bytes: int | None = None,
) -> SaveLayout:
    """Lay out the files of a save, and prove that every byte of their tensors has one writer.

    Args:
        save: the combined plans.
        format: a writable format whose files are not rank files.
        dst: the destination.
        objects: the other entries, by key.
        arrays: positions of the tensors inside the other entries, by key.
        max_file_bytes: maximum size of a file, as in ``core.verbs.convert.job.Job``.

    Raises:
        MissingShardError: no rank writes a region.
        UnsupportedError: the format cannot store an entry.
    """
    # Describe the target. Formats that store regions as they are get one array per region.
    assert format.lay_out is not None, "the caller has checked it"
    source, target = source_and_target(save.catalog(objects or {}, arrays or {}), format)
    if format.lists_chunks:
        target = _split_by_writer(target, save)
    # A single file that cannot nest entries stores only the tensors.
    is_file = format.writes_file(dst)
    if format.writes_only_tensors(dst):
        target = tensors_only(target)
    target = replace(
        target, write=replace(target.write, max_file_bytes=max_file_bytes, is_file=is_file)
    )
    # Lay out the files.
    images = tuple(format.lay_out(target))
    if is_file:
        images = (replace(images[0], path=dst.name),)
    # Prove that the source covers every byte: making a copy plan checks it. The plan is not used.
    make_plan(source, target, images, compares=False)
    return SaveLayout(source, target, images)


def _split_by_writer(target: TargetCatalog, save: PlannedSave) -> TargetCatalog:
    """Return the target with an array for every region, in a file of the rank that writes it."""

    def list_pieces(key: str) -> Sequence[TargetFragment]:
        dtype = save.tensors[key].dtype
        return tuple(
            Fragment(
                box,
                PlannedArray(array_name(key, box), dtype, box.shape, coords=((HOLDER, rank),)),
                _zeros(box),
            )
            for box, rank in save.pieces[key].items()
        )

    tensors = {
        key: (
            replace(tensor, tiling=bind_argument(list_pieces, key))
            if key in save.pieces
            else tensor
        )
        for key, tensor in target.tensors.items()
    }
    return replace(target, tensors=tensors)


@dataclass(frozen=True, slots=True)
class RankSave:
    """The part of a save that one rank writes; it is sent to that rank.

    Args:
        tensors: the target's tensors of which the rank writes regions, without their fragments.
        fragments: the regions, and the arrays that contain them, by key.
        images: the files that the rank writes to, with only those arrays; literals only if
            ``is_finished_by_rank``.
        token: identifier of the save.
        is_converted: True if the files belong to a checkpoint that will be converted.
        number: number of the rank.
    """

    tensors: dict[str, TargetTensor] = field(default_factory=dict)
    fragments: dict[str, tuple[TargetFragment, ...]] = field(default_factory=dict)
    images: tuple[FileImage, ...] = ()
    token: str = ""
    is_converted: bool = False
    number: int = 0

    def catalog(self) -> TargetCatalog:
        """Return the target catalog with only the regions of this rank."""
        return Catalog(
            "live",
            None,
            {
                key: replace(tensor, tiling=partial(self.fragments.__getitem__, key))
                for key, tensor in self.tensors.items()
            },
        )


def is_finished_by_rank(image: FileImage) -> bool:
    """Return whether one rank finishes a file alone.

    It does so if no other rank writes to the file and the file's literals can be sent to it.
    """
    # Literals are a function; only those that are dataclasses can be pickled.
    return has_one_holder(image) and is_dataclass(image.literals)


def split_by_rank(
    layout: SaveLayout, save: PlannedSave, *, token: str, is_converted: bool
) -> list[RankSave]:
    """Split a save into the parts that the ranks write.

    Args:
        layout: the files of the save.
        save: the combined plans.
        token, is_converted: fields of every ``RankSave``.
    """
    parts = [
        RankSave(token=token, is_converted=is_converted, number=number)
        for number in range(save.n_ranks)
    ]
    # Assign to every rank the fragments of the target that its regions fill.
    for key, writers in save.pieces.items():
        fragment_at = {fragment.box: fragment for fragment in layout.target.fragments(key)}
        meta = layout.target.tensor(key)
        for box, rank in writers.items():
            # Most regions are fragments of the target; others fill parts of several.
            fragment = fragment_at.get(box)
            fragments = (
                clip_fragments(layout.target, key, [box]) if fragment is None else (fragment,)
            )
            parts[rank].tensors[key] = without_fragments(meta)
            parts[rank].fragments[key] = (*parts[rank].fragments.get(key, ()), *fragments)
    # Add the files that contain those fragments' arrays.
    position_of = {
        placed.array.name: (n, placed)
        for n, image in enumerate(layout.images)
        for placed in image.arrays
    }
    return [
        replace(part, images=_images_of_rank(part, layout.images, position_of)) for part in parts
    ]


def _images_of_rank(
    part: RankSave, images: Sequence[FileImage], position_of: Mapping[str, tuple[int, PlacedArray]]
) -> tuple[FileImage, ...]:
    """Return the files that a rank writes to, in the order in which its fragments need them.

    Args:
        part: the fragments of the rank.
        images: all files of the save.
        position_of: the number of its file, and its position there, for every array, by the array's
            name.

    Returns:
        The files that the rank finishes, unchanged; the others with only the rank's arrays, and
        without literals.
    """
    # Group the rank's arrays by file. Fragments may share an array.
    arrays_of: dict[int, dict[str, PlacedArray]] = {}
    for fragments in part.fragments.values():
        for fragment in fragments:
            assert fragment.array is not None, "fragments of a target are stored in arrays"
            number, placed = position_of[fragment.array.name]
            arrays_of.setdefault(number, {})[fragment.array.name] = placed
    # Drop what the rank does not write: the result is sent to it.
    return tuple(
        images[number]
        if is_finished_by_rank(images[number])
        else replace(
            images[number],
            # An array without bytes comes before the one at its offset.
            arrays=sorted(
                arrays.values(), key=lambda placed: (placed.offset, placed.array.n_bytes)
            ),
            literals=no_literals,
        )
        for number, arrays in arrays_of.items()
    )


def check_same_positions(before: SaveLayout, after: SaveLayout) -> None:
    """Raise unless two layouts have the tensors of the first at the same positions.

    Args:
        before: the layout by which ranks wrote the tensors.
        after: the layout with the other entries.

    Raises:
        UnsupportedError: the format moves tensors if there are other entries.
    """
    positions = after.positions()
    for name, position in before.positions().items():
        if positions.get(name) != position:
            raise UnsupportedError(
                f"in the format {after.target.format}, the non-tensor entries would move this "
                f"tensor from {position} to {positions.get(name)}",
                key=name,
                hint="save as dcp, then convert that checkpoint",
            )


def _zeros(box: Box) -> tuple[int, ...]:
    """Return the offset of a fragment that begins at its array's first element."""
    return (0,) * box.rank
