"""Fetch the streams of objects ahead, which stores far away would read one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog
from core.files.store import ReadStore

if TYPE_CHECKING:
    from core.files.ranges import FileRange

_MAX_AHEAD_BYTES = 1 << 20
"""Length up to which the stream of an object is fetched ahead; longer ones may hold tensors."""


def expect_streams(store: ReadStore, catalog: Catalog, raw_keys: Iterable[str | None]) -> None:
    """Announce that the streams of objects will be read, except for long ones.

    Args:
        raw_keys: keys of the streams; None where an object has none.
    """

    def ranges() -> Iterator[FileRange]:
        for key in raw_keys:
            stream = None if key is None else catalog.fragments(key)[0].array
            if stream is None or stream.extent.encoding is not None:
                continue
            if stream.n_bytes <= _MAX_AHEAD_BYTES:
                file, start = stream.extent.file, stream.extent.offset
                yield file, start, start + stream.n_bytes

    # A generator: only a remote store looks for the streams.
    store.expect_ranges(ranges())
