"""Scales and tables of 8-bit optimizer states when layers are stacked or unstacked.

::

    state1   (rows, cols) per layer     ◀──▶   (layers, rows, cols)
    absmax1  (blocks,) per layer        ◀──▶   (layers × blocks,)
    qmap1    (256,) per layer           ◀──▶   (256,), the same for all layers

A block is 256 (older: 2048) consecutive states. The cut between two layers has to be the end of a
block: then the scales of a stack are those of its layers one after the other, and every state keeps
its scale. The tables of all layers become replicas of one, which the conversion compares.

Not supported, refused by name: layers whose number of states is no multiple of the block, and those
along another axis than the first; states of torchao, which record the shape of the tensor beside
their codes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.optimizer_keys import is_optimizer_key
from core.engine.catalog.tensor import Tensor, concat
from core.engine.changes.blockwise_states import (
    BlockwiseState,
    blockwise,
    codes_of_bitsandbytes,
    companions_of,
)
from core.errors import UnsupportedError, UsageError
from core.values import dataclass

_HINT = "dequantize the states with --dequantize-optim, or drop the optimizer with --no-optim"


@dataclass(frozen=True, slots=True)
class StateBlocks:
    """The scales, or the table, of a blockwise state.

    Args:
        state: the state.
        is_table: they are the table.
    """

    state: BlockwiseState
    is_table: bool

    @property
    def codes(self) -> str:
        """Key of the codes."""
        return self.state.codes

    @property
    def n_states(self) -> int:
        """Number of codes."""
        return prod(self.state.shape)

    def check_cut(self, n_states: int, *, option: str) -> None:
        """Raise if a block crosses the end of a layer.

        Args:
            n_states: number of states of one layer.

        Raises:
            UnsupportedError: it does.
        """
        if n_states % self.state.block:
            raise UnsupportedError(
                f"{option}: each scale covers {self.state.block} consecutive states, but a layer "
                f"has {n_states:,}, so a block would straddle two layers",
                key=self.codes,
                hint=_HINT,
            )

    def stack(self, layers: Sequence[Tensor]) -> Tensor:
        """Return the scales of all layers one after the other, or the table that they share."""
        return layers[0].with_replicas(*layers[1:]) if self.is_table else concat(layers)

    def unstack(self, stacked: Tensor, number: int, n_layers: int) -> Tensor:
        """Return the scales of one layer of a stack, or the table that all layers share."""
        n_blocks = self.n_states // self.state.block // n_layers
        return stacked if self.is_table else stacked.narrow(0, number * n_blocks, n_blocks)


def blocks_of_states(catalog: Catalog, *, option: str, axis: int) -> dict[str, StateBlocks]:
    """Return the scales and tables of bitsandbytes' states, by key.

    Args:
        axis: number of the axis of layers.

    Raises:
        UnsupportedError: the states are torchao's, or layers along this axis divide blocks.
        CorruptError: scales do not fit their codes.
    """
    tensors = catalog.tensors
    of_torchao = next(
        (
            key
            for key in tensors
            if key.endswith(".codes")
            and f"{key.removesuffix('.codes')}.scale" in tensors
            and is_optimizer_key(key)
        ),
        None,
    )
    if of_torchao is not None:
        raise UnsupportedError(
            f"{option}: the optimizer's states are torchao tensors, whose parts cannot be "
            "restacked",
            key=of_torchao,
            hint=_HINT,
        )
    blocks: dict[str, StateBlocks] = {}
    for codes in codes_of_bitsandbytes(tensors):
        if axis:
            raise UnsupportedError(
                f"{option}: each scale covers consecutive states, but a layer's states are not "
                f"consecutive along axis {axis}",
                key=codes,
                hint=_HINT,
            )
        scales, table = companions_of(codes)
        state = blockwise(tensors, codes, scales, table, shape=tensors[codes].shape)
        blocks[scales], blocks[table] = StateBlocks(state, False), StateBlocks(state, True)
    return blocks


def with_their_codes(
    keys: Sequence[str], blocks: Mapping[str, StateBlocks], *, order: Iterable[str]
) -> list[str]:
    """Return the chosen keys, and the scales and tables of the codes among them, in order.

    Raises:
        UsageError: scales are chosen without their codes.
    """
    chosen = {*keys}
    for key in keys:
        if key in blocks and blocks[key].codes not in chosen:
            raise UsageError(
                "--unstack-layers: scales are unstacked together with their codes, so a pattern "
                "cannot select the scales alone",
                key=blocks[key].codes,
            )
    return [
        key for key in order if key in chosen or (key in blocks and blocks[key].codes in chosen)
    ]
