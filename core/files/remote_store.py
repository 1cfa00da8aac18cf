"""Read a prefix of an object store as a directory of files.

Directories are what lies below a common prefix. They are listed once, and every question about
names and sizes is answered from that; data are read by ranges, several at a time, on the condition
that the object is still the one that was listed (``If-Match``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

from core.errors import MissingShardError, SourceChangedError, TruncatedError
from core.files.object_client import send_request, storage_options
from core.files.object_listing import (
    N_REQUESTS,
    N_SMALL_REQUESTS,
    SMALL_OBJECTS,
    Folder,
    StoredFile,
    find_object,
    forget_listings,
    is_listed,
    list_all,
    list_root,
)
from core.files.ranges import (
    MAX_PART_BYTES,
    MERGE_BYTES,
    FileRange,
    KeptPages,
    ReadAhead,
    divide_memory,
)
from core.files.remote_path import RemotePath
from core.files.requests.daemon_threads import DaemonThreads
from core.files.requests.waiting import map_in
from core.files.store import ReadStore, check_name, list_files_below, override

PAGE_BYTES = 68 << 10
"""Metadata is read in many small pieces: at least so many bytes are asked for, and kept. The
directory of a zip is looked for in its last 64.1 KiB.
"""
_ZIPS = ("pt", "bin", "pth", "ckpt")
"""Suffixes of files that have their metadata in the first page and in the last."""
_HEADED = (*_ZIPS, "safetensors")
_TINY = ("zarray", "zarr.json")
"""Files that consist of metadata; who reads one reads them all."""
_MAX_WHOLE_BYTES = 1 << 20
"""Length up to which announced ranges are kept as pages, and other metadata is fetched whole."""


class RemoteStore(ReadStore):
    """A prefix of an object store; the counterpart of ``core.files.store.LocalStore``.

    Args:
        root: URL of the prefix.
        entry: name of the one object that the user specified; None for the prefix.
        stamps: name → ``stamp`` of objects as another process saw them.

    Attributes:
        on_open: called with 1 when an object is read that has not been read before.
    """

    is_remote = True
    entry: str | None = None
    on_open: Callable[[int], None] | None = None

    def __init__(
        self,
        root: RemotePath,
        *,
        entry: str | None = None,
        stamps: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.root = root
        self.entry = entry
        self._stamps = stamps or {}
        self._folders: dict[str, Folder] = {}
        self._is_whole = False
        """Everything below the root is in ``_folders``."""
        self._missing: set[str] = set()
        """Names of objects that do not exist, of stores without listings."""
        self._opened: dict[str, None] = {}
        self._announced: set[str] = set()
        """Objects whose metadata was announced; see ``expect_headers``."""
        self._kinds: set[str] = set()
        """Suffixes of objects whose metadata was read without being announced."""
        memory = divide_memory(None, n_requests=N_REQUESTS)
        self._pages = KeptPages(memory.kept_bytes)
        self._ahead = ReadAhead(self._fetch, self._pool, memory)
        self._lock = threading.Lock()
        self._threads: DaemonThreads | None = None
        self._long_reads = threading.BoundedSemaphore(N_REQUESTS)
        """Requests for parts of long ranges; those for pages and what is read ahead are bounded by
        their memory.
        """

    @property
    @override
    def label(self) -> str:
        return str(self.root / self.entry if self.entry else self.root)

    def path(self, name: str) -> RemotePath:
        """Return the URL of an object, after checking its name."""
        return self.root / check_name(name)

    @override
    def files(self, under: str = "") -> list[str]:
        return sorted(self._folder(under).objects)

    @override
    def folders(self, under: str = "") -> list[str]:
        return sorted(self._folder(under).folders)

    def unreadable(self, under: str = "") -> list[str]:
        """Return []: a store has only objects."""
        return []

    @override
    def sizes(self, under: str = "") -> Mapping[str, int]:
        return {name: entry.size for name, entry in sorted(self._folder(under).objects.items())}

    @override
    def exists(self, name: str) -> bool:
        return self._find(name) is not None

    @override
    def size(self, name: str) -> int:
        return self._object(name).size

    @property
    def opened(self) -> list[str]:
        """Names of the objects that have been read so far."""
        return list(self._opened)

    def stamp(self, name: str) -> tuple[int, int, int]:
        """Return size and modification time (ns) of an object, and 0 for its inode."""
        entry = self._object(name)
        return entry.size, entry.modified_ns, 0

    def modified_ns(self, name: str) -> int:
        """Return the time of an object's last change in nanoseconds since 1970."""
        return self._known(name).modified_ns

    def disk_bytes(self, name: str) -> int:
        """Return the size of an object: stores have no holes."""
        return self._known(name).size

    def holes(self, name: str) -> list[tuple[int, int]]:
        """Return []: stores have no holes."""
        return []

    def e_tag(self, name: str) -> str | None:
        """Return the strong ETag of an object, for ``If-Match``; None if there is none."""
        tag = self._known(name).e_tag
        return None if tag is None or tag.startswith("W/") else tag

    @override
    def read(self, name: str, offset: int, n_bytes: int) -> bytes:
        entry = self._object(name)
        if offset + n_bytes > entry.size:
            raise _too_short(name, entry.size, offset, n_bytes)
        if n_bytes == 0:
            return b""
        if n_bytes <= MAX_PART_BYTES:
            return self._read_page(name, entry, offset, n_bytes)
        buffer = bytearray(n_bytes)
        self.read_into(name, offset, memoryview(buffer))
        return bytes(buffer)

    @override
    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        entry = self._object(name)
        if offset + len(buffer) > entry.size:
            raise _too_short(name, entry.size, offset, len(buffer))

        def read_rest(start: int, view: memoryview) -> None:
            self._read_long(name, entry, start, view)

        self._ahead.read_into(name, offset, buffer, read_rest)

    def _read_long(self, name: str, entry: StoredFile, offset: int, buffer: memoryview) -> None:
        """Fill a buffer by several requests at the same time."""
        # numpy copies without the interpreter's lock; copies into new memory are slow.
        import numpy as np

        part_bytes = self._ahead.memory.part_bytes

        def copy(target: memoryview, data: memoryview) -> None:
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(data, np.uint8))

        def fill(start: int) -> None:
            n_bytes = min(part_bytes, len(buffer) - start)
            with self._long_reads:
                data = self._fetch(name, offset + start, n_bytes)
                copy(buffer[start : start + n_bytes], data)

        starts = range(0, len(buffer), part_bytes)
        if len(starts) == 1:
            fill(0)
        else:
            map_in(self._pool(), fill, starts)

    @override
    def read_spans(self, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        # One request for ranges that are close to each other.
        groups: list[list[int]] = []
        first = end = 0
        for number in sorted(range(len(spans)), key=lambda number: spans[number]):
            offset, n_bytes = spans[number]
            new_end = max(end, offset + n_bytes)
            if groups and offset <= end + MERGE_BYTES and new_end - first <= MAX_PART_BYTES:
                groups[-1].append(number)
                end = new_end
            else:
                groups.append([number])
                first, end = offset, offset + n_bytes

        # The requests run side by side; those of long ranges, which are divided again, do not wait
        # in the same threads.
        parts = [b""] * len(spans)

        def read_group(numbers: list[int]) -> None:
            first = spans[numbers[0]][0]
            last = max(sum(spans[number]) for number in numbers)
            entry = self._object(name)
            if last > entry.size:
                raise _too_short(name, entry.size, first, last - first)
            data = self._fetch(name, first, last - first)
            for number in numbers:
                offset, n_bytes = spans[number]
                parts[number] = bytes(data[offset - first : offset - first + n_bytes])

        for number in [group[0] for group in groups if spans[group[0]][1] > MAX_PART_BYTES]:
            parts[number] = self.read(name, *spans[number])
        short = [group for group in groups if spans[group[0]][1] <= MAX_PART_BYTES]
        if len(short) == 1:
            read_group(short[0])
        else:
            map_in(self._pool(), read_group, short)
        return parts

    @override
    def read_vector(self, name: str, offset: int, buffers: list[memoryview], n_bytes: int) -> None:
        if len(buffers) == 1:
            self.read_into(name, offset, buffers[0])
            return
        whole = bytearray(n_bytes)
        self.read_into(name, offset, memoryview(whole))
        position = 0
        for buffer in buffers:
            buffer[:] = whole[position : position + len(buffer)]
            position += len(buffer)

    @override
    def expect_ranges(self, ranges: Iterable[FileRange]) -> None:
        self._ahead.expect(ranges)

    @override
    def expect_headers(self, names: Iterable[str]) -> None:
        spans = (span for name in names for span in self._metadata_spans(name))
        self._ahead.expect(spans)

    @override
    def limit_reading(self, limit_bytes: int, *, threads: int) -> int:
        memory = divide_memory(limit_bytes, n_requests=N_REQUESTS)
        self._pages.limit(memory.kept_bytes)
        self._ahead.memory = memory
        return memory.n_bytes(threads)

    def is_cached(self, name: str, offset: int) -> bool:
        """Return False: nothing of a store is in the memory of this machine."""
        return False

    def drop_cached(self, name: str, offset: int, n_bytes: int) -> None:
        """Do nothing; see ``is_cached``."""

    def verify_unchanged(self) -> None:
        """Raise if an object that was read has changed since it was listed.

        Raises:
            SourceChangedError: its ETag, size or time differs.
            MissingShardError: it does not exist any more.
        """
        forget_listings()
        now = RemoteStore(self.root)
        for name in self._opened:
            if now._object(name) != self._object(name):
                raise SourceChangedError(
                    "the object changed while it was being read",
                    file=str(self.path(name)),
                    hint="run the command again when nothing is writing to the object",
                )

    def close(self) -> None:
        """Forget what was read; later reads ask again."""
        self._pages.clear()
        self._ahead.clear()
        self._announced.clear()
        with self._lock:
            if self._threads is not None:
                self._threads.shutdown()
                self._threads = None

    def _pool(self) -> DaemonThreads:
        """Return the threads that wait for answers."""
        with self._lock:
            if self._threads is None:
                self._threads = DaemonThreads(N_SMALL_REQUESTS, "ckpt-store")
            return self._threads

    def _object(self, name: str) -> StoredFile:
        """Return what the listing says about an object, and record that it is read.

        Raises:
            MissingShardError: it does not exist.
            SourceChangedError: it differs from its entry in ``stamps``.
        """
        entry = self._known(name)
        if name not in self._opened:
            expected = self._stamps.get(name)
            if expected is not None and tuple(expected[:2]) != (entry.size, entry.modified_ns):
                raise SourceChangedError(
                    "the object has changed since the plan was made",
                    file=name,
                    hint="run the command again when nothing is writing to the checkpoint",
                )
            self._opened[name] = None
            if self.on_open is not None:
                self.on_open(1)
        return entry

    def _known(self, name: str) -> StoredFile:
        """Return what the listing says about an object.

        Raises:
            MissingShardError: it does not exist.
        """
        entry = self._find(name)
        if entry is None:
            raise MissingShardError("the object does not exist", file=name)
        return entry

    def _find(self, name: str) -> StoredFile | None:
        """Return what the listing says about an object; None if it does not exist."""
        folder, _, last = check_name(name).rpartition("/")
        content = self._folder(folder)
        if last not in content.objects and not is_listed(self.root) and name not in self._missing:
            # No listing: ask for the object itself.
            entry = find_object(self.path(name))
            if entry is None:
                self._missing.add(name)
            else:
                self._folders.setdefault(folder, Folder()).objects[last] = entry
            return entry
        return content.objects.get(last)

    def _folder(self, under: str) -> Folder:
        """Return the content of a directory; an empty one if it is missing.

        The root alone is listed first, as it may hold hundreds of iterations. A question about a
        directory below lists everything: a request for every directory would take longer.
        """
        if (under == "" and not self._is_whole) or not is_listed(self.root):
            with self._lock:
                if "" not in self._folders:
                    self._folders[""] = list_root(self.root)
            return self._folders.get(under) or Folder()
        top = under.partition("/")[0]
        if not self._is_whole and top not in self._folder("").folders:
            return Folder()
        if not self._is_whole:
            with self._lock:
                if not self._is_whole:
                    self._folders |= list_all(self.root)
                    self._is_whole = True
        return self._folders.get(under) or Folder()

    def _read_page(self, name: str, entry: StoredFile, offset: int, n_bytes: int) -> bytes:
        """Return a range from what was read before; read it, and what follows it, if it is new."""
        kept = self._pages.find(name, offset, n_bytes)
        if kept is not None:
            return bytes(kept)
        if self._ahead.find(name, offset) is None:
            self._announce_metadata(name)
        part = self._ahead.find(name, offset)
        if part is None:
            # At the end of an object, read its last page.
            start = min(offset, max(0, entry.size - PAGE_BYTES))
            stop = max(offset + n_bytes, min(start + PAGE_BYTES, entry.size))
            page = bytes(self._fetch(name, start, stop - start))
        elif part[1] - part[0] <= _MAX_WHOLE_BYTES:
            # What was announced as one page becomes one.
            start, stop = part[0], max(part[1], offset + n_bytes)
            page = self._read_ahead(name, start, stop)
        else:
            return self._read_ahead(name, offset, offset + n_bytes)
        self._pages.keep(name, start, page)
        return page[offset - start : offset - start + n_bytes]

    def _read_ahead(self, name: str, start: int, stop: int) -> bytes:
        """Return a range of which some was announced."""
        data = bytearray(stop - start)

        def read_rest(first: int, view: memoryview) -> None:
            view[:] = self._fetch(name, first, len(view))

        self._ahead.read_into(name, start, memoryview(data), read_rest)
        return bytes(data)

    def _announce_metadata(self, name: str) -> None:
        """Announce the metadata of an object that nobody announced: both ends at the same time.

        Who reads two such objects will read the others, too.
        """
        kind = _kind_of(name)
        if self.entry is not None or kind not in (*_HEADED, *_TINY) or name in self._announced:
            return
        with self._lock:
            is_first = kind not in self._kinds and kind not in _TINY
            self._kinds.add(kind)
        names = [name]
        if not is_first:
            names += sorted(
                f"{folder}/{last}" if folder else last
                for folder, content in self._folders.items()
                for last in content.objects
                if _kind_of(last) == kind
            )
        self.expect_headers(names)

    def _metadata_spans(self, name: str) -> list[FileRange]:
        """Return the ranges of an object that hold its metadata, unless they were announced."""
        entry = self._find(name)
        is_announced = name in self._announced or self._ahead.find(name, 0) is not None
        if entry is None or entry.size == 0 or is_announced:
            return []
        self._announced.add(name)
        kind = _kind_of(name)
        last = max(0, entry.size - PAGE_BYTES)
        # One request for an object that is hardly longer than the two pages.
        if kind in _ZIPS and last > PAGE_BYTES + MERGE_BYTES:
            return [(name, 0, PAGE_BYTES), (name, last, entry.size)]
        is_whole = kind in _ZIPS or (kind not in _HEADED and entry.size <= _MAX_WHOLE_BYTES)
        return [(name, 0, entry.size if is_whole else min(PAGE_BYTES, entry.size))]

    def _fetch(self, name: str, offset: int, n_bytes: int) -> memoryview:
        """Read a range, except for what kept pages hold of it."""
        kept = self._pages.find(name, offset, n_bytes)
        if kept is not None:
            return kept
        entry = self._known(name)
        pieces = self._pages.find_pieces(name, offset, n_bytes)
        if not pieces:
            return self._get(name, entry, offset, n_bytes)

        # Fetch the gaps between the pages; all of them at once unless most is there.
        gaps = []
        position = offset
        for start, piece in [*pieces, (offset + n_bytes, memoryview(b""))]:
            if position < start:
                gaps.append((position, start))
            position = start + len(piece)
        if len(gaps) > 1 and 2 * sum(len(piece) for _, piece in pieces) < n_bytes:
            gaps = [(gaps[0][0], gaps[-1][1])]
        data = memoryview(bytearray(n_bytes))
        for start, piece in pieces:
            data[start - offset : start - offset + len(piece)] = piece
        for start, stop in gaps:
            data[start - offset : stop - offset] = self._get(name, entry, start, stop - start)
        return data

    def _get(self, name: str, entry: StoredFile, offset: int, n_bytes: int) -> memoryview:
        """Read a range of an object in one request."""
        path = self.path(name)
        e_tag = self.e_tag(name)
        # An ETag stands for the content: of a small object, it need not be read again.
        label = f"{path} {e_tag} {sorted(storage_options())}"
        is_shared = n_bytes == entry.size <= _MAX_WHOLE_BYTES and e_tag is not None
        if is_shared and (kept := SMALL_OBJECTS.find(label, 0, n_bytes)) is not None:
            return kept
        options: Any = {"range": (offset, offset + n_bytes)}
        if e_tag is not None:
            options["if_match"] = e_tag
        data = send_request(
            path,
            lambda client: memoryview(client.get(path.key, options=options).bytes()),
            n_bytes=n_bytes,
        )
        if len(data) != n_bytes:
            raise _too_short(name, offset + len(data), offset, n_bytes)
        if is_shared:
            SMALL_OBJECTS.keep(label, 0, bytes(data))
        return data


def list_objects(root: RemotePath) -> dict[str, int]:
    """Return name → bytes of all objects below a prefix."""
    with closing(RemoteStore(root)) as store:
        return list_files_below(store)


def _kind_of(name: str) -> str:
    """Return the suffix of a file, or its name if that alone tells its kind."""
    last = name.rpartition("/")[2]
    return last if last in _TINY else last.rpartition(".")[2]


def _too_short(name: str, end: int, offset: int, n_bytes: int) -> TruncatedError:
    """Return the error for an object that ends at byte ``end``, inside the range to read."""
    return TruncatedError(
        f"the object ends at byte {end:,}, {offset + n_bytes - end:,} bytes too early",
        file=name,
        span=(offset, offset + n_bytes),
        hint="copy the checkpoint again, or use an older one",
    )
