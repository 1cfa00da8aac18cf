"""DCP data files that hold their chunks as safetensors (``SerializationFormat.SAFETENSORS``).

On disk (``__0_0.distcp``)::

    objects, each a torch zip · safetensors: header length (u64) · JSON header · data

The header has one entry per key, of the chunk's shape, and in ``__metadata__`` the JSON
``DCP_SHARDING_INFO`` ``{key: {"saved_offsets": […]}}``. ``.metadata`` places every chunk of such a
file at the byte where the safetensors part begins, with the length of its data; torch 2.13 cannot
load that itself.

A file is one of these if all its chunks begin at the same byte, and a safetensors header does, too.
Its chunks become plain bytes.

Not supported: two chunks of one tensor in one file, of which torch keeps only the last; the lost
one is named.

Source: torch 2.13 ``torch/distributed/checkpoint/{filesystem,_hf_utils}.py``.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from core.errors import CorruptError, MissingShardError
from core.files.json_object import parse_json_object
from core.formats.safetensors.header import Header, looks_like_header, read_header
from core.formats.safetensors.pieces import SHARDING_INFO

if TYPE_CHECKING:
    from core.arrays.box import Box
    from core.files.store import ReadStore
    from core.formats.dcp.columns import DcpMetadata

_OFFSETS = "saved_offsets"


def with_raw_files(store: ReadStore, metadata: DcpMetadata) -> DcpMetadata:
    """Return the metadata with the true addresses of chunks in safetensors files, and those files
    marked.

    Raises:
        CorruptError: a header contradicts itself, or ``.metadata``.
        MissingShardError: a chunk that ``.metadata`` places in a file is not there.
    """
    files = {
        file: part
        for file, begin in _common_begins(metadata).items()
        if (part := _read_part(store, metadata, file, begin))
    }
    if not files:
        return metadata
    addresses = array("q", metadata.item_offset)
    for tensor in metadata.tensors.values():
        for row, (box, item) in enumerate(metadata.chunks(tensor.key), tensor.first):
            part = files.get(metadata.file_index[row])
            if part is not None:
                addresses[row] = part.address(tensor.key, tensor.dtype, box, item.n_bytes)
    return replace(metadata, item_offset=addresses, raw_files=frozenset(files))


def _common_begins(metadata: DcpMetadata) -> dict[int, int]:
    """Return file number → byte at which all its chunks begin, for files in which that is the same
    byte.
    """
    begins: dict[int, int] = {}
    excluded: set[int] = set()
    for file, offset in zip(metadata.file_index, metadata.item_offset, strict=True):
        if begins.setdefault(file, offset) != offset:
            excluded.add(file)
    excluded.update(metadata.file_index[row] for row in metadata.descriptors)
    return {file: begin for file, begin in begins.items() if file not in excluded}


@dataclass(frozen=True, slots=True)
class _SafetensorsPart:
    """The safetensors part of a file.

    Args:
        header: the header.
        offsets: key → offset of the chunk in its tensor, from ``DCP_SHARDING_INFO``.
    """

    header: Header
    offsets: dict[str, object]

    def address(self, key: str, dtype: str, box: Box, n_bytes: int) -> int:
        """Return the byte of the file at which a chunk's data begins, after checking that the
        header has that chunk.
        """
        file, array = self.header.file, self.header.arrays.get(key)
        if array is None:
            raise MissingShardError(
                "the tensor is missing in the file's safetensors header", file=file, key=key
            )
        offset = self.offsets.get(key, list(box.offset))
        if offset != list(box.offset):
            raise MissingShardError(
                f"the file holds the chunk at {offset}, not that at {list(box.offset)}: of several chunks of a tensor "
                "torch writes only the last into a safetensors file",
                file=file,
                key=key,
                hint="this chunk was never written; save again with SerializationFormat.TORCH_SAVE",
            )
        if (array.dtype, array.shape) != (dtype, box.shape) or array.n_bytes != n_bytes:
            raise CorruptError(
                f"the file holds {array.dtype} of shape {array.shape} ({array.n_bytes} bytes), but .metadata "
                f"states {dtype} of shape {box.shape} ({n_bytes} bytes)",
                file=file,
                key=key,
            )
        return array.extent.offset


def _read_part(
    store: ReadStore, metadata: DcpMetadata, number: int, begin: int
) -> _SafetensorsPart | None:
    """Read the safetensors part of a file that begins at a byte; None if there is none."""
    file = metadata.files[number]
    if not looks_like_header(store, file, begin=begin):
        return None
    header = read_header(store, file, begin=begin)
    return _SafetensorsPart(header, _stated_offsets(header))


def _stated_offsets(header: Header) -> dict[str, object]:
    """Return key → ``saved_offsets``; {} if the header has none.

    Raises:
        CorruptError: the offsets are malformed.
    """
    text = header.metadata.get(SHARDING_INFO)
    if text is None:
        return {}
    try:
        infos: Any = parse_json_object(text.encode(), file=header.file)
        return {key: info[_OFFSETS] for key, info in infos.items()}
    except (CorruptError, TypeError, KeyError) as err:
        raise CorruptError(f"{SHARDING_INFO} is malformed: {err}", file=header.file) from err
