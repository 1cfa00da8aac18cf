"""The manifest of a checkpoint that exists already: every file and every stored array is read once and summed up.

Arrays are listed where their bytes lie dense in a file; compressed and strided ones are covered by their file's digest.
Fingerprints are made of the same bytes as they pass by, save for tensors that are computed from others: those are read
again (``core.manifest.fingerprint_feeds``, ``core.manifest.fingerprint_read``).

A manifest says that a checkpoint is as it was, so none is made of one that is damaged already: what cannot be read, or
does not have the CRCs that its own containers state, is an error. Copies on other ranks are summed up, but not compared
with each other: ``ckpt validate --deep`` does that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from core import __version__
from core.arrays.checksum import ALGORITHM
from core.calibration.choice import settled
from core.catalog.stored import StoredArray
from core.device.device import FINGERPRINT, Device
from core.errors import CheckpointingException, CorruptError, UsageError
from core.files.folders import sync_folder
from core.files.store import translated
from core.files.syscalls import rename_new
from core.files.url import refuse_url
from core.files.walk import hollow_files, walked
from core.fingerprint.definition import Fingerprint
from core.fingerprint.kernel import kernel
from core.manifest.file import FileSum, ManifestArray, manifest_lines, manifest_name
from core.manifest.fingerprint_feeds import ArrayFeeds, Feeds, is_dense_in_file
from core.manifest.fingerprint_share import SharedFingerprints, shared_fingerprints
from core.manifest.lookup import is_manifest
from core.manifest.stated_crcs import StatedSums
from core.megatron.reshard.reshard import load_rules
from core.opening.canonical import Canonical, canonical
from core.opening.open import FILL, Checkpoint, locate_checkpoint, open_checkpoint
from core.scan.run import DEFAULT_MEMORY_BYTES, scan
from core.scan.sums import Scanned, Wanted
from core.team.agreement import agreed, sight_of_files
from core.team.figures import added_up
from core.team.protocol import ALONE, Figures, Team, collected, is_lead, told

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)."""

_PART = ".ckpt-part"
"""Ending of a manifest that is being written; a run that was killed leaves such a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What a manifest is going to say.

    Args:
        path: the checkpoint.
        destination: where its manifest belongs.
        format: name of its format.
        files, arrays: the entries.
        fingerprints: by canonical key; None if they were not asked for.
        n_read_again: tensors that were read a second time for their fingerprints.
        n_bytes: of all files.
        notes: what the user should know.
        figures: of the workers, where several read it.
    """

    path: Path
    destination: Path
    format: str
    files: tuple[FileSum, ...]
    arrays: tuple[ManifestArray, ...]
    fingerprints: dict[str, Fingerprint] | None
    n_read_again: int
    n_bytes: int
    notes: tuple[str, ...]
    figures: tuple[Figures, ...] = ()

    def lines(self) -> Iterator[str]:
        """The text of the manifest, in pieces."""
        tool = f"ckpt-toolkit {__version__}"
        return manifest_lines(tool, ALGORITHM, self.files, self.arrays, self.fingerprints)


def inventory(
    path: Path,
    *,
    iteration: int | None = None,
    rules: Path | None = None,
    missing_chunks: str = FILL,
    fingerprints: bool = True,
    threads: int | None = None,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Progress | None = None,
    team: Team = ALONE,
    device: Device | None = None,
) -> Inventory:
    """Reads a checkpoint once, and sums it up.

    Args:
        path: see ``core.opening.open``.
        iteration: which iteration of a training root.
        rules: a TOML file with additional layout rules.
        missing_chunks: what zarr chunks are that are not stored, see ``core.opening.open``.
        fingerprints: whether to make them.
        threads: that read; None for as many as there are processors.
        memory_bytes: most memory that decoding and reading again may take.
        progress: told about bytes; of this rank.
        device: on which fingerprints may be made; None for the CPU path.
        team: which divides the reading; every rank calls this with the same arguments.

    Returns:
        What the manifest says; on other ranks than the lead without files, arrays and fingerprints.

    Raises:
        CheckpointingException: it cannot be read, is damaged, or changed while it was read.
        WorkerError: a rank of the team failed, or sees another checkpoint.
    """
    source = agreed(
        team,
        lambda: _opened(path, iteration=iteration, rules=rules, missing_chunks=missing_chunks),
        _Source.sight,
        what=str(path),
    )
    found = source.opened
    threads = threads or len(os.sched_getaffinity(0))
    able = settled(device, [FINGERPRINT], threads=threads) if fingerprints else None
    try:
        with kernel(sum(source.files.values()) if fingerprints else 0, able) as products:
            feeds = Feeds(source.form.catalog, source.stored, products) if fingerprints else None
            scanned = scan(
                found.catalog,
                found.store,
                [] if feeds is None else [ArrayFeeds(feeds)],
                files=source.files,
                wanted=Wanted(array_digests=True, file_digests=True),
                stated_in=StatedSums(found.store, found.format.name),
                arrays=source.stored,
                threads=threads,
                memory_bytes=memory_bytes,
                progress=progress,
                team=team,
                device=able,
            )
        told(team, lambda: _refuse_damage(scanned))
        made = (
            _Made()
            if feeds is None
            else _completed(feeds, source, threads=threads, memory_bytes=memory_bytes, team=team, device=device)
        )
        collected(team, found.store.verify_unchanged)
        return Inventory(
            path=found.path,
            destination=found.store.root / manifest_name(found.store.entry),
            format=found.format.name,
            files=tuple(_file_sums(scanned, source.files)) if is_lead(team) else (),
            arrays=tuple(_array_entries(source, scanned)) if is_lead(team) else (),
            fingerprints=None if feeds is None else made.fingerprints,
            n_read_again=made.n_again,
            n_bytes=sum(source.files.values()),
            notes=(*found.notes, *_notes(source.form, fingerprints=fingerprints)),
            figures=added_up([scanned.figures, made.figures]),
        )
    finally:
        found.store.close()


@dataclass(frozen=True, slots=True)
class _Source:
    """The checkpoint that is summed up.

    Args:
        opened: it.
        form: its tensors.
        files: name → size.
        stored: its arrays.
    """

    opened: Checkpoint
    form: Canonical
    files: dict[str, int]
    stored: list[StoredArray]

    def sight(self) -> object:
        """What all ranks of a team must see alike."""
        return str(self.opened.path), self.opened.format.name, sight_of_files(self.opened.store, self.files)


def _opened(path: Path, *, iteration: int | None, rules: Path | None, missing_chunks: str) -> _Source:
    """Opens a checkpoint, and refuses what cannot be whole."""
    found = open_checkpoint(path, iteration=iteration, missing_chunks=missing_chunks)
    try:
        form = canonical(found, rules=load_rules(rules))
        every = walked(found.store.root, entry=found.store.entry, without=found.below).files
        files = {name: size for name, size in every.items() if not is_manifest(name.removesuffix(_PART))}
        for name in sorted(hollow_files(found.store, files)):
            raise CorruptError(
                "the disk holds next to none of the file's bytes",
                file=name,
                hint="copy it again: it may not have ended",
            )
        return _Source(found, form, files, list(found.catalog.stored_arrays().values()))
    except BaseException:
        found.store.close()
        raise


def _file_sums(scanned: Scanned, files: dict[str, int]) -> Iterator[FileSum]:
    for name in files:
        one = scanned.files.get(name)
        if one is not None:
            yield FileSum(name, one.n_bytes, one.crc, one.digest)


def _refuse_damage(scanned: Scanned) -> None:
    """Ends the work if something is wrong with what was read.

    Raises:
        CheckpointingException: the first problem.
    """
    if scanned.problems:
        raise scanned.problems[0].error
    for wrong in scanned.wrong:
        raise CorruptError(
            f"{wrong.stated.name} has CRC-32 {wrong.found:08x}, the file states {wrong.stated.crc:08x}",
            file=wrong.file,
            span=(wrong.stated.start, wrong.stated.stop),
            hint="the checkpoint is damaged: see ckpt validate --deep",
        )


@dataclass(frozen=True, slots=True)
class _Made:
    """All fingerprints.

    Args:
        fingerprints: in the order of the tensors; none on other ranks than the lead.
        n_again: how many of them needed reading again.
        figures: of the workers that read again together.
    """

    fingerprints: dict[str, Fingerprint] = field(default_factory=dict)
    n_again: int = 0
    figures: tuple[Figures, ...] = ()


def _completed(
    feeds: Feeds, source: _Source, *, threads: int, memory_bytes: int, team: Team, device: Device | None
) -> _Made:
    """All fingerprints, those included that need reading again."""
    made = feeds.found() if is_lead(team) else {}
    catalog = source.form.catalog
    rest = told(team, lambda: [key for key in catalog.tensors if key not in made])
    if not rest:
        again = SharedFingerprints()
    else:
        again = shared_fingerprints(
            catalog, source.opened.store, rest, threads=threads, memory_bytes=memory_bytes, team=team, device=device
        )
    made |= again.fingerprints
    return _Made({key: made[key] for key in catalog.tensors if key in made}, len(rest), again.figures)


def _array_entries(source: _Source, scanned: Scanned) -> Iterator[ManifestArray]:
    """The arrays that lie dense in a file."""
    found, form = source.opened, source.form
    keys: dict[str, str] = {}
    for catalog in (form.catalog, found.catalog):
        for fragment in catalog.all_fragments():
            if fragment.array is not None:
                keys.setdefault(fragment.array.name, fragment.key)
    for array in source.stored:
        with suppress(CheckpointingException):  # the scan has read it, or said why not
            placed = found.catalog.bind(found.store, array)
            known, extent = scanned.arrays.get(array.name), placed.extent
            if known is None or extent.encoding is not None or not is_dense_in_file(placed):
                continue
            key = keys.get(array.name, array.name)
            yield ManifestArray(
                key, array.name, extent.file, extent.offset, array.dtype, array.shape, known.crc, known.digest
            )


def _notes(form: Canonical, *, fingerprints: bool) -> Iterator[str]:
    """What keeps the fingerprints from being comparable with those of other layouts."""
    if not fingerprints or form.failure is None:
        return
    what = "the tensors" if not form.has_layout else "the optimizer's states"
    effect = "the fingerprints are of this layout only" if not form.has_layout else "they have no fingerprints"
    yield f"{what} are not in canonical form, so {effect}: {form.failure.message}"


def write_inventory(found: Inventory, destination: Path | None = None, *, force: bool = False) -> Path:
    """Writes a manifest: whole or not at all.

    Args:
        found: what it says.
        destination: its name; None for the usual one.
        force: replace one that is there.

    Returns:
        Its name.

    Raises:
        UsageError: it exists, or its directory does not.
        CapacityError, StorageError: the system refuses.
    """
    path = found.destination if destination is None else destination
    check_free(path, force=force)
    aside = path.with_name(f".{path.name}{_PART}")
    with translated(str(path), doing="write"):
        try:
            with suppress(FileNotFoundError):
                aside.unlink()  # of a run that was killed; a link there would lead the bytes elsewhere
            with open(aside, "x", encoding="utf-8") as file:
                file.writelines(found.lines())
                file.flush()
                os.fsync(file.fileno())
            if force:
                os.replace(aside, path)
            else:
                rename_new(aside, path)
        except FileExistsError as err:
            raise _taken(path) from err
        finally:
            with suppress(FileNotFoundError):
                aside.unlink()
    sync_folder(path.parent)
    return path


def usual_path(path: Path, *, iteration: int | None = None) -> Path:
    """Where the manifest of a checkpoint belongs, found without reading it.

    Raises:
        UsageError: there is no such path.
    """
    place = locate_checkpoint(path, iteration=iteration)
    place.store.close()
    return place.store.root / manifest_name(place.store.entry)


def check_free(path: Path, *, force: bool) -> None:
    """Refuses a name that a manifest cannot get, before the work begins.

    Raises:
        UsageError: see ``write_inventory``.
    """
    refuse_url(path)
    if not path.parent.is_dir():
        raise UsageError("there is no such directory", file=str(path.parent), hint="make it first")
    if path.is_dir() or (os.path.lexists(path) and not force):
        raise _taken(path)


def _taken(path: Path) -> UsageError:
    return UsageError("it exists already", file=str(path), hint="check it with ckpt validate, or pass --force")
