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

from core.arrays.box import Shape
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.tensor import Tensor, stack
from core.errors import CorruptError
from core.hf.name_tables import FamilyPart, Pair
from core.hf.tensors.fuse import Strip, fuse_parts, take_apart
from core.hf.tensors.global_tensor import GlobalTensor
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
    first = catalog.tensors[names[0]]
    for name in names:
        stored = catalog.tensors[name]
        if (stored.dtype, stored.shape) != (first.dtype, first.shape):
            raise CorruptError(
                f"the tensor is {stored.dtype} of shape {stored.shape}, but {names[0]} is "
                f"{first.dtype} of shape {first.shape}, and Megatron stores both in one tensor",
                key=name,
            )
    strips = _strips_of(tensor, names[0], first.shape)
    layers = []
    for name in names:
        if tensor.is_transposed:
            layers.append(transpose_tensor(catalog.tensors[name], name, tensor.megatron))
        elif strips is None:
            layers.append(catalog.tensors[name])
        else:
            layers.append(fuse_parts(strips, [catalog.tensors[name]], first.shape))
    return GlobalTensor(layers[0] if tensor.n_layers is None else stack(layers), names)


def hf_tower_tensors(catalog: Catalog, tensor: TowerTensor) -> dict[str, Tensor]:
    """Return the tensors of transformers that a tensor of a tower consists of, by name.

    Args:
        catalog: the complete model in Megatron's global form.

    Raises:
        CorruptError: the tensor has not one entry per layer, or its rows do not divide into heads.
    """
    key = tensor.megatron
    stored = catalog.tensors[key]
    if tensor.n_layers is not None and stored.shape[:1] != (tensor.n_layers,):
        raise CorruptError(
            f"the tensor has shape {stored.shape}, but {CONFIG} implies {tensor.n_layers} layers "
            "on the first axis",
            key=key,
            hint=f"check that this is the right {CONFIG} for these weights",
        )
    shape = stored.shape if tensor.n_layers is None else stored.shape[1:]
    strips = _strips_of(tensor, key, shape)
    result: dict[str, Tensor] = {}
    for number, name in enumerate(tensor.names()):
        if tensor.is_transposed:
            result[name] = transpose_tensor(catalog.tensors[key], key, name)
            continue
        layer = stored if tensor.n_layers is None else catalog.entry(key, number)
        result[name] = layer if strips is None else take_apart(strips, 0, layer, shape)
    return result


def _strips_of(tensor: TowerTensor, key: str, shape: Shape) -> tuple[Strip, ...] | None:
    """Return how rows of a layer's tensor correspond; None if they are the same on both sides.

    Args:
        key, shape: the tensor on either side; the extents are the same on both.

    Raises:
        CorruptError: the rows do not divide into heads.
    """
    if tensor.n_heads is None:
        return None
    n_rows = shape[0] if shape else 0
    if not n_rows or n_rows % (_PARTS * tensor.n_heads):
        raise CorruptError(
            f"{n_rows} rows cannot be divided evenly into the queries, keys and values of the "
            f"{tensor.n_heads} heads in {CONFIG}",
            key=key,
            hint=f"check that this is the right {CONFIG} for these weights",
        )
    part = FamilyPart((tensor.hf,), (n_rows // _PARTS, *shape[1:]))
    return Pair((tensor.megatron,), (part,) * _PARTS, n_groups=tensor.n_heads).strips
