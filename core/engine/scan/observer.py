"""Define observers, which receive the elements of arrays or the bytes of files that a scan reads.

Each rank of a team has its own observers, which receive that rank's share. The states of the ranks'
observers are then merged into the observers of the lead.
"""

from __future__ import annotations

from typing import Any, Protocol

from core.engine.catalog.stored import StoredArray


class Observer(Protocol):
    """An observer of the elements of arrays; called from several threads."""

    def sees(self, array: StoredArray) -> bool:
        """Return whether the observer needs an array's elements; called once for each array."""

    def feed(self, array: StoredArray, start: int, data: memoryview) -> None:
        """Process a run of elements.

        Args:
            array: the array as the catalog has it.
            start: index of the run's first element in the array's C order. Runs come in any order;
                together they are the complete array, each element once. An array of more than 1 MiB
                is mostly cut at multiples of 1 MiB from its start.
            data: the elements, little endian; at most 1 MiB, valid during the call only.
        """

    def finish(self, array: StoredArray) -> None:
        """Finish an array, after all of its elements have been fed.

        Called once for each array, but not if some elements could not be read.
        """

    def state(self) -> Any:
        """Return what the observer has collected; it must be small and picklable.

        For an array of which several ranks are fed parts, ``finish`` is called only at the lead,
        after all states have been merged.
        """

    def merge(self, state: Any) -> None:
        """Add the state of another rank's observer, which received other elements."""


class FileObserver(Protocol):
    """An observer of the bytes of files; called from several threads.

    Attributes:
        in_order: it needs the bytes of a file in order and from one thread. Otherwise threads and
            ranks divide a file into segments: the bytes of each come in order, the segments in any.
    """

    in_order: bool

    def reads(self, file: str, n_bytes: int) -> bool:
        """Return whether the observer needs the bytes of a file."""

    def feed_file(self, file: str, offset: int, data: memoryview) -> None:
        """Process bytes of a file; they are valid during the call only."""

    def finish_file(self, file: str) -> None:
        """Finish a file, after all of it has been fed; not called if a part could not be read.

        Only called if the bytes come in order.
        """

    def state(self) -> Any:
        """Return what the observer has collected about complete files; it must be picklable."""

    def merge(self, state: Any) -> None:
        """Add the state of another rank's observer, which received other files."""
