"""CK601–CK606: what other software would do with these files that nobody wants, by name; nothing is done here.

Every pickle is read by the inert reader: those of ``.metadata``, of the files of ``torch.save``, of objects that have
streams of their own, and of streams inside bytes; also what a pickle drops again counts. A pickle may call the harmless
constructors of a list (``pickle/calls.toml``). Any other callable of a known package is an error, whatever it does;
what belongs to a module that nobody knows is a warning.

At the lowest level, one of the files that are called alike and have one size is read, and some hundred objects.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from core.checks.check import Check, Code
from core.checks.containers.torch_zips import torch_files
from core.checks.finding import Finding, Severity
from core.checks.level import Level
from core.checks.subject import Subject
from core.errors import CheckpointingException
from core.formats.torch.legacy import MAX_PICKLE_BYTES
from core.formats.torch.nested_names import uses_in, uses_of_stream, with_nested
from core.formats.zarr.metadata2 import ARRAY_FILE
from core.formats.zarr.metadata3 import METADATA_FILE
from core.pickle.inert import Global
from core.pickle.names import is_foreign, judge
from core.pickle.uses import How, Use

_OTHERS = "read it with software that builds no objects, and find out who wrote it"

DANGEROUS = Code("CK601", Severity.ERROR, "a pickle calls or names code that nobody should run", _OTHERS)
UNKNOWN = Code(
    "CK602",
    Severity.WARNING,
    "a pickle needs code of a module that is not known",
    "load it only if you know and trust that module",
)
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
_METADATA = ".metadata"
_PROGRAM = re.compile(r"\.(so(\.\d+)*|dll|exe|dylib|pyd|sh|bash|bat|cmd|ps1|jar|pyc|vbs|scr|msi|com)$", re.IGNORECASE)
_BLOBS = re.compile(r"(^|/)blobs/[0-9a-f]{40,64}$")
"""Where the hub cache of Hugging Face keeps the files that its directories link to."""

Place = tuple[str, str | None]
"""File, and the object in it."""


def pickled_names(subject: Subject) -> Iterator[Finding]:
    """CK601, CK602: dangerous names wherever they stand, those of unknown modules each once."""
    dangerous: dict[Global, dict[Place, Use]] = {}
    foreign: dict[Global, list[Place]] = {}
    for place, uses in _used(subject):
        for use in sorted(uses, key=lambda use: _HOW[use.how]):  # the last one counts
            if judge(use) == "dangerous":
                dangerous.setdefault(use.name, {})[place] = use
            elif is_foreign(use) and place not in foreign.setdefault(use.name, []):
                foreign[use.name].append(place)
    for name in sorted(dangerous, key=str)[:_MOST_SHOWN]:
        for (file, key), use in list(dangerous[name].items())[:_MOST_SHOWN]:
            message = f"{str(name)[:200]} {_DONE[use.how]}"
            yield DANGEROUS.finding(message, file=file, key=key, found=str(name)[:200])
    names = sorted(foreign, key=str)
    for number, name in enumerate(names[:_MOST_SHOWN], 1):
        (file, key), *others = foreign[name]
        message = f"{str(name)[:200]} is needed" + (f", and at {len(others)} other places" if others else "")
        if number == _MOST_SHOWN < len(names):
            message += f"; so are {len(names) - number} other names of unknown modules"
        yield UNKNOWN.finding(message, file=file, key=key, found=str(name)[:200])


_DONE: dict[How, str] = {
    "named": "is named, which would run code in software that unpickles it",
    "bound": "gets arguments bound by functools.partial, and is none of the functions that are known to be harmless",
    "made": "is instantiated, and is none of the classes that are known to be harmless",
    "called": "is called, and is none of the functions that are known to be harmless",
    "changed": "gets attributes or items, which changes it for the whole program that unpickles it",
    "unread": "unpickles bytes that are refused or nested too deeply to be looked into",
}
_HOW: dict[How, int] = {how: number for number, how in enumerate(_DONE)}


def _used(subject: Subject) -> Iterator[tuple[Place, set[Use]]]:
    """What each stream does with names, and last what only the reader of the metadata saw."""
    seen: set[Use] = set()
    whole: set[str] = set()
    """Files of which every pickle that the metadata are read from was looked at."""
    for file, start, n_bytes, key in _streams(subject):
        try:
            read = () if key is not None else subject.read_pickles(file)
            uses = uses_of_stream(subject.store, file, start, n_bytes, read=read)
            whole.update([file] if read else ())
        except CheckpointingException:  # other checks say it
            continue
        if subject.is_explained(file):
            uses = {use for use in uses if use.how != "unread"}
        seen |= uses
        yield (file, key), uses
    for place, looked in subject.other_pickles.items() if subject.level >= Level.DEEP else ():
        seen |= looked.uses
        yield place, {*looked.uses}
    catalog = subject.catalog
    if catalog is not None and not subject.has_read_only(whole):
        common = catalog.common
        objects = {item.key: item.value for item in catalog.objects.values()}
        rest = uses_in([*objects.values(), common]) - seen  # walked as one: ranks share much
        for key, value in objects.items() if rest else ():
            yield (_file_of_array(subject, key), key), uses_in(value) - seen
        if rest:
            yield (subject.store.label, None), uses_in(common) - seen
        seen |= rest
    yield (_METADATA if _METADATA in subject.files else subject.store.label, None), with_nested(subject.uses) - seen


def _file_of_array(subject: Subject, key: str) -> str:
    """Return the metadata file of a zarr array, and the checkpoint for any other object."""
    names = (f"{key}/{name}" for name in (ARRAY_FILE, METADATA_FILE))
    return next((name for name in names if name in subject.files), subject.store.label)


def _streams(subject: Subject) -> Iterator[tuple[str, int, int, str | None]]:
    """(file, first byte, bytes, object) of whatever may hold a pickle."""
    catalog = subject.catalog
    for name, size in subject.files.items():
        is_read = name == _METADATA and subject.salvaged.catalog is not None
        if not is_read and _BARE_PICKLE.search(name) and 0 < size <= MAX_PICKLE_BYTES:
            yield name, 0, size, None
    for name in torch_files(subject, or_others=True):
        if not (_BARE_PICKLE.search(name) and subject.files[name] <= MAX_PICKLE_BYTES):  # those have been yielded
            yield name, 0, subject.files[name], None
    raw = [] if catalog is None else [item for item in catalog.objects.values() if item.raw_key is not None]
    for item in raw if subject.level > Level.METADATA else raw[:_MOST_OBJECTS]:
        assert catalog is not None and item.raw_key is not None
        try:
            stream = catalog.fragments(item.raw_key)[0].array
        except CheckpointingException:
            continue
        if stream is not None and stream.extent.encoding is None:
            yield stream.extent.file, stream.extent.offset, stream.n_bytes, item.key


def files_beside(subject: Subject) -> Iterator[Finding]:
    """CK603, CK605: programs, and names that play with a terminal."""
    for name in (*subject.files, *subject.tree.irregular):
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
