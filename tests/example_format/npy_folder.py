"""A third party's format, written as docs/adding/format.md says: a folder of NumPy files and an
index.

::

    DIR/
    ├── index.json     {"format": "npy_folder", "tensors": {key: file}}
    └── 00000.npy …    one array each

Versions: .npy 1.0, as numpy 2 writes it. Not supported: bfloat16 and float8, which .npy cannot
    name; non-tensors.

Source: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

from __future__ import annotations

import ast
import json
from math import prod

from core.arrays.dtypes import DTYPES
from core.engine.catalog.catalog import Catalog, TargetCatalog, catalog_of_arrays
from core.engine.catalog.file_image import FileImage, PlacedArray, literal_file
from core.engine.catalog.stored import Extent, StoredArray
from core.errors import CorruptError, UnsupportedError
from core.files.store import ReadStore, check_name
from core.formats.format import Format

INDEX = "index.json"
_MAGIC = b"\x93NUMPY\x01\x00"
_CODES = {
    **{f"float{8 * n}": f"<f{n}" for n in (2, 4, 8)},
    **{f"int{8 * n}": f"<i{n}" if n > 1 else "|i1" for n in (1, 2, 4, 8)},
    **{f"uint{8 * n}": f"<u{n}" if n > 1 else "|u1" for n in (1, 2, 4, 8)},
    **{f"complex{8 * n}": f"<c{n}" for n in (8, 16)},
    "bool": "|b1",
}
_DTYPES = {code: name for name, code in _CODES.items()}


def sniff(store: ReadStore) -> bool:
    """Whether the directory has an index of this format."""
    if store.entry is not None or not store.exists(INDEX):
        return False
    return b'"npy_folder"' in store.read(INDEX, 0, min(store.size(INDEX), 64))


def read(store: ReadStore) -> Catalog:
    """The catalog of such a folder.

    Raises:
        CorruptError: the index or a header is malformed, or a file is too short.
    """
    try:
        files = dict(json.loads(store.read(INDEX, 0, store.size(INDEX)))["tensors"])
    except (ValueError, KeyError, TypeError, RecursionError) as err:
        raise CorruptError(
            f"not an index: {err!r}", file=INDEX, hint="copy the checkpoint again"
        ) from err
    arrays = {
        key: _array(store, key, check_name(name, found_in=INDEX)) for key, name in files.items()
    }
    return catalog_of_arrays(format="npy_folder", version="1", arrays=arrays)


def _array(store: ReadStore, key: str, name: str) -> StoredArray:
    head = store.read(name, 0, min(store.size(name), 1 << 12))
    n_header = int.from_bytes(head[8:10], "little")
    try:
        if head[:8] != _MAGIC:
            raise ValueError("not a .npy file of version 1.0")
        header = ast.literal_eval(head[10 : 10 + n_header].decode("latin-1").strip())
        dtype, shape = _DTYPES[header["descr"]], tuple(int(n) for n in header["shape"])
        is_fortran = header["fortran_order"]
        if min(shape, default=0) < 0 or is_fortran not in (True, False):
            raise ValueError(f"shape {shape}, fortran_order {is_fortran!r}")
    except (
        ValueError,
        KeyError,
        TypeError,
        SyntaxError,
        MemoryError,
        RecursionError,
        AttributeError,
    ) as err:
        raise CorruptError(
            f"not a header: {err!r}", file=name, key=key, hint="copy the checkpoint again"
        ) from err
    strides = tuple(prod(shape[:axis]) for axis in range(len(shape))) if is_fortran else None
    array = StoredArray(key, dtype, shape, Extent(name, 10 + n_header, strides))
    if 10 + n_header + array.n_bytes != store.size(name):
        raise CorruptError(
            f"the file has {store.size(name)} bytes, its header tells "
            f"{10 + n_header + array.n_bytes}",
            file=name,
            key=key,
            hint="copy the checkpoint again",
        )
    return array


def lay_out(target: TargetCatalog) -> list[FileImage]:
    """One file per tensor, the index last.

    Raises:
        UnsupportedError: a dtype that .npy cannot name.
    """
    files: dict[str, str] = {}
    images = []
    for number, (key, tensor) in enumerate(target.tensors.items()):
        if tensor.dtype not in _CODES:
            wide = DTYPES[tensor.dtype].kind == "float"
            raise UnsupportedError(
                f".npy has no {tensor.dtype}",
                key=key,
                hint=f"cast it: --dtype '{key}=float32'"
                if wide
                else f"leave it out: --exclude '{key}'",
            )
        array = target.whole_array(key)
        code = _CODES[tensor.dtype]
        text = f"{{'descr': '{code}', 'fortran_order': False, 'shape': {tensor.shape!r}, }}"
        text += " " * (-(len(text) + 11) % 64) + "\n"
        head = _MAGIC + len(text).to_bytes(2, "little") + text.encode("latin-1")
        files[key] = f"{number:05d}.npy"
        images.append(
            FileImage(
                files[key],
                len(head) + array.n_bytes,
                (PlacedArray(len(head), array),),
                lambda crc_of, head=head: [(0, head)],  # type: ignore[misc]
            )
        )
    index = json.dumps({"format": "npy_folder", "tensors": files}).encode()
    return [*images, literal_file(INDEX, index, is_metadata=True)]


FORMAT = Format(
    name="npy_folder",
    title="folder of NumPy files",
    sniff=sniff,
    read=read,
    lay_out=lay_out,
    aliases=("npy",),
    keeps_objects=False,
)
