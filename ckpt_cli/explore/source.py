"""The checkpoint that is explored: opened once, then read a little at a time, from workers.

Nothing here knows textual. Every function may be called from any thread; ``CheckpointSource`` lets
one reading at a time touch the files.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_cli.explore.cancellation import Cancellation
from ckpt_cli.explore.names import Entry, NamedBranch, build_names, build_object_names
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.tensor import Tensor
from core.opening.open import FILL, Checkpoint
from core.pickle.noted import gc_paused
from core.progress import OnProgress, Phase, Progress, report_bytes
from core.values import dataclass
from core.verbs.convert.job import DEFAULT_MEMORY_BYTES
from core.verbs.inspect.preview import BoxLocation, Number, first_values, places_of
from core.verbs.pictures.shards import ShardMap, shard_map

if TYPE_CHECKING:
    from collections.abc import Callable

    from core.engine.numbers.statistics import ValueStatistics
    from core.verbs.diff.result import Diff
    from core.verbs.validate.run import Validation

N_VALUES = 24
"""Number of values to show of a tensor."""
MOST_PLACES = 200
"""Most places of a tensor that are shown."""
_MIB = 1 << 20
_SPECIAL = re.compile(r"[*?\[\]]")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """The checkpoint to open, and how to read it.

    Args:
        path, iteration, missing_chunks: as for ``core.opening.open.open_checkpoint``.
        threads: number of reading threads; None for one per core.
        memory_bytes: memory limit of statistics and comparisons.
    """

    path: Path
    iteration: int | None = None
    missing_chunks: str = FILL
    threads: int | None = None
    memory_bytes: int = DEFAULT_MEMORY_BYTES


@dataclass(frozen=True, slots=True)
class Placement:
    """The places in files at which the boxes of a tensor are stored.

    Args:
        places: the first ``MOST_PLACES``, replicas included.
        n_places: number of all.
        n_boxes: number of different boxes.
        shards: the boxes, with those who hold them.
    """

    places: tuple[BoxLocation, ...]
    n_places: int
    n_boxes: int
    shards: ShardMap


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CheckpointSource:
    """An open checkpoint, with its names as trees.

    Args:
        options: how it was opened.
        checkpoint: the files and their metadata.
        view: the catalog that is shown: global tensors where the layout is understood.
        tensors, objects: the names. There is no ``repr`` of 10⁵ names.
    """

    options: SourceOptions
    checkpoint: Checkpoint
    view: Catalog
    tensors: NamedBranch
    objects: NamedBranch
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def statistics_limit_bytes(self) -> int:
        """Size up to which a tensor is measured without being asked to; a store is slower."""
        return (4 if self.checkpoint.store.is_remote else 64) * _MIB

    def path_of(self, key: str) -> tuple[str, ...]:
        """Return the components of a key, as in the trees."""
        from core.verbs.inspect.summary import path_of

        return tuple(path_of(key, self.view))

    def placement(self, key: str) -> Placement:
        """Return where a tensor is stored; reads nothing but metadata.

        Raises:
            CheckpointingException: the metadata of the tensor cannot be read.
        """
        with self._reading():
            places = places_of(self.view, key)
            shards = shard_map(self.view, key)
        return Placement(
            tuple(places[:MOST_PLACES]), len(places), len({place.box for place in places}), shards
        )

    def values(self, key: str) -> list[Number]:
        """Read the first values of a tensor.

        Raises:
            CheckpointingException: they cannot be read, or shown.
        """
        with self._reading():
            return first_values(self.checkpoint.store, self.view, key, N_VALUES)

    def statistics(
        self, key: str, tensor: Tensor, cancellation: Cancellation, progress: OnProgress
    ) -> ValueStatistics | None:
        """Read a tensor and measure its values; None if it has none.

        Raises:
            Cancelled: the work was asked to end.
            CheckpointingException: the tensor cannot be read.
        """
        from core.verbs.inspect.stats import measure_tensors

        report = report_bytes(progress, Phase.MEASURING)

        def advance(done: int, total: int) -> None:
            cancellation.check()
            if report is not None:
                report(done, total)

        with self._reading(cancellation):
            return measure_tensors(
                self.checkpoint,
                self.view,
                {key: tensor},
                threads=self.options.threads,
                memory_bytes=self.options.memory_bytes,
                progress=advance,
            )[key]

    def compare(
        self, entry: Entry | None, other: Path, cancellation: Cancellation, progress: OnProgress
    ) -> Diff:
        """Compare a tensor, a module, or everything with another checkpoint.

        Args:
            entry: what to compare; None for the complete checkpoints.

        Raises:
            Cancelled: the work was asked to end.
            CheckpointingException: a checkpoint cannot be read, or lacks the names.
        """
        from core.verbs.diff.run import DiffJob, diff

        defaults = DiffJob(a=self.checkpoint.path, b=other)
        pattern = None if entry is None else find_key_pattern(entry)
        job = DiffJob(
            a=self.checkpoint.path,
            b=other,
            missing_chunks=self.options.missing_chunks,
            include=() if pattern is None else (pattern,),
            threads=self.options.threads or defaults.threads,
            memory_bytes=self.options.memory_bytes,
        )
        return diff(job, progress=_checked(cancellation, progress))

    def validate(self, cancellation: Cancellation, progress: OnProgress) -> Validation:
        """Check names, sizes and metadata of the checkpoint.

        Raises:
            Cancelled: the work was asked to end.
            CheckpointingException: the path cannot be read.
        """
        from core.verbs.validate.run import validate

        return validate(
            self.options.path,
            iteration=self.options.iteration,
            threads=self.options.threads,
            memory_bytes=self.options.memory_bytes,
            missing_chunks=self.options.missing_chunks,
            progress=_checked(cancellation, progress),
        )

    def close(self) -> None:
        """Close the files."""
        self.checkpoint.store.close()

    @contextmanager
    def _reading(self, cancellation: Cancellation | None = None) -> Iterator[None]:
        """Wait until no other thread reads; the caller may have given up meanwhile."""
        with self._lock:
            if cancellation is not None:
                cancellation.check()
            yield


@gc_paused()
def open_source(options: SourceOptions, on_open: Callable[[int], None]) -> CheckpointSource:
    """Open a checkpoint, as far as it can be read.

    Args:
        on_open: called with the number of files that were opened since the last call.

    Raises:
        UsageError: the path or the iteration does not exist.
        CheckpointingException: nothing can be read.
    """
    from core.engine.plan.memory import limit_objects
    from core.opening.damaged import open_readable_part
    from core.verbs.inspect.summary import global_view_of, path_of

    with limit_objects(options.memory_bytes):
        checkpoint = open_readable_part(
            options.path,
            iteration=options.iteration,
            missing_chunks=options.missing_chunks,
            on_open=on_open,
        )
    try:
        view = global_view_of(checkpoint)
        split = partial(path_of, view=view)
        return CheckpointSource(
            options,
            checkpoint,
            view,
            build_names(view.tensors, split=split),
            build_object_names(view.objects, split=split),
        )
    except BaseException:
        checkpoint.store.close()
        raise
    finally:
        checkpoint.store.on_open = None


def find_key_pattern(entry: Entry) -> str | None:
    """Return the key pattern of an entry's tensors; None for all tensors.

    A range is compared with its siblings. A character with a meaning in patterns stands as ``?``,
    which selects it, too.
    """
    if entry.key is not None:
        return _SPECIAL.sub("?", entry.key)
    if not entry.path or next(entry.tensors(), None) is None:
        return None
    first_key = entry.branch.first_key
    # The beginning as the key spells it: a rank directory ends with ":", not ".".
    start = ".".join(entry.path)
    if not first_key.startswith(start):
        start = ":".join((entry.path[0], ".".join(entry.path[1:]))).rstrip(":")
    return _SPECIAL.sub("?", start)


def _checked(cancellation: Cancellation, progress: OnProgress) -> OnProgress:
    """Return a report of progress that also ends work that was cancelled."""

    def report(step: Progress) -> None:
        cancellation.check()
        progress(step)

    return report
