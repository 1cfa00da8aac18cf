"""Names in pickles that lie inside other values: bytes that are themselves a stream of ``torch.save`` or a pickle.

``torch.storage._load_from_bytes(b"…")`` unpickles its argument, Transformer Engine and Megatron keep a ``BytesIO`` with
a saved object in it, and whoever wants to hide a call wraps it so. Nothing is unwrapped here for its value: the streams
are only read for what they do with names. What is called on bytes that are nested too deeply to be read, or that are
refused, is ``unread``.

Source: torch 2.13 ``torch/storage.py``; ``megatron/core/extensions/transformer_engine.py`` (``get_extra_state``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.errors import CheckpointingException, CorruptError, TruncatedError, UnsafeError, UnsupportedError
from core.formats.torch_legacy import MAX_PICKLE_BYTES, pickle_end
from core.formats.torch_record import read_pickle
from core.formats.torch_stream import stream_kind, tar_members
from core.formats.torch_zip import read_archive
from core.inert import Global, Persistent, walk
from core.pickle_uses import USING, Use, uses_of_node
from core.safe_pickle import load, load_next, note_uses, noting_uses
from core.store import MemoryStore

if TYPE_CHECKING:
    from core.store import ReadStore

_MAX_DEPTH = 4
_MAX_LOADED = 20_000
"""Nested streams of one value that are read if something loads them: a tensor each where a model was pickled."""
_MAX_LYING = 1000
_MAX_BYTES = 64 << 20
"""Those that only lie there, and their bytes."""
_MAX_TEXT_BYTES = 1 << 20
_LEAST_BYTES = 4
_HEAD_BYTES = 1 << 16
_N_LEGACY = 5
"""Pickles of a stream of before torch 1.6."""
_FILE = "bytes"
_LOADS = Global("pickle", "load")


def uses_of_stream(store: ReadStore, file: str, start: int, n_bytes: int) -> set[Use]:
    """Return what a stream does with names: a file of ``torch.save`` or a pickle, and what is nested in it.

    Args:
        file: name in the store.
        start, n_bytes: which bytes of it.
    """
    with noting_uses() as noted:
        reading = _read(store, file, start, n_bytes)
    uses = _collected(reading.trees, noted)
    return uses | {Use(_LOADS, "unread")} if reading.is_refused else uses


def trees_of_stream(store: ReadStore, file: str, start: int, n_bytes: int) -> tuple[object, ...]:
    """Return what the pickles of a stream hold, as far as they are sound; nothing is noted of them."""
    with noting_uses(passes_on=False):
        return _read(store, file, start, n_bytes).trees


def uses_in(value: object) -> set[Use]:
    """Return what an inert value does with names, and the streams inside it; the value is walked once."""
    return _collected([value], ())


def with_nested(uses: Iterable[Use]) -> set[Use]:
    """Return the uses that ``noting_uses`` collected, and those of the streams handed to torch."""
    return _collected((), uses)


@dataclass(frozen=True, slots=True)
class _Stream:
    """Bytes that are, or look like, a stream.

    Args:
        loaded_by: what loads them; None if they only lie there.
        depth: streams around it.
    """

    data: bytes
    loaded_by: Use | None
    depth: int


def _collected(trees: Iterable[object], noted: Iterable[Use]) -> set[Use]:
    """Return the uses in trees and those that were noted, and what the streams in them use in turn."""
    uses: set[Use] = set()
    streams: list[_Stream] = []
    is_whole: dict[bytes, bool] = {}
    n_loaded = n_lying = n_lying_bytes = 0

    def take(found: Iterable[Use], depth: int) -> None:
        for use in found:
            if use.stream is None:
                uses.add(use)
            else:
                plain = Use(use.name, use.how)
                uses.add(plain)
                streams.append(_Stream(use.stream, plain, depth))

    def look_into(tree: object, depth: int) -> None:
        for node in walk(tree):
            if type(node) in USING:
                take(uses_of_node(node), depth)
            elif isinstance(node, (bytes, bytearray)) and _is_stream(node):
                streams.append(_Stream(bytes(node), None, depth))

    take(noted, 0)
    for tree in trees:
        look_into(tree, 0)
    while streams:
        stream = streams.pop()
        if stream.data in is_whole:
            if stream.loaded_by is not None and not is_whole[stream.data]:
                uses.add(Use(stream.loaded_by.name, "unread"))
            continue
        if stream.loaded_by is not None:
            n_loaded += 1
            is_read = n_loaded <= _MAX_LOADED and stream.depth <= _MAX_DEPTH
        else:
            n_lying, n_lying_bytes = n_lying + 1, n_lying_bytes + len(stream.data)
            is_read = n_lying <= _MAX_LYING and n_lying_bytes <= _MAX_BYTES and stream.depth <= _MAX_DEPTH
        if is_read:
            store = MemoryStore({_FILE: stream.data})
            with noting_uses() as inner:
                reading = _read(store, _FILE, 0, len(stream.data))
            take(inner, stream.depth + 1)
            for tree in reading.trees:
                look_into(tree, stream.depth + 1)
            is_read = is_whole[stream.data] = reading.is_whole
        if not is_read and stream.loaded_by is not None:
            uses.add(Use(stream.loaded_by.name, "unread"))
    return uses


def _is_stream(data: bytes | bytearray) -> bool:
    """Return whether bytes begin as a stream does, or are all of a pickle in the protocols of text."""
    if len(data) < _LEAST_BYTES:
        return False
    if stream_kind(MemoryStore({_FILE: memoryview(data)}), _FILE, 0, len(data)) in ("zip", "legacy", "pickle"):
        return True
    if len(data) > _MAX_TEXT_BYTES or not data.endswith(b".") or b"\n" not in data:
        return False
    with noting_uses(passes_on=False) as uses, suppress(CheckpointingException):
        load(bytes(data), label=_FILE)
        return bool(uses)
    return False


@dataclass(frozen=True, slots=True)
class _Reading:
    """The pickles of a stream.

    Args:
        trees: what they hold, as far as they are sound.
        is_refused: one of them asks for what is never done, so that what follows there is not known.
        is_whole: all of them were read to their ends; where one was not, a more lenient reader may go on.
    """

    trees: tuple[object, ...]
    is_refused: bool
    is_whole: bool = True


def _read(store: ReadStore, file: str, start: int, n_bytes: int) -> _Reading:
    """Read the pickles of a stream; uses are noted also of those that are damaged."""
    trees: list[object] = []
    try:
        kind = stream_kind(store, file, start, n_bytes)
        if kind is None:
            return _Reading(_text_trees(store, file, start, n_bytes), is_refused=False)
        trees.extend(_trees(store, file, start, n_bytes, kind))
    except UnsafeError:
        return _Reading(tuple(trees), is_refused=True, is_whole=False)
    except CheckpointingException:
        return _Reading(tuple(trees), is_refused=False, is_whole=False)
    return _Reading(tuple(trees), is_refused=False)


def _text_trees(store: ReadStore, file: str, start: int, n_bytes: int) -> tuple[object, ...]:
    """Return the pickle in bytes that do not begin like one, as protocols 0 and 1 are, if it calls anything.

    What is no pickle may look like the begin of one, and name what is no name.
    """
    trees: list[object] = []
    with noting_uses(passes_on=False) as uses, suppress(CheckpointingException):
        head = store.read(file, start, min(n_bytes, _HEAD_BYTES))
        try:
            trees += _pickles(head, file)
        except TruncatedError:
            if n_bytes > _HEAD_BYTES:
                trees += _pickles(store.read(file, start, min(n_bytes, _MAX_BYTES)), file)
    if all(use.how == "named" for use in uses):
        return ()
    note_uses(uses)
    return tuple(trees)


def _trees(store: ReadStore, file: str, start: int, n_bytes: int, kind: str) -> Iterator[object]:
    """Yield what the pickles of a stream hold.

    Raises:
        CheckpointingException: the stream ends here for any reader.
    """
    if kind == "zip":
        archive = read_archive(store, file, start=start, n_bytes=n_bytes)
        failure: CheckpointingException | None = None
        for name, record in archive.records.items():
            if name.endswith(".pkl"):
                try:
                    yield load(read_pickle(store, file, record), label=file)
                except (CorruptError, UnsupportedError) as err:
                    failure = err
        if failure is not None:
            raise failure
    elif kind == "legacy":
        at = start
        for _ in range(_N_LEGACY):
            end = pickle_end(store, file, at, start + n_bytes)
            yield load(store.read(file, at, end - at), label=file, persistent_load=_class_or_storage)
            at = end
    elif kind == "tar":
        for at, size in tar_members(store, file, start, n_bytes).values():
            with suppress(CorruptError, UnsupportedError):
                yield from _pickles(store.read(file, at, min(size, MAX_PICKLE_BYTES)), file)
    elif kind == "pickle" and n_bytes <= MAX_PICKLE_BYTES:
        yield from _pickles(store.read(file, start, n_bytes), file)


def _class_or_storage(pid: object) -> object:
    """Return the class that stands for a module in files of before torch 1.6, and any other persistent id as it is."""
    if isinstance(pid, tuple) and len(pid) > 1 and pid[0] == "module":
        return pid[1]
    return Persistent(pid)


def _pickles(data: bytes, file: str) -> Iterator[object]:
    """Yield what the first pickles of some bytes hold: torch reads five from a file that is no zip."""
    at = 0
    for _ in range(_N_LEGACY):
        if at < len(data):
            tree, at = load_next(data, at, label=file)
            yield tree
