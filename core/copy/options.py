"""How a copy is done: sizes of the work, checksums, callbacks, the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from core.plan.items import ITEM_BYTES, ItemNumber

if TYPE_CHECKING:
    from core.copy.ledger import ItemRecord
    from core.device.device import Device

Progress = Callable[[int], None]
"""Called from the copying threads with the number of bytes just written."""


class Journal(Protocol):
    """A record of the items that are finished (``core.stage.journal``)."""

    def done(self, item: ItemNumber) -> ItemRecord | None:
        """Return what an earlier run recorded for an item, or None."""

    def add(self, item: ItemNumber, record: ItemRecord, files: Iterable[str]) -> None:
        """Record an item whose bytes have been written to ``files``."""


class WriteObserver(Protocol):
    """An observer of the bytes that are written to arrays; called from several threads."""

    def feed(self, number: int, offset: int, data: memoryview) -> None:
        """Take whole elements of an array, ``offset`` bytes from its start.

        ``data`` is valid during the call only.
        """

    def pass_over(self, number: int, offset: int, n_bytes: int) -> None:
        """Take a range of an array whose elements are all zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOptions:
    """How ``core.copy.run.execute`` copies.

    Args:
        buffer_bytes: most bytes of buffers per thread; None takes the plan's. A third of it bounds
            a band.
        item_bytes: about how many bytes a thread copies before it takes the next item.
        crc: compute CRC-32s, and check those that the source states. With a journal they are
            computed in any case.
        digest: compute content digests.
        progress: called with the number of bytes just written.
        journal: finished items are recorded in it; items that it lists already are checked and not
            copied again.
        watch: observes what is written, but not what an earlier run had written.
        device: for casts, comparisons and quantized encodings where it is faster; None does all on
            the CPU.
        before_item: called before each item, also before those that write nothing; an exception of
            it ends the copy.
    """

    buffer_bytes: int | None = None
    item_bytes: int = ITEM_BYTES
    crc: bool = True
    digest: bool = True
    progress: Progress | None = None
    journal: Journal | None = None
    watch: WriteObserver | None = None
    device: Device | None = None
    before_item: Callable[[], None] | None = None
