"""Objects in checkpoints: a live value as a stream of ``torch.save``, and a live value out of such a stream, safely.

::

    live value ── LivePickle ──▶ inert tree ── plan_tree ──▶ stream       saving: this program's own objects
    live value ◀── live_object ── inert tree ◀── load_shared ── stream    loading: no name of the file is called

A saved stream loads with ``torch.load``; its bytes are a function of the value (sets sorted, no addresses), the same
that ``ckpt convert`` writes for what it reads. Each tensor is stored dense, without the rest of the storage that
it views; tensors that are the same bytes are stored once. On loading, what was shared is shared.

What is made on loading: plain containers, what the tables name (``constructors``, ``numpy_values``, ``torch_values``),
members of enumerations whose module this program has imported, and what it registered with
``torch.serialization.add_safe_globals``. Everything else becomes a ``StandIn``, with one warning in the log for each
stream: the ``args`` of a Megatron checkpoint are loadable without Megatron, and nothing is looked up. Names that are
known as attacks are refused, registered or not.

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
    """A ``torch.save`` stream that has not been put together yet.

    Args:
        plan: where everything lies.
        tensors: name of an array → its tensor; it must not change until the stream is written.
    """

    plan: TreePlan
    tensors: dict[str, torch.Tensor]

    @property
    def size(self) -> int:
        """Bytes of the stream."""
        return self.plan.size

    def pieces(self) -> Iterator[bytes | memoryview]:
        """The bytes of the stream, in order; those of CPU tensors without gaps are not copied."""
        crcs: dict[str, int] = {}
        placed = [(one.offset, one.array.name) for one in self.plan.arrays if one.array.n_bytes]
        views = {name: _bytes_of(self.tensors[name]) for _, name in placed}
        crcs = {name: crc32(view) for name, view in views.items()}
        parts: list[tuple[int, bytes | memoryview]] = [(offset, views[name]) for offset, name in placed]
        parts += self.plan.literals(lambda name: crcs.get(name, 0))
        at = 0
        for offset, data in sorted(parts, key=lambda part: part[0]):
            if offset > at:
                yield bytes(offset - at)
            yield data
            at = offset + len(data)
        if at < self.size:
            yield bytes(self.size - at)


def stream(value: object, *, prefix: str = PREFIX) -> Stream:
    """The stream of a live value, to be written piece by piece.

    Args:
        value: whatever pickle can describe; tensors on any device.
        prefix: directory inside the zip; torch takes the stem of the file's name.

    Raises:
        UnsupportedError: it holds something that cannot be saved, see ``live_pickle``.
    """
    pickled = LivePickle(value)
    plan = plan_tree(pickled.tree, lambda key: pickled.arrays[key], prefix=prefix)
    return Stream(plan, pickled.tensors)


def stream_of(value: object) -> bytes:
    """The stream of a live value; arguments and errors are those of ``stream``."""
    return b"".join(stream(value).pieces())


def load_stream(source: ReadStore | bytes, array: StoredArray | None = None, *, key: str = "object") -> Any:
    """The live value of a stream of ``torch.save``, or of a bare pickle.

    Args:
        source: the store that holds it, or the stream itself.
        array: where it lies in the store (uint8, one axis).
        key: the object's name, for errors.

    Raises:
        CorruptError, TruncatedError: the stream is damaged.
        UnsupportedError: it holds a tensor that is no plain dense one, or a tuple that contains itself.
        UnsafeError: it names what runs code, or asks for too much.
    """
    store: Any = source
    if isinstance(source, (bytes, bytearray, memoryview)):
        store = MemoryStore({key: bytes(source)})
        array = StoredArray(key, "uint8", (len(source),), Extent(key, 0))
    assert array is not None, "a store needs the place in it"
    inert, arrays = load_shared(store, array, key=key, hooks={("torch", "Size"): lambda *args: NotImplemented})
    return live_object(inert, StoredTensors(store, arrays).read, key=key)


def load_file(store: ReadStore, file: str) -> Any:
    """The live value of a whole file; errors as for ``load_stream``.

    Raises:
        MissingShardError: it does not exist.
    """
    return load_stream(store, StoredArray(file, "uint8", (store.size(file),), Extent(file, 0)), key=file)


def live_object(inert: object, tensor_of: Callable[[str], torch.Tensor], *, key: str | None = None) -> Any:
    """The live value of an inert one.

    Args:
        inert: as ``core.pickle.reader`` makes it.
        tensor_of: the tensor of a leaf's key; asked once for each.
        key: the object's name, for errors.

    Raises:
        CorruptError, UnsupportedError, UnsafeError: as ``load_stream``.
    """
    tree = LiveTree(tensor_of, key=key)
    value = tree.value_of(inert)
    tree.warn()
    return value


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements of a dense tensor, in C order, on the CPU."""
    numbers: Any = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(numbers)
