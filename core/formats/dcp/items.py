"""The data files of a DCP checkpoint, shared by plain DCP and Megatron's torch_dist.

On disk (``__<n>_0.distcp``)::

    item · padding · item · padding · item …          every item begins at a multiple of 64 bytes
    ├── object: a torch zip ``archive/…`` of its value (or the source's own stream, verbatim)
    └── chunk:  a torch zip ``archive/data.pkl, …, archive/data/0`` of one contiguous tensor

Torch writes the items back to back, so their data is not aligned. Padding is legal, because
``.metadata`` records offset and length of every item. Inside a torch zip, data begins at a multiple
of 64 bytes; as the zips do too, data is aligned in the file.

Except for the CRC, the zip of a chunk depends only on dtype and shape. It is planned once per such
pair: 10⁵ chunks are laid out and written without planning 10⁵ zips.

Source: written here and loaded by torch 2.13 and megatron-core 0.16.1, see the tests of ``dcp`` and
    ``torch_dist``.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import chain
from typing import TYPE_CHECKING, overload

from core.arrays.box import Box, Shape
from core.engine.catalog.catalog import TargetCatalog
from core.engine.catalog.file_image import CrcOf, FileImage, Literal, PlacedArray
from core.engine.catalog.stored import Coords, PlannedArray
from core.engine.catalog.tensor import held_boxes
from core.errors import UnsupportedError
from core.formats.format import check_dtypes
from core.formats.torch.zip.tree_layout import TreePlan, plan_tree
from core.pickle.inert import TensorLeaf
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.catalog.catalog import StoredObject

ALIGNMENT = 64
PREFIX = "archive"
DEFAULT_MAX_FILE_BYTES = 5 * 10**9
_JOINED_BYTES = 1 << 16
BEHIND: Coords = (("behind", 1),)
"""Suffix of coords that puts an item into an extra file, so that no other item moves."""


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Layout of the torch zip of one contiguous tensor; the same for all with its dtype and shape.

    Args:
        size: bytes of the zip.
        data_offset: byte of the zip at which the tensor's data begins.
        head: the literal bytes before the data.
        tail_offset: byte of the zip at which the literal bytes after the data begin.
        tail: the literal bytes after the data, for a CRC of zero.
        crc_at: positions in ``tail`` of the data's CRC-32 (four bytes, little endian).
    """

    size: int
    data_offset: int
    head: bytes
    tail_offset: int
    tail: bytes
    crc_at: tuple[int, ...]

    def literals(self, crc: int) -> tuple[Literal, Literal]:
        """Return the bytes before and after the data."""
        tail = bytearray(self.tail)
        crc_bytes = crc.to_bytes(4, "little")
        for position in self.crc_at:
            tail[position : position + 4] = crc_bytes
        return (0, self.head), (self.tail_offset, bytes(tail))


@lru_cache(maxsize=1024)
def plan_chunk(dtype: str, shape: Shape) -> ChunkPlan:
    """Plan the zip of a chunk. Plans are kept, as ``ckpt inspect`` lays out a model several times.

    Args:
        dtype: canonical dtype name.
        shape: shape of the chunk, in elements.
    """
    stand_in_array = PlannedArray("chunk", dtype, shape)
    plan = plan_tree(TensorLeaf("chunk"), array_of=lambda key: stand_in_array, prefix=PREFIX)
    (placed,) = plan.arrays
    # The CRC occurs several times. Two CRCs that differ in every byte show where.
    head, tail_offset, tail = _literals_around(plan, placed, 0)
    _, _, other_tail = _literals_around(plan, placed, 0xFFFFFFFF)
    differing = [
        position
        for position, (first, second) in enumerate(zip(tail, other_tail, strict=True))
        if first != second
    ]
    return ChunkPlan(plan.size, placed.offset, head, tail_offset, tail, tuple(differing[::4]))


def _literals_around(plan: TreePlan, placed: PlacedArray, crc: int) -> tuple[bytes, int, bytes]:
    """Return the bytes before an array, the offset of those after it, and those bytes."""
    end = placed.offset + placed.array.n_bytes
    head, tail = bytearray(placed.offset), bytearray(plan.size - end)
    for offset, data in plan.literals(lambda name: crc):
        side, start = (tail, offset - end) if offset >= end else (head, offset)
        assert start + len(data) <= len(side)
        side[start : start + len(data)] = data
    return bytes(head), end, bytes(tail)


@dataclass(slots=True)
class Item:
    """An item, and its position after ``lay_out_items`` has placed it.

    Args:
        key: key of the tensor or object.
        size: bytes.
        box: region of the tensor that a chunk covers; None for an object.
        coords: coordinates that select its file, see ``lay_out_items``.
        plan: layout of its zip; None for a stream that is copied verbatim.
        array: the array that fills a chunk or a verbatim stream; None if the plan has its own
            arrays.
        file, offset: number of the file in ``ItemLayout.files``, and first byte of the item in it;
            -1 until the item is placed.
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
        """Yield the arrays of the item with their offsets in the file."""
        if isinstance(self.plan, TreePlan):
            for placed in self.plan.arrays:
                yield PlacedArray(self.offset + placed.offset, placed.array)
        else:
            assert self.array is not None
            yield PlacedArray(self.offset + (self.plan.data_offset if self.plan else 0), self.array)


@dataclass(frozen=True, slots=True)
class ItemLayout:
    """The layout of all data files and the positions of the items in them.

    Args:
        files: layout of each file, by number.
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
    separate_prefix: str | None = None,
    files_per_number: int = 1,
) -> ItemLayout:
    """Place every tensor of a target catalog and the given objects in ``.distcp`` files.

    The coords of an array or object select its file: ``(("file", n),)`` is file number n; followed
    by ``BEHIND``, an extra file after those with that number. Other coords get one file each, in
    order of first appearance. Chunks without coords fill further files one after the other, and
    objects without coords go to the first file. In a file, objects precede chunks, as torch writes
    them.

    Args:
        target: each of its arrays becomes a chunk.
        objects: each has a value, or a raw stream among the target's hidden tensors.
        max_file_bytes: maximum size of a file, unless one item alone is larger; None for 5 GB, and
            no maximum for files that coords select.
        separate_prefix: prefix of keys whose items go to separate files, with the same prefix in
            their names; None for no such files.
        files_per_number: number of files among which the items of one file number are divided.

    Raises:
        UnsupportedError: a chunk does not fit its tensor, or two chunks of a tensor begin at the
            same element, which ``.metadata`` cannot express.
    """
    # Plan all items, and assign them to files.
    object_items = {item.key: item for item in _object_items(target, objects)}
    chunk_items = _chunk_items(target)
    items = [*object_items.values(), *chain.from_iterable(chunk_items.values())]
    files = []
    groups = _group_by_file(items, max_file_bytes, separate_prefix, files_per_number)
    for file, (name, members) in enumerate(groups):
        # Place the items of a file one after the other. Its layout is columns and refers to no
        # item, so that it is small enough to be passed to other processes.
        placed = _Arrays(array("q"), [])
        begins = array("q")
        plans: list[ChunkPlan | TreePlan | None] = []
        end = 0
        for item in members:
            item.file, item.offset = file, _aligned(end)
            end = item.offset + item.size
            begins.append(item.offset)
            plans.append(item.plan)
            for placed_array in item.placed():
                placed.offsets.append(placed_array.offset)
                placed.arrays.append(placed_array.array)
        files.append(FileImage(name, end, placed, _Literals(begins, plans, placed.arrays)))
    return ItemLayout(tuple(files), chunk_items, object_items)


def _object_items(target: TargetCatalog, objects: Iterable[StoredObject]) -> Iterator[Item]:
    """Yield an item for every object; equal simple values share a plan."""
    plans: dict[object, TreePlan] = {}
    for stored in objects:
        # An object that the source did not decode is copied verbatim.
        if stored.raw_key is not None:
            stream = target.whole_array(stored.raw_key)
            yield Item(
                stored.key, stream.n_bytes, None, stored.coords or stream.coords, None, stream
            )
            continue
        value_key = _simple_value_key(stored.value)
        plan = None if value_key is None else plans.get(value_key)
        if plan is None:
            plan = plan_tree(stored.value, array_of=target.whole_array, prefix=PREFIX)
            if value_key is not None:
                plans[value_key] = plan
        yield Item(stored.key, plan.size, None, stored.coords, plan, None)


def _simple_value_key(value: object) -> object:
    """Return a key that equal simple values share; None for other values.

    Simple values are worth it: a Megatron checkpoint may have 10⁴ extra states ``[None]``.
    """
    if type(value) is list and len(value) == 1:
        inner = _simple_value_key(value[0])
        return None if inner is None else ("list", inner)
    is_simple = value is None or type(value) in (bool, int, float, str)
    return (type(value), repr(value)) if is_simple else None


def _chunk_items(target: TargetCatalog) -> dict[str, list[Item]]:
    """Return the items of each tensor's chunks, by key.

    Raises:
        UnsupportedError: a chunk does not fit its tensor, two chunks of a tensor begin at the same
            element, or DCP lacks an element type.
    """
    # torch 2.13 loads int4 from a torch file, but has no copy_ for it, which DCP needs.
    check_dtypes(
        {key: tensor.dtype for key, tensor in target.tensors.items()},
        lambda dtype: dtype.is_in_torch and dtype.value_bits is None,
        owner="PyTorch's DCP",
    )
    plans: dict[tuple[str, Shape], ChunkPlan] = {}
    items_of: dict[str, list[Item]] = {}
    for key, tensor in target.tensors.items():
        items = items_of[key] = []
        offsets: set[Shape] = set()
        for stored, box in held_boxes(tensor.shape, target.fragments(key)):
            if box is None:
                raise UnsupportedError(
                    f"the array {stored.name!r} is not a chunk of the tensor", key=key
                )
            if box.offset in offsets:
                raise UnsupportedError(
                    f"two chunks begin at offset {box.offset}, and DCP can store only one of them",
                    key=key,
                )
            offsets.add(box.offset)
            plan = plans.get((stored.dtype, box.shape))
            if plan is None:
                plan = plans[stored.dtype, box.shape] = plan_chunk(stored.dtype, box.shape)
            items.append(Item(key, plan.size, box, stored.coords, plan, stored))
    return items_of


def _group_by_file(
    items: Iterable[Item],
    max_file_bytes: int | None,
    separate_prefix: str | None,
    files_per_number: int,
) -> Iterator[tuple[str, list[Item]]]:
    """Yield the name of each file and its items, objects first.

    Args:
        items: items that are not placed yet.
        max_file_bytes, separate_prefix, files_per_number: the arguments of ``lay_out_items``.
    """
    prefixes = ["", separate_prefix] if separate_prefix else [""]
    for number, members in _group_by_number(items, max_file_bytes or DEFAULT_MAX_FILE_BYTES):
        members.sort(key=lambda item: item.box is not None)
        behind = [item for item in members if item.coords[1:] == BEHIND]
        others = [item for item in members if item.coords[1:] != BEHIND]
        # Divide the items of a number as Megatron's writer does: by size, each part by the prefix
        # of the keys. Its files are numbered without gaps, over both prefixes.
        # The sizes are those of the elements: as in megatron-core, headers do not count.
        sizes = [
            None if item.box is None or item.array is None else item.array.n_bytes
            for item in others
        ]
        parts = divide_by_size(sizes, max(1, files_per_number // len(prefixes)))
        part_number = -1
        for prefix in prefixes:
            for part in parts:
                group = [
                    others[n]
                    for n in part
                    if _has_prefix(others[n], separate_prefix) == bool(prefix)
                ]
                runs = [group] if max_file_bytes is None else _split(group, max_file_bytes)
                for run in filter(None, runs):
                    part_number += 1
                    yield f"{prefix}__{number}_{part_number}.distcp", run
        if behind:
            yield f"__{number}_{part_number + 1}.distcp", behind


def _has_prefix(item: Item, prefix: str | None) -> bool:
    return prefix is not None and item.key.startswith(prefix)


def divide_by_size(sizes: Sequence[int | None], n_parts: int) -> list[list[int]]:
    """Divide items into parts of about equal size: objects in turn, chunks the largest first.

    This is how megatron-core's ``FileSystemWriterAsync`` divides them, so that the files of a rank
    contain the same items.

    Args:
        sizes: size of each chunk, None for an object.

    Returns:
        The numbers of the items in each part.
    """
    if n_parts == 1:
        return [list(range(len(sizes)))]
    parts: list[list[int]] = [[] for _ in range(n_parts)]
    for position, number in enumerate(n for n, size in enumerate(sizes) if size is None):
        parts[position % n_parts].append(number)
    # Give each chunk to the smallest part so far, the first one of equal ones.
    smallest = [(0, part) for part in range(n_parts)]
    chunks = [(size, number) for number, size in enumerate(sizes) if size is not None]
    for size, number in sorted(chunks, key=lambda chunk: chunk[0], reverse=True):
        n_bytes, part = heappop(smallest)
        parts[part].append(number)
        heappush(smallest, (n_bytes + size, part))
    return parts


def _group_by_number(items: Iterable[Item], max_file_bytes: int) -> list[tuple[int, list[Item]]]:
    """Return each file number with its items; those without coords fill files up to a size."""
    # Coords either name a file or select a file for all items with the same coords.
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


def _split(items: Iterable[Item], max_file_bytes: int) -> Iterator[list[Item]]:
    """Yield runs of consecutive items, each as many as fit into a file but at least one."""
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
    """The arrays of a file as columns: with 10⁵ chunks, objects are created on request."""

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
    """The bytes around the arrays of a file; a value, so that it can be sent to other processes.

    Args:
        begins: byte of the file at which each item begins.
        plans: plan of each item's zip; None for a stream that is copied verbatim.
        arrays: arrays of all items, in order.
    """

    begins: array[int]
    plans: list[ChunkPlan | TreePlan | None]
    arrays: list[PlannedArray]

    def __call__(self, crc_of: CrcOf) -> Iterator[Literal]:
        # Join neighbours: items are many, and a small write costs as much as one of 64 KiB.
        start, pending = 0, bytearray()
        for offset, data in self._unjoined(crc_of):
            is_next = offset == start + len(pending)
            if pending and not (is_next and len(pending) + len(data) <= _JOINED_BYTES):
                yield start, bytes(pending)
                pending = bytearray()
            if len(data) > _JOINED_BYTES:  # joining would copy it
                yield offset, data
                continue
            if not pending:
                start = offset
            pending += data
        if pending:
            yield start, bytes(pending)

    def _unjoined(self, crc_of: CrcOf) -> Iterator[Literal]:
        """Yield padding and the literal bytes of each item, in the order of the file."""
        arrays = iter(self.arrays)
        end = 0
        for begin, plan in zip(self.begins, self.plans, strict=True):
            yield end, bytes(begin - end)
            # A verbatim stream is data only. A tree's plan knows its arrays, which are skipped.
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


def _aligned(offset: int) -> int:
    """Round an offset in bytes up to the alignment of items."""
    return -(-offset // ALIGNMENT) * ALIGNMENT
