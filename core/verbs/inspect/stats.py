"""Measure the values of tensors for ``ckpt inspect --stats``: one pass, in bounded memory.

Tensors are read band by band in their global shape, so that a box that several ranks hold counts
once, and vocabulary padding counts as stored. The numbers are those in the files: float8 weights
are not multiplied by their scales.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from math import prod
from typing import TYPE_CHECKING

from core.arrays.box import Box
from core.arrays.dtypes import itemsize
from core.engine.catalog.key_patterns import fold_keys
from core.engine.catalog.optimizer_keys import param_of
from core.engine.numbers.difference import has_numbers
from core.engine.numbers.statistics import ValueStatistics, describe, merge_statistics
from core.engine.plan.box_reader import BoxReader, TensorReader, bands, fit_threads
from core.engine.plan.memory import MIB, RUNTIME_BYTES
from core.engine.team.threads import ThreadGroup
from core.errors import CapacityError, CheckpointingException, UnsupportedError
from core.files.syscalls import allowed_cores
from core.megatron.rules.tables import load_rules
from core.values import dataclass
from core.verbs.convert.job import DEFAULT_MEMORY_BYTES

if TYPE_CHECKING:
    from core.engine.catalog.catalog import Catalog
    from core.engine.catalog.tensor import Tensor
    from core.megatron.rules.rules import Rules
    from core.opening.open import Checkpoint

_BAND_BYTES = 1 << 20
"""Size of a band; two fit into the cache of a core."""
_THREAD_BYTES = 8 * _BAND_BYTES
"""Memory of one thread: its buffers, and the temporary arrays of a block."""
_GROUP = 32
"""Number of bands that a thread takes at a time."""

Progress = Callable[[int, int], None]
"""Called with (bytes read, total bytes)."""


@dataclass(frozen=True, slots=True)
class FoldedStatistics:
    """The values of tensors whose names differ only in their numbers, such as those of all layers.

    Args:
        label: the common name, a pattern such as ``layers.[0-3].weight``.
        members: the tensors, in their order; they have one dtype and shape.
        total: all their values together; None if the dtype has no numbers.
        parts: description of each member by key, of those with numbers.
        stacked_key: name of the tensor whose layers the members are; None if they are tensors.
        least, greatest: keys of the members with the extremes of ``total``; None without numbers.
        least_std, greatest_std: (key, standard deviation) of the members with the extreme ones;
            None without numbers.
    """

    label: str
    members: Mapping[str, Tensor]
    total: ValueStatistics | None
    parts: Mapping[str, ValueStatistics] = field(default_factory=dict)
    stacked_key: str | None = None
    least: str | None = None
    greatest: str | None = None
    least_std: tuple[str, float] | None = None
    greatest_std: tuple[str, float] | None = None

    def numbers_of(self, key: str) -> str:
        """Return what tells a member from the others: ``layers.2``, or ``layers.2 experts.5``."""
        names = key.split(".")
        return " ".join(
            ".".join(names[max(at - 1, 0) : at + 1])
            for at, name in enumerate(self.label.split("."))
            if name != names[at]
        )


def n_layers_in(key: str, tensor: Tensor, rules: Rules) -> int:
    """Return the number of layers that are stacked along a tensor's first axis; 1 if none are.

    Args:
        rules: the rules that know the names of Megatron's distributed checkpoints.
    """
    is_stacked = rules.stacked_of(param_of(key)) is not None
    return max(tensor.shape[0], 1) if is_stacked and len(tensor.shape) > 1 else 1


def measure_tensors(
    checkpoint: Checkpoint,
    view: Catalog,
    tensors: Mapping[str, Tensor],
    *,
    threads: int | None = None,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Progress | None = None,
) -> dict[str, ValueStatistics | None]:
    """Read tensors and describe the values of each, as ``measure_layers`` does with their layers.

    Returns:
        Description by key; None for a tensor whose dtype or kind has no numbers to read.
    """
    parts = measure_layers(
        checkpoint, view, tensors, threads=threads, memory_bytes=memory_bytes, progress=progress
    )
    return merged_layers(parts)


def merged_layers(
    parts: Mapping[str, tuple[ValueStatistics, ...] | None],
) -> dict[str, ValueStatistics | None]:
    """Return the description of each tensor, given those of its layers."""
    return {
        key: None if layers is None else merge_statistics(list(layers))
        for key, layers in parts.items()
    }


def measure_layers(
    checkpoint: Checkpoint,
    view: Catalog,
    tensors: Mapping[str, Tensor],
    *,
    threads: int | None = None,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Progress | None = None,
) -> dict[str, tuple[ValueStatistics, ...] | None]:
    """Read tensors and describe the values of each, layer by layer where layers are stacked.

    Args:
        view: the catalog that ``inspect`` shows; a tensor that it lacks is one of the rank files.
        threads: number of threads; None for the number of processors. Fewer run if the memory is
            too small for them.
        progress: called from the reading threads.

    Returns:
        Key → a description for each layer of Megatron's tensors whose first axis is the layer, one
        for other tensors; None for a tensor whose dtype or kind has no numbers to read.

    Raises:
        CapacityError: the memory limit is too low for one thread.
        CheckpointingException: a tensor cannot be read.
    """
    # Each tensor is read from the catalog that has it.
    sources: list[tuple[Catalog, str, Tensor]] = []
    statistics: dict[str, tuple[ValueStatistics, ...] | None] = {}
    for key, tensor in tensors.items():
        catalog = view if key in view.tensors else checkpoint.catalog
        statistics[key] = None
        if has_numbers(tensor.dtype):
            sources.append((catalog, key, tensor))

    # Divide the memory, and read in threads.
    fit = fit_threads(
        (tensor for _, _, tensor in sources),
        threads or len(allowed_cores()),
        memory_bytes - RUNTIME_BYTES,
        thread_bytes=_THREAD_BYTES,
    )
    if not fit.n_threads:
        n_mib = -(-(RUNTIME_BYTES + fit.needed_bytes(1)) // MIB)
        raise CapacityError(
            f"--stats needs {n_mib:,} MiB of memory, but the limit is {memory_bytes // MIB:,} MiB",
            hint=f"set --memory to at least {n_mib}MiB",
        )
    readers = {
        id(catalog): BoxReader(catalog, checkpoint.store, cache_bytes=fit.cache_bytes)
        for catalog in (view, checkpoint.catalog)
    }
    rules = load_rules() if checkpoint.format.has_common_state else None
    jobs = (
        (readers[id(catalog)], key, 1 if rules is None else n_layers_in(key, tensor, rules))
        for catalog, key, tensor in sources
    )
    total_bytes = sum(tensor.n_bytes for _, _, tensor in sources)
    statistics.update(_Measurement(jobs, total_bytes, progress).run(fit.n_threads))
    return statistics


def fold_statistics(
    tensors: Mapping[str, Tensor],
    statistics: Mapping[str, ValueStatistics | None],
    layers: Mapping[str, tuple[ValueStatistics, ...] | None] | None = None,
) -> list[FoldedStatistics]:
    """Fold the tensors whose keys differ only in numbers, in order of first appearance.

    A tensor of several layers becomes a row whose members are the layers, under the names that they
    would have alone.

    Args:
        statistics: description of each tensor by key.
        layers: descriptions of each tensor's layers by key.
    """
    kinds = {key: (tensor.dtype, tensor.shape) for key, tensor in tensors.items()}
    rows = []
    for label, keys in fold_keys(kinds):
        parts = (layers or {}).get(keys[0]) or ()
        if len(keys) == 1 and len(parts) > 1:
            rows.append(_fold_layers(keys[0], tensors[keys[0]], parts))
        else:
            rows.append(_fold(label, {key: tensors[key] for key in keys}, statistics))
    return rows


def _fold_layers(key: str, tensor: Tensor, layers: Sequence[ValueStatistics]) -> FoldedStatistics:
    """Fold the layers of one tensor."""
    stacked = load_rules().stacked_of(param_of(key))
    assert stacked is not None, "only stacked layers have several descriptions"
    before, after = key.removesuffix(stacked[1]), stacked[1]
    members = {
        f"{before}{number}.{after}": tensor.select(0, number) for number in range(len(layers))
    }
    parts = dict(zip(members, layers, strict=True))
    label = f"{before}[0-{len(layers) - 1}].{after}"
    return replace(_fold(label, members, parts), stacked_key=key)


def _fold(
    label: str, members: Mapping[str, Tensor], statistics: Mapping[str, ValueStatistics | None]
) -> FoldedStatistics:
    """Merge the descriptions of some tensors, and find the members with the extremes."""
    parts = {key: part for key in members if (part := statistics[key]) is not None}
    if not parts:
        return FoldedStatistics(label, members, None)
    leasts = {key: part.least for key, part in parts.items() if part.least is not None}
    greatests = {key: part.greatest for key, part in parts.items() if part.greatest is not None}
    stds = [(key, part.std) for key, part in parts.items() if part.std is not None]
    return FoldedStatistics(
        label,
        members,
        merge_statistics(list(parts.values())),
        parts,
        least=min(leasts, key=leasts.__getitem__, default=None),
        greatest=max(greatests, key=greatests.__getitem__, default=None),
        least_std=min(stds, key=lambda pair: pair[1], default=None),
        greatest_std=max(stds, key=lambda pair: pair[1], default=None),
    )


def _in_layer(boxes: Iterable[Box], layer: int) -> list[Box]:
    """Return boxes of one layer as boxes of the tensor with all layers."""
    return [Box((layer, *box.offset), (1, *box.shape)) for box in boxes]


@dataclass(slots=True)
class _MeasuredTensor:
    """A tensor that is being read: its reader, and what is known and missing of its layers."""

    key: str
    reader: TensorReader
    n_left: int
    layers: tuple[list[ValueStatistics], ...]


class _Measurement:
    """One pass over tensors, in several threads.

    Args:
        tensors: (reader of its checkpoint, key, number of layers along its first axis) of each
            tensor.
        total_bytes: size of all tensors.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[BoxReader, str, int]],
        total_bytes: int,
        progress: Progress | None,
    ) -> None:
        self._total_bytes = total_bytes
        self._progress = progress
        self._done_bytes = 0
        self._lock = threading.Lock()
        self._threads = ThreadGroup("stats")
        self._items = self._threads.share(self._all_items(tensors))
        self._results: dict[str, tuple[ValueStatistics, ...] | None] = {}

    def run(self, n_threads: int) -> dict[str, tuple[ValueStatistics, ...] | None]:
        """Read everything and return the descriptions of each tensor's layers.

        Raises:
            CheckpointingException: the first error of a thread.
        """
        self._threads.run(self._work, n_threads)
        return self._results

    def _all_items(
        self, tensors: Iterable[tuple[BoxReader, str, int]]
    ) -> Iterator[tuple[_MeasuredTensor, int, list[Box]]]:
        """Yield each tensor in groups of bands, with their layer."""
        for reader, key, n_layers in tensors:
            try:
                tensor = reader.tensor(key)
            except UnsupportedError:
                self._results[key] = None
                continue
            except CheckpointingException as err:
                err.key = err.key or key
                raise
            # No band is of two layers.
            shape = tensor.shape if n_layers == 1 else tensor.shape[1:]
            boxes = list(bands(shape, itemsize(tensor.dtype), _BAND_BYTES))
            groups = [boxes[at : at + _GROUP] for at in range(0, len(boxes), _GROUP)]
            # A tensor without elements has no bands.
            if not groups:
                self._results[key] = (ValueStatistics(),) * n_layers
            layers: tuple[list[ValueStatistics], ...] = tuple([] for _ in range(n_layers))
            job = _MeasuredTensor(key, tensor, len(groups) * n_layers, layers)
            for layer in range(n_layers):
                for group in groups:
                    yield job, layer, group if n_layers == 1 else _in_layer(group, layer)

    def _work(self) -> None:
        """Describe groups of bands until there are no more; the task of one thread."""
        out, raw = (memoryview(mmap.mmap(-1, _BAND_BYTES)) for _ in range(2))
        for job, layer, boxes in self._items:
            parts = []
            for box in boxes:
                if self._threads.is_stopped():
                    return
                data = out[: prod(box.shape) * itemsize(job.reader.dtype)]
                job.reader.read(box, data, raw)
                parts.append(describe(data, job.reader.dtype))
                self._advance(len(data))
            part = merge_statistics(parts)
            with self._lock:
                job.layers[layer].append(part)
                job.n_left -= 1
                if job.n_left == 0:
                    self._results[job.key] = tuple(map(merge_statistics, job.layers))

    def _advance(self, n_bytes: int) -> None:
        """Report bytes that were read."""
        with self._lock:
            self._done_bytes += n_bytes
            done = self._done_bytes
        if self._progress is not None:
            self._progress(done, self._total_bytes)
