"""The deepest level: one scan of a checkpoint, which all checks that read data share.

A check that wants data has a function ``watch`` in its module, which says with what it takes part in the scan; after
the scan it finds what it asked for in ``Subject.deep``. Modules that watch are listed in
``core.checks.subject``, ``_WATCHERS``.
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

    scanned: ScanResult
    watches: dict[str, Watch]
