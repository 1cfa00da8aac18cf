"""The rows of query, key and value in checkpoints of before ``checkpoint_version`` 2.0.

A rank's fused weight (and bias) of n heads with c channels each, whose parts are query, key and
value (or key and
value, for attention to an encoder)::

    version        order of the rows     row of (head, part, channel)
    0              [part, head, channel]  (part * n + head) * c + channel
    1.0            [head, channel, part]  (head * c + channel) * parts + part
    2.0 and later  [head, part, channel]  (head * parts + part) * c + channel

It is the rank's rows that are ordered so: a tensor is put in order shard by shard, before shards
are joined. Where rows lie is metadata: every part of every head is a fragment of its own, strided
for version 1.0.

Source: Megatron-LM 00caa53a ``training/checkpointing.py`` ``fix_query_key_value_ordering``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from core.arrays.box import Box, c_strides
from core.arrays.dtypes import itemsize
from core.catalog.catalog import Fragment
from core.catalog.stored import StoredArray
from core.errors import CorruptError, UnsupportedError
from core.megatron.model.facts import ModelFacts

CURRENT = 3.0
_FUSED = re.compile(r"\.(query_)?key_value\.(weight|bias)$")


@dataclass(frozen=True, slots=True)
class OldRows:
    """How the rows of a rank's tensor are ordered.

    Args:
        n_parts: 3, or 2 without queries.
        n_heads: heads of the rank.
        channels: channels of one head.
        has_parts_last: rows are ordered as in version 1.0, otherwise as in version 0.
    """

    n_parts: int
    n_heads: int
    channels: int
    has_parts_last: bool

    def fragments(self, fragment: Fragment) -> Iterator[Fragment]:
        """Yield where the rows of a fragment are stored.

        The fragment addresses its array as if the rows were in today's order.
        """
        array = fragment.array
        assert array is not None
        at, box = fragment.at, fragment.box
        for row in range(at[0] // self.channels, -(-(at[0] + box.shape[0]) // self.channels)):
            first, stop = (
                max(row * self.channels, at[0]),
                min((row + 1) * self.channels, at[0] + box.shape[0]),
            )
            head, part = divmod(row, self.n_parts)
            inside = Box(
                (box.offset[0] + first - at[0], *box.offset[1:]), (stop - first, *box.shape[1:])
            )
            channel = first - row * self.channels
            if self.has_parts_last:
                yield replace(
                    fragment, box=inside, array=self._view(array, head, part), at=(channel, *at[1:])
                )
            else:
                start = (part * self.n_heads + head) * self.channels + channel
                yield replace(fragment, box=inside, at=(start, *at[1:]))

    def _view(self, array: StoredArray, head: int, part: int) -> StoredArray:
        """Return the rows of one part of a head, which lie ``n_parts`` rows apart."""
        extent = array.extent
        assert not extent.is_late, "rank files know where their arrays are"
        step, *rest = extent.strides or c_strides(array.shape)
        first = head * self.channels * self.n_parts + part
        return replace(
            array,
            name=f"{array.name}[{head},{part}]",
            shape=(self.channels, *array.shape[1:]),
            extent=replace(
                extent,
                offset=extent.offset + first * step * itemsize(array.dtype),
                strides=(step * self.n_parts, *rest),
                crc=None,
            ),
        )


def old_rows(name: str, n_rows: int, version: float, facts: ModelFacts) -> OldRows | None:
    """Return how a fused tensor's rows are ordered on a rank.

    None where they are ordered as today.

    Args:
        name: name of the parameter.
        n_rows: rows of one rank's shard.

    Raises:
        UnsupportedError: a version that never was, or heads that share keys, which no such version
            had.
        CorruptError: the rows are not those of the arguments' heads.
    """
    match = _FUSED.search(name)
    if version >= 2 or match is None:
        return None
    if version not in (0, 1):
        raise UnsupportedError(
            f"how checkpoint_version {version} orders the rows is not known", key=name
        )
    if facts.head_dim is None or facts.n_groups != facts.n_heads:
        raise UnsupportedError(
            f"checkpoint_version {version} with query groups, or without a hidden size", key=name
        )
    n_parts, n_heads = (3 if match[1] else 2), facts.n_heads // facts.topology.tp
    if n_rows != n_parts * n_heads * facts.head_dim:
        raise CorruptError(
            f"{n_heads} heads of {facts.head_dim} channels make {n_parts * n_heads * facts.head_dim} rows on a rank, "
            f"but there are {n_rows}",
            key=name,
        )
    return OldRows(n_parts, n_heads, facts.head_dim, has_parts_last=version == 1)
