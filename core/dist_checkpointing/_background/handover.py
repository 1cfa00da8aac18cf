"""Transfer of a Python object to another process of this rank, with tensors in shared memory.

::

    value ── pack_value ──▶ Handover: blocks of shared memory [pickle | tensors …]
          ── send ────────▶ sizes and file descriptors of the blocks
          ── receive ─────▶ value, with tensors over the same memory

Tensors in staging memory are sent without a copy; others are copied to staging memory, so the
sender may change them at once. The message through the socket is small, whatever the value is, so
that sending does not wait for the receiver.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import torch
from typing_extensions import override

from core.dist_checkpointing._background.staging import POOL, Block

_Position = tuple[int, int, torch.dtype, tuple[int, ...]]
"""The position of a tensor: number of its block, offset in bytes, dtype, shape."""


@dataclass(frozen=True, slots=True)
class Handover:
    """A value that is ready to be sent.

    Args:
        blocks: the shared memory; the first block begins with two pickles: the positions of the
            tensors, and the value.
        n_bytes: total size of the two pickles, in bytes.
        kept: objects to be kept alive until the receiver has dropped the value; they hold the
            memory.
    """

    blocks: list[Block]
    n_bytes: int
    kept: list[Any]


def pack_value(value: object) -> Handover:
    """Put a value into shared memory, ready to be sent.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: a part of the value cannot be pickled.
        OSError: there is not enough memory.
    """
    stream = io.BytesIO()
    pickler = _TensorPickler(stream)
    pickler.dump(value)

    # Copy the tensors that are outside of staging memory to it.
    tensors = list(pickler.tensors)
    outside = [number for number, tensor in enumerate(tensors) if POOL.locate(tensor) is None]
    copies = POOL.copy_tensors([tensors[number] for number in outside]) if outside else []
    for number, copy in zip(outside, copies, strict=True):
        tensors[number] = copy

    # Number the blocks; 0 is the block of the pickles, also used for tensors without elements.
    blocks: list[Block] = []
    positions: list[_Position] = []
    for tensor in tensors:
        block, offset = POOL.locate(tensor) or (None, 0)
        if block is not None and block not in blocks:
            blocks.append(block)
        number = 1 + blocks.index(block) if block is not None else 0
        positions.append((number, offset, tensor.dtype, tuple(tensor.shape)))

    # Put the positions first: the receiver needs the tensors to unpickle the value.
    data = pickle.dumps(positions) + stream.getvalue()
    first, lease = POOL.lease(len(data))
    lease[: len(data)] = data
    return Handover([first, *blocks], len(data), [*tensors, lease])


def send(handover: Handover, connection: Connection, pid: int) -> None:
    """Send a packed value through a socket to process ``pid``.

    Raises:
        OSError: the receiver has closed the socket.
    """
    connection.send((handover.n_bytes, [block.n_bytes for block in handover.blocks]))
    for block in handover.blocks:
        reduction.send_handle(connection, block.fd, pid)


def receive(connection: Connection) -> Any:
    """Receive the next value; its tensors share the sender's memory.

    Raises:
        EOFError: the sender has ended.
    """
    # Map the blocks, and keep each alive as long as a tensor over it exists.
    n_bytes, sizes = connection.recv()
    blocks = [Block(size, fd=reduction.recv_handle(connection)) for size in sizes]
    leases = [memoryview(block.memory) for block in blocks]
    # Read the positions of the tensors, then the value that refers to them by number.
    stream = io.BytesIO(leases[0][:n_bytes])
    unpickler = _TensorUnpickler(stream)
    for number, offset, dtype, shape in pickle.load(stream):
        unpickler.tensors.append(blocks[number].tensor(leases[number], offset, dtype, shape))
    return unpickler.load()


class _TensorPickler(pickle.Pickler):
    """A pickler that replaces dense tensors by numbers and collects them in ``tensors``."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    @override
    def persistent_id(self, obj: Any) -> int | None:
        # Subclasses may have more than their data, so they are pickled as usual.
        if type(obj) not in (torch.Tensor, torch.nn.Parameter) or obj.layout != torch.strided:
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._numbers[id(obj)]


class _TensorUnpickler(pickle.Unpickler):
    """An unpickler that takes the tensors, by number, from ``tensors``."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.tensors: list[torch.Tensor] = []

    @override
    def persistent_load(self, pid: int) -> torch.Tensor:
        return self.tensors[pid]
