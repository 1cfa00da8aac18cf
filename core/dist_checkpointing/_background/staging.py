"""Host memory for tensors that another process writes, reused by later saves.

::

    tensors of training ── copy_tensors ──▶ tensors over one Block
                        ── pickled by reference ──▶ writer process

The memory is an anonymous file (a memfd, where the system has them): a forked writer sees it
without copy-on-write, a spawned one maps it by its descriptor. It is not limited by the size of
/dev/shm. A block is free as soon as no tensor over it exists, and is then used by the next save:
the first access to new memory takes several times as long as the copy itself.

``pack_value`` puts a Python object with its tensors into this memory, for another process::

    value ── pack_value ──▶ Handover: blocks of shared memory [pickle | tensors …]
          ── send ────────▶ sizes and file descriptors of the blocks
          ── receive ─────▶ value, with tensors over the same memory

Tensors in staging memory are sent without a copy; others are copied to staging memory, so the
sender may change them at once. The message through the socket is small, whatever the value is, so
that sending does not wait for the receiver.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import torch
from typing_extensions import override

from core.files.syscalls import anonymous_file

ALIGNMENT = 64
"""Alignment of every copy, in bytes: enough for any dtype and for vector instructions."""
N_KEPT = 2
"""Number of free blocks that are kept: the usual number of saves that run at the same time."""


class Block:
    """Memory that other processes can map, pinned if there is an accelerator to copy from.

    Args:
        n_bytes: size in bytes, >= 1.
        fd: file descriptor of existing memory, which the block then owns; None allocates memory.

    Raises:
        OSError: there is not enough memory.
    """

    def __init__(self, n_bytes: int, *, fd: int | None = None) -> None:
        if fd is None:
            fd = anonymous_file("ckpt-staging")
            os.ftruncate(fd, n_bytes)
        weakref.finalize(self, os.close, fd)
        self.fd = fd
        self.n_bytes = n_bytes
        self.memory = mmap.mmap(fd, n_bytes)
        self.address = int(torch.frombuffer(self.memory, dtype=torch.uint8, count=1).data_ptr())
        self._is_pinned = False

    def pin(self) -> None:
        """Let CUDA copy directly to the memory, if the system allows it; idempotent."""
        if not self._is_pinned:
            self._is_pinned = True
            cudart = torch.cuda.cudart()
            # This fails above the limit of locked memory; copies are then slower, but correct.
            with suppress(RuntimeError):
                torch.cuda.check_error(cudart.cudaHostRegister(self.address, self.n_bytes, 0))
                weakref.finalize(self, cudart.cudaHostUnregister, self.address)

    def tensor(
        self, lease: Any, offset: int, dtype: torch.dtype, shape: Sequence[int]
    ) -> torch.Tensor:
        """Return a dense tensor over the memory.

        Args:
            lease: a memoryview of ``memory``; the tensor keeps it alive.
            offset: offset of the tensor in the block, in bytes.
            dtype, shape: those of the tensor.
        """
        count = torch.Size(shape).numel()
        if count == 0:  # torch.frombuffer refuses it
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(lease, dtype=dtype, count=count, offset=offset).view(tuple(shape))


class StagingPool:
    """A pool of blocks, some in use and some free.

    Args:
        n_kept: maximum number of free blocks that are kept.
    """

    def __init__(self, n_kept: int = N_KEPT) -> None:
        self._n_kept = n_kept
        self._free: list[Block] = []  # the most recently used block comes last
        self._used: dict[int, Block] = {}
        # Reentrant: garbage collection may return a block while this thread has the lock.
        self._lock = threading.RLock()

    def copy_tensors(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors to host memory; the originals may then be changed.

        Args:
            tensors: strided tensors, on any devices.

        Raises:
            OSError: there is not enough memory.
        """
        # Lay out the copies in one block.
        offsets, end = [], 0
        for tensor in tensors:
            offsets.append(end)
            end += -(-tensor.numel() * tensor.dtype.itemsize // ALIGNMENT) * ALIGNMENT
        block, lease = self.lease(max(end, 1))
        copies = [
            block.tensor(lease, offset, tensor.dtype, tensor.shape)
            for tensor, offset in zip(tensors, offsets, strict=True)
        ]
        # Copy from all devices at the same time, and wait for all.
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        if devices:
            block.pin()
        for tensor, copy in zip(tensors, copies, strict=True):
            copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        for device in devices:
            torch.cuda.synchronize(device)
        return copies

    def lease(self, n_bytes: int) -> tuple[Block, memoryview]:
        """Reserve a block of at least ``n_bytes``, and return it with a view of its memory.

        The block is not reused while the view exists.

        Raises:
            OSError: there is not enough memory.
        """
        with self._lock:
            # Take the smallest free block that is large enough.
            fitting = [block for block in self._free if block.n_bytes >= n_bytes]
            if fitting:
                block = min(fitting, key=lambda block: block.n_bytes)
                self._free.remove(block)
            else:
                block = Block(n_bytes)
            self._used[block.address] = block
        lease = memoryview(block.memory)
        weakref.finalize(lease, self._take_back, block)
        return block, lease

    def _take_back(self, block: Block) -> None:
        with self._lock:
            self._used.pop(block.address, None)
            self._free.append(block)
            # Release the blocks that were not used for the longest time.
            del self._free[: max(0, len(self._free) - self._n_kept)]

    def locate(self, tensor: torch.Tensor) -> tuple[Block, int] | None:
        """Find the block of a dense tensor, and the tensor's offset in it, in bytes.

        Returns:
            None if the tensor is not in staging memory, or not stored as plain elements.
        """
        # The memory of a lazily conjugated or negated tensor does not have its values.
        if (
            tensor.is_contiguous()
            and tensor.device.type == "cpu"
            and not (tensor.is_conj() or tensor.is_neg())
        ):
            address = tensor.data_ptr()
            with self._lock:
                for block in self._used.values():
                    if block.address <= address < block.address + block.n_bytes:
                        return block, address - block.address
        return None

    def clear(self) -> None:
        """Give the free blocks back to the system."""
        with self._lock:
            self._free.clear()


POOL = StagingPool()
"""The staging memory of this process's saves."""


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
