"""Names in nested pickles: bytes inside a value that are themselves a stream of ``torch.save`` or a
pickle.

``torch.storage._load_from_bytes(b"…")`` unpickles its argument, Transformer Engine and Megatron
keep a ``BytesIO`` with a saved object in it, and whoever wants to hide a call wraps it so. Nothing
is unwrapped here for its value: the streams are only read for what they do with names. What is
called on bytes that are nested too deeply to be read, or that are refused, is ``unread``.

Source: torch 2.13 ``torch/storage.py``; ``megatron/core/extensions/transformer_engine.py``
    (``get_extra_state``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from core.errors import (
    CheckpointingException,
    CorruptError,
    TruncatedError,
    UnsafeError,
    UnsupportedError,
)
from core.files.store import MemoryStore
from core.formats.torch.legacy import MAX_PICKLE_BYTES, pickle_end
from core.formats.torch.stream import stream_kind, tar_members
from core.formats.torch.zip.container import read_archive
from core.formats.torch.zip.records import read_pickle
from core.pickle.inert import Global, Inert, Persistent, walk
from core.pickle.reader import (
    PickleLimits,
    ReadPickle,
    gc_paused,
    load,
    load_next,
    note_uses,
    noting_uses,
)
from core.pickle.uses import Use, is_plain_call, uses_of_node

if TYPE_CHECKING:
    from core.files.store import ReadStore

_MAX_DEPTH = 4
_MAX_LOADED = PickleLimits().max_streams
"""Maximum number of nested streams of one value that something loads; a pickled model has one a
tensor.
"""
_MAX_UNLOADED = 1000
_MAX_BYTES = 64 << 20
"""Maximum number of nested streams that nothing loads, and their maximum size in total."""
_MAX_TRIED = 10_000
"""Maximum number of bytes objects that are tested for being streams."""
_MAX_USES = 3 * PickleLimits().max_names
"""Uses beyond which no further stream is read."""
_SMALL_BYTES = 8192
_MAX_TEXT_BYTES = 1 << 20
_LEAST_BYTES = 4
_FIRST_BYTES = b"P\x80L"
"""Of zips, of pickles, and of what torch wrote in protocol 0."""
_HEAD_BYTES = 1 << 16
_N_LEGACY = 5
_N_PREAMBLE = 3
"""Pickles of a stream of before torch 1.6, and those of them before the object."""
_MAX_PREAMBLE_BYTES = 256
_FILE = "bytes"
_LOADS = Global("pickle", "load")


def uses_of_stream(
    store: ReadStore, file: str, start: int, n_bytes: int, *, read: Sequence[ReadPickle] = ()
) -> set[Use]:
    """Return what a stream does with names: a file of ``torch.save`` or a pickle, and what is
    nested in it.

    Args:
        start, n_bytes: the bytes of the file that are the stream.
        read: its pickles that torch would load, if they were read before; () to read them now.
    """
    with noting_uses() as noted:
        reading = _read_stream(store, file, start, n_bytes, has_root=not read)
    uses = _collect_uses(
        [*reading.trees, *(pickle.tree for pickle in read)],
        noted.union(*(pickle.uses for pickle in read)),
    )
    return uses | {Use(_LOADS, "unread")} if reading.is_refused else uses


def trees_of_stream(store: ReadStore, file: str) -> tuple[object, ...]:
    """Return the content of the pickles of a stream, as far as they are sound; no uses are
    noted.
    """
    with noting_uses(passes_on=False):
        return _read_stream(store, file, 0, store.size(file)).trees


def uses_in(value: object) -> set[Use]:
    """Return what an inert value and the streams inside it do with names; the value is walked
    once.
    """
    return _collect_uses([value], ())


def with_nested(uses: Iterable[Use]) -> set[Use]:
    """Return the uses that ``noting_uses`` collected, and those of the streams passed to torch."""
    return _collect_uses((), uses)


@dataclass(frozen=True, slots=True)
class _NestedStream:
    """Bytes that are, or look like, a stream.

    Args:
        loaded_by: the use that loads them; None if nothing does.
        depth: number of streams around this one.
    """

    data: bytes
    loaded_by: Use | None
    depth: int = 0


@dataclass(frozen=True, slots=True)
class _PickleScan:
    """The uses in some pickles, without those in nested streams.

    Args:
        uses: what the pickles do with names.
        streams: the streams in the pickles.
        is_complete: whether all pickles were read to their ends.
    """

    uses: frozenset[Use]
    streams: tuple[_NestedStream, ...]
    is_complete: bool = True


def _collect_uses(trees: Iterable[object], noted: Iterable[Use]) -> set[Use]:
    """Return the uses in trees and those that were noted, and what the streams in them use in
    turn.
    """
    with gc_paused():
        scan = _scan_pickles(trees, noted)
        uses = set(scan.uses)
        streams = list(scan.streams)
        is_complete: dict[bytes, bool] = {}
        n_loaded = n_unloaded = n_unloaded_bytes = 0
        while streams:
            stream = streams.pop()
            # A stream that occurs again is not read again.
            if stream.data in is_complete:
                if stream.loaded_by is not None and not is_complete[stream.data]:
                    uses.add(Use(stream.loaded_by.name, "unread"))
                continue
            # Count loaded streams and others separately, each with its own limit.
            if stream.loaded_by is not None:
                n_loaded += 1
                is_read = n_loaded <= _MAX_LOADED and stream.depth <= _MAX_DEPTH
            else:
                n_unloaded, n_unloaded_bytes = n_unloaded + 1, n_unloaded_bytes + len(stream.data)
                is_read = (
                    n_unloaded <= _MAX_UNLOADED
                    and n_unloaded_bytes <= _MAX_BYTES
                    and stream.depth <= _MAX_DEPTH
                )
            # Read the stream, and queue the streams in it.
            if is_read and len(uses) <= _MAX_USES:
                inner = (_scan_small if len(stream.data) <= _SMALL_BYTES else _scan_stream)(
                    stream.data
                )
                note_uses(inner.uses)
                uses |= inner.uses
                streams += [replace(below, depth=stream.depth + 1) for below in inner.streams]
                is_read = is_complete[stream.data] = inner.is_complete
            else:
                is_read = False
            # A loaded stream that could not be read completely is reported as unread.
            if not is_read and stream.loaded_by is not None:
                uses.add(Use(stream.loaded_by.name, "unread"))
    return uses


def _scan_stream(data: bytes) -> _PickleScan:
    """Return the uses in a stream, without those in nested streams."""
    store = MemoryStore({_FILE: memoryview(data)})
    with noting_uses(passes_on=False) as noted:
        reading = _read_stream(store, _FILE, 0, len(data))
    return replace(_scan_pickles(reading.trees, noted), is_complete=reading.is_complete)


_scan_small = lru_cache(maxsize=_MAX_LOADED)(_scan_stream)
"""Several checks and plans ask for the streams of the same objects."""


def _scan_pickles(trees: Iterable[object], noted: Iterable[Use]) -> _PickleScan:
    """Return the uses in trees, the uses that were noted, and the streams in both."""
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
    for tree in trees:
        # Most nodes repeat the names and plain calls of others; each is looked at once a tree.
        names: set[int] = set()
        calls: set[tuple[int, str, bool]] = set()
        for node in walk(tree):
            kind = type(node)
            if kind is Global:
                if id(node) not in names:
                    names.add(id(node))
                    take(uses_of_node(node))
            elif kind is Inert:
                call = id(node.fn), node.how, bool(node.args)  # type: ignore[attr-defined]
                if call not in calls or not is_plain_call(node):  # type: ignore[arg-type]
                    calls.add(call)
                    take(uses_of_node(node))
            elif kind is Persistent:
                take(uses_of_node(node))
            elif (
                (kind is bytes or kind is bytearray)
                and n_tried < _MAX_TRIED
                and _may_be_stream(node)  # type: ignore[arg-type]
            ):
                n_tried += 1
                if _is_stream(node):  # type: ignore[arg-type]
                    streams.append(_NestedStream(bytes(node), None))  # type: ignore[call-overload]
    return _PickleScan(frozenset(uses), tuple(streams))


def _may_be_stream(data: bytes | bytearray) -> bool:
    """Return whether the first and last bytes are those of a stream, which is quick to check."""
    return len(data) >= _LEAST_BYTES and (data[0] in _FIRST_BYTES or data.endswith(b"."))


def _is_stream(data: bytes | bytearray) -> bool:
    """Return whether bytes begin as a stream does, or are a complete pickle in a text protocol."""
    if stream_kind(MemoryStore({_FILE: memoryview(data)}), _FILE, 0, len(data)) in (
        "zip",
        "legacy",
        "pickle",
    ):
        return True
    if len(data) > _MAX_TEXT_BYTES or not data.endswith(b".") or b"\n" not in data:
        return False
    with noting_uses(passes_on=False) as uses, suppress(CheckpointingException):
        load(bytes(data), label=_FILE)
        return bool(uses)
    return False


@dataclass(frozen=True, slots=True)
class _StreamPickles:
    """The pickles of a stream.

    Args:
        trees: their content, as far as they are sound.
        is_refused: whether one asks for something that is never done, so that the rest is unknown.
        is_complete: whether all were read to their ends; a more lenient reader may read further.
    """

    trees: tuple[object, ...]
    is_refused: bool
    is_complete: bool = True


def _read_stream(
    store: ReadStore, file: str, start: int, n_bytes: int, *, has_root: bool = True
) -> _StreamPickles:
    """Read the pickles of a stream; uses are noted also of those that are damaged.

    Args:
        has_root: also read the pickles that torch would load.
    """
    trees: list[object] = []
    try:
        kind = stream_kind(store, file, start, n_bytes)
        if not has_root and kind != "zip":
            return _StreamPickles((), is_refused=False)
        if kind is None:
            return _StreamPickles(_read_text_trees(store, file, start, n_bytes), is_refused=False)
        trees.extend(_read_trees(store, file, start, n_bytes, kind, has_root=has_root))
    except UnsafeError:
        return _StreamPickles(tuple(trees), is_refused=True, is_complete=False)
    except CheckpointingException:
        return _StreamPickles(tuple(trees), is_refused=False, is_complete=False)
    return _StreamPickles(tuple(trees), is_refused=False)


def _read_text_trees(store: ReadStore, file: str, start: int, n_bytes: int) -> tuple[object, ...]:
    """Read bytes that do not begin like a pickle as one of protocol 0 or 1, if it calls anything.

    Bytes that are not a pickle may look like the beginning of one.

    What is no pickle may look like the begin of one, and name what is no name.
    """
    trees: list[object] = []
    with noting_uses(passes_on=False) as uses, suppress(CheckpointingException):
        head = store.read(file, start, min(n_bytes, _HEAD_BYTES))
        try:
            trees += _read_pickles(head, file)
        except TruncatedError:
            if n_bytes > _HEAD_BYTES:
                trees += _read_pickles(store.read(file, start, min(n_bytes, _MAX_BYTES)), file)
    if all(use.how == "named" for use in uses):
        return ()
    note_uses(uses)
    return tuple(trees)


def _read_trees(
    store: ReadStore, file: str, start: int, n_bytes: int, kind: str, *, has_root: bool
) -> Iterator[object]:
    """Yield the content of the pickles of a stream.

    Raises:
        CheckpointingException: the stream ends here for any reader.
    """
    if kind == "zip":
        archive = read_archive(store, file, start=start, n_bytes=n_bytes)
        # Pickles of a zip: one that is damaged does not hide those after it.
        failure: CheckpointingException | None = None
        for name, record in archive.records.items():
            if name.endswith(".pkl") and (has_root or name != "data.pkl"):
                try:
                    yield load(read_pickle(store, file, record), label=file)
                except (CorruptError, UnsupportedError) as err:
                    failure = err
        if failure is not None:
            raise failure
    elif kind == "legacy":
        # The pickles of a legacy stream; those before the object are cached.
        at = start
        for position in range(_N_LEGACY):
            end = pickle_end(store, file, at, start + n_bytes)
            data = store.read(file, at, end - at)
            if position < _N_PREAMBLE and len(data) <= _MAX_PREAMBLE_BYTES:
                pickle = _read_preamble(data)
                note_uses(pickle.uses)
                yield pickle.tree
            else:
                yield load(data, label=file, persistent_load=_class_or_storage)
            at = end
    elif kind == "tar":
        for at, size in tar_members(store, file, start, n_bytes).values():
            with suppress(CorruptError, UnsupportedError):
                yield from _read_pickles(store.read(file, at, min(size, MAX_PICKLE_BYTES)), file)
    elif kind == "pickle" and n_bytes <= MAX_PICKLE_BYTES:
        yield from _read_pickles(store.read(file, start, n_bytes), file)


@lru_cache(maxsize=64)
def _read_preamble(data: bytes) -> ReadPickle:
    """Read a pickle before the object of a legacy stream.

    It is the same in all files of one machine.
    """
    with noting_uses() as uses:
        tree = load(data, label=_FILE, persistent_load=_class_or_storage)
    return ReadPickle(frozenset(uses), tree)


def _class_or_storage(pid: object) -> object:
    """Return the class that stands for a module in files of before torch 1.6, and any other
    persistent id as it is.
    """
    if isinstance(pid, tuple) and len(pid) > 1 and pid[0] == "module":
        return pid[1]
    return Persistent(pid)


def _read_pickles(data: bytes, file: str) -> Iterator[object]:
    """Yield the content of the first pickles of some bytes: torch reads five from a file that is
    not a zip.
    """
    at = 0
    for _ in range(_N_LEGACY):
        if at < len(data):
            tree, at = load_next(data, at, label=file)
            yield tree
