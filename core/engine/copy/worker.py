"""Copy work items in one thread, with its buffers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from core.arrays.checksum import BLOCK_BYTES
from core.arrays.dtypes import itemsize
from core.arrays.gather import StridedLayout, dense_layout, is_dense, read_box
from core.engine.catalog.optimizer_keys import is_moment
from core.engine.copy.output import Output
from core.engine.device.device import COMPARE, Device, cast_work, does
from core.engine.device.lane import PIECE_BYTES, host_buffer
from core.engine.plan.addresses import Source
from core.engine.plan.items import Comparison, Interleave, Item, Move
from core.errors import ReplicaMismatchError

if TYPE_CHECKING:
    from core.arrays.box import Box
    from core.engine.copy.ledger import ItemRecord, Ledger
    from core.engine.copy.options import CopyOptions
    from core.engine.plan.positions import Places
    from core.files.store import ReadStore, TargetStore

CHUNK_BYTES = BLOCK_BYTES
"""Bytes that a move copies at once; they stay in the processor's second-level cache."""
DEVICE_CHUNK_BYTES = 2 * PIECE_BYTES
"""Bytes that a move copies at once if a device casts: complete blocks, a chunk for each slot."""


class CopyWorker:
    """The buffers and counters of one copying thread.

    Args:
        source: the source files.
        stage: the target files.
        places: file positions of the target arrays.
        ledger: receives the checksums.
        options: options of the copy.
        band_bytes: maximum bytes of a band (``band_bytes_of``).
        threads: number of threads that copy.
        is_stopped: asked between chunks whether the copy has been stopped.
    """

    def __init__(
        self,
        source: ReadStore,
        stage: TargetStore,
        places: Places,
        ledger: Ledger,
        options: CopyOptions,
        *,
        band_bytes: int,
        threads: int,
        is_stopped: Callable[[], bool],
    ) -> None:
        self._source = source
        self._device = options.device
        self._threads = threads
        self._is_stopped = is_stopped
        self._band_bytes = band_bytes
        self._make_buffers(None)
        self._begin = partial(Output, options=options, stage=stage, places=places, ledger=ledger)
        self.read_bytes = 0
        self.written_bytes = 0
        self.overflows: dict[str, int] = {}

    def do(self, item: Item) -> tuple[ItemRecord | None, set[str]]:
        """Copy an item, or part of it if the copy is stopped.

        Returns:
            The record for the journal (None if the item cannot be resumed), and the files written
            to.
        """
        if isinstance(item, Comparison):
            self._compare(item)
            return None, set()
        device = (
            None if item.dtypes[0] == item.dtypes[1] else self._device_for(cast_work(*item.dtypes))
        )
        # Pinned buffers are scarce, so they are allocated only when a device has work.
        if device is not None and not self._is_pinned:
            self._make_buffers(device)
        out = self._begin(item.dtypes, spare=self._extra, device=device)
        if isinstance(item, Move):
            self._move(
                item,
                out,
                min(CHUNK_BYTES if device is None else DEVICE_CHUNK_BYTES, self._band_bytes),
            )
        else:
            self._interleave(item, out)
        self.written_bytes += out.written_bytes
        if out.n_overflows:
            self.overflows[item.key] = self.overflows.get(item.key, 0) + out.n_overflows
        if self._is_stopped():
            return None, set()
        return out.close()

    def _make_buffers(self, device: Device | None) -> None:
        """Allocate the buffers: pinned memory for a device, plain memory without one."""
        self._is_pinned = device is not None
        self._band = host_buffer(device, self._band_bytes)
        self._raw = host_buffer(device, self._band_bytes)
        chunk_bytes = CHUNK_BYTES if device is None else DEVICE_CHUNK_BYTES
        self._extra = host_buffer(device, min(chunk_bytes, self._band_bytes))

    def _move(self, item: Move, out: Output, chunk_bytes: int) -> None:
        """Copy consecutive elements, in chunks that end at multiples of ``chunk_bytes``."""
        source_size, target_size = (itemsize(name) for name in item.dtypes)
        position = item.destinations[0][1] * target_size
        source = item.source
        if source.file is None:  # the buffer is the source of zeros
            self._extra[:] = bytes(len(self._extra))
        done = 0
        while done < item.n_elements and not self._is_stopped():
            # Chunks end at multiples of their size in the target array, as blocks of digests do.
            room = chunk_bytes - (position + done * target_size) % chunk_bytes
            n = max(1, min(item.n_elements - done, room // target_size, chunk_bytes // source_size))
            data = self._band[: n * source_size]
            # Elements without a file are zero, and so are the new files already.
            if source.file is None:
                out.put_zeros(item.destinations, done, self._extra[: n * target_size])
            else:
                address = source.start + done * source_size
                self._source.read_into(source.file, address, data)
                self.read_bytes += len(data)
                if source.record is not None:
                    out.check(source.record, address, (data,), len(data))
                out.put_all(item.destinations, done, data)
            done += n

    def _interleave(self, item: Interleave, out: Output) -> None:
        from core.engine.copy.interleave import Interleaver

        interleaver = Interleaver(self._source, self._band, self._raw)
        self.read_bytes += interleaver.interleave(item, out, is_stopped=self._is_stopped)

    def _compare(self, item: Comparison) -> None:
        """Compare copies that must be equal, band by band.

        Raises:
            ReplicaMismatchError: two copies differ.
        """
        from core.engine.device.compare import is_equal

        size = itemsize(item.dtype)
        device = self._device_for(COMPARE)
        for band in item.bands:
            if self._is_stopped():
                return
            # Read the band once from the primary copy, then from each other copy.
            delta = [a - b for a, b in zip(band.offset, item.box.offset, strict=True)]
            n_bytes = band.n_elements * size
            first = self._band[:n_bytes]
            self._read_dense(item.primary, delta, band, size, first)
            for copy in item.copies:
                other = self._extra[:n_bytes]
                self._read_dense(copy, delta, band, size, other)
                if not is_equal(device, first, other):
                    has_config = self._source.exists("config.json")
                    raise _mismatch_error(
                        item, copy, band, bytes(first), bytes(other), has_config=has_config
                    )

    def _device_for(self, work: str) -> Device | None:
        """Return the device if it does a kind of work; tries the work at the first call."""
        if self._device is None:
            return None
        from core.engine.calibration.choice import choose_device

        device = choose_device(self._device, [work], threads=self._threads)
        return device if does(device, work) else None

    def _read_dense(
        self, source: Source, delta: list[int], band: Box, size: int, out: memoryview
    ) -> None:
        """Read the elements of a band in C order."""
        self.read_bytes += len(out)
        address = source.at(delta)
        file = source.file
        if file is None:
            out[:] = bytes(len(out))
        elif is_dense(band.shape, size, source.strides):
            self._source.read_into(file, address, out)
        else:
            read_box(
                lambda start, buffer: self._source.read_into(file, start, buffer),
                StridedLayout(address, source.strides),
                out,
                dense_layout(band.shape, size),
                shape=band.shape,
                itemsize=size,
                raw=self._raw,
            )


def band_bytes_of(buffer_bytes: int) -> int:
    """Return the maximum bytes of a band: a third of a thread's buffers.

    The other two thirds are the raw source bytes and the buffer for casts.
    """
    return buffer_bytes // 3 & ~63


def _mismatch_error(
    item: Comparison, copy: Source, band: Box, first: bytes, other: bytes, *, has_config: bool
) -> ReplicaMismatchError:
    """Build the error for two copies that differ, with the index of the first different element.

    Args:
        has_config: the source has a config.json.
    """
    n_equal_bytes = next(i for i, (a, b) in enumerate(zip(first, other, strict=True)) if a != b)
    flat = n_equal_bytes // itemsize(item.dtype)
    # Unravel the flat index in the band's C order, last axis first.
    index = []
    for extent, offset in zip(reversed(band.shape), reversed(band.offset), strict=True):
        index.append(offset + flat % extent)
        flat //= extent
    if item.is_tied:
        ties = (
            "tie_word_embeddings in config.json, or as multi-token prediction heads"
            if has_config
            else "--tie, the configuration or the model's arguments"
        )
        hint = (
            f"the destination ties the two tensors by {ties}; correct that setting, or leave one "
            "of the tensors out with --exclude"
        )
    else:
        hint = (
            "the ranks have different copies, so the checkpoint is damaged, or the ranks had "
            "diverged when it was saved; to use the first rank's copy, pass "
            "--on-replica-mismatch first"
        )
        if is_moment(item.key):
            hint += "; to leave the optimizer out, pass --no-optim"
    return ReplicaMismatchError(
        f"two copies of the tensor differ, first at index {tuple(reversed(index))} "
        f"(files {item.primary.file} and {copy.file})",
        file=copy.file,
        key=item.key,
        hint=hint,
    )
