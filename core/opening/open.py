"""Open a checkpoint: turn whatever the user points at into a store, a format and a catalog.

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
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import ZarrFacts
from core.engine.catalog.key_patterns import some_of
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    ReplicaMismatchError,
    UnsafeError,
    UnsupportedError,
    UsageError,
    is_at_or_below,
    list_some,
)
from core.files.remote_path import is_remote, location_of
from core.files.source_store import SourceStore, open_store
from core.files.store import check_name, translate_os_errors
from core.files.url import is_hub_page, refuse_url
from core.formats.dcp.folders import DIST_CKPT
from core.formats.format import LOADER_STATE, NEMO_FOLDERS, Format
from core.formats.huggingface.files import with_files, with_folder
from core.formats.registry import sniffed
from core.opening.config_beside import HUGGING_FACE, with_description
from core.opening.iterations import ITERATION_DIR, iteration_dirs, list_other_iterations
from core.opening.other_software import refuse_other_software
from core.pickle.noted import gc_paused, noting_uses
from core.values import dataclass

if TYPE_CHECKING:
    from core.pickle.uses import Use

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""Content of a tracker, and name of the directory, for weights without an iteration.

Megatron then starts at iteration 0 and loads no optimizer.
"""
NAMING_TRACKERS = ("latest", "latest_universal", "latest_ckpt_global_step.txt")
"""DeepSpeed's trackers, which contain a directory name, and SkyRL's, which contains a number."""
ERROR, FILL = MISSING_CHUNKS = ("error", "fill")
"""Treatments of zarr chunks that are not stored; some writers omit those of the fill value."""
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
_MOST_TRIED = 3
"""Maximum number of iterations that are tried beside a damaged one."""
_MAX_DESCENT = 8
"""Maximum number of directories to descend through; a link may lead back to its own directory."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint.

    Args:
        path: the checkpoint's directory or file, after descending from a root.
        store: read access to the files.
        format: the recognised format.
        catalog: the metadata.
        iteration: training iteration according to the metadata, else to the directory's name; None
            if neither records it.
        notes: remarks for the user on the choice of the directory and on missing chunks.
        uses: calls and references in the pickles of the metadata, including those of values that
            are not in the catalog.
        below: paths of separate checkpoints in subdirectories.
        passed: the directories that were descended through, the outermost first.
        problems: what is damaged and left out (``core.opening.damaged``); () if it is complete.
    """

    path: Path
    store: SourceStore
    format: Format
    catalog: Catalog
    iteration: int | None
    notes: tuple[str, ...] = ()
    uses: frozenset[Use] = frozenset()
    below: tuple[str, ...] = ()
    passed: tuple[Path, ...] = ()
    problems: tuple[CheckpointingException, ...] = ()

    @property
    def is_release(self) -> bool:
        """Return whether the path is Megatron's ``release`` directory, not an iteration."""
        return self.path.name == RELEASE


def open_checkpoint(
    path: Path,
    *,
    iteration: int | None = None,
    samples: bool = False,
    needs_optimizer: bool = True,
    needs_masters: bool = True,
    missing_chunks: str = FILL,
    drop_missing: bool = False,
    on_open: Callable[[int], None] | None = None,
) -> Checkpoint:
    """Find the checkpoint at ``path`` and read its metadata.

    Args:
        path: any of the kinds of paths that the module's docstring lists.
        iteration: the iteration of a root to open; None for its tracker's, else the newest.
        samples: open only one of several similar files, if the format supports it. The catalog is
            then good for inspecting, not for converting.
        needs_optimizer: raise if the optimizer cannot be read; False to read the weights from other
            files then, with a note, if the format has such files.
        needs_masters: raise also if only the optimizer's files have the weights in full precision.
        missing_chunks: treatment of zarr chunks that are not stored, ``fill`` or ``error``.
        drop_missing: leave out entries that an index lists without data; a note names them.
        on_open: becomes that of the store (``core.files.source_store``); the caller resets it when
            the files that are opened are no longer to be counted.

    Raises:
        UsageError: the path or the ``iteration`` does not exist, or the path is a URL.
        MissingShardError: the tracker's iteration is missing, or a chunk is and ``missing_chunks``
            is ``error``.
        UnsupportedError: no format recognises the path, or it has a feature that is not supported.
        CorruptError: the tracker or the metadata is damaged.
        UnsafeError: the tracker's name leads out of the root, or a pickle is hostile.
        StorageError: a file cannot be read.
    """
    from core.formats.missing_entries import leaving_out_missing
    from core.opening.code_in_pickles import naming_code_first

    # Find the checkpoint, and read its metadata; ``uses`` collects the names in its pickles.
    location = locate_checkpoint(path, iteration=iteration)
    store, format = location.store, location.format
    store.on_open = on_open
    try:
        # Metadata consists of so many small objects that the garbage collector would dominate.
        allowed = leaving_out_missing() if drop_missing else nullcontext(())
        with naming_code_first(store) as uses, gc_paused(), allowed as left_out:
            if location.failure is not None:
                raise location.failure
            assert format is not None, "nothing failed, so a format was recognised"
            read = format.sample if samples and format.sample is not None else format.read
            if needs_optimizer or (needs_masters and format.has_masters_in_optimizer):
                catalog = read(store)
            else:
                catalog = _read_despite_optimizer(store, format)
            if format.side_folders and store.entry is None:
                for folder in format.side_folders:
                    catalog = with_folder(catalog, store, folder)
                states = [name for name in store.files() if LOADER_STATE.fullmatch(name)]
                catalog = with_files(catalog, {name: store.size(name) for name in states})
            catalog = with_description(catalog, location.path, iteration=location.iteration)
        notes = (*location.notes, *_unstored_notes(catalog, missing_chunks))
        if left_out:
            keys = some_of(list(left_out))
            notes = (*notes, f"left out, as an index lists it without data: {keys}")
    except BaseException as err:
        store.close()
        if isinstance(err, CheckpointingException):
            _name_iteration(err, path, location.path)
        if isinstance(err, CorruptError):
            err.hint = _with_intact_iteration(err.hint, location)
        raise
    # A step that was chosen by its directory's name may have another number in its metadata.
    number = location.iteration if catalog.iteration is None else catalog.iteration
    if iteration is not None and number != iteration and not location.is_chosen:
        raise UsageError(
            f"iteration {iteration} was requested, but the checkpoint "
            + ("records no iteration" if number is None else f"is iteration {number}"),
            file=str(path),
            hint="point at the directory that holds the iterations",
        )
    return Checkpoint(
        location.path,
        store,
        format,
        catalog,
        number,
        notes,
        frozenset(uses),
        below=location.below,
        passed=location.passed,
    )


def _read_despite_optimizer(store: SourceStore, format: Format) -> Catalog:
    """Read a checkpoint; if that fails, its weights from files that hold them beside the optimizer.

    Raises:
        CheckpointingException: as for ``open_checkpoint``: both fail, or the first one for a reason
            that concerns the weights as well.
    """
    try:
        return format.read(store)
    except (UnsafeError, ReplicaMismatchError):
        raise
    except CheckpointingException as err:
        if format.read_weights is None:
            raise
        try:
            catalog = format.read_weights(store)
        except UnsupportedError:
            raise  # the weights cannot be read for a reason of their own
        except CheckpointingException:
            raise err from None
        place = "" if err.file is None else f"{err.file}: "
        note = (
            f"the optimizer cannot be read ({place}{err.message}); the weights are those of the "
            "other files, in their precision"
        )
        return replace(catalog, notes=(*catalog.notes, note))


def _name_iteration(err: CheckpointingException, path: Path, chosen: Path) -> None:
    """Make the file of an error relative to the path that the user named.

    Args:
        err: its file is relative to the chosen directory, or a complete path.
        path: a checkpoint, or a root of iterations.
        chosen: the directory that was opened, the path itself or below it.
    """
    if err.file is None or chosen == path or not chosen.is_relative_to(path):
        return
    if not any(is_at_or_below(err.file, str(place)) for place in (path, chosen)):
        err.file = f"{chosen.relative_to(path).as_posix()}/{err.file}"


def _with_intact_iteration(hint: str | None, location: Located) -> str | None:
    """Return the hint of an error about a damaged iteration, with one beside it that can be read.

    Args:
        hint: what else the user can do.
    """
    from core.opening.code_in_pickles import list_dangerous_names

    for path in list_other_iterations(location.passed, location.path)[:_MOST_TRIED]:
        # Whatever is wrong with another iteration, the error about this one is the one to report.
        with (
            suppress(CheckpointingException),
            gc_paused(),
            noting_uses(passes_on=False) as uses,
        ):
            other = locate_checkpoint(path)
            with closing(other.store):
                if other.format is None:
                    continue
                other.format.read(other.store)
                if not list_dangerous_names(uses):
                    advice = f"use {path}, which can be read"
                    return f"{hint}; or {advice}" if hint else advice
    return hint


def _unstored_notes(catalog: Catalog, missing_chunks: str) -> list[str]:
    """Return a note if zarr chunks are not stored and are read as the fill value.

    Args:
        missing_chunks: ``fill``, or ``error`` to refuse such chunks.

    Raises:
        UsageError: ``missing_chunks`` has another value.
        MissingShardError: a chunk is not stored, and ``missing_chunks`` is ``error``.
    """
    if missing_chunks not in MISSING_CHUNKS:
        raise UsageError(
            f"--missing-chunks: {missing_chunks!r} is none of: {', '.join(MISSING_CHUNKS)}"
        )
    if catalog.facet(ZarrFacts) is None:
        return []
    from core.formats.zarr.fill import missing_chunk, unstored

    # Writers of zarr may omit chunks that contain only the fill value, so a missing chunk is either
    # that or damage; the files do not show which.
    tensors = list(unstored(catalog))
    if not tensors:
        return []
    first = tensors[0]
    if missing_chunks == ERROR:
        raise missing_chunk(first)
    n_chunks = sum(tensor.n_chunks for tensor in tensors)
    subject, verb = ("chunk", "is") if n_chunks == 1 else ("chunks", "are")
    where = f"one inside {first.chunk_file}" if first.is_inner else first.chunk_file
    note = (
        f"{n_chunks:,} {subject} of {some_of([tensor.key for tensor in tensors])} {verb} not "
        f"stored and will be read as the fill value ({where}); to refuse this, pass "
        "--missing-chunks error"
    )
    return [note]


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
        notes = (*notes, f"not read, because they are separate checkpoints: {list_some(below)}")
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
                hint=f"iterations here: {_listed(iterations)}",
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
    return [f"read {name}; to read the weights in {HUGGING_FACE} instead, point at that directory"]


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
    newest = [iterations[number] for number in sorted(iterations, reverse=True)]
    hint = (
        f"point at one of the iterations: {list_some(newest)}"
        if iterations
        else "point at the checkpoint's own directory"
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
        f"read {name}, which has the optimizer state; to read {weights[0]}{more} instead, "
        "point at that file"
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
            "the directory is empty", file=store.label, hint="point at a checkpoint"
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
