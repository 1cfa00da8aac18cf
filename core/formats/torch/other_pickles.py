"""Pickles in files that torch did not write: NumPy's, joblib's, and compressed ones.

On disk::

    x.npy      "\\x93NUMPY", version, header {'descr': '|O', …}, and for arrays of objects a pickle
    x.npz      a zip of .npy members (members of other zips that torch did not write are read, too)
    x.joblib   a pickle, in which the bytes of each array follow the BUILD of its NumpyArrayWrapper;
               or such a pickle, compressed
    x.pkl.gz   any of these in gzip, bz2, xz, lzma or zlib

Only the beginning of a file is read at first; if it is that of a pickle, at most 64 MiB are read,
after decompression. Not supported, and reported: larger files, compressions that Python's standard
library lacks (lz4, zstd), files of joblib before 0.10, encrypted zips.

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
from dataclasses import replace
from io import BufferedIOBase
from typing import TYPE_CHECKING, Protocol

from core.errors import CheckpointingException, CorruptError, UnsafeError, UnsupportedError
from core.files.store import MemoryStore
from core.formats.torch.nested_names import uses_in, uses_of_stream, with_nested
from core.formats.torch.stream import PICKLED_NAME, stream_kind
from core.pickle.inert import NO_STATE, Global, Inert
from core.pickle.noted import noting_uses
from core.pickle.reader import load_next
from core.pickle.uses import Use
from core.values import dataclass

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
"""The header of zlib data in files of joblib before 0.10: the length, in hexadecimal digits."""
_NO_MODULE = {b"\x04\x22\x4d\x18": "lz4", b"\x28\xb5\x2f\xfd": "zstd"}
"""Signature → name, of compressions that Python's standard library lacks."""
_CHECKPOINT_FILE = re.compile(
    r"(^|/)(\.metadata(\.tmp)?|c|[c.\d]*\d|d/[0-9a-f]{32})$"
    r"|\.(pt|pth|bin|ckpt|pkl|pickle|distcp|safetensors|json)$"
)
"""This includes zarr chunks, which may be compressed, and the data files of OCDBT."""
_TEXT_NAME = re.compile(r"\.(pkl|pickle)$")
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_MAX_MEMBER_BYTES = 1 << 30
"""Maximum number of bytes read of a zip's members in total."""
_MAX_CHECKED_BYTES = 1 << 32
_MAX_CHECKED_RATIO = 20
"""Limits on inflated data when a zip is checked, in bytes and in multiples of the zip's size; the
larger one counts.
"""
_FILE = "bytes"


class _Decompressor(Protocol):
    """The interface that the decompressors of Python's standard library have in common."""

    @property
    def eof(self) -> bool:
        """Flag that is true after the end of the stream."""

    @property
    def unused_data(self) -> bytes:
        """Input after the end of the stream."""

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
    """The findings about the parts of a file that Python would unpickle.

    Args:
        uses: the uses of names in its pickles.
        unread: reasons why parts of it were not read, each with the name of the part.
    """

    uses: frozenset[Use] = frozenset()
    unread: tuple[str, ...] = ()


def is_checkpoint_file(name: str) -> bool:
    """Return whether a file's name is one of a checkpoint format, whose readers check the file."""
    return _CHECKPOINT_FILE.search(name) is not None


def look_into(store: ReadStore, file: str, n_bytes: int) -> PickledContent:
    """Read the pickles in a file with any name, if it contains any, for their uses of names."""
    try:
        return _read_content(store, file, n_bytes, depth=0, name=file)
    except UnsafeError as err:
        return PickledContent(unread=(err.message,))
    # Damage is reported elsewhere, where the bytes of the file are checked.
    except CheckpointingException:
        return PickledContent()


def _read_content(
    store: ReadStore, file: str, n_bytes: int, *, depth: int, name: str
) -> PickledContent:
    """Read the pickles in bytes of any kind.

    Args:
        depth: number of archives and compressed streams around the bytes.
        name: their name in a zip or in a directory.

    Raises:
        CheckpointingException: the content is damaged, or refused.
    """
    head = store.read(file, 0, min(n_bytes, _HEAD_BYTES))
    if depth > _MAX_DEPTH:
        return PickledContent(unread=(f"{name} is nested more than {_MAX_DEPTH} archives deep",))
    # Containers that are recognised by their first bytes: NumPy's, zips, compressed data.
    if head.startswith(_NPY):
        start = _start_of_objects(head)
        if start is None:
            return PickledContent()
        return _read_pickle(store, file, start, n_bytes, name)
    if head.startswith(_ZIP) and not is_torch_zip(store, file, n_bytes):
        return _read_zip(store, file, n_bytes, depth=depth)
    # Data that cannot be decompressed matters only if its name is that of a pickle.
    has_name = PICKLED_NAME.search(name) is not None
    for mark, title in _NO_MODULE.items():
        if head.startswith(mark):
            return PickledContent(unread=(f"it is compressed with {title}",) if has_name else ())
    old = _JOBLIB_OLD.match(head)
    begin = old.end() if old is not None else 0
    for magic, decompressor in _COMPRESSIONS:
        if magic.match(head, begin):
            return _read_compressed(
                store, file, begin, n_bytes, decompressor, depth=depth, name=name
            )
    # Otherwise a pickle or one of torch's streams. A pickle of protocol 0 has no signature, so
    # that only its name shows that it may be one.
    kind = stream_kind(store, file, 0, n_bytes)
    if kind == "pickle":
        return _read_pickle(store, file, 0, n_bytes, name)
    if kind is not None or has_name:
        return PickledContent(frozenset(uses_of_stream(store, file, 0, n_bytes)))
    return PickledContent()


def _start_of_objects(head: bytes) -> int | None:
    """Return the offset of the pickle in a ``.npy``; None if its elements are not objects."""
    # The header's length has 2 bytes in version 1, 4 in versions 2 and 3.
    width = 2 if head[6:7] == b"\x01" else 4
    begin = 8 + width
    size = int.from_bytes(head[8:begin], "little")
    text = head[begin : begin + size].decode("latin-1")
    # A header that cannot be parsed (or is longer than ``head``) is searched for the type.
    try:
        header = ast.literal_eval(text.strip())
        has_objects = _has_objects(header["descr"])
    except (ValueError, SyntaxError, TypeError, LookupError, RecursionError, MemoryError):
        has_objects = "O" in text or "object" in text
    return begin + size if has_objects else None


def _has_objects(described: object) -> bool:
    """Return whether a dtype, given by its description in a header, contains objects."""
    if isinstance(described, list):
        return any(_has_objects(field[1]) for field in described)
    if isinstance(described, tuple):
        return _has_objects(described[0])
    return "O" in str(described) or "object" in str(described)


def _read_pickle(
    store: ReadStore, file: str, start: int, n_bytes: int, name: str
) -> PickledContent:
    """Read the pickle from byte ``start`` on, including arrays that joblib wrote inside it."""
    # A large file of joblib's consists of arrays; its pickles may still be short.
    if n_bytes - start > MAX_BYTES and b"joblib" not in store.read(file, start, _HEAD_BYTES):
        return PickledContent(unread=(f"{name} is larger than {MAX_BYTES >> 20} MiB",))
    # A pickle that breaks off is reported only if it is too large, or calls anything before that.
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
                unread = (f"{name} is larger than {MAX_BYTES >> 20} MiB",)
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
        """Return the position in ``data`` at which the pickle continues after the array.

        The pickle reader calls this after BUILD.

        Args:
            at: position after BUILD.

        Raises:
            UnsupportedError: the length of the array does not follow from the state.
        """
        state = self.state if type(self.state) is dict else {}
        shape, dtype = state.get("shape"), state.get("dtype")
        # numpy.dtype("f4", False, True): the first argument is the type code.
        code: object = dtype.args[0] if type(dtype) is Inert and dtype.args else ""
        # The elements of an array of objects are a pickle.
        if isinstance(code, str) and "O" in code:
            _, end = load_next(data, at, label="array", hooks=_JOBLIB)
            return end
        # Any other array is as long as its dtype and shape imply.
        if type(shape) is not tuple or any(type(size) is not int or size < 0 for size in shape):
            raise UnsupportedError(_UNCLEAR_SIZE)
        item_bytes = _item_bytes(dtype)
        # joblib 1.2 and later align the data: one byte is the length of the padding after it.
        if state.get("numpy_array_alignment_bytes") is not None:
            at += 1 + data[at]
        return at + math.prod(shape) * item_bytes


_WRAPPER = Global("joblib.numpy_pickle", "NumpyArrayWrapper")
_JOBLIB = {(_WRAPPER.module, _WRAPPER.name): lambda *args: _InlineArray("newobj", _WRAPPER, args)}
_UNCLEAR_SIZE = "it contains a joblib array of unknown size"


def _item_bytes(dtype: object) -> int:
    """Return the bytes per element of a pickled numpy dtype of numbers, dates or text.

    Raises:
        UnsupportedError: the dtype is of another kind, or contradicts itself.
    """
    if type(dtype) is not Inert or not dtype.args or type(dtype.args[0]) is not str:
        raise UnsupportedError(_UNCLEAR_SIZE)
    match = re.fullmatch(r"[<>|=]?([biufcmMSU])(\d+)", dtype.args[0])
    if match is None:
        raise UnsupportedError(_UNCLEAR_SIZE)
    # The unit of numpy's "U" is a character of 4 bytes.
    item_bytes = int(match[2]) * (4 if match[1] == "U" else 1)
    # The state of a text's dtype contains the length again, and numpy uses that one.
    state_bytes = dtype.state[5:6] if type(dtype.state) is tuple else ()
    if match[1] in "SU" and state_bytes != (item_bytes,):
        raise UnsupportedError(_UNCLEAR_SIZE)
    return item_bytes


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
    """Decompress some bytes, and read them if they begin like a pickle.

    Args:
        start: offset of the compressed data, after joblib's old header.
        depth, name: as for ``_read_content``.

    Raises:
        CheckpointingException: the content is damaged, or refused.
    """
    # The beginning is cheap, and most compressed files end here.
    try:
        head, _ = _decompress(store, file, start, n_bytes, decompressor, _HEAD_BYTES)
        if not _may_hold_a_pickle(head):
            return PickledContent()
        data, is_complete = _decompress(store, file, start, n_bytes, decompressor, MAX_BYTES + 1)
    except (zlib.error, lzma.LZMAError, OSError, ValueError, EOFError):
        return PickledContent(
            unread=("it cannot be decompressed",) if PICKLED_NAME.search(name) else ()
        )
    if len(data) > MAX_BYTES:
        return PickledContent(
            unread=(f"{name} is larger than {MAX_BYTES >> 20} MiB when decompressed",)
        )
    content = _read_content(
        MemoryStore({_FILE: data}), _FILE, len(data), depth=depth + 1, name=name
    )
    if is_complete:
        return content
    return replace(content, unread=(*content.unread, "its compressed data is incomplete"))


def _may_hold_a_pickle(head: bytes) -> bool:
    """Return whether bytes begin like a pickle, or like a container that may hold one."""
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

    Several streams may follow one another, which Python's modules read as one. The output is
    limited at each step, so that a small file cannot fill the memory.
    """
    parts: list[bytes] = []
    size = 0
    at = start
    stream = decompressor()
    pending = b""
    while size < max_bytes:
        # A new stream begins with the bytes that follow the end of the last one.
        if stream.eof:
            pending = stream.unused_data
        if not pending:
            pending = store.read(file, at, min(_PIECE_BYTES, n_bytes - at))
            at += len(pending)
            if not pending:
                break
        if stream.eof:
            stream = decompressor()
        part = stream.decompress(pending, max_bytes - size)
        parts.append(part)
        size += len(part)
        # zlib returns the input that it did not use; bz2 and lzma keep it, and must be drained.
        pending = getattr(stream, "unconsumed_tail", b"")
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
        CorruptError: the directory cannot be read.
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
    """Return whether a zip was written by torch, or cannot be read.

    An unreadable zip counts, because the reader for torch zips explains what is wrong with it.
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
    """Describe the first damaged member of a zip that torch did not write; None if all are intact.

    Members are read in the order of the directory and compared with their CRC-32. Not checked:
    members that are encrypted or compressed by a method other than deflate, and members after both
    4 GiB of inflated data and 20 times the size of the zip, so that a small file cannot keep the
    reader busy for hours.

    Raises:
        CorruptError: the directory of the zip cannot be read.
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
            # zipfile's error for encrypted members.
            except RuntimeError:
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
            unread.append(f"ckpt read only the first {_MAX_MEMBERS} of its {len(infos)} members")
        for info in infos[:_MAX_MEMBERS]:
            name = info.filename
            # Members that cannot be read matter only if their names are those of pickles.
            try:
                data = _read_member(archive, info)
            except UnsupportedError as err:
                unread += [f"{name}: {err.message}"] if PICKLED_NAME.search(name) else []
                continue
            n_read += len(data)
            # Report members that are too large, and stop after too many bytes in total.
            if len(data) > MAX_BYTES or n_read > _MAX_MEMBER_BYTES:
                unread.append(f"{name} is too large to be read")
                if n_read > _MAX_MEMBER_BYTES:
                    break
            elif data:
                content = _read_content(
                    MemoryStore({_FILE: data}), _FILE, len(data), depth=depth + 1, name=name
                )
                uses |= content.uses
                unread += content.unread
    return PickledContent(frozenset(uses), tuple(unread))


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """Read a member that may be a pickle, up to one byte more than the limit; b"" for any other.

    Raises:
        UnsupportedError: the member is encrypted, or compressed by a method other than deflate.
    """
    if info.compress_type not in _METHODS:
        raise UnsupportedError("it is compressed with an unsupported method")
    try:
        with archive.open(info) as member:
            head = member.read(_HEAD_BYTES)
            if not (_may_hold_a_pickle(head) or _TEXT_NAME.search(info.filename)):
                return b""
            return head + member.read(MAX_BYTES + 1 - len(head))
    # Damage is reported elsewhere, by ``damaged_member``.
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError):
        return b""
    # zipfile's error for encrypted members.
    except RuntimeError as err:
        raise UnsupportedError("it is encrypted") from err
