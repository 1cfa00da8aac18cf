"""Names in pickles that lie inside other values: bytes that are themselves a stream of ``torch.save`` or a pickle.

``torch.storage._load_from_bytes(b"…")`` unpickles its argument, Transformer Engine and Megatron keep a ``BytesIO`` with
a saved object in it, and whoever wants to hide a call wraps it so. Nothing is unwrapped here for its value: the streams
are only read for the names in them.

Source: torch 2.13 ``torch/storage.py``; ``megatron/core/extensions/transformer_engine.py`` (``get_extra_state``).
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from core.errors import CheckpointingException
from core.formats.torch_legacy import MAX_PICKLE_BYTES, pickle_end
from core.formats.torch_record import read_pickle
from core.formats.torch_tree import stream_kind
from core.formats.torch_zip import read_archive
from core.inert import Global, walk
from core.safe_pickle import load, noting_names
from core.store import MemoryStore

if TYPE_CHECKING:
    from core.store import ReadStore

_MAX_DEPTH = 4
_MAX_STREAMS = 1000
_MAX_BYTES = 64 << 20
"""Of nested streams, per value."""
_LEAST_BYTES = 4
_N_LEGACY = 5
"""Pickles of a stream of before torch 1.6."""
_FILE = "bytes"


def names_of_stream(store: ReadStore, file: str, start: int, n_bytes: int) -> set[Global]:
    """Every name in a stream: a file of ``torch.save`` or a pickle, and what is nested in it, as far as it is sound.

    Args:
        file: name in the store.
        start, n_bytes: which bytes of it.
    """
    with noting_names() as names:
        for value in _values(store, file, start, n_bytes):
            names |= names_in(value)
    return names


def names_in(value: object) -> set[Global]:
    """Every name in an inert value: its own, and those in the streams inside it; the value is walked once."""
    own: set[Global] = set()
    n_left, n_bytes = _MAX_STREAMS, _MAX_BYTES
    waiting = [(value, 0)]
    with noting_names() as names:
        while waiting:
            tree, depth = waiting.pop()
            for node in walk(tree):
                if type(node) is Global:
                    own.add(node)
                elif isinstance(node, (bytes, bytearray)) and n_left > 0 and n_bytes > 0 and _is_stream(node):
                    n_left, n_bytes = n_left - 1, n_bytes - len(node)
                    found = _values(MemoryStore({_FILE: node}), _FILE, 0, len(node)) if n_bytes >= 0 else []
                    waiting += [(inner, depth + 1) for inner in found if depth < _MAX_DEPTH]
    return names | own


def _is_stream(data: bytes | bytearray) -> bool:
    return len(data) >= _LEAST_BYTES and stream_kind(MemoryStore({_FILE: memoryview(data)}), _FILE, 0, len(data)) in (
        "zip",
        "legacy",
        "pickle",
    )


def _values(store: ReadStore, file: str, start: int, n_bytes: int) -> list[object]:
    """What the pickles of a stream hold; names are noted also of those that are damaged."""
    found: list[object] = []
    with suppress(CheckpointingException):
        kind = stream_kind(store, file, start, n_bytes)
        if kind == "zip":
            archive = read_archive(store, file, start=start, n_bytes=n_bytes)
            for name, record in archive.records.items():
                if name.endswith(".pkl"):
                    with suppress(CheckpointingException):
                        found.append(load(read_pickle(store, file, record), label=file))
        elif kind == "legacy":
            at = start
            for _ in range(_N_LEGACY):
                end = pickle_end(store, file, at, start + n_bytes)
                found.append(load(store.read(file, at, end - at), label=file))
                at = end
        elif kind == "pickle" and n_bytes <= MAX_PICKLE_BYTES:
            found.append(load(store.read(file, start, n_bytes), label=file))
    return found
