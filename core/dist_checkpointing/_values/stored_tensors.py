"""The tensors of a stored object, with the memory that they share.

Arrays whose bytes overlap in the file are views of one storage, as they were when they were saved; every storage is
read once, when the first of its tensors is asked for.
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
        store: where they lie.
        arrays: where each of them lies, by key; not late-bound.
    """

    def __init__(self, store: ReadStore, arrays: Mapping[str, StoredArray]) -> None:
        self._store = DecodedStore(store)
        self._arrays = {key: self._store.placed(array) for key, array in arrays.items()}
        self._runs = _runs(self._arrays)
        self._storages: dict[_Run, torch.Tensor] = {}

    def read(self, key: str) -> torch.Tensor:
        """The tensor of a key, on the CPU, with the strides that it was saved with.

        Raises:
            CorruptError: the bytes do not have the checksum that the file states for a tensor that is a whole record.
            TruncatedError, StorageError: as the store has it.
        """
        array = self._arrays[key]
        dtype = torch_dtype(array.dtype)
        if not array.n_bytes:
            return torch.empty(array.shape, dtype=dtype)
        run = self._runs[key]
        data = self._storages.get(run)
        if data is None:
            data = self._storages[run] = self._bytes(run, key)
        first, odd = divmod(array.extent.offset - run[1], itemsize(array.dtype))
        if odd:  # views of several element types into one storage
            data, first = data[array.extent.offset - run[1] :].clone(), 0
        made = torch.empty(0, dtype=dtype)
        made.set_(data.untyped_storage(), first, array.shape, _strides(array))
        return made

    def _bytes(self, run: _Run, key: str) -> torch.Tensor:
        file, start, stop = run
        data = torch.empty(stop - start, dtype=torch.uint8)
        view = _view(data)
        self._store.read_into(file, start, view)
        array = self._arrays[key]
        stated = array.extent.crc
        if stated is not None and (array.extent.offset, array.n_bytes) == (start, len(view)):
            found = crc32(view)
            if found != stated:
                raise CorruptError(
                    f"the bytes of a tensor have the CRC-32 {found:08x}, the file says {stated:08x}",
                    file=file,
                    span=(start, stop),
                    hint="copy the checkpoint again, or use an older one",
                )
        return data


_Run = tuple[str, int, int]
"""File, first byte, and the byte after the last."""


def _runs(arrays: Mapping[str, StoredArray]) -> dict[str, _Run]:
    """The run of bytes that each array lies in; arrays that overlap lie in one."""
    spans = []
    for key, array in arrays.items():
        if array.n_bytes:
            size, start = itemsize(array.dtype), array.extent.offset
            last = sum((n - 1) * step for n, step in zip(array.shape, _strides(array), strict=True))
            spans.append((array.extent.file, start, start + (last + 1) * size, key))
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
