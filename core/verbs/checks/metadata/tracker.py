"""CK510–CK516: check the iteration that a tracker file names, and that the save was completed.

::

    root/
    ├── latest_checkpointed_iteration.txt     Megatron's: a number, or "release"
    ├── latest, latest_universal              DeepSpeed's: the name of a directory
    └── iter_0000010/
        ├── metadata.json                     written last by Megatron
        └── .metadata                         written last by PyTorch

Source: Megatron-LM d98e8a64 ``training/checkpointing.py`` (``read_metadata``), DeepSpeed 0.19.8
``runtime/engine.py``, torch 2.13 ``torch/distributed/checkpoint/filesystem.py`` (``finish``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from core.errors import CheckpointingException, CorruptError
from core.files.source_store import SourceStore, open_store
from core.opening.iterations import ITERATION_DIR
from core.opening.locate import RELEASE, TRACKER
from core.values import n_text
from core.verbs.checks.file_codes import MISSING
from core.verbs.checks.finding import Finding, get_code
from core.verbs.checks.problems import finding_of
from core.verbs.checks.subject import Check, Subject

ABSENT = get_code("CK510")
MALFORMED = get_code("CK511")
UNFINISHED_NAMED = get_code("CK512")
NEWER = get_code("CK513")
NO_TRACKER = get_code("CK514")
UNFINISHED = get_code("CK515")
UNREADABLE = get_code("CK516")


_DEEPSPEED = ("latest", "latest_universal")
_TRACKED = (
    (re.compile(r"iter_(\d+)$"), TRACKER, "Megatron"),
    (re.compile(r"global_step(\d+)$"), "latest", "DeepSpeed"),
    (re.compile(r"global_step(\d+)_universal$"), "latest_universal", "DeepSpeed"),
)
"""Directory names of iterations, their tracker, and the software that starts over without it."""
_MAX_BYTES = 256


def check_completion(subject: Subject) -> Iterator[Finding]:
    """Check that the files that are written last exist, and that the common state does.

    Codes: CK101, CK515, CK516.
    """
    files = subject.files
    if subject.store.entry is not None or subject.format is None:
        return
    from core.formats.mcore.metadata_json import CONFIG, read_metadata_json

    # metadata.json usually names the backend.
    backend = None
    if CONFIG in files and subject.format.has_common_state:
        try:
            backend = read_metadata_json(subject.store).get("sharded_backend")
        except CorruptError as err:
            yield finding_of(err, default=UNREADABLE, file=CONFIG)
    # torch writes .metadata last, and Megatron metadata.json after that.
    if subject.format.lists_chunks:
        yield from _check_metadata_files(subject, backend)
    if CONFIG not in files and _is_megatron_core(subject):
        message = f"{CONFIG}, which Megatron writes last, is missing, so the save was not completed"
        yield UNFINISHED.missing_file(message, CONFIG)
    if backend is not None:
        yield from _check_common_state(subject, backend)


def _check_common_state(subject: Subject, backend: object) -> Iterator[Finding]:
    """Report a missing common state, without which the checkpoint cannot be opened (CK101).

    Args:
        backend: backend named by ``metadata.json``.
    """
    from core.formats.dcp.reading.data_files import METADATA
    from core.formats.mcore.common_state import COMMON_FILE

    files = subject.files
    if subject.catalog is not None or COMMON_FILE in files:
        return
    # torch_dist may keep the common state in .metadata, so only an error that names it proves that
    # it is missing.
    if backend == "zarr" or (METADATA in files and "common_state" in str(subject.failure)):
        yield MISSING.missing_file("the common state file is missing", COMMON_FILE)


def _check_metadata_files(subject: Subject, backend: object) -> Iterator[Finding]:
    """Report missing ``.metadata`` files in a directory that holds the data of a DCP save.

    Args:
        backend: backend named by ``metadata.json``; None if unknown.
    """
    from core.formats.dcp.rank_metadata import RANK_METADATA
    from core.formats.dcp.reading.data_files import METADATA
    from core.formats.dcp.reading.stored_metadata import explain_missing_metadata, metadata_files

    files = subject.files
    if any(map(RANK_METADATA.fullmatch, files)):
        return  # every rank wrote metadata of its own
    # An empty directory is not necessarily a DCP save.
    has_items = any("/" not in name and name.endswith(".distcp") for name in files)
    for name in metadata_files(subject.store):
        if name not in files and (has_items or backend == "torch_dist" or name != METADATA):
            message, hint, is_complete = explain_missing_metadata(name, subject.store)
            code = MISSING if is_complete else UNFINISHED
            yield code.missing_file(message, name, hint=hint)


def _is_megatron_core(subject: Subject) -> bool:
    """Return whether a directory without ``metadata.json`` is a save of Megatron-core."""
    assert subject.format is not None
    if subject.format.has_common_state:
        from core.formats.mcore.common_state import COMMON_FILE

        return COMMON_FILE in subject.files
    catalog = subject.salvaged.catalog if subject.format.lists_chunks else None
    if catalog is None:
        return False
    from core.megatron.extras.sharded_objects import COMMON_OBJECT

    return COMMON_OBJECT in catalog.objects


def check_trackers(subject: Subject) -> Iterator[Finding]:
    """Check the trackers in the checkpoint's directory and in those above it, up to the root.

    Codes: CK510–CK514.
    """
    for root in (*subject.passed, subject.path):
        if not root.is_dir():
            continue
        store = open_store(root)
        try:
            yield from _check_trackers_in(subject, store, is_above=root in subject.passed)
        except CheckpointingException as err:
            yield finding_of(err, default=MALFORMED)
        finally:
            store.close()


def _check_trackers_in(
    subject: Subject, store: SourceStore, *, is_above: bool
) -> Iterator[Finding]:
    """Check the trackers in one directory, and report iterations that lack one (CK514).

    Args:
        is_above: the directory is above the checkpoint, so a tracker is expected.
    """
    files, folders = set(store.files()), store.folders()
    if TRACKER in files:
        yield from _check_megatron_tracker(subject, store, folders)
    for name in _DEEPSPEED:
        if name in files:
            yield from _check_deepspeed_tracker(subject, store, name)
    # Without any tracker, the software that looks for it would start over.
    if not is_above or TRACKER in files or files.intersection(_DEEPSPEED):
        return
    for pattern, tracker, software in _TRACKED:
        n_iterations = sum(pattern.match(name) is not None for name in folders)
        if n_iterations:
            yield NO_TRACKER.missing_file(
                f"the directory contains {n_text(n_iterations, 'iteration')} but no {tracker}, so "
                f"{software} would start over",
                _relative(subject, store, tracker),
                expected=tracker,
            )


def _read_tracker(store: SourceStore, name: str) -> str:
    """Read the text of a tracker file."""
    return store.read(name, 0, min(store.size(name), _MAX_BYTES)).decode("utf-8", "replace").strip()


def _relative(subject: Subject, store: SourceStore, name: str) -> str:
    """Return the path of a file relative to the checkpoint."""
    folder = subject.path if subject.path.is_dir() else subject.path.parent
    return os.path.relpath(str(store.root / name), str(folder))


def _check_megatron_tracker(
    subject: Subject, store: SourceStore, folders: list[str]
) -> Iterator[Finding]:
    """Check Megatron's tracker: its text, the checkpoint that it names, and newer iterations."""
    text, file = _read_tracker(store, TRACKER), _relative(subject, store, TRACKER)
    numbers = {int(match[1]): name for name in folders if (match := ITERATION_DIR.match(name))}
    # The text must be "release" or the number of an iteration.
    if text == RELEASE:
        name = RELEASE
    elif text.isascii() and text.isdigit():
        name = numbers.get(int(text), f"iter_{int(text):07d}")
    else:
        yield MALFORMED.finding(
            "the tracker contains neither a number nor 'release'",
            file=file,
            expected="the number of an iteration",
            found=repr(text[:40]),
        )
        return
    # The named checkpoint must exist and be complete, and should be the newest.
    if name not in folders:
        yield _missing_checkpoint(
            name, file, found=", ".join(map(str, sorted(numbers)[-4:])) or "no iteration"
        )
        return
    yield from _check_named_checkpoint(subject, name, file)
    newest = max(numbers, default=0)
    if text != RELEASE and newest > int(text):
        yield NEWER.finding(
            "a newer iteration exists, so its save was not completed or the tracker was set back",
            file=file,
            expected=f"iteration {newest}",
            found=f"iteration {int(text)}",
        )


def _check_deepspeed_tracker(
    subject: Subject, store: SourceStore, tracker: str
) -> Iterator[Finding]:
    """Check one of DeepSpeed's trackers: its text and the checkpoint that it names."""
    name, file = _read_tracker(store, tracker), _relative(subject, store, tracker)
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        yield MALFORMED.finding(
            "the tracker does not contain a directory name",
            file=file,
            expected="a directory name",
            found=repr(name[:40]),
        )
    elif not (store.root / name).is_dir():
        yield _missing_checkpoint(name, file, found="no such directory")
    else:
        yield from _check_named_checkpoint(subject, name, file)


def _missing_checkpoint(name: str, file: str, *, found: str) -> Finding:
    """Build the finding for a tracker that names a missing checkpoint."""
    return ABSENT.finding(
        f"the tracker names {name}, which does not exist", file=file, expected=name, found=found
    )


def _check_named_checkpoint(subject: Subject, name: str, file: str) -> Iterator[Finding]:
    """Report a tracker that names the examined checkpoint although it is incomplete (CK512)."""
    if subject.path.name != name:
        return
    is_unfinished = any(finding.code == UNFINISHED.code for finding in subject.findings)
    if subject.format is None or is_unfinished:
        yield UNFINISHED_NAMED.finding(
            f"the tracker names {name}, which is not a complete checkpoint",
            file=file,
            expected="a complete checkpoint",
            found="not a supported checkpoint format"
            if subject.format is None
            else "an incomplete checkpoint",
        )


CHECKS = (Check(check_completion), Check(check_trackers))
