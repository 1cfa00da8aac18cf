"""What kind of file system a path lies on, as far as several hosts that write into one file must know.

Lustre, GPFS, BeeGFS, CephFS and cluster file systems keep the caches of their hosts coherent: two hosts may write to
different bytes of one page. NFS, SMB, AFS and 9p do not: a host may write a whole page of its cache back, and with it
old bytes of another host. FUSE stands for many; what its hosts may do is not known.

Source: nfs(5), "close-to-open cache consistency"; /proc/self/mountinfo in proc(5).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_INCOHERENT = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ncpfs", "coda", "virtiofs"})
_MOUNTS = Path("/proc/self/mountinfo")


def is_coherent(kind: str) -> bool:
    """Whether several hosts may write to different bytes of one file, on a file system of a kind."""
    return kind not in _INCOHERENT and not kind.startswith("fuse")


def file_system_of(path: Path, *, mounts: Path = _MOUNTS) -> str:
    """The kind of file system that a path lies on, such as ``nfs4``; "" where the system does not say.

    Args:
        path: exists.
        mounts: the kernel's table.
    """
    try:
        lines = mounts.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return ""
    wanted = os.path.realpath(path)
    longest, kind = -1, ""
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), fields[4])
        is_above = wanted == point or wanted.startswith(point if point.endswith("/") else f"{point}/")
        if is_above and len(point) >= longest:
            longest, kind = len(point), after.split(" ")[0]
    return kind
