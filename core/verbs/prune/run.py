"""Examine a training root, decide which iterations stay, and remove the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import field, replace
from pathlib import Path

from core.errors import SourceChangedError, StorageError, UsageError, list_some
from core.files.remote_path import is_remote
from core.files.source_store import open_store
from core.opening.iterations import iteration_dirs
from core.opening.locate import locate_checkpoint
from core.progress import OnProgress, Phase, begin_phase, count_steps
from core.publish.stage.folder_lock import lock_folder
from core.values import Brief, bytes_text, dataclass, list_facts, n_text, shown_briefly
from core.verbs.checks.finding import Level, Severity
from core.verbs.convert.job import DEFAULT_MEMORY_BYTES
from core.verbs.prune.contents import Contents, freed_bytes, read_contents
from core.verbs.prune.decision import IterationState, KeepRules, PruneDecision, decide
from core.verbs.prune.removal import finish_removal, remove_iteration
from core.verbs.prune.root import TRAINER_STATE, TrainingRoot, best_iteration, read_root
from core.verbs.validate.newest import worst_finding
from core.verbs.validate.run import Validation, validate


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneJob:
    """A request to prune a training root.

    Args:
        root: training root, local or a URL.
        rules: which iterations stay.
        level: how much of an iteration is read before it counts as valid.
        trusts_metadata: remove iterations although the data of the newest valid one were not read.
        threads: threads for reading data; None for one per processor.
        memory_bytes: memory limit for reading data.
    """

    root: Path
    rules: KeepRules
    level: Level = Level.HEADERS
    trusts_metadata: bool = False
    threads: int | None = None
    memory_bytes: int = DEFAULT_MEMORY_BYTES


@dataclass(frozen=True, slots=True)
class PrunedIteration:
    """An iteration of a training root, and the decision on it.

    Args:
        number: the iteration.
        names: its directories, right below the root.
        reasons: why it stays; () if it is to be removed.
        n_files, n_bytes: number and total size of its files; 0 if they were not listed.
    """

    number: int
    names: tuple[str, ...]
    reasons: tuple[str, ...]
    n_files: int
    n_bytes: int


@shown_briefly
@dataclass(frozen=True, slots=True)
class Pruning:
    """The result of examining a training root.

    Args:
        root: the training root, a path or a URL.
        iterations: all iterations, the newest first.
        newest_valid: the newest iteration without errors; None if there is none, and then nothing
            is removed.
        freed_bytes: bytes that the removal frees, without what an interrupted one has left.
        unfinished: names of iterations whose removal was interrupted; they are removed completely.
        notes: what the user should know.
        is_proven: every byte of the newest valid iteration was read, or compared with its manifest
            by the checksums of an object store.
        trusts_metadata: as in the job.
        contents: directory name → content, of the iterations that are removed, and of the valid
            ones that were examined; by it, ``remove`` notices changes.
    """

    root: Path
    iterations: tuple[PrunedIteration, ...]
    newest_valid: int | None
    freed_bytes: int
    unfinished: tuple[str, ...]
    notes: tuple[str, ...]
    is_proven: bool
    trusts_metadata: bool
    contents: Mapping[str, Contents] = field(repr=False)

    @property
    def kept(self) -> tuple[PrunedIteration, ...]:
        """The iterations that stay, the newest first."""
        return tuple(iteration for iteration in self.iterations if iteration.reasons)

    @property
    def removed(self) -> tuple[PrunedIteration, ...]:
        """The iterations that are to be removed, the newest first."""
        return tuple(iteration for iteration in self.iterations if not iteration.reasons)

    def brief(self) -> Brief:
        """Return what is shown of the decision."""
        facts = [
            *list_facts(
                "keep",
                (f"{', '.join(item.names)} ({'; '.join(item.reasons)})" for item in self.kept),
            ),
            *list_facts("remove", (", ".join(item.names) for item in self.removed)),
            ("frees", bytes_text(self.freed_bytes)),
            *list_facts("note", self.notes),
        ]
        kept = n_text(len(self.kept), "iteration")
        return Brief(f"{self.root}: {kept} to keep, {len(self.removed):,} to remove", facts)

    def require_proven(self) -> None:
        """Raise if iterations are to be removed, and the one that stays may hold damaged data.

        Raises:
            UsageError: its data were not read, and the metadata are not to be trusted.
        """
        if self.removed and not (self.is_proven or self.trusts_metadata):
            raise UsageError(
                f"the newest valid iteration, {self.newest_valid}, was checked without reading its"
                " data, so older iterations are not removed",
                file=str(self.root),
                hint="read all its data with --deep (which skips only files that are almost all"
                " holes, CK606), or remove older iterations anyway with --trust-metadata",
            )


def examine(job: PruneJob, *, progress: OnProgress | None = None) -> Pruning:
    """Decide which iterations of a training root stay; nothing is changed.

    Args:
        job: the root and the rules.
        progress: called with the phases, and with the files that are checked.

    Raises:
        UsageError: the root is not a directory with iterations.
        CorruptError: a tracker, or the Trainer's state, is damaged.
        StorageError: the root cannot be read.
    """
    begin_phase(progress, Phase.OPENING)
    root = read_root(job.root)
    contents = {
        name: read_contents(root.path / name) for names in root.names.values() for name in names
    }
    states = {
        number: IterationState(
            number=number,
            left_alone=_obstacle(root, number, contents),
            needed_by=tuple(name for name, named in root.trackers.items() if named == number),
        )
        for number in root.names
    }

    # Validate from the newest on, until enough valid iterations are known.
    wanted = job.rules.keep_last or 1
    valid: list[int] = []
    is_proven = False
    for number in sorted(states, reverse=True):
        if states[number].left_alone is not None:
            continue
        validation = _validate(root.path / root.names[number][0], job, progress)
        if validation.worst == Severity.ERROR:
            why = f"damaged, or being written: {worst_finding(validation)}"
            states[number] = replace(states[number], left_alone=why)
            continue
        states[number] = replace(states[number], is_valid=True)
        is_proven = validation.is_proven if not valid else is_proven
        valid.append(number)
        if len(valid) == wanted:
            break
    states |= _with_best(root, states, valid)

    decisions = decide(states.values(), job.rules)
    removed = [contents[name] for name in _removed_names(root, decisions)]
    watched = [name for number in valid for name in root.names[number]]
    return Pruning(
        root.path,
        tuple(_describe(root, decision, contents) for decision in decisions),
        valid[0] if valid else None,
        freed_bytes(removed),
        root.unfinished,
        tuple(_notes(root)),
        is_proven,
        job.trusts_metadata,
        {name: contents[name] for name in (*watched, *_removed_names(root, decisions))},
    )


def _validate(path: Path, job: PruneJob, progress: OnProgress | None) -> Validation:
    return validate(
        path,
        level=job.level,
        threads=job.threads,
        memory_bytes=job.memory_bytes,
        progress=progress,
    )


def _obstacle(root: TrainingRoot, number: int, contents: Mapping[str, Contents]) -> str | None:
    """Return why an iteration must be left alone, whatever the rules say; None if nothing is known.

    Args:
        contents: directory name → content, of all iterations.
    """
    # A save that is running now has the highest number, and the tracker is written at its end.
    if root.last_completed is not None and number > root.last_completed[0]:
        last, tracker = root.last_completed
        return f"newer than iteration {last} in {tracker}, so its save may still be running"
    for name in root.names[number]:
        if name in root.staged:
            return f"a command is writing it, or was interrupted (.{name}.ckpt-stage)"
        if contents[name].obstacle is not None:
            return contents[name].obstacle
        if (link := _link_to(root, name, contents)) is not None:
            return f"the link {link} points to it"
        if (reason := _unrecognised(root.path / name)) is not None:
            return reason
    return None


def _link_to(root: TrainingRoot, name: str, contents: Mapping[str, Contents]) -> str | None:
    """Return a symbolic link outside of an iteration that leads into it, or None."""
    target = root.path.resolve() / name
    links = dict(root.links)
    for other, content in contents.items():
        if other != name:
            links |= {f"{other}/{link}": place for link, place in content.links.items()}
    return next(
        (link for link, place in links.items() if f"{place}/".startswith(f"{target}/")), None
    )


def _unrecognised(path: Path) -> str | None:
    """Return why a directory is not one checkpoint that can be removed as a whole, or None."""
    location = locate_checkpoint(path)
    location.store.close()
    if location.failure is not None:
        return f"not recognized as a checkpoint ({location.failure.message})"
    if location.below:
        return f"it contains separate checkpoints ({list_some(location.below)})"
    for folder in location.passed:
        store = open_store(folder)
        names = list(iteration_dirs(store).values())
        store.close()
        if len(names) > 1:
            return f"it contains several iterations ({list_some(names)})"
    return None


def _with_best(
    root: TrainingRoot, states: Mapping[int, IterationState], valid: list[int]
) -> dict[int, IterationState]:
    """Return the state of the iteration that Hugging Face's Trainer calls the best, if any."""
    if not valid:
        return {}
    folder = root.path / root.names[valid[0]][0]
    best = best_iteration(folder)
    name = f"{folder.name}/{TRAINER_STATE} as the best"
    return {
        number: replace(states[number], needed_by=(*states[number].needed_by, name))
        for number, names in root.names.items()
        if best in names
    }


def _removed_names(root: TrainingRoot, decisions: tuple[PruneDecision, ...]) -> list[str]:
    """Return the names of the directories that are removed, the oldest iteration first."""
    return [
        name
        for decision in reversed(decisions)
        if decision.is_removed
        for name in root.names[decision.number]
    ]


def _describe(
    root: TrainingRoot, decision: PruneDecision, contents: Mapping[str, Contents]
) -> PrunedIteration:
    names = root.names[decision.number]
    return PrunedIteration(
        decision.number,
        names,
        decision.reasons,
        sum(len(contents[name].files) for name in names),
        sum(contents[name].n_bytes for name in names),
    )


def _notes(root: TrainingRoot) -> Iterator[str]:
    """Yield a note for each tracker that names an iteration which does not exist."""
    for tracker, number in root.trackers.items():
        if number not in root.names:
            yield f"{tracker} names iteration {number}, which does not exist"


def remove(pruning: Pruning, *, progress: OnProgress | None = None) -> None:
    """Remove what ``examine`` found superfluous, and finish interrupted removals.

    Args:
        pruning: the result of ``examine``.
        progress: called with the files that have been deleted.

    Raises:
        UsageError: the data of the newest valid iteration was not read (``require_proven``).
        SourceChangedError: an iteration has changed since it was examined, or a tracker names
            another one; it and those after it are kept.
        StorageError: another process is pruning the root, or the system refuses. What has a hidden
            name by then is removed by the next call.
    """
    pruning.require_proven()
    root, removed = pruning.root, pruning.removed
    n_files = sum(iteration.n_files for iteration in removed)
    step = count_steps(progress, Phase.REMOVING, n_files, unit="files") or _ignore
    with _locked(root):
        for name in pruning.unfinished:
            finish_removal(root / name, on_removed=_ignore)
        # The iterations that stay must still be what was validated.
        removed_names = {name for iteration in removed for name in iteration.names}
        for name, contents in pruning.contents.items():
            if name not in removed_names:
                _require_unchanged(root / name, contents)
        # The oldest goes first, so that an interruption leaves the newest.
        for iteration in reversed(removed):
            _require_unneeded(root, iteration)
            for name in iteration.names:
                _require_unchanged(root / name, pruning.contents[name])
                remove_iteration(root / name, pruning.contents[name], on_removed=step)


def _ignore(n_files: int) -> None:
    """Do nothing with a number of files."""


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Keep other processes from pruning a local root at the same time.

    Raises:
        StorageError: another process is pruning it.
    """
    if is_remote(root):
        yield
        return
    refusal = StorageError(
        "another process is pruning this directory",
        file=str(root),
        hint="wait for it to finish",
    )
    with closing(lock_folder(root, refusal=refusal)):
        yield


def _require_unneeded(root: Path, iteration: PrunedIteration) -> None:
    """Raise unless an iteration is still one that no tracker names and no command writes.

    Raises:
        SourceChangedError: it is needed now.
    """
    now = read_root(root)
    is_named = iteration.number in now.trackers.values()
    if is_named or not now.staged.isdisjoint(iteration.names):
        raise SourceChangedError(
            f"iteration {iteration.number} was selected for removal but is now in use",
            file=str(root),
            hint="run the command again",
        )


def _require_unchanged(folder: Path, before: Contents) -> None:
    """Raise if the content of a directory is not what it was.

    Raises:
        SourceChangedError: a file was added, removed or modified.
    """
    if read_contents(folder) != before:
        raise SourceChangedError(
            "the iteration changed while ckpt was checking it, so a save may be running",
            file=str(folder),
            hint="run the command again when the save is complete",
        )
