"""Flat parameters in FSDP1's local state dicts, and the parameters that are views of them.

A flat parameter is a ShardedTensor with one axis, called ``_flat_param``: the parameters of a
module, one after the other, cut into equal shards. With ``use_orig_params``, the rank's file also
has the parts of the parameters that lie in its shard, as plain tensors with one axis, which are
views of the shard: they lie in its record of the file::

    rank 0   _flat_param [0:73] of 142   fc1.weight 60  fc1.bias 10  fc2.weight 1   norm.weight 0
    rank 1   _flat_param [73:142]        fc1.weight 0   fc1.bias 0   fc2.weight 59  norm.weight 6

Where a view lies in the shard tells its place in the flat parameter, so the parts of a parameter
can be joined. No file records its shape.

Source: torch 2.13 ``torch/distributed/fsdp/_state_dict_utils.py``
(``_local_post_state_dict_hook``); files that it wrote, in tests/golden/dtensor.tar.xz.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from core.arrays.box import Box
from core.arrays.dtypes import itemsize
from core.formats.torch_sharded.rank_file import TensorFile
from core.values import dataclass

FLAT_PARAMETER = "_flat_param"
"""Last part of the key of a flat parameter."""


@dataclass(frozen=True, slots=True)
class FlatRange:
    """Elements of a flat parameter.

    Args:
        flat_key: key of the flat parameter.
        start, stop: the first element, and the one after the last.
    """

    flat_key: str
    start: int
    stop: int


def parameters_in_flat(
    files: Sequence[TensorFile],
) -> tuple[dict[str, FlatRange], dict[str, str]]:
    """Find the parameters that are views of flat parameters.

    Args:
        files: the files of all ranks.

    Returns:
        Key of a parameter → its range; and key → kind, for parameters whose flat parameter is not
        complete.
    """
    ranges: dict[str, FlatRange] = {}
    boxes_of: dict[str, set[Box]] = defaultdict(set)
    n_elements: dict[str, int] = {}
    for file in files:
        for key, view in flat_views(file).items():
            earlier = ranges.get(key, view)
            start, stop = min(earlier.start, view.start), max(earlier.stop, view.stop)
            ranges[key] = FlatRange(view.flat_key, start, stop)
        for flat_key, part in file.parts.items():
            n_elements[flat_key] = part.shape[0] if part.shape else 1
            boxes_of[flat_key] |= {placed.box for array in part.arrays for placed in array.boxes}
    # Where the file of a rank is missing, the end of a parameter is not known.
    incomplete = {
        key: "part of a flat parameter whose other parts are missing"
        for key, in_flat in ranges.items()
        if sum(box.n_elements for box in boxes_of[in_flat.flat_key]) < n_elements[in_flat.flat_key]
    }
    return ranges, incomplete


def flat_views(file: TensorFile) -> dict[str, FlatRange]:
    """Return key → range, for the plain tensors of a file that are views of its flat parameters.

    Views without elements are left out.
    """
    views: dict[str, FlatRange] = {}
    for flat_key, part in file.parts.items():
        is_flat = flat_key.rpartition(".")[2] == FLAT_PARAMETER and len(part.shape) == 1
        if not is_flat or len(part.arrays) != 1:
            continue
        shard, first = part.arrays[0].array, part.arrays[0].boxes[0].box.offset[0]
        begin = shard.extent.offset
        for key, array in file.tensors.items():
            extent = array.extent
            is_plain_vector = (
                array.dtype == shard.dtype
                and len(array.shape) == 1
                and extent.encoding is None
                and extent.strides is None
            )
            if (
                is_plain_vector
                and array.shape[0]
                and begin <= extent.offset
                and extent.offset + array.n_bytes <= begin + shard.n_bytes
            ):
                start = first + (extent.offset - begin) // itemsize(shard.dtype)
                views[key] = FlatRange(flat_key, start, start + array.shape[0])
    return views
