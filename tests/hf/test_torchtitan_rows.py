"""The rows of torchtitan's query and key weights, cut at any place, against numpy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.arrays.box import Box
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.tensor import Fragment, Tensor, whole_tensor
from core.files.store import LocalStore
from core.hf.torchtitan import from_torchtitan
from tests.support.materialize import tensor_bytes

KEY = "layers.0.attention.wq.weight"
HEADS, HEAD_DIM, COLUMNS = 3, 6, 5
CONFIG = {"model_type": "llama", "num_attention_heads": HEADS}


def shards(cuts: Sequence[int], folder: Path, *, column: int) -> tuple[Catalog, Any]:
    """A query weight in a file for each part, with other elements around the parts."""
    rows = HEADS * HEAD_DIM
    weight: Any = np.arange(rows * COLUMNS, dtype="<f4").reshape(rows, COLUMNS)
    fragments = []
    for number, (first, stop) in enumerate(zip((0, *cuts), (*cuts, rows), strict=True)):
        stored: Any = np.full((stop - first + 2, COLUMNS + column), -1, "<f4")
        stored[1:-1, column:] = weight[first:stop]
        (folder / str(number)).write_bytes(stored.tobytes())
        array = StoredArray(str(number), "float32", stored.shape, Extent(str(number), 0))
        box = Box((first, 0), (stop - first, COLUMNS))
        fragments.append(Fragment(box, array, (1, column)))
    embedding = StoredArray("e", "float32", (1, 1), Extent("0", 0))
    catalog = Catalog(
        format="memory",
        version=None,
        tensors={
            "tok_embeddings.weight": whole_tensor(embedding),
            KEY: Tensor("float32", weight.shape, lambda: fragments),
        },
    )
    return catalog, weight


@pytest.mark.parametrize("column", [0, 2])
@pytest.mark.parametrize("cuts", [(), (9,), (1, 2, 7), (6, 12), (5, 6, 8, 17)])
def test_rows_go_to_the_halves_of_their_heads(
    tmp_path: Path, cuts: tuple[int, ...], column: int
) -> None:
    catalog, weight = shards(cuts, tmp_path, column=column)
    halves = from_torchtitan(catalog, CONFIG, has_no_optimizer=True)
    name = "model.layers.0.self_attn.q_proj.weight"
    stored = tensor_bytes(halves, LocalStore(tmp_path), name)
    pairs = weight.reshape(HEADS, HEAD_DIM // 2, 2, COLUMNS)
    expected = pairs.transpose(0, 2, 1, 3).reshape(weight.shape)
    assert stored.tobytes() == expected.tobytes()
    # Two fragments for each head, and a few where a part begins or ends within one.
    assert len(halves.fragments(name)) <= 2 * HEADS + 4 * len(cuts)
