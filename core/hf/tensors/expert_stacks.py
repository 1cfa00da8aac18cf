"""Put the experts of a layer into two tensors, as Qwen3-VL's files have them.

::

    mlp.experts.3.{gate,up}_proj.weight  (inner, hidden)
        ──▶ mlp.experts.gate_up_proj     (experts, 2 × inner, hidden), or transposed

The reverse is part of ``core.hf.text_model``, which has the source.

Not supported: experts of which some are missing; the planner refuses the gaps.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence, Set
from dataclasses import replace
from functools import partial

from core.arrays.box import Box
from core.catalog.catalog import Catalog
from core.catalog.tensor import Fragment, Tensor, stack
from core.hf.tensors.packed import transpose_matrix

_EXPERT = re.compile(r"(.*\.experts)\.(\d{1,6})\.(gate|up|down)_proj\.weight")
_STACK_OF = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}


def stack_experts(catalog: Catalog, names: Container[str] | None = None) -> Catalog:
    """Return a catalog whose experts are stacked.

    Args:
        catalog: a catalog of a model whose experts are tensors of their own.
        names: names that are wanted, such as ``model.layers.0.mlp.experts.down_proj``: other
            stacks are left apart, and so are experts whose own names are among them. None stacks
            all experts.
    """
    # Stack → its parts: (key, number of the expert, whether it follows the gate).
    parts: dict[str, list[tuple[str, int, bool]]] = {}
    for key in catalog.tensors:
        match = _EXPERT.fullmatch(key)
        if match is not None and (names is None or key not in names):
            stack_name = f"{match[1]}.{_STACK_OF[match[3]]}"
            if names is None or stack_name in names:
                parts.setdefault(stack_name, []).append((key, int(match[2]), match[3] == "up"))
    if not parts:
        return catalog
    stacked = {part for members in parts.values() for part, _, _ in members}
    tensors = {key: tensor for key, tensor in catalog.tensors.items() if key not in stacked}
    for name, members in parts.items():
        first = catalog.tensors[members[0][0]]
        n_rows = first.shape[0] * (2 if name.endswith("gate_up_proj") else 1)
        n_experts = 1 + max(number for _, number, _ in members)
        matrices = [
            (catalog.tensors[key], number, catalog.tensors[key].shape[0] if is_up else 0)
            for key, number, is_up in members
        ]
        shape = (n_experts, n_rows, *first.shape[1:])
        tensors[name] = Tensor(first.dtype, shape, partial(_place_matrices, matrices))
    return replace(catalog, tensors=tensors)


def _place_matrices(matrices: Sequence[tuple[Tensor, int, int]]) -> list[Fragment]:
    """Return the fragments of matrices in the tensor of all experts.

    Args:
        matrices: each matrix, the number of its expert, and its first row in the expert's entry.
    """
    return [
        replace(
            fragment,
            box=Box(
                (number, fragment.box.offset[0] + row, *fragment.box.offset[1:]),
                (1, *fragment.box.shape),
            ),
        )
        for matrix, number, row in matrices
        for fragment in matrix.fragments()
    ]


def transpose_stacks(catalog: Catalog, stacks: Set[str]) -> Catalog:
    """Return a catalog with the matrices of some stacks transposed."""
    tensors = {
        key: stack([transpose_matrix(catalog, key, number) for number in range(tensor.shape[0])])
        if key in stacks and len(tensor.shape) == 3
        else tensor
        for key, tensor in catalog.tensors.items()
    }
    return replace(catalog, tensors=tensors)
