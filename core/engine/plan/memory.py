"""The memory that objects take: the values of a pickle, and what is written of them.

A process that reads a pickle has the pickle and its values in memory, and one that writes it also
the new pickle, while it grows and once more when it is complete. Nothing else copies a value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from sys import getsizeof

from core.engine.catalog.catalog import Catalog
from core.errors import CapacityError
from core.pickle.element_count import Elements, limiting_values
from core.pickle.inert import LONG_BYTES, Inert, list_parts, walk

MIB = 1 << 20
RUNTIME_BYTES = 48 * MIB
"""Memory of the interpreter, its modules and numpy."""
DECODER_BYTES = 192 * MIB
"""Memory of tensorstore and other codecs, in addition to the units that they decode."""
_VALUE_BYTES, _CONTAINER_BYTES = 60, 600
"""Memory per value, and per list or dict, of a pickle that is read."""
_LONG_READ_FACTOR, _LONG_FACTOR = 3.5, 4.85
"""Memory per byte of a pickle's long strings while they are decoded, and per byte of a long value
while it is encoded and joined with others.
"""
_GROWTH = 1.35
"""Memory of values in times of their sizes, with the allocator's gaps and the new pickle."""
_OBJECT_BYTES, _ENTRY_BYTES = 300, 1600
"""Memory per object of the source, and per object that the destination stores by itself."""
_ORDINARY_OBJECTS_BYTES = 16 << 20
_INERT_BYTES = 250
"""Memory of the lists and the tuple of an inert object beside its own."""
_NUMBERS = {int, float}
_SHARED = {bool, type(None)}
"""Types whose values exist once."""
_MANY_KEYS = 64
"""Length from which on a dict's keys are its own; those of small ones are names, which many share.
"""


@contextmanager
def limit_objects(
    memory_bytes: int | None, *, beside_bytes: int = 0, n_sources: int = 1
) -> Iterator[None]:
    """Refuse pickles, before they are read, whose values alone take more memory than there is.

    Args:
        memory_bytes: memory limit of the process; None for none.
        beside_bytes: the part of it that the caller uses for other purposes.
        n_sources: number of checkpoints whose values are in memory at the same time.

    Raises:
        CapacityError: a pickle in the block was refused, whatever its reader has made of that.
    """
    if memory_bytes is None:
        yield
        return
    free_bytes = memory_bytes - beside_bytes - RUNTIME_BYTES + _ORDINARY_OBJECTS_BYTES
    refused: list[CapacityError] = []

    def check(elements: Elements) -> CapacityError | None:
        n_bytes = n_sources * (
            _VALUE_BYTES * elements.n
            + _CONTAINER_BYTES * elements.n_containers
            + int(_LONG_READ_FACTOR * elements.long_bytes)
        )
        if n_bytes <= free_bytes:
            return None
        # Buffers and metadata come on top, and what writing takes more than reading.
        n_bytes += n_sources * int((_LONG_FACTOR - _LONG_READ_FACTOR) * elements.long_bytes)
        least = -(-(n_bytes + RUNTIME_BYTES + beside_bytes) * 9 // (8 * MIB))
        long_mib = elements.long_bytes // MIB
        long = f" and {long_mib:,} MiB of long strings" if long_mib else ""
        refused.append(
            CapacityError(
                f"objects with {elements.n:,} values{long} need about {least:,} MiB of memory, "
                f"but the limit is {memory_bytes // MIB:,} MiB",
                hint=f"set --memory to at least {least}MiB",
            )
        )
        return refused[-1]

    with limiting_values(max(0, free_bytes) // (_CONTAINER_BYTES * n_sources), check):
        yield
    if refused:
        raise refused[0]


def estimate_object_bytes(source: Catalog, n_entries: int) -> int:
    """Return the memory that objects take in excess of what every process is expected to take.

    Args:
        source: the catalog with the objects.
        n_entries: number of objects that are written each by itself.
    """
    loaded = [item.value for item in source.objects.values() if item.raw_key is None]
    n_bytes = text_bytes = long_bytes = 0
    counted: set[int] = set()
    for node in walk([loaded, source.skeleton, source.common, source.args]):
        if isinstance(node, (bytes, bytearray)):
            texts: Iterable[str | bytes | bytearray] = (node,)
        else:
            n_bytes += getsizeof(node) + (_INERT_BYTES if isinstance(node, Inert) else 0)
            parts: Collection[object] = list_parts(node)
            if isinstance(node, dict) and len(node) < _MANY_KEYS:
                parts = node.values()
            if _SHARED.issuperset(map(type, parts)):
                continue
            n_bytes += sum(getsizeof(part) for part in parts if type(part) in _NUMBERS)
            texts = (part for part in parts if isinstance(part, str))
        for text in texts:
            if len(text) < LONG_BYTES:
                n_bytes += getsizeof(text)
                text_bytes += len(text)
            elif id(text) not in counted:  # an object's value may stand in the skeleton, too
                counted.add(id(text))
                long_bytes += len(text)
    n_bytes = int(_GROWTH * n_bytes + text_bytes + _LONG_FACTOR * long_bytes)
    n_bytes += _OBJECT_BYTES * len(source.objects) + _ENTRY_BYTES * n_entries
    return max(0, n_bytes - _ORDINARY_OBJECTS_BYTES)
