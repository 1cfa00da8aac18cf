"""Read the fingerprints to compare with (``--against``) from a manifest or a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from core.device.device import Device
from core.errors import UsageError
from core.files.store import LocalStore
from core.fingerprint.definition import SCHEME, Fingerprint
from core.manifest.file import Manifest, read_manifest
from core.manifest.fingerprint_share import fingerprints_of_directory
from core.manifest.lookup import find_manifest, is_manifest
from core.megatron.reshard.reshard import Rules
from core.opening.open import locate_checkpoint
from core.scan.run import DEFAULT_MEMORY_BYTES
from core.team.protocol import ALONE, Figures, Team, broadcast_result

_DEFAULT_THREADS = 2


@dataclass(frozen=True, slots=True)
class ReferenceFingerprints:
    """The fingerprints that a checkpoint is compared with.

    Args:
        label: where the fingerprints come from, for messages.
        fingerprints: canonical tensor name → fingerprint.
        figures: work of the ranks that read the data; () if a manifest holds the fingerprints.
    """

    label: str
    fingerprints: Mapping[str, Fingerprint]
    figures: tuple[Figures, ...] = ()


def read_reference(
    path: Path,
    *,
    rules: Rules,
    threads: int | None = None,
    memory_bytes: int | None = DEFAULT_MEMORY_BYTES,
    team: Team = ALONE,
    device: Device | None = None,
) -> ReferenceFingerprints:
    """Return the fingerprints of a manifest or a checkpoint.

    A checkpoint that has a manifest with fingerprints is not read itself.

    Args:
        path: a manifest file, or a checkpoint as ``core.opening.open`` accepts it.
        rules: layout rules.
        threads, memory_bytes: limits for reading data.
        device: accelerator that may compute fingerprints; None for the CPU.
        team: ranks that share the reading; only the lead gets fingerprints that had to be computed.

    Raises:
        UsageError: the path does not exist, or the manifest has no usable fingerprints.
        CheckpointingException: the manifest or the checkpoint cannot be read.
    """
    reference = broadcast_result(team, lambda: _from_manifest(path))
    if reference is not None:
        return reference
    result = fingerprints_of_directory(
        path,
        rules=rules,
        threads=threads or _DEFAULT_THREADS,
        memory_bytes=memory_bytes,
        team=team,
        device=device,
    )
    return ReferenceFingerprints(str(path), result.fingerprints, result.figures)


def _from_manifest(path: Path) -> ReferenceFingerprints | None:
    """Return the fingerprints of the manifest at or of ``path``; None if it has none."""
    # The path is a manifest itself.
    if path.is_file() and (is_manifest(path.name) or _holds_schema(path)):
        store = LocalStore(path.parent)
        try:
            return _checked(read_manifest(store, path.name), str(path))
        finally:
            store.close()
    # The path is a checkpoint, which may have a manifest.
    place = locate_checkpoint(path)
    place.store.close()
    record = find_manifest(place.store.root, entry=place.store.entry)
    if record is not None and record.manifest is not None and record.manifest.scheme == SCHEME:
        return ReferenceFingerprints(f"the manifest of {path}", record.manifest.fingerprints)
    return None


def _holds_schema(path: Path) -> bool:
    """Return whether a JSON file begins like a manifest, whatever it is called."""
    if path.suffix != ".json":
        return False
    with path.open("rb") as file:
        return b'"ckpt-manifest"' in file.read(200)


def _checked(manifest: Manifest, label: str) -> ReferenceFingerprints:
    """Return the fingerprints of a manifest; raise UsageError if it has none of this scheme."""
    if manifest.scheme != SCHEME:
        content = (
            "no fingerprints"
            if manifest.scheme is None
            else f"fingerprints {manifest.scheme}, not {SCHEME}"
        )
        raise UsageError(
            f"--against: the manifest has {content}",
            file=label,
            hint="write it with ckpt manifest, or ckpt convert --fingerprint; or name the checkpoint itself",
        )
    return ReferenceFingerprints(label, manifest.fingerprints)
