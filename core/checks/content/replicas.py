"""CK720, CK721: replicas that must be equal: boxes stored by several ranks, and tied tensors.

If ranks that hold the same box hold different bytes, one of them diverged or was damaged. Arrays
are compared by their digests, which the scan computes; the boxes themselves are read and compared
only if the digests differ, or if a replica is part of an array.

Source: docs/facts/reshard.md 3; the layout rules determine the ranks that hold a tensor
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
    "replicas differ",
    "use an older checkpoint; or convert with --on-replica-mismatch first, which takes the first copy",
    Level.DEEP,
)
UNCOMPARED = Code(
    "CK721",
    Severity.ERROR,
    "replicas cannot be compared",
    "find out why their files cannot be read",
    Level.DEEP,
)

CODES = (DIFFERENT, UNCOMPARED)


@dataclass(frozen=True, slots=True)
class _Replicas:
    """The fragments of one tensor with the same box, in different arrays."""

    key: str
    box: Box
    fragments: Sequence[Fragment]

    @property
    def are_alike(self) -> bool:
        """All fragments lie at the same place of equally shaped arrays, so equal arrays mean equal
        replicas.
        """
        return (
            len(
                {
                    (piece.at, piece.array.shape)
                    for piece in self.fragments
                    if piece.array is not None
                }
            )
            == 1
        )


def watch(subject: Subject) -> Watch:
    """Request the digests of arrays that have replicas."""
    names = (
        piece.array.name
        for replicas in _all_replicas(subject)
        for piece in replicas.fragments
        if piece.array
    )
    return Watch(digests_of=frozenset(names))


def _all_replicas(subject: Subject) -> Iterator[_Replicas]:
    """Yield every group of replicas, if the layout is known."""
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
                yield _Replicas(key, box, tuple(pieces.values()))


def check_replicas(subject: Subject) -> Iterator[Finding]:
    """Report every replica that differs from the majority of its group (CK720, CK721)."""
    canonical = subject.canonical
    if canonical is None:
        return
    sums = subject.byte_scan.scanned.arrays
    for replicas in _all_replicas(subject):
        digests = _digests(replicas, sums) if replicas.are_alike else {}
        if len(digests) < len(replicas.fragments):
            digests = {}  # not all are comparable by digest, so all boxes are read
        elif len(set(digests.values())) == 1:
            continue
        yield from _compare_replicas(subject, canonical.catalog, replicas, digests)


CHECKS = (Check(check_replicas, Level.DEEP),)


def _digests(replicas: _Replicas, sums: Mapping[str, Sum]) -> dict[int, str]:
    """Return number of a fragment → digest of its array, where it could be read."""
    digests: dict[int, str] = {}
    for number, piece in enumerate(replicas.fragments):
        total = None if piece.array is None else sums.get(piece.array.name)
        if total is not None and total.digest is not None:
            digests[number] = total.digest
    return digests


def _compare_replicas(
    subject: Subject, catalog: Catalog, replicas: _Replicas, digests: Mapping[int, str]
) -> Iterator[Finding]:
    """Compare the replicas with the first of those that most agree with."""
    # The most frequent digest wins; without digests the first replica.
    usual = Counter(digests.values()).most_common(1)
    first = next((n for n, digest in digests.items() if digest == usual[0][0]), 0) if usual else 0
    primary = replicas.fragments[first]
    for number, piece in enumerate(replicas.fragments):
        if number == first or (digests and digests.get(number) == digests.get(first)):
            continue
        try:
            difference = first_difference(
                subject.store, catalog, primary, piece, device=subject.device
            )
        except CheckpointingException as err:
            if not subject.is_covered_by_finding(err.file or _file(piece)):
                yield UNCOMPARED.finding(
                    err.message, key=replicas.key, file=err.file or _file(piece), rank=_rank(piece)
                )
            continue
        if difference is not None:
            yield DIFFERENT.finding(
                f"{difference.n_different} of {replicas.box.n_elements} elements differ from the replica "
                f"in {_file(primary)}, the first at index {difference.index}",
                file=_file(piece),
                key=replicas.key,
                rank=_rank(piece),
                expected=f"{difference.first} as in {_rank(primary) or _file(primary)}",
                found=difference.other,
            )


def _file(piece: Fragment) -> str | None:
    """Return the file of a fragment."""
    return None if piece.array is None else piece.array.extent.file


def _rank(piece: Fragment) -> str | None:
    """Return the rank directory of a fragment."""
    file = _file(piece)
    return None if file is None else file.rpartition("/")[0] or None
