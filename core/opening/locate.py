"""Locate a checkpoint: find its directory and its format, whatever the user points at.

Accepted: a checkpoint directory, one of its files, a Megatron rank directory, or a training root,
which contains iterations:

=======================  ==================
 written by               directory
=======================  ==================
 Megatron                 ``iter_0000010/``
 DeepSpeed                ``global_step10/``
 torchtitan               ``step-10/``
 Hugging Face's Trainer   ``checkpoint-10/``
 accelerate               ``checkpoint_10/``
 Orbax                    ``10/``
=======================  ==================

NeMo 2 saves into the directory ``weights`` below the one that it names after the step, NeMo 1's
archives have ``model_weights`` beside ``model_config.yaml``. Frameworks
of reinforcement learning (verl, SkyRL, RLinf) save a directory for each model, such as ``actor``
and ``critic``; verl's torch_dist checkpoint is in ``dist_ckpt`` below it, in newer versions in
``{model,optimizer,extra}/dist_ckpt``. If there is one model only, it is opened.

Megatron and DeepSpeed write a tracker next to them, a file that names the iteration to resume from
(``latest_checkpointed_iteration.txt``, ``latest``). In a root, the iteration of its tracker is
opened, else the newest one. An iteration may be such a root again: Hugging Face's Trainer and
accelerate make DeepSpeed save into a directory below theirs::

    run/checkpoint-2/
    ├── latest               "global_step2"
    ├── global_step2/        the checkpoint: DeepSpeed's rank files
    ├── model.safetensors    16-bit copies of the weights (not with ZeRO-3)
    └── trainer_state.json  scheduler.pt  rng_state_0.pth …
"""

from __future__ import annotations

import os
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import TYPE_CHECKING

from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    UnsupportedError,
    UsageError,
    list_some,
)
from core.files.remote_path import is_remote, location_of
from core.files.source_store import SourceStore, open_store
from core.files.store import check_name, translate_os_errors
from core.files.url import is_hub_page, refuse_url
from core.formats.dcp.folders import DIST_CKPT
from core.formats.format import NEMO_FOLDERS, Format
from core.formats.registry import sniffed
from core.opening.config_beside import HUGGING_FACE
from core.opening.iterations import ITERATION_DIR, MOST_PATHS, iteration_dirs
from core.opening.other_software import refuse_other_software
from core.values import dataclass

if TYPE_CHECKING:
    pass

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""Content of a tracker, and name of the directory, for weights without an iteration.

Megatron then starts at iteration 0 and loads no optimizer.
"""
NAMING_TRACKERS = ("latest", "latest_universal", "latest_ckpt_global_step.txt")
"""DeepSpeed's trackers, which contain a directory name, and SkyRL's, which contains a number."""
_ROLES = frozenset({"actor", "policy", "critic", "ref"})
"""Directories of the models of a framework of reinforcement learning, one of which is a run's."""
_METADATA_FILES = (".metadata", "metadata.json", "common.pt")
_WEIGHTS = re.compile(
    r"^(\.metadata|metadata\.json|common\.pt|zarr\.json|\.zarray|\.zgroup"
    r"|pytorch_model.*\.bin|.*\.safetensors|.*\.index\.json)$"
)
"""Files that make their directory a checkpoint, whatever subdirectories it has."""
_WEIGHT_FILE = re.compile(
    r"^(pytorch_model|model|adapter_model)[^/]*\.(bin|safetensors)(\.index\.json)?$"
)
"""Copies of the weights that a trainer saves next to DeepSpeed's directory."""
_INDEX_FILE = re.compile(
    r"(^ckpt-manifest\.json$|\.index\.json|^zarr\.json|^\.zarray|^\.zgroup"
    r"|^manifest\.ocdbt|^config\.json|^model_index\.json)$"
)
"""Files that describe their directory; opening one opens the directory."""
_MAX_DESCENT = 8
"""Maximum number of directories to descend through; a link may lead back to its own directory."""


@dataclass(frozen=True, slots=True)
class Located:
    """The position and the format of a checkpoint whose metadata has not been read.

    Args:
        path: the checkpoint's directory or file, after descending from a root.
        store: read access to the files.
        format: the recognised format; None if no format recognises the path, or its root is broken.
        iteration: the iteration in the directory's name, or None.
        notes: remarks for the user on the choice of the directory.
        failure: why there is no format; None if there is one.
        below: paths of separate checkpoints in subdirectories.
        passed: the directories that were descended through, the outermost first.
        is_chosen: one of these directories has the number of the requested iteration; the
            checkpoint in it may have another number.
    """

    path: Path
    store: SourceStore
    format: Format | None
    iteration: int | None
    notes: tuple[str, ...] = ()
    failure: CheckpointingException | None = None
    below: tuple[str, ...] = ()
    passed: tuple[Path, ...] = ()
    is_chosen: bool = False


@dataclass(frozen=True, slots=True)
class _Descent:
    """The directory that was reached on the way from a training root to a checkpoint.

    Args:
        store: the directory that was reached.
        passed: the directories that were descended through, the outermost first.
        notes: remarks for the user on the choices on the way.
        is_chosen: one of these directories has the number of the requested iteration.
        failure: why it is impossible to descend further, or None if this is the checkpoint.
    """

    store: SourceStore
    passed: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()
    is_chosen: bool = False
    failure: CheckpointingException | None = None


def locate_checkpoint(path: Path, *, iteration: int | None = None) -> Located:
    """Find the checkpoint at ``path``, and record what is wrong with it in the result.

    Raises:
        UsageError: the path or the ``iteration`` does not exist, or the path is a URL.
        StorageError: the path cannot be read.
    """
    path = location_of(path)
    if is_remote(path) and not is_hub_page(path):
        is_dir = path.is_dir()
        if not (is_dir or path.is_file()):
            raise UsageError("no such object", file=str(path), hint="check the spelling of the URL")
    else:
        refuse_url(path)
        with translate_os_errors(str(path), doing="open"):
            if not os.path.lexists(path):
                from core.opening.absent import absent

                raise absent(path)
            is_dir = path.is_dir()
            # The metadata of most formats is at the end of a file.
            if not (is_dir or path.is_file()) and path.exists():
                from core.opening.absent import SAVE_STREAM

                raise UsageError(
                    "a pipe or a device, which can only be read from beginning to end",
                    file=str(path),
                    hint=SAVE_STREAM,
                )
    descent = _descend(open_store(path), iteration) if is_dir else _Descent(store_of_file(path))
    store, passed = descent.store, descent.passed
    # The caller gets the open store in any case but these: a wrong request, and an interruption.
    format: Format | None = None
    below: list[str] = []
    failure = descent.failure
    if failure is None:
        try:
            format, below = _recognise(store, is_dir=is_dir)
        except UsageError:
            store.close()
            raise
        except CheckpointingException as err:
            failure = err
        except BaseException:
            store.close()
            raise
    notes = descent.notes
    if below:
        notes = (*notes, f"ignored separate checkpoints in subdirectories: {list_some(below)}")
    # The innermost directory that is named after an iteration gives the number. The directory of a
    # model is inside such a one, even if the user pointed at it.
    inside = [store.root, *reversed(passed)]
    while len(inside) < _MAX_DESCENT and inside[-1].name in (DIST_CKPT, "model", *_ROLES):
        inside.append(inside[-1].parent)
    numbers = map(_iteration_in_name, inside)
    return Located(
        store.root / (store.entry or ""),
        store,
        format,
        next((number for number in numbers if number is not None), None),
        notes,
        failure,
        tuple(below),
        passed,
        descent.is_chosen,
    )


def _descend(store: SourceStore, iteration: int | None) -> _Descent:
    """Descend from a training root to a checkpoint; stay in any other directory.

    Raises:
        UsageError: the ``iteration`` does not exist.
    """
    wanted = iteration
    descent = _Descent(store)
    while len(descent.passed) < _MAX_DESCENT:
        folder = descent.store.root
        try:
            inner, reasons = _iteration_dir(folder, wanted)
        except UsageError:
            descent.store.close()
            raise
        except CheckpointingException as err:
            return replace(descent, failure=err)
        if inner == folder:
            break
        is_chosen = wanted is None and iteration is not None
        notes = (*descent.notes, *reasons)
        descent = _Descent(open_store(inner), (*descent.passed, folder), notes, is_chosen)
        # The roots below the requested iteration number theirs anew, so their trackers decide.
        if _iteration_in_name(inner) == wanted:
            wanted = None
    return descent


def _iteration_in_name(folder: Path) -> int | None:
    """Return the iteration that a directory is named after, or None."""
    match = ITERATION_DIR.search(folder.resolve().name)
    return None if match is None else int(match[1])


def store_of_file(path: Path) -> SourceStore:
    """Return the store of one file, or that of its directory for a file that describes it."""
    if path.name in _METADATA_FILES or path.suffix == ".distcp" or _INDEX_FILE.search(path.name):
        return open_store(path.parent)
    return open_store(path.parent, entry=path.name)


def _iteration_dir(root: Path, wanted: int | None) -> tuple[Path, list[str]]:
    """Choose the directory to read for ``root``.

    Args:
        wanted: the iteration that the user requests, or None.

    Returns:
        The directory, or ``root`` itself if it is not a training root; and notes about the choice.

    Raises:
        UsageError: the root does not contain the iteration.
        MissingShardError: the directory that the tracker names is missing.
        CorruptError: the tracker contains neither a number nor ``release``.
        UnsafeError: the tracker's name leads out of the root.
    """
    store = open_store(root)
    iterations = iteration_dirs(store)
    tracker = next(filter(store.exists, (TRACKER, *NAMING_TRACKERS)), None)
    # The user's choice comes first, then the tracker's. DeepSpeed's tracker alone does not count:
    # its directory may have any name, whose number is compared after reading.
    if wanted is not None and (iterations or tracker == TRACKER):
        if wanted not in iterations:
            raise UsageError(
                f"iteration {wanted} not found",
                file=str(root),
                hint=f"available iterations: {_listed(iterations)}",
            )
        return root / iterations[wanted], []
    if tracker is not None:
        name = _tracked_name(store, tracker, iterations)
        return root / name, [] if tracker == TRACKER else _unread_weights(store, name)
    if not iterations:
        inner = _inner_folder(store)
        return (root if inner is None else root / inner), _unread_folder(store, inner)
    # Without a tracker the newest iteration is read, unless the root is a checkpoint itself, as the
    # final weights of a Hugging Face run are. Weights next to DeepSpeed's rank files are copies.
    name = iterations[max(iterations)]
    reasons = [f"no tracker file; using the newest iteration, {name}"]
    if not any(map(_WEIGHTS.search, store.files())):
        return root / name, reasons
    from core.formats.deepspeed.files import is_rank_file

    if any(map(is_rank_file, store.files(name))):
        return root / name, reasons + _unread_weights(store, name)
    return root, []


def _inner_folder(store: SourceStore) -> str | None:
    """Return the directory below that alone is the checkpoint, as some frameworks save it."""
    if any(map(_WEIGHTS.search, store.files())):
        return None
    folders = store.folders()
    if not NEMO_FOLDERS.isdisjoint(folders):
        from core.formats.mcore.nemo_config import (
            MODEL_CONFIG,
            MODEL_WEIGHTS,
            WEIGHTS,
            has_weights_below,
        )

        if has_weights_below(store):
            return WEIGHTS
        if store.exists(MODEL_CONFIG) and store.files(MODEL_WEIGHTS):
            return MODEL_WEIGHTS
    if DIST_CKPT in folders and store.files(DIST_CKPT):
        return DIST_CKPT
    # A directory of several models is no checkpoint; neither is an array that has such a name.
    roles = [name for name in folders if name in _ROLES]
    if len(roles) != 1 or _has_format(store):
        return None
    with closing(open_store(store.root / roles[0])) as folder:
        is_model = _inner_folder(folder) is not None or _is_checkpoint(folder)
    return roles[0] if is_model else None


def _unread_folder(store: SourceStore, name: str | None) -> list[str]:
    """Return a note on weights under Hugging Face's names next to the directory to read."""
    if name != DIST_CKPT or not any(map(_WEIGHT_FILE.search, store.files(HUGGING_FACE))):
        return []
    return [f"read {name}; to read the weights in {HUGGING_FACE} instead, pass that directory"]


def _tracked_name(store: SourceStore, tracker: str, iterations: dict[int, str]) -> str:
    """Read from a tracker the name of the directory to open.

    Args:
        tracker: file name of the tracker.
        iterations: iteration → directory name, of those next to the tracker.

    Raises:
        MissingShardError: the directory is missing.
        CorruptError: Megatron's tracker contains neither a number nor ``release``.
        UnsafeError: the name in DeepSpeed's tracker leads out of the root.
    """
    file = str(store.root / tracker)
    # Not --iteration: of two checkpoints, one has no such option.
    newest = [store.root / iterations[number] for number in sorted(iterations, reverse=True)]
    hint = (
        "pass one of the iteration directories: "
        f"{list_some(map(quote, map(str, newest)), MOST_PATHS)}"
        if iterations
        else "pass the checkpoint's own directory"
    )
    max_bytes = 64 if tracker == TRACKER else 256
    content = store.read(tracker, 0, min(store.size(tracker), max_bytes))
    text = content.decode("utf-8", "replace").strip()
    # DeepSpeed writes the directory's name, Megatron the number of the iteration, or "release".
    if tracker != TRACKER:
        name = check_name(text, found_in=file)
        if text.isascii() and text.isdigit():  # SkyRL's
            name = iterations.get(int(text), name)
    elif text == RELEASE:
        name = RELEASE
    elif text.isascii() and text.isdigit():
        name = iterations.get(int(text), f"iter_{int(text):07d}")
    else:
        raise CorruptError(
            f"the tracker contains {text[:40]!r}, which is neither a number nor 'release'",
            file=file,
            hint=hint,
        )
    if not (store.root / name).is_dir():
        raise MissingShardError(f"the tracker names {name}, which is missing", file=file, hint=hint)
    return name


def _unread_weights(store: SourceStore, name: str) -> list[str]:
    """Return a note on a trainer's copies of the weights next to the directory to read."""
    weights = [file for file in store.files() if _WEIGHT_FILE.search(file)]
    if not weights:
        return []
    more = f" (and {len(weights) - 1} more)" if len(weights) > 1 else ""
    note = (
        f"read {name}, which has the optimizer state, and ignored {weights[0]}{more}; to read "
        "these weights instead, pass their file"
    )
    return [note]


def _recognise(store: SourceStore, *, is_dir: bool) -> tuple[Format, list[str]]:
    """Recognise the format of a store, and find separate checkpoints in its subdirectories.

    Args:
        is_dir: the user's path is a directory, not a file that describes its directory.

    Raises:
        UnsupportedError: the directory is empty, or no format recognises the store; the error names
            what it is instead.
    """
    if is_dir and not store.files() and not store.folders():
        raise UnsupportedError(
            "the directory is empty",
            file=store.label,
            hint="pass a directory that contains a checkpoint",
        )
    refuse_other_software(store)
    try:
        format = sniffed(store)
    except UnsupportedError as err:
        from core.opening.unrecognised import Search, build_unrecognised_error, search_below

        search = Search(()) if store.entry is not None else search_below(store, _is_checkpoint)
        raise build_unrecognised_error(store, known=err.hint or "", below=search) from None
    if store.entry is not None or format.own_folders is None:
        return format, []
    if not store.folders():
        return format, []
    from core.opening.unrecognised import NEAR, search_below

    own_folders = [*format.own_folders(store), *format.side_folders]
    search = search_below(store, _is_checkpoint, without=own_folders, most_levels=NEAR)
    paths = [*search.paths]
    # What the index lists is no separate checkpoint, whatever its folder is called. The index is
    # read only if there is something to decide.
    if paths and format.list_indexed is not None:
        own = {
            place.as_posix()
            for file in format.list_indexed(store)
            for place in (PurePosixPath(file), *PurePosixPath(file).parents)
        }
        paths = [path for path in paths if path not in own]
    return format, paths


def _is_checkpoint(store: SourceStore) -> bool:
    """Return whether a directory seems to be a checkpoint or a training root."""
    if store.exists(TRACKER) or any(map(store.exists, NAMING_TRACKERS)) or iteration_dirs(store):
        return True
    return _has_format(store)


def _has_format(store: SourceStore) -> bool:
    """Return whether a format recognises a directory."""
    try:
        sniffed(store)
    except UnsupportedError:
        return False
    return True


def _listed(iterations: dict[int, str]) -> str:
    """List iterations as text, shortened if there are many."""
    numbers = sorted(iterations)
    if len(numbers) > 8:
        return (
            f"{numbers[0]}, {numbers[1]}, … {numbers[-2]}, {numbers[-1]} ({len(numbers)} in total)"
        )
    return ", ".join(map(str, numbers)) or "none"
