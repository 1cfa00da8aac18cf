"""The directories of a zarr hierarchy: which of them are arrays, and which names they may have."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from core.engine.catalog.key_patterns import rename_hint, some_of
from core.errors import MissingShardError, Report, UnsafeError, UnsupportedError, list_some
from core.files.store import check_name
from core.formats.missing_entries import report_missing

if TYPE_CHECKING:
    from core.files.store import ReadStore

_MAX_DEPTH = 32
_MAX_NAME_BYTES = 255
ROOT_KEY = "array"
"""The tensor's key if the checkpoint's own directory is an array."""
_MAX_SNIFFED = 32

Listing = Mapping[str, int]
"""File name → size in bytes."""


def walk_folders(
    store: ReadStore, *, is_array: Callable[[str, Listing], bool]
) -> Iterator[tuple[str, Listing, bool]]:
    """Yield every directory of the hierarchy, the files in it, and whether it is an array.

    Parents come before their subdirectories. Directories inside arrays are not visited. Those whose
    names begin with a dot or end with ``.sync`` (locks left by Megatron's zarr backend) are
    ignored.

    Args:
        is_array: returns whether a directory ("" for the root) with these files is an array.

    Raises:
        UnsafeError: directories are nested too deeply (a link may lead in a circle), or a name is
            not UTF-8 or leads outside the checkpoint.
    """
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        listing = store.sizes(folder)
        has_array = is_array(folder, listing)
        yield folder, listing, has_array
        # What is inside an array are directories of chunks, not further nodes.
        if has_array:
            continue
        subfolders = [path_in(folder, name) for name in store.folders(folder) if _is_visible(name)]
        for path in subfolders:
            if path.count("/") >= _MAX_DEPTH:
                raise UnsafeError(
                    f"directories are nested more than {_MAX_DEPTH} levels deep",
                    file=path[:200],
                    hint="check whether a symbolic link forms a loop, and remove it",
                )
            # Keys are used in messages and JSON, so that a name must be text.
            check_name(path)
            try:
                path.encode()
            except UnicodeEncodeError as err:
                raise UnsafeError(
                    f"the directory name {path!r} is not valid UTF-8",
                    hint="rename the directory, because no Zarr writer uses such a name",
                ) from err
        # The stack is popped from its end: reversed, the first subdirectory is visited next.
        waiting += reversed(subfolders)


def path_in(folder: str, name: str) -> str:
    """Join the path of a directory, "" for the root, and a name in it."""
    return f"{folder}/{name}" if folder else name


def _is_visible(name: str) -> bool:
    """Return whether a directory with this name can be a node of the hierarchy."""
    return not name.startswith(".") and not name.endswith(".sync")


def has_array_inside(store: ReadStore, marker: str) -> bool:
    """Return whether one of the first subdirectories contains a file named ``marker``."""
    visible = [name for name in store.folders() if _is_visible(name)]
    return any(store.exists(f"{name}/{marker}") for name in visible[:_MAX_SNIFFED])


def compare_with_index(
    listed: Collection[str], stored: Collection[str], *, file: str, marker: str, report: Report
) -> list[str]:
    """Compare the arrays of a hierarchy with those in its consolidated metadata; return notes.

    Args:
        listed: paths of the arrays in the consolidated metadata.
        stored: paths of the arrays with a directory of their own, readable or not.
        file: name of the file with the consolidated metadata.
        marker: name of an array's metadata file.
        report: receives an error for each array that is listed, but not stored.
    """
    for path in sorted({*listed} - {*stored}):
        err = MissingShardError(
            f"{file} lists the array, but its directory is missing",
            file=path_in(path, marker),
            key=path,
            hint="copy the checkpoint again, with all its files; if the array was removed on "
            "purpose, update the list with zarr.consolidate_metadata(PATH)",
        )
        report_missing(err, report)
    unlisted = sorted({*stored} - {*listed})
    if not listed or not unlisted:
        return []
    note = (
        f"{file} does not list {some_of(unlisted)}, so zarr-python does not find "
        f"{'it' if len(unlisted) == 1 else 'them'}; update the list with "
        "zarr.consolidate_metadata(PATH)"
    )
    return [note]


def check_keys(
    keys: Mapping[str, object], *, reserved: frozenset[str], are_files: bool = True
) -> None:
    """Raise unless every key can be the name of an array's directory.

    Args:
        keys: the keys of all tensors; none may be inside the directory of another.
        reserved: names that have another meaning in the hierarchy.
        are_files: the directories are those of a file system, which limits the length of names;
            False for the keys of a database.

    Raises:
        UnsupportedError: a key is not a path of valid names, or is inside another array.
    """
    problems = {
        key: problem
        for key in keys
        if (problem := _key_problem(key, keys, reserved, are_files=are_files)) is not None
    }
    if problems:
        first, *other_keys = problems
        others_text = f"; nor can {list_some(other_keys)}" if other_keys else ""
        raise UnsupportedError(
            f"the key cannot be a directory name, because {problems[first]}{others_text}",
            key=first,
            hint=rename_hint(list(problems)),
        )


def _key_problem(
    key: str, keys: Mapping[str, object], reserved: frozenset[str], *, are_files: bool
) -> str | None:
    """Return the reason why a key cannot be the name of a directory; None if it can."""
    parts = key.split("/")
    for part in parts:
        if part in ("", ".", "..") or "\0" in part or "\\" in part:
            return "it is not a relative path"
        if not _is_visible(part) or part in reserved:
            return f"{part!r} is reserved or ignored by readers"
        if are_files and len(part.encode("utf-8", "replace")) > _MAX_NAME_BYTES:
            return f"{part[:20]!r}… is longer than {_MAX_NAME_BYTES} bytes"
    for depth in range(1, len(parts)):
        if "/".join(parts[:depth]) in keys:
            return f"it would be inside the array {'/'.join(parts[:depth])!r}"
    return None
