"""The entries of some workers in a store that others use as well, and how many bytes go over the network for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ScopedStore:
    """A ``torch.distributed.TCPStore`` under a prefix.

    Args:
        store: the store.
        prefix: what the names of all entries begin with.

    Attributes:
        sent_bytes: names and values that this process has sent to the store and got from it.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self.sent_bytes = 0

    def set(self, name: str, value: str | bytes) -> None:
        """Makes or changes an entry."""
        self._store.set(self._full([name])[0], value)
        self.sent_bytes += len(value)

    def get(self, name: str) -> bytes:
        """An entry that is there."""
        found = bytes(self._store.get(self._full([name])[0]))
        self.sent_bytes += len(found)
        return found

    def multi_get(self, names: Sequence[str]) -> list[bytes]:
        """Entries that are there, by one request."""
        found = [bytes(value) for value in self._store.multi_get(self._full(names))] if names else []
        self.sent_bytes += sum(map(len, found))
        return found

    def check(self, names: Sequence[str]) -> bool:
        """Whether all entries are there."""
        return bool(self._store.check(self._full(names)))

    def add(self, name: str, number: int) -> int:
        """Adds to an entry that is a number, and gives the sum."""
        return int(self._store.add(self._full([name])[0], number))

    def _full(self, names: Sequence[str]) -> list[str]:
        found = [f"{self._prefix}/{name}" for name in names]
        self.sent_bytes += sum(map(len, found))
        return found
