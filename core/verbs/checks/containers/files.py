"""CK101–CK110: names and sizes of the files, and the first bytes of small ones.

This module needs no metadata: it finds entries that are not regular files, empty files, pointers
and error pages saved in place of a file, and leftovers of unfinished writes and copies. Missing and
truncated files are found by the checks of the formats.

Source: names of temporary files of rsync, curl, wget, aria2, browsers and huggingface_hub; Git LFS
specification 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from core.files.substitute import substitute_of
from core.files.walk import BROKEN_LINK, REPEATED_LINK
from core.verbs.checks.file_codes import NOT_ITS_KIND, UNREADABLE_FILE
from core.verbs.checks.finding import Finding, Severity, get_code
from core.verbs.checks.subject import DATA, Check, Subject

LEFT_OVER = get_code("CK107")
IRREGULAR = get_code("CK104")
EMPTY = get_code("CK102")

_MAY_BE_EMPTY = re.compile(r"\.distcp$")
"""torch creates a file even for a writer without items; ``.metadata`` lists those with items."""
_LEFT_OVER = re.compile(
    r"\.(tmp|temp|part|partial|incomplete|crdownload|aria2|filepart|download)(\.[0-9]+)?$"
    r"|^\..*\.?(safetensors|bin|pt|pth|distcp|json|metadata|zarray)\.[A-Za-z0-9]{6}$"
    r"|^\.nfs[0-9a-f]{8,}$"
)
"""Suffixes of downloads; rsync's ``.NAME.XXXXXX``; NFS files that were removed while open."""
_STAGES = re.compile(r"^(\.ckpt-stage|\..+\.ckpt-stage)$")
WEIGHTS = re.compile(
    r"\.(pt|pth|safetensors)$|(^|/)(pytorch|adapter|diffusion_pytorch)_model[^/]*\.bin$"
)
"""Files that are never text; files with other names may be."""
_PAGE_BYTES = 1 << 20
"""Upper limit for the size of a server's error page."""


def check_regular_files(subject: Subject) -> Iterator[Finding]:
    """Check that every entry is a file or a directory and can be listed (CK104, CK105)."""
    for name, kind in subject.tree.irregular.items():
        if "cannot be" in kind:
            yield UNREADABLE_FILE.finding(kind, file=name or None, found=kind)
            continue
        # A repeated link leads back to a folder that is walked anyway.
        is_harmless = kind == REPEATED_LINK or (kind == BROKEN_LINK and not DATA.search(name))
        severity = Severity.NOTE if is_harmless else None
        yield IRREGULAR.finding(
            f"the entry is {kind}",
            file=name,
            expected="a regular file",
            found=kind,
            severity=severity,
        )


def check_empty_files(subject: Subject) -> Iterator[Finding]:
    """Report empty files that, by their names, should have content (CK102)."""
    for name, size in subject.files.items():
        # Megatron's zarr backend leaves empty lock files below folders NAME.sync.
        is_in_lock = any(part.endswith(".sync") for part in name.split("/"))
        if size == 0 and DATA.search(name) and not _MAY_BE_EMPTY.search(name) and not is_in_lock:
            yield EMPTY.finding(
                "the file is empty", file=name, expected="at least 1 byte", found="0 bytes"
            )


def check_file_kinds(subject: Subject) -> Iterator[Finding]:
    """Report Git LFS pointers and servers' error pages saved in place of weights (CK108)."""
    for name, size in subject.files.items():
        if not 0 < size <= _PAGE_BYTES or not DATA.search(name) or name.endswith(".json"):
            continue
        head = subject.ends.heads.get(name, b"")
        substitute = substitute_of(head)
        if substitute is not None and (substitute.is_download or WEIGHTS.search(name)):
            yield NOT_ITS_KIND.finding(
                substitute.title,
                file=name,
                expected="the file itself",
                found=repr(head[:24].decode("utf-8", "replace")),
                hint=substitute.hint,
            )


def find_leftovers(subject: Subject) -> Iterator[Finding]:
    """Report unfinished writes and copies, inside and right next to the checkpoint (CK107)."""
    from core.publish.stage.folder_lock import stage_dir_of

    for folder in subject.tree.folders:
        if _STAGES.match(folder.rpartition("/")[2]):
            yield _leftover("unfinished output of ckpt", folder)
    for name in subject.files:
        if any(_STAGES.match(part) for part in name.split("/")[:-1]):
            continue
        if _LEFT_OVER.search(name.rpartition("/")[2]):
            yield _leftover("the name is typical of an unfinished write or copy", name)
    # Our own staging directory is a sibling of the destination.
    staging_dir = stage_dir_of(subject.path)
    if staging_dir.is_dir():
        yield LEFT_OVER.finding(
            "an earlier write to this path was not finished",
            file=f"../{staging_dir.name}",
            expected="nothing",
            found="an unfinished staging directory",
            hint="run the same command again (with --resume to continue the write), or remove the "
            "directory if nothing is writing to it",
        )


def _leftover(message: str, name: str) -> Finding:
    """Build the finding for a leftover inside the checkpoint."""
    return LEFT_OVER.finding(message, file=name, expected="nothing", found="a leftover")


CHECKS = (
    Check(check_regular_files),
    Check(check_empty_files),
    Check(check_file_kinds),
    Check(find_leftovers),
)
