"""Account for the files of a source directory that hold no tensors: carry them, or list them.

No file is ignored silently. A file is accounted for if the reader opened it, if tensors are stored
in it, if it is carried, or if it matches ``_BOOKKEEPING``. All others are listed: files that a
trainer saves next to the weights (random states, schedulers, arguments), weights in a second
format, folders. Files and folders of the directories that were descended through are listed too,
except for other iterations, which are checkpoints of their own.

Hugging Face's Trainer keeps ``config.json`` and similar files above DeepSpeed's directory: they are
carried from there. A conversion opens the scheduler and the random states above it together with
that directory (``with_files_above``), so that the result contains both.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from core.engine.catalog.facets import DcpFacts, TrainingState
from core.errors import UnsupportedError
from core.files.json_object import parse_json_object
from core.files.source_store import JoinedStore, SourceStore, join_stores, joined_prefix, open_store
from core.files.store import list_files_below
from core.formats.huggingface.files import CONFIG, carried_files, read_config_json
from core.opening.iterations import ITERATION_DIR, iteration_dirs
from core.opening.locate import NAMING_TRACKERS, RELEASE, TRACKER

if TYPE_CHECKING:
    from core.files.walk import Tree
    from core.formats.format import Format
    from core.opening.open import Checkpoint

_BOOKKEEPING = re.compile(
    r"(.*/)?\..*"  # hidden files
    r"|\.[^/]*/.*"  # hidden folders: .git, .cache
    r"|.*\.index(\..+)?\.json"  # indexes of weights in a second format
    r"|(.*\.)?ckpt-(manifest\.json|objects\.pt)"  # files of this project
    r"|(.*/)?[^/]*\.sync/.*"  # locks of Megatron's zarr backend
    r"|(.*/)?ocdbt\.process_\d+/.*"  # files of single Orbax processes, before merging
    r"|(.*/)?commit_success\.txt",  # Orbax's mark of a finished save
    re.DOTALL,
)
_TOOL = re.compile(r"zero_to_\w+\.py")
"""Programs that DeepSpeed copies next to every checkpoint."""
_MAX_DOCUMENT_BYTES = 64 << 20
_MOST_NAMED = 20
"""Maximum number of files of one folder that are listed; a fuller folder is listed as a count."""


def unread_files(source: Checkpoint, *, linked: Collection[str] = ()) -> list[str]:
    """Return the paths of files that are not accounted for, relative to the checkpoint.

    The paths of files above the checkpoint begin with the name of their directory.

    Args:
        source: an opened checkpoint whose objects have been read.
        linked: files that the result contains unchanged.

    Raises:
        StorageError: a directory cannot be read.
    """
    catalog, store = source.catalog, source.store
    if store.entry is not None:
        return []
    separate = tuple(f"{path}/" for path in source.below)
    unread = {name for name in list_files_below(store) if not f"{name}/".startswith(separate)}
    # Remove the files that the reader opened, those that are carried, and bookkeeping.
    unread -= {*store.opened, *linked, *(catalog.files.keys() - catalog.documents.keys())}
    unread = {name for name in unread if _BOOKKEEPING.fullmatch(name) is None}
    # Remove files with tensors. Only formats with one file per chunk have such files that have not
    # been opened yet, so the loop over all fragments is mostly skipped.
    for _, tensor in catalog.all_tensors() if unread else ():
        try:
            fragments = tensor.fragments()
        except UnsupportedError as err:
            # An array with a codec that is not known, which the user may exclude.
            folder = (err.file or "").rpartition("/")[0]
            unread = {name for name in unread if not name.startswith(f"{folder}/")}
            continue
        unread -= {part.array.extent.file for part in fragments if part.array is not None}
    # DCP's reader opened a ``meta.pt`` that is not Lightning's, but ignored it.
    dcp = catalog.facet(DcpFacts)
    unread |= set(() if dcp is None else dcp.unread)
    # Likewise files with an optimizer's name; those that are not carried are listed elsewhere.
    state = catalog.facet(TrainingState)
    if state is not None:
        unread = (unread | {*state.unread}) - {*state.dropped}
    above = list(_files_above(source, carried=catalog.documents))
    # The names of the state above DeepSpeed's directory begin with that of its own.
    if state is not None:
        above = [name for name in above if name not in {*state.files.values(), *state.dropped}]
    return [*_folded(unread), *source.below, *_empty_folders(store), *above]


def list_files(
    store: SourceStore, format: Format | None, *, below: Collection[str], depth: int | None = None
) -> Tree:
    """List the files of a checkpoint: those in its directory, and those that its index names.

    The walk lists a directory once; links may give its files further names, which an index may use.

    Args:
        format: the checkpoint's format; None if no format recognises it.
        below: relative paths of separate checkpoints.
        depth: as for ``core.files.walk.list_tree``.
    """
    from core.files.walk import REPEATED_LINK, list_tree

    tree = list_tree(store.root, entry=store.entry, depth=depth, without=below)
    links = tuple(f"{path}/" for path, kind in tree.irregular.items() if kind == REPEATED_LINK)
    if not links or format is None or format.list_indexed is None:
        return tree
    for name in format.list_indexed(store):
        if name.startswith(links) and name not in tree.files and store.exists(name):
            tree.files[name] = store.size(name)
            tree.irregular = {
                path: kind
                for path, kind in tree.irregular.items()
                if not name.startswith(f"{path}/")
            }
    tree.files = dict(sorted(tree.files.items()))
    return tree


def documents_above(source: Checkpoint) -> dict[str, bytes]:
    """Return the small files that Hugging Face's Trainer keeps above DeepSpeed's directory."""
    if not source.passed or not source.format.has_files_above:
        return {}
    store = open_store(source.passed[-1])
    try:
        files = {
            name: size
            for name, size in carried_files(store).items()
            if _TOOL.fullmatch(name) is None
        }
        # Without config.json these are the files of another tool.
        is_model = CONFIG in files and sum(files.values()) <= _MAX_DOCUMENT_BYTES
        if not is_model:
            return {}
        store.expect_headers(files)
        return {name: store.read(name, 0, size) for name, size in files.items()}
    finally:
        store.close()


def config_of_source(source: Checkpoint) -> Mapping[str, object] | None:
    """Return the parsed config.json next to the weights or above DeepSpeed's directory, or None.

    Raises:
        CorruptError: config.json is not a JSON object.
    """
    document = documents_above(source).get(CONFIG)
    if document is not None:
        return parse_json_object(document, file=CONFIG)
    return read_config_json(source.store) if CONFIG in source.catalog.files else None


def _folded(names: Collection[str]) -> Iterator[str]:
    """Yield each name, but for a folder with many of them the folder and their number."""
    folders: dict[str, list[str]] = {}
    for name in sorted(names):
        folders.setdefault(name.partition("/")[0] if "/" in name else "", []).append(name)
    for folder, members in folders.items():
        if folder and len(members) > _MOST_NAMED:
            yield f"{folder}/ ({len(members)} files)"
        else:
            yield from members


def _empty_folders(store: SourceStore) -> Iterator[str]:
    """Yield the empty folders of a directory, which a list of files omits."""
    for name in store.folders():
        if not name.startswith(".") and not store.files(name) and not store.folders(name):
            yield f"{name}/"


def _files_above(source: Checkpoint, *, carried: Collection[str]) -> Iterator[str]:
    """Yield the files and folders in the directories that were descended through.

    Args:
        carried: names of files in the innermost of these directories that are not to be listed.
    """
    descended = {folder.name for folder in (*source.passed, source.path)}
    for folder in source.passed:
        store = open_store(folder)
        ignored = {TRACKER, *NAMING_TRACKERS, *(carried if folder == source.passed[-1] else ())}
        names = [name for name in store.files() if name not in ignored]
        # Other iterations are checkpoints of their own.
        iterations = {*descended, *iteration_dirs(store).values(), RELEASE}
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


def with_files_above(source: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the training state above DeepSpeed's directory, if there is any.

    Raises:
        StorageError: the directory cannot be read.
    """
    if not source.passed or not source.format.has_files_above:
        return source
    from core.formats.trainer.state import with_state_above

    assert not isinstance(source.store, JoinedStore)
    above = open_store(source.passed[-1])
    catalog = with_state_above(
        source.catalog,
        above,
        prefix=joined_prefix(above),
        folder=source.passed[-1].resolve().name,
    )
    if catalog is source.catalog:
        above.close()
        return source
    above.on_open = source.store.on_open
    return replace(source, store=join_stores(source.store, [above]), catalog=catalog)
