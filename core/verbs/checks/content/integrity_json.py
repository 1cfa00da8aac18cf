"""CK810–CK813: check Megatron's ``integrity.json``, written last with ``--verify-integrity``::

    {"algorithm": "sha256", "files": {"__0_0.distcp": "9f86d081…", "metadata.json": "…"}}

It lists the files directly in the checkpoint's directory, without sizes. Names that lead elsewhere
are not followed.

Source: Megatron-LM ``megatron/core/dist_checkpointing/_ranks/integrity.py`` (core 0.17 and later).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from threading import Lock
from typing import TYPE_CHECKING

from core.errors import CheckpointingException, CorruptError
from core.files.json_object import read_json_object
from core.verbs.checks.finding import Finding, Level, get_code
from core.verbs.checks.subject import Check, Subject

if TYPE_CHECKING:
    from core.verbs.checks.watch import Watch

INTEGRITY = "integrity.json"
_ALGORITHM = "sha256"

BROKEN = get_code("CK810")
MISSING = get_code("CK811")
CONTENT = get_code("CK812")
UNLISTED = get_code("CK813")


class _Hashes:
    """The SHA-256 of files, computed during the scan (a ``scan.observer.FileObserver``)."""

    in_order = True

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._open: dict[str, hashlib._Hash] = {}
        self._lock = Lock()
        self.sums: dict[str, str] = {}

    def reads(self, file: str, n_bytes: int) -> bool:
        """Return whether the file is to be hashed."""
        return file in self._names

    def feed_file(self, file: str, offset: int, data: memoryview) -> None:
        """Add the next bytes of a file to its hash."""
        # Threads read different files, so only the table needs the lock.
        with self._lock:
            state = self._open.setdefault(file, hashlib.sha256())
        state.update(data)

    def finish_file(self, file: str) -> None:
        """Store the hash of a file, which has been read to its end."""
        with self._lock:
            # An empty file has no bytes to feed.
            state = self._open.pop(file, None) or hashlib.sha256()
            self.sums[file] = state.hexdigest()

    def state(self) -> dict[str, str]:
        """Return the hashes computed on this rank, to be merged on the lead rank."""
        return self.sums

    def merge(self, state: dict[str, str]) -> None:
        """Add the hashes of another rank."""
        self.sums |= state


def watch(subject: Subject) -> Watch:
    """Request the SHA-256 of the listed files."""
    from core.verbs.checks.watch import Watch

    names = sha256_names(subject)
    return Watch(file_observers=(_Hashes(names),)) if names else Watch()


def sha256_names(subject: Subject) -> frozenset[str]:
    """Return the names of existing files whose SHA-256 is listed."""
    listed = _read_listed(subject)
    if not isinstance(listed, Mapping):
        return frozenset()
    return frozenset(name for name in listed if name in subject.files)


def _read_listed(subject: Subject) -> Mapping[str, str] | CheckpointingException | None:
    """Read ``integrity.json``.

    Returns:
        file name → SHA-256; the error if it cannot be read; None without such a file.
    """
    if subject.store.entry is not None or INTEGRITY not in subject.files:
        return None
    try:
        content = read_json_object(subject.store, INTEGRITY)
        files, algorithm = content.get("files"), content.get("algorithm", _ALGORITHM)
        if algorithm != _ALGORITHM:
            raise CorruptError(
                f"the checksum algorithm is {algorithm!r}, but ckpt supports only {_ALGORITHM}",
                file=INTEGRITY,
            )
        if not isinstance(files, dict) or not all(
            isinstance(value, str) for value in files.values()
        ):
            raise CorruptError('"files" does not map file names to checksums', file=INTEGRITY)
    except CheckpointingException as err:
        return err
    return files


def check_listed_files(subject: Subject) -> Iterator[Finding]:
    """Check that listed files exist and files with tensors are listed (CK811, CK813)."""
    listed = _read_listed(subject)
    if listed is None:
        return
    if isinstance(listed, CheckpointingException):
        yield BROKEN.finding(listed.message, file=INTEGRITY)
        return
    for name in listed:
        if name in subject.files or subject.is_covered_by_finding(name):
            continue
        message = (
            "integrity.json lists a path instead of a file name"
            if "/" in name
            else "integrity.json lists the file, but it is missing"
        )
        yield MISSING.missing_file(message, name, expected="a file")
    for name in subject.files:
        if name.endswith(".distcp") and "/" not in name and name not in listed:
            yield UNLISTED.finding("integrity.json does not list the file", file=name)


def check_hashes(subject: Subject) -> Iterator[Finding]:
    """Compare the SHA-256 of every listed file with the list (CK812)."""
    listed = _read_listed(subject)
    if not isinstance(listed, Mapping):
        return
    observers = subject.byte_scan.watches["content.integrity_json"].file_observers
    actual: dict[str, str] = {}
    for observer in observers:
        if isinstance(observer, _Hashes):
            actual |= observer.sums
    for name, expected in listed.items():
        if name in actual and actual[name] != expected.lower():
            yield CONTENT.finding(
                "the file has been changed or damaged since the save",
                file=name,
                expected=f"SHA-256 {expected[:64]}",
                found=actual[name],
            )


CHECKS = (Check(check_listed_files), Check(check_hashes, Level.DEEP))
