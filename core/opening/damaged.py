"""Open a damaged checkpoint as far as it can be read, to look at it.

A format's ``salvage`` reads what is intact and reports the rest, as for ``ckpt validate``. Nothing
converts such a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from core.engine.catalog.catalog import Catalog
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    StorageError,
    TruncatedError,
    UnsafeError,
)
from core.files.source_store import SourceStore
from core.opening.code_in_pickles import raise_if_code
from core.opening.locate import locate_checkpoint
from core.opening.open import FILL, Checkpoint, open_checkpoint
from core.pickle.noted import gc_paused, noting_uses


def open_readable_part(
    path: Path,
    *,
    iteration: int | None = None,
    samples: bool = False,
    missing_chunks: str = FILL,
    on_open: Callable[[int], None] | None = None,
) -> Checkpoint:
    """Open a checkpoint as ``open_checkpoint``, a damaged one without what cannot be read.

    ``Checkpoint.problems`` has the errors, the first of which is the worst.

    Raises:
        CheckpointingException: as ``open_checkpoint``; of a damaged checkpoint, nothing can be
            read, or what can be read is unsafe.
    """
    try:
        return open_checkpoint(
            path,
            iteration=iteration,
            samples=samples,
            missing_chunks=missing_chunks,
            on_open=on_open,
        )
    except (CorruptError, StorageError) as err:
        # If the place itself cannot be read, no part of it can.
        if isinstance(err, StorageError) and err.file == str(path):
            raise
        failure = err
    checkpoint = _salvage(path, iteration, failure)
    if checkpoint is None:
        raise failure
    return checkpoint


def _salvage(
    path: Path, iteration: int | None, failure: CheckpointingException
) -> Checkpoint | None:
    """Open what can be read of a checkpoint; return None if that is nothing.

    Args:
        failure: the error of opening it.

    Raises:
        UnsafeError: a part is unsafe.
    """
    from core.formats.torch.format import FORMAT as TORCH

    location = locate_checkpoint(path, iteration=iteration)
    format, store = location.format, location.store
    problems: list[CheckpointingException] = []
    catalog: Catalog | None = None
    # An unreadable optimizer leaves the weights; and a rank's file that its format cannot read
    # alone is at least a file of torch.save.
    candidates = (format, TORCH) if store.entry is not None else (format,)
    with noting_uses() as uses, gc_paused():
        for candidate in filter(None, candidates):
            if catalog is None and candidate.salvage is not None:
                with suppress(CheckpointingException):
                    catalog, format = candidate.salvage(store, problems.append), candidate
            if catalog is None and candidate.read_weights is not None:
                with suppress(CheckpointingException):
                    catalog = candidate.read_weights(store)
        if catalog is not None:
            with suppress(CheckpointingException):
                problems += _absent_files(store, catalog, {problem.file for problem in problems})
    try:
        raise_if_code(store, failure, uses=uses)
    except UnsafeError as err:
        problems.append(err)
    unsafe = next((problem for problem in problems if isinstance(problem, UnsafeError)), None)
    if format is None or catalog is None or not (catalog.tensors or catalog.objects) or unsafe:
        store.close()
        if unsafe is not None:
            raise unsafe
        return None
    # What ended the reading comes first, unless the salvage found it, too.
    # Its file may begin with the directory of the iteration.
    if not any(f"/{failure.file}".endswith(f"/{problem.file}") for problem in problems):
        problems.insert(0, failure)
    number = location.iteration if catalog.iteration is None else catalog.iteration
    return Checkpoint(
        location.path,
        store,
        format,
        catalog,
        number,
        location.notes,
        frozenset(uses),
        below=location.below,
        passed=location.passed,
        problems=tuple(problems),
    )


def _absent_files(
    store: SourceStore, catalog: Catalog, reported: set[str | None]
) -> Iterator[CheckpointingException]:
    """Yield an error for each file of a catalog that is missing or too short.

    Args:
        reported: files that have been reported.
    """
    # The end of the last plain array in each file; others have a length of their own.
    ends: dict[str, int] = {}
    keys: dict[str, str] = {}
    for key in catalog.tensors:
        for fragment in catalog.fragments(key):
            if fragment.array is None:
                continue
            extent = fragment.array.extent
            is_plain = extent.encoding is None and extent.strides is None
            end = extent.offset + fragment.array.n_bytes if is_plain else 0
            keys.setdefault(extent.file, key)
            ends[extent.file] = max(ends.get(extent.file, 0), end)
    for file, end in sorted(ends.items()):
        if file in reported:
            continue
        hint = "copy the checkpoint again, with all its files"
        if not store.exists(file):
            yield MissingShardError("the file is missing", file=file, key=keys[file], hint=hint)
        elif (size := store.size(file)) < end:
            yield TruncatedError(
                f"the file is {size:,} bytes long, but its tensors need {end:,} bytes",
                file=file,
                hint=hint,
            )
