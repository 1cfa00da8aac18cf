"""Open a checkpoint: turn whatever the user points at into a store, a format and a catalog.

``core.opening.locate`` finds the checkpoint and lists what the user may point at; this module reads
its metadata.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import ZarrFacts
from core.engine.catalog.key_patterns import some_of
from core.errors import (
    CheckpointingException,
    CorruptError,
    ReplicaMismatchError,
    UnsafeError,
    UnsupportedError,
    UsageError,
    is_at_or_below,
)
from core.files.source_store import SourceStore
from core.formats.format import LOADER_STATE, Format
from core.formats.huggingface.files import with_files, with_folder
from core.opening.config_beside import with_description
from core.opening.iterations import list_other_iterations
from core.opening.locate import RELEASE, Located, locate_checkpoint
from core.pickle.noted import gc_paused, noting_uses
from core.values import dataclass, n_text

if TYPE_CHECKING:
    from core.pickle.uses import Use

ERROR, FILL = MISSING_CHUNKS = ("error", "fill")
"""Treatments of zarr chunks that are not stored; some writers omit those of the fill value."""
_MOST_TRIED = 3
"""Maximum number of iterations that are tried beside a damaged one."""


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

    def __repr__(self) -> str:
        n_tensors = n_text(len(self.catalog.tensors), "tensor")
        return f"<{self.format.name} checkpoint {self.path}: {n_tensors}>"

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
        path: any of the kinds of paths that ``core.opening.locate`` lists.
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
            notes = (
                *notes,
                f"omitted entries that an index lists but no file contains: {keys}",
            )
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
            + ("does not record an iteration" if number is None else f"is iteration {number}"),
            file=str(path),
            hint="pass the directory that contains the iterations",
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
            f"the optimizer cannot be read ({place}{err.message}), so the weights come from the "
            "other files, in those files' precision"
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
                    advice = f"use {quote(str(path))}, which can be read"
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
            f"--missing-chunks: {missing_chunks!r} is not one of: {', '.join(MISSING_CHUNKS)}"
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
        f"stored and will be read as the fill value ({where}); to treat this as an "
        "error, pass --missing-chunks error"
    )
    return [note]
