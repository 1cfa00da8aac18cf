"""The deepest level: one scan of a checkpoint, which all checks that read data share.

A check that wants data has a function ``watch`` in its module, which says with what it takes part in the scan; after
the scan it finds what it asked for in ``Subject.deep``. Modules that watch are listed in ``_WATCHERS``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING

from core.agreement import agreed
from core.device import FINGERPRINT, VALUES
from core.device_choice import settled
from core.formats.zarr_fill import fill_of
from core.scan import scan
from core.scan_observer import FileObserver, Observer
from core.scan_sums import Scanned, Wanted
from core.stated_sums import StatedSums

if TYPE_CHECKING:
    from core.catalog import StoredArray
    from core.checks.subject import Subject

_WATCHERS: tuple[str, ...] = ("values", "replicas", "hf_model", "manifests", "integrity_json", "fingerprints")
"""Modules of ``core.checks`` with a function ``watch(subject) -> Watch``."""


@dataclass(frozen=True, slots=True)
class Watch:
    """What takes part in the scan for one module.

    Args:
        observers: of arrays.
        file_observers: of files.
        digests: whether it needs the digests of all arrays and files.
        digests_of: names of arrays of which it needs digests anyway.
        arrays: beside those of the catalog, arrays that it wants to be read.
    """

    observers: Sequence[Observer] = ()
    file_observers: Sequence[FileObserver] = ()
    digests: bool = False
    digests_of: frozenset[str] = frozenset()
    arrays: Iterable[StoredArray] = ()


@dataclass(frozen=True, slots=True)
class Deep:
    """What the scan gave.

    Args:
        scanned: sums and problems.
        watches: by module name.
    """

    scanned: Scanned
    watches: dict[str, Watch]


def examined(subject: Subject) -> Deep:
    """Scans a checkpoint for every module that watches; the ranks of a team together, and what is found is the lead's.

    Raises:
        CheckpointingException: a module cannot say what it wants to see.
        WorkerError: a rank of the team failed.
    """
    team = subject.team
    if subject.device is not None:
        subject.device = settled(
            subject.device, _device_works(subject), threads=subject.threads or len(os.sched_getaffinity(0))
        )
    watches = agreed(team, lambda: _watches(subject), lambda found: [*found], what=str(subject.path))
    catalog = subject.salvaged.catalog
    stored = () if catalog is None else (fragment.array for fragment in catalog.all_fragments())
    more = chain.from_iterable(watch.arrays for watch in watches.values())
    digests = any(watch.digests for watch in watches.values())
    scanned = scan(
        catalog,
        subject.store,
        [one for watch in watches.values() for one in watch.observers],
        files={name: size for name, size in subject.files.items() if name not in subject.hollow},
        file_observers=[one for watch in watches.values() for one in watch.file_observers],
        wanted=Wanted(
            array_digests=digests,
            file_digests=digests,
            digests_of=frozenset(chain.from_iterable(watch.digests_of for watch in watches.values())),
        ),
        stated_in=StatedSums(subject.store, None if subject.format is None else subject.format.name),
        arrays=(
            array
            for array in chain(stored, more)
            if array is not None and _file(array) not in subject.hollow and fill_of(array) is None
        ),
        threads=subject.threads,
        memory_bytes=subject.memory_bytes,
        progress=subject.progress,
        team=team,
        device=subject.device,
    )
    return Deep(scanned, watches)


def _device_works(subject: Subject) -> tuple[str, ...]:
    """The kinds of work of the scan that a device may do."""
    return (VALUES,) if subject.against is None else (VALUES, FINGERPRINT)


def _watches(subject: Subject) -> dict[str, Watch]:
    return {name: import_module(f"core.checks.{name}").watch(subject) for name in _WATCHERS}


def _file(array: StoredArray) -> str | None:
    return None if array.extent is None else array.extent.file
