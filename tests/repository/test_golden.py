"""The archive of checkpoints of other software."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path


def test_the_archive_holds_every_family(golden: Path) -> None:
    families = {path.name for path in golden.iterdir()}
    assert families >= {
        "deepspeed",
        "hf",
        "mcore0121_legacy",
        "mcore0121_torch_dist",
        "mcore0121_zarr",
        "mcore0161_torch_dist",
        "mcore_legacy",
        "mcore_torch_dist",
        "oracle",
        "torch_dcp",
    }
    assert (golden / "mcore_legacy/dense_gqa/tp4_pp1/latest_checkpointed_iteration.txt").is_file()


def test_the_archive_depends_on_names_and_bytes_only(tmp_path: Path, repo_dir: Path) -> None:
    (tmp_path / "gold/b/empty").mkdir(parents=True)
    (tmp_path / "gold/b/x.pt").write_bytes(bytes(range(256)) * 100)
    (tmp_path / "gold/a").write_bytes(b"")
    archives = []
    for i, mode in enumerate((0o600, 0o755)):
        (tmp_path / "gold/a").chmod(mode)
        os.utime(tmp_path / "gold/b/x.pt", (i, i))
        archives.append(tmp_path / f"{i}.tar.xz")
        subprocess.run(
            [sys.executable, repo_dir / "tests/golden/main.py", tmp_path / "gold", archives[-1]],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    assert archives[0].read_bytes() == archives[1].read_bytes()
    with tarfile.open(archives[0]) as archive:
        assert archive.getnames() == ["a", "b", "b/empty", "b/x.pt"]
