"""Read pickles in tensors of bytes, such as Transformer Engine's extra states.

Transformer Engine stores the state of its scales in a uint8 tensor: before 1.0 as a ``torch.save``
stream, since then as a pickle. It unpickles the bytes when a Megatron model is loaded. So this
module searches every one-dimensional tensor of bytes that begins like such a stream for the calls
and references of its pickles.

Source: Transformer Engine 1.13 and 2.x ``pytorch/module/base.py`` (``get_extra_state``,
``set_extra_state``).
"""

from __future__ import annotations

from collections.abc import Iterator

from core.arrays.box import Box
from core.engine.catalog.catalog import Catalog
from core.engine.plan.box_reader import BoxReader
from core.errors import CheckpointingException
from core.files.store import MemoryStore, ReadStore
from core.formats.torch.nested_names import uses_of_stream
from core.formats.torch.other_pickles import MAX_BYTES, PickledContent
from core.formats.torch.stream import stream_kind

_HEAD_BYTES = 512
"""Bytes that are enough to recognise a stream."""
_DTYPES = ("uint8", "int8")
_EXTRA_STATE = "_extra_state"
"""Suffix of the keys of Transformer Engine's states.

They are read even if their bytes do not look like a stream, since they will be unpickled anyway.
"""
_TENSOR = "tensor"


def pickled_tensors(
    catalog: Catalog, store: ReadStore
) -> Iterator[tuple[str, str, PickledContent]]:
    """Yield (file, key, uses in its pickles) for each tensor of bytes that contains a stream.

    Tensors that cannot be read are skipped. Longer ones than ``MAX_BYTES`` are yielded as unread.
    """
    reader = BoxReader(catalog, store)
    for key, tensor in catalog.all_tensors():
        if tensor.dtype not in _DTYPES or len(tensor.shape) != 1 or tensor.shape[0] == 0:
            continue
        try:
            # Recognise a stream by its first bytes, before the entire tensor is read.
            head = _read(reader, key, min(_HEAD_BYTES, tensor.shape[0]))
            is_stream = stream_kind(MemoryStore({_TENSOR: head}), _TENSOR, 0, len(head)) is not None
            if not is_stream and not key.endswith(_EXTRA_STATE):
                continue
            if tensor.shape[0] > MAX_BYTES:
                content = PickledContent(
                    unread=(f"the tensor {key} is larger than {MAX_BYTES >> 20} MiB",)
                )
            else:
                data = _read(reader, key, tensor.shape[0])
                content = PickledContent(
                    frozenset(uses_of_stream(MemoryStore({_TENSOR: data}), _TENSOR, 0, len(data)))
                )
        except CheckpointingException:  # reported by the checks that read values
            continue
        array = tensor.fragments()[0].array
        file = store.label if array is None else array.extent.file
        yield file, key, content


def _read(reader: BoxReader, key: str, n_bytes: int) -> bytes:
    """Return the first bytes of a tensor of bytes."""
    out = bytearray(n_bytes)
    with memoryview(out) as view:
        # The second buffer is the reader's scratch space.
        reader.tensor(key).read(Box((0,), (n_bytes,)), view, memoryview(bytearray(n_bytes)))
    return bytes(out)
