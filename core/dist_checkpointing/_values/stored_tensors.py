"""The tensors of a stored object, with the memory that they share.

Arrays whose bytes overlap in the file become views of one storage, as they were when they were
saved. Every storage is read once, when the first of its tensors is asked for.
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
    """Reads tensors by name.

    Args:
        store: the store that holds the arrays.
        arrays: position of each array, by key; already known, not resolved later.
    """

    def __init__(self, store: ReadStore, arrays: Mapping[str, StoredArray]) -> None:
        self._store = DecodedStore(store)
        self._arrays = {key: self._store.placed(array) for key, array in arrays.items()}
        self._runs = _runs(self._arrays)
        self._storages: dict[_Run, torch.Tensor] = {}

    def read(self, key: str) -> torch.Tensor:
        """Return the tensor of a key, on the CPU, with the strides that it was saved with.

        Raises:
            CorruptError: the checksum of a tensor that is a complete record does not match.
            TruncatedError, StorageError: the store cannot read the bytes.
        """
        array = self._arrays[key]
        dtype = torch_dtype(array.dtype)
        if not array.n_bytes:
            return torch.empty(array.shape, dtype=dtype)
        run = self._runs[key]
        data = self._storages.get(run)
        if data is None:
            data = self._storages[run] = self._read_run(run, key)
        first, odd = divmod(array.extent.offset - run[1], itemsize(array.dtype))
        if odd:  # views of several dtypes into one storage
            data, first = data[array.extent.offset - run[1] :].clone(), 0
        tensor = torch.empty(0, dtype=dtype)
        tensor.set_(data.untyped_storage(), first, array.shape, _strides(array))
        return tensor

    def _read_run(self, run: _Run, key: str) -> torch.Tensor:
        """Read a run of bytes, and compare the checksum if the array is a complete record.

        Raises:
            CorruptError: the checksum does not match.
        """
        file, start, stop = run
        data = torch.empty(stop - start, dtype=torch.uint8)
        view = _view(data)
        self._store.read_into(file, start, view)
        array = self._arrays[key]
        expected = array.extent.crc
        if expected is not None and (array.extent.offset, array.n_bytes) == (start, len(view)):
            actual = crc32(view)
            if actual != expected:
                raise CorruptError(
                    f"checksum mismatch: a tensor has CRC-32 {actual:08x}, expected {expected:08x}",
                    file=file,
                    span=(start, stop),
                    hint="copy the checkpoint again, or use an older one",
                )
        return data


_Run = tuple[str, int, int]
"""File, first byte, and the byte after the last."""


def _span_of(array: StoredArray) -> _Run:
    """Return the bytes from the first to the last element of an array."""
    start = array.extent.offset
    last = sum((n - 1) * step for n, step in zip(array.shape, _strides(array), strict=True))
    return array.extent.file, start, start + (last + 1) * itemsize(array.dtype)


def _runs(arrays: Mapping[str, StoredArray]) -> dict[str, _Run]:
    """Return the run of bytes that each array lies in; arrays that overlap share one."""
    spans = [(*_span_of(array), key) for key, array in arrays.items() if array.n_bytes]
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


def _view(data: torch.Tensor) -> memoryview:
    numbers: Any = data.numpy()
    return memoryview(numbers)
