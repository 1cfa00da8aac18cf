"""A disk that is really too small: a tmpfs in a namespace of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from core.publish.manifest.of_copy import MANIFEST
from core.verbs.convert.run import Job, run

SOURCE = "hf/llama/safetensors_sharded"
SCRIPT = """
mount -t tmpfs -o size="$1" tmpfs "$2" && mkdir "$2/place" || exit 99
shift 2
"$@"
echo "code $?"
ls -A "$DISK/place"
mount -o remount,size=64m "$DISK" || exit 99
"$@"
echo "then $?"
ls -A "$DISK/place"
"""


@cache
def can_mount() -> bool:
    """Whether this user may mount in a namespace of their own."""
    try:
        return (
            subprocess.run(
                ["unshare", "-Urm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], check=False
            ).returncode
            == 0
        )
    except OSError:
        return False


def converted_on(disk_dir: Path, size: str, src: Path, *more: str) -> list[str]:
    """What happens when a checkpoint is written to a disk of some size, and then to a larger
    one.
    """
    disk_dir.mkdir()
    command = [
        sys.executable,
        "-m",
        "ckpt_cli",
        "convert",
        src,
        disk_dir / "place" / "out",
        "--to",
        "dcp",
        *more,
    ]
    ended = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", SCRIPT, "sh", size, disk_dir, *command],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "DISK": str(disk_dir)},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


@pytest.fixture(scope="module")
def written_bytes(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """What the files take on a disk of pages of 4 KiB, without the manifest."""
    dst = tmp_path_factory.mktemp("large") / "out"
    run(Job(src=golden / SOURCE, dst=dst, to="dcp", fsync=False))
    files = [path for path in dst.rglob("*") if path.name != MANIFEST]
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in files)


@pytest.mark.skipif(not can_mount(), reason="may not mount a tmpfs")
@pytest.mark.parametrize(
    ("share", "more", "leftovers"),
    [
        (0.3, (), []),  # found out before anything is written
        (1.0, (), []),  # found out when the manifest is written
        (1.0, ("--resume",), [".out.ckpt-stage"]),
    ],
)
def test_a_disk_that_is_too_small_gets_nothing(
    share: float,
    more: tuple[str, ...],
    leftovers: list[str],
    written_bytes: int,
    golden: Path,
    tmp_path: Path,
) -> None:
    lines = converted_on(
        tmp_path / "disk", str(int(written_bytes * share)), golden / SOURCE, "--quiet", *more
    )
    assert lines == ["code 7", *leftovers, "then 0", "out"]
