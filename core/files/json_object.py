"""Small files of a checkpoint, above all JSON objects: read within bounds.

``json.loads`` makes up to 70 bytes of objects of every two bytes of a hostile file, so the values are counted, from
above, before it runs: each is preceded by a comma, a colon or an opening bracket.

``NaN`` and ``Infinity`` are taken as Python's writers write them; configurations of state space models hold them.

Source: RFC 8259.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from core.errors import CorruptError

if TYPE_CHECKING:
    from core.files.store import ReadStore

MAX_BYTES = 64 << 20
MAX_VALUES = 4_000_000
"""Most values, brackets and keys; an index of 10⁶ tensors has 2 · 10⁶."""


def small_file(store: ReadStore, file: str, *, max_bytes: int, key: str | None = None) -> bytes:
    """The content of a file that is small where it is what it should be.

    Args:
        max_bytes: largest file that is read.
        key: the tensor that it belongs to, for messages.

    Raises:
        CorruptError: it is larger.
        MissingShardError: there is no such file.
    """
    size = store.size(file)
    if size > max_bytes:
        raise CorruptError(f"{size} bytes are too much for this file; at most {max_bytes} are read", file=file, key=key)
    return store.read(file, 0, size)


def parsed_object(
    store: ReadStore, file: str, *, max_bytes: int = MAX_BYTES, max_values: int = MAX_VALUES
) -> dict[str, object]:
    """The JSON object that a file is.

    Args:
        max_bytes: largest file that is read.
        max_values: most values in it.

    Raises:
        CorruptError: too large, not JSON, not an object, or a key that is there twice.
        MissingShardError: there is no such file.
    """
    return object_of(small_file(store, file, max_bytes=max_bytes), file=file, max_values=max_values)


def object_of(data: bytes, *, file: str, max_values: int = MAX_VALUES) -> dict[str, object]:
    """The JSON object that some bytes are.

    Args:
        file: where they come from, for messages.

    Raises:
        CorruptError: as for ``parsed_object``.
    """
    n_values = sum(data.count(mark) for mark in (b",", b":", b"[", b"{"))
    if n_values > max_values:
        raise CorruptError(f"up to {n_values} values are too many for this file; {max_values} are allowed", file=file)
    try:
        found = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as err:
        raise CorruptError(f"not a JSON file: {err}", file=file, hint="copy it again from where it came from") from err
    if not isinstance(found, dict):
        raise CorruptError(f"a JSON {type(found).__name__}, not an object", file=file)
    return found


def _without_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:200]!r} is there twice")
    return made
