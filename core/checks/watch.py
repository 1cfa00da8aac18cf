"""The deepest level: one scan of a checkpoint, shared by all checks that read data.

The module of a check that needs data has a function ``watch``, which returns the observers that
take part in the scan. After the scan, the check finds their results in ``Subject.byte_scan``.
``core.checks.subject._WATCHERS`` lists these modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.scan.observer import FileObserver, Observer
from core.scan.sums import ScanResult

if TYPE_CHECKING:
    from core.catalog.stored import StoredArray


@dataclass(frozen=True, slots=True)
class Watch:
    """What one check module needs from the scan.

    Args:
        observers: observers of arrays.
        file_observers: observers of whole files.
        digests: digests of all arrays and files are needed.
        digests_of: names of arrays whose digests are needed even if ``digests`` is false.
        arrays: arrays to read in addition to those of the catalog.
    """

    observers: Sequence[Observer] = ()
    file_observers: Sequence[FileObserver] = ()
    digests: bool = False
    digests_of: frozenset[str] = frozenset()
    arrays: Iterable[StoredArray] = ()


@dataclass(frozen=True, slots=True)
class ByteScan:
    """The results of the scan.

    Args:
        scanned: checksums and problems.
        watches: what each module took part with, by module name.
    """

    scanned: ScanResult
    watches: dict[str, Watch]
