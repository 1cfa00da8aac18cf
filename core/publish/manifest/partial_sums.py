"""The manifest of a checkpoint that several processes write, from the checksums that they compute.

::

    process 0 ── write_sums ──▶ sums/0.json ─┐
    process 1 ── write_sums ──▶ sums/1.json ─┴─ write_combined ──▶ ckpt-manifest.json

The files in ``sums`` are manifests of what one process has written completely. Files that are in
none of them (those that several processes filled, and those of other software) are read back.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path

from core.arrays.checksum import ALGORITHM
from core.engine.scan.sums import read_sum
from core.files.store import LocalStore, ReadStore, translate_os_errors
from core.files.walk import list_tree
from core.publish.manifest.file import FileSum, ManifestArray, manifest_lines, read_manifest
from core.version import TOOL


def write_sums(
    folder: Path, number: int, files: Iterable[FileSum], arrays: Iterable[ManifestArray]
) -> None:
    """Write the checksums of one process, for ``write_combined``.

    Args:
        folder: an existing directory that all processes share.
        number: number of the process.

    Raises:
        CapacityError, StorageError: the system cannot write.
    """
    _write_manifest(folder / f"{number}.json", files, arrays, fsync=False)


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
            files, arrays = combine_sums(sums, store, sizes)
    _write_manifest(data_dir / name, files, arrays, fsync=fsync)


def combine_sums(
    sums: ReadStore, store: ReadStore, sizes: Mapping[str, int]
) -> tuple[list[FileSum], list[ManifestArray]]:
    """Return the entries of a complete checkpoint for its manifest.

    Args:
        sums: what ``write_sums`` wrote.
        store: the checkpoint; files without checksums are read back.
        sizes: name → size of the checkpoint's files.

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
    return [files[path] for path in sorted(files) if path in sizes], arrays


def _write_manifest(
    path: Path, files: Iterable[FileSum], arrays: Iterable[ManifestArray], *, fsync: bool
) -> None:
    """Write a manifest into a directory that nobody else reads yet.

    Raises:
        CapacityError, StorageError: the system cannot write.
    """
    with translate_os_errors(str(path), doing="write"), open(path, "w", encoding="utf-8") as file:
        file.writelines(manifest_lines(TOOL, ALGORITHM, files, arrays))
        if fsync:
            file.flush()
            os.fsync(file.fileno())
