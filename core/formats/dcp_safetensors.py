"""DCP data files that hold their chunks as safetensors (``SerializationFormat.SAFETENSORS``).

On disk (``__0_0.distcp``)::

    objects, each a torch zip · safetensors: header length (u64) · JSON header · data

The header has one entry per key, of the chunk's shape, and in ``__metadata__`` the JSON ``DCP_SHARDING_INFO``
``{key: {"saved_offsets": […]}}``. ``.metadata`` places every chunk of such a file at the byte where the safetensors
part begins, with the length of its data; torch 2.13 cannot load that itself.

A file is taken for such a one if all its chunks begin at one byte, and a safetensors header does, too. Its chunks
become plain bytes.

Not supported: two chunks of one tensor in one file, of which torch keeps only the last; the one that is lost is named.

Source: torch 2.13 ``torch/distributed/checkpoint/{filesystem,_hf_utils}.py``.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from core.errors import CheckpointingException, CorruptError, MissingShardError
from core.formats.safetensors_dcp import SHARDING_INFO
from core.formats.safetensors_header import Header, looks_like_header, read_header
from core.json_object import object_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from core.box import Box
    from core.formats.dcp_columns import DcpMetadata
    from core.store import ReadStore

_OFFSETS = "saved_offsets"


def with_raw_files(store: ReadStore, metadata: DcpMetadata) -> DcpMetadata:
    """The metadata with the true addresses of chunks that lie in safetensors files, and those files marked.

    Raises:
        CorruptError: a header contradicts itself, or ``.metadata``.
        MissingShardError: a file does not hold a chunk that ``.metadata`` places there.
    """
    files = {
        file: found
        for file, begin in _common_begins(metadata).items()
        if (found := _part(store, metadata, file, begin))
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
    """File number → the byte at which all its chunks begin, for the files where that is one byte."""
    begins: dict[int, int] = {}
    several: set[int] = set()
    for file, offset in zip(metadata.file_index, metadata.item_offset, strict=True):
        if begins.setdefault(file, offset) != offset:
            several.add(file)
    several.update(metadata.file_index[row] for row in metadata.descriptors)
    return {file: begin for file, begin in begins.items() if file not in several}


@dataclass(frozen=True, slots=True)
class _Part:
    """The safetensors part of a file.

    Args:
        begin: byte of the file at which it begins.
        header: what it says of itself; addresses count from ``begin``.
        offsets: key → where in its tensor the chunk begins, as ``DCP_SHARDING_INFO`` says.
    """

    begin: int
    header: Header
    offsets: dict[str, object]

    def address(self, key: str, dtype: str, box: Box, n_bytes: int) -> int:
        """Byte of the file at which a chunk's data begins, once the header is known to hold just that chunk."""
        file, found = self.header.file, self.header.arrays.get(key)
        if found is None:
            raise MissingShardError("the file's safetensors header does not have this tensor", file=file, key=key)
        stated = self.offsets.get(key, list(box.offset))
        if stated != list(box.offset):
            raise MissingShardError(
                f"the file holds the chunk at {stated}, not that at {list(box.offset)}: of several chunks of a tensor "
                "torch writes only the last into a safetensors file",
                file=file,
                key=key,
                hint="this chunk was never written; save again with SerializationFormat.TORCH_SAVE",
            )
        if (found.dtype, found.shape) != (dtype, box.shape) or found.n_bytes != n_bytes:
            raise CorruptError(
                f"the file holds {found.dtype} of shape {found.shape} ({found.n_bytes} bytes), .metadata says {dtype} "
                f"of shape {box.shape} ({n_bytes} bytes)",
                file=file,
                key=key,
            )
        assert found.extent is not None
        return self.begin + found.extent.offset


def _part(store: ReadStore, metadata: DcpMetadata, number: int, begin: int) -> _Part | None:
    """The safetensors part of a file that begins at a byte; None if there is none."""
    file = metadata.files[number]
    rest = _From(store, begin)
    if not looks_like_header(rest, file):
        return None
    try:
        header = read_header(rest, file)
    except CheckpointingException as err:
        err.span = err.span and (err.span[0] + begin, err.span[1] + begin)
        raise
    return _Part(begin, header, _stated_offsets(header))


def _stated_offsets(header: Header) -> dict[str, object]:
    """Key → ``saved_offsets``; {} if the header has none.

    Raises:
        CorruptError: they are malformed.
    """
    text = header.metadata.get(SHARDING_INFO)
    if text is None:
        return {}
    try:
        stated: Any = object_of(text.encode(), file=header.file)
        return {key: info[_OFFSETS] for key, info in stated.items()}
    except (CorruptError, TypeError, KeyError) as err:
        raise CorruptError(f"{SHARDING_INFO} is malformed: {err}", file=header.file) from err


class _From:
    """A store whose files begin at a later byte; for reading a header, which needs no more of ReadStore than this."""

    def __init__(self, store: ReadStore, begin: int) -> None:
        self._store = store
        self._begin = begin

    @property
    def label(self) -> str:
        return self._store.label

    @property
    def entry(self) -> str | None:
        return self._store.entry

    def files(self, under: str = "") -> list[str]:
        return self._store.files(under)

    def folders(self, under: str = "") -> list[str]:
        return self._store.folders(under)

    def sizes(self, under: str = "") -> Mapping[str, int]:
        return {name: max(size - self._begin, 0) for name, size in self._store.sizes(under).items()}

    def exists(self, name: str) -> bool:
        return self._store.exists(name)

    def size(self, name: str) -> int:
        return max(self._store.size(name) - self._begin, 0)

    def read(self, name: str, offset: int, n_bytes: int) -> bytes:
        return self._store.read(name, self._begin + offset, n_bytes)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        self._store.read_into(name, self._begin + offset, buffer)

    def read_vector(self, name: str, offset: int, buffers: list[memoryview], n_bytes: int) -> None:
        self._store.read_vector(name, self._begin + offset, buffers, n_bytes)
