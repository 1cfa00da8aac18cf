"""CK810–CK813: Megatron's ``integrity.json``, which ``--verify-integrity`` has it write last::

    {"algorithm": "sha256", "files": {"__0_0.distcp": "9f86d081…", "metadata.json": "…"}}

It lists the files that lie directly in the checkpoint's directory, without sizes. Names that lead elsewhere are not
followed.

Source: Megatron-LM ``megatron/core/dist_checkpointing/_ranks/integrity.py`` (core 0.17 and later).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from threading import Lock

from core.checks.check import Check, Code
from core.checks.finding import Finding, Severity
from core.checks.level import Level
from core.checks.subject import Subject
from core.checks.watch import Watch
from core.errors import CheckpointingException, CorruptError
from core.files.json_object import read_json_object

INTEGRITY = "integrity.json"
_ALGORITHM = "sha256"
_AGAIN = "copy the checkpoint again; Megatron refuses to load it with --verify-integrity"

BROKEN = Code("CK810", Severity.ERROR, "integrity.json cannot be read", _AGAIN)
MISSING = Code("CK811", Severity.ERROR, "a file that integrity.json lists is missing", _AGAIN)
CONTENT = Code("CK812", Severity.ERROR, "a file's SHA-256 is not that of integrity.json", _AGAIN, Level.DEEP)
UNLISTED = Code(
    "CK813",
    Severity.NOTE,
    "integrity.json does not list a file with tensors",
    "the file was added after the save, or integrity.json is that of another save",
)

CODES = (BROKEN, MISSING, CONTENT, UNLISTED)


class _Hashes:
    """SHA-256 of files, see ``core.scan.observer.FileObserver``."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._open: dict[str, hashlib._Hash] = {}
        self._lock = Lock()
        self.found: dict[str, str] = {}

    def reads(self, file: str, n_bytes: int) -> bool:
        """See ``core.scan.observer.FileObserver``."""
        return file in self._names

    def feed_file(self, file: str, offset: int, data: memoryview) -> None:
        """See ``core.scan.observer.FileObserver``."""
        with self._lock:
            state = self._open.setdefault(file, hashlib.sha256())
        state.update(data)

    def finish_file(self, file: str) -> None:
        """See ``core.scan.observer.FileObserver``."""
        with self._lock:
            state = self._open.pop(file, None) or hashlib.sha256()
            self.found[file] = state.hexdigest()

    def state(self) -> dict[str, str]:
        """See ``core.scan.observer.FileObserver``."""
        return self.found

    def merge(self, state: dict[str, str]) -> None:
        """See ``core.scan.observer.FileObserver``."""
        self.found |= state


def watch(subject: Subject) -> Watch:
    """The SHA-256 of the files that are listed."""
    names = sha256_names(subject)
    return Watch(file_observers=(_Hashes(names),)) if names else Watch()


def sha256_names(subject: Subject) -> frozenset[str]:
    """The files whose SHA-256 is stated."""
    listed = _listed(subject)
    return frozenset(name for name in listed if name in subject.files) if isinstance(listed, Mapping) else frozenset()


def _listed(subject: Subject) -> Mapping[str, str] | CheckpointingException | None:
    """File name → SHA-256, or why they cannot be read; None if there is no such file."""
    if subject.store.entry is not None or INTEGRITY not in subject.files:
        return None
    try:
        found = read_json_object(subject.store, INTEGRITY)
        files, algorithm = found.get("files"), found.get("algorithm", _ALGORITHM)
        if algorithm != _ALGORITHM:
            raise CorruptError(f"algorithm {algorithm!r} is not {_ALGORITHM}", file=INTEGRITY)
        if not isinstance(files, dict) or not all(isinstance(one, str) for one in files.values()):
            raise CorruptError("it holds no names with their sums", file=INTEGRITY)
    except CheckpointingException as err:
        return err
    return files


def names(subject: Subject) -> Iterator[Finding]:
    """Every file that is listed is there."""
    listed = _listed(subject)
    if listed is None:
        return
    if isinstance(listed, CheckpointingException):
        yield BROKEN.finding(listed.message, file=INTEGRITY)
        return
    for name in listed:
        if name in subject.files or subject.is_explained(name):
            continue
        message = "it leads out of the checkpoint" if "/" in name else "integrity.json lists it"
        yield MISSING.finding(message, file=name, expected="a file", found="nothing")
    for name in subject.files:
        if name.endswith(".distcp") and "/" not in name and name not in listed:
            yield UNLISTED.finding("integrity.json does not list it", file=name)


def contents(subject: Subject) -> Iterator[Finding]:
    """Every file that is listed has its SHA-256."""
    listed = _listed(subject)
    if not isinstance(listed, Mapping):
        return
    observers = subject.deep.watches["content.integrity_json"].file_observers
    found = {name: one for each in observers if isinstance(each, _Hashes) for name, one in each.found.items()}
    for name, expected in listed.items():
        if name in found and found[name] != expected.lower():
            yield CONTENT.finding(
                "it was changed or damaged since the save",
                file=name,
                expected=f"SHA-256 {expected[:64]}",
                found=found[name],
            )


CHECKS = (Check(names), Check(contents, Level.DEEP))
