"""Conversion of live values to streams of ``torch.save`` and, safely, back.

::

    live value ── LivePickle ──▶ inert tree ── plan_tree ──▶ stream       saving: this program's own
    objects
    live value ◀── live_object ── inert tree ◀── load_shared ── stream    loading: no name of the
    file is called

A saved stream loads with ``torch.load``. Its bytes are a function of the value (sets sorted, no
addresses), the same that ``ckpt convert`` writes for the value that it reads. Each tensor is stored
dense, without the rest of the storage that it views; tensors with the same memory are stored once.
Loading restores what was shared.

Loading rebuilds plain containers, values of the tables (``constructors``, ``numpy_values``,
``torch_values``), members of enumerations whose module this program has imported, and everything
that it registered with ``torch.serialization.add_safe_globals``. All other objects become a
``StandIn``, with one warning in the log per stream: so the ``args`` of a Megatron checkpoint can be
loaded without Megatron, and nothing is looked up. Names that are known as attacks are refused,
registered or not.

Source: torch 2.13 ``torch/serialization.py``; CPython 3.11 ``pickle``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from core.arrays.checksum import crc32
from core.catalog.stored import Extent, StoredArray
from core.dist_checkpointing._values.live_pickle import LivePickle
from core.dist_checkpointing._values.live_tree import LiveTree
from core.dist_checkpointing._values.stored_tensors import StoredTensors
from core.files.store import MemoryStore
from core.formats.torch.tree import load_shared
from core.formats.torch.zip.tree_layout import TreePlan, plan_tree

if TYPE_CHECKING:
    from core.files.store import ReadStore

PREFIX = "archive"


@dataclass(frozen=True, slots=True)
class Stream:
    """A ``torch.save`` stream that has been laid out, but not yet written.

    Args:
        plan: offsets of all parts.
        tensors: the tensor of each array, by the array's name; it must not change until the stream
            is written.
    """

    plan: TreePlan
    tensors: dict[str, torch.Tensor]

    @property
    def size(self) -> int:
        """Return the size of the stream, in bytes."""
        return self.plan.size

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes of the stream, in order; dense CPU tensors are not copied."""
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
        # Fill the gaps between the parts with zeros.
        end = 0
        for offset, data in sorted(parts, key=lambda part: part[0]):
            if offset > end:
                yield bytes(offset - end)
            yield data
            end = offset + len(data)
        if end < self.size:
            yield bytes(self.size - end)


def stream(value: object, *, prefix: str = PREFIX) -> Stream:
    """Lay out the stream of a live value, to be written piece by piece.

    Args:
        value: any value that pickle can describe; tensors on any device.
        prefix: directory inside the zip; torch uses the stem of the file's name.

    Raises:
        UnsupportedError: the value holds something that cannot be saved, see ``live_pickle``.
    """
    pickled = LivePickle(value)
    plan = plan_tree(pickled.tree, lambda key: pickled.arrays[key], prefix=prefix)
    return Stream(plan, pickled.tensors)


def stream_of(value: object) -> bytes:
    """Return the bytes of the stream of a live value; arguments and errors as ``stream``."""
    return b"".join(stream(value).pieces())


def load_stream(
    source: ReadStore | bytes, array: StoredArray | None = None, *, key: str = "object"
) -> Any:
    """Load the live value of a stream of ``torch.save``, or of a bare pickle.

    Args:
        source: the store that holds the stream, or the stream itself.
        array: position of the stream in the store (uint8, one axis).
        key: name of the object, for errors.

    Raises:
        CorruptError, TruncatedError: the stream is damaged.
        UnsupportedError: the value holds a tensor that is not plain and dense, or a tuple that
            contains itself.
        UnsafeError: the stream names something that runs code, or needs too much memory.
    """
    store: Any = source
    if isinstance(source, (bytes, bytearray, memoryview)):
        store = MemoryStore({key: bytes(source)})
        array = StoredArray(key, "uint8", (len(source),), Extent(key, 0))
    assert array is not None, "the position in a store is required"
    inert, arrays = load_shared(
        store, array, key=key, hooks={("torch", "Size"): lambda *args: NotImplemented}
    )
    return live_object(inert, StoredTensors(store, arrays).read, key=key)


def load_file(store: ReadStore, file: str) -> Any:
    """Load the live value of a whole file.

    Raises:
        MissingShardError: the file does not exist.
        CheckpointingException: as ``load_stream``.
    """
    return load_stream(
        store, StoredArray(file, "uint8", (store.size(file),), Extent(file, 0)), key=file
    )


def live_object(
    inert: object, tensor_of: Callable[[str], torch.Tensor], *, key: str | None = None
) -> Any:
    """Build the live value of an inert one.

    Args:
        inert: a tree from ``core.pickle.reader``.
        tensor_of: return the tensor of a leaf's key; called once per key.
        key: name of the object, for errors.

    Raises:
        CorruptError, UnsupportedError, UnsafeError: as ``load_stream``.
    """
    tree = LiveTree(tensor_of, key=key)
    value = tree.value_of(inert)
    tree.warn()
    return value


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the elements of a tensor, in C order, in host memory."""
    numbers: Any = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(numbers)
