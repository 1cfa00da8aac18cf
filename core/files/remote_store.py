"""Read a prefix of an object store as a directory of files.

Directories are what lies below a common prefix. They are listed once, and every question about
names and sizes is answered from that; data are read by ranges, several at a time, on the condition
that the object is still the one that was listed (``If-Match``).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from core.errors import MissingShardError, SourceChangedError, TruncatedError
from core.files.object_client import client_of, translate_store_errors
from core.files.object_listing import (
    N_REQUESTS,
    N_SMALL_REQUESTS,
    Folder,
    StoredFile,
    find_object,
    forget_listings,
    is_listed,
    list_all,
    list_root,
)
from core.files.ranges.kept_pages import KeptPages
from core.files.ranges.memory import MAX_PART_BYTES, divide_memory
from core.files.ranges.read_ahead import MERGE_BYTES, FileRange, ReadAhead
from core.files.remote_path import RemotePath
from core.files.store import ReadStore, check_name, override

PAGE_BYTES = 68 << 10
"""Metadata is read in many small pieces: at least so many bytes are asked for, and kept. The
directory of a zip is looked for in its last 64.1 KiB.
"""
_ENDS: Mapping[str, tuple[int, ...]] = {"pt": (0, -1), "safetensors": (0,)}
"""Suffix → where files have their metadata: in the first page, in the last."""


class RemoteStore(ReadStore):
    """A prefix of an object store; the counterpart of ``core.files.store.LocalStore``.

    Args:
        root: URL of the prefix.
        entry: name of the one object that the user specified; None for the prefix.
        stamps: name → ``stamp`` of objects as another process saw them.

    Attributes:
        on_open: called with 1 when an object is read that has not been read before.
    """

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
        self._upcoming: deque[str] = deque()
        """Objects whose metadata will be read; see ``expect_headers``."""
        self._headers: dict[str, list[Future[bytes]]] = {}
        """Name → pages that were requested before anybody read the object."""
        self._n_headed = 0
        """Number of objects whose metadata was read without notice."""
        memory = divide_memory(None, n_requests=N_REQUESTS)
        self._pages = KeptPages(memory.kept_bytes)
        self._ahead = ReadAhead(self._fetch, self._pool, memory)
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
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
        list(self._pool().map(fill, starts) if len(starts) > 1 else map(fill, starts))

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
        list(self._pool().map(read_group, short) if len(short) > 1 else map(read_group, short))
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

    def expect(self, ranges: Iterable[FileRange]) -> None:
        """Take note of ranges that will be read soon, each once."""
        self._ahead.expect(ranges)

    def expect_headers(self, names: Sequence[str]) -> None:
        """Take note of objects whose metadata will be read next, in this order."""
        with self._lock:
            self._upcoming = deque(names)
        self._start_headers()

    def limit_memory(self, limit_bytes: int, *, threads: int) -> int:
        """Adapt to a process's memory limit, and return how much of it reading takes.

        Args:
            threads: number of threads that read.
        """
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
                    hint="run again when nothing writes to it",
                )

    def close(self) -> None:
        """Forget what was read; later reads ask again."""
        self._pages.clear()
        self._ahead.clear()
        with self._lock:
            self._upcoming.clear()
            self._headers.clear()
            if self._threads is not None:
                self._threads.shutdown(wait=False)
                self._threads = None

    def _pool(self) -> ThreadPoolExecutor:
        """Return the threads that wait for answers."""
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(N_SMALL_REQUESTS, "ckpt-store")
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
                    hint="nothing may write to the checkpoint; run again",
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
            raise MissingShardError("cannot open: the object does not exist", file=name)
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
        if kept is None or name in self._headers:
            self._await_headers(name)
            kept = self._pages.find(name, offset, n_bytes)
        if kept is not None:
            return bytes(kept)
        # At the end of an object, read its last page.
        start = min(offset, max(0, entry.size - PAGE_BYTES))
        length = min(entry.size - start, max(n_bytes + offset - start, PAGE_BYTES))
        return self._keep(name, start, length)[offset - start : offset - start + n_bytes]

    def _keep(self, name: str, offset: int, n_bytes: int) -> bytes:
        """Read a page, and keep it."""
        page = bytes(self._fetch(name, offset, n_bytes))
        self._pages.keep(name, offset, page)
        return page

    def _await_headers(self, name: str) -> None:
        """Wait for the pages of an object that were requested before; request those of the next.

        Metadata of an object that nobody announced is requested now: both ends at the same time.
        Who reads two of them will read the others, too.
        """
        with self._lock:
            is_new = name not in self._headers and name not in self._pages
            is_headed = is_new and self._ends_of(name) != ()
            if name in self._upcoming:
                self._upcoming.remove(name)
            elif is_headed:
                self._n_headed += 1
                if self._n_headed > 1 and not self._upcoming:
                    self._upcoming.extend(self._siblings(name))
            is_awaited = is_headed or name in self._headers
        if is_headed:
            self._start_pages(name)
        self._start_headers()
        if not is_awaited:
            return
        with self._lock:
            futures = self._headers.pop(name, [])
        for future in futures:
            # Who needs the page asks for it again, and gets the error.
            future.exception()
        self._start_headers()

    def _start_headers(self) -> None:
        """Request the metadata of the next objects, as far as there is memory for pages."""
        most = max(1, self._pages.max_bytes // (4 * PAGE_BYTES))
        while True:
            with self._lock:
                if not self._upcoming or len(self._headers) >= most:
                    return
                name = self._upcoming.popleft()
                if name in self._pages:
                    continue
                self._headers[name] = []
            self._start_pages(name)

    def _start_pages(self, name: str) -> None:
        """Request the pages of an object that hold its metadata."""
        entry = self._find(name)
        if entry is None:
            return
        last = max(0, entry.size - PAGE_BYTES)
        starts = {0 if end == 0 else last for end in self._ends_of(name)}
        # One request for an object that is hardly longer than the two pages.
        is_short = len(starts) > 1 and last <= PAGE_BYTES + MERGE_BYTES
        spans = (
            [(0, entry.size)]
            if is_short
            else [(start, min(PAGE_BYTES, entry.size - start)) for start in starts]
        )
        futures = [self._pool().submit(self._keep, name, *span) for span in spans if span[1]]
        with self._lock:
            self._headers[name] = futures

    def _ends_of(self, name: str) -> tuple[int, ...]:
        return () if self.entry is not None else _ENDS.get(name.rpartition(".")[2], ())

    def _siblings(self, name: str) -> list[str]:
        """Return the files of the same suffix that have not been read."""
        suffix = name.rpartition(".")[2]
        names = (
            f"{folder}/{last}" if folder else last
            for folder, content in self._folders.items()
            for last in content.objects
            if last.endswith(f".{suffix}")
        )
        return sorted(other for other in names if other != name and other not in self._pages)

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
        import obstore

        path = self.path(name)
        options: Any = {"range": (offset, offset + n_bytes)}
        if entry.e_tag is not None and not entry.e_tag.startswith("W/"):
            options["if_match"] = entry.e_tag
        with translate_store_errors(path):
            data = memoryview(obstore.get(client_of(path), path.key, options=options).bytes())
        if len(data) != n_bytes:
            raise _too_short(name, offset + len(data), offset, n_bytes)
        return data


def _too_short(name: str, end: int, offset: int, n_bytes: int) -> TruncatedError:
    """Return the error for an object that ends at byte ``end``, inside the range to read."""
    return TruncatedError(
        f"the object ends at byte {end:,}, {offset + n_bytes - end:,} bytes too early",
        file=name,
        span=(offset, offset + n_bytes),
        hint="copy the checkpoint again, or use an older one",
    )
