"""Conversion of live values to streams of ``torch.save`` and, safely, back.

::

    saving     live value ── LivePickle ──▶ inert tree ── plan_tree ──▶ stream
    loading    live value ◀── live_object ── inert tree ◀── load_shared ── stream

Saving pickles only the program's own objects; loading never calls a name because the file contains
it.

``torch.load`` can load a saved stream. Its bytes depend on the value alone (sets are sorted, there
are no addresses) and are the same that ``ckpt convert`` writes for this value. Each tensor is
stored dense, without the rest of the storage that it views; tensors with the same memory are stored
once, and share memory again when they are loaded.

Loading rebuilds plain containers, values of the classes in the tables (``constructors``,
``numpy_values``, ``torch_values``), members of enumerations whose module the program has imported,
and everything that it registered with ``torch.serialization.add_safe_globals``. All other objects
become a ``StandIn``, with one warning in the log per stream. This way, the ``args`` of a Megatron
checkpoint can be loaded without Megatron. Names that are known from attacks are refused, even if
they are registered.

Source: torch 2.13 ``torch/serialization.py``; CPython 3.11 ``pickle``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from core.arrays.box import Shape, c_strides
from core.arrays.checksum import crc32
from core.arrays.dtypes import itemsize
from core.dist_checkpointing._engine.torch_dtypes import torch_dtype
from core.dist_checkpointing._values.live_pickle import LivePickle
from core.dist_checkpointing._values.live_tree import LiveTree
from core.engine.catalog.decoded import DecodedStore
from core.engine.catalog.stored import Extent, StoredArray
from core.errors import CorruptError
from core.files.store import MemoryStore
from core.formats.torch.tree import load_shared
from core.formats.torch.zip.tree_layout import TreePlan, plan_tree

if TYPE_CHECKING:
    from core.engine.catalog.stored import StoredArray
    from core.files.store import ReadStore


PREFIX = "archive"
_Run = tuple[str, int, int]
"""File, offset of the first byte, and offset after the last byte."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A ``torch.save`` stream whose layout is known, but which is not written yet.

    Args:
        plan: offsets of all parts.
        tensors: the tensor of each array, by the array's name; its values must not change until the
            stream is written.
    """

    plan: TreePlan
    tensors: dict[str, torch.Tensor]

    @property
    def size(self) -> int:
        """Size of the stream, in bytes."""
        return self.plan.size

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes of the stream, in order; dense CPU tensors are not copied."""
        # A zip header contains the CRC-32 of its record: the checksums of all tensors come first.
        placed = [
            (position.offset, position.array.name)
            for position in self.plan.arrays
            if position.array.n_bytes
        ]
        views = {name: _bytes_of(self.tensors[name]) for _, name in placed}
        crcs = {name: crc32(view) for name, view in views.items()}
        parts: list[tuple[int, bytes | memoryview]] = [
            (offset, views[name]) for offset, name in placed
        ]
        parts += self.plan.literals(lambda name: crcs.get(name, 0))
        # Yield the parts in order, with zeros in the gaps between them.
        end = 0
        for offset, data in sorted(parts, key=lambda part: part[0]):
            if offset > end:
                yield bytes(offset - end)
            yield data
            end = offset + len(data)
        if end < self.size:
            yield bytes(self.size - end)


def stream(value: object, *, prefix: str = PREFIX) -> Stream:
    """Plan the stream of a live value, so that it can be written in parts.

    Args:
        value: any value that pickle can describe; tensors on any device.
        prefix: directory inside the zip; torch uses the stem of the file name.

    Raises:
        UnsupportedError: the value contains something that cannot be saved, see ``LivePickle``.
    """
    pickled = LivePickle(value)
    plan = plan_tree(pickled.tree, lambda key: pickled.arrays[key], prefix=prefix)
    return Stream(plan, pickled.tensors)


def stream_of(value: object) -> bytes:
    """Return the complete stream of a live value; arguments and errors as for ``stream``."""
    return b"".join(stream(value).pieces())


def load_stream(
    source: ReadStore | bytes, array: StoredArray | None = None, *, key: str = "object"
) -> Any:
    """Load the live value of a ``torch.save`` stream or a bare pickle.

    Args:
        source: the store that contains the stream, or the stream itself.
        array: position of the stream in the store (uint8, one axis); required with a store.
        key: name of the object, for errors.

    Raises:
        CorruptError: the stream is damaged.
        TruncatedError: the stream is shorter than its records.
        UnsupportedError: the value contains a tensor that is not plain and dense, or a tuple that
            contains itself.
        UnsafeError: the stream refers to something that runs code, or needs too much memory.
    """
    store: Any = source
    if isinstance(source, (bytes, bytearray, memoryview)):
        store = MemoryStore({key: bytes(source)})
        array = StoredArray(key, "uint8", (len(source),), Extent(key, 0))
    assert array is not None, "the position in a store is required"
    # A torch.Size stays inert; live_object rebuilds it after checking its numbers.
    inert, arrays = load_shared(
        store, array, key=key, hooks={("torch", "Size"): lambda *args: NotImplemented}
    )
    return live_object(inert, StoredTensors(store, arrays).read, key=key)


def load_file(store: ReadStore, file: str) -> Any:
    """Load the live value of a complete file.

    Raises:
        MissingShardError: the file does not exist.
        CheckpointingException: the value cannot be loaded, see ``load_stream``.
    """
    return load_stream(
        store, StoredArray(file, "uint8", (store.size(file),), Extent(file, 0)), key=file
    )


def live_object(
    inert: object, tensor_of: Callable[[str], torch.Tensor], *, key: str | None = None
) -> Any:
    """Build the live value that an inert tree describes.

    Args:
        inert: a tree from ``core.pickle.reader``.
        tensor_of: return the tensor of a leaf's key; called once per key.
        key: name of the object, for errors.

    Raises:
        CorruptError: an object has invalid arguments.
        UnsupportedError: as for ``load_stream``.
        UnsafeError: the tree refers to something that runs code.
    """
    tree = LiveTree(tensor_of, key=key)
    value = tree.value_of(inert)
    tree.warn()
    return value


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the elements of a tensor, in C order, in host memory."""
    numbers: Any = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(numbers)


class StoredTensors:
    """A reader of the tensors of a stored object, with the memory that they share.

    Arrays whose bytes overlap in the file become views of one storage, as they were when they were
    saved. Every storage is read once, when the first of its tensors is requested.

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
                    f"checksum mismatch: the tensor's CRC-32 is {actual:08x}, "
                    f"expected {expected:08x}",
                    file=file,
                    span=(start, stop),
                    hint="copy the checkpoint again, or use an older one",
                )
        return data


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
