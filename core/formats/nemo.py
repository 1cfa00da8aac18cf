"""``.nemo`` files: a tar archive with a configuration and the weights of a model, read in place.

On disk (``save_to`` of a NeMo model)::

    model.nemo
    ├── ./model_config.yaml
    ├── ./model_weights.ckpt        a torch file: the state dict
    └── ./…_tokenizer.model …       files that the configuration names

Nothing is unpacked: the weights are read at their place in the archive. The catalog is that of the
torch file; the other members are listed as not carried. Members are found by their headers, of
which at most 10,000 are read. Read only.

Versions: archives of NeMo 1 and 2 (``save_to``) with one file of weights.

Not supported, refused by name: compressed archives, weights in directories of ranks or of a
distributed checkpoint (``mp_rank_00/…``, ``model_weights/…``), members that are links or devices,
and two members with one name. The files of ranks hold state dicts alone, without the training
arguments that tell how to join them.

Source: NeMo 2.4 ``core/connectors/save_restore_connector.py``, NeMo 8cfedd72
``collections/nlp/parts/nlp_overrides.py`` (``NLPSaveRestoreConnector``); POSIX.1-2001 for pax
headers. The archives of the tests are made as NeMo makes them, with ``tarfile`` of Python and torch
2.13.
"""

from __future__ import annotations

import tarfile
from dataclasses import replace
from io import RawIOBase
from shlex import quote
from typing import TYPE_CHECKING, cast

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.dropped import dropped_each
from core.errors import CorruptError, MissingShardError, UnsafeError, UnsupportedError
from core.formats.format import Format, no_folders
from core.formats.torch.format import catalog_of_tree
from core.formats.torch.tree import parse
from core.values import dataclass

if TYPE_CHECKING:
    from typing import IO

    from core.files.store import ReadStore

SUFFIX = ".nemo"
WEIGHTS = "model_weights.ckpt"
_GZIP = b"\x1f\x8b"
_MAGIC, _MAGIC_AT = b"ustar", 257
_BLOCK_BYTES = 512
_MOST_MEMBERS = 10_000
_MAX_HEADER_BYTES = 1 << 20
"""Maximum size of one read of headers; the data of members are not read here."""
_UNPACK = "unpack the archive with tar -xf, and pass the directory"


@dataclass(frozen=True, slots=True)
class ArchiveMember:
    """A file of an archive.

    Args:
        offset: its first byte in the archive.
        n_bytes: its size in bytes.
    """

    offset: int
    n_bytes: int


def sniff(store: ReadStore) -> bool:
    """Return whether a file is a tar archive, or a compressed file, with NeMo's suffix."""
    name = store.entry
    if name is None or not name.endswith(SUFFIX) or not store.exists(name):
        return False
    head = store.read(name, 0, min(store.size(name), _BLOCK_BYTES))
    return head.startswith(_GZIP) or head[_MAGIC_AT : _MAGIC_AT + len(_MAGIC)] == _MAGIC


def read(store: ReadStore) -> Catalog:
    """Read the catalog of the weights in an archive.

    Raises:
        CorruptError, TruncatedError: the archive or the weights are damaged.
        MissingShardError: the archive has no weights.
        UnsafeError: a member is a link or a device, or the pickle of the weights is hostile.
        UnsupportedError: the archive is compressed, or its weights are not one file.
    """
    file = store.entry
    assert file is not None, "the format is a file"
    if store.read(file, 0, min(store.size(file), len(_GZIP))) == _GZIP:
        raise UnsupportedError(
            "the archive is compressed, so its weights cannot be read in place",
            file=file,
            hint=f"decompress the archive first: gzip -dc {quote(file)} > plain{SUFFIX}",
        )
    files = members(store, file)
    weights = files.get(WEIGHTS)
    if weights is None:
        places = [name for name in files if name.endswith(WEIGHTS) or "model_weights/" in name]
        if places:
            is_rank = places[0].endswith(f"/{WEIGHTS}")
            raise UnsupportedError(
                f"the weights are in {places[0].rpartition('/')[0]}, not in {WEIGHTS}",
                file=file,
                hint="unpack the archive with tar -xf, and read each rank's file, such as "
                f"{places[0]}"
                if is_rank
                else _UNPACK,
            )
        raise MissingShardError(
            f"the archive has no {WEIGHTS}", file=file, hint="copy the archive again"
        )
    tree = parse(store, file, start=weights.offset, n_bytes=weights.n_bytes)
    others = (name for name in files if name != WEIGHTS)
    catalog = catalog_of_tree(tree, format="nemo")
    dropped = dropped_each(others, "other files in the archive")
    return replace(catalog, dropped=(*catalog.dropped, *dropped))


def members(store: ReadStore, file: str) -> dict[str, ArchiveMember]:
    """Return name → position of the files of a tar archive, from their headers.

    Raises:
        CorruptError: the headers are malformed, a member reaches beyond the archive, or two members
            have one name.
        UnsafeError: a member is neither a file nor a directory, or there are too many.
    """
    size = store.size(file)
    files: dict[str, ArchiveMember] = {}
    offset, n_members = -1, 0
    try:
        stream = cast("IO[bytes]", _Headers(store, file))
        with tarfile.open(fileobj=stream, mode="r:") as archive:
            while (member := archive.next()) is not None:
                n_members += 1
                # tarfile of some versions goes back at a negative size, and never ends.
                if member.offset <= offset or member.size < 0 or n_members > _MOST_MEMBERS:
                    raise UnsafeError(
                        f"the archive's headers are malformed or endless after {n_members - 1} "
                        "members",
                        file=file,
                    )
                offset = member.offset
                name = member.name.removeprefix("./")
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse():
                    raise UnsafeError(
                        f"{name[:80]!r} is neither a file nor a directory",
                        file=file,
                        hint="NeMo does not write such archives; find out where this one came from",
                    )
                if member.offset_data + member.size > size:
                    raise CorruptError(
                        f"{name[:80]!r} ends at byte {member.offset_data + member.size:,}, but "
                        f"the archive is {size:,} bytes long",
                        file=file,
                        hint="copy the archive again",
                    )
                if name in files:
                    raise CorruptError(
                        f"the archive has two members named {name[:80]!r}", file=file, hint=_UNPACK
                    )
                files[name] = ArchiveMember(member.offset_data, member.size)
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as err:
        raise CorruptError(
            f"the file is not a valid tar archive: {str(err)[:80]}",
            file=file,
            hint="copy the archive again",
        ) from err
    return files


class _Headers(RawIOBase):
    """A file of a store for ``tarfile``, which reads headers and skips the data."""

    def __init__(self, store: ReadStore, file: str) -> None:
        self._store = store
        self._file = file
        self._at = 0
        self._size = store.size(file)

    def read(self, n_bytes: int = -1) -> bytes:
        """Read headers.

        Raises:
            ValueError: more than headers have is asked for.
        """
        if not 0 <= n_bytes <= _MAX_HEADER_BYTES:
            raise ValueError(f"a header is {n_bytes:,} bytes long")
        n_bytes = max(0, min(n_bytes, self._size - self._at))
        data = self._store.read(self._file, self._at, n_bytes) if n_bytes else b""
        self._at += n_bytes
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a byte of the archive."""
        if whence != 0 or offset < 0:
            raise ValueError(f"a member is at byte {offset:,}")
        self._at = offset
        return offset

    def tell(self) -> int:
        """Return the byte that is read next."""
        return self._at


FORMAT = Format(
    name="nemo",
    title="NeMo archive (.nemo)",
    sniff=sniff,
    read=read,
    lay_out=None,
    has_live_objects=True,
    own_folders=no_folders,
)
