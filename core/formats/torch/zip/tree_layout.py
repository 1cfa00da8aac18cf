"""A torch zip to be written: the pickle of an inert tree, and a record for every tensor in it.

Source: torch 2.13 ``torch/serialization.py`` (``_save``), ``torch/_tensor.py`` (``_reduce_ex_internal``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.arrays.box import c_strides
from core.arrays.checksum import crc32_combine, crc32_of_zeros
from core.arrays.dtypes import DTYPES, itemsize
from core.catalog.file_image import CrcOf, JoinedArray, Literal, PlacedArray
from core.errors import UnsupportedError
from core.formats.torch.zip.layout import ArchivePlan, plan_archive
from core.pickle.inert import Global, Inert, Persistent, TensorLeaf
from core.pickle.reader import gc_paused
from core.pickle.writer import dumps

if TYPE_CHECKING:
    from core.catalog.stored import PlannedArray


@dataclass(frozen=True, slots=True)
class TreePlan:
    """A torch zip before it has data.

    Args:
        size: bytes of the zip.
        arrays: what the storages consist of, in file order.
        records: the storages, in file order.
        archive: where its records lie, relative to its begin.
        payloads: the records that are no storages.
    """

    size: int
    arrays: list[PlacedArray]
    records: list[PlannedArray | JoinedArray]
    archive: ArchivePlan
    payloads: dict[str, bytes]

    def literals(self, crc_of: CrcOf) -> Iterator[Literal]:
        """Everything but the arrays, in increasing offset.

        Args:
            crc_of: CRC-32 of a finished array, by its name.
        """

        def of_record(name: str) -> int:
            record = self.records[int(name.removeprefix("data/"))]
            return _crc_of_parts(record, crc_of) if isinstance(record, JoinedArray) else crc_of(record.name)

        return self.archive.literals(self.payloads, of_record)


def _crc_of_parts(record: JoinedArray, crc_of: CrcOf) -> int:
    """CRC-32 of a storage out of those of its parts; 0 if checksums are switched off."""
    size = itemsize(record.dtype)
    crc = end = 0
    is_off = bool(record.parts)
    for first, array in record.parts:
        of_part = crc_of(array.name)
        is_off = is_off and of_part == 0
        if first > end:
            crc = crc32_combine(crc, crc32_of_zeros((first - end) * size), (first - end) * size)
        crc = crc32_combine(crc, of_part, array.n_bytes)
        end = first + array.n_bytes // size
    if end < record.n:
        crc = crc32_combine(crc, crc32_of_zeros((record.n - end) * size), (record.n - end) * size)
    return 0 if is_off else crc


@dataclass(frozen=True, slots=True)
class _Storage:
    """A storage of the new file: its persistent id."""

    pid: tuple[object, ...]


def plan_tree(value: object, array_of: Callable[[str], PlannedArray | JoinedArray], *, prefix: str) -> TreePlan:
    """The torch zip of an inert tree.

    Args:
        value: what to save.
        array_of: the array of a leaf's key; it tells dtype and shape. Every array is stored once, in C order, also if
            several leaves have it; the parts of a joined one become consecutive in one storage.
        prefix: name of the directory inside the zip, ``archive`` where torch has no file name.

    Raises:
        UnsupportedError: the tree refers to a storage of another file.
    """
    arrays: list[PlannedArray | JoinedArray] = []
    number_of: dict[str, int] = {}

    def reduced(leaf: TensorLeaf) -> Inert:
        array = array_of(leaf.key)
        number = number_of.setdefault(array.name, len(arrays))
        if number == len(arrays):
            arrays.append(array)
        return _rebuild(leaf, array, number)

    with gc_paused():
        pickle = dumps(value, persistent_id=_persistent_id, reducers={TensorLeaf: reduced})
    sizes = [array.n_bytes for array in arrays]
    payloads = {
        "data.pkl": pickle,
        ".format_version": b"1",
        ".storage_alignment": b"64",
        "byteorder": b"little",
        "version": b"3\n",
        ".data/serialization_id": _serialization_id(pickle, sizes),
    }
    names = list(payloads)
    records = [(name, len(payloads[name])) for name in names[:4]]
    records += [(f"data/{number}", n_bytes) for number, n_bytes in enumerate(sizes)]
    records += [(name, len(payloads[name])) for name in names[4:]]
    archive = plan_archive(prefix, records)
    return TreePlan(archive.size, placed_records(archive, arrays), arrays, archive, payloads)


def placed_records(archive: ArchivePlan, records: Sequence[PlannedArray | JoinedArray]) -> list[PlacedArray]:
    """What the storages of an archive consist of, in file order; the first four records are none."""
    return [one for number, array in enumerate(records) for one in _placed(array, archive.data[4 + number])]


def _placed(array: PlannedArray | JoinedArray, offset: int) -> Iterator[PlacedArray]:
    if not isinstance(array, JoinedArray):
        yield PlacedArray(offset, array)
        return
    size = itemsize(array.dtype)
    for first, part in array.parts:
        yield PlacedArray(offset + first * size, part)


def _persistent_id(leaf: object) -> object:
    if isinstance(leaf, Persistent):
        raise UnsupportedError("the object refers to a storage of the file that it was read from")
    return leaf.pid if isinstance(leaf, _Storage) else None


def _rebuild(leaf: TensorLeaf, array: PlannedArray | JoinedArray, number: int) -> Inert:
    """The call that makes a tensor."""
    dtype = DTYPES[array.dtype]
    needs_grad = leaf.requires_grad and dtype.kind in ("float", "complex")
    hooks = Inert("reduce", Global("collections", "OrderedDict"))
    place = (0, array.shape, c_strides(array.shape), needs_grad and leaf.wrapper is None, hooks)
    if dtype.storage is not None:
        n = array.n_bytes // dtype.itemsize
        storage = _Storage(("storage", Global("torch", dtype.storage), str(number), "cpu", n))
        tensor = Inert("reduce", Global("torch._utils", "_rebuild_tensor_v2"), (storage, *place))
    else:
        # torch 2.13 fails to load a tensor made by v3 that requires grad, its own files included.
        place = (*place[:3], False, hooks)
        untyped = Global("torch.storage", "UntypedStorage")
        storage = _Storage(("storage", untyped, str(number), "cpu", array.n_bytes))
        arguments = (storage, *place, Global("torch", dtype.name))
        tensor = Inert("reduce", Global("torch._utils", "_rebuild_tensor_v3"), arguments)
    if leaf.wrapper != "parameter":
        return tensor
    hooks = Inert("reduce", Global("collections", "OrderedDict"))
    return Inert("reduce", Global("torch._utils", "_rebuild_parameter"), (tensor, needs_grad, hooks))


def _serialization_id(pickle: bytes, sizes: list[int]) -> bytes:
    """40 digits that depend on what the file describes (torch's depend on names and CRCs)."""
    digest = hashlib.sha256(pickle)
    for size in sizes:
        digest.update(size.to_bytes(8, "little"))
    return b"%040d" % (int.from_bytes(digest.digest(), "little") % 10**40)
