"""Whether what a name says is on the disk before the name is: a check of a trace of operations.

A power cut may undo everything that was not synced. So at the moment of publication every file must
have been synced after its last change, and every directory after its last new name, the inner ones
before the outer; and the directory that gets the published name is synced after that, as are those
that hold directories which were made for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from tests.faults.operations import RENAMES, SYNCS, WRITES, Operation


def unordered(trace: list[Operation], *, dst: str) -> Iterator[str]:
    """What a power cut could lose although the run said that it was done.

    Args:
        trace: of an undisturbed run.
        dst: the destination, relative to the watched directory.
    """
    published = [o for o in trace if o.name in RENAMES and o.target == dst]
    if len(published) != 1:
        yield f"{len(published)} renames make the destination"
        return
    at = published[0].number
    staged = published[0].path
    synced = {o.path: o.number for o in trace if o.name in SYNCS and o.number < at}
    changed: dict[str, int] = {}
    for operation in trace:
        if operation.number < at and _is_in(operation.path, staged):
            if operation.name in (*WRITES, "ftruncate", "fallocate64"):
                changed[operation.path] = operation.number
            if operation.name in ("create", "mkdir", "link", *RENAMES):
                new = operation.target or operation.path
                is_file_again = operation.name == "create" and new in changed
                if not is_file_again and new != staged:
                    parent = str(PurePosixPath(new).parent)
                    changed[parent] = operation.number
                if operation.name == "create":
                    changed.setdefault(new, operation.number)
    if not changed:
        yield "nothing was written"
    for path, number in changed.items():
        if synced.get(path, -1) < number:
            yield (
                f"{path} changed at operation {number} and was not synced before it got its "
                f"name at {at}"
            )
    for path in changed:
        parent = str(PurePosixPath(path).parent)
        if parent in changed and parent != path and synced.get(parent, -1) < synced.get(path, -1):
            yield f"{parent} was synced before {path} in it"
    last = max(o.number for o in trace if o.name in RENAMES and _is_in_parent(o.target, dst))
    if not any(
        o.name in SYNCS and o.path == str(PurePosixPath(dst).parent) and o.number > last
        for o in trace
    ):
        yield "the directory of the destination is not synced after the rename"
    for operation in trace:
        if operation.name == "mkdir" and _is_in(dst, operation.path) and operation.path != dst:
            parent = str(PurePosixPath(operation.path).parent)
            if not any(
                o.name in SYNCS and o.path == parent and o.number > operation.number for o in trace
            ):
                yield f"{parent} is not synced, in which {operation.path} was made"


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def _is_in_parent(path: str, dst: str) -> bool:
    return path.startswith(dst)
