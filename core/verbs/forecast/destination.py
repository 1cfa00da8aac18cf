"""What a run would find at its destination, for ``--dry-run``; nothing is touched."""

from __future__ import annotations

from core.errors import UsageError
from core.publish.stage.replacement import is_vacant
from core.values import dataclass
from core.verbs.convert.prepared import Prepared
from core.verbs.convert.stage import check_replaced


@dataclass(frozen=True, slots=True)
class ExistingDestination:
    """The file or directory that has the name of the destination.

    Args:
        refusal: the error with which ``--force`` would end; None if it would replace it.
    """

    refusal: UsageError | None = None


def existing_destination(prepared: Prepared) -> ExistingDestination | None:
    """Return what exists at the destination of a job; None if nothing does."""
    dst = prepared.dst
    if not (dst.exists() or dst.is_symlink()):
        return None
    if prepared.destination.is_on_disk and is_vacant(dst, is_file=prepared.is_file):
        return None
    try:
        check_replaced(prepared)
        prepared.destination.check_may_replace(is_file=prepared.is_file, keep=prepared.source_paths)
    except UsageError as err:
        return ExistingDestination(err)
    return ExistingDestination()
