"""One thread's way to a device and back.

A lane has two slots, each with a stream, pinned host memory and memory on the device::

    slot 0   host → device │ kernel │ device → host │               │ host → device │ …
    slot 1                 │ host → device │ kernel │ device → host │               …

While the device transfers and processes the data of one slot, the thread fills the other. The
device reads and writes pinned buffers (``host_buffer``) directly; data of other buffers are copied
through the slot's pinned memory. With the device ``cpu`` the same code runs on torch's CPU, one
piece after the other.

Memory: at most ``LANE_BYTES`` of host memory per thread; on the device, what the kernel allocates
for two pieces.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from core.engine.device.device import Device, device_errors

Tensor = Any
"""A torch tensor."""
Array = Any
"""A numpy array."""
Kernel = Callable[..., Tensor]
"""Called with tensors of bytes on the device; returns a tensor on the device.

A kernel neither waits for the device nor keeps its arguments.
"""

PIECE_BYTES = 4 << 20
"""Maximum number of bytes that a slot sends or receives at once.

Starting a kernel takes as long as moving 100 KiB, so pieces should not be much smaller.
"""
LANE_BYTES = 4 * PIECE_BYTES
_ALIGNMENT = 8
"""Alignment of elements on the device, in bytes: the size of the largest element."""
_WINDOW = -1
"""Number of the device buffer that holds an uploaded window."""
CUDA_BYTES = 768 << 20
"""Estimate of the host memory that CUDA's context and libraries and torch's CUDA part take."""


def host_bytes(device: Device | None, threads: int) -> int:
    """Return the host memory, in bytes, that the use of a device adds to a process."""
    if device is None:
        return 0
    return threads * LANE_BYTES + (CUDA_BYTES if device.is_cuda else 0)


def host_buffer(device: Device | None, n_bytes: int) -> memoryview:
    """Allocate host memory for ``n_bytes`` bytes, pinned if a CUDA device will use it.

    Pinned memory is occupied at once. Other memory is occupied at the first write, and is returned
    to the system when the buffer is released.
    """
    if device is None or not device.is_cuda:
        return memoryview(mmap.mmap(-1, n_bytes))
    import torch

    with device_errors(device), torch.cuda.device(device.torch_name):
        return memoryview(torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True).numpy())


class Lane:
    """One thread's way to a device, through two slots; get it from ``lane_of``.

    Args:
        device: the device to which the bytes are sent.
    """

    def __init__(self, device: Device) -> None:
        import torch

        self.device = device
        with device_errors(device):
            self.torch_device = torch.device(device.torch_name)
            if device.is_cuda:
                # The current device belongs to the thread, and every new thread begins with GPU 0.
                torch.cuda.set_device(self.torch_device)
            self._slots = [_Slot(self.torch_device) for _ in range(2)]
        self._tables: dict[str, Tensor] = {}

    def map(
        self, data: memoryview, out: memoryview, kernel: Kernel, *, sizes: tuple[int, int]
    ) -> None:
        """Apply a kernel to each element and write the results to ``out``.

        Args:
            data, out: buffers with the same number of dense elements.
            kernel: returns one element for each element of its argument.
            sizes: size of an element of ``data`` and of one of ``out``, in bytes.

        Raises:
            CapacityError: the device is out of memory.
            WorkerError: the device failed otherwise.
        """
        data_size, out_size = sizes
        n_elements = len(data) // data_size
        at_once = PIECE_BYTES // max(sizes)
        with device_errors(self.device):
            try:
                # The slots take turns: while the device works on the piece of one, the other is
                # filled. A slot must be finished before it is used again.
                for number, first in enumerate(range(0, n_elements, at_once)):
                    last = min(first + at_once, n_elements)
                    slot = self._slots[number % 2]
                    slot.finish()
                    piece = data[first * data_size : last * data_size]
                    slot.begin((piece,), kernel, out[first * out_size : last * out_size])
                for slot in self._slots:
                    slot.finish()
            except BaseException:
                self._abandon()
                raise

    def map_pieces(
        self, data: Sequence[memoryview], kernel: Kernel, *, size: int
    ) -> Iterator[Array]:
        """Apply a kernel to each piece of some buffers and yield the results, in order, as bytes.

        Args:
            data: buffers of the same length; the kernel is called with the same piece of each.
            kernel: returns a small tensor for each piece.
            size: size of an element, in bytes; pieces contain only complete elements.

        Raises:
            CapacityError: the device is out of memory.
            WorkerError: the device failed otherwise.
        """
        at_once = PIECE_BYTES // size // len(data) * size
        in_flight: list[tuple[_Slot, Array]] = []
        with device_errors(self.device):
            try:
                for number, first in enumerate(range(0, len(data[0]), at_once)):
                    slot = self._slots[number % 2]
                    # A slot is free again after its earlier result has been yielded.
                    if len(in_flight) == len(self._slots):
                        finished_slot, result = in_flight.pop(0)
                        finished_slot.finish()
                        yield result
                    pieces = tuple(buffer[first : first + at_once] for buffer in data)
                    out: Array = slot.begin(pieces, kernel, None)
                    in_flight.append((slot, out))
                for slot, result in in_flight:
                    slot.finish()
                    yield result
            except BaseException:
                self._abandon()
                raise

    def send(self, data: Any, number: int = 0) -> Tensor:
        """Send a buffer's bytes to the device, for use within ``on_stream``.

        Args:
            number: number of the device buffer for the bytes; its next use overwrites them.
        """
        # The transfer before may still read the pinned memory that this one fills.
        self._slots[0].wait()
        return self._slots[0].send(as_tensor(data), number)

    @contextmanager
    def uploaded_once(self, data: memoryview) -> Iterator[None]:
        """Send ``data`` at most once for all kernels that use parts of it within the block.

        The bytes must not change within the block.
        """
        self._slots[0].set_window(as_tensor(data))
        try:
            yield
        finally:
            self._slots[0].set_window(None)

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Let the block use the device directly, outside of ``map`` and ``map_pieces``.

        Raises:
            CapacityError: the device is out of memory.
            WorkerError: the device failed otherwise.
        """
        with device_errors(self.device), self._slots[0].stream_context():
            yield

    def fetch(self, tensor: Tensor) -> Array:
        """Wait for a tensor of the device and return it as a numpy array; in ``on_stream``."""
        if not self.device.is_cuda:
            return tensor.numpy()
        import torch

        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        pinned.copy_(tensor, non_blocking=True)
        self._slots[0].wait()
        return pinned.numpy()

    def load_table(self, name: str, make: Callable[[], Array]) -> Tensor:
        """Return the array of this name on the device; call ``make`` for it at the first use."""
        table = self._tables.get(name)
        if table is None:
            import torch

            table = self._tables[name] = torch.from_numpy(make()).to(self.torch_device)
            # The copy runs on the default stream, for which the slots' streams do not wait.
            if self.device.is_cuda:
                torch.cuda.synchronize(self.torch_device)
        return table

    def _abandon(self) -> None:
        """Drop the pieces in flight; wait until the device no longer uses their buffers."""
        for slot in self._slots:
            slot.abandon()


class _Slot:
    """The buffers and the stream of one piece in flight.

    Args:
        device: a ``torch.device``.
    """

    def __init__(self, device: Any) -> None:
        import torch

        self._device = device
        self._is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None
        # A blocking event: the thread sleeps while it waits, and leaves its core to others.
        self._done = torch.cuda.Event(blocking=True) if self._is_cuda else None
        self._device_buffers: dict[int, Tensor] = {}
        self._pinned_inputs: dict[int, Tensor] = {}
        self._pinned_output: Tensor | None = None
        self._is_busy = False
        self._copy_back: tuple[Tensor, Tensor] | None = None  # (target, pinned memory)
        self._window: Tensor | None = None
        self._window_on_device: Tensor | None = None

    def set_window(self, window: Tensor | None) -> None:
        """Set the bytes of which ``send`` sends all at the first use of a part; None for none."""
        self._window, self._window_on_device = window, None

    def stream_context(self) -> AbstractContextManager[Any]:
        """Return a context in which torch queues its work on this slot's stream."""
        if self._stream is None:
            return nullcontext()
        import torch

        context: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return context

    def send(self, source: Tensor, number: int = 0) -> Tensor:
        """Send host bytes to the device, on the current stream.

        Args:
            number: number of the slot's device buffer for the bytes.
        """
        # A part of the window is recognized by its address. It is used where the window is on the
        # device, unless elements there would be misaligned.
        window = self._window
        start = -1 if window is None else source.data_ptr() - window.data_ptr()
        if (
            window is None
            or start < 0
            or start + source.numel() > window.numel()
            or start % _ALIGNMENT
        ):
            return self._send_alone(source, number)
        if self._window_on_device is None:
            self._window_on_device = self._send_alone(window, _WINDOW)
        return self._window_on_device[start : start + source.numel()]

    def _send_alone(self, source: Tensor, number: int) -> Tensor:
        """Send host bytes to a device buffer, on the current stream, regardless of the window."""
        import torch

        # Device buffers are kept and only replaced by larger ones, as allocation is slow.
        n = source.numel()
        target = self._device_buffers.get(number)
        if target is None or target.numel() < n:
            target = torch.empty(max(n, PIECE_BYTES), dtype=torch.uint8, device=self._device)
            self._device_buffers[number] = target
        # A transfer is asynchronous only from pinned memory; copy other memory there first.
        if self._is_cuda and not source.is_pinned():
            pinned = self._pinned_inputs.get(number)
            if pinned is None or pinned.numel() < n:
                pinned = torch.empty(max(n, 1 << 20), dtype=torch.uint8, pin_memory=True)
                self._pinned_inputs[number] = pinned
            pinned[:n].copy_(source)
            source = pinned[:n]
        target[:n].copy_(source, non_blocking=True)
        return target[:n]

    def begin(self, sources: Sequence[memoryview], kernel: Kernel, out: memoryview | None) -> Array:
        """Send pieces through a kernel, without waiting for the result.

        Args:
            out: buffer for the resulting bytes; None allocates memory for them.

        Returns:
            The resulting bytes, in ``out`` if given; valid after ``finish``.
        """
        import torch

        # Everything is queued on the slot's stream, which runs it in order.
        with self.stream_context():
            result = kernel(
                *(self.send(as_tensor(source), number) for number, source in enumerate(sources))
            )
            result = result.contiguous().view(-1).view(torch.uint8)
            n = result.numel()
            self._is_busy = True
            output = (
                torch.empty(n, dtype=torch.uint8, pin_memory=self._is_cuda)
                if out is None
                else as_tensor(out)
            )
            assert output.numel() == n, "the caller knows the size of the results"

            # As with sending, transfer to pinned memory; ``finish`` copies to other memory.
            target = output
            if self._is_cuda and not output.is_pinned():
                if self._pinned_output is None or self._pinned_output.numel() < n:
                    self._pinned_output = torch.empty(
                        max(n, 1 << 20), dtype=torch.uint8, pin_memory=True
                    )
                target = self._pinned_output[:n]
                self._copy_back = (output, target)
            target.copy_(result, non_blocking=True)
            if self._done is not None:
                self._done.record(self._stream)
        return output.numpy()

    def finish(self) -> None:
        """Wait for the piece in flight, if there is one, until its result is in host memory."""
        if self._is_busy and self._done is not None:
            self._done.synchronize()
        self._is_busy = False
        if self._copy_back is not None:
            output, pinned = self._copy_back
            self._copy_back = None
            output.copy_(pinned)

    def wait(self) -> None:
        """Wait until the stream has finished all queued work."""
        if self._stream is not None:
            self._stream.synchronize()

    def abandon(self) -> None:
        """Drop the piece in flight, and wait until the device no longer uses its buffers."""
        self._is_busy, self._copy_back = False, None
        self.wait()


class _WritableView:
    """A view of read-only bytes that numpy considers writable.

    torch warns about read-only arrays, but sources are never written to.
    """

    def __init__(self, data: Array) -> None:
        self._kept = data  # the memory must live as long as this view
        address = data.__array_interface__["data"][0]
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": data.shape,
            "data": (address, False),
        }


def as_tensor(data: Any) -> Tensor:
    """Return a buffer's bytes as a tensor, without a copy."""
    import numpy as np
    import torch

    array: Array = np.frombuffer(data, np.uint8)
    if not array.flags.writeable and len(array):
        array = np.asarray(_WritableView(array))
    return torch.from_numpy(array)


@contextmanager
def uploaded_once(device: Device | None, data: memoryview) -> Iterator[None]:
    """Send ``data`` at most once within the block, as ``Lane.uploaded_once`` of this thread does.

    Without a device, or if the device does no work, nothing is sent.
    """
    if device is None or not device.work:
        yield
        return
    with lane_of(device).uploaded_once(data):
        yield


_of_thread = threading.local()


def lane_of(device: Device) -> Lane:
    """Return the calling thread's lane to a device; create it at the first use."""
    lanes: dict[str, Lane] = _of_thread.__dict__.setdefault("lanes", {})
    lane = lanes.get(device.torch_name)
    if lane is None:
        lane = lanes[device.torch_name] = Lane(device)
    return lane
