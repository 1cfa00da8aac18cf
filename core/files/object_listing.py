"""List object stores: which objects lie below a prefix, with their sizes and ETags.

Web servers have no listings. Of them, the files are found that checkpoints usually have, and those
that an index of weights names; any other file is asked for by its name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import field
from typing import Any, TypeAlias

from core.errors import AccessDeniedError, MissingShardError, StorageError
from core.files.object_client import Address, send_request, storage_options
from core.files.ranges import KeptPages
from core.files.requests.daemon_threads import DaemonThreads
from core.files.requests.waiting import map_in, wait_for
from core.values import dataclass

_INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_USUAL_FILES = (
    *_INDEX_FILES,
    "model.safetensors",
    "pytorch_model.bin",
    "adapter_model.safetensors",
    "adapter_config.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    ".metadata",
    "metadata.json",
    "common.pt",
    "ckpt-manifest.json",
    "latest_checkpointed_iteration.txt",
)
"""Files to look for where there is no listing."""
_MAX_INDEX_BYTES = 64 << 20
_MAX_AGE_S = 10.0
"""Age up to which a listing is used again; opening a checkpoint looks at a prefix several times."""
_PAGE_KEYS = 1000
"""Number of objects in an answer of S3."""
N_REQUESTS = 16
"""Number of requests at the same time."""
N_SMALL_REQUESTS = 256
"""Number of requests for pages of metadata at the same time, whose time is all waiting."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The description of an object in the listing of its store.

    Args:
        size: bytes.
        e_tag: identity of the content; None where the store states none.
        modified_ns: time of the last change, in nanoseconds since 1970.
    """

    size: int
    e_tag: str | None
    modified_ns: int


@dataclass(slots=True)
class Folder:
    """The content of one directory.

    Args:
        objects: name → object.
        folders: names of the directories in it.
    """

    objects: dict[str, StoredFile] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)


_Key: TypeAlias = tuple[str, frozenset[tuple[str, str]]]
"""URL of a prefix, or a bucket, and the options of its store."""
_roots: dict[_Key, tuple[float, Folder]] = {}
_trees: dict[_Key, tuple[float, dict[str, Folder]]] = {}
"""Prefix → time and result of the last listing."""
_denied: set[_Key] = set()
"""Buckets that may be read, but not listed."""
_refused: set[_Key] = set()
"""Objects of which a store did not tell whether they exist."""
_begun: dict[_Key, _TreeListing] = {}
"""Prefix → listing of everything below it that was begun."""
SMALL_OBJECTS = KeptPages(4 << 20)
"""Small objects that were read whole, by URL and ETag: a command opens a checkpoint several times.
"""


def forget_listings() -> None:
    """Make the next questions, and reads of small objects, ask the store again."""
    SMALL_OBJECTS.clear()
    _roots.clear()
    _trees.clear()
    _begun.clear()
    _denied.clear()
    _refused.clear()


def delete_objects(paths: Sequence[Address]) -> None:
    """Delete objects of one bucket; those that do not exist are skipped.

    Raises:
        StorageError: the store refuses, or cannot be reached.
    """
    if paths:
        forget_listings()
        keys = [path.key for path in paths]
        send_request(paths[0], lambda client: client.delete(keys), doing="write")


def is_listed(path: Address) -> bool:
    """Return whether a store lists its objects: no web server does, nor a bucket that refused."""
    return path.scheme not in ("http", "https") and (path.bucket, storage_options()) not in _denied


def list_root(root: Address) -> Folder:
    """Return the objects and the directories right below a prefix.

    The result may be some seconds old.
    """
    key = str(root), storage_options()
    age_and_result = _roots.get(key)
    if age_and_result is not None and time.monotonic() - age_and_result[0] < _MAX_AGE_S:
        return age_and_result[1]
    if (tree := _find_tree_above(root)) is not None:
        return tree.get("", Folder())
    if is_listed(root):
        try:
            content = _list_both_ways(root)
        except AccessDeniedError:
            # Single objects can be read without the permission to list the bucket.
            with suppress(AccessDeniedError):
                if root.key and find_object(root) is not None:
                    _denied.add((root.bucket, storage_options()))
            if is_listed(root):
                raise
            content = Folder()
    else:
        content = Folder(_find_usual_files(root))
    _roots[key] = time.monotonic(), content
    return content


def _list_both_ways(root: Address) -> Folder:
    """List what is right below a prefix, and begin to list everything below it at the same time.

    If that fits into one answer, the next question about a directory below needs no request.
    """
    key = str(root), storage_options()
    thread = DaemonThreads(1, "ckpt-listing")
    content = thread.submit(_ask_for_listing, root)
    thread.shutdown()
    # Go on as long as the other listing takes. Its error is raised below; one of this listing
    # comes again when somebody asks for it.
    with suppress(StorageError):
        tree = _TreeListing(root)
        tree.go_on()
        while not content.done() and not tree.is_complete:
            tree.go_on()
        _begun[key] = tree
        if tree.is_complete:
            list_all(root)
    return wait_for(content)


class _TreeListing:
    """A listing of everything below a prefix, answer by answer."""

    def __init__(self, root: Address) -> None:
        self.objects: dict[str, StoredFile] = {}
        self.is_complete = False
        self._root = root
        self._answers: Iterator[Any] | None = None
        self._last: str | None = None

    def go_on(self) -> None:
        """Ask for the next objects."""
        answer = send_request(self._root, self._ask, doing="list")
        self._last = answer[-1]["path"] if answer else None
        skipped = len(self._root.key) + 1 if self._root.key else 0
        self.objects |= {meta["path"][skipped:]: _described(meta) for meta in answer}
        self.is_complete = len(answer) < _PAGE_KEYS

    def _ask(self, client: Any) -> Any:
        """Return the next answer; after a failure, ask anew for what comes behind the last one."""
        if self._answers is None:
            stream: Any = client.list(
                self._root.key or None, offset=self._last, chunk_size=_PAGE_KEYS
            )
            self._answers = iter(stream)
        try:
            return next(self._answers, [])
        except BaseException:
            self._answers = None
            raise


def _ask_for_listing(root: Address) -> Folder:
    """List the objects and the directories right below a prefix, by one request for 1,000."""
    listing: Any = send_request(
        root,
        lambda client: client.list_with_delimiter(root.key or None),
        doing="list",
    )
    return Folder(
        {meta["path"].rpartition("/")[2]: _described(meta) for meta in listing["objects"]},
        {prefix.rstrip("/").rpartition("/")[2] for prefix in listing["common_prefixes"]},
    )


def list_all(root: Address) -> dict[str, Folder]:
    """Return everything below a prefix: directory → content, of every directory.

    The result may be some seconds old.
    """
    key = str(root), storage_options()
    age_and_result = _trees.get(key)
    if age_and_result is not None and time.monotonic() - age_and_result[0] < _MAX_AGE_S:
        return age_and_result[1]
    if (folders := _find_tree_above(root)) is not None:
        return folders
    tree = _begun.pop(key, None) or _TreeListing(root)
    while not tree.is_complete:
        tree.go_on()
    # Sort the objects into directories: directory → content.
    folders = {"": Folder()}
    for name, entry in tree.objects.items():
        folder, _, last = name.rpartition("/")
        folders.setdefault(folder, Folder()).objects[last] = entry
    # Enter every directory into the one above it, which may have no objects of its own.
    for folder in list(filter(None, folders)):
        while folder:
            above, _, last = folder.rpartition("/")
            folders.setdefault(above, Folder()).folders.add(last)
            folder = above
    _trees[key] = time.monotonic(), folders
    return folders


def _find_tree_above(root: Address) -> dict[str, Folder] | None:
    """Return everything below a prefix if a listing of one above it has it; else None."""
    for (url, options), (time_s, folders) in list(_trees.items()):
        is_above = str(root).startswith(f"{url}/") and options == storage_options()
        if is_above and time.monotonic() - time_s < _MAX_AGE_S:
            under = str(root)[len(url) + 1 :]
            below = {
                name[len(under) + 1 :]: content
                for name, content in folders.items()
                if name == under or name.startswith(f"{under}/")
            }
            # What is missing there may have been written since.
            return below or None
    return None


def find_object(path: Address) -> StoredFile | None:
    """Ask for one object; return None if it does not exist."""
    try:
        return _described(send_request(path, lambda client: client.head(path.key)))
    except MissingShardError:
        return None
    except AccessDeniedError:
        # Who may not list is not told either that an object does not exist.
        if is_listed(path):
            raise
        _refused.add((str(path), storage_options()))
        return _find_by_reading(path) if path.scheme in ("http", "https") else None


def is_refused(path: Address) -> bool:
    """Return whether the store has refused to tell whether an object exists."""
    return (str(path), storage_options()) in _refused


def _find_by_reading(path: Address) -> StoredFile | None:
    """Read the first byte of a file of a server that answers ``GET`` only; None if it refuses."""
    first: Any = {"range": (0, 1)}
    try:
        return _described(
            send_request(path, lambda client: client.get(path.key, options=first).meta)
        )
    except (MissingShardError, StorageError):
        return None


def _find_usual_files(root: Address) -> dict[str, StoredFile]:
    """Return the files of a web server that checkpoints usually have: name → file."""
    usual = _find_files(root, _USUAL_FILES)
    shards: set[str] = set()
    for name in _INDEX_FILES:
        if name in usual:
            shards |= _shards_of_index(root / name, usual[name])
    return usual | _find_files(root, shards)


def _find_files(root: Address, names: Iterable[str]) -> dict[str, StoredFile]:
    """Ask for files by name, several at a time; return those that exist."""
    names = sorted(names)
    threads = DaemonThreads(N_REQUESTS, "ckpt-find")
    entries = map_in(threads, lambda name: find_object(root / name), names)
    threads.shutdown()
    return {name: entry for name, entry in zip(names, entries, strict=True) if entry is not None}


def _shards_of_index(path: Address, entry: StoredFile) -> set[str]:
    """Return the names of the files that an index of weights refers to; an odd index has none."""
    if entry.size > _MAX_INDEX_BYTES:
        raise StorageError(
            f"the index is {entry.size:,} bytes long; the limit is {_MAX_INDEX_BYTES:,}",
            file=str(path),
        )
    data = send_request(
        path, lambda client: bytes(client.get(path.key).bytes()), n_bytes=entry.size
    )
    try:
        weight_map = json.loads(data)["weight_map"]
        return {name for name in weight_map.values() if "/" not in name}
    except (ValueError, KeyError, TypeError, AttributeError):
        return set()  # the format reports what is wrong with it


def _described(meta: Any) -> StoredFile:
    """Return what is kept of obstore's description of an object."""
    modified_ns = int(meta["last_modified"].timestamp() * 1e6) * 1000
    e_tag = meta.get("e_tag")
    # Azure's listing leaves out the quotes, which its other answers and If-Match have.
    if e_tag is not None and not e_tag.endswith('"'):
        e_tag = f'"{e_tag}"'
    return StoredFile(meta["size"], e_tag, modified_ns)
