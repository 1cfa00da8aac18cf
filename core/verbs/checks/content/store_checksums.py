"""CK830–CK833: compare a checkpoint in an object store with the checksums that the store states.

Without reading data, the CRC-32 of the store is compared with that of the manifest: both are of
whole files. At the deepest level, what is read is compared with the store's checksum of any kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from core.errors import list_some
from core.verbs.checks.finding import Finding, Level, get_code
from core.verbs.checks.subject import Check, Subject

if TYPE_CHECKING:
    from core.engine.scan.sums import Sum
    from core.files.stated.checksum import StatedChecksum
    from core.verbs.checks.watch import Watch

"""Number of objects that a note names."""

RECORDED = get_code("CK830")
READ = get_code("CK831")
COMPARED = get_code("CK832")
NOT_COMPARED = get_code("CK833")


def watch(subject: Subject) -> Watch:
    """Request checksums of the kinds that the store states."""
    from core.verbs.checks.content.object_sums import CRCS, ObjectCrcs, ObjectHashes
    from core.verbs.checks.watch import Watch

    chosen = _chosen(subject)
    # The scan computes the CRC-32 of every file anyway.
    crcs = {
        name: checksum.algorithm
        for name, checksum in chosen.items()
        if checksum.algorithm in CRCS and checksum.algorithm != "CRC-32"
    }
    hashed = {name: checksum for name, checksum in chosen.items() if checksum.algorithm not in CRCS}
    return Watch(
        file_observers=[
            *([ObjectCrcs(crcs)] if crcs else []),
            *([ObjectHashes(hashed)] if hashed else []),
        ]
    )


def _chosen(subject: Subject) -> Mapping[str, StatedChecksum]:
    """Return object → the checksum of the store with which its bytes are compared."""
    from core.verbs.checks.content.object_sums import choose_checksum

    choices = {
        name: choose_checksum(checksums) for name, checksums in subject.stated.by_name.items()
    }
    return {name: checksum for name, checksum in choices.items() if checksum is not None}


def compared_names(subject: Subject) -> frozenset[str]:
    """Return the names of the files that are compared with a checksum of the store."""
    return frozenset(_chosen(subject))


def compare_with_manifest(subject: Subject) -> Iterator[Finding]:
    """Compare the CRC-32s of the store with those of the manifest (CK830)."""
    manifest = None if subject.recorded is None else subject.recorded.manifest
    # At the deepest level, the bytes themselves are compared with both.
    if manifest is None or not subject.has_stated or subject.level == Level.DEEP:
        return
    from core.verbs.checks.content.object_sums import whole_crc

    matched: dict[str, list[str]] = {}
    skipped: dict[str, list[str]] = {}
    for file in manifest.files:
        if file.crc is None or subject.files.get(file.path) != file.n_bytes:
            continue  # ``content.manifests`` reports another size
        checksums = subject.stated.by_name.get(file.path, ())
        stated = [item for item in checksums if item.algorithm == "CRC-32" and item.ranges]
        if not stated:
            reason = _reason_not_compared(subject, file.path, needed="CRC-32")
            skipped.setdefault(reason, []).append(file.path)
        elif (actual := whole_crc(stated[0])) != f"{file.crc:08x}":
            yield RECORDED.finding(
                "the file in the store differs from the one that the manifest describes",
                file=file.path,
                expected=f"CRC-32 {file.crc:08x}",
                found=actual,
            )
        else:
            matched.setdefault("CRC-32", []).append(file.path)
    yield from _notes(matched, "matches the manifest (the data was not read)")
    yield from _notes_on_skipped(
        skipped, hint="to compare the data itself: ckpt validate PATH --deep"
    )


def are_files_of_manifest(subject: Subject) -> bool:
    """Return whether the store states, of every file, the CRC-32 that the manifest has of it."""
    from core.publish.manifest.lookup import is_manifest
    from core.verbs.checks.content.object_sums import whole_crc

    manifest = None if subject.recorded is None else subject.recorded.manifest
    if manifest is None or not subject.has_stated:
        return False
    recorded = {file.path: file.crc for file in manifest.files if file.crc is not None}
    for name in subject.files:
        checksums = subject.stated.by_name.get(name, ())
        stated = [item for item in checksums if item.algorithm == "CRC-32" and item.ranges]
        if not is_manifest(name) and (
            name not in recorded or not stated or whole_crc(stated[0]) != f"{recorded[name]:08x}"
        ):
            return False
    return True


def compare_contents(subject: Subject) -> Iterator[Finding]:
    """Compare what was read with the checksums that the store states (CK831)."""
    if not subject.has_stated:
        return
    chosen = _chosen(subject)
    matched: dict[str, list[str]] = {}
    skipped: dict[str, list[str]] = {}
    for name, actual in subject.byte_scan.scanned.files.items():
        checksum = chosen.get(name)
        if checksum is None:
            skipped.setdefault(_reason_not_compared(subject, name), []).append(name)
            continue
        difference = _find_difference(subject, name, checksum, actual)
        if difference is None:
            matched.setdefault(checksum.algorithm, []).append(name)
        else:
            yield difference
    yield from _notes(matched, "matches the data read")
    yield from _notes_on_skipped(skipped)


def _find_difference(
    subject: Subject, name: str, checksum: StatedChecksum, actual: Sum
) -> Finding | None:
    """Compare one object, which was read to its end, with the checksum of its store."""
    from core.verbs.checks.content.object_sums import CRCS, ObjectCrcs, ObjectHashes, whole_crc

    span = None
    if checksum.algorithm in CRCS:
        expected = whole_crc(checksum)
        computed = f"{actual.crc:08x}"
    for observer in subject.byte_scan.watches["content.store_checksums"].file_observers:
        if not observer.reads(name, actual.n_bytes):
            continue
        if isinstance(observer, ObjectCrcs):
            computed = observer.crc_of(name, actual.n_bytes) or "nothing"
        elif isinstance(observer, ObjectHashes):
            difference = observer.first_difference(name)
            if difference is None:
                return None
            part, computed = difference
            expected = part.value
            span = (part.start, part.stop) if len(checksum.ranges) > 1 else None
    if computed == expected:
        return None
    return READ.finding(
        "the data read does not match the store's checksum",
        file=name,
        span=span,
        expected=f"{checksum.algorithm} {expected}",
        found=computed,
    )


def _reason_not_compared(subject: Subject, name: str, *, needed: str | None = None) -> str:
    """Return why an object is not compared.

    Args:
        needed: the algorithm to compare by; None for any.
    """
    from core.verbs.checks.content.object_sums import missing_package

    checksums = subject.stated.by_name.get(name, ())
    if not checksums:
        failure = subject.stated.failure
        return (
            "the store reports no checksum"
            if failure is None
            else f"the store's checksums could not be requested: {failure}"
        )
    without_parts = [item.algorithm for item in checksums if not item.ranges]
    if without_parts and needed in (None, *without_parts):
        algorithm = without_parts[0]
        return f"the store reports {algorithm} checksums of parts, but not where each part begins"
    algorithms = ", ".join(item.algorithm for item in checksums)
    if needed is not None:
        return f"the store reports {algorithms}, but the manifest has {needed}"
    package = missing_package(checksums[0].algorithm)
    return f"checking the store's {algorithms} requires {package}: pip install {package}"


def _notes(matched: Mapping[str, list[str]], outcome: str) -> Iterator[Finding]:
    """Yield a note for each algorithm, on the files whose checksum matches."""
    for algorithm, names in matched.items():
        yield COMPARED.finding(f"{_listed(names)}: the store's {algorithm} {outcome}")


def _notes_on_skipped(
    skipped: Mapping[str, list[str]], *, hint: str | None = None
) -> Iterator[Finding]:
    """Yield a note for each reason, on the files that were not compared."""
    for reason, names in skipped.items():
        yield NOT_COMPARED.finding(f"{_listed(names)}: {reason}", hint=hint)


def _listed(names: list[str]) -> str:
    """Return the number of files and the first names."""
    return names[0] if len(names) == 1 else f"{len(names):,} files ({list_some(names, 3)})"


CHECKS = (Check(compare_with_manifest), Check(compare_contents, Level.DEEP))
