"""What takes part in a scan: gets elements of arrays, or bytes of files, as they pass by.

Under a team each rank has observers of its own, which see the rank's share. What they have gathered is then merged into
those of the lead.
"""

from __future__ import annotations

from typing import Any, Protocol

from core.catalog.stored import StoredArray


class Observer(Protocol):
    """Gets the elements of arrays; called from several threads."""

    def sees(self, array: StoredArray) -> bool:
        """Whether it wants the elements of an array; asked once for each."""

    def feed(self, array: StoredArray, start: int, data: memoryview) -> None:
        """Takes a run of elements.

        Args:
            array: as the catalog has it.
            start: index of the run's first element in the array's C order. Runs come in any order, and together they
                are all of the array, each element once. An array of more than 1 MiB is mostly cut at multiples of
                1 MiB from its start.
            data: the elements, little endian; at most 1 MiB, valid during the call only.
        """

    def finish(self, array: StoredArray) -> None:
        """All elements of an array have been fed; called once, not at all if some could not be read."""

    def state(self) -> Any:
        """What has been gathered, to be merged elsewhere: small, and it can be pickled.

        Of an array of which several ranks are fed parts none is told that it is finished; the lead is, once all states
        have been merged.
        """

    def merge(self, state: Any) -> None:
        """Takes what another rank's observer has gathered of other elements."""


class FileObserver(Protocol):
    """Gets the bytes of files; called from several threads."""

    def reads(self, file: str, n_bytes: int) -> bool:
        """Whether it wants the bytes of a file, in order and from one thread; asked once for each."""

    def feed_file(self, file: str, offset: int, data: memoryview) -> None:
        """Takes the next bytes of a file; valid during the call only."""

    def finish_file(self, file: str) -> None:
        """All of a file has been fed; not called if some of it could not be read."""

    def state(self) -> Any:
        """What has been gathered, of whole files, to be merged elsewhere; it can be pickled."""

    def merge(self, state: Any) -> None:
        """Takes what another rank's observer has gathered of other files."""
