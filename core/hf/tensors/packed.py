"""Unpack matrices of experts from tensors that hold them transposed, and pack them again.

::

    mlp.experts.gate_up_proj  (experts, hidden, 2 × inner)    columns g0 u0 g1 u1 …
        expert 3, transposed, its rows sorted
    local_experts.3.linear_fc1.weight  (2 × inner, hidden)    rows g0 g1 … u0 u1 …

That is gpt-oss; published files of Qwen3-VL have columns g0 g1 … u0 u1 … and are only transposed
(``transpose_matrix``). A column is no box of a tensor's rows, so these are encodings that compute
one matrix from another: the elements are moved, none is changed. A bias is the same with a single
column that is not transposed.

Experts that are stored one by one become the two tensors of a layer in Qwen3-VL's files; the
reverse is part of ``core.hf.text_model``, which has the source::

    mlp.experts.3.{gate,up}_proj.weight  (inner, hidden)
        ──▶ mlp.experts.gate_up_proj     (experts, 2 × inner, hidden), or transposed

Source: transformers 5.23.0 ``models/gpt_oss/modeling_gpt_oss.py`` ``GptOssExperts``; megatron-core
0.16.1 ``transformer/mlp.py`` (gate, then up); Megatron-Bridge 067f987d
``models/gpt_oss/gpt_oss_bridge.py``. Logits compared in tests/hf.

Not supported: units smaller than the matrix of one expert; experts of which some are missing (the
planner refuses the gaps).
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence, Set
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from core.arrays.box import Box, Shape, full_box
from core.arrays.dtypes import itemsize
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.tensor import Fragment, Tensor, compute_whole, stack
from core.engine.quantize.source import SourceTensor, checked
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore
_EXPERT = re.compile(r"(.*\.experts)\.(\d{1,6})\.(gate|up|down)_proj\.weight")
_STACK_OF = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}


@dataclass(frozen=True, slots=True)
class PackedExpert:
    """The place of one expert's matrix in the tensor that holds those of all experts.

    Args:
        key: name of the tensor, whose first axis has one entry per expert.
        number: number of the expert.
        n_experts: number of experts.
        n_parts: number of parts of Megatron's matrix whose rows alternate in the tensor.
    """

    key: str
    number: int
    n_experts: int
    n_parts: int

    def entry_shape(self, shape: Shape) -> Shape:
        """Return the shape of an entry for the shape of Megatron's tensor: a transposed matrix."""
        return shape[::-1]

    def tensor_shape(self, shape: Shape) -> Shape:
        """Return the shape of the tensor of all experts for the shape of Megatron's tensor."""
        return (self.n_experts, *self.entry_shape(shape))


@dataclass(frozen=True, slots=True)
class Rearranged:
    """The encoding of a matrix that is computed as another one with its elements in another order.

    Args:
        source: the tensor that holds the other matrix.
        box: where it stands there; leading extents of 1 do not count.
        n_parts: number of parts whose rows (in Megatron's orientation) alternate on one side and
            follow each other on the other.
        is_packed: the result is the packed matrix; otherwise it is Megatron's.
    """

    source: SourceTensor
    box: Box
    n_parts: int
    is_packed: bool

    @property
    def name(self) -> str:
        """Name of the encoding, for users."""
        return "transposed matrices"

    @property
    def unit_bytes(self) -> int:
        """Size of the only unit: the matrix."""
        return max(1, prod(self.box.shape) * itemsize(self.source.dtype))

    @property
    def inputs(self) -> tuple[StoredArray, ...]:
        """The arrays from which the tensor is computed."""
        return self.source.arrays

    @property
    def working_bytes(self) -> int:
        """Maximum memory that decoding needs in addition to the matrix."""
        return self.unit_bytes + self.source.working_bytes

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> memoryview:
        """Return the bytes of the matrix.

        Raises:
            ReplicaMismatchError, TruncatedError, MissingShardError, StorageError, CorruptError: the
                source cannot be read.
        """
        import numpy as np

        # Elements are moved as integers of their size: numpy has no bfloat16.
        kind = f"u{itemsize(self.source.dtype)}"
        shape = self.box.shape if self.is_packed else self.box.shape[1:]
        matrix: Any = np.frombuffer(self.source.read(store, self.box), kind).reshape(shape)
        # Rows as Megatron has them: (part, row of the part, columns).
        n = self.n_parts
        if self.is_packed:
            parts = matrix.reshape(n, shape[0] // n, *shape[1:])
            result = parts.swapaxes(0, 1).reshape(shape).T
        else:
            rows = matrix.T
            parts = rows.reshape(rows.shape[0] // n, n, *rows.shape[1:])
            result = parts.swapaxes(0, 1)
        return memoryview(np.ascontiguousarray(result).view(np.uint8).reshape(-1))


def unpack_expert(catalog: Catalog, name: str, expert: PackedExpert, shape: Shape) -> Tensor:
    """Return Megatron's tensor of an expert.

    Args:
        catalog: the catalog with the tensor of all experts.
        name: Megatron's name.
        expert: where the expert stands.
        shape: shape of Megatron's tensor.
    """
    entry = expert.entry_shape(shape)
    box = Box((expert.number, *(0,) * len(entry)), (1, *entry))

    def compute() -> StoredArray:
        stored = catalog.entry_fragments(expert.key, expert.number)
        source = checked(expert.key, catalog.tensors[expert.key], part=(box, stored))
        encoding = Rearranged(source, box, expert.n_parts, is_packed=False)
        extent = Extent(source.file, 0, encoding=encoding)
        return StoredArray(f"{name} of {source.origin}", source.dtype, shape, extent)

    return Tensor(catalog.tensors[expert.key].dtype, shape, compute_whole(compute))


def pack_experts(experts: Sequence[tuple[str, Tensor, PackedExpert]], shape: Shape) -> Tensor:
    """Return the tensor of all experts.

    Args:
        experts: Megatron's name of each expert's tensor, the tensor, and where the expert stands.
        shape: shape of Megatron's tensors.
    """

    def compute(name: str, tensor: Tensor, expert: PackedExpert) -> StoredArray:
        source = checked(name, tensor)
        encoding = Rearranged(source, full_box(shape), expert.n_parts, is_packed=True)
        return StoredArray(
            f"{expert.key}[{expert.number}] of {source.origin}",
            source.dtype,
            expert.entry_shape(shape),
            Extent(source.file, 0, encoding=encoding),
        )

    return stack(
        [
            Tensor(
                tensor.dtype,
                expert.entry_shape(shape),
                compute_whole(partial(compute, name, tensor, expert)),
            )
            for name, tensor, expert in sorted(experts, key=lambda row: row[2].number)
        ]
    )


def transpose_matrix(catalog: Catalog, key: str, number: int) -> Tensor:
    """Return one matrix of a stack, transposed.

    Args:
        catalog: the catalog with the stack.
        key: name of the stack, whose first axis has one entry per matrix.
        number: number of the matrix.
    """
    n_matrices, *shape = catalog.tensors[key].shape
    matrix = PackedExpert(key, number, n_matrices, n_parts=1)
    return unpack_expert(catalog, f"{key}[{number}]", matrix, tuple(reversed(shape)))


def transpose_tensor(matrix: Tensor, key: str, name: str) -> Tensor:
    """Return a matrix, transposed.

    Args:
        key: name of the matrix, for errors.
        name: name of the result's array.
    """
    shape = matrix.shape[::-1]

    def compute() -> StoredArray:
        source = checked(key, matrix)
        encoding = Rearranged(source, full_box(source.shape), 1, is_packed=True)
        extent = Extent(source.file, 0, encoding=encoding)
        return StoredArray(f"{name} of {source.origin}", source.dtype, shape, extent)

    return Tensor(matrix.dtype, shape, compute_whole(compute))


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
