"""The directories of a zarr hierarchy, and those that are arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from core.catalog.key_patterns import listed_keys, rename_hint
from core.errors import UnsafeError, UnsupportedError
from core.files.store import check_name

if TYPE_CHECKING:
    from core.files.store import ReadStore

_MAX_DEPTH = 32
_MAX_NAME_BYTES = 255
ROOT_KEY = "array"
"""The tensor's key if the checkpoint's own directory is an array."""
_MAX_SNIFFED = 32

Listing = Mapping[str, int]
"""File name → bytes."""


def folders_of(
    store: ReadStore, *, is_array: Callable[[str, Listing], bool]
) -> Iterator[tuple[str, Listing, bool]]:
    """Yield every directory of the hierarchy, the files in it, and whether it is an array.

    Directories inside arrays are not visited.

    Directories whose names begin with a dot, or end with ``.sync`` (the locks that Megatron's zarr
    backend left), are ignored.

    Args:
        is_array: returns whether a directory ("" for the root) with these files is an array.

    Raises:
        UnsafeError: directories are nested too deeply (a link may lead in a circle), or a name is
            not valid text.
    """
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        listing = store.sizes(folder)
        has_array = is_array(folder, listing)
        yield folder, listing, has_array
        if has_array:
            continue
        subfolders = [
            f"{folder}/{name}" if folder else name
            for name in store.folders(folder)
            if _is_visible(name)
        ]
        for path in subfolders:
            if path.count("/") >= _MAX_DEPTH:
                raise UnsafeError(
                    f"directories are nested more than {_MAX_DEPTH} deep", file=path[:200]
                )
            _check_text(path)
        waiting += reversed(subfolders)


def _is_visible(name: str) -> bool:
    """Return whether a directory belongs to the hierarchy by its name."""
    return not name.startswith(".") and not name.endswith(".sync")


def _check_text(path: str) -> None:
    """Raise unless a path is valid text."""
    check_name(path)
    try:
        path.encode()
    except UnicodeEncodeError as err:
        raise UnsafeError(f"the directory's name {path!r} is not UTF-8") from err


def has_array_inside(store: ReadStore, marker: str) -> bool:
    """Return whether one of the first directories holds a file with this name."""
    visible = [name for name in store.folders() if _is_visible(name)]
    return any(store.exists(f"{name}/{marker}") for name in visible[:_MAX_SNIFFED])


def check_keys(keys: Mapping[str, object], *, reserved: frozenset[str]) -> None:
    """Raise unless every key can be the name of an array's directory.

    Args:
        keys: the keys of all tensors; none may lie inside another's directory.
        reserved: names that have another meaning.

    Raises:
        UnsupportedError: some keys cannot.
    """
    problems = {
        key: problem for key in keys if (problem := _key_problem(key, keys, reserved)) is not None
    }
    if problems:
        first, *other_keys = problems
        rest = f"; nor can {listed_keys(other_keys)}" if other_keys else ""
        raise UnsupportedError(
            f"the key cannot be the name of a directory: {problems[first]}{rest}",
            key=first,
            hint=rename_hint(list(problems)),
        )


def _key_problem(key: str, keys: Mapping[str, object], reserved: frozenset[str]) -> str | None:
    """Return why a key cannot be the name of an array's directory; None if it can."""
    parts = key.split("/")
    for part in parts:
        if part in ("", ".", "..") or "\0" in part or "\\" in part:
            return "it is not a path of names"
        if not _is_visible(part) or part in reserved:
            return f"readers ignore {part!r}, or take it for something else"
        if len(part.encode("utf-8", "replace")) > _MAX_NAME_BYTES:
            return f"{part[:20]!r}… has more than {_MAX_NAME_BYTES} bytes"
    for depth in range(1, len(parts)):
        if "/".join(parts[:depth]) in keys:
            return f"it would lie inside the array {'/'.join(parts[:depth])!r}"
    return None
