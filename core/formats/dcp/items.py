"""The data files of a DCP checkpoint, shared by plain DCP and Megatron's torch_dist.

On disk (``__<n>_0.distcp``)::

    item · padding · item · padding · item …          every item begins at a multiple of 64
    ├── object: a torch zip ``archive/…`` of its value (or the source's own stream, verbatim)
    └── chunk:  a torch zip ``archive/data.pkl, …, archive/data/0`` of one contiguous tensor

Torch writes the items back to back, so that their data has any alignment; padding is legal, because
``.metadata`` states offset and length of every item. Inside a torch zip data is aligned to 64 from
the zip's start, hence in the file too.

How a chunk's zip looks depends on nothing but dtype and shape (the CRC apart), so it is planned
once per such pair: 10⁵ chunks are laid out and written without planning 10⁵ zips.

Source: written and loaded back by torch 2.13 and megatron-core 0.16.1, see the tests of ``dcp`` and
    ``torch_dist``.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, overload

from core.arrays.box import Box, Shape
from core.catalog.catalog import TargetCatalog, held_boxes
from core.catalog.file_image import CrcOf, FileImage, Literal, PlacedArray
from core.catalog.stored import Coords, PlannedArray
from core.errors import UnsupportedError
from core.formats.torch.format import TreePlan, plan_tree
from core.pickle.inert import TensorLeaf

if TYPE_CHECKING:
    from core.catalog.catalog import StoredObject

ALIGNMENT = 64
PREFIX = "archive"
DEFAULT_MAX_FILE_BYTES = 5 * 10**9
BEHIND: Coords = (("behind", 1),)
"""Suffix of coords for an item in a file of its own after the others, so that no other item
moves.
"""


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The torch zip of one contiguous tensor, whatever its name.

    Args:
        size: bytes of the zip.
        data_offset: byte of the zip at which the tensor's data begins.
        head: the literal bytes before the data.
        tail_offset: byte of the zip at which the literal bytes after the data begin.
        tail: those bytes, for a CRC of zero.
        crc_at: positions in ``tail`` of the four bytes of the data's CRC, little endian.
    """

    size: int
    data_offset: int
    head: bytes
    tail_offset: int
    tail: bytes
    crc_at: tuple[int, ...]

    def literals(self, crc: int) -> tuple[Literal, Literal]:
        """Return everything but the data."""
        tail = bytearray(self.tail)
        crc_bytes = crc.to_bytes(4, "little")
        for position in self.crc_at:
            tail[position : position + 4] = crc_bytes
        return (0, self.head), (self.tail_offset, bytes(tail))


def plan_chunk(dtype: str, shape: Shape) -> ChunkPlan:
    """Plan the zip of a chunk.

    The positions of the CRC are found by planning the zip for two CRCs and comparing.

    """
    stand_in_array = PlannedArray("chunk", dtype, shape)
    plan = plan_tree(TensorLeaf("chunk"), array_of=lambda key: stand_in_array, prefix=PREFIX)
    (placed,) = plan.arrays
    head, tail_offset, tail = _around(plan, placed, 0)
    _, _, other_tail = _around(plan, placed, 0xFFFFFFFF)
    differing = [
        position
        for position, (first, second) in enumerate(zip(tail, other_tail, strict=True))
        if first != second
    ]
    return ChunkPlan(plan.size, placed.offset, head, tail_offset, tail, tuple(differing[::4]))


def _around(plan: TreePlan, placed: PlacedArray, crc: int) -> tuple[bytes, int, bytes]:
    """Return the literal bytes before an array, the offset of those after it, and those bytes."""
    end = placed.offset + placed.array.n_bytes
    image = {False: bytearray(placed.offset), True: bytearray(plan.size - end)}
    for offset, data in plan.literals(lambda name: crc):
        is_behind = offset >= end
        start = offset - end if is_behind else offset
        assert start + len(data) <= len(image[is_behind])
        image[is_behind][start : start + len(data)] = data
    return bytes(image[False]), end, bytes(image[True])


@dataclass(slots=True)
class Item:
    """One item, and its position once it has one.

    Args:
        key: the tensor or object.
        size: bytes.
        box: the tensor's region that a chunk holds; None for an object.
        coords: coordinates that select its file, see ``lay_out_items``.
        plan: layout of its zip; None for a stream that is copied verbatim.
        array: the array that fills a chunk or a verbatim stream; None if the plan has its own
            arrays.
        file, offset: number of the file in ``ItemLayout.files``, and first byte of the item in it.
    """

    key: str
    size: int
    box: Box | None
    coords: Coords
    plan: ChunkPlan | TreePlan | None
    array: PlannedArray | None
    file: int = -1
    offset: int = -1

    def placed(self) -> Iterator[PlacedArray]:
        """Yield the arrays of the item, with offsets in its file."""
        if isinstance(self.plan, TreePlan):
            for placed in self.plan.arrays:
                yield PlacedArray(self.offset + placed.offset, placed.array)
        else:
            assert self.array is not None
            yield PlacedArray(self.offset + (self.plan.data_offset if self.plan else 0), self.array)


@dataclass(frozen=True, slots=True)
class ItemLayout:
    """The positions of all items.

    Args:
        files: the images, by number.
        chunks: tensor key → its chunks, in the catalog's order.
        objects: object key → its item.
    """

    files: tuple[FileImage, ...]
    chunks: dict[str, list[Item]]
    objects: dict[str, Item]


def lay_out_items(
    target: TargetCatalog,
    objects: Iterable[StoredObject],
    *,
    max_file_bytes: int | None = None,
    apart: str | None = None,
) -> ItemLayout:
    """Place every tensor of a target catalog and the given objects in ``.distcp`` files.

    The coords of an array or object select its file: ``(("file", n),)`` is file number n; followed
    by ``BEHIND``, a file after those with that number. Other coords get one file each, in order of
    first appearance. Chunks without coords fill further files one after the other, and objects
    without coords go to the first file. In a file objects come before chunks, as torch writes them.

    Args:
        target: each of its arrays becomes a chunk.
        objects: each has a value, or a raw stream among the target's hidden tensors.
        max_file_bytes: maximum size of a file, unless one item alone is larger; None for 5 GB, and
            no maximum for files that coords name.
        apart: prefix of keys whose items go to files of their own, with the same prefix in their
            names; None for no such files.

    Raises:
        UnsupportedError: a chunk does not fit its tensor, or two chunks of a tensor begin at the
            same element, which ``.metadata`` cannot express.
    """
    of_objects = {item.key: item for item in _object_items(target, objects)}
    of_tensors = _chunk_items(target)
    groups = _group_by_file(
        [*of_objects.values(), *chain.from_iterable(of_tensors.values())], max_file_bytes, apart
    )
    files = []
    for file, (name, members) in enumerate(groups):
        end = 0
        for item in members:
            item.file, item.offset = file, _aligned(end)
            end = item.offset + item.size
        files.append(_image(name, members, end))
    return ItemLayout(tuple(files), of_tensors, of_objects)


def _object_items(target: TargetCatalog, objects: Iterable[StoredObject]) -> Iterator[Item]:
    """Yield an item for every object; equal simple values share a plan."""
    plans: dict[object, TreePlan] = {}
    for stored in objects:
        if stored.raw_key is not None:
            stream = target.whole_array(stored.raw_key)
            yield Item(
                stored.key, stream.n_bytes, None, stored.coords or stream.coords, None, stream
            )
            continue
        same = _spelling(stored.value)
        plan = None if same is None else plans.get(same)
        if plan is None:
            plan = plan_tree(stored.value, array_of=target.whole_array, prefix=PREFIX)
            if same is not None:
                plans[same] = plan
        yield Item(stored.key, plan.size, None, stored.coords, plan, None)


def _spelling(value: object) -> object:
    """Return a key that equal simple values share, None for other values: 10⁴ extra states are
    ``[None]``.
    """
    if type(value) is list and len(value) == 1:
        inner = _spelling(value[0])
        return None if inner is None else ("list", inner)
    return (
        (type(value), repr(value))
        if value is None or type(value) in (bool, int, float, str)
        else None
    )


def _chunk_items(target: TargetCatalog) -> dict[str, list[Item]]:
    """Return tensor key → its chunks."""
    plans: dict[tuple[str, Shape], ChunkPlan] = {}
    items_of: dict[str, list[Item]] = {}
    for key, meta in target.tensors.items():
        items = items_of[key] = []
        offsets: set[Shape] = set()
        for stored, box in held_boxes(meta.shape, target.fragments(key)):
            if box is None:
                raise UnsupportedError(
                    f"the array {stored.name!r} is not a chunk of the tensor", key=key
                )
            if box.offset in offsets:
                raise UnsupportedError(
                    f"two chunks begin at element {box.offset}, which DCP cannot store", key=key
                )
            offsets.add(box.offset)
            plan = plans.get((stored.dtype, box.shape))
            if plan is None:
                plan = plans[stored.dtype, box.shape] = plan_chunk(stored.dtype, box.shape)
            items.append(Item(key, plan.size, box, stored.coords, plan, stored))
    return items_of


def _group_by_file(
    items: Iterable[Item], max_file_bytes: int | None, apart: str | None
) -> Iterator[tuple[str, list[Item]]]:
    """Yield file names and their items, objects first.

    Args:
        max_file_bytes, apart: as for ``lay_out_items``.
    """
    for number, members in _numbered_groups(items, max_file_bytes or DEFAULT_MAX_FILE_BYTES):
        members.sort(key=lambda item: item.box is not None)
        behind = [item for item in members if item.coords[1:] == BEHIND]
        part = -1
        for prefix, group in _set_apart(
            [item for item in members if item.coords[1:] != BEHIND], apart
        ):
            parts = [group] if max_file_bytes is None else _split(group, max_file_bytes)
            for part, part_items in enumerate(parts):
                yield f"{prefix}__{number}_{part}.distcp", part_items
        if behind:
            yield f"__{number}_{part + 1}.distcp", behind


def _numbered_groups(items: Iterable[Item], max_file_bytes: int) -> list[tuple[int, list[Item]]]:
    """Return the items of each file number; items without coords fill files up to
    ``max_file_bytes``.
    """
    # Coords name a file, or ask for one of their own.
    named: dict[int, list[Item]] = defaultdict(list)
    by_coords: dict[Coords, list[Item]] = defaultdict(list)
    free: list[Item] = []
    for item in items:
        if item.coords and item.coords[0][0] == "file":
            named[item.coords[0][1]].append(item)
        elif item.coords:
            by_coords[item.coords].append(item)
        else:
            free.append(item)
    groups = sorted(named.items())
    first_free = max(named, default=-1) + 1
    groups += enumerate(by_coords.values(), first_free)

    # Objects without coords go to the first file, chunks to further ones.
    if groups:
        groups[0][1][:0] = [item for item in free if item.box is None]
        free = [item for item in free if item.box is not None]
    groups += enumerate(_split(free, max_file_bytes), first_free + len(by_coords))
    return groups


def _set_apart(items: list[Item], prefix: str | None) -> Iterator[tuple[str, list[Item]]]:
    """Yield the prefix of file names, and the items whose keys begin with it.

    "" for the other items.
    """
    if prefix is None:
        if items:
            yield "", items
        return
    for name, is_apart in (("", False), (prefix, True)):
        members = [item for item in items if item.key.startswith(prefix) == is_apart]
        if members:
            yield name, members


def _split(items: Iterable[Item], max_file_bytes: int) -> Iterator[list[Item]]:
    """Yield runs of consecutive items, as many as fit into a file, but at least one."""
    current: list[Item] = []
    end = 0
    for item in items:
        if current and _aligned(end) + item.size > max_file_bytes:
            yield current
            current, end = [], 0
        current.append(item)
        end = _aligned(end) + item.size
    if current:
        yield current


@dataclass(frozen=True, slots=True)
class _Arrays(Sequence[PlacedArray]):
    """The arrays of a file as columns: with 10⁵ chunks, objects are made on request."""

    offsets: array[int]
    arrays: list[PlannedArray]

    def __len__(self) -> int:
        return len(self.arrays)

    @overload
    def __getitem__(self, index: int) -> PlacedArray: ...
    @overload
    def __getitem__(self, index: slice) -> list[PlacedArray]: ...
    def __getitem__(self, index: int | slice) -> PlacedArray | list[PlacedArray]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self.arrays)))]
        return PlacedArray(self.offsets[index], self.arrays[index])


@dataclass(frozen=True, slots=True)
class _Literals:
    """The bytes around the arrays of a file; a value, so that processes can pass it to each other.

    Args:
        begins: byte of the file at which each item begins.
        plans: of the items' zips; None for a stream that is copied verbatim.
        arrays: of all items, in order.
    """

    begins: array[int]
    plans: list[ChunkPlan | TreePlan | None]
    arrays: list[PlannedArray]

    def __call__(self, crc_of: CrcOf) -> Iterator[Literal]:
        return _joined(self._pieces(crc_of))

    def _pieces(self, crc_of: CrcOf) -> Iterator[Literal]:
        arrays = iter(self.arrays)
        end = 0
        for begin, plan in zip(self.begins, self.plans, strict=True):
            yield end, bytes(begin - end)
            if plan is None:
                end = begin + next(arrays).n_bytes
                continue
            if isinstance(plan, ChunkPlan):
                literals: Iterable[Literal] = plan.literals(crc_of(next(arrays).name))
            else:
                literals = plan.literals(crc_of)
                for _ in plan.arrays:
                    next(arrays)
            for offset, data in literals:
                yield begin + offset, data
            end = begin + plan.size


def _image(name: str, items: Sequence[Item], size: int) -> FileImage:
    """Return the image of one file; it keeps no item."""
    placed = _Arrays(array("q"), [])
    begins = array("q")
    plans: list[ChunkPlan | TreePlan | None] = []
    for item in items:
        begins.append(item.offset)
        plans.append(item.plan)
        for placed_array in item.placed():
            placed.offsets.append(placed_array.offset)
            placed.arrays.append(placed_array.array)
    return FileImage(name, size, placed, _Literals(begins, plans, placed.arrays))


def _joined(literals: Iterable[Literal], most: int = 1 << 16) -> Iterator[Literal]:
    """Yield the same bytes with neighbours joined, up to about ``most`` bytes each."""
    start, pending = 0, bytearray()
    for offset, data in literals:
        if pending and (offset != start + len(pending) or len(pending) + len(data) > most):
            yield start, bytes(pending)
            pending = bytearray()
        if not pending:
            start = offset
        pending += data
    if pending:
        yield start, bytes(pending)


def _aligned(offset: int) -> int:
    """Round an offset up to the alignment."""
    return -(-offset // ALIGNMENT) * ALIGNMENT
