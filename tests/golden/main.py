"""Packs checkpoints that other software wrote into tests/golden/golden.tar.xz.

    python tests/golden/main.py GOLD [ARCHIVE]

GOLD is the folder with the checkpoints as their tools left them (tests/golden/README.md: what is in
it and who wrote it). All of it is packed: the same weights lie in many layouts, so that 72 MB
shrink to under 4 MB. The archive depends on the names and the bytes of the files and on nothing
else.
"""

from __future__ import annotations

import argparse
import lzma
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

MAX_ARCHIVE_BYTES = 12 << 20
DICTIONARY_BYTES = 128 << 20
"""Longer than everything, so that equal tensors are found wherever they lie."""

_NOT_CHECKPOINTS = {"README.md", "FINDINGS.md"}


def entries(gold_dir: Path) -> Iterator[tarfile.TarInfo]:
    """What lies below ``gold_dir``, by name, with nothing but names, kinds and sizes.

    Raises:
        ValueError: a thing that is neither a plain file nor a directory.
    """
    for path in sorted(gold_dir.rglob("*"), key=lambda path: path.relative_to(gold_dir).parts):
        name = path.relative_to(gold_dir).as_posix()
        if name in _NOT_CHECKPOINTS:
            continue
        info = tarfile.TarInfo(name)
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise ValueError(f"{path}: neither a file nor a directory")
        if path.is_dir():
            info.type, info.mode = tarfile.DIRTYPE, 0o755
        else:
            info.size, info.mode = path.stat().st_size, 0o644
        yield info


def pack(gold_dir: Path, archive_path: Path) -> int:
    """Writes the archive; returns its size in bytes."""
    filters = [
        {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": DICTIONARY_BYTES}
    ]
    with (
        lzma.open(archive_path, "wb", format=lzma.FORMAT_XZ, filters=filters) as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for info in entries(gold_dir):
            if info.isdir():
                archive.addfile(info)
            else:
                with (gold_dir / info.name).open("rb") as file:
                    archive.addfile(info, file)
    return archive_path.stat().st_size


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Pack checkpoints of other software for the tests."
    )
    parser.add_argument("gold", type=Path, help="folder with the checkpoints")
    default = Path(__file__).with_name("golden.tar.xz")
    parser.add_argument(
        "archive", type=Path, nargs="?", default=default, help="default: tests/golden/golden.tar.xz"
    )
    options = parser.parse_args()
    if not options.gold.is_dir():
        parser.error(f"{options.gold} is no directory")
    n_bytes = pack(options.gold, options.archive)
    print(f"{options.archive}: {n_bytes:,} bytes")
    if n_bytes > MAX_ARCHIVE_BYTES:
        print(f"more than {MAX_ARCHIVE_BYTES:,} bytes", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
