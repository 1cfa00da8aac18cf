"""Make the manifest of an existing checkpoint: read every file and every stored array once.

Arrays are listed if their bytes lie dense in a file; compressed and strided ones are covered by
their file's digest. Fingerprints are computed from the same bytes as they pass by, except for
tensors that are computed from others: those are read again (``core.manifest.fingerprint_feeds``,
``core.manifest.fingerprint_read``).

A manifest promises that a checkpoint is as it was, so none is made of one that is damaged already:
what cannot be read, or does not have the CRCs that its own containers state, is an error. Copies on
other ranks are summed up, but not compared with each other: ``ckpt validate --deep`` does that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from core.arrays.checksum import ALGORITHM
from core.calibration.choice import choose_device
from core.catalog.stored import StoredArray
from core.device.device import FINGERPRINT, Device
from core.errors import CheckpointingException, CorruptError, UsageError
from core.files.folders import sync_folder
from core.files.store import translate_os_errors
from core.files.syscalls import rename_new
from core.files.url import refuse_url
from core.files.walk import list_tree, sparse_files
from core.fingerprint.definition import Fingerprint
from core.fingerprint.kernel import fastest_products
from core.manifest.file import FileSum, ManifestArray, manifest_lines, manifest_name
from core.manifest.fingerprint_feeds import ArrayFeeds, Feeds, is_dense_in_file
from core.manifest.fingerprint_share import SharedFingerprints, shared_fingerprints
from core.manifest.lookup import is_manifest
from core.manifest.stated_crcs import StatedCrcReader
from core.megatron.reshard.reshard import load_rules
from core.opening.canonical import Canonical, canonical
from core.opening.open import FILL, Checkpoint, locate_checkpoint, open_checkpoint
from core.scan.run import DEFAULT_MEMORY_BYTES, scan
from core.scan.sums import ScanResult, WantedSums
from core.team.agreement import observe_files, require_agreement
from core.team.figures import sum_figures
from core.team.protocol import ALONE, Figures, Team, broadcast_result, gather_results, is_lead
from core.version import __version__

Progress = Callable[[int, int], None]
"""Takes the bytes done so far, and all bytes."""

_PART = ".ckpt-part"
"""Ending of a manifest that is being written; a killed run leaves such a file behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The content of a manifest to be written.

    Args:
        path: the checkpoint.
        destination: the usual path of its manifest.
        format: name of the checkpoint's format.
        files, arrays: the entries.
        fingerprints: by canonical key; None if they were not wanted.
        n_read_again: number of tensors that were read a second time for their fingerprints.
        n_bytes: bytes of all files.
        notes: remarks for the user.
        figures: figures of the workers, if several read the checkpoint.
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
        """Yield the text of the manifest, in pieces."""
        tool = f"ckpt-toolkit {__version__}"
        return manifest_lines(tool, ALGORITHM, self.files, self.arrays, self.fingerprints)


def read_inventory(
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
    """Read a checkpoint once, and compute the content of its manifest.

    Args:
        path: as for ``core.opening.open.open_checkpoint``.
        iteration: iteration of a training root.
        rules: a TOML file with additional layout rules.
        missing_chunks: how zarr chunks count that are not stored (``core.opening.open``).
        fingerprints: compute fingerprints.
        threads: number of threads that read; None for as many as there are processors.
        memory_bytes: maximum bytes that decoding and reading again may take.
        progress: called with the bytes that this rank has read.
        team: divides the reading; every rank calls this with the same arguments.
        device: may compute the fingerprints; None for the CPU path.

    Returns:
        The content; on ranks other than the lead without files, arrays and fingerprints.

    Raises:
        CheckpointingException: the checkpoint cannot be read, is damaged, or changed meanwhile.
        WorkerError: a rank of the team failed, or sees another checkpoint.
    """
    source = require_agreement(
        team,
        lambda: _open_source(path, iteration=iteration, rules=rules, missing_chunks=missing_chunks),
        _Source.observed_state,
        subject=str(path),
    )
    opened = source.opened
    threads = threads or len(os.sched_getaffinity(0))
    device_for_sums = (
        choose_device(device, [FINGERPRINT], threads=threads) if fingerprints else None
    )
    try:
        # One pass over all bytes: sums of files and arrays, and fingerprints on the way.
        with fastest_products(
            sum(source.files.values()) if fingerprints else 0, device_for_sums
        ) as products:
            feeds = Feeds(source.form.catalog, source.stored, products) if fingerprints else None
            scanned = scan(
                opened.catalog,
                opened.store,
                [] if feeds is None else [ArrayFeeds(feeds)],
                files=source.files,
                wanted=WantedSums(array_digests=True, file_digests=True),
                stated_in=StatedCrcReader(opened.store, opened.format.name),
                arrays=source.stored,
                threads=threads,
                memory_bytes=memory_bytes,
                progress=progress,
                team=team,
                device=device_for_sums,
            )
        broadcast_result(team, lambda: _check_intact(scanned))

        # Tensors that are computed from others are read once more.
        complete = (
            _AllFingerprints()
            if feeds is None
            else _complete_fingerprints(
                feeds, source, threads=threads, memory_bytes=memory_bytes, team=team, device=device
            )
        )

        # Nothing may have changed meanwhile; then the lead has the content of the manifest.
        gather_results(team, opened.store.verify_unchanged)
        return Inventory(
            path=opened.path,
            destination=opened.store.root / manifest_name(opened.store.entry),
            format=opened.format.name,
            files=tuple(_file_entries(scanned, source.files)) if is_lead(team) else (),
            arrays=tuple(_array_entries(source, scanned)) if is_lead(team) else (),
            fingerprints=None if feeds is None else complete.fingerprints,
            n_read_again=complete.n_read_again,
            n_bytes=sum(source.files.values()),
            notes=(*opened.notes, *_notes(source.form, fingerprints=fingerprints)),
            figures=sum_figures([scanned.figures, complete.figures]),
        )
    finally:
        opened.store.close()


@dataclass(frozen=True, slots=True)
class _Source:
    """The checkpoint that is read.

    Args:
        opened: the checkpoint.
        form: its tensors in canonical form.
        files: sizes in bytes of its files, by name.
        stored: its arrays.
    """

    opened: Checkpoint
    form: Canonical
    files: dict[str, int]
    stored: list[StoredArray]

    def observed_state(self) -> object:
        """Return what all ranks of a team must see alike."""
        return (
            str(self.opened.path),
            self.opened.format.name,
            observe_files(self.opened.store, self.files),
        )


def _open_source(
    path: Path, *, iteration: int | None, rules: Path | None, missing_chunks: str
) -> _Source:
    """Open a checkpoint.

    Raises:
        CheckpointingException: the checkpoint cannot be read, or a file is sparse: its copy was
            interrupted.
    """
    opened = open_checkpoint(path, iteration=iteration, missing_chunks=missing_chunks)
    try:
        form = canonical(opened, rules=load_rules(rules))
        sizes = list_tree(opened.store.root, entry=opened.store.entry, without=opened.below).files
        files = {
            name: size for name, size in sizes.items() if not is_manifest(name.removesuffix(_PART))
        }
        for name in sorted(sparse_files(opened.store, files)):
            raise CorruptError(
                "almost none of the file's bytes are on the disk",
                file=name,
                hint="copy it again: an earlier copy may have been interrupted",
            )
        return _Source(opened, form, files, list(opened.catalog.stored_arrays().values()))
    except BaseException:
        opened.store.close()
        raise


def _file_entries(scanned: ScanResult, files: Iterable[str]) -> Iterator[FileSum]:
    """Yield the entries of the files that were read, in the order of ``files``."""
    for name in files:
        total = scanned.files.get(name)
        if total is not None:
            yield FileSum(name, total.n_bytes, total.crc, total.digest)


def _check_intact(scanned: ScanResult) -> None:
    """Raise if a file could not be read, or does not have a CRC that it states.

    Raises:
        CheckpointingException: the first problem.
    """
    if scanned.problems:
        raise scanned.problems[0].error
    for mismatch in scanned.mismatches:
        stated = mismatch.stated
        raise CorruptError(
            f"checksum mismatch: {stated.name} has CRC-32 {mismatch.actual_crc:08x}, the file records {stated.crc:08x}",
            file=mismatch.file,
            span=(stated.start, stated.stop),
            hint="the checkpoint is damaged; ckpt validate --deep lists all damage",
        )


@dataclass(frozen=True, slots=True)
class _AllFingerprints:
    """The fingerprints of all tensors.

    Args:
        fingerprints: in the order of the tensors; empty on ranks other than the lead.
        n_read_again: how many tensors were read again for them.
        figures: figures of the workers that read again together.
    """

    fingerprints: dict[str, Fingerprint] = field(default_factory=dict)
    n_read_again: int = 0
    figures: tuple[Figures, ...] = ()


def _complete_fingerprints(
    feeds: Feeds,
    source: _Source,
    *,
    threads: int,
    memory_bytes: int,
    team: Team,
    device: Device | None,
) -> _AllFingerprints:
    """Return all fingerprints; read those tensors again that the scan could not cover."""
    fingerprints = feeds.fingerprints() if is_lead(team) else {}
    catalog = source.form.catalog
    rest = broadcast_result(
        team, lambda: [key for key in catalog.tensors if key not in fingerprints]
    )
    if not rest:
        reread = SharedFingerprints()
    else:
        reread = shared_fingerprints(
            catalog,
            source.opened.store,
            rest,
            threads=threads,
            memory_bytes=memory_bytes,
            team=team,
            device=device,
        )
    fingerprints |= reread.fingerprints
    in_order = {key: fingerprints[key] for key in catalog.tensors if key in fingerprints}
    return _AllFingerprints(in_order, len(rest), reread.figures)


def _array_entries(source: _Source, scanned: ScanResult) -> Iterator[ManifestArray]:
    """Yield the entries of arrays that lie dense in a file."""
    opened, form = source.opened, source.form
    # An array is listed under the first tensor that it holds, if possible a canonical one.
    keys: dict[str, str] = {}
    for catalog in (form.catalog, opened.catalog):
        for fragment in catalog.all_fragments():
            if fragment.array is not None:
                keys.setdefault(fragment.array.name, fragment.key)
    for array in source.stored:
        with suppress(CheckpointingException):  # the scan has read it, or reported why not
            placed = opened.catalog.bind(opened.store, array)
            sums, extent = scanned.arrays.get(array.name), placed.extent
            if sums is None or extent.encoding is not None or not is_dense_in_file(placed):
                continue
            key = keys.get(array.name, array.name)
            yield ManifestArray(
                key,
                array.name,
                extent.file,
                extent.offset,
                array.dtype,
                array.shape,
                sums.crc,
                sums.digest,
            )


def _notes(form: Canonical, *, fingerprints: bool) -> Iterator[str]:
    """Yield a note if the fingerprints cannot be compared with those of other layouts."""
    if not fingerprints or form.failure is None:
        return
    subject = "the tensors" if not form.has_layout else "the optimizer's states"
    effect = (
        "the fingerprints are valid for this layout only"
        if not form.has_layout
        else "they have no fingerprints"
    )
    yield f"{subject} are not in canonical form, so {effect}: {form.failure.message}"


def write_inventory(
    content: Inventory, destination: Path | None = None, *, force: bool = False
) -> Path:
    """Write a manifest, completely or not at all.

    Args:
        content: the content of the manifest.
        destination: path of the manifest; None for the usual one.
        force: replace an existing file.

    Returns:
        The path of the manifest.

    Raises:
        UsageError: the file exists, or its directory does not.
        CapacityError, StorageError: the system cannot write.
    """
    path = content.destination if destination is None else destination
    check_free(path, force=force)
    partial = path.with_name(f".{path.name}{_PART}")
    with translate_os_errors(str(path), doing="write"):
        try:
            with suppress(FileNotFoundError):
                partial.unlink()  # left by a killed run; a link in its place would lead the bytes elsewhere
            with open(partial, "x", encoding="utf-8") as file:
                file.writelines(content.lines())
                file.flush()
                os.fsync(file.fileno())
            if force:
                os.replace(partial, path)
            else:
                rename_new(partial, path)
        except FileExistsError as err:
            raise _taken(path) from err
        finally:
            with suppress(FileNotFoundError):
                partial.unlink()
    sync_folder(path.parent)
    return path


def default_manifest_path(path: Path, *, iteration: int | None = None) -> Path:
    """Return the usual path of a checkpoint's manifest, without reading the checkpoint.

    Raises:
        UsageError: the path does not exist.
    """
    location = locate_checkpoint(path, iteration=iteration)
    location.store.close()
    return location.store.root / manifest_name(location.store.entry)


def check_free(path: Path, *, force: bool) -> None:
    """Raise if a manifest cannot be written to a path; called before the work begins.

    Raises:
        UsageError: the path is a URL or a directory, its directory does not exist, or it is taken
            and ``force`` is not given.
    """
    refuse_url(path)
    if not path.parent.is_dir():
        raise UsageError("directory not found", file=str(path.parent), hint="create it first")
    if path.is_dir() or (os.path.lexists(path) and not force):
        raise _taken(path)


def _taken(path: Path) -> UsageError:
    return UsageError(
        "the manifest exists already",
        file=str(path),
        hint="check it with ckpt validate, or pass --force",
    )
