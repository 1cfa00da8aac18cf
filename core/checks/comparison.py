"""What a checkpoint is compared with by fingerprint: a manifest, or another checkpoint of any format and layout."""

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
from core.manifest.lookup import is_manifest, recorded
from core.megatron.reshard.reshard import Rules
from core.opening.open import locate_checkpoint
from core.scan.run import DEFAULT_MEMORY_BYTES
from core.team.protocol import ALONE, Figures, Team, told

_DEFAULT_THREADS = 2


@dataclass(frozen=True, slots=True)
class Against:
    """The fingerprints to compare with.

    Args:
        label: where they come from.
        fingerprints: by canonical key.
        figures: of the workers that have read them; none where a manifest states them.
    """

    label: str
    fingerprints: Mapping[str, Fingerprint]
    figures: tuple[Figures, ...] = ()


def against_of(
    path: Path,
    *,
    rules: Rules,
    threads: int | None = None,
    memory_bytes: int | None = DEFAULT_MEMORY_BYTES,
    team: Team = ALONE,
    device: Device | None = None,
) -> Against:
    """The fingerprints of a manifest, of the manifest of a checkpoint, or of a checkpoint, which is then read.

    Args:
        path: a manifest, or see ``core.opening.open``.
        rules: the layout's table.
        threads, memory_bytes: for reading.
        device: on which fingerprints may be made.
        team: which reads together; on other ranks than the lead, fingerprints that had to be read are left out.

    Raises:
        UsageError: there is no such path, or the manifest has no fingerprints.
        CheckpointingException: it cannot be read.
    """
    stated = told(team, lambda: _stated(path))
    if stated is not None:
        return stated
    made = fingerprints_of_directory(
        path, rules=rules, threads=threads or _DEFAULT_THREADS, memory_bytes=memory_bytes, team=team, device=device
    )
    return Against(str(path), made.fingerprints, made.figures)


def _stated(path: Path) -> Against | None:
    """What a manifest states; None if there is none that can be used."""
    if path.is_file() and (is_manifest(path.name) or _holds_schema(path)):
        store = LocalStore(path.parent)
        try:
            return _of_manifest(read_manifest(store, path.name), str(path))
        finally:
            store.close()
    place = locate_checkpoint(path)
    place.store.close()
    known = recorded(place.store.root, entry=place.store.entry)
    if known is not None and known.manifest is not None and known.manifest.scheme == SCHEME:
        return Against(f"the manifest of {path}", known.manifest.fingerprints)
    return None


def _holds_schema(path: Path) -> bool:
    """Whether a file with another name begins like a manifest."""
    if path.suffix != ".json":
        return False
    with path.open("rb") as file:
        return b'"ckpt-manifest"' in file.read(200)


def _of_manifest(manifest: Manifest, label: str) -> Against:
    if manifest.scheme != SCHEME:
        what = "no fingerprints" if manifest.scheme is None else f"fingerprints {manifest.scheme}, not {SCHEME}"
        raise UsageError(
            f"--against: the manifest has {what}",
            file=label,
            hint="write it with ckpt manifest, or ckpt convert --fingerprint; or name the checkpoint itself",
        )
    return Against(label, manifest.fingerprints)
