"""Opening a checkpoint: from whatever the user points at to a store, a format and a catalog.

Accepted: a checkpoint directory, one file of it, a Megatron rank directory, or a training root that holds iterations
(``latest_checkpointed_iteration.txt`` beside ``iter_0000010/``, DeepSpeed's ``latest`` beside ``global_step10/``,
``step-10/`` as torchtitan, ``checkpoint-10/`` as Hugging Face, ``checkpoint_10/`` as accelerate and ``10/`` as Orbax
name them). A root descends to the iteration that its tracker names, else to the newest one. An iteration may be such a
root again: Hugging Face's Trainer and accelerate have DeepSpeed save into a directory below theirs::

    run/checkpoint-2/
    ├── latest               "global_step2"
    ├── global_step2/        the checkpoint: DeepSpeed's rank files
    ├── model.safetensors    16-bit copies of the weights (not with ZeRO-3)
    └── trainer_state.json  scheduler.pt  rng_state_0.pth …
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from core.catalog.catalog import Catalog
from core.catalog.key_patterns import some_of
from core.errors import CheckpointingException, CorruptError, MissingShardError, UnsupportedError, UsageError
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
"""What a tracker says, and its directory is called, instead of an iteration; Megatron then starts at iteration 0 and
loads no optimizer."""
NAMING_TRACKERS = ("latest", "latest_universal")
"""DeepSpeed's: they hold the directory's name."""
ITERATION_DIR = re.compile(r"(?:iter_|step-|step_|global_step_?|checkpoint[-_])(\d+)(?:_universal)?$")
ERROR, FILL = MISSING_CHUNKS = ("error", "fill")
"""What zarr chunks are that are not stored, where their writer leaves out those that equal the fill value."""
_ORBAX_STEP = "_CHECKPOINT_METADATA"
"""Lies in the directories of Orbax's CheckpointManager, which are called by their numbers."""
_METADATA_FILES = (".metadata", "metadata.json", "common.pt")
_WEIGHTS = re.compile(
    r"^(\.metadata|metadata\.json|common\.pt|zarr\.json|\.zarray|\.zgroup|pytorch_model.*\.bin|.*\.safetensors|.*\.index\.json)$"
)
"""Files of a directory that is a checkpoint itself, whatever the names of the directories in it."""
_WEIGHT_FILE = re.compile(r"^(pytorch_model|model|adapter_model)[^/]*\.(bin|safetensors)(\.index\.json)?$")
"""Weights that a trainer saves beside a directory of DeepSpeed's."""
_INDEX_FILE = re.compile(
    r"(^ckpt-manifest\.json$|\.index\.json|^zarr\.json|^\.zarray|^\.zgroup|^manifest\.ocdbt|^config\.json)$"
)
"""Files that stand for the directory that they describe."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint.

    Args:
        path: the directory or file that holds it, after descending from a root.
        store: read access to its files.
        format: the format it is in.
        catalog: its metadata.
        iteration: training iteration, from the tracker, the directory's name or the metadata; None if none says.
        notes: what the user should know about the choice that was made.
        uses: what the pickles of its metadata do with names, also with those that the catalog does not hold.
        below: paths of checkpoints in directories below it, which are no part of it.
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
        """Whether it lies where Megatron keeps a model that is no iteration of a training run."""
        return self.path.name == RELEASE


def open_checkpoint(
    path: Path, *, iteration: int | None = None, samples: bool = False, missing_chunks: str = FILL
) -> Checkpoint:
    """Finds the checkpoint at ``path`` and reads its metadata.

    Args:
        path: see the module's docstring.
        iteration: which iteration of a root; None for the one its tracker names, else the newest.
        samples: open only one of the files that look alike, where the format can; for looking, not for converting.
        missing_chunks: what zarr chunks are that are not stored, ``fill`` or ``error``; see ``_unstored_notes``.

    Raises:
        UsageError: the path does not exist, or the ``iteration`` that is asked for.
        MissingShardError: the tracker names an iteration that is not there; or a chunk is absent.
        UnsupportedError: no format recognises it.
        CorruptError: the metadata contradicts itself.
    """
    place = located(path, iteration=iteration)
    store, format = place.store, place.format
    try:
        if place.failure is not None:
            raise place.failure
        assert format is not None, "nothing failed, so a format was recognised"
        with noting_uses() as uses, gc_paused():
            catalog = format.sample(store) if samples and format.sample is not None else format.read(store)
        notes = (*place.notes, *_unstored_notes(catalog, missing_chunks))
    except BaseException:
        store.close()
        raise
    number = place.iteration if catalog.iteration is None else catalog.iteration
    if iteration is not None and number != iteration and not place.is_chosen:
        raise UsageError(
            f"--iteration {iteration} was asked for, but "
            + ("nothing here tells an iteration" if number is None else f"this is iteration {number}"),
            file=str(path),
            hint="point at the directory that holds the iterations",
        )
    return Checkpoint(
        place.path,
        store,
        format,
        catalog,
        number,
        notes,
        frozenset(uses),
        below=place.below,
        passed=place.passed,
    )


def _unstored_notes(catalog: Catalog, missing_chunks: str) -> list[str]:
    """Return a note on zarr chunks that are not stored and read as the fill value.

    Args:
        missing_chunks: ``fill``, or ``error`` to refuse them.

    Raises:
        UsageError: it is neither.
        MissingShardError: a chunk is absent, and that is refused.
    """
    if missing_chunks not in MISSING_CHUNKS:
        raise UsageError(f"--missing-chunks: {missing_chunks!r} is none of: {', '.join(MISSING_CHUNKS)}")
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
class Place:
    """Where a checkpoint lies, and what it looks like; its metadata has not been read.

    Args:
        path: the directory or file that holds it, after descending from a root.
        store: read access to its files.
        format: the format it looks like; None if none recognises it, or its root is broken.
        iteration: that of the directory's name, or None.
        notes: what the user should know about the choice that was made.
        failure: why there is no format; None if there is one.
        below: paths of checkpoints in directories below it, which are no part of it.
        passed: the directories above it that were descended through, the outermost first.
        is_chosen: the iteration that was asked for is the number of one of those; what lies below may count otherwise.
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
"""Directories that are descended through; a link may lead back to where it stands."""


def located(path: Path, *, iteration: int | None = None) -> Place:
    """Finds the checkpoint at ``path``; what is wrong with it is in the result, and not raised.

    Raises:
        UsageError: the path does not exist, or the ``iteration`` that is asked for.
        StorageError: the system refuses to look at it.
    """
    refuse_url(path)
    with translate_os_errors(str(path), doing="open"):
        if not os.path.lexists(path):
            raise _absent(path)
        is_dir = path.is_dir()
    notes: list[str] = []
    below: list[str] = []
    passed: list[Path] = []
    store = LocalStore(path) if is_dir else store_of_file(path)
    wanted = iteration
    is_chosen = False
    try:
        while is_dir and len(passed) < _MAX_DESCENT:
            folder = store.root
            inner, reasons = _iteration_dir(folder, wanted)
            if inner == folder:
                break
            passed.append(folder)
            notes += reasons
            store = LocalStore(inner)
            is_chosen = wanted is None and iteration is not None
            if _iteration_in_name(inner) == wanted:
                wanted = None
        if is_dir:
            _refuse_empty(store)
        format, failure = _sniffed(store), None
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
    where = store.root / store.entry if store.entry else store.root
    numbers = (_iteration_in_name(folder) for folder in (store.root, *reversed(passed)))
    number = next((number for number in numbers if number is not None), None)
    if below:
        notes.append(f"not read, as they are checkpoints of their own: {listed(below)}")
    return Place(where, store, format, number, tuple(notes), failure, tuple(below), tuple(passed), is_chosen)


def _iteration_in_name(folder: Path) -> int | None:
    """Return the iteration that a directory is named after, or None."""
    match = ITERATION_DIR.search(folder.resolve().name)
    return None if match is None else int(match[1])


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def _absent(path: Path) -> UsageError:
    """Return the error for a path that does not exist; two names below no directory may be a model on the Hub."""
    if _HUB_ID.fullmatch(str(path)) and not path.parent.exists():
        return UsageError(
            "no such file or directory",
            file=str(path),
            hint=f"if this is a model on the Hugging Face Hub, download it first: {hub_download(str(path))}",
        )
    return UsageError("no such file or directory", file=str(path), hint="check the spelling of the path")


def store_of_file(path: Path) -> LocalStore:
    """The store for one file; a metadata file stands for its directory."""
    if path.name in _METADATA_FILES or path.suffix == ".distcp" or _INDEX_FILE.search(path.name):
        return LocalStore(path.parent)
    return LocalStore(path.parent, entry=path.name)


def iteration_dirs(store: LocalStore) -> dict[int, str]:
    """Iteration → name of its directory, for all that lie right below a training root."""
    found: dict[int, str] = {}
    for name in store.folders():  # sorted, so that a plain directory comes before its universal form
        if named := ITERATION_DIR.match(name):
            found.setdefault(int(named.group(1)), name)
        elif name.isascii() and name.isdigit() and store.exists(f"{name}/{_ORBAX_STEP}"):
            found.setdefault(int(name), name)
    return found


def _iteration_dir(root: Path, wanted: int | None) -> tuple[Path, list[str]]:
    """The directory to read for ``root``, and notes about the choice."""
    store = LocalStore(root)
    iterations = iteration_dirs(store)
    has_tracker = store.exists(TRACKER)
    if wanted is not None and (iterations or has_tracker):
        if wanted not in iterations:
            raise UsageError(
                f"there is no iteration {wanted}", file=str(root), hint=f"iterations here: {_listed(iterations)}"
            )
        return root / iterations[wanted], []
    if has_tracker:
        text = store.read(TRACKER, 0, min(store.size(TRACKER), 64)).decode("utf-8", "replace").strip()
        if text == RELEASE:
            name = RELEASE
        elif text.isascii() and text.isdigit():
            name = iterations.get(int(text), f"iter_{int(text):07d}")
        else:
            raise CorruptError(
                f"the tracker holds {text[:40]!r}, neither a number nor 'release'",
                file=str(root / TRACKER),
                hint=f"pass --iteration; iterations here: {_listed(iterations)}",
            )
        if not (root / name).is_dir():
            raise MissingShardError(
                f"the tracker names {name}, which is not there",
                file=str(root / TRACKER),
                hint=f"pass --iteration; iterations here: {_listed(iterations)}",
            )
        return root / name, []
    for tracker in NAMING_TRACKERS:
        if store.exists(tracker):
            name = _named(store, root, tracker, iterations)
            return root / name, _unread_weights(store, name)
    if not iterations:
        return root, []
    name = iterations[max(iterations)]
    reasons = [f"no tracker file: the newest iteration, {name}, was taken"]
    if not any(map(_WEIGHTS.search, store.files())):
        return root / name, reasons
    if any(map(is_rank_file, store.files(name))):
        return root / name, reasons + _unread_weights(store, name)
    return root, []


def _unread_weights(store: LocalStore, name: str) -> list[str]:
    """Return a note on weights beside the directory that is read: the trainer's copies of what it holds."""
    weights = [file for file in store.files() if _WEIGHT_FILE.search(file)]
    if not weights:
        return []
    also = f" (and {len(weights) - 1} more)" if len(weights) > 1 else ""
    return [f"{name} was read, with the optimizer's state; to read {weights[0]}{also} beside it, point at that file"]


def _named(store: LocalStore, root: Path, tracker: str, iterations: dict[int, str]) -> str:
    """The directory that one of DeepSpeed's trackers names."""
    text = store.read(tracker, 0, min(store.size(tracker), 256)).decode("utf-8", "replace").strip()
    name = check_name(text, found_in=str(root / tracker))
    if not (root / name).is_dir():
        raise MissingShardError(
            f"the tracker names {name}, which is not there",
            file=str(root / tracker),
            hint=f"point at the directory itself, or pass --iteration; iterations here: {_listed(iterations)}",
        )
    return name


def _sniffed(store: LocalStore) -> Format:
    """The format of a store; what is none says what it is instead."""
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
    if not store.files() and not store.folders():
        raise UnsupportedError("the directory is empty", file=store.label, hint="point at a checkpoint")


def _listed(iterations: dict[int, str]) -> str:
    numbers = sorted(iterations)
    if len(numbers) > 8:
        return f"{numbers[0]}, {numbers[1]}, … {numbers[-2]}, {numbers[-1]} ({len(numbers)} in all)"
    return ", ".join(map(str, numbers)) or "none"
