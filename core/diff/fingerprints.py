"""Find tensors that both manifests record as equal, so that they need not be read.

A manifest is trusted if every file that it lists has the recorded size and is not newer than the
manifest. Fingerprints are not cryptographic hashes (``core.fingerprint.definition``) and do not
protect against forgery.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from core.diff.sides import Side
from core.errors import CheckpointingException
from core.files.store import translate_os_errors
from core.fingerprint.definition import Fingerprint
from core.manifest.file import Manifest
from core.manifest.lookup import RecordedManifest, find_manifest


@dataclass(frozen=True, slots=True)
class RecordedEquality:
    """The tensors that manifests record as equal.

    Args:
        equal: keys of tensors whose fingerprints are equal in both.
        notes: why a manifest was not used.
    """

    equal: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


def recorded_as_equal(a: Side, b: Side) -> RecordedEquality:
    """Return the tensors that both manifests record as equal.

    There are none where a checkpoint has no fingerprints, or a manifest that cannot be trusted.
    """
    manifests: list[Manifest] = []
    for name, side in zip("AB", (a, b), strict=True):
        try:
            entry = find_manifest(side.source.store.root, entry=side.source.store.entry)
            if entry is not None and entry.failure is not None:
                raise entry.failure
            manifest = None if entry is None else entry.manifest
            if entry is None or manifest is None or not manifest.fingerprints:
                return RecordedEquality()
            reason = _distrust(side, entry, manifest)
        except CheckpointingException as err:
            reason = err.sentence
        if reason is not None:
            return RecordedEquality(notes=(f"{name}: its manifest is not used: {reason}",))
        assert manifest is not None
        manifests.append(manifest)
    first, second = manifests
    if first.scheme != second.scheme:
        return RecordedEquality(
            notes=(f"the fingerprints have different schemes, {first.scheme} and {second.scheme}",)
        )
    equal = {
        key
        for key in first.fingerprints
        if _is_equal(key, a, b, first.fingerprints, second.fingerprints)
    }
    return RecordedEquality(frozenset(equal))


def _is_equal(
    key: str,
    a: Side,
    b: Side,
    prints_a: Mapping[str, Fingerprint],
    prints_b: Mapping[str, Fingerprint],
) -> bool:
    """Return whether the fingerprints belong to these two tensors, and are equal."""
    fingerprint = prints_a[key]
    metas = a.catalog.tensors.get(key), b.catalog.tensors.get(key)
    return prints_b.get(key) == fingerprint and all(
        meta is not None and (meta.dtype, meta.shape) == (fingerprint.dtype, fingerprint.shape)
        for meta in metas
    )


def _distrust(side: Side, entry: RecordedManifest, manifest: Manifest) -> str | None:
    """Return why a manifest cannot be trusted, or None if it can."""
    store = side.source.store
    with translate_os_errors(store.label, doing="check"):
        written = os.stat(store.root.resolve() / entry.name).st_mtime_ns
        for file in manifest.files:
            path = store.path(file.path)
            if not path.is_file():
                return f"{file.path} is missing"
            status = os.stat(path)
            if status.st_size != file.n_bytes:
                return f"{file.path} has {status.st_size} bytes, not {file.n_bytes}"
            if status.st_mtime_ns > written:
                return f"{file.path} is newer than the manifest"
    return None
