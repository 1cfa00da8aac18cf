"""core.formats.dcp.metadata: columns of a .metadata, by two readers that agree, and a writer that
torch reads.
"""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.arrays.box import Box
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    TruncatedError,
    UnsafeError,
    UnsupportedError,
)
from core.formats.dcp import metadata as dcp_metadata
from core.formats.dcp.metadata import DcpItem, DcpMetadata, parse_metadata
from core.formats.dcp.metadata_writer import ChunkRow, ObjectRow, TensorRow, write_metadata
from core.pickle.inert import Global, Inert
from core.pickle.noted import noting_uses
from core.pickle.reader import load
from core.pickle.uses import Use
from core.pickle.writer import dumps
from tests.support.rounds import rounds

METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"


def by_machine(data: bytes) -> DcpMetadata:
    return dcp_metadata._parse_by_machine(data, ".metadata").checked(".metadata")


def by_c(data: bytes) -> DcpMetadata | None:
    """What the C unpickler finds, in this process: only for data that this test made."""
    return dcp_metadata._unpack(dcp_metadata.pack_metadata(data)).checked("x")


def metadata_files(golden: Path) -> list[Path]:
    paths = sorted(golden.rglob(".metadata"))
    assert paths
    return paths


def rows_of(metadata: DcpMetadata) -> Iterator[TensorRow | ObjectRow]:
    """What writes the same metadata again."""
    for key, tensor in metadata.tensors.items():
        chunks = [
            ChunkRow(chunk.box.offset, chunk.box.shape, *chunk.item)
            for chunk in metadata.chunks(key)
        ]
        yield TensorRow(key, tensor.dtype, tensor.shape, chunks, tensor.requires_grad)
    for key, item in metadata.objects.items():
        yield ObjectRow(key, *item)


# A small checkpoint as torch would describe it, in inert objects that a test can damage


def record(name: str, state: object, module: str = METADATA) -> Inert:
    inert = Inert("newobj", Global(module, name))
    if state is not None:
        inert.state = state
    return inert


def properties(
    dtype: str = "bfloat16", module: str = METADATA, layout: str = "torch.strided"
) -> Inert:
    encoding = "_MEM_FORMAT_ENCODING" if module == METADATA else "MEM_FORMAT_ENCODING"
    shown = Inert("reduce", Global("torch.serialization", "_get_layout"), (layout,))
    memory_format = Inert("reduce", Global(module, encoding), (0,))
    return record(
        "TensorProperties", (Global("torch", dtype), shown, False, memory_format, False), module
    )


def chunk(offsets: object, sizes: object) -> Inert:
    return record("ChunkStorageMetadata", {"offsets": offsets, "sizes": sizes})


def index(fqn: object, offset: object, number: int | None = None) -> Inert:
    return record(
        "MetadataIndex",
        {"fqn": fqn, "index": number} | ({} if offset is None else {"offset": offset}),
    )


def info(path: object, offset: object, length: object, **more: object) -> Inert:
    return record(
        "_StorageInfo",
        {"relative_path": path, "offset": offset, "length": length, **more},
        FILESYSTEM,
    )


def small() -> dict[str, Any]:
    """The attributes of a Metadata with a tensor of two chunks and an object."""
    tensor = record(
        "TensorStorageMetadata",
        {
            "properties": properties(),
            "size": (4, 6),
            "chunks": [chunk((0, 0), (2, 6)), chunk((2, 0), (2, 6))],
        },
    )
    return {
        "state_dict_metadata": {"w": tensor, "step": record("BytesStorageMetadata", None)},
        "planner_data": {"w": ("w",), "step": ("step",)},
        "storage_data": {
            index("w", (0, 0), 0): info("__0_0.distcp", 100, 24),
            index("w", (2, 0), 1): info("__1_0.distcp", 0, 24),
            index("step", None): info("__0_0.distcp", 0, 100),
        },
        "storage_meta": record(
            "StorageMeta", {"checkpoint_id": None, "save_id": "x", "load_id": None, "modules": []}
        ),
        "version": "1.0.0",
    }


def pickled(state: object, name: str = "Metadata", module: str = METADATA) -> bytes:
    return dumps(record(name, state, module))


def test_the_columns_say_where_every_chunk_lies() -> None:
    for read in (by_machine, by_c):
        metadata = read(pickled(small()))
        assert metadata is not None
        tensor = metadata.tensors["w"]
        assert (tensor.dtype, tensor.shape, tensor.requires_grad, tensor.n_chunks) == (
            "bfloat16",
            (4, 6),
            False,
            2,
        )
        assert list(metadata.chunks("w")) == [
            (Box((0, 0), (2, 6)), DcpItem("__0_0.distcp", 100, 24)),
            (Box((2, 0), (2, 6)), DcpItem("__1_0.distcp", 0, 24)),
        ]
        assert metadata.objects == {"step": DcpItem("__0_0.distcp", 0, 100)}
        assert metadata.planner_data == {"w": ("w",), "step": ("step",)}
        assert (metadata.version, metadata.extras, metadata.orphans, metadata.mcore_data) == (
            "1.0.0",
            (),
            (),
            None,
        )


# Real files


def test_both_readers_agree_on_every_golden_checkpoint(golden: Path) -> None:
    paths = metadata_files(golden)
    assert len(paths) >= 10
    for path in paths:
        data = path.read_bytes()
        metadata = by_machine(data)
        assert metadata == by_c(data), path
        assert metadata.tensors
        assert sum(tensor.n_chunks for tensor in metadata.tensors.values()) == len(
            metadata.item_offset
        )
        for file in metadata.files:
            assert (path.parent / file).is_file()
        for item in (
            *(chunk.item for key in metadata.tensors for chunk in metadata.chunks(key)),
            *metadata.objects.values(),
        ):
            assert item.offset + item.n_bytes <= (path.parent / item.file).stat().st_size


@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux")
def test_the_contained_reader_gives_what_the_other_gives(golden: Path) -> None:
    """It gives nothing, and every large .metadata is read slowly, if its imports need another
    package.
    """
    data = max((path.read_bytes() for path in metadata_files(golden)), key=len)
    metadata = dcp_metadata._parse_by_c(data)
    if metadata is None:
        pytest.skip("another thread runs in this test process")
    assert metadata.checked("x") == by_machine(data)


def test_megatrons_additions_are_kept_or_named(golden: Path) -> None:
    dialects = {
        "mcore0121_torch_dist": True,
        "mcore0161_torch_dist": False,
        "mcore_torch_dist": False,
    }
    for family, has_mcore_data in dialects.items():
        paths = metadata_files(golden / family)
        assert paths
        for path in paths:
            metadata = parse_metadata(path.read_bytes(), label=".metadata")
            assert (metadata.mcore_data is not None) is has_mcore_data
            assert "all_local_plans" in metadata.extras
            assert metadata.planner_data is None
            assert any("/shard_" in key for key in metadata.objects)


def test_the_columns_equal_what_torch_reads(golden: Path) -> None:
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    paths = metadata_files(golden / "torch_dcp")
    assert paths
    for path in paths:
        metadata = parse_metadata(path.read_bytes(), label=".metadata")
        same_as_torch(metadata, checkpoint.FileSystemReader(path.parent).read_metadata())


def same_as_torch(metadata: DcpMetadata, wanted: Any) -> None:
    """Compares columns with torch's own objects."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    assert {*metadata.tensors, *metadata.objects} == set(wanted.state_dict_metadata)
    assert (metadata.planner_data, metadata.version) == (wanted.planner_data, wanted.version)
    for key, entry in wanted.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            stored = wanted.storage_data[MetadataIndex(key)]
            assert metadata.objects[key] == (stored.relative_path, stored.offset, stored.length)
            continue
        tensor = metadata.tensors[key]
        assert (f"torch.{tensor.dtype}", tensor.shape) == (
            str(entry.properties.dtype),
            tuple(entry.size),
        )
        assert tensor.requires_grad == entry.properties.requires_grad
        pairs = list(zip(metadata.chunks(key), entry.chunks, strict=True))
        for number, (ours, theirs) in enumerate(pairs):
            assert (ours.box.offset, ours.box.shape) == (tuple(theirs.offsets), tuple(theirs.sizes))
            stored = wanted.storage_data[MetadataIndex(key, theirs.offsets, number)]
            assert ours.item == (stored.relative_path, stored.offset, stored.length)


def test_files_of_old_torch_versions_are_read() -> None:
    state = small()
    del state["storage_meta"], state["version"]
    state["state_dict_metadata"]["w"].state["properties"] = properties(
        module="torch.distributed._shard.sharded_tensor.metadata"
    )
    for item in state["storage_data"]:
        item.state.pop("index")
    old = dumps(record("Metadata", state)).replace(
        METADATA.encode(), b"torch.distributed._shard.checkpoint.metadata"
    )
    for data in (dumps(record("Metadata", state)), old):
        for read in (by_machine, by_c):
            metadata = read(data)
            assert metadata is not None
            assert metadata.version is None
            assert metadata.tensors["w"].n_chunks == 2


def test_properties_may_have_more_members_than_five() -> None:
    state = small()
    tensor_properties = state["state_dict_metadata"]["w"].state["properties"]
    tensor_properties.state = (*tensor_properties.state, (6, 1))
    assert by_machine(pickled(state)).tensors["w"].dtype == "bfloat16"


def test_a_root_class_of_megatron_is_metadata_too() -> None:
    module = "megatron.core.dist_checkpointing.strategies.torch"
    metadata = by_machine(
        pickled({**small(), "mcore_data": {"w": {"x": (1, 2)}}}, "MCoreMetadata", module)
    )
    assert metadata.mcore_data == {"w": {"x": (1, 2)}}


def test_planner_data_of_another_planner_is_named_not_guessed() -> None:
    for planner_data in ("text", {"w": "no path"}, {"w": ("a", 1.5)}):
        metadata = by_machine(pickled({**small(), "planner_data": planner_data}))
        assert metadata.planner_data is None
        assert metadata.extras == ("planner_data",)


def test_items_that_nothing_refers_to_are_named() -> None:
    state = small()
    state["storage_data"][index("gone", (0, 0))] = info("__0_0.distcp", 7, 7)
    state["storage_data"][index("w", (1, 0))] = info("__0_0.distcp", 7, 7)
    state["storage_data"][index("lost", None)] = info("__0_0.distcp", 7, 7)
    assert by_machine(pickled(state)).orphans == ("gone", "lost", "w")


def test_scalars_and_empty_shards_are_fine() -> None:
    state = small()
    state["state_dict_metadata"]["scalar"] = record(
        "TensorStorageMetadata",
        {"properties": properties("int64"), "size": (), "chunks": [chunk((), ())]},
    )
    state["storage_data"][index("scalar", ())] = info("__1_0.distcp", 24, 9)
    state["state_dict_metadata"]["w"].state["chunks"].append(chunk((4, 0), (0, 6)))
    for read in (by_machine, by_c):
        metadata = read(pickled(state))
        assert metadata is not None
        assert metadata.tensors["w"].n_chunks == 2
        assert list(metadata.chunks("scalar")) == [(Box((), ()), DcpItem("__1_0.distcp", 24, 9))]


# What is refused


def edit_w(**changes: object) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["state_dict_metadata"]["w"].state.update(changes)


def edit_chunk(**changes: object) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["state_dict_metadata"]["w"].state["chunks"][1].state.update(changes)


def edit_info(**changes: object) -> Callable[[dict[str, Any]], None]:
    return lambda state: list(state["storage_data"].values())[1].state.update(changes)


def edit_index(**changes: object) -> Callable[[dict[str, Any]], None]:
    return lambda state: list(state["storage_data"])[1].state.update(changes)


def replace_storage(value: object) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["storage_data"].update({next(iter(state["storage_data"])): value})


def laughs() -> object:
    nested: object = ()
    for _ in range(60):
        nested = (nested, nested)
    return nested


HUGE = 10**5000
FAULTS: list[tuple[Callable[[dict[str, Any]], Any], type[CheckpointingException], str]] = [
    (
        edit_chunk(offsets=(3, 0)),
        CorruptError,
        r"size \(2, 6\) at \(3, 0\) exceeds the tensor's shape \(4, 6\)",
    ),
    (edit_chunk(offsets=(2, -1)), CorruptError, "exceeds the tensor's shape"),
    (edit_chunk(sizes=(2, -6)), CorruptError, "exceeds the tensor's shape"),
    (edit_chunk(sizes=(2, 7)), CorruptError, "exceeds the tensor's shape"),
    (edit_chunk(sizes=(12,)), CorruptError, "exceeds the tensor's shape"),
    (edit_chunk(offsets=(2, 0, 0)), CorruptError, "exceeds the tensor's shape"),
    (edit_chunk(offsets=[2, 0]), CorruptError, "exceeds the tensor's shape"),
    (edit_chunk(offsets=(2.0, 0)), CorruptError, "a chunk is malformed"),
    (edit_chunk(offsets=("2", 0)), CorruptError, "a chunk is malformed"),
    (edit_chunk(offsets=None), CorruptError, "a chunk is malformed"),
    (edit_chunk(sizes=(HUGE, 6)), CorruptError, "huge number"),
    (edit_chunk(offsets=laughs()), CorruptError, "exceeds the tensor|a chunk is malformed"),
    (edit_chunk(offsets=(laughs(), 0)), CorruptError, "a chunk is malformed"),
    (
        edit_chunk(offsets=(1, 0)),
        MissingShardError,
        r"has no item for the chunk of size \(2, 6\) at \(1, 0\)",
    ),
    (edit_w(size=(-4, 6)), CorruptError, "is invalid"),
    (edit_w(size=(4, 6.0)), CorruptError, "is invalid"),
    (edit_w(size=laughs()), CorruptError, "is invalid"),
    (edit_w(size=(2**40, 2**40)), CorruptError, "more elements"),
    (edit_w(size=[4, 6]), CorruptError, "size or chunks"),
    (edit_w(chunks=None), CorruptError, "size or chunks"),
    (edit_w(chunks=[3]), CorruptError, "one of the tensor's chunks has the type"),
    (edit_w(properties=None), CorruptError, "properties are missing"),
    (edit_w(properties=record("TensorProperties", None)), CorruptError, "properties are missing"),
    (edit_w(properties=properties("qint8")), UnsupportedError, "qint8"),
    (edit_w(properties=properties("load")), UnsupportedError, "load"),
    (
        edit_w(properties=properties(layout="torch.sparse_coo")),
        UnsupportedError,
        "torch.sparse_coo",
    ),
    (
        edit_w(properties=record("TensorProperties", (Global("os", "float32"), None, 0))),
        CorruptError,
        "dtype",
    ),
    (edit_info(relative_path="../../etc/passwd"), UnsafeError, r"\.\./\.\./etc/passwd"),
    (edit_info(relative_path="/etc/passwd"), UnsafeError, "/etc/passwd"),
    (edit_info(relative_path=laughs()), CorruptError, "a name that is not a string"),
    (edit_info(relative_path=None), CorruptError, "a name that is not a string"),
    (edit_info(offset=-1), CorruptError, "impossible position"),
    (edit_info(offset=1.5), CorruptError, "impossible position"),
    (edit_info(offset=2**63), CorruptError, "impossible position"),
    (edit_info(length=0), CorruptError, "is 0 bytes long"),
    (edit_info(length=HUGE), CorruptError, "impossible position"),
    (edit_info(transform_descriptors=["stream.lz4/1"]), UnsupportedError, "stream.lz4/1"),
    (
        edit_info(transform_descriptors=["stream.zstd/1", "stream.zstd/2"]),
        UnsupportedError,
        "stream.zstd/2",
    ),
    (edit_info(transform_descriptors=["stream.zstd/1"] * 9), UnsupportedError, "stream.zstd/1"),
    (
        edit_info(transform_descriptors="stream.zstd/1"),
        CorruptError,
        "an item has invalid transforms",
    ),
    (edit_info(transform_descriptors=[3]), CorruptError, "an item has invalid transforms"),
    (edit_info(transform_descriptors=laughs()), CorruptError, "an item has invalid transforms"),
    (edit_index(fqn=3), CorruptError, "a name that is not a string"),
    (edit_index(offset=3), CorruptError, "an item has an invalid offset: 3"),
    (edit_index(offset=(laughs(),)), CorruptError, "an item has an invalid offset:"),
    (edit_index(offset=None), MissingShardError, "storage_data has no item"),
    (
        replace_storage(record("_HFStorageInfo", {}, "torch.distributed.checkpoint._hf_utils")),
        UnsupportedError,
        "Hugging Face",
    ),
    (
        replace_storage(record("_HFStorageInfo", {}, "torch.distributed.checkpoint.hf_storage")),
        UnsupportedError,
        "Hugging Face",
    ),
    (replace_storage(record("Info", {}, "their.storage")), UnsupportedError, "their.storage.Info"),
    (
        replace_storage(record("_StorageInfo", None, FILESYSTEM)),
        CorruptError,
        "an entry of storage_data",
    ),
    (
        replace_storage(record("_StorageInfo", {}, FILESYSTEM)),
        CorruptError,
        "an entry of storage_data",
    ),
    (
        replace_storage(record("_StorageInfo", [1], FILESYSTEM)),
        CorruptError,
        "an entry of storage_data",
    ),
    (
        lambda state: state["storage_data"].popitem(),
        MissingShardError,
        "storage_data has no item for the object",
    ),
    (lambda state: state.pop("storage_data"), CorruptError, "storage_data"),
    (lambda state: state.update(storage_data=None), CorruptError, "storage_data"),
    (lambda state: state.pop("state_dict_metadata"), CorruptError, "state_dict_metadata"),
    (
        lambda state: state["state_dict_metadata"].update({3: None}),
        CorruptError,
        "has the type int",
    ),
    (lambda state: state["state_dict_metadata"].update(x=None), UnsupportedError, "NoneType"),
    (
        lambda state: state["state_dict_metadata"].update(x=record("Thing", {}, "m")),
        UnsupportedError,
        "m.Thing",
    ),
]


@pytest.mark.parametrize(("damage", "error", "match"), FAULTS)
def test_what_cannot_be_is_refused_by_both_readers(
    damage: Callable[[dict[str, Any]], Any], error: type[CheckpointingException], match: str
) -> None:
    state = small()
    damage(state)
    data = pickled(state)
    with pytest.raises(error, match=match) as caught:
        parse_metadata(data, label=".metadata")
    assert caught.value.file == ".metadata"
    with pytest.raises(Exception):  # noqa: B017
        by_c(data)


def test_the_tensor_is_named() -> None:
    state = small()
    edit_chunk(offsets=(1, 0))(state)
    with pytest.raises(MissingShardError) as caught:
        by_machine(pickled(state))
    assert caught.value.key == "w"


def test_transforms_are_told_apart_by_item() -> None:
    state = small()
    items = list(state["storage_data"].values())
    items[1].state.update(transform_descriptors=["stream.zstd/1.2", "stream.zstd/1"])
    items[2].state.update(transform_descriptors=["stream.zstd/1"])
    for read in (by_machine, by_c):
        metadata = read(pickled(state))
        assert metadata is not None
        assert metadata.descriptors == {1: ("stream.zstd/1.2", "stream.zstd/1")}
        assert metadata.object_descriptors == {"step": ("stream.zstd/1",)}


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", TruncatedError),
        (b"\x80\x02", TruncatedError),
        (b"hello", CorruptError),
        (pickle.dumps({"a": 1}), CorruptError),
        (dumps(record("Metadata", None)), CorruptError),
        (dumps(record("Metadata", [1])), CorruptError),
        (dumps(record("Thing", {}, "m")), CorruptError),
        (dumps(Inert("reduce", Inert("reduce", Global("m", "f")))), CorruptError),
        (pickled(small()) + b"x", CorruptError),
        (pickled(small())[:-30], CorruptError),
    ],
)
def test_what_is_no_metadata_is_an_error(data: bytes, error: type[CheckpointingException]) -> None:
    with pytest.raises(error):
        parse_metadata(data, label=".metadata")


@settings(max_examples=rounds(800), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_files_give_columns_or_the_projects_error(data: st.DataObject) -> None:
    raw = bytearray(pickled(small()))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        by_machine(bytes(raw))
    except CheckpointingException as err:
        str(err)


# The contained reader on hostile files


@cache
def large(n_tensors: int = 6000) -> bytes:
    """A metadata file that is worth a child process."""
    rows = (
        TensorRow(
            f"model.layers.{number}.weight",
            "float32",
            (64, 8),
            [
                ChunkRow((start, 0), (16, 8), f"__{start // 16}_0.distcp", number * 1000, 900)
                for start in (0, 16, 32, 48)
            ],
        )
        for number in range(n_tensors)
    )
    data = write_metadata(
        rows, planner_data={f"model.layers.{i}.weight": ("model", i) for i in range(n_tensors)}
    )
    assert len(data) > dcp_metadata.FAST_FROM_BYTES
    return data


def with_prefix(data: bytes, prefix: bytes) -> bytes:
    """A pickle that does something else first."""
    return data[:2] + prefix + b"0" + data[2:]


def test_a_large_file_is_read_alike_by_both() -> None:
    data = large()
    metadata = dcp_metadata._parse_by_c(data)
    columns = by_machine(data)
    assert metadata is None or metadata.checked("x") == columns
    assert by_c(data) == columns == parse_metadata(data, label="x")
    assert len(columns.item_offset) == 24_000


def test_a_command_in_a_large_file_is_not_run_by_either_reader(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    call = (
        b"cposix\nsystem\nX"
        + len(f"touch {marker}").to_bytes(4, "little")
        + f"touch {marker}".encode()
        + b"\x85R"
    )
    data = with_prefix(large(), call)
    with noting_uses() as uses:
        assert len(parse_metadata(data, label="x").tensors) == 6000
    assert Use(Global("posix", "system"), "called") in uses
    assert dcp_metadata._unpack(dcp_metadata.pack_metadata(data)) is None, (
        "a name that is no record's is left to the reader that knows what is done with it"
    )
    assert not marker.exists()
    subprocess.run(
        [sys.executable, "-c", "import pickle,sys; pickle.loads(sys.stdin.buffer.read())"],
        input=call + b".",
        check=True,
    )
    assert marker.exists()


ATTACKS = {
    "memo index": b"Nr\xff\xff\xff\x7f",
    "tuple depth": b"})" + b"\x85" * 1_000_000 + b"Ns",
    "hash": b"})"
    + b"".join(
        b"r"
        + (10**6 + i).to_bytes(4, "little")
        + b"j"
        + (10**6 + i).to_bytes(4, "little")
        + b"\x86"
        for i in range(60)
    )
    + b"Ns",
    "bytearray": b"\x96" + (1 << 60).to_bytes(8, "little"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_kills_the_c_unpickler_kills_only_the_child(attack: str, repo_dir: Path) -> None:
    code = (
        "import sys\n"
        "from core.formats.dcp import metadata as m\n"
        "from core.errors import CheckpointingException\n"
        "data = sys.stdin.buffer.read()\n"
        "print(m._parse_by_c(data))\n"
        "try:\n"
        "    print(len(m._parse_by_machine(data, 'x').checked('x').tensors))\n"
        "except CheckpointingException as err:\n"
        "    print(type(err).__name__)\n"
        # Not getrusage: what it states outlives exec, so it may be the peak of the test's own
        # process.
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "assert int(peak.split()[1]) < 400_000, peak\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=with_prefix(large(), ATTACKS[attack]),
        cwd=repo_dir,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    outcomes = done.stdout.decode().split()
    assert outcomes[0] == "None"
    assert outcomes[1] in {"memo": {"6000"}}.get(attack.split()[0], {"UnsafeError"})


# Writing


def test_torch_reads_what_is_written_field_by_field(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    def tensor(dtype: Any, size: tuple[int, ...], *boxes: Any) -> TensorStorageMetadata:
        chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(extent)) for at, extent in boxes]
        return TensorStorageMetadata(TensorProperties(dtype), torch.Size(size), chunks)

    wanted = Metadata(
        state_dict_metadata={
            "model.w": tensor(torch.bfloat16, (4, 6), ((0, 0), (2, 6)), ((2, 0), (2, 6))),
            "step": BytesStorageMetadata(),
            "offset": tensor(torch.float32, (), ((), ())),
            "sizes": tensor(torch.uint8, (2, 1, 1, 3, 1), ((0, 0, 0, 0, 0), (2, 1, 1, 3, 1))),
            "__0_0.distcp": tensor(torch.float8_e4m3fn, (70_000,), ((0,), (70_000,))),
            "none": tensor(torch.int64, (0,)),
        },
        planner_data={"model.w": ("model", "w"), "step": ("step",), "list.0": ("list", 0)},
        storage_data={
            MetadataIndex("model.w", (0, 0), 0): _StorageInfo("__0_0.distcp", 0, 900),
            MetadataIndex("model.w", (2, 0), 1): _StorageInfo("__1_0.distcp", 2**40, 901),
            MetadataIndex("step"): _StorageInfo("__0_0.distcp", 960, 300),
            MetadataIndex("offset", (), 0): _StorageInfo("__0_0.distcp", 2000, 700),
            MetadataIndex("sizes", (0, 0, 0, 0, 0), 0): _StorageInfo("sub/__0_0.distcp", 0, 800),
            MetadataIndex("__0_0.distcp", (0,), 0): _StorageInfo("__0_0.distcp", 3000, 70_900),
        },
        storage_meta=StorageMeta(),
        version="1.0.0",
    )
    rows = []
    for key, entry in wanted.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            stored = wanted.storage_data[MetadataIndex(key)]
            rows.append(ObjectRow(key, stored.relative_path, stored.offset, stored.length))
            continue
        chunks = []
        for piece in entry.chunks:
            stored = wanted.storage_data[MetadataIndex(key, piece.offsets)]
            chunks.append(
                ChunkRow(
                    tuple(piece.offsets),
                    tuple(piece.sizes),
                    stored.relative_path,
                    stored.offset,
                    stored.length,
                )
            )
        rows.append(
            TensorRow(key, str(entry.properties.dtype)[6:], tuple(entry.size), iter(chunks))
        )
    data = write_metadata(iter(rows), planner_data=wanted.planner_data)
    (tmp_path / ".metadata").write_bytes(data)
    reader = checkpoint.FileSystemReader(tmp_path)
    metadata = reader.read_metadata()
    metadata.storage_meta.load_id = None
    assert metadata == wanted
    assert list(metadata.state_dict_metadata) == list(wanted.state_dict_metadata)
    assert {key: (key.index, value) for key, value in metadata.storage_data.items()} == {
        key: (key.index, value) for key, value in wanted.storage_data.items()
    }
    for entry in metadata.state_dict_metadata.values():
        if not isinstance(entry, BytesStorageMetadata):
            assert type(entry.size) is torch.Size
            assert all(
                type(part.offsets) is type(part.sizes) is torch.Size for part in entry.chunks
            )
    same_as_torch(parse_metadata(data, label="x"), wanted)


def test_every_golden_metadata_is_rewritten_and_read_alike(golden: Path) -> None:
    for path in metadata_files(golden):
        metadata = by_machine(path.read_bytes())
        attributes = {} if metadata.mcore_data is None else {"mcore_data": metadata.mcore_data}
        data = write_metadata(
            rows_of(metadata), planner_data=metadata.planner_data, attributes=attributes
        )
        again = by_machine(data)
        assert list(again.tensors) == list(metadata.tensors)
        assert {key: list(again.chunks(key)) for key in again.tensors} == {
            key: list(metadata.chunks(key)) for key in metadata.tensors
        }
        assert (again.tensors, again.objects) == (metadata.tensors, metadata.objects)
        assert (again.planner_data, again.mcore_data) == (
            metadata.planner_data,
            metadata.mcore_data,
        )
        assert (again.extras, again.version) == ((), "1.0.0")
        assert (
            write_metadata(rows_of(again), planner_data=again.planner_data, attributes=attributes)
            == data
        )


def test_no_path_of_this_machine_and_no_random_id_is_written() -> None:
    data = large(4000)
    assert data == large(4000)
    tree: Any = load(data, label="x")
    assert tree.state["storage_meta"].state == {
        "checkpoint_id": None,
        "save_id": None,
        "load_id": None,
        "modules": [],
    }
    assert os.getcwd().encode() not in data


def test_an_empty_checkpoint_can_be_written() -> None:
    data = write_metadata((), planner_data=None)
    metadata = by_machine(data)
    assert (metadata.tensors, metadata.objects, metadata.planner_data) == ({}, {}, None)
    assert pickle.Unpickler(io.BytesIO(data)) is not None


def test_reading_needs_neither_torch_nor_numpy(golden: Path, repo_dir: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from core.formats.dcp.metadata import parse_metadata\n"
        "for path in sys.argv[1:]:\n"
        "    parse_metadata(pathlib.Path(path).read_bytes(), label=path)\n"
        "print({'torch', 'numpy', 'megatron'} & set(sys.modules) or 'light')\n"
    )
    paths = list(map(str, metadata_files(golden)))
    done = subprocess.run(
        [sys.executable, "-c", code, *paths],
        cwd=repo_dir,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout == "light\n"
