"""A Python object on its way to another process of this rank, its tensors by reference to shared memory.

::

    value ─ packed ─▶ Handover: blocks of shared memory [pickle | tensors …] ── send: descriptors, sizes ──▶ receive

Tensors that lie in staging memory travel as they are; others are copied there, so the sender may change them at once.
What goes through the socket is small whatever the value is, so that sending does not wait for the receiver.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import torch

from core.dist_checkpointing._background.staging import POOL, Block

_Place = tuple[int, int, torch.dtype, tuple[int, ...]]
"""Of a tensor: number of its block, offset in bytes, dtype, shape."""


@dataclass(frozen=True, slots=True)
class Handover:
    """What is sent.

    Args:
        blocks: the shared memory; the first one begins with the pickled places of the tensors and the pickled value.
        n_bytes: of these pickles.
        kept: what must live until the receiver has dropped the value.
    """

    blocks: list[Block]
    n_bytes: int
    kept: list[Any]


def packed(value: object) -> Handover:
    """A value, ready to be sent.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: something in it cannot be pickled.
        OSError: there is no memory left.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(value)
    loose = [tensor for tensor in pickler.tensors if POOL.located(tensor) is None]
    copies = iter(POOL.copied(loose)) if loose else iter(())
    kept: list[Any] = []
    blocks: list[Block] = []
    places: list[_Place] = []
    for tensor in pickler.tensors:
        found = POOL.located(tensor)
        kept.append(tensor if found else next(copies))
        block, offset = found or POOL.located(kept[-1]) or (None, 0)
        if block is not None and block not in blocks:
            blocks.append(block)
        number = 1 + blocks.index(block) if block is not None else 0
        places.append((number, offset, tensor.dtype, tuple(tensor.shape)))
    data = pickle.dumps(places) + stream.getvalue()
    first, lease = POOL.leased(len(data))
    lease[: len(data)] = data
    return Handover([first, *blocks], len(data), [*kept, lease])


def send(handover: Handover, connection: Connection, pid: int) -> None:
    """Sends what was packed through a socket to process ``pid``.

    Raises:
        OSError: nobody listens any more.
    """
    connection.send((handover.n_bytes, [block.n_bytes for block in handover.blocks]))
    for block in handover.blocks:
        reduction.send_handle(connection, block.fd, pid)


def receive(connection: Connection) -> Any:
    """The value of the next handover; its tensors lie in the sender's memory.

    Raises:
        EOFError: the sender is gone.
    """
    n_bytes, sizes = connection.recv()
    blocks = [Block(size, fd=reduction.recv_handle(connection)) for size in sizes]
    leases = [memoryview(block.memory) for block in blocks]
    stream = io.BytesIO(leases[0][:n_bytes])
    unpickler = _Unpickler(stream)
    for number, offset, dtype, shape in pickle.load(stream):
        unpickler.tensors.append(blocks[number].tensor(leases[number], offset, dtype, shape))
    return unpickler.load()


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) not in (torch.Tensor, torch.nn.Parameter) or obj.layout != torch.strided:
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._numbers[id(obj)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.tensors: list[torch.Tensor] = []

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self.tensors[pid]
