"""One thread's way to a device and back: two slots, each with a stream, pinned host memory and memory of the device.

::

    slot 0   host → device │ kernel │ device → host │               │ host → device │ …
    slot 1                 │ host → device │ kernel │ device → host │               …

While one slot's data travel and are worked at, the thread fills the other one. Buffers that are pinned themselves
(``host_buffer``) are read and written by the device without a copy in between. With the device ``cpu`` the same code
runs on torch's CPU, one piece after the other.

Memory: at most ``LANE_BYTES`` of the host a thread, and on the device what the kernel makes of two pieces.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from core.device.device import Device, device_errors

Tensor = Any
"""A torch tensor."""
Array = Any
"""A numpy array."""
Kernel = Callable[..., Tensor]
"""Makes a tensor of tensors of bytes, all on the device; it neither waits for the device nor keeps what it gets."""

PIECE_BYTES = 4 << 20
"""Most bytes that a slot sends or receives at once; the start of a kernel costs as much as moving 100 KiB."""
LANE_BYTES = 4 * PIECE_BYTES
_ALIGNMENT = 8
"""Bytes; elements that are looked at on the device begin at multiples of their size."""
_WINDOW = -1
CUDA_BYTES = 768 << 20
"""Host memory that CUDA's context, its libraries and torch's part for it take; an estimate, not counted by kernel."""


def host_bytes(device: Device | None, threads: int) -> int:
    """Host memory that a device takes in a process beside the engine's own; 0 for the CPU path."""
    if device is None:
        return 0
    return threads * LANE_BYTES + (CUDA_BYTES if device.is_cuda else 0)


def host_buffer(device: Device | None, n_bytes: int) -> memoryview:
    """Memory that counts only once it is used, and goes back to the system afterwards; pinned for a device, then it
    counts at once.
    """
    if device is None or not device.is_cuda:
        return memoryview(mmap.mmap(-1, n_bytes))
    import torch

    with device_errors(device), torch.cuda.device(device.torch_name):
        return memoryview(torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True).numpy())


class Lane:
    """Sends bytes through kernels; belongs to one thread, see ``lane_of``.

    Args:
        device: where to.
    """

    def __init__(self, device: Device) -> None:
        import torch

        self.device = device
        with device_errors(device):
            self.place = torch.device(device.torch_name)
            if device.is_cuda:
                torch.cuda.set_device(self.place)  # of this thread; others start with GPU 0
            self._slots = [_Slot(self.place) for _ in range(2)]
        self._tables: dict[str, Tensor] = {}

    def map(self, data: memoryview, out: memoryview, kernel: Kernel, *, sizes: tuple[int, int]) -> None:
        """Writes what a kernel makes of each element.

        Args:
            data, out: dense elements of ``sizes`` bytes; the counts agree.
            kernel: gives as many elements as it gets.
        """
        wide, narrow = sizes
        n_elements = len(data) // wide
        at_once = PIECE_BYTES // max(sizes)
        with device_errors(self.device):
            try:
                for number, first in enumerate(range(0, n_elements, at_once)):
                    last = min(first + at_once, n_elements)
                    slot = self._slots[number % 2]
                    slot.finish()
                    slot.begin((data[first * wide : last * wide],), kernel, out[first * narrow : last * narrow])
                for slot in self._slots:
                    slot.finish()
            except BaseException:
                self._abandon()
                raise

    def fold(self, data: Sequence[memoryview], kernel: Kernel, *, size: int) -> Iterator[Array]:
        """What a kernel makes of each piece, in order, as bytes.

        Args:
            data: buffers of one length; the kernel gets as many tensors.
            kernel: gives a small tensor.
            size: no piece cuts elements of so many bytes.
        """
        at_once = PIECE_BYTES // size // len(data) * size
        waiting: list[tuple[_Slot, Array]] = []
        with device_errors(self.device):
            try:
                for number, first in enumerate(range(0, len(data[0]), at_once)):
                    slot = self._slots[number % 2]
                    if len(waiting) == len(self._slots):
                        ended, found = waiting.pop(0)
                        ended.finish()
                        yield found
                    out: Array = slot.begin(tuple(one[first : first + at_once] for one in data), kernel, None)
                    waiting.append((slot, out))
                for slot, found in waiting:
                    slot.finish()
                    yield found
            except BaseException:
                self._abandon()
                raise

    def sent(self, data: Any, number: int = 0) -> Tensor:
        """Bytes (a buffer) on the device, for use within ``working``.

        Args:
            number: which of the lane's buffers they take, until others do.
        """
        self._slots[0].wait()  # what was sent from the same pinned memory before has left
        return self._slots[0].sent(shown(data), number)

    @contextmanager
    def showing(self, data: memoryview) -> Iterator[None]:
        """Bytes that do not change within this: they are sent once at most, for all kernels that get parts of them."""
        self._slots[0].show(shown(data))
        try:
            yield
        finally:
            self._slots[0].show(None)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Work on the device outside of kernels is done within this.

        Raises:
            CapacityError, WorkerError: see ``core.device.device.device_errors``.
        """
        with device_errors(self.device), self._slots[0].streaming():
            yield

    def fetched(self, tensor: Tensor) -> Array:
        """A tensor as a numpy array, once it is made; within ``working``."""
        if not self.device.is_cuda:
            return tensor.numpy()
        import torch

        found = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        found.copy_(tensor, non_blocking=True)
        self._slots[0].wait()
        return found.numpy()

    def table(self, name: str, make: Callable[[], Array]) -> Tensor:
        """A numpy array on the device, kept under a name."""
        found = self._tables.get(name)
        if found is None:
            import torch

            found = self._tables[name] = torch.from_numpy(make()).to(self.place)
            if self.device.is_cuda:
                torch.cuda.synchronize(self.place)  # the slots' streams do not wait for this one
        return found

    def _abandon(self) -> None:
        """Waits for what still is on its way, so that nothing is written to buffers that others use again."""
        for slot in self._slots:
            slot.abandon()


class _Slot:
    """A piece on its way.

    Args:
        place: a torch device.
    """

    def __init__(self, place: Any) -> None:
        import torch

        self._place = place
        self._is_cuda = place.type == "cuda"
        self._stream = torch.cuda.Stream(place) if self._is_cuda else None
        self._done = torch.cuda.Event(blocking=True) if self._is_cuda else None
        self._there: dict[int, Tensor] = {}
        self._in: dict[int, Tensor] = {}
        self._out: Tensor | None = None
        self._is_busy = False
        self._rest: tuple[Tensor, Tensor] | None = None
        self._window: Tensor | None = None
        self._window_there: Tensor | None = None

    def show(self, window: Tensor | None) -> None:
        """See ``Lane.showing``; None ends it."""
        self._window, self._window_there = window, None

    def streaming(self) -> AbstractContextManager[Any]:
        """Work goes to this slot's stream."""
        if self._stream is None:
            return nullcontext()
        import torch

        stream: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return stream

    def sent(self, source: Tensor, number: int = 0) -> Tensor:
        """Host bytes on the device; the stream is the current one.

        Args:
            number: which of the slot's buffers they take.
        """
        window = self._window
        start = -1 if window is None else source.data_ptr() - window.data_ptr()
        if window is None or start < 0 or start + source.numel() > window.numel() or start % _ALIGNMENT:
            return self._sent_alone(source, number)
        if self._window_there is None:
            self._window_there = self._sent_alone(window, _WINDOW)
        return self._window_there[start : start + source.numel()]

    def _sent_alone(self, source: Tensor, number: int) -> Tensor:
        import torch

        n = source.numel()
        there = self._there.get(number)
        if there is None or there.numel() < n:
            there = self._there[number] = torch.empty(max(n, PIECE_BYTES), dtype=torch.uint8, device=self._place)
        if self._is_cuda and not source.is_pinned():
            held = self._in.get(number)
            if held is None or held.numel() < n:
                held = self._in[number] = torch.empty(max(n, 1 << 20), dtype=torch.uint8, pin_memory=True)
            held[:n].copy_(source)
            source = held[:n]
        there[:n].copy_(source, non_blocking=True)
        return there[:n]

    def begin(self, sources: Sequence[memoryview], kernel: Kernel, out: memoryview | None) -> Array:
        """Sends pieces through a kernel.

        Args:
            out: gets the bytes that it makes once ``finish`` returns; None makes room for them.

        Returns:
            The bytes, valid after ``finish``; of ``out``, where that is given.
        """
        import torch

        with self.streaming():
            made = kernel(*(self.sent(shown(source), number) for number, source in enumerate(sources)))
            made = made.contiguous().view(-1).view(torch.uint8)
            n = made.numel()
            self._is_busy = True
            wanted = torch.empty(n, dtype=torch.uint8, pin_memory=self._is_cuda) if out is None else shown(out)
            assert wanted.numel() == n
            target = wanted
            if self._is_cuda and not wanted.is_pinned():
                if self._out is None or self._out.numel() < n:
                    self._out = torch.empty(max(n, 1 << 20), dtype=torch.uint8, pin_memory=True)
                target = self._out[:n]
                self._rest = (wanted, target)
            target.copy_(made, non_blocking=True)
            if self._done is not None:
                self._done.record(self._stream)
        return wanted.numpy()

    def finish(self) -> None:
        """Waits until the piece is back, if one is on its way."""
        if self._is_busy and self._done is not None:
            self._done.synchronize()
        self._is_busy = False
        if self._rest is not None:
            wanted, target = self._rest
            self._rest = None
            wanted.copy_(target)

    def wait(self) -> None:
        """Waits until the stream has nothing to do."""
        if self._stream is not None:
            self._stream.synchronize()

    def abandon(self) -> None:
        """Forgets the piece, once nothing is on its way."""
        self._is_busy, self._rest = False, None
        self.wait()


class _Shown:
    """Bytes shown to numpy as writable: torch warns of others, although nothing is written to sources."""

    def __init__(self, data: Array) -> None:
        self._kept = data
        address = data.__array_interface__["data"][0]
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": data.shape, "data": (address, False)}


def shown(data: Any) -> Tensor:
    """A buffer's bytes as a tensor, without a copy."""
    import numpy as np
    import torch

    found: Array = np.frombuffer(data, np.uint8)
    if not found.flags.writeable and len(found):
        found = np.asarray(_Shown(found))
    return torch.from_numpy(found)


@contextmanager
def showing(device: Device | None, data: memoryview) -> Iterator[None]:
    """See ``Lane.showing``, for the calling thread; nothing without a device that does something."""
    if device is None or not device.work:
        yield
        return
    with lane_of(device).showing(data):
        yield


_of_thread = threading.local()


def lane_of(device: Device) -> Lane:
    """The calling thread's lane to a device; it ends with the thread."""
    lanes: dict[str, Lane] = _of_thread.__dict__.setdefault("lanes", {})
    found = lanes.get(device.torch_name)
    if found is None:
        found = lanes[device.torch_name] = Lane(device)
    return found
