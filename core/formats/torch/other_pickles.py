"""Pickles in files that torch did not write: NumPy's, joblib's, and compressed ones.

On disk::

    x.npy      "\\x93NUMPY", version, header {'descr': '|O', …}, and for arrays of objects a pickle
    x.npz      a zip of .npy members (any other zip that torch did not write is looked into likewise)
    x.joblib   a pickle, in which the bytes of each array follow the BUILD of its NumpyArrayWrapper; or that, compressed
    x.pkl.gz   any of these in gzip, bz2, xz, lzma or zlib

Only the beginning of a file is read until it turns out to hold a pickle; then at most 64 MiB are
read, after decompression. Not supported, and reported: more than that, compressions that Python's
standard library does not have (lz4, zstd), joblib's files of before version 0.10, encrypted zips.

Source: numpy 2.4 ``numpy/lib/_format_impl.py``; joblib 1.6 ``numpy_pickle.py``, ``compressor.py``.
"""

from __future__ import annotations

import ast
import bz2
import lzma
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import BufferedIOBase
from typing import TYPE_CHECKING, Protocol

from core.errors import CheckpointingException, CorruptError, UnsafeError, UnsupportedError
from core.files.store import MemoryStore
from core.formats.torch.nested_names import uses_in, uses_of_stream, with_nested
from core.formats.torch.stream import stream_kind
from core.pickle.inert import NO_STATE, Global, Inert
from core.pickle.reader import load_next, noting_uses
from core.pickle.uses import Use

if TYPE_CHECKING:
    from core.files.store import ReadStore

MAX_BYTES = 64 << 20
"""Maximum number of bytes read of one pickle, after decompression."""
_HEAD_BYTES = 1 << 10
_PIECE_BYTES = 1 << 16
_MAX_DEPTH = 3
"""Maximum number of containers around a pickle."""
_MAX_MEMBERS = 10_000
_NPY = b"\x93NUMPY"
_ZIP = b"PK\x03\x04"
_JOBLIB_OLD = re.compile(rb"ZF0x[0-9a-f ]{17}")
"""zlib as joblib before 0.10 wrote it: the length in hexadecimal digits stands before it."""
_NO_MODULE = {b"\x04\x22\x4d\x18": "lz4", b"\x28\xb5\x2f\xfd": "zstd"}
_PICKLED_NAME = re.compile(r"\.(pkl|pickle|joblib|npy|npz|pt|pth|ckpt)(\.\w+)?$")
_CHECKPOINT_FILE = re.compile(
    r"(^|/)(\.metadata(\.tmp)?|c|[c.\d]*\d|d/[0-9a-f]{32})$|\.(pt|pth|bin|ckpt|pkl|pickle|distcp|safetensors|json)$"
)
"""This includes the chunks of zarr, which may be compressed, and the data of OCDBT."""
_TEXT_NAME = re.compile(r"\.(pkl|pickle)$")
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_MAX_MEMBER_BYTES = 1 << 30
"""Maximum number of bytes read of a zip's members in total."""
_MAX_CHECKED_BYTES = 1 << 32
_MAX_CHECKED_RATIO = 20
"""Limit on inflated data when a zip is checked: bytes, or multiples of the zip's size, whichever is
more.
"""
_FILE = "bytes"


class _Decompressor(Protocol):
    """What the objects of Python's compression modules have in common."""

    @property
    def eof(self) -> bool:
        """Return whether the stream has ended."""

    @property
    def unused_data(self) -> bytes:
        """Return the input after the end of the stream."""

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        """Return at most ``max_length`` bytes."""


_COMPRESSIONS: tuple[tuple[re.Pattern[bytes], Callable[[], _Decompressor]], ...] = (
    (re.compile(rb"\x1f\x8b\x08"), lambda: zlib.decompressobj(31)),
    (re.compile(rb"BZh[1-9]1AY&SY"), bz2.BZ2Decompressor),
    (re.compile(rb"\xfd7zXZ\x00"), lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, MAX_BYTES << 1)),
    (
        re.compile(rb"\x5d\x00\x00.{2}", re.DOTALL),
        lambda: lzma.LZMADecompressor(lzma.FORMAT_ALONE, MAX_BYTES << 1),
    ),
    (re.compile(rb"\x78[\x01\x5e\x9c\xda]"), lambda: zlib.decompressobj(15)),
)


@dataclass(frozen=True, slots=True)
class PickledContent:
    """The parts of a file that Python would unpickle.

    Args:
        uses: what its pickles do with names.
        unread: reasons why parts of it were not read.
    """

    uses: frozenset[Use] = frozenset()
    unread: tuple[str, ...] = ()


def is_checkpoint_file(name: str) -> bool:
    """Return whether a file belongs to a checkpoint format by its name, so that other readers check
    it.
    """
    return _CHECKPOINT_FILE.search(name) is not None


def has_pickled_name(name: str) -> bool:
    """Return whether a file is named like a pickle, maybe a compressed one, though not like a torch
    file.
    """
    return _PICKLED_NAME.search(name) is not None and not name.endswith((".pt", ".pth", ".ckpt"))


def look_into(store: ReadStore, file: str, n_bytes: int) -> PickledContent:
    """Return what the pickles of a file do with names, whatever its name; nothing if it holds
    none.
    """
    try:
        return _read_content(store, file, n_bytes, depth=0, name=file)
    except UnsafeError as err:
        return PickledContent(unread=(err.message,))
    except CheckpointingException:  # what is damaged is found where bytes are checked
        return PickledContent()


def _read_content(
    store: ReadStore, file: str, n_bytes: int, *, depth: int, name: str
) -> PickledContent:
    """Read bytes of any kind; ``name`` is their name in a zip or in a directory."""
    head = store.read(file, 0, min(n_bytes, _HEAD_BYTES))
    if depth > _MAX_DEPTH:
        return PickledContent(unread=(f"{name} is nested in more than {_MAX_DEPTH} archives",))
    # Containers that are recognised by their first bytes: NumPy's, zips, compressed data.
    if head.startswith(_NPY):
        start = _start_of_objects(head)
        return (
            PickledContent() if start is None else _read_pickle(store, file, start, n_bytes, name)
        )
    if head.startswith(_ZIP) and not is_torch_zip(store, file, n_bytes):
        return _read_zip(store, file, n_bytes, depth=depth)
    for mark, compression in _NO_MODULE.items():
        if head.startswith(mark):
            return PickledContent(
                unread=(f"it is compressed with {compression}",)
                if _PICKLED_NAME.search(name)
                else ()
            )
    old = _JOBLIB_OLD.match(head)
    begin = old.end() if old is not None else 0
    for magic, decompressor in _COMPRESSIONS:
        if magic.match(head, begin):
            return _read_compressed(
                store, file, begin, n_bytes, decompressor, depth=depth, name=name
            )
    # Otherwise a stream: a pickle, one of torch's, or nothing that is known.
    kind = stream_kind(store, file, 0, n_bytes)
    if kind == "pickle":
        return _read_pickle(store, file, 0, n_bytes, name)
    if kind is not None or _PICKLED_NAME.search(name):
        return PickledContent(frozenset(uses_of_stream(store, file, 0, n_bytes)))
    return PickledContent()


def _start_of_objects(head: bytes) -> int | None:
    """Return where the pickle of a ``.npy`` begins; None if its elements are not objects."""
    width = 2 if head[6:7] == b"\x01" else 4
    begin = 8 + width
    size = int.from_bytes(head[8:begin], "little")
    text = head[begin : begin + size].decode("latin-1")
    try:
        header = ast.literal_eval(text.strip())
        has_objects = _has_objects(header["descr"])
    except (ValueError, SyntaxError, TypeError, LookupError, RecursionError, MemoryError):
        has_objects = "O" in text or "object" in text
    return begin + size if has_objects else None


def _has_objects(described: object) -> bool:
    """Return whether a dtype, as a header describes it, has elements that are objects."""
    if isinstance(described, list):
        return any(_has_objects(field[1]) for field in described)
    if isinstance(described, tuple):
        return _has_objects(described[0])
    return "O" in str(described) or "object" in str(described)


def _read_pickle(
    store: ReadStore, file: str, start: int, n_bytes: int, name: str
) -> PickledContent:
    """Read a pickle, including the bytes of joblib's arrays after their wrappers."""
    if n_bytes - start > MAX_BYTES and b"joblib" not in store.read(file, start, _HEAD_BYTES):
        return PickledContent(unread=(f"{name} has more than {MAX_BYTES >> 20} MiB",))
    # A pickle that breaks off counts as unread only if it was too large, or had calls before.
    data = store.read(file, start, min(n_bytes - start, MAX_BYTES))
    unread: tuple[str, ...] = ()
    tree: object = None
    with noting_uses(passes_on=False) as noted:
        try:
            tree, _ = load_next(data, 0, label=name, hooks=_JOBLIB)
        except UnsafeError as err:
            unread = (f"{name}: {err.message}",)
        except CheckpointingException as err:
            if n_bytes - start > MAX_BYTES:
                unread = (f"{name} has more than {MAX_BYTES >> 20} MiB",)
            elif any(use.how != "named" for use in noted):
                unread = (f"{name}: {err.message}",)
    return PickledContent(frozenset(with_nested(noted) | uses_in(tree)), unread)


class _InlineArray(Inert):
    """joblib's NumpyArrayWrapper, whose BUILD is followed by the bytes of an array."""

    __slots__ = ()

    def build(self, state: object) -> None:
        """Set the state of the wrapper."""
        self.state = NO_STATE if state is None else state

    def bytes_behind(self, data: bytes, at: int) -> int:
        """Return where the pickle continues after the array.

        Raises:
            UnsupportedError: the state does not say how long the array is.
        """
        state = self.state if type(self.state) is dict else {}
        shape, dtype = state.get("shape"), state.get("dtype")
        code = (
            dtype.args[0]
            if type(dtype) is Inert and dtype.args and type(dtype.args[0]) is str
            else ""
        )
        # An array of objects is a pickle of its own.
        if "O" in code:
            _, end = load_next(data, at, label="array", hooks=_JOBLIB)
            return end
        # Any other has the size of its dtype times its shape.
        width = re.fullmatch(r"[<>|=]?([biufcmMSU])(\d+)", code)
        if (
            width is None
            or type(shape) is not tuple
            or any(type(size) is not int or size < 0 for size in shape)
        ):
            raise UnsupportedError("a joblib array whose size is unclear")
        item_bytes = int(width[2]) * (4 if width[1] == "U" else 1)
        # the state of a text's dtype has its length again, and numpy takes it from there
        state_length = (
            dtype.state[5:6] if type(dtype) is Inert and type(dtype.state) is tuple else ()
        )
        if width[1] in "SU" and state_length != (item_bytes,):
            raise UnsupportedError("a joblib array whose size is unclear")
        if state.get("numpy_array_alignment_bytes") is not None:
            at += 1 + data[at]
        return at + math.prod(shape) * item_bytes


_WRAPPER = Global("joblib.numpy_pickle", "NumpyArrayWrapper")
_JOBLIB = {(_WRAPPER.module, _WRAPPER.name): lambda *args: _InlineArray("newobj", _WRAPPER, args)}


def _read_compressed(
    store: ReadStore,
    file: str,
    start: int,
    n_bytes: int,
    decompressor: Callable[[], _Decompressor],
    *,
    depth: int,
    name: str,
) -> PickledContent:
    """Decompress the beginning, and the rest if the beginning is that of a pickle."""
    try:
        head, _ = _decompress(store, file, start, n_bytes, decompressor, _HEAD_BYTES)
        if not _may_hold_a_pickle(head):
            return PickledContent()
        data, is_complete = _decompress(store, file, start, n_bytes, decompressor, MAX_BYTES + 1)
    except (zlib.error, lzma.LZMAError, OSError, ValueError, EOFError):
        return PickledContent(
            unread=("it cannot be decompressed",) if _PICKLED_NAME.search(name) else ()
        )
    if len(data) > MAX_BYTES:
        return PickledContent(
            unread=(f"{name} has more than {MAX_BYTES >> 20} MiB when decompressed",)
        )
    looked = _read_content(MemoryStore({_FILE: data}), _FILE, len(data), depth=depth + 1, name=name)
    return (
        looked
        if is_complete
        else replace(looked, unread=(*looked.unread, "its compressed data is incomplete"))
    )


def _may_hold_a_pickle(head: bytes) -> bool:
    """Return whether bytes begin like a pickle, or like something that may hold one."""
    if head.startswith(_NPY):
        return _start_of_objects(head) is not None
    kind = stream_kind(MemoryStore({_FILE: head}), _FILE, 0, len(head))
    return kind is not None or any(magic.match(head) for magic, _ in _COMPRESSIONS)


def _decompress(
    store: ReadStore,
    file: str,
    start: int,
    n_bytes: int,
    decompressor: Callable[[], _Decompressor],
    max_bytes: int,
) -> tuple[bytes, bool]:
    """Return the first decompressed bytes, and whether the last stream was read to its end.

    Several streams may follow one another, which Python's modules read as one. What comes out is
    limited at each step.
    """
    parts: list[bytes] = []
    size = 0
    at = start
    stream = decompressor()
    rest = b""
    while size < max_bytes:
        # A new stream begins with what the last one left over.
        if stream.eof:
            rest = stream.unused_data
        if not rest:
            rest = store.read(file, at, min(_PIECE_BYTES, n_bytes - at))
            at += len(rest)
            if not rest:
                break
        if stream.eof:
            stream = decompressor()
        part = stream.decompress(rest, max_bytes - size)
        parts.append(part)
        size += len(part)
        # Drain modules that keep input of their own.
        rest = getattr(stream, "unconsumed_tail", b"")  # of zlib; the others keep it themselves
        while not stream.eof and size < max_bytes and not getattr(stream, "needs_input", True):
            parts.append(stream.decompress(b"", max_bytes - size))
            size += len(parts[-1])
    return b"".join(parts), stream.eof or size >= max_bytes


class _StoreFile(BufferedIOBase):
    """A file of a store, readable by ``zipfile``."""

    def __init__(self, store: ReadStore, file: str, n_bytes: int) -> None:
        self._store, self._file, self._size, self._at = store, file, n_bytes, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        remaining = max(0, self._size - self._at)
        n_bytes = remaining if size is None or size < 0 else min(size, remaining)
        data = self._store.read(self._file, self._at, n_bytes)
        self._at += n_bytes
        return data


def _open_zip(store: ReadStore, file: str, n_bytes: int) -> zipfile.ZipFile:
    """Open a zip and read its directory.

    Raises:
        CorruptError: it has no readable directory.
    """
    try:
        return zipfile.ZipFile(_StoreFile(store, file, n_bytes))
    except (
        zipfile.BadZipFile,
        struct.error,
        ValueError,
        NotImplementedError,
        OSError,
        UnicodeError,
    ) as err:
        raise CorruptError(f"the zip cannot be read: {err}", file=file) from err


def is_torch_zip(store: ReadStore, file: str, n_bytes: int) -> bool:
    """Return whether a zip is one of ``torch.save``, or cannot be read, so that only torch's reader
    can tell.
    """
    try:
        with _open_zip(store, file, n_bytes) as archive:
            return any(
                name.rpartition("/")[2] in ("data.pkl", "constants.pkl")
                for name in archive.namelist()
            )
    except CorruptError:
        return True


def damaged_member(store: ReadStore, file: str, n_bytes: int) -> str | None:
    """Return what is wrong with the first damaged member of a zip that torch did not write.

    None if nothing is.

    Members are read in the order of the directory and compared with their CRC-32. Not checked:
    members that are encrypted or packed by other methods than deflate, and what comes after 4 GiB
    of inflated data and 20 times the size of the zip, so that a small file cannot keep the reader
    busy for hours.

    Raises:
        CorruptError: the zip has no readable directory.
    """
    limit = max(_MAX_CHECKED_BYTES, _MAX_CHECKED_RATIO * n_bytes)
    n_read = 0
    with _open_zip(store, file, n_bytes) as archive:
        for info in archive.infolist():
            if info.compress_type not in _METHODS or n_read > limit:
                continue
            try:
                with archive.open(info) as member:
                    while n_read <= limit and (part := member.read(1 << 20)):
                        n_read += len(part)
            except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError) as err:
                return f"{info.filename}: {err}"
            except RuntimeError:  # encrypted
                continue
    return None


def _read_zip(store: ReadStore, file: str, n_bytes: int, *, depth: int) -> PickledContent:
    """Read the pickles in the members of a zip that torch did not write."""
    uses: set[Use] = set()
    unread: list[str] = []
    n_read = 0
    with _open_zip(store, file, n_bytes) as archive:
        infos = archive.infolist()
        if len(infos) > _MAX_MEMBERS:
            unread.append(f"only the first {_MAX_MEMBERS} of its {len(infos)} members were read")
        for info in infos[:_MAX_MEMBERS]:
            name = info.filename
            # Members that cannot be read are reported if their names are those of pickles.
            try:
                data = _read_member(archive, info)
            except UnsupportedError as err:
                unread += [f"{name}: {err.message}"] if _PICKLED_NAME.search(name) else []
                continue
            n_read += len(data)
            # Stop once too much has been read.
            if len(data) > MAX_BYTES or n_read > _MAX_MEMBER_BYTES:
                unread.append(f"{name} is too large to be read")
                if n_read > _MAX_MEMBER_BYTES:
                    break
            elif data:
                looked = _read_content(
                    MemoryStore({_FILE: data}), _FILE, len(data), depth=depth + 1, name=name
                )
                uses |= looked.uses
                unread += looked.unread
    return PickledContent(frozenset(uses), tuple(unread))


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """Return the bytes of a member that may hold a pickle, at most one more than the limit.

    B"" of any other.

    Raises:
        UnsupportedError: the member is encrypted, or compressed in an unusual way.
    """
    if info.compress_type not in _METHODS:
        raise UnsupportedError("compressed with an unsupported method")
    try:
        with archive.open(info) as member:
            head = member.read(_HEAD_BYTES)
            if not (_may_hold_a_pickle(head) or _TEXT_NAME.search(info.filename)):
                return b""
            return head + member.read(MAX_BYTES + 1 - len(head))
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError):
        return b""  # which is found where its bytes are checked
    except RuntimeError as err:
        raise UnsupportedError("it is encrypted") from err
