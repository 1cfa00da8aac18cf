"""Compare two checkpoints across formats and layouts: what differs, and by how much.

::

    A, B ── canonical ──▶ the same names (``core.diff.sides``) ──▶ keys, shapes, types
                                                                     │ equal shapes
                                                                     ▼
                           band by band, as bytes, and as numbers where they differ
                           (``core.diff.tensor_pass``)

    arguments, settings, counters, configurations (``core.diff.entries``)

Memory is bounded whatever the tensors' sizes are. Of replicas only the first is read; ``ckpt
validate --deep`` checks that they are equal.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from core.catalog.catalog import Catalog
from core.catalog.decoded import DEFAULT_CACHE_BYTES, decoding_bytes
from core.catalog.key_patterns import matcher
from core.changes.select import is_optimizer_key
from core.convert.job import DEFAULT_MEMORY_BYTES, DEFAULT_THREADS
from core.diff.entries import EntryDiff, entry_diffs
from core.diff.fingerprints import RecordedEquality, recorded_as_equal
from core.diff.layout import is_of_layout
from core.diff.prefix import prefix_hint, without_prefixes
from core.diff.result import Diff, TensorDiff
from core.diff.share import SharedComparison
from core.diff.sides import Side, sides_of
from core.diff.tensor_pass import BAND_BYTES, Advance, ComparedTensor, TensorWork
from core.errors import CapacityError, UsageError, in_checkpoint
from core.inspect.summary import bare_key
from core.manifest.fingerprint_share import open_on_all_ranks
from core.megatron.optimizer.form import role_of
from core.megatron.reshard.reshard import load_rules
from core.numbers.difference import Tolerance
from core.opening.open import FILL, Checkpoint
from core.plan.box_reader import BoxReader
from core.plan.plan import DECODER_BYTES, MIB, RUNTIME_BYTES
from core.scan.share import RankShare, divide_in_order
from core.team.agreement import require_agreement
from core.team.protocol import ALONE, Figures, Team, broadcast_result, gather_results

Progress = Callable[[int, int], None]
"""A callback that gets (bytes done, bytes in total)."""

_THREAD_BYTES = 8 * BAND_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffJob:
    """What is to be compared, and how.

    Args:
        a, b: paths, as for ``core.opening.open.open_checkpoint``.
        iteration_a, iteration_b: which iterations of training roots.
        missing_chunks: how to treat zarr chunks that are not stored (``core.opening.open``).
        rule: the tolerance; None for an exact comparison.
        reads: compare values; otherwise names, shapes and types only.
        believes: trust both manifests where their fingerprints are equal, and read only the rest.
        include, exclude: patterns of keys (``core.catalog.key_patterns``).
        strip_prefix: texts that are removed from keys that begin with them (``core.diff.prefix``).
        with_optimizer: compare the optimizer's state and settings too.
        with_entries: compare what is not a tensor too.
        rules: a TOML file with additional layout rules.
        threads: number of comparing threads.
        memory_bytes: memory limit of the process.
    """

    a: Path
    b: Path
    iteration_a: int | None = None
    iteration_b: int | None = None
    missing_chunks: str = FILL
    rule: Tolerance | None = None
    reads: bool = True
    believes: bool = True
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    strip_prefix: Sequence[str] = ()
    with_optimizer: bool = True
    with_entries: bool = True
    rules: Path | None = None
    threads: int = DEFAULT_THREADS
    memory_bytes: int = DEFAULT_MEMORY_BYTES


def diff(job: DiffJob, *, progress: Progress | None = None, team: Team = ALONE) -> Diff:
    """Compare two checkpoints.

    Args:
        job: what to compare, and how.
        progress: called with bytes done and in total on this rank.
        team: the ranks that divide the comparison of values; each calls this function with the same
        job.

    Returns:
        The comparison; on other ranks than the lead only as much of it as says whether the
        checkpoints are the same.

    Raises:
        UsageError: a path does not exist, or a pattern matches nothing.
        UnsupportedError: the checkpoints cannot be brought under the same names, or a format cannot
        be read.
        CapacityError: the memory limit is too low.
        CheckpointingException: one of the checkpoints cannot be read.
        WorkerError: a rank of the team failed, or sees another checkpoint.
    """
    begun = time.monotonic()
    with ExitStack() as stack:
        first = _open(stack, job.a, job.iteration_a, job.missing_chunks, team)
        second = _open(stack, job.b, job.iteration_b, job.missing_chunks, team)

        def prepare() -> _Comparison:
            sides = sides_of(first, second, rules=load_rules(job.rules))
            return _Comparison(job, *without_prefixes(*sides, job.strip_prefix), progress, team)

        comparison = require_agreement(
            team, prepare, _Comparison.observed_state, subject=f"{job.a} and {job.b}"
        )
        comparison.compare()
        result = comparison.result(begun)
        gather_results(team, lambda: _verify_unchanged(first, second))
        return result


def _open(
    stack: ExitStack, path: Path, iteration: int | None, missing_chunks: str, team: Team
) -> Checkpoint:
    """Open one of the checkpoints, the same on all ranks; the stack closes it."""
    with in_checkpoint(str(path)):
        checkpoint = open_on_all_ranks(
            path, iteration=iteration, missing_chunks=missing_chunks, team=team
        )
    stack.callback(checkpoint.store.close)
    return checkpoint


def _verify_unchanged(first: Checkpoint, second: Checkpoint) -> None:
    """Raise if the files of a checkpoint have changed since they were opened."""
    first.store.verify_unchanged()
    second.store.verify_unchanged()


class _Comparison:
    """A comparison of two sides by one rank."""

    def __init__(
        self, job: DiffJob, a: Side, b: Side, progress: Progress | None, team: Team
    ) -> None:
        self._job = job
        self._a, self._b = a, b
        self._progress = progress
        self._team = team
        self._is_wanted = _selector(job, a, b)
        # Equal bytes are equal values, unless NaN counts as different from itself.
        is_sure = job.rule is None or job.rule.equal_nan
        self._recorded = (
            recorded_as_equal(a, b)
            if job.reads and job.believes and is_sure
            else RecordedEquality()
        )
        memory = _cache_bytes(
            job, a.catalog, b.catalog, runtime_bytes=RUNTIME_BYTES + team.runtime_bytes
        )
        self._reader_a = BoxReader(a.catalog, a.source.store, cache_bytes=memory)
        self._reader_b = BoxReader(b.catalog, b.source.store, cache_bytes=memory)
        self._tensors = self._by_name()
        self._figures: tuple[Figures, ...] = ()

    def observed_state(self) -> object:
        """Return what all ranks must see alike, so that their shares fit together."""
        return [
            (diff.key, diff.kind, diff.a, diff.b, diff.is_by_fingerprint)
            for diff in self._tensors.values()
        ]

    def result(self, begun: float) -> Diff:
        """Return the whole comparison on the lead; on other ranks only whether anything differs."""
        diffs: list[Diff] = []

        def judge() -> tuple[tuple[TensorDiff, ...], tuple[EntryDiff, ...], tuple[str, ...]]:
            diffs.append(self._whole_diff(begun))
            differing = [tensor for tensor in diffs[0].tensors if not tensor.is_same]
            return tuple(differing[:1]), diffs[0].entries[:1], diffs[0].left_out[:1]

        tensors, entries, left_out = broadcast_result(self._team, judge)
        return (
            diffs[0]
            if diffs
            else self._diff(begun, tensors=tensors, entries=entries, left_out=left_out)
        )

    def _whole_diff(self, begun: float) -> Diff:
        """Return the whole comparison; runs on the lead."""
        tensors = list(self._tensors.values())
        read_bytes = sum(
            self._n_bytes(tensor.key)
            for tensor in tensors
            if tensor.a and tensor.b and _is_read(tensor)
        )
        entries, of_layout, n_entries = self._entries()

        # A tensor that only one side has is no difference if it shares the bytes of one that both have.
        aliases = {
            tensor.key
            for tensor in tensors
            if tensor.kind in ("only_a", "only_b") and self._is_alias(tensor)
        }
        sides = (("A", self._a), ("B", self._b))
        notes = [
            f"{name}: {note}" for name, side in sides for note in (*side.source.notes, *side.notes)
        ]
        notes += [
            f"{tensor.key} is only in {'A' if tensor.a else 'B'}, where it shares another tensor's bytes"
            for tensor in tensors
            if tensor.key in aliases
        ]
        notes += self._recorded.notes
        hint = prefix_hint(self._a.catalog.tensors, self._b.catalog.tensors)
        if hint is not None:
            notes.append(hint)
        left_out = [
            f"{name}: {text}"
            for name, side in sides
            for text in side.left_out
            if self._job.with_optimizer
        ]
        return self._diff(
            begun,
            tensors=tuple(
                sorted(
                    (t for t in tensors if t.key not in aliases), key=lambda tensor: tensor.order
                )
            ),
            entries=tuple(entries),
            of_layout=tuple(of_layout),
            n_entries=n_entries,
            left_out=tuple(left_out),
            notes=tuple(dict.fromkeys(notes)),
            read_bytes=read_bytes,
        )

    def _diff(
        self,
        begun: float,
        *,
        tensors: tuple[TensorDiff, ...],
        entries: tuple[EntryDiff, ...],
        left_out: tuple[str, ...],
        of_layout: tuple[EntryDiff, ...] = (),
        n_entries: int = 0,
        notes: tuple[str, ...] = (),
        read_bytes: int = 0,
    ) -> Diff:
        """Return the result with what the two sides and the job say of it."""
        return Diff(
            a=self._a,
            b=self._b,
            rule=self._job.rule,
            is_read=self._job.reads,
            tensors=tensors,
            entries=entries,
            of_layout=of_layout,
            n_entries=n_entries,
            left_out=left_out,
            notes=notes,
            read_bytes=read_bytes,
            seconds=time.monotonic() - begun,
            figures=self._figures,
        )

    def _by_name(self) -> dict[str, TensorDiff]:
        """Return every tensor of either side, judged by name, shape, type and fingerprint."""
        tensors_a = {
            key: meta for key, meta in self._a.catalog.tensors.items() if self._is_wanted(key)
        }
        tensors_b = {
            key: meta for key, meta in self._b.catalog.tensors.items() if self._is_wanted(key)
        }
        diffs: dict[str, TensorDiff] = {}
        for key, a in tensors_a.items():
            b = tensors_b.get(key)
            if b is None:
                kind = "only_a"
            elif a.shape != b.shape:
                kind = "shape"
            elif a.dtype != b.dtype and self._job.rule is None:
                kind = "dtype"
            else:
                kind = "unread"
            diffs[key] = TensorDiff(key=key, kind=kind, a=a, b=b)
        for key, b in tensors_b.items():
            if key not in tensors_a:
                diffs[key] = TensorDiff(key=key, kind="only_b", b=b)
        for key in self._recorded.equal & diffs.keys():
            diffs[key] = replace(diffs[key], kind="equal", is_by_fingerprint=True)
        return diffs

    def compare(self) -> None:
        """Compare the values of tensors with the same name and shape."""
        if not self._job.reads:
            return
        keys = [key for key, diff in self._tensors.items() if diff.kind in ("unread", "dtype")]
        for result in self._alone(keys) if self._team.size == 1 else self._together(keys):
            self._tensors[result.key] = _judged(self._tensors[result.key], result)

    def _n_bytes(self, key: str) -> int:
        """Return the bytes on both sides of a tensor that both have."""
        diff = self._tensors[key]
        assert diff.a is not None and diff.b is not None
        return diff.a.n_bytes + diff.b.n_bytes

    def _alone(self, keys: list[str]) -> list[ComparedTensor]:
        """Compare tensors in this process."""
        total = sum(map(self._n_bytes, keys))
        done = 0
        lock = threading.Lock()

        def advance(n_bytes: int) -> None:
            nonlocal done
            with lock:
                done += n_bytes
            if self._progress is not None:
                self._progress(done, total)

        return self._work(keys, advance=advance).run(self._job.threads)

    def _together(self, keys: list[str]) -> list[ComparedTensor]:
        """Compare tensors with all ranks of the team; the lead gets the results."""
        share = divide_in_order(self._team, ((key, self._n_bytes(key)) for key in keys))
        work = SharedComparison(
            self._team,
            share,
            lambda share, advance: self._work(keys, share=share, advance=advance),
            threads=self._job.threads,
        )
        results, self._figures = work.compare()
        return results

    def _work(
        self, keys: list[str], *, advance: Advance, share: RankShare | None = None
    ) -> TensorWork:
        """Return the work of comparing tensors, or a rank's share of it."""
        pairs = ((key, key) for key in keys)
        return TensorWork(
            self._reader_a, self._reader_b, pairs, rule=self._job.rule, advance=advance, share=share
        )

    def _entries(self) -> tuple[list[EntryDiff], list[EntryDiff], int]:
        """Return entries that differ, those that differ by layout only, and the number compared."""
        if not self._job.with_entries or self._job.include:
            return [], [], 0
        wanted_a = {name: value for name, value in self._a.entries.items() if self._is_wanted(name)}
        wanted_b = {name: value for name, value in self._b.entries.items() if self._is_wanted(name)}
        diffs, n_values = entry_diffs(wanted_a, wanted_b, same_tensors=self._same_tensors)
        of_layout = [entry for entry in diffs if is_of_layout(entry, self._a, self._b)]
        skipped = {id(entry) for entry in of_layout}
        return [entry for entry in diffs if id(entry) not in skipped], of_layout, n_values

    def _same_tensors(self, key: str, other: str) -> str | None:
        """Return how two tensors inside of entries differ, or None if they do not."""
        a, b = self._a.catalog.meta(key), self._b.catalog.meta(other)
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"{b.dtype} of shape {list(b.shape)}, not {a.dtype} of shape {list(a.shape)}"
        if not self._job.reads:
            return None
        (result,) = TensorWork(self._reader_a, self._reader_b, [(key, other)]).run(1)
        if result.is_same_bytes or result.values is None:
            return None
        return f"{result.values.n_differing:,} of {result.values.n_elements:,} elements differ"

    def _is_alias(self, diff: TensorDiff) -> bool:
        """Return whether a tensor that only one side has shares the bytes of one that both have."""
        side, other = (self._a, self._b) if diff.a is not None else (self._b, self._a)
        return side.catalog.aliases.get(diff.key) in other.catalog.tensors


def _is_read(diff: TensorDiff) -> bool:
    """Return whether the values of a tensor were read."""
    return not diff.is_by_fingerprint and (
        diff.kind in ("values", "close", "equal") or diff.values is not None
    )


def _judged(before: TensorDiff, result: ComparedTensor) -> TensorDiff:
    """Return a tensor's result after its values have been compared."""
    values = result.values
    if before.kind == "dtype":
        kind = "dtype"
    elif values is None:
        kind = "equal"
    else:
        kind = "values" if values.n_differing else "close"
    return TensorDiff(
        key=before.key,
        kind=kind,
        a=before.a,
        b=before.b,
        values=values,
        is_cast=result.is_cast,
        first=result.first,
    )


def _selector(job: DiffJob, a: Side, b: Side) -> Callable[[str], bool]:
    """Return a function that tells whether a key is compared.

    Raises:
        UsageError: a pattern matches no key.
    """
    keys = {*a.catalog.tensors, *b.catalog.tensors, *a.entries, *b.entries}
    include, exclude = (_matchers(patterns, keys) for patterns in (job.include, job.exclude))

    def is_wanted(key: str) -> bool:
        if include and not any(matches(key) for matches in include):
            return False
        if any(matches(key) for matches in exclude):
            return False
        if job.with_optimizer:
            return True
        bare = bare_key(key, a.catalog)
        return not is_optimizer_key(bare) and role_of(bare) in ("model", "other")

    return is_wanted


def _matchers(patterns: Iterable[str], keys: Iterable[str]) -> list[Callable[[str], bool]]:
    """Return a function for each pattern that tells whether a key matches it.

    Raises:
        UsageError: a pattern matches no key.
    """
    matchers = []
    for pattern in patterns:
        matches = matcher(pattern)
        if not any(map(matches, keys)):
            raise UsageError(
                f"no tensor or entry of either checkpoint matches {pattern!r}",
                hint="Megatron's tensors are matched by their global names; list them with ckpt inspect A --flat",
            )
        matchers.append(matches)
    return matchers


def _cache_bytes(job: DiffJob, *catalogs: Catalog, runtime_bytes: int) -> int:
    """Return the memory for decoded units of each side.

    Args:
        runtime_bytes: memory that the process takes besides.

    Raises:
        CapacityError: not even one unit per thread fits.
    """
    unit_bytes = 0
    if job.reads:
        unit_bytes = max(
            (
                decoding_bytes(catalog.fragments(key))
                for catalog in catalogs
                for key in catalog.tensors
            ),
            default=0,
        )
    fixed = runtime_bytes + (DECODER_BYTES if unit_bytes else 0)
    fixed += job.threads * (_THREAD_BYTES + 2 * unit_bytes)
    if fixed > job.memory_bytes:
        raise CapacityError(
            f"{job.threads} threads need {-(-fixed // MIB):,} MiB of memory, but the limit is "
            f"{job.memory_bytes // MIB:,} MiB",
            hint=f"set the memory limit to at least {-(-fixed // MIB)} MiB"
            + (", or use fewer threads" if job.threads > 1 else ""),
        )
    return min(DEFAULT_CACHE_BYTES, (job.memory_bytes - fixed) // 2) if unit_bytes else 0
