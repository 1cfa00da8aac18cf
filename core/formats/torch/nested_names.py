"""Names in nested pickles: in bytes inside a value that are themselves a pickle or torch stream.

``torch.storage._load_from_bytes(b"…")`` unpickles its argument, Transformer Engine and Megatron
save a ``BytesIO`` that contains a saved object, and an attacker can hide a call in the same way.
The values of such streams are not used here: they are only read to see which names they import,
call and so on. If a stream is nested too deeply to be read, or is refused, the use of the function
that loads it is ``unread``.

Source: torch 2.13 ``torch/storage.py``; ``megatron/core/extensions/transformer_engine.py``
    (``get_extra_state``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING

from core.errors import (
    CheckpointingException,
    CorruptError,
    TruncatedError,
    UnsafeError,
    UnsupportedError,
)
from core.files.store import MemoryStore
from core.formats.torch.stream import stream_kind, tar_members
from core.pickle.inert import Global, Inert, Persistent, walk
from core.pickle.noted import ReadPickle, gc_paused, note_uses, noting_uses
from core.pickle.reader import PickleLimits, load, load_next
from core.pickle.uses import Use, is_plain_call, uses_of_node
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore

_MAX_DEPTH = 4
_MAX_LOADED = PickleLimits().max_streams
"""Maximum number of nested streams in one value that the pickle loads; a pickled model has one per
tensor.
"""
_MAX_UNLOADED = 1000
_MAX_BYTES = 64 << 20
"""Maximum number of nested streams that the pickle does not load, and their maximum total size."""
_MAX_TRIED = 10_000
"""Maximum number of bytes objects that are tested for being streams."""
_MAX_USES = 3 * PickleLimits().max_names
"""Number of uses beyond which no further stream is read."""
_SMALL_BYTES = 8192
"""Maximum size of streams whose scans are cached."""
_MAX_TEXT_BYTES = 1 << 20
"""Maximum size of bytes that are tested for being a pickle of protocol 0."""
_LEAST_BYTES = 4
_FIRST_BYTES = b"P\x80L"
"""First bytes of zips, of pickles, and of streams that torch wrote in protocol 0."""
_HEAD_BYTES = 1 << 16
_N_LEGACY = 5
_N_PREAMBLE = 3
"""Number of pickles in a stream from before torch 1.6, and of those before the object."""
_MAX_PREAMBLE_BYTES = 256
_FILE = "bytes"
_LOADS = Global("pickle", "load")


def uses_of_stream(
    store: ReadStore, file: str, start: int, n_bytes: int, *, read: Sequence[ReadPickle] = ()
) -> set[Use]:
    """Return the uses of names in a stream and in the streams nested in it.

    Args:
        start, n_bytes: the bytes of the file that are the stream: a file of ``torch.save``, or a
            pickle.
        read: its pickles that torch would load, if they were read before; () to read them now.
    """
    with noting_uses() as noted:
        stream = _read_stream(store, file, start, n_bytes, has_root=not read)
    uses = _collect_uses(
        [*stream.trees, *(pickle.tree for pickle in read)],
        noted.union(*(pickle.uses for pickle in read)),
    )
    return uses | {Use(_LOADS, "unread")} if stream.is_refused else uses


def trees_of_stream(store: ReadStore, file: str) -> tuple[object, ...]:
    """Return the content of the pickles in a stream, up to any damage; no uses are noted."""
    with noting_uses(passes_on=False):
        return _read_stream(store, file, 0, store.size(file)).trees


def uses_in(value: object) -> set[Use]:
    """Return the uses of names in an inert value and in the streams inside it."""
    return _collect_uses([value], ())


def with_nested(uses: Iterable[Use]) -> set[Use]:
    """Return uses that ``noting_uses`` collected, and those in the streams passed to torch."""
    return _collect_uses((), uses)


@dataclass(frozen=True, slots=True)
class _NestedStream:
    """Bytes that are, or look like, a stream.

    Args:
        loaded_by: the use that loads the bytes; None if the pickle only contains them.
        depth: number of streams around this one.
    """

    data: bytes
    loaded_by: Use | None
    depth: int = 0


@dataclass(frozen=True, slots=True)
class _PickleScan:
    """The uses in some pickles, without those in nested streams.

    Args:
        streams: the streams directly inside the pickles.
        is_complete: whether all pickles were read to their ends.
    """

    uses: frozenset[Use]
    streams: tuple[_NestedStream, ...]
    is_complete: bool = True


def _collect_uses(trees: Iterable[object], noted: Iterable[Use]) -> set[Use]:
    """Return the uses in trees, those that were noted, and those in the streams nested in both."""
    with gc_paused():
        scan = _scan_pickles(trees, noted)
        uses = set(scan.uses)
        streams = list(scan.streams)
        is_complete: dict[bytes, bool] = {}
        n_loaded = n_unloaded = n_unloaded_bytes = 0
        while streams:
            stream = streams.pop()
            # A stream that occurs again is not read again.
            is_read = is_complete.get(stream.data)
            if is_read is None:
                # Count loaded streams and others separately, each with its own limit, so that
                # harmless bytes cannot use up the limit of the loaded ones.
                is_read = stream.depth <= _MAX_DEPTH and len(uses) <= _MAX_USES
                if stream.loaded_by is not None:
                    n_loaded += 1
                    is_read &= n_loaded <= _MAX_LOADED
                else:
                    n_unloaded += 1
                    n_unloaded_bytes += len(stream.data)
                    is_read &= n_unloaded <= _MAX_UNLOADED and n_unloaded_bytes <= _MAX_BYTES
                # Read the stream, and queue the streams in it.
                if is_read:
                    scan_data = _scan_small if len(stream.data) <= _SMALL_BYTES else _scan_stream
                    inner = scan_data(stream.data)
                    note_uses(inner.uses)
                    uses |= inner.uses
                    streams += [replace(below, depth=stream.depth + 1) for below in inner.streams]
                    is_read = is_complete[stream.data] = inner.is_complete
            # A loaded stream that could not be read completely is reported as unread.
            if not is_read and stream.loaded_by is not None:
                uses.add(Use(stream.loaded_by.name, "unread"))
    return uses


def _scan_stream(data: bytes) -> _PickleScan:
    """Read a stream; return the uses in it, without those in nested streams."""
    store = MemoryStore({_FILE: memoryview(data)})
    with noting_uses(passes_on=False) as noted:
        stream = _read_stream(store, _FILE, 0, len(data))
    return replace(_scan_pickles(stream.trees, noted), is_complete=stream.is_complete)


_scan_small = lru_cache(maxsize=_MAX_LOADED)(_scan_stream)
"""``_scan_stream`` with a cache, because several checks and plans scan the same objects."""


def _scan_pickles(trees: Iterable[object], noted: Iterable[Use]) -> _PickleScan:
    """Return the uses in trees and those that were noted, and the streams in both."""
    uses: set[Use] = set()
    streams: list[_NestedStream] = []
    n_tried = 0

    def take(new_uses: Iterable[Use]) -> None:
        for use in new_uses:
            if use.stream is None:
                uses.add(use)
            else:
                plain = Use(use.name, use.how)
                uses.add(plain)
                streams.append(_NestedStream(use.stream, plain))

    take(noted)
    for node in chain.from_iterable(map(_informative_nodes, trees)):
        if not isinstance(node, (bytes, bytearray)):
            take(uses_of_node(node))
        # The first and last bytes are quick to check, and exclude nearly all that is not a stream.
        elif n_tried < _MAX_TRIED and len(node) >= _LEAST_BYTES:
            if node[0] in _FIRST_BYTES or node.endswith(b"."):
                n_tried += 1
                if _is_stream(node):
                    streams.append(_NestedStream(bytes(node), None))
    return _PickleScan(frozenset(uses), tuple(streams))


def _informative_nodes(tree: object) -> Iterator[object]:
    """Yield the names, calls and bytes in a tree, each name and each kind of plain call only once.

    Most nodes of a checkpoint repeat the names and plain calls of others.
    """
    names: set[int] = set()
    calls: set[tuple[int, str, bool]] = set()
    for node in walk(tree):
        kind = type(node)
        if kind is Global:
            if id(node) not in names:
                names.add(id(node))
                yield node
        elif kind is Inert:
            call = id(node.fn), node.how, bool(node.args)  # type: ignore[attr-defined]
            if call not in calls or not is_plain_call(node):  # type: ignore[arg-type]
                calls.add(call)
                yield node
        elif kind is Persistent or kind is bytes or kind is bytearray:
            yield node


def _is_stream(data: bytes | bytearray) -> bool:
    """Return whether bytes begin like a stream, or are a complete pickle in a text protocol."""
    store = MemoryStore({_FILE: memoryview(data)})
    if stream_kind(store, _FILE, 0, len(data)) in ("zip", "legacy", "pickle"):
        return True
    if len(data) > _MAX_TEXT_BYTES or not data.endswith(b".") or b"\n" not in data:
        return False
    # Text that happens to be a pickle is of interest only if it names anything.
    with noting_uses(passes_on=False) as uses, suppress(CheckpointingException):
        load(bytes(data), label=_FILE)
        return bool(uses)
    return False


@dataclass(frozen=True, slots=True)
class _StreamPickles:
    """The pickles of a stream.

    Args:
        trees: their content, up to any damage.
        is_refused: whether one was refused as unsafe, so that the content after it is unknown.
        is_complete: whether all were read to their ends; if not, another reader may read further.
    """

    trees: tuple[object, ...]
    is_refused: bool
    is_complete: bool = True


def _read_stream(
    store: ReadStore, file: str, start: int, n_bytes: int, *, has_root: bool = True
) -> _StreamPickles:
    """Read the pickles of a stream; uses in damaged ones are noted, too.

    Args:
        has_root: also read the pickles that torch would load.
    """
    from core.formats.torch.legacy import MAX_PICKLE_BYTES

    # If a pickle cannot be read, the list keeps those before it.
    trees: list[object] = []
    try:
        kind = stream_kind(store, file, start, n_bytes)
        if kind == "zip":
            trees.extend(_read_zip_pickles(store, file, start, n_bytes, has_root=has_root))
        elif not has_root:
            return _StreamPickles((), is_refused=False)
        elif kind is None:
            trees.extend(_read_text_pickles(store, file, start, n_bytes))
        elif kind == "legacy":
            trees.extend(_read_legacy_pickles(store, file, start, n_bytes))
        elif kind == "tar":
            for at, size in tar_members(store, file, start, n_bytes).values():
                with suppress(CorruptError, UnsupportedError):
                    data = store.read(file, at, min(size, MAX_PICKLE_BYTES))
                    trees.extend(_parse_pickles(data, file))
        elif n_bytes <= MAX_PICKLE_BYTES:
            trees.extend(_parse_pickles(store.read(file, start, n_bytes), file))
    except UnsafeError:
        return _StreamPickles(tuple(trees), is_refused=True, is_complete=False)
    except CheckpointingException:
        return _StreamPickles(tuple(trees), is_refused=False, is_complete=False)
    return _StreamPickles(tuple(trees), is_refused=False)


def _read_text_pickles(store: ReadStore, file: str, start: int, n_bytes: int) -> Sequence[object]:
    """Read bytes without a signature as pickles of protocol 0 or 1, if these call anything.

    Other text may begin like such a pickle, and seem to contain names. So names that are not used
    do not count.
    """
    trees: list[object] = []
    with noting_uses(passes_on=False) as uses, suppress(CheckpointingException):
        # Read more only if the beginning is a pickle, which goes on.
        head = store.read(file, start, min(n_bytes, _HEAD_BYTES))
        try:
            trees += _parse_pickles(head, file)
        except TruncatedError:
            if n_bytes > _HEAD_BYTES:
                trees += _parse_pickles(store.read(file, start, min(n_bytes, _MAX_BYTES)), file)
    if all(use.how == "named" for use in uses):
        return ()
    note_uses(uses)
    return trees


def _read_zip_pickles(
    store: ReadStore, file: str, start: int, n_bytes: int, *, has_root: bool
) -> Iterator[object]:
    """Yield the content of the pickles in a zip.

    Args:
        has_root: include ``data.pkl``, the pickle that torch would load.

    Raises:
        CorruptError, UnsupportedError: a pickle could not be read; raised after the other ones, so
            that a damaged pickle does not hide them.
        CheckpointingException: the zip cannot be read, or a pickle is refused.
    """
    from core.formats.torch.zip.container import read_archive
    from core.formats.torch.zip.records import read_pickle

    archive = read_archive(store, file, start=start, n_bytes=n_bytes)
    failure: CheckpointingException | None = None
    for name, record in archive.records.items():
        if name.endswith(".pkl") and (has_root or name != "data.pkl"):
            try:
                yield load(read_pickle(store, file, record), label=file)
            except (CorruptError, UnsupportedError) as err:
                failure = err
    if failure is not None:
        raise failure


def _read_legacy_pickles(store: ReadStore, file: str, start: int, n_bytes: int) -> Iterator[object]:
    """Yield the content of the pickles in a stream from before torch 1.6.

    Raises:
        CheckpointingException: a pickle cannot be read, or is refused.
    """
    from core.formats.torch.legacy import pickle_end

    at = start
    for position in range(_N_LEGACY):
        end = pickle_end(store, file, at, start + n_bytes)
        data = store.read(file, at, end - at)
        # The pickles before the object are equal in many streams, so they are cached.
        if position < _N_PREAMBLE and len(data) <= _MAX_PREAMBLE_BYTES:
            pickle = _parse_preamble(data)
            note_uses(pickle.uses)
            yield pickle.tree
        else:
            yield load(data, label=file, persistent_load=_class_or_storage)
        at = end


@lru_cache(maxsize=64)
def _parse_preamble(data: bytes) -> ReadPickle:
    """Read a pickle before the object of a legacy stream; equal in all files from one machine."""
    with noting_uses() as uses:
        tree = load(data, label=_FILE, persistent_load=_class_or_storage)
    return ReadPickle(frozenset(uses), tree)


def _class_or_storage(pid: object) -> object:
    """Return the value for a persistent id in files from before torch 1.6."""
    # ("module", class, file, source) stands for the class.
    if isinstance(pid, tuple) and len(pid) > 1 and pid[0] == "module":
        return pid[1]
    return Persistent(pid)


def _parse_pickles(data: bytes, file: str) -> Iterator[object]:
    """Yield the content of the first five pickles; torch reads so many from files without a zip."""
    at = 0
    for _ in range(_N_LEGACY):
        if at < len(data):
            tree, at = load_next(data, at, label=file)
            yield tree
