"""Find tensors that a rule cuts, although all tensor parallel ranks hold the same values.

Forks store some tensors complete on every rank, which Megatron cuts: joining the copies would give
a tensor of a wrong size, or one whose parts repeat, which no size in the arguments need contradict.
The shards of a trained tensor are never equal. What may be equal is no evidence: few values, such
as those of fresh norms and biases; rows that repeat along the cut, such as those of a fresh
``A_log``; and tensors of one axis, whose weights show the same.

Checksums of the files' records, where they are recorded, tell most tensors apart without reading;
of the others, a sample is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from core.arrays.dtypes import itemsize
from core.catalog.stored import StoredArray
from core.errors import UnsupportedError
from core.files.store import ReadStore
from core.megatron.model.topology import Topology
from core.megatron.reshard.rank_model import RankTensor
from core.megatron.rules.rules import replication

_SAMPLE_BYTES = 1 << 14
_FEWEST_VALUES = 32
"""Shards of fewer different values may be equal by chance."""


@dataclass(frozen=True, slots=True)
class EqualShards:
    """A tensor whose shards are equal.

    Args:
        name: global name of the tensor.
        axis: the axis that its rule cuts.
        n: number of shards.
        group: ``TP`` or ``ETP``.
    """

    name: str
    axis: int
    n: int
    group: str

    def __str__(self) -> str:
        return (
            f"all {self.n} {self.group} ranks hold the same values, but the rule of this tensor "
            f"cuts axis {self.axis}"
        )


def find_equal_shards(
    tensors: Mapping[str, RankTensor], topology: Topology, store: ReadStore
) -> Iterator[EqualShards]:
    """Yield the tensors whose shards are equal although a rule of the project cuts them.

    Args:
        tensors: global name → the shards on all ranks.
        store: the checkpoint's files.
    """
    equal: set[str] = set()
    for name, tensor in tensors.items():
        rule, n = tensor.rule, topology.size_of(tensor.rule.group)
        if rule.cut_axis is None or rule.is_users or n == 1:
            continue
        # One replica of each shard is enough.
        shards: dict[int, StoredArray] = {}
        for part in tensor.parts:
            shards.setdefault(part.rank.within(rule.group), part.array)
        weight = name.removesuffix("bias") + "weight"
        if len(shards) == n and (
            weight in equal or _are_equal(list(shards.values()), rule.cut_axis, store)
        ):
            equal.add(name)
            yield EqualShards(name, rule.cut_axis, n, rule.group.upper())


def raise_if_equal_shards(
    tensors: Mapping[str, RankTensor], topology: Topology, store: ReadStore
) -> None:
    """Raise if tensors have equal shards although a rule cuts them.

    Raises:
        UnsupportedError: there are some; the hint has the rules that decide.
    """
    equal = list(find_equal_shards(tensors, topology, store))
    if equal:
        first = equal[0]
        more = len(equal) - 1
        raise UnsupportedError(
            f"{first}" + (f"; the same is true of {more} other tensors" if more else ""),
            key=first.name,
            hint=build_replication_hint(item.name for item in equal),
        )


def build_replication_hint(names: Iterable[str]) -> str:
    """Return the hint for tensors that are probably complete on every rank."""
    return (
        "if every rank holds the complete tensor, pass a file with --rules that contains:\n"
        f"{replication(names)}\n(or, if they are shards that happen to be equal, rule = "
        '"split" with the axis)'
    )


def _are_equal(shards: list[StoredArray], axis: int, store: ReadStore) -> bool:
    """Return whether shards are equal, and are not so by construction."""
    first = shards[0]
    crcs = {shard.extent.crc for shard in shards}
    n_elements = prod(first.shape)
    if len(first.shape) < 2 or n_elements < _FEWEST_VALUES or (None not in crcs and len(crcs) > 1):
        return False
    if any((shard.dtype, shard.shape) != (first.dtype, first.shape) for shard in shards):
        return False

    # Without checksums, the ends of the arrays are compared.
    if any(
        shard.extent.is_late or shard.extent.encoding or shard.extent.strides for shard in shards
    ):
        return False
    size = min(first.n_bytes, _SAMPLE_BYTES)
    head = store.read(first.extent.file, first.extent.offset, size)
    if not _varies(head, first, axis):
        return False
    if None not in crcs:
        return True
    tail_offset = first.n_bytes - size
    tail = store.read(first.extent.file, first.extent.offset + tail_offset, size)
    return all(
        store.read(shard.extent.file, shard.extent.offset + at, size) == sample
        for shard in shards[1:]
        for at, sample in ((0, head), (tail_offset, tail))
    )


def _varies(head: bytes, array: StoredArray, axis: int) -> bool:
    """Return whether many values are at the beginning of an array, also along the cut axis."""
    size = itemsize(array.dtype)
    if len({head[at : at + size] for at in range(0, len(head), size)}) < _FEWEST_VALUES:
        return False
    row_bytes = array.n_bytes // array.shape[0]
    rows = [head[at : at + row_bytes] for at in range(0, len(head), row_bytes)]
    if axis == 0 and len(rows) > 1:
        return any(row != rows[0] for row in rows if len(row) == row_bytes)
    return any(len({row[at : at + size] for at in range(0, len(row), size)}) > 1 for row in rows)
