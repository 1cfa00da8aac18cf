"""Build the tensors of towers on either side of those on the other one; nothing is read or copied.

::

    blocks.0.attn.qkv.weight   [ q of all heads | k | v ]  ─┐
    blocks.1.attn.qkv.weight   [ q of all heads | k | v ]  ─┴─▶  decoder.layers.…linear_qkv.weight
                                              (layers, rows, columns), rows: [ q0 | k0 | v0 ][ q1 …

Most tensors are the same on both sides but for their names. ``models.toml`` has the rows.

Source: Megatron-Bridge 067f987d ``models/conversion/param_mapping.py`` ``ConcatenatedQKVMapping``,
``models/qwen_vl/modelling_qwen3_vl/transformer_block.py`` ``sharded_state_dict``.

Not supported: heads of which several share a key and a value; extents that ``config.json`` states
(a tensor's shape must only agree with that of the same tensor in other layers).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from core.catalog.catalog import Catalog, Fragment, TensorMeta
from core.errors import CorruptError
from core.hf.name_tables import FamilyPart, Pair
from core.hf.tensors.fuse import Strip, fuse_parts, take_apart, take_from_stack, with_first_axis
from core.hf.tensors.global_tensor import GlobalTensor
from core.hf.tensors.hf_tensor import HfTensor
from core.hf.tensors.packed import transpose_tensor
from core.hf.towers.models import TowerTensor
from core.hf.values import CONFIG

_PARTS = 3
"""Queries, keys and values."""


def megatron_tensor(catalog: Catalog, tensor: TowerTensor) -> GlobalTensor:
    """Return a tensor of a tower under Megatron's name.

    Args:
        catalog: the complete model under the names of transformers.

    Raises:
        CorruptError: layers differ in shape or dtype, or the rows do not divide into heads.
    """
    names = tuple(tensor.names())
    metas = [catalog.tensors[name] for name in names]
    first = metas[0]
    for meta in metas:
        if (meta.dtype, meta.shape) != (first.dtype, first.shape):
            raise CorruptError(
                f"{meta.dtype} of shape {meta.shape}, but {first.key} is {first.dtype} of "
                f"{first.shape}, and they are one tensor in Megatron",
                key=meta.key,
            )
    strips = _strips_of(tensor, first)
    shape = first.shape[::-1] if tensor.is_transposed else first.shape

    def layer(name: str) -> list[Fragment]:
        """Return the fragments of one layer's part, or of the only one."""
        if tensor.is_transposed:
            return transpose_tensor(catalog, name, tensor.megatron)
        fragments = catalog.fragments(name)
        if strips is None:
            return [replace(fragment, key=tensor.megatron) for fragment in fragments]
        return fuse_parts(tensor.megatron, strips, [fragments])

    if tensor.n_layers is None:
        meta = TensorMeta(tensor.megatron, first.dtype, shape)
        return GlobalTensor(meta, names, lambda: layer(names[0]))
    return GlobalTensor(
        TensorMeta(tensor.megatron, first.dtype, (len(names), *shape)),
        names,
        lambda: [
            fragment
            for number, name in enumerate(names)
            for fragment in with_first_axis(tensor.megatron, layer(name), number)
        ],
    )


def hf_tower_tensors(catalog: Catalog, tensor: TowerTensor) -> dict[str, HfTensor]:
    """Return the tensors of transformers that a tensor of a tower consists of, by name.

    Args:
        catalog: the complete model in Megatron's global form.

    Raises:
        CorruptError: the tensor has not one entry per layer, or its rows do not divide into heads.
    """
    meta = catalog.tensors[tensor.megatron]
    shape = meta.shape
    if tensor.n_layers is not None:
        if shape[:1] != (tensor.n_layers,):
            raise CorruptError(
                f"shape {shape}, but {CONFIG} implies {tensor.n_layers} layers on the first axis",
                key=meta.key,
                hint=f"is this the {CONFIG} of these weights?",
            )
        shape = shape[1:]
    strips = _strips_of(tensor, TensorMeta(meta.key, meta.dtype, shape))

    def take(name: str, number: int) -> list[Fragment]:
        """Return the fragments of a layer's part, or of the only one."""
        if tensor.is_transposed:
            return transpose_tensor(catalog, meta.key, name)
        fragments = (
            catalog.fragments(meta.key)
            if tensor.n_layers is None
            else list(take_from_stack(catalog, meta.key, number, key=meta.key))
        )
        if strips is None:
            return [replace(fragment, key=name) for fragment in fragments]
        return take_apart(name, strips, 0, fragments)

    result: dict[str, HfTensor] = {}
    for number, name in enumerate(tensor.names()):
        fragments: Callable[[], list[Fragment]] = partial(take, name, number)
        extents = shape[::-1] if tensor.is_transposed else shape
        result[name] = HfTensor(TensorMeta(name, meta.dtype, extents), fragments)
    return result


def _strips_of(tensor: TowerTensor, meta: TensorMeta) -> tuple[Strip, ...] | None:
    """Return how rows of a layer's tensor correspond; None if they are the same on both sides.

    Args:
        meta: name and shape of the tensor on either side; the extents are the same on both.

    Raises:
        CorruptError: the rows do not divide into heads.
    """
    if tensor.n_heads is None:
        return None
    n_rows = meta.shape[0] if meta.shape else 0
    if not n_rows or n_rows % (_PARTS * tensor.n_heads):
        raise CorruptError(
            f"{n_rows} rows do not divide into queries, keys and values of the {tensor.n_heads} "
            f"heads in {CONFIG}",
            key=meta.key,
            hint=f"is this the {CONFIG} of these weights?",
        )
    part = FamilyPart((tensor.hf,), (n_rows // _PARTS, *meta.shape[1:]))
    return Pair((tensor.megatron,), (part,) * _PARTS, n_groups=tensor.n_heads).strips
