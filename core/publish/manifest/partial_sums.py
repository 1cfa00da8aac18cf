"""The manifest of a checkpoint that several processes write, from the checksums that they compute.

::

    process 0 ── write_sums ──▶ sums/0.json ─┐
    process 1 ── write_sums ──▶ sums/1.json ─┴─ write_combined ──▶ ckpt-manifest.json

The files in ``sums`` are manifests of what one process has written completely. Files that are in
none of them (those that several processes filled, and those of other software) are read back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

from core.arrays.checksum import ALGORITHM, crc32, digest_of
from core.engine.scan.sums import read_sum
from core.files.object_client import put_object
from core.files.remote_path import is_remote
from core.files.store import LocalStore, ReadStore, translate_os_errors
from core.files.syscalls import flush
from core.files.walk import list_tree
from core.publish.manifest.file import FileSum, ManifestArray, manifest_lines, read_manifest
from core.version import TOOL


def write_sums(
    folder: Path, number: int, files: Iterable[FileSum], arrays: Iterable[ManifestArray]
) -> None:
    """Write the checksums of one process, for ``write_combined``.

    Args:
        folder: an existing directory that all processes share, or a prefix of an object store.
        number: number of the process.

    Raises:
        CapacityError, StorageError: the system or the store cannot write.
    """
    path = folder / f"{number}.json"
    lines = manifest_lines(TOOL, ALGORITHM, files, arrays)
    if is_remote(path):
        put_object(path, "".join(lines).encode(), replace=True)
    else:
        _write_lines(path, lines, fsync=False)


def write_combined(data_dir: Path, folder: Path, name: str, *, fsync: bool = True) -> None:
    """Write the manifest of a complete checkpoint.

    Args:
        data_dir: directory of the checkpoint; the manifest goes there.
        folder: the directory that ``write_sums`` wrote to.
        name: file name of the manifest.
        fsync: wait for the disk.

    Raises:
        CorruptError: the checksums of a process are damaged.
        CapacityError, StorageError: the system cannot read or write.
    """
    with closing(LocalStore(folder)) as sums, closing(LocalStore(data_dir)) as store:
        sizes = {path: size for path, size in list_tree(data_dir).files.items() if path != name}
        with translate_os_errors(str(folder), doing="list the directory"):
            lines = combine_sums(sums, store, sizes)
    _write_lines(data_dir / name, lines, fsync=fsync)


def combine_sums(
    sums: ReadStore,
    store: ReadStore,
    sizes: Mapping[str, int],
    last: Mapping[str, bytes] | None = None,
) -> Iterator[str]:
    """Return the lines of the manifest of a complete checkpoint.

    Args:
        sums: what ``write_sums`` wrote.
        store: the checkpoint; files without checksums are read back.
        sizes: name → size of the checkpoint's files.
        last: name → content of files that will be written after the manifest.

    Raises:
        CorruptError: the checksums of a process are damaged.
        CapacityError, StorageError: the system cannot read.
    """
    # Combine what the processes recorded, in the order of their numbers.
    files: dict[str, FileSum] = {}
    arrays: list[ManifestArray] = []
    for number in sorted(int(name.removesuffix(".json")) for name in sums.files()):
        manifest = read_manifest(sums, f"{number}.json")
        files.update((file.path, file) for file in manifest.files)
        arrays += manifest.arrays
    # Read the remaining files back.
    for path, n_bytes in sizes.items():
        if path not in files:
            total = read_sum(store, path, 0, n_bytes)
            files[path] = FileSum(path, n_bytes, total.crc, total.digest)
    # Omit files that were renamed or removed after they were written.
    entries = {path: entry for path, entry in files.items() if path in sizes}
    for path, data in (last or {}).items():
        entries[path] = FileSum(path, len(data), crc32(data), digest_of(data).hex())
    return manifest_lines(TOOL, ALGORITHM, [entries[path] for path in sorted(entries)], arrays)


def _write_lines(path: Path, lines: Iterable[str], *, fsync: bool) -> None:
    """Write a manifest into a directory that nobody else reads yet.

    Raises:
        CapacityError, StorageError: the system cannot write.
    """
    with translate_os_errors(str(path), doing="write"), open(path, "w", encoding="utf-8") as file:
        file.writelines(lines)
        if fsync:
            file.flush()
            flush(file.fileno())
