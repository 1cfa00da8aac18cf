"""Reading the tensors of a stored object, with the memory that they share.

Arrays whose bytes overlap in the file become views of one storage, as they were when they were
saved. Every storage is read once, when the first of its tensors is requested.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from core.arrays.box import Shape, c_strides
from core.arrays.checksum import crc32
from core.arrays.dtypes import itemsize
from core.catalog.decoded import DecodedStore
from core.dist_checkpointing._engine.torch_dtypes import torch_dtype
from core.errors import CorruptError

if TYPE_CHECKING:
    from core.catalog.stored import StoredArray
    from core.files.store import ReadStore


class StoredTensors:
    """Reader of tensors by key.

    Args:
        store: the store that contains the arrays.
        arrays: position of each array, by key.
    """

    def __init__(self, store: ReadStore, arrays: Mapping[str, StoredArray]) -> None:
        self._store = DecodedStore(store)
        self._arrays = {key: self._store.placed(array) for key, array in arrays.items()}
        self._runs = _runs(self._arrays)
        self._storages: dict[_Run, torch.Tensor] = {}

    def read(self, key: str) -> torch.Tensor:
        """Return the tensor of a key, on the CPU, with the strides that it was saved with.

        Raises:
            CorruptError: the tensor is a complete record, and its checksum does not match.
            TruncatedError: the file ends before the tensor does.
            StorageError: the store cannot read the bytes.
        """
        array = self._arrays[key]
        dtype = torch_dtype(array.dtype)
        if not array.n_bytes:
            return torch.empty(array.shape, dtype=dtype)
        run = self._runs[key]
        data = self._storages.get(run)
        if data is None:
            data = self._storages[run] = self._read_run(run, key)
        # torch counts the offset of a view in elements. If dtypes of several sizes share a storage,
        # a view may begin between two elements; such a tensor gets a copy of its own.
        first, n_odd_bytes = divmod(array.extent.offset - run[1], itemsize(array.dtype))
        if n_odd_bytes:
            data, first = data[array.extent.offset - run[1] :].clone(), 0
        tensor = torch.empty(0, dtype=dtype)
        tensor.set_(data.untyped_storage(), first, array.shape, _strides(array))
        return tensor

    def _read_run(self, run: _Run, key: str) -> torch.Tensor:
        """Read a run of bytes, and verify its checksum if it is exactly the array ``key``.

        Raises:
            CorruptError: the checksum does not match.
            TruncatedError: the file ends before the run does.
            StorageError: the store cannot read the bytes.
        """
        file, start, stop = run
        data = torch.empty(stop - start, dtype=torch.uint8)
        numbers: Any = data.numpy()
        view = memoryview(numbers)
        self._store.read_into(file, start, view)
        # The recorded CRC-32 covers the complete record; a run of other bytes cannot be compared.
        array = self._arrays[key]
        expected = array.extent.crc
        if expected is not None and (array.extent.offset, array.n_bytes) == (start, len(view)):
            actual = crc32(view)
            if actual != expected:
                raise CorruptError(
                    f"checksum mismatch: CRC-32 of the tensor is {actual:08x}, "
                    f"expected {expected:08x}",
                    file=file,
                    span=(start, stop),
                    hint="copy the checkpoint again, or use an older one",
                )
        return data


_Run = tuple[str, int, int]
"""File, offset of the first byte, and offset after the last byte."""


def _runs(arrays: Mapping[str, StoredArray]) -> dict[str, _Run]:
    """Return the run of bytes that contains each array, by key; arrays that overlap share one."""
    # Each array spans the bytes from its first to its last element, including gaps between them.
    spans = []
    for key, array in arrays.items():
        if array.n_bytes:
            start = array.extent.offset
            last = sum((n - 1) * step for n, step in zip(array.shape, _strides(array), strict=True))
            stop = start + (last + 1) * itemsize(array.dtype)
            spans.append((array.extent.file, start, stop, key))
    # In order of position, a span overlaps earlier ones only if it begins inside the last run.
    groups: list[tuple[_Run, list[str]]] = []
    for file, start, stop, key in sorted(spans, key=lambda span: span[:2]):
        members = [key]
        if groups and groups[-1][0][0] == file and start < groups[-1][0][2]:
            (_, start, end), members = groups.pop()
            stop = max(stop, end)
            members.append(key)
        groups.append(((file, start, stop), members))
    return {key: run for run, members in groups for key in members}


def _strides(array: StoredArray) -> Shape:
    return c_strides(array.shape) if array.extent.strides is None else array.extent.strides
