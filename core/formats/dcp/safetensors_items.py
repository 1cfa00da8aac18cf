"""DCP data files that hold their chunks as safetensors (``SerializationFormat.SAFETENSORS``).

On disk (``__0_0.distcp``)::

    objects, each a torch zip · safetensors: header length (u64) · JSON header · data

The header has one entry per key, with the chunk's shape, and its ``__metadata__`` has the JSON
``DCP_SHARDING_INFO``: ``{key: {"saved_offsets": […]}}``. In ``.metadata``, every chunk of such a
file has the offset of the safetensors part and the length of its own data; torch 2.13 cannot load
what it wrote.

A file is one of these if all its chunks have the same offset, and a safetensors header begins
there. Its chunks become bare elements at their true offsets.

Not supported: two chunks of one tensor in one file, of which torch keeps only the last. The error
names the lost chunk.

Source: torch 2.13 ``torch/distributed/checkpoint/{filesystem,_hf_utils}.py``.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from core.errors import CorruptError, MissingShardError
from core.files.json_object import parse_json_object
from core.formats.safetensors.header import Header, looks_like_header, read_header
from core.values import dataclass

if TYPE_CHECKING:
    from core.arrays.box import Box
    from core.files.store import ReadStore
    from core.formats.dcp.columns import DcpMetadata

_OFFSETS = "saved_offsets"


def with_raw_files(store: ReadStore, metadata: DcpMetadata) -> DcpMetadata:
    """Correct the offsets of chunks in safetensors files, and mark those files.

    Returns:
        The same metadata if there is no such file.

    Raises:
        CorruptError: a header contradicts itself or ``.metadata``.
        MissingShardError: a chunk is missing in the file that ``.metadata`` names.
    """
    # In a candidate, all chunks have the same offset, and none is compressed.
    begins: dict[int, int] = {}
    excluded = {metadata.file_index[row] for row in metadata.descriptors}
    for file, offset in zip(metadata.file_index, metadata.item_offset, strict=True):
        if begins.setdefault(file, offset) != offset:
            excluded.add(file)

    # A header at that offset decides.
    parts: dict[int, _SafetensorsPart] = {}
    for file, begin in begins.items():
        name = metadata.files[file]
        if file not in excluded and looks_like_header(store, name, begin=begin):
            header = read_header(store, name, begin=begin)
            parts[file] = _SafetensorsPart(header, _saved_offsets(header))
    if not parts:
        return metadata

    # Take the offset of each chunk from the header.
    offsets = array("q", metadata.item_offset)
    for tensor in metadata.tensors.values():
        for row, (box, item) in enumerate(metadata.chunks(tensor.key), tensor.first):
            part = parts.get(metadata.file_index[row])
            if part is not None:
                offsets[row] = part.data_offset(tensor.key, tensor.dtype, box, item.n_bytes)
    return replace(metadata, item_offset=offsets, raw_files=frozenset(parts))


@dataclass(frozen=True, slots=True)
class _SafetensorsPart:
    """The safetensors part of a file.

    Args:
        header: header of the part.
        saved_offsets: key → offset of the chunk in its tensor, from ``DCP_SHARDING_INFO``.
    """

    header: Header
    saved_offsets: dict[str, object]

    def data_offset(self, key: str, dtype: str, box: Box, n_bytes: int) -> int:
        """Return the byte of the file at which a chunk's data begins.

        Args:
            key, dtype, box, n_bytes: the chunk as ``.metadata`` describes it.

        Raises:
            CorruptError: dtype, shape or size differ from those in the header.
            MissingShardError: the header does not have the chunk.
        """
        file, array = self.header.file, self.header.arrays.get(key)
        if array is None:
            raise MissingShardError(
                "the tensor is missing from the file's safetensors header", file=file, key=key
            )
        # torch writes one entry per key, so of two chunks of a tensor only the last is in the file.
        offset = self.saved_offsets.get(key, list(box.offset))
        if offset != list(box.offset):
            raise MissingShardError(
                f"the chunk at {list(box.offset)} was never written, because torch stores only the "
                f"last of a tensor's chunks in a safetensors file (here the chunk at {offset})",
                file=file,
                key=key,
                hint="save the checkpoint again with SerializationFormat.TORCH_SAVE",
            )
        if (array.dtype, array.shape) != (dtype, box.shape) or array.n_bytes != n_bytes:
            raise CorruptError(
                f"the header lists {array.dtype} of shape {array.shape} ({array.n_bytes} bytes), "
                f"but .metadata lists {dtype} of shape {box.shape} ({n_bytes} bytes)",
                file=file,
                key=key,
            )
        return array.extent.offset


def _saved_offsets(header: Header) -> dict[str, object]:
    """Return key → ``saved_offsets`` of a header; {} if it has none.

    Raises:
        CorruptError: the offsets are malformed.
    """
    from core.formats.safetensors.pieces import SHARDING_INFO

    text = header.metadata.get(SHARDING_INFO)
    if text is None:
        return {}
    try:
        infos: Any = parse_json_object(text.encode(), file=header.file)
        return {key: info[_OFFSETS] for key, info in infos.items()}
    except (CorruptError, TypeError, KeyError) as err:
        raise CorruptError(f"{SHARDING_INFO} is malformed: {err}", file=header.file) from err
