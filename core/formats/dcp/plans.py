"""``all_local_plans`` of ``.metadata``: what each rank wrote, as Megatron records it.

::

    Metadata
      all_local_plans  [SavePlan, one per rank]
        items          [WriteItem{index: MetadataIndex{fqn, offset},
                                  type: SHARD, tensor_data: TensorWriteData{chunk, properties, size}
                                | type: BYTE_IO}]
        planner_data   {}

A job that continues with the same layout finds its own plan there, and need not exchange plans
before its first save. They are read only on demand: with 10⁶ chunks they are half of the file.

Source: megatron-core 0.12 to 0.16.1 ``strategies/state_dict_saver.py``; torch 2.13
``torch/distributed/checkpoint/planner.py``.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from core.arrays.box import Shape
from core.formats.dcp.records import FAST_FROM_BYTES, parse_by_c, parse_by_machine
from core.pickle.inert import Global, Inert
from core.pickle.noted import gc_paused
from core.pickle.writer import PickleWriter

_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_SHARD, _STREAM = 2, 3
"""Members of torch's WriteItemType."""


class TensorData(NamedTuple):
    """The chunk of a tensor that a rank writes: global shape, and the chunk's box, in elements."""

    dtype: str
    shape: Shape
    offset: Shape
    chunk_shape: Shape


class PlanRow(NamedTuple):
    """An entry that a rank writes; ``tensor`` is None for an object."""

    key: str
    tensor: TensorData | None = None


def plan_opcodes(pickle: PickleWriter, plans: Sequence[Iterable[PlanRow]]) -> bytes:
    """Return the opcodes that push the plans of all ranks, as the last value of a pickle.

    Args:
        pickle: the pickle; nothing is added to it but memo entries.
        plans: the entries of each rank, by rank.
    """
    references: dict[object, bytes] = {}

    def push(name: object, node_of: Callable[[], Inert]) -> bytes:
        """Return opcodes that push a value; all uses but the first one refer to that."""
        opcodes = references.get(name)
        if opcodes is None:
            node = node_of()
            pickle.write(node)
            opcodes = pickle.take()
            pickle.write(node)
            references[name] = pickle.take()
        return opcodes

    def push_size(shape: Shape) -> bytes:
        return push(shape, lambda: Inert("reduce", Global("torch", "Size"), (shape,)))

    def push_type(number: int) -> bytes:
        return push(number, lambda: Inert("reduce", Global(_PLANNER, "WriteItemType"), (number,)))

    def begin(module: str, name: str) -> bytes:
        return pickle.name(Global(module, name)) + b")\x81}("

    # Every part is added in the order of the file, as its first use defines the memo entry.
    text = pickle.text
    out = [b"]("]
    for plan in plans:
        out += (begin(_PLANNER, "SavePlan"), text("items"), b"](")
        for key, tensor in plan:
            # WriteItem(index=MetadataIndex(key, offset), type, tensor_data)
            out += (begin(_PLANNER, "WriteItem"), text("index"))
            out += (begin(_METADATA, "MetadataIndex"), text("fqn"), text(key), text("offset"))
            if tensor is None:
                out += (b"Nub", text("type"), push_type(_STREAM), text("tensor_data"), b"Nub")
                continue
            dtype, shape, offset, chunk_shape = tensor
            out += (push_size(offset), b"ub", text("type"), push_type(_SHARD))
            # TensorWriteData(chunk=ChunkStorageMetadata(offset, shape), properties, size)
            out += (text("tensor_data"), begin(_PLANNER, "TensorWriteData"), text("chunk"))
            out += (begin(_METADATA, "ChunkStorageMetadata"), text("offsets"), push_size(offset))
            out += (text("sizes"), push_size(chunk_shape), b"ub", text("properties"))
            out.append(push(dtype, partial(tensor_properties, dtype)))
            out += (text("size"), push_size(shape), b"ubub")
        out += (b"e", text("storage_data"), b"N", text("planner_data"), b"}ub")
    out.append(b"e")
    return b"".join(out)


def tensor_properties(dtype: str) -> Inert:
    """Return the TensorProperties of a dense tensor without gradient."""
    layout = Inert("reduce", Global("torch.serialization", "_get_layout"), ("torch.strided",))
    memory_format = Inert("reduce", Global(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    record = Inert("newobj", Global(_METADATA, "TensorProperties"))
    record.state = (Global("torch", dtype), layout, False, memory_format, False)
    return record


def parse_plans(data: bytes, *, label: str) -> list[list[PlanRow]] | None:
    """Parse the plans of all ranks from a ``.metadata`` file; None if it has none of a known form.

    Args:
        data: content of the file, which ``core.formats.dcp.metadata`` has read without error.
        label: name of the file, for errors.

    Raises:
        CorruptError, UnsafeError: the pickle is damaged, or exceeds a limit.
    """
    from core.files.sandbox import run_sandboxed

    packed = None
    with gc_paused():
        # As in ``core.formats.dcp.metadata``, the C unpickler is worth a child process.
        if len(data) >= FAST_FROM_BYTES:
            packed = run_sandboxed(
                "core.formats.dcp.plans:pack_plans",
                data,
                memory_bytes=(256 << 20) + 32 * len(data),
                cpu_s=2 + (len(data) >> 20),
            )
        if packed is None:
            return _plans_of(parse_by_machine(data, label=label))
    plans = marshal.loads(packed)
    return plans and [
        [PlanRow(key, tensor and TensorData._make(tensor)) for key, tensor in plan]
        for plan in plans
    ]


def pack_plans(data: bytes) -> bytes:
    """Read the plans in the child process, and serialize them for ``parse_plans``."""
    root, _ = parse_by_c(data)
    plans = _plans_of(root)
    # marshal preserves built-in types only.
    return marshal.dumps(
        plans and [[(key, tensor and tuple(tensor)) for key, tensor in plan] for plan in plans]
    )


def _plans_of(root: Any) -> list[list[PlanRow]] | None:
    """Return the plans in a record tree; None if it has none, or one is not of a known form."""
    try:
        plans = root[0]["all_local_plans"]
        return [[_row_of(item) for item in plan[0]["items"]] for plan in plans]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return None


def _row_of(item: Any) -> PlanRow:
    """Return the row of a WriteItem; a malformed one raises one of the errors of bad access."""
    key = item[0]["index"][0]["fqn"]
    data = item[0].get("tensor_data")
    if type(key) is not str:
        raise TypeError(key)
    if data is None:
        return PlanRow(key)
    chunk, properties, size = (data[0][name] for name in ("chunk", "properties", "size"))
    state = properties[0]
    dtype = state["dtype"] if type(state) is dict else state[0]
    numbers = size, chunk[0]["offsets"], chunk[0]["sizes"]
    if any(type(shape) is not tuple or {*map(type, shape)} - {int} for shape in numbers):
        raise TypeError(key)
    if type(dtype) is not Global or dtype.module != "torch":
        raise TypeError(key)
    return PlanRow(key, TensorData(dtype.name, *numbers))
