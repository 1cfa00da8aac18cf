"""Join the parts of DTensors whose local tensors are of torchao's classes.

::

    rank 0   exp_avg: DTensor [Shard(0)] of OptimState8bit (64, 64)   codes scale qmap, rows 0–63
    rank 1   exp_avg: DTensor [Shard(0)] of OptimState8bit (64, 64)   codes scale qmap, rows 64–127

become ``exp_avg.codes``, ``exp_avg.scale``, ``exp_avg.qmap`` of the global tensor and its settings,
as in DCP (``core.formats.torch.joined_parts``, which tells what cannot be joined). Where several
ranks hold the same rows (HSDP), their parts are replicas.

Source: torchao 0.18.0 ``optim/subclass_*.py``; files that torch 2.13 wrote of its optimizers under
FSDP2, in tests/golden/quantized_ranks.tar.xz.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from core.arrays.box import Shape
from core.engine.catalog.stored import StoredArray, array_name
from core.engine.catalog.tensor import Fragment, Tensor, bind_argument
from core.formats.torch.joined_parts import JoinedParts, joined_parts
from core.formats.torch.tree import TorchTree
from core.formats.torch_sharded.local_part import QuantizedPart, unwrapped
from core.pickle.inert import TensorLeaf


def parts_in(
    local: object, arrays: Mapping[str, StoredArray]
) -> Mapping[str, StoredArray | object] | None:
    """Return the parts and settings of a local tensor of torchao's classes; None for any other.

    Args:
        local: the local tensor, as the hooks of ``core.formats.torch.tensors`` left it.
        arrays: the arrays of the file by the keys of their leaves.
    """
    value = unwrapped(local)
    if not isinstance(value, dict):
        return None
    return {
        str(name): arrays[item.key] if isinstance(item, TensorLeaf) else item
        for name, item in value.items()
    }


def join_quantized(key: str, shape: Shape, parts: Sequence[QuantizedPart]) -> JoinedParts | str:
    """Join the parts of a tensor that the ranks hold.

    Args:
        key, shape: the global tensor.
        parts: what each rank holds; their arrays have the rank as coordinate.

    Returns:
        The reason, if they cannot be joined.
    """
    first_of = {part.box: part for part in reversed(parts)}
    joined = joined_parts(key, shape, [(part.box, _tree(key, part)) for part in first_of.values()])
    if isinstance(joined, str):
        return joined

    # A replica has the boxes of the first rank with the same rows.
    tensors: dict[str, Tensor] = {}
    for name, tensor in joined.tensors.items():
        fragments: list[Fragment] = []
        for fragment in tensor.fragments():
            for array in _replicas(name, fragment, parts):
                named = replace(array, name=f"{array.extent.file}:{array_name(name, fragment.box)}")
                fragments.append(replace(fragment, array=named))
        tensors[name] = replace(tensor, tiling=bind_argument(tuple, fragments))
    return replace(joined, tensors=tensors)


def _tree(key: str, part: QuantizedPart) -> TorchTree:
    """Return a rank's parts in the form of an item of DCP."""
    names = {name: f"{key}.{name}" for name in part.parts}
    value = {
        name: TensorLeaf(names[name]) if isinstance(item, StoredArray) else item
        for name, item in part.parts.items()
    }
    arrays = {
        names[name]: item for name, item in part.parts.items() if isinstance(item, StoredArray)
    }
    return TorchTree(value, arrays)


def _replicas(
    name: str, fragment: Fragment, parts: Sequence[QuantizedPart]
) -> Iterator[StoredArray]:
    """Yield the arrays of all ranks that hold the same rows as a fragment of a part."""
    part_name = name.rpartition(".")[2]
    assert fragment.array is not None
    owner = next(
        part
        for part in parts
        if isinstance(item := part.parts[part_name], StoredArray)
        and item.extent == fragment.array.extent
    )
    for part in parts:
        item = part.parts[part_name]
        if part.box == owner.box and isinstance(item, StoredArray):
            yield item
