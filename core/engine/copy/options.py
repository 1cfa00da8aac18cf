"""Options of a copy: sizes of the work, checksums, callbacks, the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from core.engine.plan.items import ITEM_BYTES, ItemNumber
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.copy.ledger import ItemRecord
    from core.engine.device.device import Device

Progress = Callable[[int], None]
"""Called from the copying threads with the number of bytes just written."""


class Journal(Protocol):
    """A record of the items that are finished (``core.publish.stage.journal``)."""

    def done(self, item: ItemNumber) -> ItemRecord | None:
        """Return the record that an earlier run made of an item, or None."""

    def add(self, item: ItemNumber, record: ItemRecord, files: Iterable[str]) -> None:
        """Record an item whose bytes have been written to ``files``."""


class WriteObserver(Protocol):
    """An observer of the bytes that are written to arrays; called from several threads."""

    def feed(self, number: int, offset: int, data: memoryview) -> None:
        """Take complete elements of an array, ``offset`` bytes from its start.

        ``data`` is valid during the call only.
        """

    def pass_over(self, number: int, offset: int, n_bytes: int) -> None:
        """Take a range of an array whose elements are all zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOptions:
    """Options of ``core.engine.copy.run.execute``.

    Args:
        buffer_bytes: maximum bytes of buffers per thread; None takes the plan's. A third of it
            bounds a band.
        item_bytes: approximate number of bytes that a thread copies per item.
        crc: compute CRC-32s, and check those that the source records. With a journal they are
            computed in any case.
        digest: compute content digests.
        progress: called with the number of bytes just written.
        journal: finished items are recorded in it; items that it lists already are checked and not
            copied again.
        watch: observes the bytes that this run writes, but not those of an earlier run.
        device: used for casts, comparisons and quantized encodings where it is faster; None does
            all work on the CPU.
        on_array: called with the number and the CRC-32 of each array that has been written
            completely, from any thread.
        before_item: called before each item, also before those that write nothing; its exceptions
            end the copy.
    """

    buffer_bytes: int | None = None
    item_bytes: int = ITEM_BYTES
    crc: bool = True
    digest: bool = True
    progress: Progress | None = None
    journal: Journal | None = None
    watch: WriteObserver | None = None
    device: Device | None = None
    on_array: Callable[[int, int], None] | None = None
    before_item: Callable[[], None] | None = None
