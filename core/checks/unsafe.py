"""CK601–CK606: what other software would do with these files that nobody wants, by name; nothing is done here.

Every pickle is read by the inert reader: those of ``.metadata``, of the files of ``torch.save``, of objects that have
streams of their own, and of streams inside bytes; also what a pickle drops again counts. Which names are dangerous is
a matter of a list (``core.pickle_names``), which is never complete; unknown names are noted.

At the lowest level, one of the files that are called alike and have one size is read, and some hundred objects.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from core.checks import Check, Code, Level
from core.checks.subject import Subject
from core.checks.torch_zips import torch_files
from core.errors import CheckpointingException
from core.finding import Finding, Severity
from core.formats.torch_nested import names_of_stream
from core.inert import Global
from core.safe_pickle import classify

_OTHERS = "read it with software that builds no objects, and find out who wrote it"

DANGEROUS = Code("CK601", Severity.ERROR, "a pickle names code that nobody should run", _OTHERS)
UNKNOWN = Code("CK602", Severity.NOTE, "a pickle names classes that are not known", "load it only if you trust it")
PROGRAM = Code("CK603", Severity.WARNING, "a program lies among the weights", "remove it, if you did not put it there")
LEADS_OUT = Code("CK604", Severity.NOTE, "a link leads out of the checkpoint", "copy the file itself along")
ODD_NAME = Code("CK605", Severity.WARNING, "a file's name is no printable text", "rename it, or remove it")

HOLLOW = Code("CK606", Severity.WARNING, "a large file is nearly all holes", "copy it again: it may not have ended")

CODES = (DANGEROUS, UNKNOWN, PROGRAM, LEADS_OUT, ODD_NAME, HOLLOW)

_MOST_OBJECTS = 256
"""Streams of objects that are read at the lowest level."""
_MOST_SHOWN = 50
"""Names, and places of a dangerous one, that are findings of their own."""
_BARE_PICKLE = re.compile(r"(^|/)(\.metadata(\.tmp)?|[^/]*\.(pkl|pickle))$")
_MAX_BARE_BYTES = 64 << 20
_METADATA = ".metadata"
_PROGRAM = re.compile(r"\.(so(\.\d+)*|dll|exe|dylib|pyd|sh|bash|bat|cmd|ps1|jar|pyc|vbs|scr|msi|com)$", re.IGNORECASE)
_BLOBS = re.compile(r"(^|/)blobs/[0-9a-f]{40,64}$")
"""Where the hub cache of Hugging Face keeps the files that its directories link to."""

Place = tuple[str, str | None]
"""File, and the object in it."""


def pickled_names(subject: Subject) -> Iterator[Finding]:
    """CK601, CK602: dangerous names wherever they stand, unknown ones each once."""
    places: dict[Global, list[Place]] = {}
    for place, names in _named(subject):
        for name in names:
            places.setdefault(name, []).append(place)
    dangerous = sorted((name for name in places if classify(name) == "dangerous"), key=str)
    for name in dangerous[:_MOST_SHOWN]:
        for file, key in places[name][:_MOST_SHOWN]:
            message = f"{str(name)[:200]} is named, which would run code in software that unpickles it"
            yield DANGEROUS.finding(message, file=file, key=key, found=str(name)[:200])
    unknown = sorted((name for name in places if classify(name) == "unknown"), key=str)
    for number, name in enumerate(unknown[:_MOST_SHOWN], 1):
        (file, key), *others = places[name]
        message = f"{str(name)[:200]} is named" + (f", and at {len(others)} other places" if others else "")
        if number == _MOST_SHOWN < len(unknown):
            message += f"; so are {len(unknown) - number} other unknown names"
        yield UNKNOWN.finding(message, file=file, key=key, found=str(name)[:200])


def _named(subject: Subject) -> Iterator[tuple[Place, set[Global]]]:
    """The names of every stream, and last those that only the reader of the metadata saw."""
    seen: set[Global] = set()
    for file, start, n_bytes, key in _streams(subject):
        try:
            names = names_of_stream(subject.store, file, start, n_bytes)
        except CheckpointingException:  # other checks say it
            continue
        seen |= names
        yield (file, key), names
    rest = {name for name in subject.named if classify(name) == "dangerous"} - seen
    if rest:
        yield (_METADATA if _METADATA in subject.files else subject.store.label, None), rest


def _streams(subject: Subject) -> Iterator[tuple[str, int, int, str | None]]:
    """(file, first byte, bytes, object) of whatever may hold a pickle."""
    catalog = subject.catalog
    for name, size in subject.files.items():
        is_read = name == _METADATA and catalog is not None
        if not is_read and _BARE_PICKLE.search(name) and 0 < size <= _MAX_BARE_BYTES:
            yield name, 0, size, None
    for name in torch_files(subject):
        if not (_BARE_PICKLE.search(name) and subject.files[name] <= _MAX_BARE_BYTES):  # those have been yielded
            yield name, 0, subject.files[name], None
    raw = [] if catalog is None else [item for item in catalog.objects.values() if item.raw_key is not None]
    for item in raw if subject.level > Level.METADATA else raw[:_MOST_OBJECTS]:
        assert catalog is not None and item.raw_key is not None
        try:
            stream = catalog.fragments(item.raw_key)[0].array
        except CheckpointingException:
            continue
        if stream is not None and stream.extent is not None and stream.extent.encoding is None:
            yield stream.extent.file, stream.extent.offset, stream.n_bytes, item.key


def files_beside(subject: Subject) -> Iterator[Finding]:
    """CK603, CK605: programs, and names that play with a terminal."""
    for name in (*subject.files, *subject.tree.others):
        if _PROGRAM.search(name):
            yield PROGRAM.finding("it would run on its own, and no checkpoint needs it", file=name)
        if not name.isprintable():
            yield ODD_NAME.finding(
                "the name has control characters, direction marks or bytes that are no text", file=name
            )


def holes(subject: Subject) -> Iterator[Finding]:
    """CK606: what ``--deep`` does not read, as there is nothing in it."""
    for name in sorted(subject.hollow):
        stored = os.stat(subject.store.path(name)).st_blocks << 9
        yield HOLLOW.finding(
            "the disk holds next to none of its bytes; --deep does not read it",
            file=name,
            expected=f"{subject.files[name]} bytes",
            found=f"{stored} bytes",
        )


def links(subject: Subject) -> Iterator[Finding]:
    """CK604: files that are links to elsewhere, save for those of a hub cache, which consists of them."""
    root = os.path.realpath(subject.store.root)
    for name in subject.files:
        path = subject.store.root / name
        if not path.is_symlink():
            continue
        target = os.path.realpath(path)
        if not target.startswith(f"{root}/") and not _BLOBS.search(target):
            yield LEADS_OUT.finding("the file is a link", file=name, found=target)


CHECKS = (Check(pickled_names), Check(files_beside), Check(holes), Check(links))
