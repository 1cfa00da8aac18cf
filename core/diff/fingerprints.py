"""Tensors whose manifests say that they are equal: those need not be read.

A manifest is believed if every file that it lists has the stated size and is no younger than it. Fingerprints are no
cryptographic hashes (``core.fingerprint.definition``): whoever wants to deceive can.
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
class Stated:
    """What manifests say.

    Args:
        equal: keys of tensors whose fingerprints are equal in both.
        notes: why a manifest was not used.
    """

    equal: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


def stated_equal(a: Side, b: Side) -> Stated:
    """The tensors that both manifests call equal; none where one of them has no fingerprints, or is not believed."""
    found: list[Manifest] = []
    for name, side in zip("AB", (a, b), strict=True):
        try:
            known = find_manifest(side.source.store.root, entry=side.source.store.entry)
            if known is not None and known.failure is not None:
                raise known.failure
            manifest = None if known is None else known.manifest
            if known is None or manifest is None or not manifest.fingerprints:
                return Stated()
            why = _distrust(side, known, manifest)
        except CheckpointingException as err:
            why = err.sentence
        if why is not None:
            return Stated(notes=(f"{name}: its manifest is not used: {why}",))
        assert manifest is not None
        found.append(manifest)
    one, other = found
    if one.scheme != other.scheme:
        return Stated(notes=(f"the fingerprints are of different schemes, {one.scheme} and {other.scheme}",))
    equal = {key for key in one.fingerprints if _is_equal(key, a, b, one.fingerprints, other.fingerprints)}
    return Stated(frozenset(equal))


def _is_equal(key: str, a: Side, b: Side, one: Mapping[str, Fingerprint], other: Mapping[str, Fingerprint]) -> bool:
    """Whether the fingerprints are of these two tensors, and equal."""
    first = one[key]
    metas = a.catalog.tensors.get(key), b.catalog.tensors.get(key)
    return other.get(key) == first and all(
        meta is not None and (meta.dtype, meta.shape) == (first.dtype, first.shape) for meta in metas
    )


def _distrust(side: Side, known: RecordedManifest, manifest: Manifest) -> str | None:
    """Why a manifest is not believed, or None."""
    store = side.source.store
    with translate_os_errors(store.label, doing="check"):
        written = os.stat(store.root.resolve() / known.name).st_mtime_ns
        for file in manifest.files:
            path = store.path(file.path)
            if not path.is_file():
                return f"{file.path} is not there"
            status = os.stat(path)
            if status.st_size != file.n_bytes:
                return f"{file.path} has {status.st_size} bytes, not {file.n_bytes}"
            if status.st_mtime_ns > written:
                return f"{file.path} is younger than it"
    return None
