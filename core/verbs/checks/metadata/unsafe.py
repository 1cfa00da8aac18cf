"""CK601–CK606: find pickles that would run code, executables, misleading links and names.

Nothing is executed here. Every pickle is read by the inert reader: ``.metadata``, the files of
``torch.save``, objects with streams of their own, and streams inside bytes, including the values
that a pickle discards. A pickle may call the harmless constructors listed in ``pickle/calls.toml``.
Any other callable of a known package is an error, even if it is harmless; a callable of an unknown
module is a warning.

The lowest level reads one file of each group with similar names and equal sizes, and a few hundred
objects.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Set

from core.engine.catalog.catalog import Catalog
from core.errors import CheckpointingException
from core.formats.torch.nested_names import uses_in, uses_of_stream, with_nested
from core.pickle.inert import Global
from core.pickle.names import is_foreign, judge
from core.pickle.uses import How, Use
from core.values import n_text
from core.verbs.checks.containers.torch_zips import torch_files
from core.verbs.checks.finding import Finding, Level, Severity, get_code
from core.verbs.checks.subject import Check, Subject

DANGEROUS = get_code("CK601")
UNKNOWN = get_code("CK602")
PROGRAM = get_code("CK603")
LEADS_OUT = get_code("CK604")
ODD_NAME = get_code("CK605")

HOLLOW = get_code("CK606")


_MOST_OBJECTS = 256
"""Maximum number of object streams to read at the lowest level."""
_MOST_SHOWN = 50
"""Maximum number of names, and of places of each dangerous name, that get findings of their own."""
_BARE_PICKLE = re.compile(r"(^|/)(\.metadata(\.tmp)?|[^/]*\.(pkl|pickle))$")
_METADATA = ".metadata"
_PROGRAM = re.compile(
    r"\.(so(\.\d+)*|dll|exe|dylib|pyd|sh|bash|bat|cmd|ps1|jar|pyc|vbs|scr|msi|com)$", re.IGNORECASE
)
_BLOBS = re.compile(r"(^|/)blobs/[0-9a-f]{40,64}$")
"""Paths in Hugging Face's hub cache that its directories link to."""

Place = tuple[str, str | None]
"""(file, name of the object in it; None for the complete file)."""


def check_pickles(subject: Subject) -> Iterator[Finding]:
    """Report dangerous names (CK601) at every place, and names of unknown modules (CK602) once."""
    # Collect the places of each name. The worst use of a name at a place comes last and is kept.
    dangerous: dict[Global, dict[Place, Use]] = {}
    foreign: dict[Global, list[Place]] = {}
    for place, uses in _uses_by_place(subject):
        for use in sorted(uses, key=lambda use: _RANK_OF_USE[use.how]):
            if judge(use) == "dangerous":
                dangerous.setdefault(use.name, {})[place] = use
            elif is_foreign(use) and place not in foreign.setdefault(use.name, []):
                foreign[use.name].append(place)
    for name in sorted(dangerous, key=str)[:_MOST_SHOWN]:
        for (file, key), use in list(dangerous[name].items())[:_MOST_SHOWN]:
            message = f"{str(name)[:200]} {_USE_TEXTS[use.how]}"
            yield DANGEROUS.finding(message, file=file, key=key, found=str(name)[:200])
    yield from _report_unknown_names(foreign)


def _report_unknown_names(foreign: Mapping[Global, list[Place]]) -> Iterator[Finding]:
    """Report names of unknown modules, each at its first place; the last finding counts the rest.

    Args:
        foreign: name → its places, at least one.
    """
    names = sorted(foreign, key=str)
    for number, name in enumerate(names[:_MOST_SHOWN], 1):
        (file, key), *more_places = foreign[name]
        message = f"the pickle needs {str(name)[:200]}" + (
            f", which is also needed in {n_text(len(more_places), 'other place')}"
            if more_places
            else ""
        )
        if number == _MOST_SHOWN < len(names):
            n_more = n_text(len(names) - number, "other name")
            message += f"; {n_more} from unknown modules are also needed"
        yield UNKNOWN.finding(message, file=file, key=key, found=str(name)[:200])


_USE_TEXTS: dict[How, str] = {
    "named": "is referenced, which would run code in software that unpickles it",
    "bound": "gets arguments bound by functools.partial and is not known to be harmless",
    "made": "is instantiated but is not a class known to be harmless",
    "called": "is called but is not a function known to be harmless",
    "changed": "has attributes or items set, which affects the entire program that unpickles it",
    "unread": "unpickles bytes that are refused or nested too deeply to be inspected",
}
"""Kind of use → its description, the most harmful kind last."""
_RANK_OF_USE: dict[How, int] = {how: number for number, how in enumerate(_USE_TEXTS)}


def _uses_by_place(subject: Subject) -> Iterator[tuple[Place, set[Use]]]:
    """Yield the uses of names by place; last, those that only the metadata reader came across."""
    reported: set[Use] = set()
    # 1. Streams that hold a pickle, one by one. Pickles kept by the metadata reader are not read
    # again.
    fully_read: set[str] = set()
    for file, start, n_bytes, key in _streams(subject):
        try:
            pickles = () if key is not None else subject.read_pickles(file)
            uses = uses_of_stream(subject.store, file, start, n_bytes, read=pickles)
            fully_read.update([file] if pickles else ())
        except CheckpointingException:
            continue  # reported by other checks
        # Bytes of a damaged file cannot be inspected, and the damage has been reported.
        if subject.is_covered_by_finding(file):
            uses = {use for use in uses if use.how != "unread"}
        reported |= uses
        yield (file, key), uses

    # 2. Pickles that are not part of the checkpoint format.
    for place, content in subject.other_pickles.items() if subject.level >= Level.DEEP else ():
        reported |= content.uses
        yield place, {*content.uses}

    # 3. Objects of the metadata from files that have not been read above.
    if subject.catalog is not None and not subject.has_read_only(fully_read):
        for place, uses in _uses_in_objects(subject, subject.catalog, reported):
            reported |= uses
            yield place, uses

    # 4. All other uses in the pickles of the metadata, whose place is unknown.
    place = (_METADATA if _METADATA in subject.files else subject.store.label, None)
    yield place, with_nested(subject.uses) - reported


def _uses_in_objects(
    subject: Subject, catalog: Catalog, reported: Set[Use]
) -> list[tuple[Place, set[Use]]]:
    """Return the uses of names in the objects of the metadata that have not been reported yet."""
    common = catalog.common
    objects = {item.key: item.value for item in catalog.objects.values()}
    # Ranks share many objects, so walk all of them as one first, and one by one only if there is
    # something to report.
    if not uses_in([*objects.values(), common]) - reported:
        return []
    from core.formats.zarr.metadata2 import ARRAY_FILE
    from core.formats.zarr.metadata3 import METADATA_FILE

    by_place: list[tuple[Place, set[Use]]] = []
    for key, value in objects.items():
        # An object that is stored in a zarr array is located by the metadata file of the array.
        names = (f"{key}/{name}" for name in (ARRAY_FILE, METADATA_FILE))
        file = next((name for name in names if name in subject.files), subject.store.label)
        by_place.append(((file, key), uses_in(value) - reported))
    return [*by_place, ((subject.store.label, None), uses_in(common) - reported)]


def _streams(subject: Subject) -> Iterator[tuple[str, int, int, str | None]]:
    """Yield (file, first byte, size in bytes, object name) of everything that may hold a pickle."""
    # Bare pickles by name; ``.metadata`` only if it has not been read for the catalog.
    is_read = subject.salvaged.catalog is not None
    names = {
        name: None
        for name, size in subject.files.items()
        if size and _is_bare_pickle(name, size) and not (is_read and name == _METADATA)
    }
    # Files of ``torch.save``, objects with streams of their own, and files that are not what their
    # names say.
    names |= dict.fromkeys(
        name
        for name in torch_files(subject, or_others=True)
        if not _is_bare_pickle(name, subject.files[name])
    )
    failed = None if subject.failure is None else subject.failure.file
    findings = [finding for finding in subject.findings if finding.severity == Severity.ERROR]
    names |= dict.fromkeys(
        name
        for name in (failed, *(finding.file for finding in findings))
        if name is not None and subject.files.get(name)
    )
    for name in names:
        yield name, 0, subject.files[name], None
    yield from _object_streams(subject)


def _is_bare_pickle(name: str, size: int) -> bool:
    """Return whether a file is a pickle by its name, and small enough to be read."""
    from core.formats.torch.legacy import MAX_PICKLE_BYTES

    return _BARE_PICKLE.search(name) is not None and size <= MAX_PICKLE_BYTES


def _object_streams(subject: Subject) -> Iterator[tuple[str, int, int, str | None]]:
    """Yield (file, first byte, size in bytes, object name) of objects with streams of their own."""
    catalog = subject.catalog
    if catalog is None:
        return
    items = [
        (item.key, item.raw_key) for item in catalog.objects.values() if item.raw_key is not None
    ]
    for key, raw_key in items if subject.level > Level.METADATA else items[:_MOST_OBJECTS]:
        try:
            stream = catalog.fragments(raw_key)[0].array
        except CheckpointingException:
            continue
        if stream is not None and stream.extent.encoding is None:
            yield stream.extent.file, stream.extent.offset, stream.n_bytes, key


def check_file_names(subject: Subject) -> Iterator[Finding]:
    """Report executables (CK603) and names that could mislead on a terminal (CK605)."""
    for name in (*subject.files, *subject.tree.irregular):
        # A directory that is no checkpoint has programs of its own.
        if subject.format is not None and _PROGRAM.search(name):
            yield PROGRAM.finding(
                "the file is executable code, which no checkpoint needs", file=name
            )
        if not name.isprintable():
            yield ODD_NAME.finding(
                "the name contains control characters, direction marks or bytes that are not text",
                file=name,
            )


def report_sparse_files(subject: Subject) -> Iterator[Finding]:
    """Report large sparse files, which ``--deep`` does not read (CK606)."""
    for name in sorted(subject.hollow):
        stored = subject.store.disk_bytes(name)
        yield HOLLOW.finding(
            "almost none of the file is stored on disk, so --deep skips it",
            file=name,
            expected=f"{subject.files[name]} bytes",
            found=f"{stored} bytes on disk",
        )


def check_links(subject: Subject) -> Iterator[Finding]:
    """Report files that are links out of the checkpoint (CK604), except those into a hub cache."""
    if subject.store.is_remote:
        return  # stores have no links
    root = os.path.realpath(subject.store.root)
    for name in subject.files:
        path = subject.store.root / name
        if not path.is_symlink():
            continue
        target = os.path.realpath(path)
        if not target.startswith(f"{root}/") and not _BLOBS.search(target):
            yield LEADS_OUT.finding(
                "the file is a link to a path outside the checkpoint", file=name, found=target
            )


CHECKS = (
    Check(check_pickles),
    Check(check_file_names),
    Check(report_sparse_files),
    Check(check_links),
)
