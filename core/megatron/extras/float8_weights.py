"""Weights that Transformer Engine keeps in float8, in rank files (``--fp8-param-gather``).

On disk, in place of a tensor, a call that makes one of its parts::

    Float8Tensor._make_in_reduce_ex(codes, DType(7), inverse scale, torch.bfloat16, shape)
        codes uint8, in the shape of the weight; the inverse scale is one float32

The number of ``DType`` is that of Transformer Engine's version: E4M3 and E5M2 are 7 and 8 in calls
with a shape (2.x), 6 and 7 in those without (1.x).

Not supported, refused by name: scales of blocks (``Float8BlockwiseQTensor``, ``MXFP8Tensor``).

Source: Transformer Engine 2 ``pytorch/tensor/float8_tensor.py`` (``__reduce_ex__``,
``_make_in_reduce_ex``), ``common/include/transformer_engine/transformer_engine.h`` (NVTEDType).
"""

from __future__ import annotations

from dataclasses import replace

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import RankFacts
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.tensor import tensors_of
from core.engine.quantize.from_float8 import Dequantized
from core.engine.quantize.source import SourceTensor, source_of
from core.megatron.extras.common_state import is_chunk
from core.pickle.inert import Global, Inert, TensorLeaf, as_mapping
from core.pickle.nesting import LeafEntry, map_leaves
from core.values import dataclass

_MAKE = "Float8Tensor._make_in_reduce_ex"
_E4M3, _E5M2 = "float8_e4m3fn", "float8_e5m2"
_CODES = {4: {6: _E4M3, 7: _E5M2}, 5: {7: _E4M3, 8: _E5M2}}
"""Number of the call's arguments → number of ``DType`` → type of the codes."""


@dataclass(frozen=True, slots=True)
class DequantizedRanks:
    """A rank catalog whose float8 weights are computed.

    Args:
        n: number of the arrays that are computed.
    """

    catalog: Catalog
    n: int


def dequantize_rank_weights(catalog: Catalog, dtype: str) -> DequantizedRanks:
    """Turn the Float8Tensors of rank files into tensors of ``dtype``.

    Args:
        catalog: a rank catalog; another one is returned as it is.
        dtype: canonical name of a float type of at least 16 bits.

    Raises:
        CorruptError, MissingShardError: the parts of a weight are not in the file.
    """
    facts = catalog.facet(RankFacts)
    if facts is None:
        return DequantizedRanks(catalog, 0)
    arrays: dict[str, StoredArray] = {}
    ranks = {}
    for coords, (folder, root) in facts.ranks.items():

        def computed(entry: LeafEntry, folder: str = folder) -> object:
            codes = _find_codes(catalog, entry.leaf)
            if codes is None:
                return entry.leaf
            weight, scale = codes
            key = f"{folder}:{entry.key}"
            extent = Extent(weight.file, 0, encoding=Dequantized(weight, scale, None, dtype))
            arrays[key] = StoredArray(key, dtype, weight.shape, extent)
            return TensorLeaf(key)

        content = {
            name: map_leaves(value, computed, (name,)) if is_chunk(name) else value
            for name, value in (as_mapping(root) or {}).items()
        }
        ranks[coords] = (folder, content)
    if not arrays:
        return DequantizedRanks(catalog, 0)

    result = replace(
        catalog,
        tensors={**catalog.tensors, **tensors_of(arrays)},
        objects={key: item for key, item in catalog.objects.items() if key not in arrays},
    )
    facts = replace(facts, ranks=ranks, arrays={**(facts.arrays or {}), **arrays})
    return DequantizedRanks(result.with_facet(facts), len(arrays))


def _find_codes(catalog: Catalog, leaf: object) -> tuple[SourceTensor, SourceTensor] | None:
    """Return the codes and the scale of a Float8Tensor; None for anything else."""
    if not isinstance(leaf, Inert) or not isinstance(leaf.fn, Global) or leaf.fn.name != _MAKE:
        return None
    parts = leaf.args
    numbers = _CODES.get(len(parts), {})
    kind = parts[1] if len(parts) > 1 else None
    number = kind.args[0] if isinstance(kind, Inert) and len(kind.args) == 1 else kind
    codes_dtype = numbers.get(number) if isinstance(number, int) else None
    if codes_dtype is None:
        return None
    data, inverse_scale = parts[0], parts[2]
    if not isinstance(data, TensorLeaf) or not isinstance(inverse_scale, TensorLeaf):
        return None
    codes, scale = source_of(catalog, data.key), source_of(catalog, inverse_scale.key)
    if codes.dtype != "uint8" or scale.dtype != "float32" or scale.shape not in ((), (1,)):
        return None
    fragments = tuple(
        replace(item, array=item.array and replace(item.array, dtype=codes_dtype))
        for item in codes.fragments
    )
    return replace(codes, dtype=codes_dtype, fragments=fragments), scale
