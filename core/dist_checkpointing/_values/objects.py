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
