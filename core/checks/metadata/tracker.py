"""CK510–CK516: which iteration a tracker names, and whether a save was finished.

::

    root/
    ├── latest_checkpointed_iteration.txt     Megatron's: a number, or "release"
    ├── latest, latest_universal              DeepSpeed's: a directory's name
    └── iter_0000010/
        ├── metadata.json                     Megatron writes it last
        └── .metadata                         PyTorch writes it last

Source: Megatron-LM d98e8a64 ``training/checkpointing.py`` (``read_metadata``), DeepSpeed 0.19.8 ``runtime/engine.py``,
torch 2.13 ``torch/distributed/checkpoint/filesystem.py`` (``finish``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from core.checks.check import Check, Code
from core.checks.file_codes import MISSING
from core.checks.finding import Finding, Severity
from core.checks.problems import finding_of
from core.checks.subject import Subject
from core.errors import CheckpointingException, CorruptError
from core.files.store import LocalStore
from core.formats.dcp.format import METADATA, metadata_files
from core.formats.dcp.rank_metadata import RANK_METADATA
from core.formats.mcore.common_state import COMMON_FILE
from core.formats.mcore.metadata_json import CONFIG, config_of
from core.formats.mcore.objects import COMMON_OBJECT
from core.opening.open import ITERATION_DIR, RELEASE, TRACKER

ABSENT = Code(
    "CK510", Severity.ERROR, "the tracker names what is not there", "correct the tracker, or pass --iteration"
)
MALFORMED = Code("CK511", Severity.ERROR, "the tracker is malformed", "write the iteration's number into it")
UNFINISHED_NAMED = Code(
    "CK512", Severity.ERROR, "the tracker names an unfinished checkpoint", "write the number of an older one into it"
)
NEWER = Code("CK513", Severity.NOTE, "there is a newer iteration than the tracker's", "pass --iteration to look at it")
NO_TRACKER = Code(
    "CK514",
    Severity.WARNING,
    "iterations without a tracker",
    "write the newest whole iteration's number into a tracker",
)
UNFINISHED = Code("CK515", Severity.ERROR, "the save was not finished", "use an older checkpoint")
UNREADABLE = Code("CK516", Severity.ERROR, "metadata.json cannot be read", "copy the checkpoint again")

CODES = (ABSENT, MALFORMED, UNFINISHED_NAMED, NEWER, NO_TRACKER, UNFINISHED, UNREADABLE)

_DEEPSPEED = ("latest", "latest_universal")
_TRACKED = (
    (re.compile(r"iter_(\d+)$"), TRACKER, "Megatron"),
    (re.compile(r"global_step(\d+)$"), "latest", "DeepSpeed"),
    (re.compile(r"global_step(\d+)_universal$"), "latest_universal", "DeepSpeed"),
)
"""Directories of iterations, their tracker, and who begins anew without it."""
_MAX_BYTES = 256


def unfinished(subject: Subject) -> Iterator[Finding]:
    """CK515, CK516, CK101: what is written last is there, and so is the common state."""
    files = subject.files
    if subject.store.entry is not None or subject.format is None:
        return
    has_items = any("/" not in name and name.endswith(".distcp") for name in files)
    has_ranks = any(map(RANK_METADATA.fullmatch, files))
    backend = None
    if CONFIG in files and subject.format.name in ("torch_dist", "zarr"):
        try:
            backend = config_of(subject.store).get("sharded_backend")
        except CorruptError as err:
            yield finding_of(err, default=UNREADABLE, file=CONFIG)
    is_dcp = subject.format.name in ("dcp", "torch_dist")
    for name in metadata_files(subject.store) if is_dcp and not has_ranks else ():
        if name not in files and (has_items or backend == "torch_dist" or name != METADATA):
            yield _last(name, "torch", found="unfinished, .metadata.tmp" if f"{name}.tmp" in files else "no such file")
    if CONFIG not in files and _is_megatron(subject):
        yield _last(CONFIG, "Megatron", found="no such file")
    if backend is not None and subject.catalog is None and COMMON_FILE not in files:
        if backend == "zarr" or (METADATA in files and "common_state" in str(subject.failure)):
            yield MISSING.finding(
                "the common state is not there", file=COMMON_FILE, expected=COMMON_FILE, found="no such file"
            )


def _is_megatron(subject: Subject) -> bool:
    """Whether a directory without ``metadata.json`` was to become one of Megatron-core's checkpoints."""
    assert subject.format is not None
    if subject.format.name == "dcp":
        catalog = subject.salvaged.catalog
        return catalog is not None and COMMON_OBJECT in catalog.objects
    if subject.format.name not in ("torch_dist", "zarr"):
        return False
    return COMMON_FILE in subject.files


def _last(name: str, who: str, *, found: str) -> Finding:
    return UNFINISHED.finding(
        f"{name} is not there; {who} writes it last, so the save did not finish", file=name, expected=name, found=found
    )


def trackers(subject: Subject) -> Iterator[Finding]:
    """CK510–CK514, of the checkpoint's directory and of each that was descended through."""
    for root in (*subject.passed, subject.path):
        if not root.is_dir():
            continue
        store = LocalStore(root)
        try:
            files = set(store.files())
            folders = store.folders()
            if TRACKER in files:
                yield from _megatron(subject, store, folders)
            for name in _DEEPSPEED:
                if name in files:
                    yield from _deepspeed(subject, store, name)
            if root in subject.passed and TRACKER not in files and not files.intersection(_DEEPSPEED):
                yield from _no_tracker(subject, store, folders)
        except CheckpointingException as err:
            yield finding_of(err, default=MALFORMED)
        finally:
            store.close()


def _text(store: LocalStore, name: str) -> str:
    return store.read(name, 0, min(store.size(name), _MAX_BYTES)).decode("utf-8", "replace").strip()


def _relative(subject: Subject, store: LocalStore, name: str) -> str:
    return os.path.relpath(store.root / name, subject.path if subject.path.is_dir() else subject.path.parent)


def _megatron(subject: Subject, store: LocalStore, folders: list[str]) -> Iterator[Finding]:
    text, file = _text(store, TRACKER), _relative(subject, store, TRACKER)
    numbers = {int(found[1]): name for name in folders if (found := ITERATION_DIR.match(name))}
    if text == RELEASE:
        name = RELEASE
    elif text.isascii() and text.isdigit():
        name = numbers.get(int(text), f"iter_{int(text):07d}")
    else:
        yield MALFORMED.finding(
            "the tracker holds neither a number nor 'release'",
            file=file,
            expected="an iteration's number",
            found=repr(text[:40]),
        )
        return
    if name not in folders:
        yield _absent(name, file, found=", ".join(map(str, sorted(numbers)[-4:])) or "no iteration")
        return
    yield from _named(subject, name, file)
    newest = max(numbers, default=0)
    if text != RELEASE and newest > int(text):
        yield NEWER.finding(
            "a newer iteration is there; its save may not have been finished, or the tracker was set back",
            file=file,
            expected=f"iteration {newest}",
            found=f"iteration {int(text)}",
        )


def _deepspeed(subject: Subject, store: LocalStore, tracker: str) -> Iterator[Finding]:
    name, file = _text(store, tracker), _relative(subject, store, tracker)
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        yield MALFORMED.finding(
            "the tracker holds no directory's name", file=file, expected="a name", found=repr(name[:40])
        )
    elif not (store.root / name).is_dir():
        yield _absent(name, file, found="no such directory")
    else:
        yield from _named(subject, name, file)


def _absent(name: str, file: str, *, found: str) -> Finding:
    return ABSENT.finding(f"the tracker names {name}, which is not there", file=file, expected=name, found=found)


def _named(subject: Subject, name: str, file: str) -> Iterator[Finding]:
    """CK512, if the directory is the one under examination."""
    if subject.path.name != name:
        return
    if subject.format is None or any(finding.code == UNFINISHED.code for finding in subject.findings):
        yield UNFINISHED_NAMED.finding(
            f"the tracker names {name}, which is no whole checkpoint",
            file=file,
            expected="a whole checkpoint",
            found="an unfinished one" if subject.format is not None else "no checkpoint in a known format",
        )


def _no_tracker(subject: Subject, store: LocalStore, folders: list[str]) -> Iterator[Finding]:
    for pattern, tracker, who in _TRACKED:
        found = [name for name in folders if pattern.match(name)]
        if found:
            yield NO_TRACKER.finding(
                f"there are {len(found)} iterations, but no {tracker}: {who} would begin anew",
                file=_relative(subject, store, tracker),
                expected=tracker,
                found="no such file",
            )


CHECKS = (Check(unfinished), Check(trackers))
