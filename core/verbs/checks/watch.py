"""One scan of a checkpoint, shared by all checks of the deepest level.

The module of a check that needs data has a function ``watch``, which returns the observers to run
during the scan. After the scan, the check finds their results in ``Subject.byte_scan``.
``core.verbs.checks.subject._WATCHERS`` lists these modules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from core.engine.scan.observer import FileObserver, Observer
from core.engine.scan.sums import ScanResult
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.catalog.stored import StoredArray


@dataclass(frozen=True, slots=True)
class Watch:
    """The needs of one or several check modules during the scan.

    Args:
        observers: observers of arrays.
        file_observers: observers of complete files.
        digests: digests of all arrays and files are needed.
        digests_of: names of arrays whose digests are needed even if ``digests`` is false.
        arrays: arrays to read in addition to those of the catalog.
    """

    observers: Sequence[Observer] = ()
    file_observers: Sequence[FileObserver] = ()
    digests: bool = False
    digests_of: frozenset[str] = frozenset()
    arrays: Iterable[StoredArray] = ()


def combine_watches(watches: Collection[Watch]) -> Watch:
    """Combine the needs of several modules, so that a single scan can serve all of them."""
    return Watch(
        observers=[observer for watch in watches for observer in watch.observers],
        file_observers=[observer for watch in watches for observer in watch.file_observers],
        digests=any(watch.digests for watch in watches),
        digests_of=frozenset().union(*(watch.digests_of for watch in watches)),
        arrays=chain.from_iterable(watch.arrays for watch in watches),
    )


@dataclass(frozen=True, slots=True)
class ByteScan:
    """The results of the scan.

    Args:
        scanned: checksums and problems.
        watches: module name → its needs, with the observers that hold its results.
    """

    scanned: ScanResult
    watches: dict[str, Watch]
