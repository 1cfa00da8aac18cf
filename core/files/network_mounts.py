"""Find the type of a path's file system, to decide whether several hosts may write into one file.

Lustre, GPFS, BeeGFS, CephFS and cluster file systems keep the caches of their hosts coherent: two
hosts may write to different bytes of one page. NFS, SMB, AFS and 9p do not: a host may write back a
complete page of its cache, and with it stale bytes of another host's range. FUSE stands for many
file systems with unknown guarantees, so it counts as incoherent.

Source: nfs(5), "close-to-open cache consistency"; /proc/self/mountinfo in proc(5).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_INCOHERENT = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ncpfs", "coda", "virtiofs"}
)
_MOUNTS = Path("/proc/self/mountinfo")


def is_coherent(kind: str) -> bool:
    """Return whether several hosts may write to different bytes of one file at the same time."""
    return kind not in _INCOHERENT and not kind.startswith("fuse")


def file_system_of(path: Path, *, mounts: Path = _MOUNTS) -> str:
    """Return the type of the file system that contains a path, such as ``nfs4``.

    Args:
        path: an existing path.
        mounts: the kernel's mount table.

    Returns:
        "" if the system has no mount table.
    """
    try:
        lines = mounts.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return ""

    # The innermost mount point above the path counts.
    real_path = os.path.realpath(path)
    longest, kind = -1, ""
    for line in lines:
        # Field 5 is the mount point; the type is the first field after the separator " - ".
        mount_fields, _, source_fields = line.partition(" - ")
        fields = mount_fields.split(" ")
        if len(fields) < 5 or not source_fields:
            continue
        # Spaces and other special characters are written as octal escapes: \040.
        point = re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), fields[4])
        is_above = real_path == point or real_path.startswith(
            point if point.endswith("/") else f"{point}/"
        )
        # Of equal mount points the last one counts: it hides those that were mounted before.
        if is_above and len(point) >= longest:
            longest, kind = len(point), source_fields.split(" ")[0]
    return kind
