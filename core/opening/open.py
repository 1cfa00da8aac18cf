"""Open a checkpoint: turn whatever the user points at into a store, a format and a catalog.

Accepted: a checkpoint directory, one file of it, a Megatron rank directory, or a training root that
holds iterations (``latest_checkpointed_iteration.txt`` beside ``iter_0000010/``, DeepSpeed's
``latest`` beside ``global_step10/``, ``step-10/`` as torchtitan, ``checkpoint-10/`` as Hugging
Face, ``checkpoint_10/`` as accelerate and ``10/`` as Orbax name them). A root descends to the
iteration that its tracker names, else to the newest one. An iteration may be such a root again:
Hugging Face's Trainer and accelerate have DeepSpeed save into a directory below theirs::

    run/checkpoint-2/
    ├── latest               "global_step2"
    ├── global_step2/        the checkpoint: DeepSpeed's rank files
    ├── model.safetensors    16-bit copies of the weights (not with ZeRO-3)
    └── trainer_state.json  scheduler.pt  rng_state_0.pth …
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from core.catalog.catalog import Catalog
from core.catalog.key_patterns import some_of
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    UnsupportedError,
    UsageError,
)
from core.files.store import LocalStore, check_name, translate_os_errors
from core.files.url import hub_download, refuse_url
from core.formats.deepspeed.files import is_rank_file
from core.formats.format import Format
from core.formats.registry import sniffed
from core.formats.zarr.fill import missing_chunk, unstored
from core.opening.unrecognised import checkpoints_below, listed, refusal_of
from core.pickle.reader import gc_paused, noting_uses
from core.pickle.uses import Use

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""Content of a tracker and name of its directory instead of an iteration; Megatron then starts at
iteration 0 and loads no optimizer.
"""
NAMING_TRACKERS = ("latest", "latest_universal")
"""DeepSpeed's trackers, which hold the directory's name."""
ITERATION_DIR = re.compile(
    r"(?:iter_|step-|step_|global_step_?|checkpoint[-_])(\d+)(?:_universal)?$"
)
ERROR, FILL = MISSING_CHUNKS = ("error", "fill")
"""Treatments of zarr chunks that are not stored; some writers omit those of the fill value."""
_ORBAX_STEP = "_CHECKPOINT_METADATA"
"""A file in the directories of Orbax's CheckpointManager, whose names are numbers."""
_METADATA_FILES = (".metadata", "metadata.json", "common.pt")
_WEIGHTS = re.compile(
    r"^(\.metadata|metadata\.json|common\.pt|zarr\.json|\.zarray|\.zgroup|pytorch_model.*\.bin|.*\.safetensors|.*\.index\.json)$"
)
"""Files that make their directory a checkpoint, whatever directories are in it."""
_WEIGHT_FILE = re.compile(
    r"^(pytorch_model|model|adapter_model)[^/]*\.(bin|safetensors)(\.index\.json)?$"
)
"""Weights that a trainer saves beside DeepSpeed's directory."""
_INDEX_FILE = re.compile(
    r"(^ckpt-manifest\.json$|\.index\.json|^zarr\.json|^\.zarray|^\.zgroup|^manifest\.ocdbt|^config\.json)$"
)
"""Files that stand for their directory, which they describe."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint.

    Args:
        path: the directory or file that holds it, after descending from a root.
        store: read access to its files.
        format: its format.
        catalog: its metadata.
        iteration: training iteration, from the tracker, the directory's name or the metadata; None
        if none records it.
        notes: what the user should know about the choice that was made.
        uses: what the pickles of its metadata do with names, also with those that the catalog does
        not hold.
        below: paths of checkpoints in directories below it, which are not part of it.
        passed: the directories above it that were descended through, the outermost first.
    """

    path: Path
    store: LocalStore
    format: Format
    catalog: Catalog
    iteration: int | None
    notes: tuple[str, ...] = ()
    uses: frozenset[Use] = frozenset()
    below: tuple[str, ...] = ()
    passed: tuple[Path, ...] = ()

    @property
    def is_release(self) -> bool:
        """Return whether it is in Megatron's ``release`` directory, not an iteration."""
        return self.path.name == RELEASE


def open_checkpoint(
    path: Path, *, iteration: int | None = None, samples: bool = False, missing_chunks: str = FILL
) -> Checkpoint:
    """Find the checkpoint at ``path`` and read its metadata.

    Args:
        path: any of the kinds of paths that the module's docstring lists.
        iteration: which iteration of a root; None for the one its tracker names, else the newest.
        samples: open only one of the files that look alike, where the format can; for looking, not
        for converting.
        missing_chunks: how to treat zarr chunks that are not stored: ``fill`` or ``error``.

    Raises:
        UsageError: the path or the ``iteration`` does not exist.
        MissingShardError: the tracker names an iteration that is missing, or a chunk is missing.
        UnsupportedError: no format recognises it.
        CorruptError: the metadata contradicts itself.
    """
    location = locate_checkpoint(path, iteration=iteration)
    store, format = location.store, location.format
    try:
        if location.failure is not None:
            raise location.failure
        assert format is not None, "nothing failed, so a format was recognised"
        with noting_uses() as uses, gc_paused():
            catalog = (
                format.sample(store)
                if samples and format.sample is not None
                else format.read(store)
            )
        notes = (*location.notes, *_unstored_notes(catalog, missing_chunks))
    except BaseException:
        store.close()
        raise
    number = location.iteration if catalog.iteration is None else catalog.iteration
    if iteration is not None and number != iteration and not location.is_chosen:
        raise UsageError(
            f"--iteration {iteration} does not match the checkpoint, "
            + ("which records no iteration" if number is None else f"which is iteration {number}"),
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


def _unstored_notes(catalog: Catalog, missing_chunks: str) -> list[str]:
    """Return a note if zarr chunks are not stored and are read as the fill value.

    Args:
        missing_chunks: ``fill``, or ``error`` to refuse them.

    Raises:
        UsageError: ``missing_chunks`` has another value.
        MissingShardError: a chunk is missing, and that is refused.
    """
    if missing_chunks not in MISSING_CHUNKS:
        raise UsageError(
            f"--missing-chunks: {missing_chunks!r} is none of: {', '.join(MISSING_CHUNKS)}"
        )
    tensors = list(unstored(catalog))
    if not tensors:
        return []
    first = tensors[0]
    if missing_chunks == ERROR:
        raise missing_chunk(first)
    n_chunks = sum(tensor.n_chunks for tensor in tensors)
    where = f"one inside {first.chunk_file}" if first.is_inner else first.chunk_file
    verbs = ("is", "reads") if n_chunks == 1 else ("are", "read")
    note = (
        f"{n_chunks:,} {'chunk' if n_chunks == 1 else 'chunks'} of {some_of([tensor.key for tensor in tensors])} "
        f"{verbs[0]} not stored and {verbs[1]} as the fill value ({where}); --missing-chunks error refuses this"
    )
    return [note]


@dataclass(frozen=True, slots=True)
class Located:
    """The position and the format of a checkpoint whose metadata have not been read.

    Args:
        path: the directory or file that holds it, after descending from a root.
        store: read access to its files.
        format: the format it looks like; None if none recognises it, or its root is broken.
        iteration: the iteration of the directory's name, or None.
        notes: what the user should know about the choice that was made.
        failure: why there is no format; None if there is one.
        below: paths of checkpoints in directories below it, which are not part of it.
        passed: the directories above it that were descended through, the outermost first.
        is_chosen: one of these directories has the number of the iteration that was asked for; the
        checkpoint in it may count otherwise.
    """

    path: Path
    store: LocalStore
    format: Format | None
    iteration: int | None
    notes: tuple[str, ...] = ()
    failure: CheckpointingException | None = None
    below: tuple[str, ...] = ()
    passed: tuple[Path, ...] = ()
    is_chosen: bool = False


_MAX_DESCENT = 8
"""Maximum number of directories to descend through; a link may lead back to its own directory."""


@dataclass(frozen=True, slots=True)
class _Descent:
    """How far the way from a training root to a checkpoint has led.

    Args:
        store: the directory that was reached.
        passed: the directories above it that were descended through, the outermost first.
        notes: what the user should know about the choices that were made.
        is_chosen: one of these directories has the number of the iteration that was asked for.
        failure: why the way ends here, or None if this is the checkpoint.
    """

    store: LocalStore
    passed: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()
    is_chosen: bool = False
    failure: CheckpointingException | None = None


def locate_checkpoint(path: Path, *, iteration: int | None = None) -> Located:
    """Find the checkpoint at ``path``; what is wrong with it is recorded in the result.

    Raises:
        UsageError: the path or the ``iteration`` does not exist.
        StorageError: the path cannot be read.
    """
    refuse_url(path)
    with translate_os_errors(str(path), doing="open"):
        if not os.path.lexists(path):
            raise _absent(path)
        is_dir = path.is_dir()
    descent = _descend(LocalStore(path), iteration) if is_dir else _Descent(store_of_file(path))
    store, passed, format, failure = descent.store, descent.passed, None, descent.failure
    below: list[str] = []
    if failure is None:
        try:
            if is_dir:
                _refuse_empty(store)
            format = _recognise(store)
            if store.entry is None and format.own_folders is not None:
                below = checkpoints_below(store, _is_checkpoint, without=format.own_folders(store))
        except UsageError:
            store.close()
            raise
        except CheckpointingException as err:
            format, failure = None, err
        except BaseException:
            store.close()
            raise
    # The innermost directory that is named after an iteration gives the number.
    numbers = (_iteration_in_name(folder) for folder in (store.root, *reversed(passed)))
    return Located(
        store.root / store.entry if store.entry else store.root,
        store,
        format,
        next((number for number in numbers if number is not None), None),
        (
            *descent.notes,
            *(
                [f"not read, because they are separate checkpoints: {listed(below)}"]
                if below
                else []
            ),
        ),
        failure,
        tuple(below),
        passed,
        descent.is_chosen,
    )


def _descend(store: LocalStore, iteration: int | None) -> _Descent:
    """Descend from a training root to a checkpoint; any other directory is kept.

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
        descent = _Descent(LocalStore(inner), (*descent.passed, folder), notes, is_chosen)
        if _iteration_in_name(inner) == wanted:
            wanted = None
    return descent


def _iteration_in_name(folder: Path) -> int | None:
    """Return the iteration that a directory is named after, or None."""
    match = ITERATION_DIR.search(folder.resolve().name)
    return None if match is None else int(match[1])


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def _absent(path: Path) -> UsageError:
    """Return the error for a path that does not exist, which may be a model on the Hub."""
    if _HUB_ID.fullmatch(str(path)) and not path.parent.exists():
        return UsageError(
            "no such file or directory",
            file=str(path),
            hint=f"if this is a model on the Hugging Face Hub, download it first: {hub_download(str(path))}",
        )
    return UsageError(
        "no such file or directory", file=str(path), hint="check the spelling of the path"
    )


def store_of_file(path: Path) -> LocalStore:
    """Return the store for one file; a metadata file stands for its directory."""
    if path.name in _METADATA_FILES or path.suffix == ".distcp" or _INDEX_FILE.search(path.name):
        return LocalStore(path.parent)
    return LocalStore(path.parent, entry=path.name)


def iteration_dirs(store: LocalStore) -> dict[int, str]:
    """Return iteration → name of its directory, for all directories right below a training root."""
    names: dict[int, str] = {}
    for (
        name
    ) in store.folders():  # sorted, so that a plain directory comes before its universal form
        if match := ITERATION_DIR.match(name):
            names.setdefault(int(match.group(1)), name)
        elif name.isascii() and name.isdigit() and store.exists(f"{name}/{_ORBAX_STEP}"):
            names.setdefault(int(name), name)
    return names


def _iteration_dir(root: Path, wanted: int | None) -> tuple[Path, list[str]]:
    """Choose the directory to read for ``root``.

    Args:
        wanted: the iteration that the user asks for, or None.

    Returns:
        The directory, ``root`` itself if it is not a training root, and notes about the choice.

    Raises:
        UsageError: the root does not have the iteration.
        MissingShardError: the tracker names a directory that is missing.
        CorruptError: the tracker holds neither a number nor ``release``.
    """
    store = LocalStore(root)
    iterations = iteration_dirs(store)
    has_tracker = store.exists(TRACKER)
    # What the user asks for comes first, then what a tracker names.
    if wanted is not None and (iterations or has_tracker):
        if wanted not in iterations:
            raise UsageError(
                f"iteration {wanted} not found",
                file=str(root),
                hint=f"iterations here: {_listed(iterations)}",
            )
        return root / iterations[wanted], []
    if has_tracker:
        return root / _tracked_name(store, root, iterations), []
    for tracker in NAMING_TRACKERS:
        if store.exists(tracker):
            name = _named(store, root, tracker, iterations)
            return root / name, _unread_weights(store, name)
    if not iterations:
        return root, []
    # Without a tracker the newest iteration is read, unless the root is a checkpoint itself.
    name = iterations[max(iterations)]
    reasons = [f"no tracker file; using the newest iteration, {name}"]
    if not any(map(_WEIGHTS.search, store.files())):
        return root / name, reasons
    if any(map(is_rank_file, store.files(name))):
        return root / name, reasons + _unread_weights(store, name)
    return root, []


def _tracked_name(store: LocalStore, root: Path, iterations: dict[int, str]) -> str:
    """Return the name of the directory that Megatron's tracker names.

    Raises:
        MissingShardError: the directory is missing.
        CorruptError: the tracker holds neither a number nor ``release``.
    """
    text = store.read(TRACKER, 0, min(store.size(TRACKER), 64)).decode("utf-8", "replace").strip()
    if text == RELEASE:
        name = RELEASE
    elif text.isascii() and text.isdigit():
        name = iterations.get(int(text), f"iter_{int(text):07d}")
    else:
        raise CorruptError(
            f"the tracker holds {text[:40]!r}, which is neither a number nor 'release'",
            file=str(root / TRACKER),
            hint=f"pass --iteration; iterations here: {_listed(iterations)}",
        )
    if not (root / name).is_dir():
        raise MissingShardError(
            f"the tracker names {name}, which is missing",
            file=str(root / TRACKER),
            hint=f"pass --iteration; iterations here: {_listed(iterations)}",
        )
    return name


def _unread_weights(store: LocalStore, name: str) -> list[str]:
    """Return a note on a trainer's copies of the weights beside the directory that is read."""
    weights = [file for file in store.files() if _WEIGHT_FILE.search(file)]
    if not weights:
        return []
    more = f" (and {len(weights) - 1} more)" if len(weights) > 1 else ""
    return [
        f"read {name}, which has the optimizer state; to read {weights[0]}{more} instead, point at that file"
    ]


def _named(store: LocalStore, root: Path, tracker: str, iterations: dict[int, str]) -> str:
    """Return the name of the directory that one of DeepSpeed's trackers names.

    Raises:
        MissingShardError: the directory is missing.
    """
    text = store.read(tracker, 0, min(store.size(tracker), 256)).decode("utf-8", "replace").strip()
    name = check_name(text, found_in=str(root / tracker))
    if not (root / name).is_dir():
        raise MissingShardError(
            f"the tracker names {name}, which is missing",
            file=str(root / tracker),
            hint=f"point at the directory itself, or pass --iteration; iterations here: {_listed(iterations)}",
        )
    return name


def _recognise(store: LocalStore) -> Format:
    """Return the format of a store.

    Raises:
        UnsupportedError: no format recognises it; the error says what it is instead.
    """
    try:
        return sniffed(store)
    except UnsupportedError as err:
        below = [] if store.entry is not None else checkpoints_below(store, _is_checkpoint)
        raise refusal_of(store, known=err.hint or "", below=below) from None


def _is_checkpoint(store: LocalStore) -> bool:
    """Return whether a directory looks like a checkpoint or a training root."""
    if store.exists(TRACKER) or any(map(store.exists, NAMING_TRACKERS)) or iteration_dirs(store):
        return True
    try:
        sniffed(store)
    except UnsupportedError:
        return False
    return True


def _refuse_empty(store: LocalStore) -> None:
    """Raise if a directory holds nothing."""
    if not store.files() and not store.folders():
        raise UnsupportedError(
            "the directory is empty", file=store.label, hint="point at a checkpoint"
        )


def _listed(iterations: dict[int, str]) -> str:
    """Return iterations as text, shortened if there are many."""
    numbers = sorted(iterations)
    if len(numbers) > 8:
        return (
            f"{numbers[0]}, {numbers[1]}, … {numbers[-2]}, {numbers[-1]} ({len(numbers)} in total)"
        )
    return ", ".join(map(str, numbers)) or "none"
