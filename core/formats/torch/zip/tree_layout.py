"""Layout of the torch zip for an inert tree: its pickle, and a record for every tensor in it.

Source: torch 2.13 ``torch/serialization.py`` (``_save``), ``torch/_tensor.py``
    (``_reduce_ex_internal``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from core.arrays.box import c_strides
from core.arrays.checksum import crc32_combine, crc32_of_zeros
from core.arrays.dtypes import DTYPES, itemsize
from core.catalog.file_image import CrcOf, JoinedArray, Literal, PlacedArray
from core.errors import UnsupportedError
from core.formats.torch.zip.layout import ArchivePlan, plan_archive
from core.pickle.inert import Global, Inert, Persistent, TensorLeaf
from core.pickle.noted import gc_paused
from core.pickle.writer import dumps
from core.values import dataclass

if TYPE_CHECKING:
    from core.catalog.stored import PlannedArray


@dataclass(frozen=True, slots=True)
class TreePlan:
    """The layout of a torch zip, before its data is known.

    Args:
        arrays: the arrays in the storages, in file order.
        records: the storages, in file order.
        archive: the positions of the zip's records, relative to its beginning.
        pickle: the content of ``data.pkl``.
    """

    arrays: list[PlacedArray]
    records: list[PlannedArray | JoinedArray]
    archive: ArchivePlan
    pickle: bytes

    @property
    def size(self) -> int:
        """Bytes of the zip."""
        return self.archive.size

    def literals(self, crc_of: CrcOf) -> Iterator[Literal]:
        """Yield all bytes of the zip except the arrays, by increasing offset.

        Args:
            crc_of: returns the CRC-32 of a written array, by its name.
        """

        def crc_of_record(name: str) -> int:
            record = self.records[int(name.removeprefix("data/"))]
            if isinstance(record, JoinedArray):
                return _combine_crcs(record, crc_of)
            return crc_of(record.name)

        # The serialization id is 40 digits that depend on the content. torch hashes the records'
        # names and CRCs; the CRCs are not known before the data, so pickle and sizes are hashed.
        digest = hashlib.sha256(self.pickle)
        for record in self.records:
            digest.update(record.n_bytes.to_bytes(8, "little"))
        serialization_id = b"%040d" % (int.from_bytes(digest.digest(), "little") % 10**40)
        payloads = {
            "data.pkl": self.pickle,
            ".format_version": b"1",
            ".storage_alignment": b"64",
            "byteorder": b"little",
            "version": b"3\n",
            ".data/serialization_id": serialization_id,
        }
        return self.archive.literals(payloads, crc_of_record)


def _combine_crcs(record: JoinedArray, crc_of: CrcOf) -> int:
    """Return the CRC-32 of a storage from those of its parts; 0 if checksums are disabled."""
    item_bytes = itemsize(record.dtype)
    crc = end = 0
    # All parts have CRC 0 only if none was computed.
    is_off = bool(record.parts)
    for first, array in record.parts:
        part_crc = crc_of(array.name)
        is_off = is_off and part_crc == 0
        # Gaps between parts are zeros.
        if first > end:
            gap_bytes = (first - end) * item_bytes
            crc = crc32_combine(crc, crc32_of_zeros(gap_bytes), gap_bytes)
        crc = crc32_combine(crc, part_crc, array.n_bytes)
        end = first + array.n_bytes // item_bytes
    # So are the elements after the last part.
    if end < record.n:
        gap_bytes = (record.n - end) * item_bytes
        crc = crc32_combine(crc, crc32_of_zeros(gap_bytes), gap_bytes)
    return 0 if is_off else crc


@dataclass(frozen=True, slots=True)
class _NewStorage:
    """A storage of the new file, given by its persistent id."""

    pid: tuple[object, ...]


def plan_tree(
    value: object, array_of: Callable[[str], PlannedArray | JoinedArray], *, prefix: str
) -> TreePlan:
    """Plan the torch zip of an inert tree.

    Args:
        value: the tree to save.
        array_of: returns the array for a leaf's key, with dtype and shape. Every array is stored
            once, in C order, even if several leaves have it; the parts of a joined one become
            consecutive in one storage.
        prefix: name of the directory inside the zip; torch uses ``archive`` when it writes to an
            open file that has no name.

    Raises:
        UnsupportedError: the tree refers to a storage in another file.
    """
    # Pickle the tree; every tensor becomes a call with the number of its storage.
    arrays: list[PlannedArray | JoinedArray] = []
    number_of: dict[str, int] = {}

    def reduce(leaf: TensorLeaf) -> Inert:
        array = array_of(leaf.key)
        number = number_of.setdefault(array.name, len(arrays))
        if number == len(arrays):
            arrays.append(array)
        return _rebuild_call(leaf, array, number)

    def persistent_id(node: object) -> object:
        if isinstance(node, Persistent):
            raise UnsupportedError(
                "the object refers to a storage of the file that it was read from"
            )
        return node.pid if isinstance(node, _NewStorage) else None

    with gc_paused():
        pickle = dumps(value, persistent_id=persistent_id, reducers={TensorLeaf: reduce})
    storage_bytes = tuple(array.n_bytes for array in arrays)
    archive = (
        _plan_records(prefix, len(pickle), storage_bytes)
        if storage_bytes
        else _plan_object(prefix, len(pickle))
    )
    return TreePlan(placed_records(archive, arrays), arrays, archive, pickle)


def _plan_records(prefix: str, pickle_bytes: int, storage_bytes: tuple[int, ...]) -> ArchivePlan:
    """Lay out the records in torch's order."""
    storages = [(f"data/{number}", n_bytes) for number, n_bytes in enumerate(storage_bytes)]
    return plan_archive(
        prefix, [("data.pkl", pickle_bytes), *_AFTER_PICKLE, *storages, *_AFTER_STORAGES]
    )


_plan_object = lru_cache(maxsize=1024)(partial(_plan_records, storage_bytes=()))
"""A checkpoint may have 10⁵ objects without tensors, in few sizes."""
_AFTER_PICKLE = ((".format_version", 1), (".storage_alignment", 2), ("byteorder", 6))
_AFTER_STORAGES = (("version", 2), (".data/serialization_id", 40))
"""Names and bytes of the other records; ``TreePlan.literals`` has their contents."""


def placed_records(
    archive: ArchivePlan, records: Sequence[PlannedArray | JoinedArray]
) -> list[PlacedArray]:
    """Return the arrays in an archive's storages with their offsets, in file order."""
    placed: list[PlacedArray] = []
    for number, array in enumerate(records):
        # Four records precede the storages, see ``plan_tree``.
        offset = archive.data[4 + number]
        if isinstance(array, JoinedArray):
            size = itemsize(array.dtype)
            placed += [PlacedArray(offset + first * size, part) for first, part in array.parts]
        else:
            placed.append(PlacedArray(offset, array))
    return placed


def _rebuild_call(leaf: TensorLeaf, array: PlannedArray | JoinedArray, number: int) -> Inert:
    """Return the call that rebuilds a tensor, as torch pickles it.

    Args:
        number: number of the tensor's storage, ``data/<number>``.
    """
    # torch refuses to load an integer tensor that requires grad.
    dtype = DTYPES[array.dtype]
    if not dtype.is_in_torch:
        raise UnsupportedError(
            f"torch has no element type {array.dtype}",
            key=leaf.key,
            hint=f"cast it (--dtype '{leaf.key}=float32') or skip it (--exclude '{leaf.key}')",
        )
    needs_grad = leaf.requires_grad and dtype.kind in ("float", "complex")
    hooks = Inert("reduce", Global("collections", "OrderedDict"))
    geometry = (0, array.shape, c_strides(array.shape), needs_grad and leaf.wrapper is None, hooks)
    if dtype.storage is not None:
        n_elements = array.n_bytes // dtype.itemsize
        storage = _NewStorage(
            ("storage", Global("torch", dtype.storage), str(number), "cpu", n_elements)
        )
        tensor = Inert("reduce", Global("torch._utils", "_rebuild_tensor_v2"), (storage, *geometry))
    else:
        # Element types without a storage class are stored as bytes, and rebuilt by v3. torch 2.13
        # fails to load such a tensor if it requires grad, even from a file that it wrote.
        geometry = (*geometry[:3], False, hooks)
        untyped = Global("torch.storage", "UntypedStorage")
        storage = _NewStorage(("storage", untyped, str(number), "cpu", array.n_bytes))
        arguments = (storage, *geometry, Global("torch", dtype.name))
        tensor = Inert("reduce", Global("torch._utils", "_rebuild_tensor_v3"), arguments)
    # A parameter wraps a tensor that does not require grad.
    if leaf.wrapper != "parameter":
        return tensor
    hooks = Inert("reduce", Global("collections", "OrderedDict"))
    return Inert(
        "reduce", Global("torch._utils", "_rebuild_parameter"), (tensor, needs_grad, hooks)
    )
