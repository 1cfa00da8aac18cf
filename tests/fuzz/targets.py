"""What is fuzzed: readers of untrusted bytes, each a function that may raise nothing but the
project's errors.

``tests/fuzz`` runs them under hypothesis, ``scripts/fuzz`` under atheris. A target gets the bytes
of one file and reads them as the formats do; where a whole checkpoint can be made around that file,
it goes on to its tensors and objects.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from core.arrays.checksum import crc32c
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.decoded import DecodedStore
from core.errors import CheckpointingException
from core.files.json_object import parse_json_object
from core.files.store import MemoryStore
from core.formats.dcp import metadata as dcp_metadata
from core.formats.dcp.reading.catalog import build_catalog
from core.formats.format import Format
from core.formats.huggingface.index import read_index
from core.formats.mcore.metadata_json import read_metadata_json
from core.formats.ocdbt import nodes as ocdbt_nodes
from core.formats.ocdbt.nodes import MANIFEST_MAGIC, NODE_MAGIC, UnfoldBudget, ValueLocation
from core.formats.ocdbt.tree import TREE, leaves_of, read_tree
from core.formats.safetensors import format as safetensors
from core.formats.torch import format as torch_file
from core.formats.torch import legacy as torch_legacy
from core.formats.torch.item import TorchItem
from core.formats.torch.tensors import TensorHooks
from core.formats.zarr import format as zarr
from core.formats.zarr import format3 as zarr3
from core.opening.objects import loaded
from core.pickle.inert import TensorLeaf
from core.pickle.names import classify, globals_of
from core.pickle.reader import load
from core.pickle.writer import dumps
from core.publish.manifest.of_copy import MANIFEST, read_manifest
from core.publish.stage import journal
from core.verbs.inspect.preview import first_values
from core.verbs.inspect.summary import total_by_role

_MOST = 24
"""Tensors, and pieces of each, that are looked at."""
_SMALL = 1 << 20
"""Bytes above which the elements of an encoded array are not decoded."""


@dataclass(frozen=True, slots=True)
class Target:
    """One of them.

    Args:
        run: reads some bytes; an error of the project's tree is a fine result.
        seeds: patterns of real files, below a directory of checkpoints.
        made: seeds that no file is.
    """

    run: Callable[[bytes], None]
    seeds: tuple[str, ...] = ()
    made: tuple[bytes, ...] = ()


def survives(target: Target, data: bytes) -> CheckpointingException | None:
    """The error of the project's tree in which an input ends, or None; any other exception comes
    out.
    """
    try:
        target.run(data)
    except CheckpointingException as err:
        str(err)
        err.fields()
        return err
    return None


def _pickle(data: bytes) -> None:
    value = load(data, label="x.pkl")
    for name in globals_of(value):
        classify(name)
    with suppress(CheckpointingException):
        dumps(value)


def _torch_pickle(data: bytes) -> None:
    reader = TensorHooks()
    value = load(data, label="data.pkl", hooks=reader.hooks)
    assert all(leaf.key in reader.locations for leaf in _leaves(value))


def _leaves(value: object) -> Iterable[TensorLeaf]:
    from core.pickle.inert import walk

    return (node for node in walk(value) if isinstance(node, TensorLeaf))


def _torch(data: bytes) -> None:
    store = MemoryStore({"x.pt": data}, entry="x.pt")
    if torch_file.FORMAT.sniff(store):
        _explored(torch_file.FORMAT.read(store), store)


def _legacy(data: bytes) -> None:
    store = MemoryStore({"x.pt": data}, entry="x.pt")
    torch_legacy.pickle_end(store, "x.pt", 0, len(data))
    _torch(data)


def _item(data: bytes) -> None:
    """A DCP item, taken for tensors of several shapes."""
    from core.engine.catalog.stored import Extent, StoredArray

    store = MemoryStore({"__0_0.distcp": data})
    for dtype, shape in (
        ("float32", (4,)),
        ("bfloat16", (8, 32)),
        ("bfloat16", (32,)),
        ("float32", (64, 32)),
    ):
        late = StoredArray("w", dtype, shape, Extent("__0_0.distcp", 0, item=TorchItem(len(data))))
        with suppress(CheckpointingException):
            bound = late.locate(store)
            if bound.extent.strides is None:
                store.read("__0_0.distcp", bound.extent.offset, bound.n_bytes)


def _metadata(data: bytes) -> None:
    metadata = dcp_metadata._parse_by_machine(data, ".metadata").checked(".metadata")
    files = dict.fromkeys(metadata.files[:_MOST], b"")
    catalog = build_catalog(metadata, format="dcp")
    _explored(catalog, MemoryStore(files))


def _safetensors(data: bytes) -> None:
    store = MemoryStore({"x.safetensors": data}, entry="x.safetensors")
    if safetensors.FORMAT.sniff(store):
        _explored(safetensors.FORMAT.read(store), store)
    from core.formats.safetensors.header import read_header

    read_header(store, "x.safetensors")


def _zarray(data: bytes) -> None:
    """The metadata of an array with a few chunks, of one axis or of two."""
    for names in (("0", "1"), ("0.0", "0.1", "1.0", "1.1"), ("0.0.0",), ("0/0", "0/1")):
        _hierarchy(zarr.FORMAT, {"w/.zarray": data, **{f"w/{name}": bytes(16) for name in names}})


def _zarr_json(data: bytes) -> None:
    for names in (("c/0", "c/1"), ("c/0/0", "c/0/1", "c/1/0", "c/1/1"), ("c",), ("0.0",)):
        chunks = {f"w/{name}": bytes(16) for name in names}
        _hierarchy(
            zarr3.FORMAT,
            {"zarr.json": b'{"zarr_format":3,"node_type":"group"}', "w/zarr.json": data, **chunks},
        )


def _shard(data: bytes) -> None:
    """A shard, its index closed by a right checksum where it would be."""
    closed = data[:-4] + crc32c(data[-36:-4]).to_bytes(4, "little")
    for content in (data, closed):
        _hierarchy(
            zarr3.FORMAT,
            {"zarr.json": b'{"zarr_format":3,"node_type":"group"}', **_sharded(content)},
        )


def _sharded(content: bytes) -> dict[str, bytes]:
    metadata = (
        b'{"zarr_format":3,"node_type":"array","shape":[4],"data_type":"float32","fill_value":0,'
        b'"chunk_grid":{"name":"regular","configuration":{"chunk_shape":[4]}},'
        b'"chunk_key_encoding":{"name":"default","configuration":{"separator":"/"}},'
        b'"codecs":[{"name":"sharding_indexed","configuration":{"chunk_shape":[2],"codecs":[{"name":"bytes",'
        b'"configuration":{"endian":"little"}},{"name":"zstd"}],"index_codecs":[{"name":"bytes","configuration":'
        b'{"endian":"little"}},{"name":"crc32c"}],"index_location":"end"}}]}'
    )
    return {"w/zarr.json": metadata, "w/c/0": content}


def _chunk(data: bytes) -> None:
    """The stored bytes of a compressed chunk; the first byte chooses the codecs."""
    from core.engine.catalog.stored import Extent, StoredArray
    from core.formats.zarr.decode import ChunkCoding, EncodedChunk

    chains = (("gzip",), ("zlib",), ("bz2",), ("zstd",), ("zstd", "crc32c"), ("gzip", "zstd"), ())
    chain = chains[data[0] % len(chains)] if data else ()
    body = data[1:]
    if chain[-1:] == ("crc32c",):
        body += crc32c(body).to_bytes(4, "little")
    coding = ChunkCoding("float32", (4, 8), (1, 0), is_big_endian=True, codecs=chain)
    chunk = EncodedChunk(coding, len(body))
    dense = chunk.decode(
        MemoryStore({"c": body}), StoredArray("w", "float32", (4, 8), Extent("c", 0)), 0
    )
    assert len(dense) == 128


def _hierarchy(format: Format, files: dict[str, bytes]) -> None:
    store = MemoryStore(files)
    with suppress(CheckpointingException):
        _explored(format.read(store), store)


def _hf_index(data: bytes) -> None:
    store = MemoryStore(
        {"m.safetensors.index.json": data, "m-00001-of-00001.safetensors": b"\x02\0\0\0\0\0\0\0{}"}
    )
    read_index(store, "m.safetensors.index.json")
    _explored(safetensors.FORMAT.read(store), store)


def _json(data: bytes) -> None:
    parse_json_object(data, file="x.json")


def _config(data: bytes) -> None:
    read_metadata_json(MemoryStore({"metadata.json": data}))


def _tree(data: bytes) -> None:
    store = MemoryStore({TREE: data})
    leaves_of(store, "", read_tree(store, ""))


def _manifest(data: bytes) -> None:
    read_manifest(MemoryStore({MANIFEST: data}))


def _journal(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as file:
        file.write(b'{"journal":2,"plan":"p"}\n' + data)
        file.flush()
        file_journal = journal.FileJournal(Path(file.name), "p", sync=lambda names: None)
        for item in range(4):
            file_journal.done((0, item))
        file_journal.close()


def _ocdbt(data: bytes) -> None:
    """A manifest or node around a body, its length and checksum right: the first byte says
    which.
    """
    if not data:
        return
    kind, body = data[0], data[1:]
    magic = NODE_MAGIC if kind & 1 else MANIFEST_MAGIC
    head = magic.to_bytes(4, "big") + (12 + len(body) + 4).to_bytes(8, "little")
    node = head + body
    node += crc32c(node).to_bytes(4, "little")
    budget = UnfoldBudget(1 << 20)
    budget.earn(len(node))
    if kind & 1:
        ocdbt_nodes.parse_node(node, ValueLocation("", "d/0", 0, len(node)), kind >> 1 & 1, budget)
    else:
        ocdbt_nodes.parse_newest_version(node, budget)


def _explored(catalog: Catalog, store: MemoryStore) -> None:
    """Looks at everything that a catalog promises, as the commands would."""
    total_by_role(catalog.tensors)
    for name in globals_of([item.value for item in catalog.objects.values()]):
        classify(name)
    for key in islice(catalog.tensors, _MOST):
        try:
            _explored_tensor(catalog, store, key)
        except CheckpointingException as err:
            str(err)
    loaded(catalog, store)


def _explored_tensor(catalog: Catalog, store: MemoryStore, key: str) -> None:
    pieces = catalog.fragments(key)
    decoded = DecodedStore(store)
    for piece in pieces[:_MOST]:
        if piece.array is None:
            continue
        array = piece.array.locate(store)
        extent = array.extent
        assert extent.item is None
        if extent.encoding is None and extent.strides is None and array.n_bytes < _SMALL:
            store.read(extent.file, extent.offset, array.n_bytes)
        elif extent.encoding is not None and extent.encoding.unit_bytes < _SMALL:
            extent.encoding.decode(decoded, array, 0)
    first_values(store, catalog, key, 4)


def _varints(*numbers: int) -> bytes:
    digits = bytearray()
    for number in numbers:
        while number > 127:
            digits.append(number & 127 | 128)
            number >>= 7
        digits.append(number)
    return bytes(digits)


TARGETS: dict[str, Target] = {
    "pickle": Target(
        _pickle, (".metadata",), (b"\x80\x04]\x94.", b"cos\nsystem\n(S'id'\ntR.", b"(lp0\nI1\na.")
    ),
    "torch_pickle": Target(_torch_pickle, ("data.pkl",)),
    "zip": Target(_torch, ("*.pt", "*.bin")),
    "legacy": Target(_legacy, ("*legacy*.pt",)),
    "dcp_item": Target(_item, ()),
    "dcp_metadata": Target(_metadata, (".metadata",)),
    "safetensors": Target(_safetensors, ("*.safetensors",)),
    "zarr2": Target(_zarray, (".zarray",)),
    "zarr3": Target(_zarr_json, ("zarr.json",)),
    "zarr_shard": Target(_shard, (), (bytes(40), bytes(16) + b"\0" * 8 + b"\x08" + b"\0" * 27)),
    "zarr_chunk": Target(
        _chunk, (), (b"\0\x1f\x8b\x08", b"\1x\x9c\x03\0\0\0\0\1", b"\2BZh9", b"\3\x28\xb5\x2f\xfd")
    ),
    "index_json": Target(_hf_index, ("*.index.json",)),
    "json": Target(_json, ("config.json", "metadata.json"), (b'{"a":' * 40,)),
    "mcore_config": Target(_config, ("metadata.json",)),
    "orbax_tree": Target(_tree, ("_METADATA",)),
    "manifest": Target(
        _manifest,
        (),
        (b'{"schema":"ckpt-manifest","version":1,"digest":null,"files":[],"arrays":[]}',),
    ),
    "journal": Target(
        _journal, (), (b'{"items":[[0,0,[["w",0,4,7]],[["f","w",4,7,0,0,4,7]]]]}\n',)
    ),
    "ocdbt": Target(
        _ocdbt,
        ("manifest.ocdbt",),
        (b"\0\0\0" + bytes(16) + _varints(0, 1024, 100000), b"\1\0\0\0\0\1\1"),
    ),
}
