"""CK101–CK110: the files themselves, by names, sizes and the first bytes of small ones; whatever the format.

What a missing or shortened file means is found by the checks of the format; here is what needs no metadata: entries
that are no regular files, empty ones, pointers and error pages that were saved in place of a file, and what unfinished
writes and copies leave behind.

Source: names of temporary files of rsync, curl, wget, aria2, browsers and huggingface_hub; Git LFS specification 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from core.checks.check import Check
from core.checks.file_codes import ALL, EMPTY, IRREGULAR, LEFT_OVER, NOT_ITS_KIND, UNREADABLE_FILE
from core.checks.finding import Finding, Severity
from core.checks.subject import Subject
from core.errors import CheckpointingException
from core.files.substitute import HEAD_BYTES, substitute_of
from core.files.walk import BROKEN_LINK, REPEATED_LINK
from core.stage.stage import stage_dir_of

CODES = ALL

DATA = re.compile(
    r"\.(pt|pth|bin|ckpt|pkl|safetensors|distcp|npy|json)$|(^|/)(\.metadata|\.zarray|\.zgroup|manifest\.ocdbt)$"
)
"""Files that hold something if they are there. Chunks of zarr arrays have a check of their own."""
_MAY_BE_EMPTY = re.compile(r"\.distcp$")
"""torch gives a writer without items a file all the same; whether one should hold items, ``.metadata`` says."""
_LEFT_OVER = re.compile(
    r"\.(tmp|temp|part|partial|incomplete|crdownload|aria2|filepart|download)(\.[0-9]+)?$"
    r"|^\..*\.?(safetensors|bin|pt|pth|distcp|json|metadata|zarray)\.[A-Za-z0-9]{6}$"
    r"|^\.nfs[0-9a-f]{8,}$"
)
"""By suffix; rsync's ``.NAME.XXXXXX``; what NFS keeps of a file that was removed while it was open."""
_STAGES = re.compile(r"^(\.ckpt-stage|\..+\.ckpt-stage)$")
_WEIGHTS = re.compile(r"\.(pt|pth|safetensors)$|(^|/)(pytorch|adapter|diffusion_pytorch)_model[^/]*\.bin$")
"""Files that are never text; other names may be those of anything."""
_PAGE_BYTES = 1 << 20
"""No page of a server is longer."""


def regular(subject: Subject) -> Iterator[Finding]:
    """CK104, CK105: everything is a file or a directory, and can be listed."""
    for name, what in subject.tree.irregular.items():
        if "cannot be" in what:
            yield UNREADABLE_FILE.finding(f"{what}", file=name or None, found=what)
            continue
        is_harmless = what == REPEATED_LINK or (what == BROKEN_LINK and not DATA.search(name))
        severity = Severity.NOTE if is_harmless else None
        yield IRREGULAR.finding(f"it is {what}", file=name, expected="a regular file", found=what, severity=severity)


def empty(subject: Subject) -> Iterator[Finding]:
    """CK102: files that hold something by their names have bytes."""
    for name, size in subject.files.items():
        if size == 0 and DATA.search(name) and not _MAY_BE_EMPTY.search(name) and not _is_in_lock(name):
            yield EMPTY.finding("the file is empty", file=name, expected="at least 1 byte", found="0 bytes")


def _is_in_lock(name: str) -> bool:
    return any(part.endswith(".sync") for part in name.split("/"))  # left by Megatron's zarr backend


def own_kind(subject: Subject) -> Iterator[Finding]:
    """CK108: weights are no Git LFS pointers, and no pages that a server sent instead."""
    for name, size in subject.files.items():
        if not 0 < size <= _PAGE_BYTES or not DATA.search(name) or name.endswith(".json"):
            continue
        try:
            head = subject.store.read(name, 0, min(size, HEAD_BYTES))
        except CheckpointingException:
            continue  # said by the check that needs the file
        substitute = substitute_of(head)
        if substitute is not None and (substitute.is_download or _WEIGHTS.search(name)):
            yield NOT_ITS_KIND.finding(
                substitute.title,
                file=name,
                expected="the file itself",
                found=repr(head[:24].decode("utf-8", "replace")),
                hint=substitute.hint,
            )


def left_overs(subject: Subject) -> Iterator[Finding]:
    """CK107: no unfinished write or copy, inside or right beside the checkpoint."""
    for folder in subject.tree.folders:
        if _STAGES.match(folder.rpartition("/")[2]):
            yield _left("an unfinished write of this toolkit", folder)
    for name in subject.files:
        if any(_STAGES.match(part) for part in name.split("/")[:-1]):
            continue
        if _LEFT_OVER.search(name.rpartition("/")[2]):
            yield _left("the name is that of an unfinished write or copy", name)
    stage = stage_dir_of(subject.path)
    if stage.is_dir():
        yield LEFT_OVER.finding(
            "an unfinished write to this destination lies beside it",
            file=f"../{stage.name}",
            expected="nothing",
            found="an unfinished stage",
            hint="run the same command again, with --resume to continue it, or remove it if nobody writes it",
        )


def _left(message: str, name: str) -> Finding:
    return LEFT_OVER.finding(message, file=name, expected="nothing", found="a left-over")


CHECKS = (Check(regular), Check(empty), Check(own_kind), Check(left_overs))
