"""Account for the files of a source directory that hold no tensors: carried from above, or listed.

No file is passed over in silence. A file is accounted for if the reader opened it, if tensors lie
in it, if it is carried, or if it matches ``_BOOKKEEPING``. All others are listed: what a trainer
saves beside the weights (random states, schedulers, arguments), weights in a second format,
folders. Of the directories above, which were descended through, files and folders are listed as
well, but not other iterations, which are checkpoints of their own.

Hugging Face's Trainer keeps ``config.json`` and similar files above DeepSpeed's directory: they are
carried from there.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from core.catalog.files_beside import carried_of
from core.files.json_object import parse_json_object
from core.files.store import LocalStore, list_files_below
from core.formats.dcp.facets import DcpFacts
from core.formats.huggingface.files import CONFIG, carried_files, config_of
from core.opening.open import ITERATION_DIR, NAMING_TRACKERS, RELEASE, TRACKER, iteration_dirs

if TYPE_CHECKING:
    from core.opening.open import Checkpoint

_BOOKKEEPING = re.compile(
    r"(.*/)?\..*"  # hidden files
    r"|\.[^/]*/.*"  # hidden folders: .git, .cache
    r"|.*\.index(\..+)?\.json"  # of weights in a second format
    r"|(.*\.)?ckpt-(manifest\.json|objects\.pt)"  # this project's own
    r"|(.*/)?[^/]*\.sync/.*"  # locks of Megatron's zarr backend
    r"|(.*/)?ocdbt\.process_\d+/.*",  # what one process of Orbax wrote, before it was merged
    re.DOTALL,
)
_DEEPSPEED = ("deepspeed", "deepspeed_universal")
_TOOL = re.compile(r"zero_to_\w+\.py")
"""Programs that DeepSpeed copies beside every checkpoint."""
_MAX_DOCUMENT_BYTES = 64 << 20
_MOST_NAMED = 20
"""Maximum number of files of one folder that are named; of more, the folder and their number."""


def unread_files(source: Checkpoint, *, linked: Collection[str] = ()) -> list[str]:
    """Return the files that are not accounted for, relative to the checkpoint.

    Those above the checkpoint are given with their directory.

    Args:
        source: an opened checkpoint whose objects have been read.
        linked: files that the result has as they are.
    """
    catalog, store = source.catalog, source.store
    if store.entry is not None:
        return []
    separate = tuple(f"{path}/" for path in source.below)
    unread = {name for name in list_files_below(store) if not f"{name}/".startswith(separate)}
    unread -= {*store.opened, *linked, *carried_of(catalog)}
    unread = {name for name in unread if _BOOKKEEPING.fullmatch(name) is None}
    # Only formats with one file per chunk have data files that have not been opened yet.
    for fragment in catalog.all_fragments() if unread else ():
        if fragment.array is not None:
            unread.discard(fragment.array.extent.file)
    dcp = catalog.facet(DcpFacts)
    unread |= set(() if dcp is None else dcp.unread)
    above = _above(source, carried=catalog.documents)
    return [*_folded(unread), *source.below, *_empty_folders(store), *above]


def documents_above(source: Checkpoint) -> dict[str, bytes]:
    """Return the small files that Hugging Face's Trainer keeps above DeepSpeed's directory."""
    if not source.passed or source.format.name not in _DEEPSPEED:
        return {}
    store = LocalStore(source.passed[-1])
    try:
        files = {
            name: size
            for name, size in carried_files(store).items()
            if _TOOL.fullmatch(name) is None
        }
        is_model = CONFIG in files and sum(files.values()) <= _MAX_DOCUMENT_BYTES
        return {name: store.read(name, 0, size) for name, size in files.items()} if is_model else {}
    finally:
        store.close()


def config_of_source(source: Checkpoint) -> Mapping[str, object] | None:
    """Return the parsed config.json beside the weights or above DeepSpeed's directory, or None.

    Raises:
        CorruptError: it is not JSON.
    """
    document = documents_above(source).get(CONFIG)
    if document is not None:
        return parse_json_object(document, file=CONFIG)
    return config_of(source.store) if CONFIG in carried_of(source.catalog) else None


def listed_files(names: Collection[str]) -> str:
    """Return the line of a summary, under "not carried", that lists these files."""
    return f"other files of the directory: {', '.join(names)}"


def _folded(names: Collection[str]) -> Iterator[str]:
    """Yield each name, or the folder of many names."""
    folders: dict[str, list[str]] = {}
    for name in sorted(names):
        folders.setdefault(name.partition("/")[0] if "/" in name else "", []).append(name)
    for folder, members in folders.items():
        if folder and len(members) > _MOST_NAMED:
            yield f"{folder}/ ({len(members)} files)"
        else:
            yield from members


def _empty_folders(store: LocalStore) -> Iterator[str]:
    """Yield the folders of a directory that hold nothing."""
    for name in store.folders():
        if not name.startswith(".") and not store.files(name) and not store.folders(name):
            yield f"{name}/"


def _above(source: Checkpoint, *, carried: Collection[str]) -> Iterator[str]:
    """Yield the files and folders in the directories that were descended through.

    Args:
        carried: names of files right above the checkpoint that are not listed.
    """
    below = {folder.name for folder in (*source.passed, source.path)}
    for folder in source.passed:
        store = LocalStore(folder)
        names = [name for name in store.files() if name not in (TRACKER, *NAMING_TRACKERS)]
        if folder == source.passed[-1]:
            names = [name for name in names if name not in carried]
        iterations = {*below, *iteration_dirs(store).values(), RELEASE}
        names += [
            f"{name}/"
            for name in store.folders()
            if name not in iterations and ITERATION_DIR.match(name) is None
        ]
        yield from (
            f"{folder.resolve().name}/{name}"
            for name in names
            if _BOOKKEEPING.fullmatch(name) is None
        )
