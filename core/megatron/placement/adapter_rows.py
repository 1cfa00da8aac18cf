"""Order of the rows of canonical LoRA's gate and up adapters, which depends on the TP size.

Megatron-Bridge stores the second matrix of every adapter of a gated ``linear_fc1`` as it stores the
layer: the first and the second half of each rank's rows are gate and up, and torch_dist has all
gates before all ups. The adapters of canonical LoRA, ``adapter_gate`` and ``adapter_up``, have only
one of both, but are stored in the same way. For TP 2, with the rows of the matrix in quarters::

    rank 0     rank 1          in the matrix     in torch_dist
    a b        c d             a b c d           a c b d

So such a torch_dist has another meaning for every TP size, and Megatron-Bridge loads it properly
only at the size at which it was saved: that of the training arguments. In the global form of
``core.megatron.reshard`` rows have the order of the matrix.

Source: Megatron-Bridge 067f987d ``peft/utils.py`` ``ParallelLinearAdapter.sharded_state_dict``
(``"linear_fc1" in self.base_linear_name``), and checkpoints that it wrote (tests/golden).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from core.arrays.box import Box
from core.engine.catalog.catalog import AnyCatalog, Catalog
from core.engine.catalog.optimizer_keys import is_optimizer_key
from core.engine.catalog.tensor import Fragment, bind_argument
from core.errors import UnsupportedError
from core.megatron.extras.common_state import EXTRA_STATE
from core.megatron.model.checks import ADAPTER

_HALVED = re.compile(r"\.linear_fc1\.adapter\.adapter_(up|gate)\.linear_out\.weight$")


def is_adapter(catalog: AnyCatalog) -> bool:
    """Return whether all weights of a catalog with Megatron's names are those of adapters."""
    weights = [
        key for key in catalog.tensors if not is_optimizer_key(key) and EXTRA_STATE not in key
    ]
    return bool(weights) and all(ADAPTER in key for key in weights)


def is_halved(name: str) -> bool:
    """Return True if the rows of a tensor, or of one of its optimizer states, depend on TP."""
    return _HALVED.search(name) is not None


def to_matrix_order(catalog: Catalog, tp: int) -> Catalog:
    """Return a catalog whose rows have the order of the matrix, given that stored for a TP size."""
    return _reordered(catalog, first=2, second=tp)


def to_stored_order(catalog: Catalog, tp: int) -> Catalog:
    """Return a catalog whose rows have the order that is stored for a TP size.

    Raises:
        UnsupportedError: the rows do not divide by twice the TP size.
    """
    return _reordered(catalog, first=tp, second=2)


def _reordered(catalog: Catalog, *, first: int, second: int) -> Catalog:
    """Return a catalog in which block (a, b) of the rows of each tensor moves to (b, a).

    Args:
        first, second: the number of blocks, a < first, b < second, of the present order.

    Raises:
        UnsupportedError: the rows do not divide into the blocks.
    """
    keys = {key for key in catalog.tensors if is_halved(key)}
    if first * second == 2 or not keys:
        return catalog
    for key in keys:
        n_rows = catalog.tensors[key].shape[0]
        if n_rows % (first * second):
            raise UnsupportedError(
                f"the adapter's {n_rows} rows do not divide into two halves for each of "
                f"{first * second // 2} tensor-parallel ranks",
                key=key,
            )

    def list_moved(key: str) -> Iterator[Fragment]:
        n_in_block = catalog.tensors[key].shape[0] // (first * second)
        for fragment in catalog.fragments(key):
            offset, shape = fragment.box.offset, fragment.box.shape
            for block in range(offset[0] // n_in_block, -(-fragment.box.end[0] // n_in_block)):
                start = max(block * n_in_block, offset[0])
                stop = min((block + 1) * n_in_block, fragment.box.end[0])
                a, b = divmod(block, second)
                row = (b * first + a - block) * n_in_block + start
                # An array may have more axes than the box, or fewer where the box is one row; both
                # are aligned at the last one.
                axis, at = len(fragment.at) - len(shape), fragment.at
                if start > offset[0]:
                    at = (*at[:axis], at[axis] + start - offset[0], *at[axis + 1 :])
                box = Box((row, *offset[1:]), (stop - start, *shape[1:]))
                yield replace(fragment, box=box, at=at)

    def moved(key: str) -> Sequence[Fragment]:
        return tuple(list_moved(key))

    tensors = {
        key: replace(tensor, tiling=bind_argument(moved, key)) if key in keys else tensor
        for key, tensor in catalog.tensors.items()
    }
    return replace(catalog, tensors=tensors)
