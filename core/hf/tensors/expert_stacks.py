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

from core.arrays.box import Box
from core.catalog.catalog import Catalog, Fragment, TensorMeta
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
            stack = f"{match[1]}.{_STACK_OF[match[3]]}"
            if names is None or stack in names:
                parts.setdefault(stack, []).append((key, int(match[2]), match[3] == "up"))
    if not parts:
        return catalog
    stacked = {part for members in parts.values() for part, _, _ in members}
    tensors = {key: meta for key, meta in catalog.tensors.items() if key not in stacked}
    for stack, members in parts.items():
        meta = catalog.tensors[members[0][0]]
        n_rows = meta.shape[0] * (2 if stack.endswith("gate_up_proj") else 1)
        n_experts = 1 + max(number for _, number, _ in members)
        tensors[stack] = TensorMeta(stack, meta.dtype, (n_experts, n_rows, *meta.shape[1:]))

    def fragments_of(key: str) -> Sequence[Fragment]:
        if key not in parts:
            return catalog.fragments(key)
        return [
            replace(fragment, key=key, box=_box_in_stack(fragment.box, number, row))
            for part, number, is_up in parts[key]
            for row in (catalog.tensors[part].shape[0] if is_up else 0,)
            for fragment in catalog.fragments(part)
        ]

    return replace(catalog, tensors=tensors, fragments_of=fragments_of)


def transpose_stacks(catalog: Catalog, stacks: Set[str]) -> Catalog:
    """Return a catalog with the matrices of some stacks transposed."""

    tensors = {
        key: replace(meta, shape=(meta.shape[0], *reversed(meta.shape[1:])))
        for key, meta in catalog.tensors.items()
        if key in stacks and len(meta.shape) == 3
    }

    def fragments_of(key: str) -> Sequence[Fragment]:
        if key not in tensors:
            return catalog.fragments(key)
        return [
            replace(fragment, key=key, box=_box_in_stack(fragment.box, number, 0))
            for number in range(tensors[key].shape[0])
            for fragment in transpose_matrix(catalog, key, number)
        ]

    return replace(catalog, tensors={**catalog.tensors, **tensors}, fragments_of=fragments_of)


def _box_in_stack(box: Box, number: int, row: int) -> Box:
    """Return the box of an expert's matrix in the tensor of all experts, ``row`` rows further."""
    return Box((number, box.offset[0] + row, *box.offset[1:]), (1, *box.shape))
