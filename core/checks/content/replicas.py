"""CK720–CK729: copies that must be equal: the same box of a tensor on several ranks, and tied tensors.

Ranks that hold the same box hold the same bytes, or one of them diverged or was damaged. Arrays are compared by their
digests, which the scan makes; only where these differ, or where a copy is a part of an array, are the boxes themselves
read and compared.

Source: docs/facts/reshard.md 3; the layout's rules say who holds what
(``core.megatron.reshard.from_ranks``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.checks.check import Check, Code
from core.checks.content.replica_difference import first_difference
from core.checks.finding import Finding, Severity
from core.checks.level import Level
from core.checks.subject import Subject
from core.checks.watch import Watch
from core.errors import CheckpointingException

if TYPE_CHECKING:
    from core.arrays.box import Box
    from core.catalog.catalog import Catalog, Fragment
    from core.scan.sums import Sum

DIFFERENT = Code(
    "CK720",
    Severity.ERROR,
    "copies that must be equal differ",
    "use an older checkpoint; or convert with --on-replica-mismatch first, which takes the first copy",
    Level.DEEP,
)
UNCOMPARED = Code(
    "CK721",
    Severity.ERROR,
    "copies cannot be compared",
    "see what keeps their files from being read",
    Level.DEEP,
)

CODES = (DIFFERENT, UNCOMPARED)


@dataclass(frozen=True, slots=True)
class _Copies:
    """Fragments of one tensor with one box, each of another array."""

    key: str
    box: Box
    fragments: Sequence[Fragment]

    @property
    def are_alike(self) -> bool:
        """Whether every fragment lies in its array as the others do, so that equal arrays mean equal copies."""
        return len({(piece.at, piece.array.shape) for piece in self.fragments if piece.array is not None}) == 1


def watch(subject: Subject) -> Watch:
    """The digests of arrays that have copies."""
    names = (piece.array.name for copies in _all_copies(subject) for piece in copies.fragments if piece.array)
    return Watch(digests_of=frozenset(names))


def _all_copies(subject: Subject) -> Iterator[_Copies]:
    canonical = subject.canonical
    if canonical is None or not canonical.is_global:
        return
    catalog = canonical.catalog
    for key in catalog.tensors:
        groups: dict[Box, dict[str, Fragment]] = {}
        for piece in catalog.fragments(key):
            if piece.array is not None and not piece.box.is_empty:
                groups.setdefault(piece.box, {})[piece.array.name] = piece
        for box, pieces in groups.items():
            if len(pieces) > 1:
                yield _Copies(key, box, tuple(pieces.values()))


def copies_are_equal(subject: Subject) -> Iterator[Finding]:
    """Every copy that differs from what most of its kind hold."""
    canonical = subject.canonical
    if canonical is None:
        return
    sums = subject.deep.scanned.arrays
    for copies in _all_copies(subject):
        if copies.are_alike and len(_digests(copies, sums).values()) == len(copies.fragments):
            digests = _digests(copies, sums)
            if len(set(digests.values())) == 1:
                continue
        else:
            digests = {}
        yield from _compared(subject, canonical.catalog, copies, digests)


CHECKS = (Check(copies_are_equal, Level.DEEP),)


def _digests(copies: _Copies, sums: Mapping[str, Sum]) -> dict[int, str]:
    """Number of a fragment → digest of its array, where it could be read."""
    found: dict[int, str] = {}
    for number, piece in enumerate(copies.fragments):
        made = None if piece.array is None else sums.get(piece.array.name)
        if made is not None and made.digest is not None:
            found[number] = made.digest
    return found


def _compared(subject: Subject, catalog: Catalog, copies: _Copies, digests: Mapping[int, str]) -> Iterator[Finding]:
    """The copies that differ from the first of those that agree most."""
    usual = Counter(digests.values()).most_common(1)
    first = next((n for n, digest in digests.items() if digest == usual[0][0]), 0) if usual else 0
    primary = copies.fragments[first]
    for number, piece in enumerate(copies.fragments):
        if number == first or (digests and digests.get(number) == digests.get(first)):
            continue
        try:
            found = first_difference(subject.store, catalog, primary, piece, device=subject.device)
        except CheckpointingException as err:
            if not _is_said(subject, err.file or _file(piece)):
                yield UNCOMPARED.finding(err.message, key=copies.key, file=err.file or _file(piece), rank=_rank(piece))
            continue
        if found is not None:
            yield DIFFERENT.finding(
                f"{found.n_different} of {copies.box.n_elements} elements differ from the copy in {_file(primary)}, "
                f"the first at index {found.index}",
                file=_file(piece),
                key=copies.key,
                rank=_rank(piece),
                expected=f"{found.first} as in {_rank(primary) or _file(primary)}",
                found=found.other,
            )


def _is_said(subject: Subject, file: str | None) -> bool:
    return any(finding.severity == Severity.ERROR and finding.file == file for finding in subject.findings)


def _file(piece: Fragment) -> str | None:
    return None if piece.array is None else piece.array.extent.file


def _rank(piece: Fragment) -> str | None:
    file = _file(piece)
    return None if file is None else file.rpartition("/")[0] or None
