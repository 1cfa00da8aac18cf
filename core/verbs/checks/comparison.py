"""Read the fingerprints to compare with (``--against``) from a manifest or a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from core.engine.device.device import Device
from core.engine.fingerprint.definition import SCHEME, Fingerprint
from core.engine.scan.run import DEFAULT_MEMORY_BYTES
from core.engine.team.protocol import ALONE, Figures, Team, broadcast_result
from core.errors import UsageError
from core.files.source_store import open_store
from core.megatron.rules.rules import Rules
from core.opening.locate import locate_checkpoint
from core.progress import OnProgress
from core.publish.manifest.file import read_manifest
from core.publish.manifest.fingerprint_share import fingerprints_of_directory
from core.publish.manifest.lookup import find_manifest, is_manifest
from core.values import dataclass

_DEFAULT_THREADS = 2


@dataclass(frozen=True, slots=True)
class ReferenceFingerprints:
    """The fingerprints that a checkpoint is compared with.

    Args:
        label: where the fingerprints come from, for messages.
        fingerprints: canonical tensor name → fingerprint.
        figures: work of the ranks that read the data; () if a manifest holds the fingerprints.
        path: the other checkpoint; None if only its manifest was given.
    """

    label: str
    fingerprints: Mapping[str, Fingerprint]
    figures: tuple[Figures, ...] = ()
    path: Path | None = None


def read_reference(
    path: Path,
    *,
    rules: Rules,
    threads: int | None = None,
    memory_bytes: int | None = DEFAULT_MEMORY_BYTES,
    progress: OnProgress | None = None,
    team: Team = ALONE,
    device: Device | None = None,
) -> ReferenceFingerprints:
    """Read the fingerprints from a manifest, or from the manifest or the data of a checkpoint.

    The data of a checkpoint is read only if it has no manifest with fingerprints.

    Args:
        path: a manifest file, or a checkpoint as ``core.opening.open`` accepts it.
        rules: layout rules.
        threads, memory_bytes: limits for reading data.
        progress: called with the number of bytes that this process has read.
        device: accelerator that may compute fingerprints; None for the CPU.
        team: ranks that share the reading; only the lead gets fingerprints that had to be computed.

    Raises:
        UsageError: the path does not exist, or the manifest has no usable fingerprints.
        CheckpointingException: the manifest or the checkpoint cannot be read.
    """
    # The lead looks for a manifest and shares it, so that all ranks take the same branch.
    reference = broadcast_result(team, lambda: _read_from_manifest(path))
    if reference is not None:
        return reference
    # Without one, all ranks together compute the fingerprints from the data.
    result = fingerprints_of_directory(
        path,
        rules=rules,
        threads=threads or _DEFAULT_THREADS,
        memory_bytes=memory_bytes,
        progress=progress,
        team=team,
        device=device,
    )
    return ReferenceFingerprints(str(path), result.fingerprints, result.figures, path)


def _read_from_manifest(path: Path) -> ReferenceFingerprints | None:
    """Read the fingerprints from a manifest file, or from the manifest of a checkpoint.

    Returns:
        None if the path is a checkpoint without a manifest that holds usable fingerprints.

    Raises:
        UsageError: the path is a manifest without fingerprints of the current scheme.
    """
    # A manifest may have any name that ends in .json; its schema is within the first bytes.
    is_manifest_file = path.is_file() and is_manifest(path.name)
    if path.is_file() and not is_manifest_file and path.suffix == ".json":
        with closing(open_store(path.parent)) as store:
            head = store.read(path.name, 0, min(200, store.size(path.name)))
            is_manifest_file = b'"ckpt-manifest"' in head
    # The user chose this manifest, so it must have fingerprints of this scheme.
    if is_manifest_file:
        store = open_store(path.parent)
        try:
            manifest = read_manifest(store, path.name)
        finally:
            store.close()
        if manifest.scheme == SCHEME:
            return ReferenceFingerprints(str(path), manifest.fingerprints)
        content = (
            "no fingerprints"
            if manifest.scheme is None
            else f"{manifest.scheme} fingerprints, not {SCHEME} fingerprints"
        )
        raise UsageError(
            f"--against: the manifest has {content}",
            file=str(path),
            hint="write a manifest with fingerprints (ckpt manifest PATH --force), or pass the "
            "checkpoint itself",
        )
    # The manifest of a checkpoint only saves time: if it is unusable, the data is read instead.
    place = locate_checkpoint(path)
    place.store.close()
    record = find_manifest(place.store.root, entry=place.store.entry)
    if record is not None and record.manifest is not None and record.manifest.scheme == SCHEME:
        label = f"the manifest of {path}"
        return ReferenceFingerprints(label, record.manifest.fingerprints, path=path)
    return None
