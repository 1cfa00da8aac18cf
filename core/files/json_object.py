"""Read small files of a checkpoint, above all JSON objects, within bounds.

``json.loads`` builds up to 70 bytes of objects from every two bytes of a hostile file. An upper
bound of the number of values is therefore counted before it runs: each value is preceded by a
comma, a colon or an opening bracket.

``NaN`` and ``Infinity`` are accepted as Python's writers write them; configurations of state space
models contain them.

Source: RFC 8259.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

from core.errors import CorruptError

if TYPE_CHECKING:
    from core.files.store import ReadStore

MAX_BYTES = 64 << 20
MAX_VALUES = 4_000_000
"""Maximum number of values, brackets and keys; an index of 10⁶ tensors has 2 · 10⁶."""
_HINT = (
    "this is a different file with the same name; copy the right file from the original checkpoint"
)
"""Hint for a file that is JSON, but no writer's of checkpoints."""


def read_small_file(
    store: ReadStore, file: str, *, max_bytes: int, key: str | None = None
) -> bytes:
    """Read a file that can only be valid if it is small.

    Args:
        max_bytes: maximum size of the file.
        key: the tensor that the file belongs to, for messages.

    Raises:
        CorruptError: the file is larger than ``max_bytes``.
        MissingShardError: the file does not exist.
        StorageError: the file cannot be read.
    """
    size = store.size(file)
    if size > max_bytes:
        raise CorruptError(
            f"the file is {size:,} bytes long; the limit is {max_bytes:,}",
            file=file,
            key=key,
            hint=_HINT,
        )
    return store.read(file, 0, size)


def read_json_object(
    store: ReadStore, file: str, *, max_bytes: int = MAX_BYTES, max_values: int = MAX_VALUES
) -> dict[str, object]:
    """Read a file that contains one JSON object.

    Args:
        max_bytes: maximum size of the file.
        max_values: maximum number of values in the object, at any depth.

    Raises:
        CorruptError: the file is too large, not JSON or not an object, or repeats a key.
        MissingShardError: the file does not exist.
    """
    return parse_json_object(
        read_small_file(store, file, max_bytes=max_bytes), file=file, max_values=max_values
    )


def parse_json_object(data: bytes, *, file: str, max_values: int = MAX_VALUES) -> dict[str, object]:
    """Parse bytes that contain one JSON object.

    Args:
        file: file from which the bytes were read, for messages.
        max_values: maximum number of values in the object, at any depth.

    Raises:
        CorruptError: too many values, not JSON, not an object, or a key is repeated.
    """
    # An upper bound: marks inside strings are counted too.
    n_values = sum(data.count(mark) for mark in (b",", b":", b"[", b"{"))
    if n_values > max_values:
        raise CorruptError(
            f"the file has up to {n_values:,} JSON values; the limit is {max_values:,}",
            file=file,
            hint=_HINT,
        )

    # utf-8-sig also accepts a byte order mark. Deep nesting raises RecursionError.
    try:
        parsed = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_without_repeated_keys)
    except (ValueError, RecursionError) as err:
        raise CorruptError(
            f"the file is not valid JSON: {err}",
            file=file,
            hint="copy the file again from its source",
        ) from err
    if not isinstance(parsed, dict):
        raise CorruptError(
            "the top level of the JSON file is not an object",
            file=file,
            hint=_HINT,
        )
    return parsed


def _without_repeated_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Convert the pairs of one JSON object to a dict; raise ValueError if a key is repeated."""
    values = dict(pairs)
    if len(values) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        repeated = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"duplicate key {repeated[:200]!r}")
    return values
