"""The memory that the objects of a source take, which is many times that of their pickles."""

from __future__ import annotations

from contextlib import AbstractContextManager

from core.catalog.catalog import Catalog
from core.convert.job import Job
from core.errors import CapacityError
from core.pickle.inert import count_values
from core.pickle.reader import limiting_values
from core.plan.plan import MIB, RUNTIME_BYTES

_VALUE_BYTES, _ENTRY_BYTES = 450, 3 << 10
"""Memory per value in an object, and per object of the destination, of a process that reads the
ones and writes the others (measured: 190 bytes for an int in a list to 430 for a value in a dict).
"""
_ORDINARY_OBJECTS_BYTES = 16 << 20


def limit_objects(job: Job) -> AbstractContextManager[None]:
    """Refuse pickles, before they are read, whose values alone take more memory than there is.

    A forecast by ``estimate_object_bytes`` refuses them, too, but with their values in memory.
    """
    free_bytes = job.own_memory_bytes - RUNTIME_BYTES + _ORDINARY_OBJECTS_BYTES

    def refuse(n_values: int) -> CapacityError:
        n_bytes = RUNTIME_BYTES + job.beside_bytes + _VALUE_BYTES * n_values
        least = -(-n_bytes * 9 // (8 * MIB))  # buffers and metadata come on top
        return CapacityError(
            f"{n_values:,} values in objects need about {least:,} MiB of memory, but the limit is "
            f"{job.memory_bytes // MIB:,} MiB",
            hint=f"set --memory to at least {least}MiB",
        )

    return limiting_values(max(0, free_bytes) // _VALUE_BYTES, refuse)


def estimate_object_bytes(source: Catalog, n_entries: int) -> int:
    """Return the memory that objects take in excess of what every process is expected to take.

    Python's values are many times as large as in a pickle.

    Args:
        source: the catalog with the objects.
        n_entries: number of objects that are written each by itself.
    """
    values = [item.value for item in source.objects.values() if item.raw_key is None]
    n_values = count_values([values, source.skeleton])
    n_bytes = _VALUE_BYTES * n_values + _ENTRY_BYTES * n_entries
    return max(0, n_bytes - _ORDINARY_OBJECTS_BYTES)
