"""Whether two checkpoints hold the same, across formats and layouts, and if not, what differs and by how much.

::

    A, B ── canonical ──▶ the same names (``core.diff.sides``) ──▶ keys, shapes, types
                                                                     │ equal shapes
                                                                     ▼
                           band by band, as bytes, and as numbers where they differ (``core.diff.tensor_pass``)

    arguments, settings, counters, configurations (``core.diff.entries``)

Memory is bounded whatever the tensors' sizes are. Of replicas the first is read; that they are equal is for
``ckpt validate --deep`` to say.
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
from core.diff.fingerprints import Stated, stated_equal
from core.diff.layout import is_of_layout
from core.diff.prefix import prefix_hint, without_prefixes
from core.diff.result import Diff, TensorDiff
from core.diff.share import SharedComparison
from core.diff.sides import Side, sides_of
from core.diff.tensor_pass import BAND_BYTES, Advance, Compared, TensorWork
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
"""(bytes done, bytes in all)."""

_THREAD_BYTES = 8 * BAND_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffJob:
    """What is to be compared, and how.

    Args:
        a, b: paths, as for ``core.opening.open.open_checkpoint``.
        iteration_a, iteration_b: which iterations of training roots.
        missing_chunks: what zarr chunks are that are not stored, see ``core.opening.open``.
        rule: None for exact.
        reads: compare values; else names, shapes and types only.
        believes: take the word of both manifests where their fingerprints are equal, and read the rest only.
        include, exclude: patterns of keys (``core.catalog.key_patterns``).
        strip_prefix: texts that are taken off keys that begin with them (``core.diff.prefix``).
        with_optimizer: compare the optimizer's state and settings too.
        with_entries: compare what is no tensor too.
        rules: a TOML file with additional layout rules.
        threads: that compare.
        memory_bytes: most bytes the process may use.
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
    """Compares two checkpoints.

    Args:
        progress: told about bytes; of this rank.
        team: which divides the comparison of values; every rank calls this with the same job.

    Returns:
        What was found; on other ranks than the lead no more of it than says whether they are the same.

    Raises:
        UsageError: a path does not exist, or a pattern matches nothing.
        UnsupportedError: they cannot be brought under the same names, or are of a format that is not read.
        CapacityError: the memory is too small.
        CheckpointingException: any other, where one of them cannot be read.
        WorkerError: a rank of the team failed, or sees another checkpoint.
    """
    begun = time.monotonic()
    with ExitStack() as stack:
        first = _opened(stack, job.a, job.iteration_a, job.missing_chunks, team)
        second = _opened(stack, job.b, job.iteration_b, job.missing_chunks, team)

        def prepared() -> _Comparison:
            sides = sides_of(first, second, rules=load_rules(job.rules))
            return _Comparison(job, *without_prefixes(*sides, job.strip_prefix), progress, team)

        comparison = require_agreement(team, prepared, _Comparison.observed_state, subject=f"{job.a} and {job.b}")
        comparison.compare()
        found = comparison.found(begun)
        gather_results(team, lambda: _verify_unchanged(first, second))
        return found


def _opened(stack: ExitStack, path: Path, iteration: int | None, missing_chunks: str, team: Team) -> Checkpoint:
    """One of the checkpoints, which is the same for all ranks; closed by the stack."""
    with in_checkpoint(str(path)):
        made = open_on_all_ranks(path, iteration=iteration, missing_chunks=missing_chunks, team=team)
    stack.callback(made.store.close)
    return made


def _verify_unchanged(first: Checkpoint, second: Checkpoint) -> None:
    first.store.verify_unchanged()
    second.store.verify_unchanged()


class _Comparison:
    """One comparison of two sides."""

    def __init__(self, job: DiffJob, a: Side, b: Side, progress: Progress | None, team: Team) -> None:
        self._job = job
        self._a, self._b = a, b
        self._progress = progress
        self._team = team
        self._is_wanted = _selector(job, a, b)
        is_sure = job.rule is None or job.rule.equal_nan
        self._stated = stated_equal(a, b) if job.reads and job.believes and is_sure else Stated()
        memory = _cache_bytes(job, a.catalog, b.catalog, runtime_bytes=RUNTIME_BYTES + team.runtime_bytes)
        self._reader_a = BoxReader(a.catalog, a.source.store, cache_bytes=memory)
        self._reader_b = BoxReader(b.catalog, b.source.store, cache_bytes=memory)
        self._tensors = self._by_name()
        self._figures: tuple[Figures, ...] = ()

    def observed_state(self) -> object:
        """What all ranks must see alike, for their shares to fit together."""
        return [(one.key, one.kind, one.a, one.b, one.is_by_fingerprint) for one in self._tensors.values()]

    def found(self, begun: float) -> Diff:
        """All that is to say, once values have been compared; on other ranks than the lead, what of it matters."""
        made: list[Diff] = []

        def judged() -> tuple[tuple[TensorDiff, ...], tuple[EntryDiff, ...], tuple[str, ...]]:
            made.append(self._made(begun))
            differing = [one for one in made[0].tensors if not one.is_same]
            return tuple(differing[:1]), made[0].entries[:1], made[0].left_out[:1]

        tensors, entries, left_out = broadcast_result(self._team, judged)
        return made[0] if made else self._diff(begun, tensors=tensors, entries=entries, left_out=left_out)

    def _made(self, begun: float) -> Diff:
        tensors = list(self._tensors.values())
        read_bytes = sum(one.a.n_bytes + one.b.n_bytes for one in tensors if _is_read(one) and one.a and one.b)
        entries, of_layout, n_entries = self._entries()
        aliases = [one for one in tensors if one.kind in ("only_a", "only_b") and self._is_alias(one)]
        if aliases:
            gone = {id(one) for one in aliases}
            tensors = [one for one in tensors if id(one) not in gone]
        both = zip("AB", (self._a, self._b), strict=True)
        notes = [f"{name}: {note}" for name, side in both for note in (*side.source.notes, *side.notes)]
        notes += [f"{one.key} is only in {'A' if one.a else 'B'}, where it shares another's bytes" for one in aliases]
        notes += self._stated.notes
        hint = prefix_hint(self._a.catalog.tensors, self._b.catalog.tensors)
        left_out = [
            f"{name}: {what}"
            for name, side in zip("AB", (self._a, self._b), strict=True)
            for what in side.left_out
            if self._job.with_optimizer
        ]
        return self._diff(
            begun,
            tensors=tuple(sorted(tensors, key=lambda one: one.order)),
            entries=tuple(entries),
            of_layout=tuple(of_layout),
            n_entries=n_entries,
            left_out=tuple(left_out),
            notes=tuple(dict.fromkeys([*notes, *([hint] if hint else [])])),
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
        """Every tensor of either side, judged by name, shape, type and fingerprint."""
        have_a = {key: meta for key, meta in self._a.catalog.tensors.items() if self._is_wanted(key)}
        have_b = {key: meta for key, meta in self._b.catalog.tensors.items() if self._is_wanted(key)}
        found: dict[str, TensorDiff] = {}
        for key, a in have_a.items():
            b = have_b.get(key)
            if b is None:
                kind = "only_a"
            elif a.shape != b.shape:
                kind = "shape"
            elif a.dtype != b.dtype and self._job.rule is None:
                kind = "dtype"
            else:
                kind = "unread"
            found[key] = TensorDiff(key=key, kind=kind, a=a, b=b)
        for key, b in have_b.items():
            if key not in have_a:
                found[key] = TensorDiff(key=key, kind="only_b", b=b)
        for key in self._stated.equal & found.keys():
            found[key] = replace(found[key], kind="equal", is_by_fingerprint=True)
        return found

    def compare(self) -> None:
        """Compares the values of what is alike in name and shape."""
        if not self._job.reads:
            return
        keys = [key for key, one in self._tensors.items() if one.kind in ("unread", "dtype")]
        for result in self._alone(keys) if self._team.size == 1 else self._together(keys):
            self._tensors[result.key] = _judged(self._tensors[result.key], result)

    def _n_bytes(self, key: str) -> int:
        """Of a tensor that both have, on both sides."""
        one = self._tensors[key]
        assert one.a is not None and one.b is not None
        return one.a.n_bytes + one.b.n_bytes

    def _alone(self, keys: list[str]) -> list[Compared]:
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

    def _together(self, keys: list[str]) -> list[Compared]:
        """What all ranks of a team have found; at the lead."""
        share = divide_in_order(self._team, ((key, self._n_bytes(key)) for key in keys))
        work = SharedComparison(
            self._team,
            share,
            lambda share, advance: self._work(keys, share=share, advance=advance),
            threads=self._job.threads,
        )
        found, self._figures = work.compared()
        return found

    def _work(self, keys: list[str], *, advance: Advance, share: RankShare | None = None) -> TensorWork:
        pairs = ((key, key) for key in keys)
        return TensorWork(self._reader_a, self._reader_b, pairs, rule=self._job.rule, advance=advance, share=share)

    def _entries(self) -> tuple[list[EntryDiff], list[EntryDiff], int]:
        """(differences, those of the layout, values that were compared)."""
        if not self._job.with_entries or self._job.include:
            return [], [], 0
        wanted_a = {name: value for name, value in self._a.entries.items() if self._is_wanted(name)}
        wanted_b = {name: value for name, value in self._b.entries.items() if self._is_wanted(name)}
        found, n_values = entry_diffs(wanted_a, wanted_b, same_tensors=self._same_tensors)
        of_layout = [one for one in found if is_of_layout(one, self._a, self._b)]
        skipped = {id(one) for one in of_layout}
        return [one for one in found if id(one) not in skipped], of_layout, n_values

    def _same_tensors(self, key: str, other: str) -> str | None:
        """How two tensors inside of entries differ; None if they do not."""
        a, b = self._a.catalog.meta(key), self._b.catalog.meta(other)
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"{b.dtype} of shape {list(b.shape)}, not {a.dtype} of shape {list(a.shape)}"
        if not self._job.reads:
            return None
        (found,) = TensorWork(self._reader_a, self._reader_b, [(key, other)]).run(1)
        if found.is_same_bytes or found.values is None:
            return None
        return f"{found.values.n_differing:,} of {found.values.n_elements:,} elements differ"

    def _is_alias(self, one: TensorDiff) -> bool:
        """Whether a tensor that only one side has shares the bytes of one that both have."""
        side, other = (self._a, self._b) if one.a is not None else (self._b, self._a)
        return side.catalog.aliases.get(one.key) in other.catalog.tensors


def _is_read(one: TensorDiff) -> bool:
    return not one.is_by_fingerprint and (one.kind in ("values", "close", "equal") or one.values is not None)


def _judged(before: TensorDiff, found: Compared) -> TensorDiff:
    """A tensor after its values have been compared."""
    values = found.values
    if before.kind == "dtype":
        kind = "dtype"
    elif values is None:
        kind = "equal"
    else:
        kind = "values" if values.n_differing else "close"
    return TensorDiff(
        key=before.key, kind=kind, a=before.a, b=before.b, values=values, is_cast=found.is_cast, first=found.first
    )


def _selector(job: DiffJob, a: Side, b: Side) -> Callable[[str], bool]:
    """Which keys are compared.

    Raises:
        UsageError: a pattern matches no key.
    """
    known = {*a.catalog.tensors, *b.catalog.tensors, *a.entries, *b.entries}
    include, exclude = (_matchers(patterns, known) for patterns in (job.include, job.exclude))

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


def _matchers(patterns: Iterable[str], known: Iterable[str]) -> list[Callable[[str], bool]]:
    made = []
    for pattern in patterns:
        matches = matcher(pattern)
        if not any(map(matches, known)):
            raise UsageError(
                f"no tensor or entry of either checkpoint matches {pattern!r}",
                hint="Megatron's tensors go by their global names: ckpt inspect A --flat",
            )
        made.append(matches)
    return made


def _cache_bytes(job: DiffJob, *catalogs: Catalog, runtime_bytes: int) -> int:
    """Memory for decoded units, a side.

    Args:
        runtime_bytes: what the process takes beside.

    Raises:
        CapacityError: not even one unit a thread fits.
    """
    most = 0
    if job.reads:
        most = max(
            (decoding_bytes(catalog.fragments(key)) for catalog in catalogs for key in catalog.tensors), default=0
        )
    fixed = runtime_bytes + (DECODER_BYTES if most else 0)
    fixed += job.threads * (_THREAD_BYTES + 2 * most)
    if fixed > job.memory_bytes:
        raise CapacityError(
            f"{job.memory_bytes} bytes of memory are allowed, but {job.threads} threads need {fixed}",
            hint=f"allow at least {-(-fixed // MIB)} MiB" + (", or use fewer threads" if job.threads > 1 else ""),
        )
    return min(DEFAULT_CACHE_BYTES, (job.memory_bytes - fixed) // 2) if most else 0
