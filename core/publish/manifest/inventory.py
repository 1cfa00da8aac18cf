"""Create the manifest of an existing checkpoint by reading every file and stored array once.

Arrays whose bytes are dense in a file get entries; compressed and strided arrays are covered by the
digest of their file. Fingerprints are computed from the same bytes (``fingerprint_feeds``), except
for tensors that are computed from others: these are read again (``fingerprint_read``).

A manifest certifies that a checkpoint has not changed since, so a checkpoint that is damaged
already gets none: bytes that cannot be read, or that do not match a CRC in their own file, are an
error. Replicas are summed up, but not compared: ``ckpt validate --deep`` does that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import field
from pathlib import Path

from core.arrays.checksum import ALGORITHM
from core.engine.calibration.choice import choose_device
from core.engine.catalog.stored import StoredArray
from core.engine.device.device import FINGERPRINT, Device
from core.engine.fingerprint.definition import Fingerprint
from core.engine.fingerprint.kernel import fastest_products
from core.engine.plan.memory import limit_objects
from core.engine.scan.run import DEFAULT_MEMORY_BYTES, scan
from core.engine.scan.sums import ScanResult, WantedSums
from core.engine.team.agreement import observe_files, require_agreement
from core.engine.team.protocol import (
    ALONE,
    Figures,
    Team,
    broadcast_result,
    gather_results,
    is_lead,
    sum_figures,
)
from core.errors import CheckpointingException, CorruptError, UsageError
from core.files.folders import PART_SUFFIX, sync_folder, write_whole
from core.files.object_client import put_object
from core.files.object_listing import forget_listings, is_listed
from core.files.remote_path import is_remote
from core.files.store import translate_os_errors
from core.files.syscalls import allowed_cores
from core.files.url import refuse_url
from core.files.walk import sparse_files
from core.megatron.rules.tables import load_rules
from core.opening.canonical import Canonical, canonical
from core.opening.code_in_pickles import warn_of_pickles
from core.opening.locate import locate_checkpoint
from core.opening.open import FILL, Checkpoint, open_checkpoint
from core.opening.source_files import list_files
from core.progress import OnProgress, Phase, count_steps, report_bytes
from core.publish.manifest.file import FileSum, ManifestArray, manifest_lines, manifest_name
from core.publish.manifest.fingerprint_feeds import ArrayFeeds, Feeds, is_dense_in_file
from core.publish.manifest.fingerprint_share import SharedFingerprints, shared_fingerprints
from core.publish.manifest.lookup import is_manifest
from core.publish.manifest.stated_crcs import StatedCrcReader
from core.values import dataclass
from core.version import TOOL


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The content of a manifest to be written.

    Args:
        path: the checkpoint.
        destination: the usual path of its manifest.
        format: name of the checkpoint's format.
        files, arrays: the entries.
        fingerprints: by canonical key; None if they were not requested.
        n_read_again: number of tensors that were read a second time for their fingerprints.
        n_bytes: bytes of all files.
        notes: remarks for the user.
        warnings: code in pickles that other software would run.
        figures: bytes and time of each worker, if several read the checkpoint.
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
    warnings: tuple[str, ...] = ()
    figures: tuple[Figures, ...] = ()

    def lines(self) -> Iterator[str]:
        """Yield the text of the manifest, a few lines at a time."""
        return manifest_lines(TOOL, ALGORITHM, self.files, self.arrays, self.fingerprints)


def read_inventory(
    path: Path,
    *,
    iteration: int | None = None,
    rules: Path | None = None,
    missing_chunks: str = FILL,
    fingerprints: bool = True,
    threads: int | None = None,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: OnProgress | None = None,
    team: Team = ALONE,
    device: Device | None = None,
) -> Inventory:
    """Read a checkpoint once, and compute the content of its manifest.

    Args:
        path: as for ``core.opening.open.open_checkpoint``.
        iteration: iteration of a training root.
        rules: a TOML file with additional layout rules.
        missing_chunks: treatment of zarr chunks that are not stored (``core.opening.open``).
        fingerprints: compute fingerprints.
        threads: number of reading threads; None for one per available CPU.
        memory_bytes: memory limit.
        progress: called with the phase and its amounts on this rank.
        team: divides the reading; every rank calls this with the same arguments.
        device: may compute the fingerprints; None for the CPU path.

    Returns:
        The content; on ranks other than the lead without files, arrays and fingerprints.

    Raises:
        CheckpointingException: the checkpoint cannot be read, is damaged, or changed meanwhile.
        WorkerError: a rank of the team failed, or finds another checkpoint.
    """
    # All ranks open the checkpoint, and compare what they find.
    on_open = count_steps(progress, Phase.OPENING, unit="files")
    with limit_objects(memory_bytes):
        source = require_agreement(
            team,
            lambda: _open_source(
                path,
                iteration=iteration,
                rules=rules,
                missing_chunks=missing_chunks,
                on_open=on_open,
            ),
            _Source.observed_state,
            subject=str(path),
        )
    opened = source.opened
    opened.store.on_open = None
    threads = threads or len(allowed_cores())
    device_for_sums = (
        choose_device(device, [FINGERPRINT], threads=threads) if fingerprints else None
    )
    try:
        # One pass over all bytes computes the sums of files and arrays, and most fingerprints.
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
                progress=report_bytes(progress, Phase.CHECKSUMMING),
                team=team,
                device=device_for_sums,
            )
        broadcast_result(team, lambda: _check_intact(scanned))

        # Read tensors again that are computed from others.
        complete = (
            _AllFingerprints()
            if feeds is None
            else _complete_fingerprints(
                feeds,
                source,
                threads=threads,
                memory_bytes=memory_bytes,
                progress=progress,
                team=team,
                device=device,
            )
        )

        # If nothing has changed meanwhile, the lead has the content of the manifest.
        gather_results(team, opened.store.verify_unchanged)
        return Inventory(
            path=opened.path,
            destination=opened.store.root / manifest_name(opened.store.entry),
            format=opened.format.name,
            files=_file_entries(scanned, source.files) if is_lead(team) else (),
            arrays=tuple(_array_entries(source, scanned)) if is_lead(team) else (),
            fingerprints=None if feeds is None else complete.fingerprints,
            n_read_again=complete.n_read_again,
            n_bytes=sum(source.files.values()),
            notes=(*opened.notes, *_notes(source.form, fingerprints=fingerprints)),
            warnings=tuple(
                warn_of_pickles(opened.store, opened.catalog, opened.uses, only_danger=True)
            )
            if is_lead(team)
            else (),
            figures=sum_figures([scanned.figures, complete.figures]),
        )
    finally:
        opened.store.close()


@dataclass(frozen=True, slots=True)
class _Source:
    """The checkpoint to read.

    Args:
        opened: the opened checkpoint.
        form: its canonical form.
        files: name → bytes of its files.
        stored: its stored arrays.
    """

    opened: Checkpoint
    form: Canonical
    files: dict[str, int]
    stored: list[StoredArray]

    def observed_state(self) -> object:
        """Return the part of the state that has to be equal on all ranks of a team."""
        return (
            str(self.opened.path),
            self.opened.format.name,
            observe_files(self.opened.store, self.files),
        )


def _open_source(
    path: Path,
    *,
    iteration: int | None,
    rules: Path | None,
    missing_chunks: str,
    on_open: Callable[[int], None] | None,
) -> _Source:
    """Open a checkpoint, list its files, and bring it into canonical form.

    Raises:
        CheckpointingException: the checkpoint cannot be read, or a file is sparse: its copy was
            interrupted.
    """
    opened = open_checkpoint(
        path, iteration=iteration, missing_chunks=missing_chunks, on_open=on_open
    )
    try:
        form = canonical(opened, rules=load_rules(rules))
        # Separate checkpoints below this one, and manifests, are not part of the checkpoint.
        sizes = list_files(opened.store, opened.format, below=opened.below).files
        files = {
            name: size
            for name, size in sizes.items()
            if not is_manifest(name.removesuffix(PART_SUFFIX))
        }
        for name in sorted(sparse_files(opened.store, files)):
            raise CorruptError(
                "almost none of the file is stored on disk",
                file=name,
                hint="copy the file again; the previous copy may have been interrupted",
            )
        return _Source(opened, form, files, list(opened.catalog.stored_arrays().values()))
    except BaseException:
        opened.store.close()
        raise


def _file_entries(scanned: ScanResult, files: Iterable[str]) -> tuple[FileSum, ...]:
    """Return the entries of the files that were read, in the order of ``files``."""
    totals = ((name, scanned.files.get(name)) for name in files)
    return tuple(
        FileSum(name, total.n_bytes, total.crc, total.digest)
        for name, total in totals
        if total is not None
    )


def _check_intact(scanned: ScanResult) -> None:
    """Raise the first problem of a scan.

    Raises:
        CheckpointingException: a file could not be read, or does not match a CRC that it records.
    """
    if scanned.problems:
        raise scanned.problems[0].error
    for mismatch in scanned.mismatches:
        record = mismatch.stated
        raise CorruptError(
            f"checksum mismatch: {record.name} has CRC-32 {mismatch.actual_crc:08x}, but the file "
            f"records {record.crc:08x}",
            file=mismatch.file,
            span=(record.start, record.stop),
            hint="list all damage with ckpt validate --deep",
        )


@dataclass(frozen=True, slots=True)
class _AllFingerprints:
    """The fingerprints of all tensors.

    Args:
        fingerprints: in the order of the tensors; empty on ranks other than the lead.
        n_read_again: number of tensors that were read again.
        figures: bytes and time of each worker in the second read.
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
    progress: OnProgress | None,
    team: Team,
    device: Device | None,
) -> _AllFingerprints:
    """Collect all fingerprints, and read tensors again that the scan could not cover.

    Raises:
        CheckpointingException: a tensor cannot be read, or does not fit in memory.
    """
    # The scan has merged the feeds of all ranks into those of the lead.
    fingerprints = feeds.fingerprints() if is_lead(team) else {}
    catalog = source.form.catalog
    missing = broadcast_result(
        team, lambda: [key for key in catalog.tensors if key not in fingerprints]
    )
    reread = SharedFingerprints()
    if missing:
        reread = shared_fingerprints(
            catalog,
            source.opened.store,
            missing,
            threads=threads,
            memory_bytes=memory_bytes,
            progress=progress,
            team=team,
            device=device,
        )
    fingerprints |= reread.fingerprints
    in_order = {key: fingerprints[key] for key in catalog.tensors if key in fingerprints}
    return _AllFingerprints(in_order, len(missing), reread.figures)


def _array_entries(source: _Source, scanned: ScanResult) -> Iterator[ManifestArray]:
    """Yield the entries of arrays whose bytes are dense in a file."""
    opened, form = source.opened, source.form
    # An array is listed under the first tensor that it contains, if possible a canonical one.
    keys: dict[str, str] = {}
    for catalog in (form.catalog, opened.catalog):
        for key, tensor in catalog.all_tensors():
            for fragment in tensor.fragments():
                if fragment.array is not None:
                    keys.setdefault(fragment.array.name, key)
    for array in source.stored:
        with suppress(CheckpointingException):  # the scan has read it, or reported why not
            placed = array.locate(opened.store)
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
    # With a layout, only the optimizer is not understood, and its tensors are missing in the form.
    if form.has_layout:
        reason = "the optimizer states are not in canonical form, so they have no fingerprints"
    else:
        reason = (
            "the tensors are not in canonical form, so the fingerprints are valid only for this "
            "layout"
        )
    yield f"{reason}: {form.failure.message}"


def write_inventory(
    content: Inventory, destination: Path | None = None, *, force: bool = False
) -> Path:
    """Write a manifest, completely or not at all; at a URL, by one request.

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
    if is_remote(path):
        try:
            put_object(path, "".join(content.lines()).encode(), replace=force)
        except FileExistsError as err:
            raise _taken(path) from err
        forget_listings()
        return path
    with translate_os_errors(str(path), doing="write"):
        try:
            # Without --force, fail if another process has created the destination meanwhile.
            write_whole(path, (line.encode() for line in content.lines()), replace=force)
        except FileExistsError as err:
            raise _taken(path) from err
    sync_folder(path.parent)
    return path


def default_manifest_path(path: Path, *, iteration: int | None = None) -> Path:
    """Return the usual path of a checkpoint's manifest, without reading the checkpoint.

    Raises:
        UsageError: the path or the ``iteration`` does not exist.
        StorageError: the path cannot be read.
    """
    location = locate_checkpoint(path, iteration=iteration)
    location.store.close()
    return location.store.root / manifest_name(location.store.entry)


def check_free(path: Path, *, force: bool) -> None:
    """Raise if a manifest cannot be written to a path, to be called before the long read.

    Raises:
        UsageError: the path is on a web server, or a directory, its directory does not exist, or it
            is taken and ``force`` is not given.
    """
    if is_remote(path):
        if not is_listed(path):
            raise UsageError(
                "a manifest cannot be written to a web server",
                file=str(path),
                hint="write it to a local file: --output FILE",
            )
        if not force and path.is_file():
            raise _taken(path)
        return
    refuse_url(path)
    if not path.parent.is_dir():
        raise UsageError("directory not found", file=str(path.parent), hint="create it first")
    if path.is_dir() or (os.path.lexists(path) and not force):
        raise _taken(path)


def _taken(path: Path) -> UsageError:
    return UsageError(
        "the manifest already exists",
        file=str(path),
        hint="check the checkpoint against it with ckpt validate, or replace it with --force",
    )
