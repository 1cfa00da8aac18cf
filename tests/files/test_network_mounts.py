"""Which file system a path lies on is read from the kernel's table of mounts."""

from __future__ import annotations

from pathlib import Path

from core.files.network_mounts import file_system_of, is_coherent


def test_the_longest_mount_point_above_a_path_counts(tmp_path: Path) -> None:
    inner = tmp_path / "a b" / "deep"
    inner.mkdir(parents=True)
    table = tmp_path / "mounts"
    point = str(tmp_path / "a b").replace(" ", "\\040")
    table.write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        f"2 1 0:3 / {point} rw,noatime shared:5 - nfs4 host:/x rw\n"
        f"3 1 0:4 / {tmp_path}/a rw - tmpfs none rw\nnonsense\n"
    )
    assert file_system_of(inner, mounts=table) == "nfs4"
    assert file_system_of(tmp_path, mounts=table) == "ext4"
    assert file_system_of(inner, mounts=tmp_path / "none") == ""
    assert file_system_of(tmp_path) != ""


def test_caches_of_hosts() -> None:
    assert [
        kind for kind in ("ext4", "lustre", "gpfs", "ceph", "tmpfs", "") if not is_coherent(kind)
    ] == []
    assert [kind for kind in ("nfs", "nfs4", "cifs", "fuse.sshfs", "9p") if is_coherent(kind)] == []
