"""Orders of the rows of query, key and value that are not today's.

Those of checkpoints before ``checkpoint_version`` 2.0:

For a rank's fused weight (and bias) of n heads with c channels each, whose parts are query, key and
value, or key and value in attention to an encoder::

    version        order of the rows     row of (head, part, channel)
    0              [part, head, channel]  (part * n + head) * c + channel
    1.0            [head, channel, part]  (head * c + channel) * parts + part
    2.0 and later  [head, part, channel]  (head * parts + part) * c + channel

In GLM's fork (``multi_query_attention``, ``multi_query_group_num``), a rank's fused weight has all
of its queries, then its keys, then its values; today's order is by group, whose queries are
followed by its key and its value. Without shared keys, it has today's order.

These are orders of a rank's rows, so a tensor is put in order shard by shard, before the shards
are joined. Only metadata changes: every part of every head becomes a fragment of its own, strided
for version 1.0.

Source: Megatron-LM 00caa53a ``training/checkpointing.py`` ``fix_query_key_value_ordering``. The
fork is not published: its order is that of ``modeling_chatglm.py`` (THUDM/chatglm2-6b
``SelfAttention.forward``), which kept its names for the heads and groups of one partition.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from core.arrays.box import Box, c_strides
from core.arrays.dtypes import itemsize
from core.engine.catalog.stored import StoredArray
from core.engine.catalog.tensor import Fragment
from core.errors import CorruptError, UnsupportedError
from core.megatron.model.facts import ModelFacts
from core.values import dataclass

CURRENT = 3.0
_FUSED = re.compile(r"\.(query_)?key_value\.(weight|bias)$")


@dataclass(frozen=True, slots=True)
class OldRows:
    """Another order of the rows of a rank's tensor.

    Args:
        n_parts: number of parts of a group: its queries (none in attention to an encoder), its key
            and its value.
        n_groups: number of groups on the rank; of heads, if these share no keys.
        channels: number of channels of one head.
        has_parts_last: True for the order of version 1.0; False for that of version 0 and GLM's,
            all queries, all keys, all values.
    """

    n_parts: int
    n_groups: int
    channels: int
    has_parts_last: bool

    def fragments(self, fragment: Fragment) -> Iterator[Fragment]:
        """Yield the fragments that address the stored rows of a fragment.

        Args:
            fragment: addresses its array as if the rows were in today's order.
        """
        array = fragment.array
        assert array is not None
        at, box = fragment.at, fragment.box

        # In today's order, the channels of one part of a group are consecutive rows: a block.
        first_row, stop_row = at[0], at[0] + box.shape[0]
        for block in range(first_row // self.channels, -(-stop_row // self.channels)):
            start = max(block * self.channels, first_row)
            stop = min((block + 1) * self.channels, stop_row)
            inside = Box(
                (box.offset[0] + start - first_row, *box.offset[1:]),
                (stop - start, *box.shape[1:]),
            )

            # Find the block in the other order: strided (version 1.0) or consecutive.
            group, part = divmod(block, self.n_parts)
            channel = start - block * self.channels
            if self.has_parts_last:
                view = self._view(array, group, part)
                yield replace(fragment, box=inside, array=view, at=(channel, *at[1:]))
            else:
                n_queries = self.n_parts - 2
                place = part * self.n_groups + group
                if part < n_queries:
                    place = group * n_queries + part
                row = place * self.channels + channel
                yield replace(fragment, box=inside, at=(row, *at[1:]))

    def _view(self, array: StoredArray, head: int, part: int) -> StoredArray:
        """Return a view of the rows of one part of a head, which are ``n_parts`` rows apart."""
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


def rows_by_part(name: str, n_rows: int, facts: ModelFacts) -> OldRows | None:
    """Return the order of a fused tensor's rows on a rank of GLM's fork; None for today's order.

    Args: see ``old_rows``.

    Raises:
        UnsupportedError: several ranks hold the same key, or the size of a head is unknown.
        CorruptError: the number of rows contradicts the numbers in the arguments.
    """
    match = _FUSED.search(name)
    if match is None or match[1] is None:
        return None
    tp, n_queries = facts.topology.tp, facts.n_heads // facts.n_groups
    if facts.head_dim is None or facts.n_groups % tp:
        raise UnsupportedError(
            f"multi_query_group_num {facts.n_groups} is not supported with TP {tp}, because "
            "several ranks then have copies of the same keys",
            key=name,
            hint="save the checkpoint with a TP size that divides multi_query_group_num",
        )
    n_groups = facts.n_groups // tp
    rows = OldRows(n_queries + 2, n_groups, facts.head_dim, has_parts_last=False)
    if n_rows != rows.n_parts * n_groups * facts.head_dim:
        raise CorruptError(
            f"{n_groups} groups of {n_queries} query heads need "
            f"{rows.n_parts * n_groups * facts.head_dim} rows per rank, but the tensor has "
            f"{n_rows}",
            key=name,
        )
    return rows


def old_rows(name: str, n_rows: int, version: float, facts: ModelFacts) -> OldRows | None:
    """Return the order of a fused tensor's rows on a rank; None for today's order.

    Args:
        name: name of the parameter.
        n_rows: number of rows of one rank's shard.

    Raises:
        UnsupportedError: the version is neither 0 nor 1.0, or heads share keys, which Megatron of
            these versions did not support.
        CorruptError: the number of rows contradicts the number of heads in the arguments.
    """
    match = _FUSED.search(name)
    if version >= 2 or match is None:
        return None
    if version not in (0, 1):
        raise UnsupportedError(
            f"the row order of checkpoint_version {version} is unknown", key=name
        )
    if facts.head_dim is None or facts.n_groups != facts.n_heads:
        raise UnsupportedError(
            f"checkpoint_version {version} is not supported "
            + ("without a hidden size" if facts.head_dim is None else "with query groups"),
            key=name,
        )
    n_parts, n_heads = (3 if match[1] else 2), facts.n_heads // facts.topology.tp
    if n_rows != n_parts * n_heads * facts.head_dim:
        raise CorruptError(
            f"{n_heads} heads of {facts.head_dim} channels need "
            f"{n_parts * n_heads * facts.head_dim} rows per rank, but the tensor has {n_rows}",
            key=name,
        )
    return OldRows(n_parts, n_heads, facts.head_dim, has_parts_last=version == 1)
