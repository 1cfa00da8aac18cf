"""Compare two checkpoints across formats and layouts, and measure the differences.

::

    A, B ── canonical ──▶ the same names (core.verbs.diff.sides)
                            │
                            ├── tensors: keys, shapes, types
                            │     │ equal shapes
                            │     ▼
                            │   band by band, as bytes, and as numbers where bytes differ
                            │   (core.verbs.diff.tensor_pass)
                            │
                            └── arguments, settings, counters, configurations
                                (core.verbs.diff.entries)

Memory is bounded, whatever the sizes of the tensors. Only the first of several replicas is read;
``ckpt validate --deep`` checks that replicas are equal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.key_patterns import matcher
from core.engine.catalog.optimizer_keys import is_optimizer_key
from core.engine.catalog.tensor import without_fragments
from core.engine.numbers.difference import Tolerance
from core.engine.plan.box_reader import BoxReader, fit_threads
from core.engine.plan.memory import MIB, RUNTIME_BYTES, limit_objects
from core.engine.scan.share import RankShare, divide_in_order
from core.engine.team.agreement import require_agreement
from core.engine.team.protocol import ALONE, Figures, Team, broadcast_result, gather_results
from core.errors import CapacityError, UsageError, in_checkpoint
from core.megatron.optimizer.form import role_of
from core.megatron.rules.tables import load_rules
from core.opening.code_in_pickles import warn_of_pickles
from core.opening.open import FILL, Checkpoint
from core.progress import OnProgress, Phase, begin_phase, count_steps
from core.publish.manifest.fingerprint_share import open_on_all_ranks
from core.values import dataclass
from core.verbs.convert.job import DEFAULT_MEMORY_BYTES, DEFAULT_THREADS
from core.verbs.diff.entries import EntryDiff, entry_diffs
from core.verbs.diff.fingerprints import RecordedEquality, recorded_as_equal
from core.verbs.diff.layout import is_of_layout
from core.verbs.diff.places import diff_places
from core.verbs.diff.prefix import prefix_hint, without_prefixes
from core.verbs.diff.result import Diff, TensorDiff
from core.verbs.diff.share import SharedComparison
from core.verbs.diff.sides import Side, sides_of
from core.verbs.diff.tensor_pass import BAND_BYTES, Advance, ComparedTensor, TensorWork
from core.verbs.inspect.summary import bare_key

_THREAD_BYTES = 8 * BAND_BYTES
"""Memory of a comparing thread: its buffers, and the arrays of numbers converted from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffJob:
    """The request to compare two checkpoints, with its options.

    Args:
        a, b: paths, as for ``core.opening.open.open_checkpoint``.
        iteration_a, iteration_b: iterations of training roots.
        missing_chunks: treatment of zarr chunks that are not stored (``core.opening.open``).
        rule: the tolerance; None for an exact comparison.
        reads: compare values; otherwise names, shapes and types only.
        believes: do not read tensors whose fingerprints are equal in both manifests.
        include, exclude: patterns of keys (``core.engine.catalog.key_patterns``).
        strip_prefix: prefixes to remove from keys (``core.verbs.diff.prefix``).
        with_optimizer: compare the optimizer's state and settings too.
        with_entries: compare entries that are not tensors too.
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


def diff(job: DiffJob, *, progress: OnProgress | None = None, team: Team = ALONE) -> Diff:
    """Compare two checkpoints.

    Args:
        job: the request.
        progress: called with the phase and its amounts on this rank.
        team: the ranks that divide the comparison of values; each calls this function with the same
            job.

    Returns:
        The comparison. Ranks other than the lead get only one difference of each kind, so that they
        come to the same verdict.

    Raises:
        UsageError: a path does not exist, or a pattern matches nothing.
        UnsupportedError: the tensors cannot be given the same names, or a format cannot be read.
        CapacityError: the memory limit is too low, or there are too many entries.
        CheckpointingException: one of the checkpoints cannot be read, or changed meanwhile.
        WorkerError: a rank of the team failed, or finds another checkpoint.
    """
    begun = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(
            limit_objects(job.memory_bytes, beside_bytes=team.runtime_bytes, n_sources=2)
        )
        # Open both, and agree on what there is to compare.
        on_open = count_steps(progress, Phase.OPENING, unit="files")
        open_side = partial(
            _open,
            stack,
            needs_optimizer=job.with_optimizer,
            missing_chunks=job.missing_chunks,
            on_open=on_open,
            team=team,
        )
        first = open_side(job.a, iteration=job.iteration_a)
        second = open_side(job.b, iteration=job.iteration_b)

        def prepare() -> _Comparison:
            sides = sides_of(first, second, rules=load_rules(job.rules))
            return _Comparison(job, *without_prefixes(*sides, job.strip_prefix), progress, team)

        comparison = require_agreement(
            team, prepare, _Comparison.observed_state, subject=f"{job.a} and {job.b}"
        )
        first.store.on_open = second.store.on_open = None
        # A change of the files meanwhile makes the result worthless, on any rank.
        comparison.compare()
        result = comparison.result(begun)

        def verify_unchanged() -> None:
            first.store.verify_unchanged()
            second.store.verify_unchanged()

        gather_results(team, verify_unchanged)
        return result


def _open(
    stack: ExitStack,
    path: Path,
    *,
    iteration: int | None,
    needs_optimizer: bool,
    missing_chunks: str,
    on_open: Callable[[int], None] | None,
    team: Team,
) -> Checkpoint:
    """Open one of the checkpoints on all ranks; the stack closes it."""
    with in_checkpoint(str(path)):
        checkpoint = open_on_all_ranks(
            path,
            iteration=iteration,
            needs_optimizer=needs_optimizer,
            needs_masters=needs_optimizer,
            missing_chunks=missing_chunks,
            on_open=on_open,
            team=team,
        )
    stack.callback(checkpoint.store.close)
    return checkpoint


class _Comparison:
    """A comparison of two sides by one rank.

    Raises:
        UsageError: a pattern matches nothing.
        CapacityError: the memory limit is too low.
    """

    def __init__(
        self, job: DiffJob, a: Side, b: Side, progress: OnProgress | None, team: Team
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
        runtime_bytes = RUNTIME_BYTES + team.runtime_bytes
        for side in (a, b):
            runtime_bytes += side.source.store.limit_reading(
                (job.memory_bytes - team.runtime_bytes) // 2, threads=job.threads
            )
        memory = _cache_bytes(job, a.catalog, b.catalog, runtime_bytes=runtime_bytes)
        self._reader_a = BoxReader(a.catalog, a.source.store, cache_bytes=memory)
        self._reader_b = BoxReader(b.catalog, b.source.store, cache_bytes=memory)
        self._tensors = self._by_name()
        self._figures: tuple[Figures, ...] = ()

    def observed_state(self) -> object:
        """Return the part of the state that is equal on all ranks if their shares fit together."""
        return [
            (diff.key, diff.kind, diff.a, diff.b, diff.is_by_fingerprint)
            for diff in self._tensors.values()
        ]

    def result(self, begun: float) -> Diff:
        """Return the complete comparison on the lead, on other ranks enough of it for the verdict.

        Raises:
            CheckpointingException: a tensor in an entry cannot be read, or there are too many
                entries.
        """
        lead_result: Diff | None = None

        def judge() -> tuple[tuple[TensorDiff, ...], tuple[EntryDiff, ...], tuple[str, ...]]:
            nonlocal lead_result
            lead_result = result = self._complete_diff(begun)
            differing = [tensor for tensor in result.tensors if not tensor.is_same]
            return tuple(differing[:1]), result.entries[:1], result.left_out[:1]

        # Only the lead runs ``judge``.
        tensors, entries, left_out = broadcast_result(self._team, judge)
        if lead_result is not None:
            return lead_result
        return self._diff(begun, tensors=tensors, entries=entries, left_out=left_out)

    def _complete_diff(self, begun: float) -> Diff:
        """Return the complete comparison; runs on the lead."""
        tensors = sorted(self._tensors.values(), key=lambda tensor: tensor.order)
        read_bytes = sum(self._n_bytes(tensor.key) for tensor in tensors if _is_read(tensor))
        entries, of_layout, n_entries, place_notes = self._entries()

        # A tensor on one side only is not a difference if it shares the bytes of one on both sides.
        names_a, names_b = (_group_names(side.catalog) for side in (self._a, self._b))
        aliases = [
            tensor
            for tensor in self._tensors.values()
            if self._is_alias(tensor, names_b if tensor.a is None else names_a)
        ]
        alias_keys = {tensor.key for tensor in aliases}

        # Only the parts of an optimizer are ever left out, so without it nothing is.
        left_out: tuple[str, ...] = ()
        if self._job.with_optimizer:
            reasons_a = (f"A: {reason}" for reason in self._a.left_out)
            reasons_b = (f"B: {reason}" for reason in self._b.left_out)
            left_out = (*reasons_a, *reasons_b)
        return self._diff(
            begun,
            tensors=tuple(tensor for tensor in tensors if tensor.key not in alias_keys),
            entries=tuple(entries),
            of_layout=tuple(of_layout),
            n_entries=n_entries,
            left_out=left_out,
            notes=(*self._notes(aliases), *place_notes),
            warnings=tuple(
                warning
                for name, source in (("A", self._a.source), ("B", self._b.source))
                for warning in warn_of_pickles(
                    source.store, source.catalog, source.uses, subject=name, only_danger=True
                )
            ),
            read_bytes=read_bytes,
        )

    def _notes(self, aliases: Iterable[TensorDiff]) -> tuple[str, ...]:
        """Collect the notes of both sides and of the comparison, each once.

        Args:
            aliases: tensors on one side only, which share the bytes of tensors on both sides.
        """
        notes: list[str] = []
        for name, side in (("A", self._a), ("B", self._b)):
            notes += [f"{name}: {note}" for note in (*side.source.notes, *side.notes)]
        notes += [
            f"{tensor.key} is only in {'A' if tensor.a else 'B'}, where it shares the bytes of "
            "another tensor"
            for tensor in aliases
        ]
        notes += self._recorded.notes
        hint = prefix_hint(self._a.catalog.tensors, self._b.catalog.tensors)
        return tuple(dict.fromkeys(notes if hint is None else [*notes, hint]))

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
        warnings: tuple[str, ...] = (),
        read_bytes: int = 0,
    ) -> Diff:
        """Build the result; it gets sides, options and figures from this comparison."""
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
            warnings=warnings,
            read_bytes=read_bytes,
            seconds=time.monotonic() - begun,
            figures=self._figures,
        )

    def _by_name(self) -> dict[str, TensorDiff]:
        """Judge every tensor of either side by name, shape, type and fingerprint."""
        tensors_a, tensors_b = (
            {key: tensor for key, tensor in side.catalog.tensors.items() if self._is_wanted(key)}
            for side in (self._a, self._b)
        )
        diffs: dict[str, TensorDiff] = {}
        # Tensors of A come first, in its order. With a tolerance, types may differ.
        for key in dict.fromkeys((*tensors_a, *tensors_b)):
            a, b = tensors_a.get(key), tensors_b.get(key)
            if a is None or b is None:
                kind = "only_b" if a is None else "only_a"
            elif a.shape != b.shape:
                kind = "shape"
            elif a.dtype != b.dtype and self._job.rule is None:
                kind = "dtype"
            else:
                kind = "unread"
            # The ranks send each other what differs: where the tensors lie stays behind.
            diffs[key] = TensorDiff(
                key=key,
                kind=kind,
                a=None if a is None else without_fragments(a),
                b=None if b is None else without_fragments(b),
            )
        # Equal fingerprints include equal shapes and types, so they overrule the kinds above.
        for key in self._recorded.equal & diffs.keys():
            diffs[key] = replace(diffs[key], kind="equal", is_by_fingerprint=True)
        return diffs

    def compare(self) -> None:
        """Compare the values of tensors with the same name and shape.

        Raises:
            CheckpointingException: a tensor cannot be read.
        """
        if not self._job.reads:
            return
        keys = [key for key, diff in self._tensors.items() if diff.kind in ("unread", "dtype")]
        compare = self._compare_alone if self._team.size == 1 else self._compare_in_team
        for result in compare(keys):
            self._tensors[result.key] = _judged(self._tensors[result.key], result)

    def _n_bytes(self, key: str) -> int:
        """Return the bytes of a tensor on both sides, which both have to contain it."""
        diff = self._tensors[key]
        assert diff.a is not None and diff.b is not None
        return diff.a.n_bytes + diff.b.n_bytes

    def _compare_alone(self, keys: list[str]) -> list[ComparedTensor]:
        """Compare tensors in this process."""
        total = sum(map(self._n_bytes, keys))
        step = count_steps(self._progress, Phase.COMPARING, total)
        advance = step or (lambda n_bytes: None)
        return self._work(keys, advance=advance).run(self._job.threads)

    def _compare_in_team(self, keys: list[str]) -> list[ComparedTensor]:
        """Compare tensors with all ranks of the team; return the results on the lead, else none."""
        begin_phase(self._progress, Phase.COMPARING)
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
        """Prepare the comparison of tensors, or of a rank's share of their bytes."""
        pairs = ((key, key) for key in keys)
        return TensorWork(
            self._reader_a, self._reader_b, pairs, rule=self._job.rule, advance=advance, share=share
        )

    def _entries(self) -> tuple[list[EntryDiff], list[EntryDiff], int, list[str]]:
        """Compare the entries that are not tensors.

        Returns:
            Entries that differ, entries that differ only because the layout does, the number of
            values that were compared, and notes on the places of entries.
        """
        # ``include`` selects tensors, so the other entries are not compared.
        if not self._job.with_entries or self._job.include:
            return [], [], 0, []
        entries_a, entries_b = (
            {name: value for name, value in side.entries.items() if self._is_wanted(name)}
            for side in (self._a, self._b)
        )
        diffs, n_values = entry_diffs(entries_a, entries_b, same_tensors=self._same_tensors)
        moved, notes = diff_places(self._a, self._b, is_wanted=self._is_wanted)
        diffs += moved
        judged = [(entry, is_of_layout(entry, self._a, self._b)) for entry in diffs]
        differing = [entry for entry, is_layout in judged if not is_layout]
        of_layout = [entry for entry, is_layout in judged if is_layout]
        return differing, of_layout, n_values, notes

    def _same_tensors(self, key: str, other: str) -> str | None:
        """Compare two tensors inside entries; return None if they are equal, else a text."""
        a, b = self._a.catalog.tensor(key), self._b.catalog.tensor(other)
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"{b.dtype} with shape {list(b.shape)}, not {a.dtype} with shape {list(a.shape)}"
        if not self._job.reads:
            return None
        (result,) = TensorWork(self._reader_a, self._reader_b, [(key, other)]).run(1)
        if result.is_same_bytes or result.values is None:
            return None
        return f"{result.values.n_differing:,} of {result.values.n_elements:,} elements differ"

    def _is_alias(self, diff: TensorDiff, names: Mapping[str, Sequence[str]]) -> bool:
        """Return whether a tensor that only one side has is tied to one that both sides have.

        Args:
            names: ``_group_names`` of the side that has it.
        """
        if diff.kind not in ("only_a", "only_b"):
            return False
        others = (self._tensors[key] for key in names.get(diff.key, ()) if key in self._tensors)
        return any(other.a is not None and other.b is not None for other in others)


def _group_names(catalog: Catalog) -> dict[str, list[str]]:
    """Return all names of each tied tensor, by each of them."""
    names_of: dict[str, list[str]] = {}
    for key, first in catalog.ties.items():
        names = names_of.setdefault(first, [first])
        names.append(key)
        names_of[key] = names
    return names_of


def _is_read(diff: TensorDiff) -> bool:
    """Return whether the values of a tensor were read."""
    # Of kind ``dtype`` there are tensors with equal values, which are not counted.
    return not diff.is_by_fingerprint and (
        diff.kind in ("values", "close", "equal") or diff.values is not None
    )


def _judged(before: TensorDiff, result: ComparedTensor) -> TensorDiff:
    """Complete a tensor's result after its values have been compared."""
    values = result.values
    # In an exact comparison a different type is a difference, even if all values are equal.
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
    """Return a predicate for the keys to compare, from the options of a job.

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
        # The optimizer is recognised by names in Megatron's form, and by those of other trainers.
        bare = bare_key(key, a.catalog)
        return not is_optimizer_key(bare) and role_of(bare) in ("model", "other")

    return is_wanted


def _matchers(patterns: Iterable[str], keys: Iterable[str]) -> list[Callable[[str], bool]]:
    """Return a predicate for each pattern.

    Raises:
        UsageError: a pattern matches no key.
    """
    matchers = []
    for pattern in patterns:
        matches = matcher(pattern)
        if not any(map(matches, keys)):
            raise UsageError(
                f"no tensor or entry of either checkpoint matches {pattern!r}",
                hint="list the keys with: ckpt inspect A --flat (Megatron tensors are listed "
                "under their global names)",
            )
        matchers.append(matches)
    return matchers


def _cache_bytes(job: DiffJob, *catalogs: Catalog, runtime_bytes: int) -> int:
    """Return the memory for each side's cache of decoded units (zarr chunks, deflated records).

    Args:
        runtime_bytes: memory of the process itself.

    Raises:
        CapacityError: the memory limit is too low for one unit per thread and side.
    """
    tensors = (tensor for catalog in catalogs for tensor in catalog.tensors.values())
    fit = fit_threads(
        tensors if job.reads else (),
        job.threads,
        job.memory_bytes - runtime_bytes,
        thread_bytes=_THREAD_BYTES,
        n_readers=2,
    )
    if fit.n_threads < job.threads:
        n_mib = -(-(runtime_bytes + fit.needed_bytes(job.threads)) // MIB)
        subject = "1 thread needs" if job.threads == 1 else f"{job.threads} threads need"
        raise CapacityError(
            f"{subject} {n_mib:,} MiB of memory, but the limit is {job.memory_bytes // MIB:,} MiB",
            hint=f"set --memory to at least {n_mib}MiB"
            + (", or use fewer threads" if fit.n_threads else ""),
        )
    return fit.cache_bytes
