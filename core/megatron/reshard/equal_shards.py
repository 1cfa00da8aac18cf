"""Find tensors that a rule cuts, although several tensor parallel ranks hold the same values.

Forks store some tensors complete on every rank, which Megatron cuts, or the keys and values of a
group on all ranks with its queries: joining the copies would give a tensor of a wrong size, or one
whose parts repeat, which no size in the arguments need contradict.
The shards of a trained tensor are never equal. What may be equal is no evidence: few values, such
as those of fresh norms and biases; rows that repeat along the cut, such as those of a fresh
``A_log``; and tensors of one axis, whose weights show the same.

Checksums of the files' records, where they are recorded, tell most tensors apart without reading;
of the others, and of files that were not opened, a sample is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from core.arrays.dtypes import itemsize
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import RankFacts
from core.engine.catalog.stored import StoredArray
from core.errors import UnsupportedError
from core.files.store import ReadStore
from core.megatron.model.topology import Topology
from core.megatron.reshard.rank_model import RankPart, RankTensor
from core.megatron.rules.rules import Rule, format_cut, format_table
from core.values import dataclass

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|\d+$")
_SAMPLE_BYTES = 1 << 14
_FEWEST_VALUES = 32
"""Shards of fewer different values may be equal by chance."""


@dataclass(frozen=True, slots=True)
class EqualShards:
    """A tensor of which several ranks hold the same shard.

    Args:
        name: global name of the tensor.
        rule: the rule that cuts it.
        ranks: ranks with one and the same shard.
        n: number of shards.
    """

    name: str
    rule: Rule
    ranks: tuple[int, ...]
    n: int

    @property
    def is_on_all_ranks(self) -> bool:
        """True if all ranks of the group hold the same shard."""
        return len(self.ranks) == self.n

    def __str__(self) -> str:
        numbers = ", ".join(map(str, self.ranks))
        group = self.rule.group.upper()
        ranks = (
            f"all {self.n} {group} ranks"
            if self.is_on_all_ranks
            else f"{group} ranks {numbers} of {self.n}"
        )
        axis = self.rule.cut_axis
        return f"{ranks} have identical shards, although this tensor's rule splits axis {axis}"


def find_equal_shards(
    tensors: Mapping[str, RankTensor], topology: Topology, store: ReadStore
) -> Iterator[EqualShards]:
    """Yield the tensors with equal shards although a rule of the project cuts them.

    Args:
        tensors: global name → the shards on all ranks.
        store: the checkpoint's files.
    """
    equal: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        rule, n = tensor.rule, topology.size_of(tensor.rule.group)
        if rule.cut_axis is None or rule.is_users or n == 1:
            continue
        # One replica of each shard is enough.
        shards: dict[int, StoredArray] = {}
        for part in tensor.parts:
            shards.setdefault(part.rank.within(rule.group), part.array)
        ranks = equal.get(name.removesuffix("bias") + "weight", ())
        if len(shards) == n and not ranks:
            ranks = _equal_ranks(shards, rule.cut_axis, store)
        if len(shards) == n and ranks:
            equal[name] = ranks
            yield EqualShards(name, rule, ranks, n)


def kind_of(name: str) -> str:
    """Return a tensor's name without the numbers of layers and experts."""
    return _NUMBER.sub("", name)


def one_of_each_kind(
    tensors: Mapping[str, RankTensor], catalog: Catalog, topology: Topology
) -> dict[str, RankTensor]:
    """Return the first tensor of each name without numbers, with the shards of all ranks.

    A fork that stores a tensor complete does so in all layers, so one layer shows it.

    Args:
        tensors: global name → the shards on all ranks or on a sample of them.
        catalog: the rank catalog, in which unopened files have the arrays of the sampled ones.
    """
    facts = catalog.facet(RankFacts)
    assert facts is not None and facts.arrays is not None, "a source lists its ranks and arrays"
    arrays = facts.arrays
    files = {folder: topology.rank_at(coords) for coords, (folder, _) in facts.ranks.items()}
    firsts: dict[str, tuple[str, RankTensor]] = {}
    for name, tensor in tensors.items():
        firsts.setdefault(kind_of(name), (name, tensor))
    completed = {}
    for name, tensor in firsts.values():
        sampled = tensor.parts[0]
        rank, key = files[sampled.folder], sampled.array.name.removeprefix(sampled.folder)
        completed[name] = RankTensor(
            tensor.rule,
            [
                RankPart(other, folder, arrays[folder + key])
                for folder, other in files.items()
                if other.pp == rank.pp
                and (tensor.rule.group == "tp" or other.ep == rank.ep)
                and folder + key in arrays
            ],
        )
    return completed


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
            f"{first}" + (f" (and {more} more like it)" if more else ""),
            key=first.name,
            hint=suggest_rules(equal),
        )


def suggest_rules(equal: Sequence[EqualShards]) -> str:
    """Return the hint for tensors with equal shards: the rules that decide what they are."""
    # One table for all tensors that are cut alike.
    names: dict[tuple[str, ...], list[str]] = {}
    for item in equal:
        if item.is_on_all_ranks:
            names.setdefault(format_cut(item.rule), []).append(item.name)
    if not names:
        return (
            "convert the checkpoint with the software that wrote it, because no rule can describe "
            "a tensor that only some ranks share; if the shards only happen to be equal, say so in "
            'a rules file (rule = "split" with the axis), and pass the file with --rules'
        )
    tables = [
        format_table(
            "rule",
            alike,
            'rule = "replicate"',
            "# or, if the shards only happen to be equal:",
            *(f"# {line}" for line in cut),
        )
        for cut, alike in names.items()
    ]
    return (
        "if every rank has the complete tensor, add this to a rules file, and pass the file with "
        "--rules:\n" + "\n".join(tables)
    )


def _equal_ranks(shards: Mapping[int, StoredArray], axis: int, store: ReadStore) -> tuple[int, ...]:
    """Return ranks with one and the same shard, the most there are; () without any.

    Shards that may be equal by construction do not count.
    """
    arrays = list(shards.values())
    first = arrays[0]
    crcs = {array.extent.crc for array in arrays}
    n_elements = prod(first.shape)
    has_crcs = None not in crcs
    if (
        len(first.shape) < 2
        or n_elements < _FEWEST_VALUES
        or (has_crcs and len(crcs) == len(arrays))
    ):
        return ()
    if any((array.dtype, array.shape) != (first.dtype, first.shape) for array in arrays):
        return ()
    if any(
        array.extent.is_late or array.extent.encoding or array.extent.strides for array in arrays
    ):
        return ()

    # Without checksums, the ends of the arrays are compared.
    size = min(first.n_bytes, _SAMPLE_BYTES)

    def sample(array: StoredArray, offset: int) -> bytes:
        return store.read(array.extent.file, array.extent.offset + offset, size)

    if not has_crcs:
        extents = [array.extent for array in arrays]
        store.expect_ranges((item.file, item.offset, item.offset + size) for item in extents)
    alike: dict[object, list[int]] = {}
    for rank, array in shards.items():
        alike.setdefault(array.extent.crc if has_crcs else sample(array, 0), []).append(rank)
    for ranks in sorted(alike.values(), key=len, reverse=True):
        if len(ranks) == 1:
            break
        if not _varies(sample(shards[ranks[0]], 0), first, axis):
            continue
        if has_crcs or len({sample(shards[rank], first.n_bytes - size) for rank in ranks}) == 1:
            return tuple(sorted(ranks))
    return ()


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
