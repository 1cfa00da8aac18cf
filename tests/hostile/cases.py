"""Hostile checkpoints: a table of names and of functions that make them in an empty directory.

Each function returns what the command is pointed at. Whatever they hold, the commands end with one
of the documented exit codes, soon, in bounded memory, and with nothing but printable text.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import socket
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

from core.arrays.checksum import crc32c
from core.formats.dcp.metadata_writer import ChunkRow, ObjectRow, TensorRow, write_metadata
from core.formats.ocdbt.nodes import MANIFEST_MAGIC

Make = Callable[[Path], Path]
TERABYTE = 1 << 40
MARKER = "owned"


def zipped(records: dict[str, bytes], *, method: int = zipfile.ZIP_STORED) -> bytes:
    """A zip of some records below ``m``."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in records.items():
            archive.writestr(f"m/{name}", data)
    return file.getvalue()


def torch_zip(data: bytes, **records: bytes) -> bytes:
    """A torch file with this pickle."""
    return zipped({"data.pkl": data, "version": b"3\n", "byteorder": b"little", **records})


def tensor_opcodes(
    shape: bytes, strides: bytes, numel: bytes, *, key: bytes = b"X\x01\0\0\0000"
) -> bytes:
    """Opcodes of a float32 tensor in the record ``data/0``."""
    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\n" + key + b"X\x03\0\0\0cpu" + numel + b"tQ"
    ordered = b"ccollections\nOrderedDict\n)R"
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage
        + b"K\0"
        + shape
        + strides
        + b"\x89"
        + ordered
        + b"tR"
    )


FOUR = tensor_opcodes(b"K\x04\x85", b"K\x01\x85", b"K\x04")
PLAIN_TORCH = torch_zip(b"\x80\x02}X\x01\0\0\0w" + FOUR + b"s.", **{"data/0": bytes(16)})


def torch_file(data: bytes) -> Make:
    def make(folder: Path) -> Path:
        (folder / "model.pt").write_bytes(data)
        return folder / "model.pt"

    return make


def tarred(**contents: bytes) -> bytes:
    """A tar file, as torch 0.1 wrote them."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


LEGACY = b"".join(
    pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
)
"""What a file of torch before 1.6 begins with; the object follows."""


def pickled(data: bytes) -> Make:
    """A torch file around a pickle."""
    return torch_file(torch_zip(data, **{"data/0": bytes(16)}))


def files(**contents: bytes | str) -> Make:
    """A directory of files; ``__`` in a name stands for ``/``, a leading ``dot_`` for a dot."""

    def make(folder: Path) -> Path:
        for name, content in contents.items():
            path = folder / "src" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(
                content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
            )
        return folder / "src"

    return make


def safetensors(header: bytes, data: bytes = bytes(16)) -> bytes:
    """A safetensors file."""
    return len(header).to_bytes(8, "little") + header + data


HEADER = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
ITEM = torch_zip(b"\x80\x02" + FOUR + b".", **{"data/0": bytes(16)})
ROW = TensorRow("w", "float32", (4,), [ChunkRow((0,), (4,), "__0_0.distcp", 0, len(ITEM))])
METADATA = write_metadata([ROW], planner_data=None)
ZARRAY = {
    "zarr_format": 2,
    "shape": [4],
    "chunks": [2],
    "dtype": "<f4",
    "compressor": None,
    "fill_value": 0,
    "filters": None,
    "order": "C",
}
ZARR_JSON = {
    "zarr_format": 3,
    "node_type": "array",
    "shape": [4],
    "data_type": "float32",
    "fill_value": 0,
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2]}},
    "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
    "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
}
GROUP = b'{"zarr_format":3,"node_type":"group"}'
INDEX = {"metadata": {"total_size": 16}, "weight_map": {"w": "model-00001-of-00001.safetensors"}}

DCP = {".metadata": METADATA, "__0_0.distcp": ITEM}
SAFE = {
    "model.safetensors.index.json": json.dumps(INDEX),
    "model-00001-of-00001.safetensors": safetensors(HEADER),
}
ZARR = {
    "w/.zarray": json.dumps(ZARRAY),
    "w/0": bytes(8),
    "w/1": bytes(8),
    ".zgroup": '{"zarr_format":2}',
}
ZARR3 = {
    "zarr.json": GROUP,
    "w/zarr.json": json.dumps(ZARR_JSON),
    "w/c/0": bytes(8),
    "w/c/1": bytes(8),
}
COMMON = torch_zip(b"\x80\x02}X\x09\0\0\0iterationK\x01s.")
MCORE = {
    **DCP,
    "metadata.json": '{"sharded_backend":"torch_dist","sharded_backend_version":1}',
    "common.pt": COMMON,
}
TORCH = {"checkpoint.pt": PLAIN_TORCH}
ORBAX = {"manifest.ocdbt": b"x", "_METADATA": "{}"}
ROOT = {
    "latest_checkpointed_iteration.txt": "1",
    **{f"iter_0000001/{name}": data for name, data in MCORE.items()},
}
BASES: dict[str, dict[str, bytes | str]] = {
    "dcp": DCP,
    "safetensors": SAFE,
    "zarr": ZARR,
    "zarr3": ZARR3,
    "torch_dist": MCORE,
    "torch": TORCH,
    "orbax": ORBAX,
    "root": ROOT,
}
"""Small checkpoints that are sound, but for Orbax's."""


def changed(base: str, **changes: bytes | str | None) -> Make:
    """One of them with other files, or without some (None)."""
    return files(
        **{name: data for name, data in {**BASES[base], **changes}.items() if data is not None}
    )


# Things that are no files


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as unix_socket:
            unix_socket.bind(path.name)
    finally:
        os.chdir(before)


def _linked(target: str, path: Path) -> None:
    path.symlink_to(target)


def _sparse(path: Path, *, begin: bytes = b"", end: bytes = b"") -> None:
    with path.open("wb") as file:
        file.write(begin)
        file.truncate(TERABYTE)
        file.seek(TERABYTE - len(end))
        file.write(end)


THINGS: dict[str, Callable[[Path], None]] = {
    "fifo": _fifo,
    "socket": _socket,
    "directory": Path.mkdir,
    "link to itself": lambda path: _linked(path.name, path),
    "dangling link": partial(_linked, "nowhere"),
    "endless device": partial(_linked, "/dev/zero"),
    "terabyte of nothing": _sparse,
}
PLACES = (
    ("dcp", ".metadata"),
    ("dcp", "__0_0.distcp"),
    ("torch", "checkpoint.pt"),
    ("zarr", "w/.zarray"),
    ("zarr", "w/0"),
    ("safetensors", "model.safetensors.index.json"),
    ("safetensors", "model-00001-of-00001.safetensors"),
    ("zarr3", "w/zarr.json"),
    ("zarr3", "w/c/1"),
    ("torch_dist", "metadata.json"),
    ("torch_dist", "common.pt"),
    ("orbax", "manifest.ocdbt"),
    ("root", "latest_checkpointed_iteration.txt"),
)


def replaced(base: str, name: str, thing: Callable[[Path], None]) -> Make:
    """A sound checkpoint in which something else takes the place of a file."""

    def make(folder: Path) -> Path:
        path = changed(base)(folder)
        (path / name).unlink()
        thing(path / name)
        return path

    return make


def added(base: str, name: str, thing: Callable[[Path], None]) -> Make:
    """A sound checkpoint with something beside its files."""

    def make(folder: Path) -> Path:
        path = changed(base)(folder)
        thing(path / name)
        return path

    return make


# Pickles


def text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


CALL = b"cposix\nsystem\n" + text(f"touch {MARKER}") + b"\x85R"
ARGUMENT = text(f"touch {MARKER}")
RUN = b"ctorch.utils.collect_env\nrun\n" + ARGUMENT
NAMESPACE = b"cargparse\nNamespace\n)\x81"


def from_bytes(data: bytes) -> bytes:
    """Opcodes of a call that unpickles some bytes."""
    return b"ctorch.storage\n_load_from_bytes\nB" + struct.pack("<I", len(data)) + data + b"\x85R"


TWICE = from_bytes(b"\x80\x03" + from_bytes(b"\x80\x02" + RUN + b"\x85R.") + b".")
_LAUGHS = b"(lp0\n" + b"".join(b"(g%d\ng%d\nlp%d\n" % (n, n, n + 1) for n in range(60)) + b"."
_KEYS = b"".join(
    b"\x8a\x10" + (number * ((1 << 61) - 1)).to_bytes(16, "little") + b"N"
    for number in range(20000)
)
PICKLES: dict[str, bytes] = {
    "memo index": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "bytes of 2^60": b"\x80\x05\x8e" + struct.pack("<Q", 1 << 60) + b".",
    "bytearray of 2^60": b"\x80\x05\x96" + struct.pack("<Q", 1 << 60) + b".",
    "string of 4 GB": b"\x80\x02X\xff\xff\xff\xff.",
    "tuples in a key": b"\x80\x02}N" + b"2\x86" * 60 + b"Ns.",
    "a deep key": b"\x80\x02}N" + b"\x85" * 200_000 + b"Ns.",
    "deep lists": b"\x80\x02" + b"]" * 1_000_000 + b"a" * 999_999 + b".",
    "deep lists behind a mark": b"\x80\x02(" + b"]" * 1_000_000 + b"a" * 999_999 + b"l.",
    "deep dicts": b"\x80\x02" + b"}K\x01" * 100_000 + b"N" + b"s" * 100_000 + b".",
    "a million marks": b"\x80\x02" + b"(" * 1_000_000 + b".",
    "billion laughs": _LAUGHS,
    "a list that holds itself": b"\x80\x02]q\0h\0a.",
    "a dict that holds itself": b"\x80\x02}q\0X\x01\0\0\0ah\0s.",
    "equal hashes": b"\x80\x02}(" + _KEYS + b"u.",
    "a long number": b"\x80\x02\x8b" + struct.pack("<I", 3_000_000) + b"\x7f" * 3_000_000 + b".",
    "a long number as text": b"I" + b"9" * 5000 + b"\n.",
    "a long key": b"\x80\x02}X\x00\x00\x10\0" + b"k" * (1 << 20) + b"K\x01s.",
    "many names": b"\x80\x02(" + b"".join(b"cm\nn%d\n" % n for n in range(20_000)) + b"l.",
    "a long name": b"cm\n" + b"n" * 100_000 + b"\n.",
    "many objects": b"\x80\x02(" + b"]" * 1_600_000 + b"l.",
    "many records": b"\x80\x02(cm\nn\nq\0" + b"h\0)R" * 100_000 + b"l.",
    "no end": b"\x80\x02]",
    "protocol 255": b"\x80\xff.",
    "extension registry": b"\x80\x02\x82\x01.",
    "an out-of-band buffer": b"\x80\x05\x97.",
    "an old persistent id": b"P0\n.",
    "a call": b"\x80\x02" + CALL + b".",
    "a call in a dict": b"\x80\x02}" + text("evil") + CALL + b"s.",
    "a call that is dropped": b"\x80\x02" + CALL + b"0}X\x01\0\0\0w" + FOUR + b"s.",
    "a call by INST": b"(" + text(f"touch {MARKER}") + b"iposix\nsystem\n.",
    "a call by getattr": b"c__builtin__\ngetattr\n(cos\npath\n" + text("os") + b"tR.",
    "a call in a hook": b"\x80\x02" + FOUR.replace(b"ccollections\nOrderedDict\n)R", CALL) + b".",
    "a call inside bytes": b"\x80\x02ctorch.storage\n_load_from_bytes\n"
    b"B" + struct.pack("<I", len(CALL) + 3) + b"\x80\x02" + CALL + b"." + b"\x85R.",
    "a call of torch": b"\x80\x02" + RUN + b"\x85R.",
    "a call of torch that runs Python": b"\x80\x02ctorch.jit.unsupported_tensor_ops\nexecWrapper\n"
    + text("1")
    + b"}}\x87R.",
    "a call of torch by NEWOBJ": b"\x80\x02" + RUN + b"\x85\x81.",
    "a call of torch by NEWOBJ_EX": b"\x80\x04" + RUN + b"\x85}\x92.",
    "a call of torch by OBJ": b"\x80\x02(" + RUN + b"o.",
    "a call of torch by a second BUILD": b"\x80\x02"
    + NAMESPACE
    + b"}"
    + text("__setstate__")
    + b"ctorch.utils.collect_env\nrun\nsb"
    + ARGUMENT
    + b"b.",
    "a call of torch by APPEND": b"\x80\x02"
    + NAMESPACE
    + b"}"
    + text("append")
    + b"ctorch.utils.collect_env\nrun\nsb"
    + ARGUMENT
    + b"a.",
    "a call of torch by a persistent id": b"\x80\x02("
    + text("storage")
    + b"ctorch.utils.collect_env\nrun\n"
    + text("0")
    + text("cpu")
    + b"K\x01tQ.",
    "a call of torch by a harmless function": b"\x80\x02cnumpy.random._pickle\n__generator_ctor\n"
    + ARGUMENT
    + b"ctorch.utils.collect_env\nrun\n\x86R.",
    "a call of torch in a key": b"\x80\x02}" + RUN + b"\x85RK\x01s.",
    "a call of torch in a key of tensors": b"\x80\x02}" + RUN + b"\x85R" + FOUR + b"s.",
    "a call of torch inside bytes inside bytes": b"\x80\x03}X\x01\0\0\0w"
    + FOUR
    + b"s"
    + text("x")
    + TWICE
    + b"s.",
    "a call of torch inside bytes that are dropped": b"\x80\x03"
    + TWICE
    + b"0}X\x01\0\0\0w"
    + FOUR
    + b"s.",
    "a call of a class of "
    "transformers": b"\x80\x02ctransformers.training_args\nTrainingArguments\n)R.",
    "a surrogate": b"\x80\x02}" + text("\udc80") + FOUR + b"s.",
    "escape sequences": b"\x80\x02}" + text("\x1b]0;owned\x07\x1b[2J\r\u202e") + FOUR + b"s.",
    "a name with lines": b"\x80\x02}" + text("a\nckpt: fine\n") + FOUR + b"s.",
    "markup": b"\x80\x02}" + text("[red]w[/red]%s{0}") + FOUR + b"s.",
    "an empty name": b"\x80\x02}" + text("") + FOUR + b"s.",
    "names of many kinds": b"\x80\x02}(NNK\x01NG" + bytes(8) + b"N\x88Nu.",
    "a tensor of 2^62": b"\x80\x02}X\x01\0\0\0w"
    + tensor_opcodes(b"\x8a\x08" + struct.pack("<q", 1 << 62) + b"\x85", b"K\x01\x85", b"K\x04")
    + b"s.",
    "a tensor of 2^40 by strides of 0": b"\x80\x02}X\x01\0\0\0w"
    + tensor_opcodes(b"\x8a\x08" + struct.pack("<q", 1 << 40) + b"\x85", b"K\0\x85", b"K\x04")
    + b"s.",
    "a shape of shared tuples": b"\x80\x02}X\x01\0\0\0w"
    + tensor_opcodes(b"N" + b"2\x86" * 60 + b"\x85", b"K\x01\x85", b"K\x04")
    + b"s.",
    "negative strides": b"\x80\x02}X\x01\0\0\0w"
    + tensor_opcodes(b"K\x04\x85", b"J\xff\xff\xff\xff\x85", b"K\x04")
    + b"s.",
    "a record outside": b"\x80\x02}X\x01\0\0\0w"
    + tensor_opcodes(b"K\x04\x85", b"K\x01\x85", b"K\x04", key=text("../../x"))
    + b"s.",
    "a tensor of 1000 axes": b"\x80\x02}X\x01\0\0\0w"
    + tensor_opcodes(b"(" + b"K\x01" * 1000 + b"t", b"(" + b"K\x01" * 1000 + b"t", b"K\x04")
    + b"s.",
    "strides that wrap": b"\x80\x02}X\x01\0\0\0w"
    + tensor_opcodes(
        b"K\x02\x85", b"\x8a\x09" + (1 << 62).to_bytes(9, "little") + b"\x85", b"K\x04"
    )
    + b"s.",
    "a shape that wraps": b"\x80\x02}X\x01\0\0\0w"
    + tensor_opcodes(
        (b"\x8a\x05" + (1 << 32).to_bytes(5, "little")) * 2 + b"\x86", b"K\0K\0\x86", b"K\x04"
    )
    + b"s.",
    "a storage of no type of torch's": b"\x80\x02}X\x01\0\0\0w"
    + FOUR.replace(b"FloatStorage", b"OddStorage")
    + b"s.",
    "a storage in itself": b"\x80\x02](h\0" + FOUR + b"q\0e.",
}


def as_object(data: bytes) -> Make:
    """A DCP checkpoint with an object of this pickle."""
    stream = torch_zip(data, **{"data/0": bytes(16)})
    rows = [ROW, ObjectRow("o", "__0_0.distcp", len(ITEM), len(stream))]
    return files(
        **{".metadata": write_metadata(rows, planner_data=None), "__0_0.distcp": ITEM + stream}
    )


# JSON

JSONS: dict[str, bytes] = {
    "100000 brackets": b"[" * 100_000,
    "100000 objects": b'{"a":' * 100_000,
    "12 MB of brackets": b"[]," * (4 << 20),
    "a number of 100000 digits": b'{"metadata": ' + b"9" * 100_000 + b"}",
    "a number of 4000 digits": b'{"zarr_format": ' + b"9" * 4000 + b"}",
    "a key twice": b'{"weight_map": {}, "weight_map": {}}',
    "a surrogate": b'{"weight_map": {"\\ud800": "\\udc80"}, "sharded_backend": "\\ud800"}',
    "no UTF-8": b'{"weight_map": {"\xff": "a"}}',
    "UTF-16": '{"weight_map": {}}'.encode("utf-16"),
    "other types": b'{"weight_map": [1], "shape": {}, "sharded_backend": [], "zarr_format": "2"}',
    "escape sequences": b'{"weight_map": {"\\u001b[2J": "a\\u0007.safetensors"}, '
    b'"zarr_format": "\\u001b[2J"}',
    "nothing": b"",
    "NaN": b"NaN",
}
JSON_PLACES = (
    ("safetensors", "model.safetensors.index.json"),
    ("zarr", "w/.zarray"),
    ("zarr3", "w/zarr.json"),
    ("torch_dist", "metadata.json"),
    ("safetensors", "config.json"),
)


# Everything else


def _metadata(*rows: TensorRow | ObjectRow) -> Make:
    return files(**{**DCP, ".metadata": write_metadata(rows, planner_data=None)})


def _chunked(shape: tuple[int, ...], *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Make:
    chunks = [ChunkRow(at, size, "__0_0.distcp", 0, len(ITEM)) for at, size in boxes]
    return _metadata(TensorRow("w", "float32", shape, chunks))


def _overlapping(first: int) -> Make:
    """Three elements from 0 on, and two from ``first`` on where the third of them lies."""
    items = [
        torch_zip(
            b"\x80\x02" + tensor_opcodes(b"K%c\x85" % n, b"K\x01\x85", b"K%c" % n) + b".",
            **{"data/0": struct.pack(f"<{n}f", *range(start, start + n))},
        )
        for n, start in ((3, 0), (2, first))
    ]
    chunks = [
        ChunkRow((0,), (3,), "__0_0.distcp", 0, len(items[0])),
        ChunkRow((2,), (2,), "__0_0.distcp", len(items[0]), len(items[1])),
    ]
    metadata = write_metadata([TensorRow("w", "float32", (4,), chunks)], planner_data=None)
    return files(**{".metadata": metadata, "__0_0.distcp": b"".join(items)})


def _placed(name: str, offset: int, n_bytes: int) -> Make:
    return _metadata(TensorRow("w", "float32", (4,), [ChunkRow((0,), (4,), name, offset, n_bytes)]))


def _zarray(**fields: object) -> Make:
    return changed("zarr", **{"w/.zarray": json.dumps({**ZARRAY, **fields})})


def _zarr_json(**fields: object) -> Make:
    return changed("zarr3", **{"w/zarr.json": json.dumps({**ZARR_JSON, **fields})})


def _grid(*chunk_shape: int) -> dict[str, object]:
    return {"name": "regular", "configuration": {"chunk_shape": chunk_shape}}


def _sharding(*chunk_shape: int, codec: str | None = None) -> list[object]:
    plain = {"name": "bytes", "configuration": {"endian": "little"}}
    codecs = [plain, *([{"name": codec}] if codec is not None else [])]
    config = {
        "chunk_shape": chunk_shape,
        "codecs": codecs,
        "index_codecs": [plain, {"name": "crc32c"}],
    }
    return [{"name": "sharding_indexed", "configuration": config}]


def _bomb(codec: str, data: bytes) -> Make:
    codecs = [
        {"name": "bytes", "configuration": {"endian": "little"}},
        {"name": codec, "configuration": {}},
    ]
    return changed(
        "zarr3", **{"w/zarr.json": json.dumps({**ZARR_JSON, "codecs": codecs}), "w/c/0": data}
    )


def _ocdbt(body: bytes) -> Make:
    manifest = MANIFEST_MAGIC.to_bytes(4, "big") + (len(body) + 16).to_bytes(8, "little") + body
    return changed("orbax", **{"manifest.ocdbt": manifest + crc32c(manifest).to_bytes(4, "little")})


def _index(**weight_map: str) -> Make:
    return changed(
        "safetensors", **{"model.safetensors.index.json": json.dumps({"weight_map": weight_map})}
    )


def _deflated(
    record: str, begin: bytes, unit: bytes, n: int, end: bytes = b"", **more_records: bytes
) -> Make:
    """A torch file with a deflated record of ``n`` equal units."""

    def make(folder: Path) -> Path:
        records = {"data.pkl": b"\x80\x02}.", **more_records, record: begin + unit * n + end}
        return torch_file(zipped(records, method=zipfile.ZIP_DEFLATED))(folder)

    return make


def _patched(data: bytes, old: bytes, new: bytes) -> Make:
    assert old in data and len(old) == len(new)
    return torch_file(data.replace(old, new))


def _folders(folder: Path) -> Path:
    """Directories of which each leads to the next by two links, a loop, and a link to
    everything.
    """
    path = changed("zarr")(folder)
    for number in range(40):
        (path / f"d{number}").mkdir()
        for name in "ab":
            (path / f"d{number}" / name).symlink_to(f"../d{number + 1}")
    (path / "loop").symlink_to(".")
    (path / "all").symlink_to("/")
    return path


def _deep(base: str) -> Make:
    def make(folder: Path) -> Path:
        path = changed(base)(folder)
        descriptor = os.open(path, os.O_RDONLY)
        for _ in range(1500):
            os.mkdir("d", dir_fd=descriptor)
            below = os.open("d", os.O_RDONLY, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        os.close(descriptor)
        return path

    return make


def _many(base: str) -> Make:
    def make(folder: Path) -> Path:
        path = changed(base)(folder)
        for number in range(5000):
            (path / f"x{number}.distcp").touch()
        return path

    return make


def _named(base: str, name: bytes) -> Make:
    def make(folder: Path) -> Path:
        path = changed(base)(folder)
        Path(os.fsdecode(os.fsencode(path) + b"/" + name)).write_bytes(b"x")
        return path

    return make


def _array_folder(name: bytes) -> Make:
    """A zarr array in a directory of that name."""

    def make(folder: Path) -> Path:
        path = changed("zarr")(folder)
        os.rename(os.fsencode(path / "w"), os.fsencode(path) + b"/" + name)
        return path

    return make


def _tracker(tracker: str, content: str) -> Make:
    other_files = {f"iter_0000001/{name}": data for name, data in DCP.items()}
    return files(**{tracker: content, **other_files})


def _sparse_zip(folder: Path) -> Path:
    """A zip whose pickle is said to have a terabyte, which the file has."""
    small = zipped({"data.pkl": b"\x80\x02\x8e" + struct.pack("<Q", TERABYTE // 2)})
    (folder / "model.pt").write_bytes(small)
    with (folder / "model.pt").open("r+b") as file:
        file.truncate(TERABYTE)
        name = b"m/data.pkl"
        wide = struct.pack("<HHQQ", 1, 16, TERABYTE // 2, TERABYTE // 2)
        file.write(
            struct.pack(
                "<4sHHHHHIIIHH", b"PK\3\4", 45, 0, 0, 0, 0, 0, 0xFFFFFFFF, 0xFFFFFFFF, 10, 20
            )
            + name
            + wide
        )
        file.write(b"\x80\x05\x8e" + struct.pack("<Q", TERABYTE // 4))
        at = TERABYTE - 22 - 20 - 56 - (46 + 10 + 20)
        file.seek(at)
        fields = (b"PK\1\2", 45, 45, 0, 0, 0, 0, 0, 0xFFFFFFFF, 0xFFFFFFFF, 10, 20, 0, 0, 0, 0, 0)
        central = struct.pack("<4sHHHHHHIIIHHHHHII", *fields)
        file.write(central + name + wide)
        file.write(struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, 76, at))
        file.write(struct.pack("<4sIQI", b"PK\6\7", 0, at + 76, 1))
        file.write(struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 1, 1, 76, 0xFFFFFFFF, 0))
    return folder / "model.pt"


def _many_records(folder: Path) -> Path:
    records = {f"x{n}": b"" for n in range(20_000)}
    return torch_file(torch_zip(b"\x80\x02}.", **records))(folder)


def _sparse_metadata(folder: Path) -> Path:
    path = changed("dcp")(folder)
    _sparse(path / ".metadata", begin=b"\x80\x05\x8e" + struct.pack("<Q", TERABYTE - 13), end=b"0.")
    return path


def _sparse_object(folder: Path) -> Path:
    path = files(
        **{
            ".metadata": write_metadata(
                [ObjectRow("o", "__0_0.distcp", 0, TERABYTE)], planner_data=None
            )
        }
    )(folder)
    _sparse(
        path / "__0_0.distcp", begin=b"\x80\x05\x8e" + struct.pack("<Q", TERABYTE - 13), end=b"0."
    )
    return path


def _sparse_safetensors(folder: Path) -> Path:
    _sparse(folder / "model.safetensors", begin=(100_000_000).to_bytes(8, "little") + b"{")
    return folder / "model.safetensors"


def _sparse_legacy(folder: Path) -> Path:
    magic = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}."
    _sparse(
        folder / "model.pt",
        begin=magic + b"\x80\x05\x8e" + struct.pack("<Q", TERABYTE - 200),
        end=b".",
    )
    return folder / "model.pt"


_NULLS = zlib.compress(bytes(16 << 20), 1)
OTHERS: dict[str, Make] = {
    "metadata: a path that climbs": _placed("../../etc/passwd", 0, 100),
    "metadata: an absolute path": _placed("/etc/passwd", 0, 100),
    "metadata: a path with NUL": _placed("a\0b", 0, 100),
    "metadata: a path of control characters": _placed("\x1b[2J.distcp", 0, 100),
    "metadata: a path with a surrogate": _placed("\udc80.distcp", 0, 100),
    "metadata: a path of 100000 bytes": _placed("x" * 100_000, 0, 100),
    "metadata: the metadata as data": _placed(".metadata", 0, len(METADATA)),
    "metadata: a device": _placed("dev/zero", 0, 100),
    "metadata: an item at the end of numbers": _placed("__0_0.distcp", (1 << 62) - 200, 100),
    "metadata: an item that is cut short": _placed("__0_0.distcp", 0, len(ITEM) - 22),
    "metadata: an item that is too long": files(
        **{
            ".metadata": write_metadata(
                [
                    TensorRow(
                        "w",
                        "float32",
                        (4,),
                        [ChunkRow((0,), (4,), "__0_0.distcp", 0, len(ITEM) + 64)],
                    )
                ],
                planner_data=None,
            ),
            "__0_0.distcp": ITEM + bytes(64),
        }
    ),
    "metadata: an item of 2^61 bytes": _placed("__0_0.distcp", 0, 1 << 61),
    "metadata: a shape of 2^61": _chunked((1 << 59,), ((0,), (4,))),
    "metadata: a shape of 2^59 in one chunk": _chunked((1 << 59,), ((0,), (1 << 59,))),
    "metadata: chunks that overlap": _chunked((4,), ((0,), (4,)), ((0,), (4,))),
    "metadata: chunks that overlap in part and agree": _overlapping(2),
    "metadata: chunks that overlap in part and differ": _overlapping(9),
    "metadata: chunks with a hole": _chunked((1000, 1000), ((0, 0), (4, 4)), ((900, 900), (4, 4))),
    "metadata: 500 axes": _chunked((1,) * 500, ((0,) * 500, (1,) * 500)),
    "metadata: 5000 chunks that overlap": _chunked(
        (10_000,), *(((n,), (5000,)) for n in range(5000))
    ),
    "metadata: a stair of 1000 boxes": _chunked(
        (1000, 1000), *(((n, 0), (1, n + 1)) for n in range(1000))
    ),
    "metadata: no chunks": _chunked((4,)),
    "metadata: a key of escape sequences": _metadata(
        TensorRow("\x1b[2J\r\u202e", "float32", (4,), ROW.chunks)
    ),
    "metadata: a key with a surrogate": _metadata(TensorRow("\udc80", "float32", (4,), ROW.chunks)),
    "metadata: a key that climbs": _metadata(TensorRow("../../etc/x", "float32", (4,), ROW.chunks)),
    "metadata: an empty key": _metadata(TensorRow("", "float32", (4,), ROW.chunks)),
    "metadata: a terabyte of one string": _sparse_metadata,
    "metadata: an object of a terabyte": _sparse_object,
    "zip: a pickle of a terabyte": _sparse_zip,
    "zip: a deflated pickle of 2 MB": _deflated("data.pkl", b"\x80\x02", b"N0", 1 << 20, b"}."),
    "zip: a deflated pickle of lists": _deflated("data.pkl", b"\x80\x02(", b"]", 8 << 20, b"l."),
    "zip: a deflated storage of 64 MB": _deflated(
        "data/0",
        b"",
        bytes(1 << 20),
        64,
        **{
            "data.pkl": b"\x80\x02}X\x01\0\0\0w"
            + tensor_opcodes(b"J\0\0\0\x01\x85", b"K\x01\x85", b"J\0\0\0\x04")
            + b"s."
        },
    ),
    "zip: two pickles": torch_file(
        zipped({"data.pkl": b"\x80\x02}.", "data.pk2": b"\x80\x02}."}).replace(
            b"data.pk2", b"data.pkl"
        )
    ),
    "zip: a size that lies": _patched(
        PLAIN_TORCH, struct.pack("<II", 16, 16), struct.pack("<II", 1 << 31, 1 << 31)
    ),
    "zip: an offset that lies": torch_file(
        PLAIN_TORCH[:-6] + struct.pack("<I", 0xFFFFFF00) + PLAIN_TORCH[-2:]
    ),
    "zip: 20000 records": _many_records,
    "zip: a name of control characters": torch_file(torch_zip(b"\x80\x02}.", **{"\x1b[2J": b""})),
    "zip: a name that climbs": torch_file(torch_zip(b"\x80\x02}.", **{"../../x": b""})),
    "zip: TorchScript": torch_file(
        torch_zip(b"\x80\x02}.", **{"constants.pkl": b"\x80\x02" + CALL + b"."})
    ),
    "legacy: a terabyte of one string": _sparse_legacy,
    "tar": torch_file(bytes(257) + b"ustar" + bytes(600)),
    "tar: of torch 0.1, and runs code": torch_file(
        tarred(
            storages=b"\x80\x02K\0.", tensors=b"\x80\x02K\0.", pickle=b"\x80\x02" + RUN + b"\x85R."
        )
    ),
    "tar: sizes that lie": torch_file(
        tarred(storages=b"", pickle=b"").replace(b"00000000000\0", b"77777777777\0")
    ),
    "legacy: a stream that runs code": torch_file(LEGACY + b"\x80\x02" + RUN + b"\x85R.\x80\x02]."),
    "legacy: another spelling of the magic number, and runs code": torch_file(
        b"\x80\x02N0" + LEGACY[2:] + b"\x80\x02" + RUN + b"\x85R.\x80\x02]."
    ),
    "a bare pickle that runs code": torch_file(b"\x80\x02" + CALL + b"."),
    "a bare pickle that runs code of torch": torch_file(b"\x80\x02" + RUN + b"\x85R."),
    "a bare pickle of text that runs code": torch_file(CALL + b"."),
    "safetensors: a header of 100 MB of nothing": _sparse_safetensors,
    "safetensors: a header of 2^63": files(**{"model.safetensors": b"\xff" * 16}),
    "safetensors: brackets": files(
        **{"model.safetensors": safetensors(b'{"a":' + b"[" * 1_000_000)}
    ),
    "safetensors: brackets in an entry": files(
        **{"model.safetensors": safetensors(b'{"a":{"shape":' + b"[" * 10_000 + b"}}")}
    ),
    "safetensors: a number of 10000 digits": files(
        **{"model.safetensors": safetensors(HEADER.replace(b"[4]", b"[" + b"9" * 10_000 + b"]"))}
    ),
    "safetensors: an empty tensor of 2^62": files(
        **{
            "model.safetensors": safetensors(
                b'{"w":{"dtype":"F32","shape":[0,4611686018427387904],"data_offsets":[0,0]}}', b""
            )
        }
    ),
    "safetensors: many empty tensors": files(
        **{
            "model.safetensors": safetensors(
                b"{"
                + b",".join(
                    b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % n
                    for n in range(20_000)
                )
                + b"}",
                b"",
            )
        }
    ),
    "safetensors: a key of escape sequences": files(
        **{"model.safetensors": safetensors(HEADER.replace(b'"w"', b'"\\u001b[2J\\u202e"'))}
    ),
    "safetensors: a key with a surrogate": files(
        **{"model.safetensors": safetensors(HEADER.replace(b'"w"', b'"\\ud800"'))}
    ),
    "safetensors: 5000 axes": files(
        **{"model.safetensors": safetensors(HEADER.replace(b"[4]", b"[4" + b",1" * 5000 + b"]"))}
    ),
    "index: a path that climbs": _index(w="../../../etc/passwd.safetensors"),
    "index: an absolute path": _index(w="/etc/passwd.safetensors"),
    "index: 20000 files": _index(**{f"w{n}": f"m{n}.safetensors" for n in range(20_000)}),
    "index: names of control characters": _index(**{"\x1b[2J": "\x1b[2J\r.safetensors"}),
    "tracker: a path that climbs": _tracker("latest", "../../../../etc"),
    "tracker: an absolute path": _tracker("latest", "/etc"),
    "tracker: control characters": _tracker("latest", "\x1b[2J\x07"),
    "tracker: a number of 60 digits": _tracker("latest_checkpointed_iteration.txt", "9" * 60),
    "tracker: Arabic digits": _tracker("latest_checkpointed_iteration.txt", "\u0661"),
    "zarr: 2^60 chunks": _zarray(shape=[1 << 60], chunks=[1]),
    "zarr: a chunk of 2^60": _zarray(shape=[1 << 60], chunks=[1 << 59]),
    "zarr: 2^60 and no chunk": _zarray(shape=[0, 1 << 60], chunks=[1, 1]),
    "zarr: 64 axes of 2": _zarray(shape=[2] * 64, chunks=[1] * 64),
    "zarr: chunks of no elements": _zarray(chunks=[0]),
    "zarr: a negative shape": _zarray(shape=[-4]),
    "zarr: a filter that unpickles": _zarray(filters=[{"id": "pickle"}]),
    "zarr: a codec that unpickles": _zarray(
        compressor={"id": "pickle"}, filters=[{"id": "pickle"}]
    ),
    "zarr: objects that are unpickled": _zarray(dtype="|O"),
    "zarr: objects that are texts": _zarray(dtype="|O", filters=[{"id": "vlen-utf8"}]),
    "zarr: a dtype of control characters": _zarray(dtype="\x1b[2J"),
    "zarr: an array called by no text": _array_folder(b"\xff\xfe"),
    "zarr: an array called by control characters": _array_folder(b"\x1b[2J\n"),
    "zarr: links in all directions": _folders,
    "zarr: 1500 directories deep": _deep("zarr"),
    "zarr3: 1500 directories deep": _deep("zarr3"),
    "zarr3: a shard of 2^50 inner chunks": _zarr_json(
        shape=[1 << 50], chunk_grid=_grid(1 << 50), codecs=_sharding(1)
    ),
    "zarr3: a million shards in one file": _zarr_json(
        shape=[1 << 20], chunk_grid=_grid(1 << 20), codecs=_sharding(1)
    ),
    "zarr3: 2^60 chunks": _zarr_json(shape=[1 << 60], chunk_grid=_grid(1)),
    "zarr3: 60 axes of 2": _zarr_json(shape=[2] * 60, chunk_grid=_grid(*[1] * 60)),
    "zarr3: a gzip bomb": _bomb("gzip", gzip.compress(bytes(16 << 20), 1)),
    "zarr3: a zlib bomb": _bomb("zlib", _NULLS),
    "zarr3: a codec of control characters": _bomb("\x1b[2J", b""),
    "zarr3: a codec in shards that unpickles": _zarr_json(
        codecs=_sharding(1, codec="numcodecs.pickle")
    ),
    "zarr3: a codec that unpickles": _bomb("numcodecs.pickle", pickle.dumps(1)),
    "ocdbt: a count of 2^63": _ocdbt(b"\0\0" + bytes(16) + b"\0\0\0\0\0" + b"\xff" * 9 + b"\x01"),
    "ocdbt: no body": _ocdbt(b"\0\0"),
    "ocdbt: a bomb of zstd": _ocdbt(
        b"\0\1" + b"\x28\xb5\x2f\xfd\xa4\x00\x00\x00\x80" + b"\x02\x00\x10\x00" * 8000
    ),
    "megatron: a rank directory that is a file": files(
        **{"iter_0000001/mp_rank_00": b"x", "latest_checkpointed_iteration.txt": "1"}
    ),
    "megatron: a rank file that runs code": files(
        **{
            "iter_0000001/mp_rank_00/model_optim_rng.pt": torch_zip(
                b"\x80\x02}" + text("args") + CALL + b"s."
            ),
            "latest_checkpointed_iteration.txt": "1",
        }
    ),
    "megatron: rank numbers of 30 digits": files(
        **{f"iter_0000001/mp_rank_{'9' * 30}/model_optim_rng.pt": PLAIN_TORCH}
    ),
    "torch_dist: a backend that nobody knows": changed(
        "torch_dist", **{"metadata.json": '{"sharded_backend": "evil"}'}
    ),
    "torch_dist: a backend that is a path": changed(
        "torch_dist", **{"metadata.json": '{"sharded_backend": "../dcp"}'}
    ),
    "torch_dist: a backend that is a number": changed(
        "torch_dist", **{"metadata.json": '{"sharded_backend": 1}'}
    ),
    "dcp: a backend that nobody knows": changed(
        "dcp", **{"metadata.json": '{"sharded_backend": "evil"}'}
    ),
    "zarr: a backend that nobody knows": changed(
        "zarr", **{"metadata.json": '{"sharded_backend": "evil"}'}
    ),
    "torch_dist: a common state that runs code": changed(
        "torch_dist", **{"common.pt": torch_zip(b"\x80\x02}" + text("args") + CALL + b"s.")}
    ),
    "torch_dist: a common state that is a list": changed(
        "torch_dist", **{"common.pt": torch_zip(b"\x80\x02].")}
    ),
    "deepspeed: a model file that runs code": files(
        **{"mp_rank_00_model_states.pt": torch_zip(b"\x80\x02}" + text("module") + CALL + b"s.")}
    ),
    "a file called by no text": _named("dcp", b"\xff\xfe.distcp"),
    "a file called by control characters": _named("dcp", b"\x1b[2J\n\r.distcp"),
    "a safetensors file called by no text": _named("safetensors", b"\xff.safetensors"),
    "5000 files that nobody names": _many("dcp"),
    "1500 directories deep": _deep("dcp"),
    "a link to everything": added("dcp", "all", partial(_linked, "/")),
    "a link to itself": added("dcp", "loop", partial(_linked, ".")),
    "a fifo beside": added("dcp", "pipe", _fifo),
    "a fifo as a manifest": added("torch", "ckpt-manifest.json", _fifo),
    "a fifo as an integrity.json": added("torch_dist", "integrity.json", _fifo),
    "a terabyte as a manifest": added("torch", "ckpt-manifest.json", _sparse),
    "a terabyte as an integrity.json": added("torch_dist", "integrity.json", _sparse),
    "brackets as a manifest": changed("torch", **{"ckpt-manifest.json": b"[" * 1_000_000}),
    "a manifest that climbs": changed(
        "torch",
        **{
            "ckpt-manifest.json": '{"schema":"ckpt-manifest","version":1,"tool":"t","digest":null,'
            '"files":[{"path":"../../../etc/passwd","size":1,"crc32":null}],"arrays":[]}'
        },
    ),
    "an integrity.json that climbs": changed(
        "torch_dist", **{"integrity.json": '{"../../../etc/passwd": "00"}'}
    ),
    "nothing but an index": files(**{"model.safetensors.index.json": json.dumps(INDEX)}),
}

CASES: dict[str, Make] = {
    **{
        f"{kind}: {base} {name}": replaced(base, name, thing)
        for (kind, thing), (base, name) in product(THINGS.items(), PLACES)
    },
    **{f"pickle: {name}": pickled(data) for name, data in PICKLES.items()},
    **{
        f"pickle as metadata: {name}": changed("dcp", **{".metadata": data})
        for name, data in PICKLES.items()
    },
    **{f"pickle as object: {name}": as_object(data) for name, data in PICKLES.items()},
    **{
        f"JSON: {name} in {place}": changed(base, **{place: data})
        for (name, data), (base, place) in product(JSONS.items(), JSON_PLACES)
    },
    **OTHERS,
}
SOUND: dict[str, Make] = {f"sound {base}": changed(base) for base in BASES if base != "orbax"}
"""What the hostile ones are made of, which must be read."""
