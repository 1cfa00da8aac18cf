"""Find tensors that both manifests record as equal, so that they need not be read.

A manifest is trusted if every file that it lists exists, has the recorded size and is not newer
than the manifest. Fingerprints are not cryptographic hashes
(``core.engine.fingerprint.definition``) and do not protect against forgery.
"""

from __future__ import annotations

import os

from core.engine.fingerprint.definition import Fingerprint
from core.errors import CheckpointingException, CorruptError
from core.files.store import translate_os_errors
from core.publish.manifest.file import Manifest
from core.publish.manifest.lookup import find_manifest
from core.values import dataclass
from core.verbs.diff.sides import Side


@dataclass(frozen=True, slots=True)
class RecordedEquality:
    """The tensors that both manifests record as equal.

    Args:
        equal: keys of tensors whose fingerprints are equal in both.
        notes: why a manifest was not used.
    """

    equal: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


def recorded_as_equal(a: Side, b: Side) -> RecordedEquality:
    """Find the tensors that both manifests record as equal.

    There are none if a checkpoint has no fingerprints; nor if a manifest cannot be read or trusted,
    but then a note gives the reason.
    """
    manifests: list[Manifest] = []
    for name, side in zip("AB", (a, b), strict=True):
        try:
            manifest = _trusted_manifest(side)
        except CheckpointingException as err:
            note = f"the manifest of {name} is not used: {err.sentence}"
            return RecordedEquality(notes=(note,))
        if manifest is None:
            return RecordedEquality()
        manifests.append(manifest)
    first, second = manifests
    if first.scheme != second.scheme:
        note = f"the fingerprints use different schemes, {first.scheme} and {second.scheme}"
        return RecordedEquality(notes=(note,))

    # A fingerprint is valid for the comparison only if it is of a tensor of that dtype and shape:
    # options such as --strip-prefix may have given its key to another tensor.
    def is_of_side(key: str, side: Side, fingerprint: Fingerprint) -> bool:
        tensor = side.catalog.tensors.get(key)
        form = (fingerprint.dtype, fingerprint.shape)
        return tensor is not None and (tensor.dtype, tensor.shape) == form

    equal = frozenset(
        key
        for key, fingerprint in first.fingerprints.items()
        if second.fingerprints.get(key) == fingerprint
        and is_of_side(key, a, fingerprint)
        and is_of_side(key, b, fingerprint)
    )
    return RecordedEquality(equal)


def _trusted_manifest(side: Side) -> Manifest | None:
    """Return the manifest of a side, or None without a manifest or fingerprints in it.

    Raises:
        CorruptError: the manifest is damaged, or a file is missing, has another size or is newer.
        UnsafeError: the manifest names a file outside the checkpoint.
        CheckpointingException: the manifest or a file cannot be read.
    """
    store = side.source.store
    entry = find_manifest(store.root, entry=store.entry)
    if entry is None:
        return None
    if entry.failure is not None:
        raise entry.failure
    manifest = entry.manifest
    if manifest is None or not manifest.fingerprints:
        return None

    # Compare size and time of every listed file; reading them would take as long as comparing.
    with translate_os_errors(store.label, doing="check"):
        written = os.stat(store.root.resolve() / entry.name).st_mtime_ns
        for file in manifest.files:
            path = store.path(file.path)
            if not path.is_file():
                raise CorruptError(f"{file.path} is missing")
            status = os.stat(path)
            if status.st_size != file.n_bytes:
                raise CorruptError(
                    f"{file.path} is {status.st_size} bytes long, not {file.n_bytes}"
                )
            if status.st_mtime_ns > written:
                raise CorruptError(f"{file.path} is newer than the manifest")
    return manifest
