"""The other forms of DCP: items in zstd frames, safetensors files, metadata of single ranks."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_cp
import zstandard
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import SerializationFormat

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.decoded import DecodedStore, decoding_bytes
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    TruncatedError,
    UnsupportedError,
)
from core.files.store import LocalStore, MemoryStore
from core.formats.dcp import format as dcp
from core.formats.dcp.zstd_streams import inflate_item
from core.pickle.inert import TensorLeaf, walk
from core.pickle.nesting import entries
from tests.formats.dcp.test_format import (
    counted,
    plain_bytes,
    state_dict,
    torch_objects,
    torch_tensors,
)
from tests.support.fragments import replace_fragments
from tests.support.materialize import tensor_bytes


def saved(folder: Path, state: dict[str, object], **options: object) -> Path:
    writer = FileSystemWriter(folder, **options)  # type: ignore[arg-type]
    dist_cp.save(state, storage_writer=writer, no_dist=True)
    return folder


def opened(folder: Path) -> tuple[Catalog, DecodedStore]:
    """The catalog, and a store through which its encoded arrays are read as the engine does it."""
    store = DecodedStore(LocalStore(folder))
    catalog = dcp.FORMAT.read(LocalStore(folder))
    return placed(catalog, store), store


def placed(catalog: Catalog, store: DecodedStore) -> Catalog:
    from dataclasses import replace

    def fragments_of(key: str) -> list[object]:
        fragments = []
        for fragment in catalog.fragments(key):
            assert fragment.array is not None
            fragments.append(replace(fragment, array=store.placed(fragment.array)))
        return fragments

    return replace_fragments(catalog, fragments_of)  # type: ignore[arg-type]


def changed(source_dir: Path, folder: Path, change: Callable[[object], None]) -> Path:
    """A copy whose ``.metadata`` was changed."""
    shutil.copytree(source_dir, folder)
    metadata = FileSystemReader(folder).read_metadata()
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


# ---- zstd


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("zstd") / "once", state_dict(), _extensions=[ZStandard()])


@pytest.mark.parametrize("n_times", [1, 2])
def test_compressed_tensors_are_read_bit_for_bit(tmp_path: Path, n_times: int) -> None:
    folder = saved(tmp_path / "x", state_dict(), _extensions=[ZStandard() for _ in range(n_times)])
    catalog, store = opened(folder)
    expected = torch_tensors(folder)
    assert set(catalog.tensors) == set(expected)
    for key, tensor in expected.items():
        assert tensor_bytes(catalog, store, key).tobytes() == plain_bytes(tensor), key  # type: ignore[arg-type]


def test_nothing_compressed_is_read_with_the_metadata_but_objects(compressed: Path) -> None:
    catalog = dcp.FORMAT.read(LocalStore(compressed))
    assert catalog.tensors
    for key in catalog.tensors:
        (fragment,) = catalog.fragments(key)
        assert fragment.array is not None
        extent = fragment.array.extent
        assert not extent.is_late
        assert extent.encoding is not None
        assert extent.encoding.name == "zstd"


def test_compressed_objects_equal_what_torch_loads(compressed: Path) -> None:
    catalog, _ = opened(compressed)
    for key, value in torch_objects(compressed).items():
        assert catalog.objects[key].value == value, key
        assert catalog.objects[key].raw_key is None
    assert catalog.iteration == 12


def test_the_nesting_of_a_compressed_checkpoint_is_that_of_a_plain_one(
    compressed: Path, tmp_path: Path
) -> None:
    plain = dcp.FORMAT.read(LocalStore(saved(tmp_path / "plain", state_dict())))
    catalog = dcp.FORMAT.read(LocalStore(compressed))
    assert [(e.path, e.key) for e in entries(catalog.skeleton)] == [
        (e.path, e.key) for e in entries(plain.skeleton)
    ]


def test_tensors_inside_compressed_objects_are_read(tmp_path: Path) -> None:
    # a tuple is one object for torch, whatever it holds
    inner = (counted(5, 3), counted(4, 6, start=9).t(), "text")
    folder = saved(tmp_path / "x", {"pair": inner, "w": counted(3)}, _extensions=[ZStandard()])
    catalog = dcp.FORMAT.read(LocalStore(folder))
    leaves = [
        leaf.key for leaf in walk(catalog.objects["pair"].value) if isinstance(leaf, TensorLeaf)
    ]
    assert len(leaves) == 2
    catalog, store = opened(folder)
    for key, tensor in zip(leaves, inner, strict=False):
        assert isinstance(tensor, torch.Tensor)
        assert tensor_bytes(catalog, store, key).tobytes() == plain_bytes(tensor)  # type: ignore[arg-type]


def test_the_memory_of_an_item_is_bounded_by_its_tensor(compressed: Path) -> None:
    catalog = dcp.FORMAT.read(LocalStore(compressed))
    assert decoding_bytes(catalog.fragments("model.weight.with.dots")) < 10 << 20


def test_unknown_transforms_are_refused_by_name(compressed: Path, tmp_path: Path) -> None:
    def change(metadata: object) -> None:
        for info in metadata.storage_data.values():  # type: ignore[attr-defined]
            info.transform_descriptors = ["stream.secret/1", "stream.zstd/1"]

    with pytest.raises(UnsupportedError, match=r"stream\.secret/1"):
        opened(changed(compressed, tmp_path / "x", change))


def recompressed(
    source_dir: Path, folder: Path, key: str, change: Callable[[bytes], bytes]
) -> Path:
    """A copy in which the item of one tensor lies in a file of its own, changed."""
    name = "__9_0.distcp"

    def move(metadata: object) -> None:
        for index, info in metadata.storage_data.items():  # type: ignore[attr-defined]
            if index.fqn == key:
                data = (folder / info.relative_path).read_bytes()[
                    info.offset : info.offset + info.length
                ]
                content = change(data)
                (folder / name).write_bytes(content)
                info.relative_path, info.offset, info.length = name, 0, len(content)

    return changed(source_dir, folder, move)


def reading(folder: Path, key: str) -> bytes:
    catalog, store = opened(folder)
    return tensor_bytes(catalog, store, key).tobytes()  # type: ignore[arg-type]


KEY = "model.weight.with.dots"


def zipped(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj().decompress(data)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda data: data[:-1], TruncatedError, "ends inside a frame"),
        (lambda data: data[: len(data) // 2], TruncatedError, "ends inside a frame"),
        (lambda data: data[:3], TruncatedError, "ends inside a frame"),
        (lambda data: b"junk" + data, CorruptError, "do not begin a zstd frame"),
        (lambda data: data + b"junk", CorruptError, "do not begin a zstd frame"),
        (lambda data: data[:-9] + bytes(x ^ 0x55 for x in data[-9:]), CorruptError, "zstd"),
        (lambda data: zstandard.compress(b""), CorruptError, "zip"),
        (lambda data: zstandard.compress(zipped(data)[:600]), CorruptError, "zip"),
        (
            lambda data: zstandard.compress(zipped(data) + bytes(1 << 20)),
            CorruptError,
            "decompresses to more than 65,606",
        ),
        (
            lambda data: zstandard.compress(bytes(1 << 28)),
            CorruptError,
            "decompresses to more than 65,606",
        ),
    ],
)
def test_a_damaged_frame_is_a_typed_error(
    compressed: Path,
    tmp_path: Path,
    change: Callable[[bytes], bytes],
    error: type[CheckpointingException],
    match: str,
) -> None:
    folder = recompressed(compressed, tmp_path / "x", KEY, change)
    with pytest.raises(error, match=match) as caught:
        reading(folder, KEY)
    assert caught.value.file == "__9_0.distcp"
    assert caught.value.key is not None and caught.value.key.startswith(KEY)


def test_an_item_of_another_shape_is_corrupt(compressed: Path, tmp_path: Path) -> None:
    other = saved(tmp_path / "other", {KEY: counted(5, 7, dtype=torch.bfloat16)})
    item = next(iter(FileSystemReader(other).read_metadata().storage_data.values()))
    data = (other / item.relative_path).read_bytes()[item.offset : item.offset + item.length]
    folder = recompressed(compressed, tmp_path / "x", KEY, lambda _: zstandard.compress(data))
    with pytest.raises(CorruptError, match=r"shape \(5, 7\)"):
        reading(folder, KEY)


def test_several_frames_and_skippable_ones_are_one_stream(compressed: Path, tmp_path: Path) -> None:
    def split(data: bytes) -> bytes:
        plain = zipped(data)
        skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"
        with_sum = zstandard.ZstdCompressor(write_checksum=True, level=19)
        return zstandard.compress(plain[:100]) + skippable + with_sum.compress(plain[100:])

    folder = recompressed(compressed, tmp_path / "x", KEY, split)
    assert reading(folder, KEY) == reading(compressed, KEY)


def test_a_large_window_is_refused(compressed: Path, tmp_path: Path) -> None:
    def widened(data: bytes) -> bytes:
        parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27)
        compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        return compressor.compress(zipped(data)) + compressor.flush()

    with pytest.raises(UnsupportedError, match="8 MiB"):
        reading(recompressed(compressed, tmp_path / "x", KEY, widened), KEY)


def test_a_bomb_is_stopped_at_its_limit() -> None:
    store = MemoryStore({"f": zstandard.compress(zstandard.compress(bytes(1 << 28)))})
    with pytest.raises(CorruptError, match="more than 1,000 bytes"):
        inflate_item(
            store, "f", (0, store.size("f")), ("stream.zstd/1", "stream.zstd/1"), limit=1000
        )


def test_a_compressed_object_that_is_cut_names_itself(compressed: Path, tmp_path: Path) -> None:
    folder = recompressed(compressed, tmp_path / "x", "name", lambda data: data[:-2])
    with pytest.raises(TruncatedError) as caught:
        opened(folder)
    assert caught.value.key == "name"


# ---- metadata of single ranks


@pytest.fixture(scope="module")
def by_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks that saved without collectives, one after the other, each in a process group that
    does nothing.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    folder = tmp_path_factory.mktemp("ranks") / "step-3"
    full = counted(7, 5)
    for rank in (1, 0):  # torch warns if rank 0 was there first
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            mesh = DeviceMesh("cpu", [0, 1])
            local = full[:4] if rank == 0 else full[4:]
            sharded = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=(7, 5), stride=(5, 1)
            )
            state = {
                "model": {"sharded": sharded, "copied": counted(3, 3, start=5)},
                "train_state": {"step": 3},
                f"only_{rank}": counted(2, start=rank),
            }
            dist_cp.save(state, storage_writer=FileSystemWriter(folder), use_collectives=False)
        finally:
            dist.destroy_process_group()
    return folder


def test_metadata_of_single_ranks_is_read_as_one(by_ranks: Path) -> None:
    assert sorted(path.name for path in by_ranks.glob("*.metadata")) == [
        "__0.metadata",
        "__1.metadata",
    ]
    assert dcp.FORMAT.sniff(LocalStore(by_ranks))
    catalog, store = opened(by_ranks)
    expected = {
        "model.sharded": counted(7, 5),
        "model.copied": counted(3, 3, start=5),
        "only_0": counted(2),
        "only_1": counted(2, start=1),
    }
    assert set(catalog.tensors) == set(expected)
    for key, tensor in expected.items():
        assert tensor_bytes(catalog, store, key).tobytes() == plain_bytes(tensor)  # type: ignore[arg-type]
    assert len(catalog.fragments("model.copied")) == 2
    assert catalog.iteration == 3
    assert [entry.path for entry in entries(catalog.skeleton)][:2] == [
        ("model", "sharded"),
        ("model", "copied"),
    ]


@pytest.mark.parametrize(
    ("gone", "missing"),
    [
        ("__0.metadata", "__0.metadata"),
        ("__1.metadata", "__1.metadata"),
        ("__1_0.distcp", "__1_0.distcp"),
    ],
)
def test_what_is_missing_of_a_rank_is_named(
    by_ranks: Path, tmp_path: Path, gone: str, missing: str
) -> None:
    folder = shutil.copytree(by_ranks, tmp_path / "x")
    (folder / gone).unlink()
    with pytest.raises(MissingShardError) as caught:
        opened(folder)
    assert caught.value.file == missing


def test_an_unfinished_rank_is_named(by_ranks: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(by_ranks, tmp_path / "x")
    (folder / "__2.metadata.tmp").write_bytes(b"")
    with pytest.raises(MissingShardError, match=r"__2\.metadata is missing"):
        opened(folder)


def test_objects_in_which_ranks_differ_are_refused_by_name(by_ranks: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(by_ranks, tmp_path / "x")
    saved(tmp_path / "other", {"train_state": {"step": 4}})
    other = FileSystemReader(tmp_path / "other").read_metadata().storage_data
    data = (tmp_path / "other" / "__0_0.distcp").read_bytes()
    (folder / "__1_1.distcp").write_bytes(data)
    path = folder / "__1.metadata"
    metadata = pickle.loads(path.read_bytes())
    for index in metadata.storage_data:
        if index.fqn == "train_state.step":
            (metadata.storage_data[index],) = other.values()
            metadata.storage_data[index].relative_path = "__1_1.distcp"
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnsupportedError, match="different values") as caught:
        opened(folder)
    assert caught.value.key == "train_state.step"


def test_ranks_that_disagree_about_a_shape_are_corrupt(by_ranks: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(by_ranks, tmp_path / "x")
    path = folder / "__1.metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.state_dict_metadata["model.sharded"].size = torch.Size((8, 5))
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptError, match=r"\(7, 5\).*\(8, 5\)"):
        opened(folder)


# ---- safetensors


SAFE = {"serialization_format": SerializationFormat.SAFETENSORS}


def safe_state() -> dict[str, object]:
    return {
        "model": {
            "w": counted(7, 5, dtype=torch.bfloat16),
            "scalar": torch.tensor(3.5),
            "empty": torch.empty(0, 4),
            **{
                f"as_{n}": counted(3, 4, dtype=dtype)
                for n, dtype in enumerate((torch.float64, torch.int8, torch.bool))
            },
        }
    }


def info_of(folder: Path, **changes: object) -> None:
    """Changes DCP_SHARDING_INFO of ``__0_0.distcp`` without moving a byte."""
    path = folder / "__0_0.distcp"
    data = path.read_bytes()
    begin = data.find(b'{"__metadata__"') - 8
    n = int.from_bytes(data[begin : begin + 8], "little")
    header = json.loads(data[begin + 8 : begin + 8 + n])
    header["__metadata__"].update(changes)
    text = json.dumps(header, separators=(",", ":")).encode()
    assert len(text) <= n, "there is no room for the change"
    path.write_bytes(data[: begin + 8] + text.ljust(n) + data[begin + 8 + n :])


@pytest.mark.parametrize("objects", [{}, {"step": 12, "name": "trial", "groups": [{"lr": 0.5}]}])
def test_safetensors_files_are_read_bit_for_bit(tmp_path: Path, objects: dict[str, object]) -> None:
    state = safe_state()
    folder = saved(tmp_path / "x", {**state, **objects}, **SAFE)
    catalog, store = opened(folder)
    expected = {f"model.{name}": tensor for name, tensor in state["model"].items()}  # type: ignore[attr-defined]
    assert set(catalog.tensors) == set(expected)
    for key, tensor in expected.items():
        (fragment,) = catalog.fragments(key)
        assert fragment.array is not None
        extent = fragment.array.extent
        assert not extent.is_late and extent.encoding is None
        assert tensor_bytes(catalog, store, key).tobytes() == plain_bytes(tensor), key  # type: ignore[arg-type]
    assert catalog.iteration == objects.get("step")
    assert len(catalog.objects) == len(objects)


def test_several_safetensors_files_are_read(tmp_path: Path) -> None:
    state = {f"t{n}": counted(9, n + 1, start=n) for n in range(7)}
    folder = saved(tmp_path / "x", dict(state), thread_count=3, **SAFE)
    assert len(list(folder.glob("*.distcp"))) == 3
    catalog, store = opened(folder)
    for key, tensor in state.items():
        assert tensor_bytes(catalog, store, key).tobytes() == plain_bytes(tensor)  # type: ignore[arg-type]


def test_one_tensor_in_a_safetensors_file_is_found(tmp_path: Path) -> None:
    folder = saved(tmp_path / "x", {"only": counted(3, 3)}, **SAFE)
    assert reading(folder, "only") == plain_bytes(counted(3, 3))


def test_sharding_info_that_says_another_offset_is_an_error(tmp_path: Path) -> None:
    folder = saved(tmp_path / "x", {"w": counted(7, 5)}, **SAFE)
    info_of(folder, DCP_SHARDING_INFO='{"w":{"saved_offsets":[3,0]}}')
    with pytest.raises(
        MissingShardError, match=r"chunk at \[0, 0\] was never written.* at \[3, 0\]"
    ) as caught:
        opened(folder)
    assert (caught.value.file, caught.value.key) == ("__0_0.distcp", "w")


@pytest.mark.parametrize("text", ["[]", "{", '{"w":1}', '{"w":{}}', "null"])
def test_malformed_sharding_info_is_corrupt(tmp_path: Path, text: str) -> None:
    folder = saved(tmp_path / "x", {"w": counted(7, 5)}, **SAFE)
    info_of(folder, DCP_SHARDING_INFO=text)
    with pytest.raises(CorruptError, match="DCP_SHARDING_INFO"):
        opened(folder)


def test_safetensors_without_sharding_info_go_by_the_metadata(tmp_path: Path) -> None:
    folder = saved(tmp_path / "x", {"w": counted(7, 5)}, **SAFE)
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes().replace(b"DCP_SHARDING_INFO", b"DCP_SHARDING_XXXX"))
    assert reading(folder, "w") == plain_bytes(counted(7, 5))


def test_a_chunk_that_the_file_does_not_hold_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "x", {"w": counted(7, 5), "v": counted(3)}, **SAFE)
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes().replace(b'"v":{"dtype"', b'"x":{"dtype"'))
    with pytest.raises(MissingShardError) as caught:
        opened(folder)
    assert caught.value.key == "v"


def test_another_shape_than_the_metadata_says_is_corrupt(tmp_path: Path) -> None:
    folder = saved(tmp_path / "x", {"w": counted(7, 5)}, **SAFE)
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes().replace(b'"shape":[7,5]', b'"shape":[5,7]'))
    with pytest.raises(CorruptError, match=r"\(5, 7\).*\(7, 5\)"):
        opened(folder)


def test_a_cut_safetensors_file_is_truncated(tmp_path: Path) -> None:
    folder = saved(tmp_path / "x", {"w": counted(7, 5), "v": counted(30)}, **SAFE)
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CorruptError) as caught:
        opened(folder)
    assert caught.value.file == "__0_0.distcp"


def test_two_chunks_of_a_tensor_in_one_safetensors_file_are_an_error(tmp_path: Path) -> None:
    folder = saved(tmp_path / "x", {"w": counted(4, 5)}, **SAFE)

    def split(metadata: object) -> None:
        tensor = metadata.state_dict_metadata["w"]  # type: ignore[attr-defined]
        tensor.size = torch.Size((8, 5))
        chunk = type(tensor.chunks[0])
        tensor.chunks.append(chunk(torch.Size((4, 0)), torch.Size((4, 5))))
        ((index, info),) = metadata.storage_data.items()  # type: ignore[attr-defined]
        metadata.storage_data[type(index)("w", torch.Size((4, 0)))] = info  # type: ignore[attr-defined]

    with pytest.raises(MissingShardError, match="only the last") as caught:
        opened(changed(folder, tmp_path / "y", split))
    assert caught.value.key == "w"
