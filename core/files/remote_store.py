"""Read a prefix of an object store as a directory of files.

Directories are what lies below a common prefix. They are listed once, and every question about
names and sizes is answered from that; data are read by ranges, several at a time, on the condition
that the object is still the one that was listed (``If-Match``).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from core.errors import MissingShardError, SourceChangedError, TruncatedError
from core.files.object_client import client_of, translate_store_errors
from core.files.object_listing import (
    N_REQUESTS,
    Folder,
    StoredFile,
    find_object,
    forget_listings,
    is_listed,
    list_all,
    list_root,
)
from core.files.remote_path import RemotePath
from core.files.store import ReadStore, check_name, override

PART_BYTES = 8 << 20
"""Number of bytes of a request; longer ranges are divided."""
PAGE_BYTES = 64 << 10
"""Metadata is read in many small pieces: at least so many bytes are asked for, and kept."""
MERGE_BYTES = 32 << 10
"""Ranges with no more than this between them are read by one request."""
_MAX_KEPT_BYTES = 64 << 20
"""Number of bytes that are kept of all objects together."""
_HEADED_SUFFIXES = ("pt", "safetensors")
"""Suffixes of files whose metadata is at their start or end."""


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
        self._pages: OrderedDict[str, dict[int, bytes]] = OrderedDict()
        """Name → offset → bytes that were read; the object used longest ago comes first."""
        self._n_kept = 0
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

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
        if n_bytes <= PART_BYTES:
            return self._read_kept(name, entry, offset, n_bytes, with_siblings=True)
        buffer = bytearray(n_bytes)
        self.read_into(name, offset, memoryview(buffer))
        return bytes(buffer)

    @override
    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        entry = self._object(name)
        if offset + len(buffer) > entry.size:
            raise _too_short(name, entry.size, offset, len(buffer))

        def fill(start: int) -> None:
            n_bytes = min(PART_BYTES, len(buffer) - start)
            buffer[start : start + n_bytes] = self._get(name, entry, offset + start, n_bytes)

        starts = range(0, len(buffer), PART_BYTES)
        if len(starts) <= 1:
            for start in starts:
                fill(start)
        else:
            list(self._pool().map(fill, starts))

    @override
    def read_spans(self, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        # One request for ranges that are close to each other.
        groups: list[list[int]] = []
        first = end = 0
        for number in sorted(range(len(spans)), key=lambda number: spans[number]):
            offset, n_bytes = spans[number]
            new_end = max(end, offset + n_bytes)
            if groups and offset <= end + MERGE_BYTES and new_end - first <= PART_BYTES:
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
            data = self._read_kept(name, entry, first, last - first, with_siblings=False)
            for number in numbers:
                offset, n_bytes = spans[number]
                parts[number] = data[offset - first : offset - first + n_bytes]

        for number in [group[0] for group in groups if spans[group[0]][1] > PART_BYTES]:
            parts[number] = self.read(name, *spans[number])
        short = [group for group in groups if spans[group[0]][1] <= PART_BYTES]
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
        with self._lock:
            self._pages.clear()
            self._n_kept = 0
            if self._threads is not None:
                self._threads.shutdown(wait=False)
                self._threads = None

    def _pool(self) -> ThreadPoolExecutor:
        """Return the threads that wait for answers."""
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(N_REQUESTS, "ckpt-store")
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

    def _read_kept(
        self, name: str, entry: StoredFile, offset: int, n_bytes: int, *, with_siblings: bool
    ) -> bytes:
        """Return a range from what was read before; read it, and what follows it, if it is new.

        Args:
            with_siblings: read the same page of similar objects along, in other threads.
        """
        with self._lock:
            for start, page in self._pages.get(name, {}).items():
                if start <= offset and offset + n_bytes <= start + len(page):
                    self._pages.move_to_end(name)
                    return page[offset - start : offset - start + n_bytes]
        # At the end of an object, read its last page. The same is read along of its siblings: who
        # reads the header of one of 1,024 rank files will read the others'.
        start = min(offset, max(0, entry.size - PAGE_BYTES))
        wanted = [(name, entry, start, max(n_bytes + offset - start, PAGE_BYTES))]
        if with_siblings and (start == 0 or start + PAGE_BYTES == entry.size):
            wanted += [
                (other, theirs, 0 if start == 0 else max(0, theirs.size - PAGE_BYTES), PAGE_BYTES)
                for other, theirs in self._siblings(name)
            ]

        def read_page(item: tuple[str, StoredFile, int, int]) -> bytes:
            path, described, first, length = item
            length = min(length, described.size - first)
            page = bytes(self._get(path, described, first, length)) if length > 0 else b""
            with self._lock:
                pages = self._pages.setdefault(path, {})
                self._n_kept += len(page) - len(pages.get(first, b""))
                pages[first] = page
                self._pages.move_to_end(path)
                # Forget the objects that were used longest ago.
                while self._n_kept > _MAX_KEPT_BYTES and len(self._pages) > 1:
                    _, forgotten = self._pages.popitem(last=False)
                    self._n_kept -= sum(map(len, forgotten.values()))
            return page

        if len(wanted) == 1:
            first_page = read_page(wanted[0])
        else:
            first_page, *_ = self._pool().map(read_page, wanted)
        return first_page[offset - start : offset - start + n_bytes]

    def _siblings(self, name: str) -> list[tuple[str, StoredFile]]:
        """Return the files of the same suffix, none of which has been read, up to a bound."""
        suffix = name.rpartition(".")[2]
        if self.entry is not None or suffix not in _HEADED_SUFFIXES:
            return []
        others = (
            (f"{folder}/{last}" if folder else last, entry)
            for folder, content in self._folders.items()
            for last, entry in content.objects.items()
            if last.endswith(f".{suffix}")
        )
        unread = [item for item in others if item[0] != name and item[0] not in self._pages]
        return unread[: _MAX_KEPT_BYTES // PAGE_BYTES // 2]

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
