"""What the plans of all ranks add up to, and what each rank writes of it; no data.

::

    SavePlans ── planned ──▶ Planned: regions of global tensors, and who writes them
              ── lay_out ──▶ Layout: target catalog, file images
              ── parts ────▶ one Part for each rank, to be sent to it

The coordinator alone sees the whole: with 10⁵ tensors on 10³ ranks, nobody else should get it.

Source: torch 2.13 ``torch/distributed/checkpoint/planner.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from core.arrays.box import Box, full_box
from core.arrays.coverage import first_hole, first_overlap, is_tiled
from core.catalog.catalog import Catalog, Fragment, StoredObject, TensorMeta
from core.catalog.file_image import FileImage, PlacedArray, no_literals
from core.catalog.stored import Extent, StoredArray, array_name
from core.convert.prepare import is_file_of
from core.dist_checkpointing._engine.torch_dtypes import dtype_name
from core.errors import MissingShardError, UnsupportedError, UsageError
from core.formats.format import Format
from core.live.share import HOLDER, filled, is_own
from core.live.tensors import Chunk, metas_of_chunks
from core.opening.target import source_and_target, tensors_only
from core.pickle.inert import ObjectLeaf, TensorLeaf
from core.pickle.nesting import ListIndex, nest_leaves
from core.plan.plan import make_plan
from core.plan.positions import described

if TYPE_CHECKING:
    from core.pickle.nesting import Path as KeyPath

Paths = Mapping[str, tuple[str | int, ...]]
"""Key → where the entry stands in a nested state dict."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What is to be saved.

    Args:
        tensors: the global tensors, by key.
        pieces: key → region → the rank that writes it; disjoint regions, none empty unless the tensor is.
        objects: keys of the other entries.
        paths: None if the state dict was not nested.
        n_ranks: how many there are.
    """

    tensors: dict[str, TensorMeta]
    pieces: dict[str, dict[Box, int]]
    objects: tuple[str, ...]
    paths: Paths | None
    n_ranks: int

    def catalog(self, objects: Mapping[str, StoredObject], arrays: Mapping[str, StoredArray]) -> Catalog:
        """The source catalog.

        Args:
            objects: the other entries, by key.
            arrays: where the tensors inside them lie.
        """

        def fragments_of(key: str) -> Sequence[Fragment]:
            dtype = self.tensors[key].dtype
            return tuple(
                Fragment(
                    key, box, StoredArray(array_name(key, box), dtype, box.shape, Extent(str(rank), 0)), _zeros(box)
                )
                for box, rank in self.pieces[key].items()
            )

        made = Catalog("live", None, self.tensors, fragments_of, objects=objects, skeleton=self._skeleton(objects))
        return made.with_hidden(arrays)

    def _skeleton(self, objects: Mapping[str, StoredObject]) -> object:
        """The nested containers with leaves, or None for a flat state dict."""
        if self.paths is None:
            return None
        leaves: dict[KeyPath, object] = {}
        for key in (*self.tensors, *objects):
            path = tuple(ListIndex(part) if isinstance(part, int) else part for part in self.paths.get(key, (key,)))
            leaves[path] = TensorLeaf(key) if key in self.tensors else ObjectLeaf(key)
        return nest_leaves(leaves)


def planned(plans: Sequence[SavePlan]) -> Planned:
    """What the ranks' plans add up to.

    Raises:
        UsageError: ranks disagree on a tensor, or two of them write the same elements.
        MissingShardError: nobody writes a region.
        UnsupportedError: an element type that checkpoints do not have.
    """
    chunks = [[chunk_of(item) for item in plan.items if is_tensor(item)] for plan in plans]
    tensors = metas_of_chunks(chunk for one in chunks for chunk in one)
    pieces: dict[str, dict[Box, int]] = {key: {} for key in tensors}
    for rank, one in enumerate(chunks):
        for chunk in one:
            if not chunk.box.is_empty or (tensors[chunk.key].n_elements == 0 and not pieces[chunk.key]):
                box = chunk.box if not chunk.box.is_empty else full_box(chunk.shape)
                pieces[chunk.key].setdefault(box, rank)
    for key, boxes in pieces.items():
        found = [box for box in boxes if not box.is_empty]
        twice = first_overlap(found)
        if twice is not None:
            first, second = (f"{described(found[n])} of rank {boxes[found[n]]}" for n in twice)
            raise UsageError(f"{first} and {second} overlap: two ranks would write the same elements", key=key)
        region = full_box(tensors[key].shape)
        if not region.is_empty and not is_tiled(region, found):
            raise MissingShardError(f"no rank has {described(first_hole(region, found))} of it", key=key)
    objects = dict.fromkeys(item.index.fqn for plan in plans for item in plan.items if not is_tensor(item))
    paths: dict[str, tuple[str | int, ...]] = {}
    for plan in plans:
        paths |= plan.planner_data or {}
    is_nested = any(plan.planner_data is not None for plan in plans)
    return Planned(tensors, pieces, tuple(objects), paths if is_nested else None, len(plans))


def is_tensor(item: WriteItem) -> bool:
    """Whether an item is (a region of) a tensor."""
    return bool(item.type != WriteItemType.BYTE_IO)


def chunk_of(item: WriteItem) -> Chunk:
    """The region that an item stands for.

    Raises:
        UnsupportedError: an element type that checkpoints do not have.
    """
    key, data = item.index.fqn, item.tensor_data
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    return Chunk(key, dtype_name(data.properties.dtype, key=key), tuple(data.size), box)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything goes.

    Args:
        source: see ``Planned.catalog``, under the target's keys.
        target: the target catalog.
        images: its files.
    """

    source: Catalog
    target: Catalog
    images: tuple[FileImage, ...]

    def places(self) -> dict[str, tuple[str, int]]:
        """Array → (file, byte offset)."""
        return {placed.array.name: (image.path, placed.offset) for image in self.images for placed in image.arrays}

    @property
    def n_bytes(self) -> int:
        """Bytes of all files."""
        return sum(image.size for image in self.images)


def lay_out(
    save: Planned,
    format: Format,
    dst: Path,
    *,
    objects: Mapping[str, StoredObject] | None = None,
    arrays: Mapping[str, StoredArray] | None = None,
    max_file_bytes: int | None = None,
) -> Layout:
    """The files of a save, and the proof that every byte of their tensors has one writer.

    Args:
        save: what is saved.
        format: a writable one that is not cut by ranks.
        dst: the destination.
        objects, arrays: see ``Planned.catalog``.
        max_file_bytes: see ``core.convert.job.Job``.

    Raises:
        MissingShardError: nobody writes a region.
        UnsupportedError: the format cannot hold what is to be written.
    """
    assert format.lay_out is not None, "the caller has checked it"
    source, target = source_and_target(save.catalog(objects or {}, arrays or {}), format)
    if format.partition == "as_stored":
        target = _by_writer(target, save)
    is_file = is_file_of(format, dst)
    if is_file and not format.nests:
        target = tensors_only(target)
    target = target.with_attrs(max_file_bytes=max_file_bytes, is_file=is_file)
    images = tuple(format.lay_out(target))
    if is_file:
        images = (replace(images[0], path=dst.name),)
    make_plan(source, target, images, compares=False)
    return Layout(source, target, images)


def _by_writer(target: Catalog, save: Planned) -> Catalog:
    """The target with an array for every piece, in a file of the rank that writes it."""
    before = target.fragments_of

    def fragments_of(key: str) -> Sequence[Fragment]:
        if key not in save.pieces:
            return before(key)
        dtype = save.tensors[key].dtype
        return tuple(
            Fragment(
                key, box, StoredArray(array_name(key, box), dtype, box.shape, coords=((HOLDER, rank),)), _zeros(box)
            )
            for box, rank in save.pieces[key].items()
        )

    return replace(target, fragments_of=fragments_of)


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank writes; travels to it.

    Args:
        tensors: the target's tensors that it writes regions of.
        fragments: those regions, and the arrays that hold them.
        images: the files that it writes to, with only those arrays; literals only where ``is_finished_here`` says so.
        token: of the save.
        is_converted: whether the files are those of a checkpoint that will be converted.
    """

    tensors: dict[str, TensorMeta] = field(default_factory=dict)
    fragments: dict[str, tuple[Fragment, ...]] = field(default_factory=dict)
    images: tuple[FileImage, ...] = ()
    token: str = ""
    is_converted: bool = False

    def catalog(self) -> Catalog:
        """The target catalog of this rank."""
        return Catalog("live", None, self.tensors, lambda key: self.fragments[key])


def is_finished_here(image: FileImage) -> bool:
    """Whether one rank fills a file, and its literals can be sent there: it then finishes the file alone."""
    return is_own(image) and is_dataclass(image.literals)


def parts(layout: Layout, save: Planned, *, token: str, is_converted: bool) -> list[Part]:
    """What each rank writes.

    Args:
        layout: of the save.
        save: what is saved.
        token, is_converted: see ``Part``.
    """
    place_of = {placed.array.name: (n, placed) for n, image in enumerate(layout.images) for placed in image.arrays}
    made = [Part(token=token, is_converted=is_converted) for _ in range(save.n_ranks)]
    placed: list[dict[int, dict[str, PlacedArray]]] = [{} for _ in made]
    for key, boxes in save.pieces.items():
        target_of = {fragment.box: fragment for fragment in layout.target.fragments(key)}
        meta = layout.target.meta(key)
        for box, rank in boxes.items():
            same = target_of.get(box)
            found = filled(layout.target, key, [box]) if same is None else (same,)
            for fragment in found:
                assert fragment.array is not None
                number, place = place_of[fragment.array.name]
                placed[rank].setdefault(number, {})[fragment.array.name] = place
            made[rank].tensors[key] = meta
            made[rank].fragments[key] = (*made[rank].fragments.get(key, ()), *found)
    return [
        replace(part, images=tuple(_part_of(layout.images[number], arrays) for number, arrays in of_rank.items()))
        for part, of_rank in zip(made, placed, strict=True)
    ]


def _part_of(image: FileImage, arrays: Mapping[str, PlacedArray]) -> FileImage:
    if is_finished_here(image):
        return image
    return replace(image, arrays=sorted(arrays.values(), key=lambda one: one.offset), literals=no_literals)


def check_same_places(before: Layout, after: Layout) -> None:
    """Returns if the tensors, which ranks have written by the first layout, are in their places in the second one.

    Raises:
        UnsupportedError: the format moves them when there are objects.
    """
    now = after.places()
    for name, place in before.places().items():
        if now.get(name) != place:
            raise UnsupportedError(
                f"{after.target.format} places tensors otherwise where there are other entries: {place} became "
                f"{now.get(name)}",
                key=name,
                hint="save to dcp, and convert that",
            )


def _zeros(box: Box) -> tuple[int, ...]:
    return (0,) * box.rank
