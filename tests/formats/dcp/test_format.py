"""Plain DCP: read what torch wrote, and let torch read what we wrote."""

from __future__ import annotations

import io
import pickle
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dist_cp
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from core.arrays.box import Box
from core.engine.catalog.catalog import Catalog, StoredObject, TargetCatalog, catalog_of_arrays
from core.engine.catalog.facets import WriteOptions
from core.engine.catalog.file_image import FileImage
from core.engine.catalog.stored import Extent, PlannedArray, StoredArray
from core.engine.catalog.tensor import Fragment, TargetFragment, Tensor
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    TruncatedError,
    UnsafeError,
    UnsupportedError,
)
from core.files.store import LocalStore, MemoryStore
from core.formats.dcp import format as dcp
from core.formats.dcp.metadata import parse_metadata
from core.opening.objects import loaded
from core.opening.target import partitioned
from core.pickle.inert import Global, Inert, ObjectLeaf, TensorLeaf, attributes, make_namespace
from tests.support.fragments import with_fragments
from tests.support.materialize import materialized, tensor_bytes, write_files

GOLD = ("fsdp2_dp2", "fsdp2_dp4", "tp2_only", "tp2_fsdp2_dp2", "bf16_fsdp2_dp2_modelonly")

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
    torch.complex128,
    torch.complex64,
)


def counted(*shape: int, dtype: torch.dtype = torch.float32, start: int = 0) -> torch.Tensor:
    """A tensor whose bytes count up, so that no two regions are equal; bool alternates
    irregularly.
    """
    n = int(np.prod(shape))
    size = torch.empty((), dtype=dtype).element_size()
    if dtype == torch.bool:
        return torch.tensor([(i * i + start) % 7 < 3 for i in range(n)]).reshape(shape)
    data = (np.arange(start, start + n * size, dtype=np.uint32) * 2654435761 >> 13).astype(np.uint8)
    return torch.frombuffer(bytearray(data.tobytes()), dtype=torch.uint8).view(dtype).reshape(shape)


def plain_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def state_dict() -> dict[str, object]:
    """Nesting, odd shapes, every dtype, objects."""
    return {
        "model": {
            "weight.with.dots": counted(7, 5, dtype=torch.bfloat16),
            "scalar": torch.tensor(3.5),
            "empty": torch.empty(0, 4),
            "one": counted(1, 1, 1, dtype=torch.int64),
            **{
                f"as_{str(dtype).removeprefix('torch.')}": counted(3, 4, dtype=dtype)
                for dtype in DTYPES
            },
        },
        "strided": {
            "transposed": counted(4, 6).t(),
            "channels_last": counted(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
            "sliced": counted(10, 8)[2:7, 1:6],
            "permuted": counted(3, 4, 5, dtype=torch.int16).permute(2, 0, 1),
        },
        "list": [counted(3), {"deep": counted(2, 2, start=99)}, 17],
        "plain_list": [1, 2, [3, "four"]],
        "step": 12,
        "name": "trial",
        "nothing": None,
        "pair": (0.9, 0.999),
    }


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``state_dict`` as torch saves it."""
    folder = tmp_path_factory.mktemp("dcp") / "by_torch"
    dist_cp.save(state_dict(), checkpoint_id=folder, no_dist=True)
    return folder


def read(folder: Path) -> tuple[Catalog, LocalStore]:
    store = LocalStore(folder)
    return dcp.FORMAT.read(store), store


def read_whole(folder: Path) -> tuple[Catalog, LocalStore]:
    """The catalog with its objects loaded, as the engine has it before writing."""
    catalog, store = read(folder)
    return loaded(catalog, store), store


def laid_out(target: TargetCatalog) -> list[FileImage]:
    assert dcp.FORMAT.lay_out is not None
    return list(dcp.FORMAT.lay_out(target))


def rewritten(source_dir: Path, folder: Path, *, by: str = "as_stored") -> Path:
    source, store = read_whole(source_dir)
    target = partitioned(source, format="dcp", by=by)
    return write_files(
        materialized(laid_out(target), target=target, source=source, store=store), folder
    )


def torch_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor as torch's own loader reads it, by flat key."""
    metadata = FileSystemReader(folder).read_metadata()
    wanted = {
        key: torch.empty(item.size, dtype=item.properties.dtype)
        for key, item in metadata.state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata)
    }
    dist_cp.load(wanted, checkpoint_id=folder, no_dist=True)
    return wanted


def torch_objects(folder: Path) -> dict[str, object]:
    metadata = FileSystemReader(folder).read_metadata()
    wanted: dict[str, object] = {
        key: "to be replaced"
        for key, item in metadata.state_dict_metadata.items()
        if isinstance(item, BytesStorageMetadata)
    }
    if wanted:
        dist_cp.load(wanted, checkpoint_id=folder, no_dist=True)
    return wanted


def assert_same_tree(actual: object, expected: object) -> None:
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor)
        assert actual.dtype == expected.dtype
        assert actual.shape == expected.shape
        assert plain_bytes(actual) == plain_bytes(expected)
    elif isinstance(expected, dict):
        assert isinstance(actual, dict)
        assert list(actual) == list(expected)
        for key in expected:
            assert_same_tree(actual[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert isinstance(actual, (list, tuple))
        assert len(actual) == len(expected)
        for ours, two in zip(actual, expected, strict=True):
            assert_same_tree(ours, two)
    else:
        assert actual == expected


# ---- reading


def test_every_tensor_that_torch_saved_is_read_bit_for_bit(written: Path) -> None:
    catalog, store = read(written)
    expected = torch_tensors(written)
    assert set(catalog.tensors) == set(expected)
    for key, tensor in expected.items():
        assert catalog.tensors[key].shape == tuple(tensor.shape)
        assert catalog.tensors[key].dtype == str(tensor.dtype).removeprefix("torch.")
        assert tensor_bytes(catalog, store, key).tobytes() == plain_bytes(tensor), key


def test_a_tensor_saved_with_its_strides_is_read_by_them(written: Path) -> None:
    catalog, store = read(written)
    for key in ("transposed", "channels_last", "permuted"):
        array = catalog.fragments(f"strided.{key}")[0].array
        assert array is not None
        assert array.extent.is_late
        bound = array.locate(store).extent
        assert bound is not None
        assert bound.strides == state_dict()["strided"][key].stride()  # type: ignore[index]


@pytest.mark.parametrize("name", GOLD)
def test_gold_tensors_are_read_as_torch_reads_them(golden: Path, name: str) -> None:
    folder = golden / "torch_dcp" / name
    catalog, store = read(folder)
    expected = torch_tensors(folder)
    assert set(catalog.tensors) == set(expected)
    for key, tensor in expected.items():
        assert tensor_bytes(catalog, store, key).tobytes() == plain_bytes(tensor), key


def test_several_writers_files_give_one_tensor(golden: Path) -> None:
    catalog, _ = read(golden / "torch_dcp" / "fsdp2_dp4")
    fragments = catalog.fragments("app.model.model.embed_tokens.weight")
    assert [fragment.box.shape[0] for fragment in fragments] == [33, 33, 33, 31]
    files = {fragment.array.extent.file for fragment in fragments if fragment.array}
    assert files == {f"__{rank}_0.distcp" for rank in range(4)}
    names = [fragment.array.name for fragment in fragments if fragment.array]
    assert len(set(names)) == 4


@pytest.mark.parametrize(("name", "prefix"), [("fsdp2_dp2", "app.model."), ("tp2_only", "")])
def test_gold_weights_equal_the_oracle(golden: Path, name: str, prefix: str) -> None:
    oracle = load_file(golden / "oracle" / "torch_dcp" / "global_fp32.safetensors")
    catalog, store = read(golden / "torch_dcp" / name)
    assert len(oracle) == 21
    for key, tensor in oracle.items():
        assert tensor_bytes(catalog, store, prefix + key).tobytes() == plain_bytes(tensor)


def test_the_skeleton_has_the_nesting_of_the_state_dict(written: Path) -> None:
    catalog, _ = read(written)
    skeleton = catalog.skeleton
    assert isinstance(skeleton, dict)
    assert skeleton["model"]["weight.with.dots"] == TensorLeaf("model.weight.with.dots")
    assert skeleton["list"] == [
        TensorLeaf("list.0"),
        {"deep": TensorLeaf("list.1.deep")},
        ObjectLeaf("list.2"),
    ]
    assert skeleton["plain_list"] == ObjectLeaf("plain_list")


def test_a_flat_checkpoint_has_no_skeleton(tmp_path: Path) -> None:
    planner = dist_cp.DefaultSavePlanner(flatten_state_dict=False)
    dist_cp.save({"a.b": counted(3), "c": 4}, checkpoint_id=tmp_path, no_dist=True, planner=planner)
    catalog, store = read(tmp_path)
    assert catalog.skeleton is None
    assert tensor_bytes(catalog, store, "a.b").tobytes() == plain_bytes(counted(3))


def test_objects_are_streams_that_load_on_demand(written: Path) -> None:
    catalog, store = read(written)
    assert set(catalog.objects) == {"list.2", "plain_list", "step", "name", "nothing", "pair"}
    for key, stored in catalog.objects.items():
        assert stored.raw_key == f"raw:{key}"
        tensor = catalog.hidden[f"raw:{key}"]
        assert tensor.dtype == "uint8"
        stream = tensor_bytes(catalog, store, f"raw:{key}").tobytes()
        assert torch.load(io.BytesIO(stream), weights_only=True) == torch_objects(written)[key]


def test_fragments_are_made_on_demand(written: Path) -> None:
    catalog, _ = read(written)
    first, second = catalog.fragments("model.scalar"), catalog.fragments("model.scalar")
    assert first == second
    assert first[0] is not second[0]


def test_torch_is_not_needed_to_read(golden: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from pathlib import Path; from core.files.store import LocalStore;"
        " from core.formats.dcp import format as dcp;"
        "store = LocalStore(Path(sys.argv[1])); catalog = dcp.FORMAT.read(store);"
        "[f.array.locate(store) for key in catalog.tensors for f in catalog.fragments(key)];"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    folder = golden / "torch_dcp" / "tp2_only"
    subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        check=True,
        cwd=Path(__file__).resolve().parents[3],
    )


# ---- writing


@pytest.mark.each_value
@pytest.mark.parametrize("by", ["as_stored", "whole"])
@pytest.mark.parametrize("name", GOLD)
def test_torch_loads_what_we_wrote_of_gold(
    golden: Path, tmp_path: Path, name: str, by: str
) -> None:
    source = golden / "torch_dcp" / name
    ours = rewritten(source, tmp_path / "ours", by=by)
    assert_same_tree(
        dict(sorted(torch_tensors(ours).items())), dict(sorted(torch_tensors(source).items()))
    )
    assert torch_objects(ours) == torch_objects(source)


@pytest.mark.parametrize("by", ["as_stored", "whole"])
def test_torch_loads_every_kind_of_entry_that_we_wrote(
    written: Path, tmp_path: Path, by: str
) -> None:
    ours = rewritten(written, tmp_path / "ours", by=by)
    assert_same_tree(torch_tensors(ours), torch_tensors(written))
    assert torch_objects(ours) == torch_objects(written)


def test_dcp_to_torch_save_rebuilds_the_nesting(written: Path, tmp_path: Path) -> None:
    ours = rewritten(written, tmp_path / "ours")
    for folder, file in ((written, "torch.pt"), (ours, "ours.pt")):
        dcp_to_torch_save(folder, tmp_path / file)
    result = torch.load(tmp_path / "ours.pt", weights_only=True)
    expected = torch.load(tmp_path / "torch.pt", weights_only=True)
    assert_same_tree(result, expected)
    assert list(result) == list(state_dict())


def test_a_nested_state_dict_loads_in_place(written: Path, tmp_path: Path) -> None:
    ours = rewritten(written, tmp_path / "ours")
    wanted = {
        "list": [torch.zeros(3), {"deep": torch.zeros(2, 2)}, 0],
        "model": {"scalar": torch.zeros(())},
    }
    dist_cp.load(wanted, checkpoint_id=ours, no_dist=True)
    expected = state_dict()["list"]
    assert_same_tree(wanted["list"], expected)


def test_what_we_wrote_reads_back_equal(written: Path, tmp_path: Path) -> None:
    source, source_store = read_whole(written)
    ours, store = read_whole(rewritten(written, tmp_path / "ours"))
    assert list(ours.tensors) == list(source.tensors)
    assert ours.skeleton == source.skeleton
    assert {key: item.value for key, item in ours.objects.items()} == {
        key: item.value for key, item in source.objects.items()
    }
    for key in source.tensors:
        assert (
            tensor_bytes(ours, store, key).tobytes()
            == tensor_bytes(source, source_store, key).tobytes()
        )


def test_two_runs_give_the_same_bytes(written: Path, tmp_path: Path) -> None:
    first, second = (rewritten(written, tmp_path / name) for name in ("first", "second"))
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes()
    assert b"first" not in (first / ".metadata").read_bytes()


def test_every_item_is_a_sound_zip_with_aligned_data(written: Path, tmp_path: Path) -> None:
    ours = rewritten(written, tmp_path / "ours")
    metadata = FileSystemReader(ours).read_metadata()
    n_tensors = 0
    for info in metadata.storage_data.values():
        data = (ours / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None
            for record in archive.infolist():
                if record.filename.startswith("archive/data/") and record.file_size:
                    at = data.index(record.filename.encode(), record.header_offset)
                    extra = int.from_bytes(
                        data[record.header_offset + 28 : record.header_offset + 30], "little"
                    )
                    assert (info.offset + at + len(record.filename) + extra) % 64 == 0
                    n_tensors += 1
    assert n_tensors > 20


def test_chunks_are_stored_as_torch_stores_them(tmp_path: Path) -> None:
    """The zip of a contiguous chunk is byte for byte torch's own, the serialization id apart."""
    dist_cp.save({"a": counted(5, 3)}, checkpoint_id=tmp_path / "torch", no_dist=True)
    ours = rewritten(tmp_path / "torch", tmp_path / "ours")
    items = []
    for folder in (tmp_path / "torch", ours):
        data = (folder / "__0_0.distcp").read_bytes()
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            items.append(
                {
                    name: archive.read(name)
                    for name in archive.namelist()
                    if "serialization_id" not in name
                }
            )
    assert list(items[0]) == list(items[1])
    theirs, our_ops = (pickle_ops(item.pop("archive/data.pkl")) for item in items)
    assert items[0] == items[1]
    assert our_ops == theirs


def pickle_ops(data: bytes) -> list[tuple[str, object]]:
    """Opcodes without memo bookkeeping."""
    import pickletools

    return [
        (op.name, arg)
        for op, arg, _ in pickletools.genops(data)
        if op.name not in ("BINPUT", "BINGET", "LONG_BINPUT", "LONG_BINGET", "MEMOIZE", "PROTO")
    ]


def made_catalog(
    arrays: dict[str, list[PlannedArray]],
    shape: tuple[int, ...],
    *,
    objects: dict[str, StoredObject] | None = None,
) -> TargetCatalog:
    """A target in which every tensor has the given arrays, stacked along axis 0."""

    def fragments_of(key: str) -> list[TargetFragment]:
        fragments, row = [], 0
        for array in arrays[key]:
            fragments.append(Fragment(Box((row, 0), array.shape), array, (0, 0)))
            row += array.shape[0]
        return fragments

    tensors = {key: Tensor(parts[0].dtype, shape) for key, parts in arrays.items()}
    return Catalog("dcp", None, with_fragments(tensors, fragments_of), objects=objects or {})


def literal_bytes(image: FileImage) -> bytes:
    """The content of an image without arrays."""
    content = bytearray(image.size)
    for offset, data in image.literals(lambda name: 0):
        content[offset : offset + len(data)] = data
    return bytes(content)


def test_file_numbers_come_from_the_arrays() -> None:
    parts = [PlannedArray(f"p{n}", "float32", (2, 3), coords=(("file", n),)) for n in (4, 1)]
    images = laid_out(made_catalog({"a": parts}, (4, 3), objects={"o": StoredObject("o", value=1)}))
    assert [image.path for image in images] == ["__1_0.distcp", "__4_0.distcp", ".metadata"]
    assert [[placed.array.name for placed in image.arrays] for image in images] == [
        ["p1"],
        ["p4"],
        [],
    ]
    assert images[-1].is_metadata


def test_each_rank_gets_a_file_in_order_of_first_appearance() -> None:
    ranks = [(("tp", 1), ("pp", 0)), (("tp", 0), ("pp", 0))]
    arrays = {
        key: [
            PlannedArray(f"{key}{n}", "float32", (2, 3), coords=coords)
            for n, coords in enumerate(ranks)
        ]
        for key in "ab"
    }
    images = laid_out(made_catalog(arrays, (4, 3)))
    assert [image.path for image in images] == ["__0_0.distcp", "__1_0.distcp", ".metadata"]
    assert [placed.array.name for placed in images[0].arrays] == ["a0", "b0"]
    assert [placed.array.name for placed in images[1].arrays] == ["a1", "b1"]


def test_files_end_at_the_given_size_but_no_item_is_cut() -> None:
    arrays = {f"k{n}": [PlannedArray(f"k{n}", "float32", (100, 10))] for n in range(6)}
    target = replace(made_catalog(arrays, (100, 10)), write=WriteOptions(max_file_bytes=12_000))
    images = laid_out(target)
    assert [[placed.array.name for placed in image.arrays] for image in images[:-1]] == [
        ["k0", "k1"],
        ["k2", "k3"],
        ["k4", "k5"],
    ]
    assert [
        image.path for image in laid_out(replace(target, write=WriteOptions(max_file_bytes=1)))
    ][:-1] == [f"__{n}_0.distcp" for n in range(6)]


def test_objects_lie_before_chunks() -> None:
    arrays = {"a": [PlannedArray("a", "float32", (2, 3))]}
    target = made_catalog(arrays, (2, 3), objects={"o": StoredObject("o", value={"lr": 0.1})})
    image, metadata = laid_out(target)
    first = next(iter(image.literals(lambda name: 0)))
    assert first[1].startswith(b"PK\x03\x04")
    assert b"lr" in first[1]
    assert metadata.is_metadata


def test_a_value_with_tensors_inside_is_written_with_them(tmp_path: Path) -> None:
    inside = PlannedArray("hidden", "int32", (3,))
    base = catalog_of_arrays(
        format="dcp", arrays={"w": PlannedArray("w", "float32", (2,)), "hidden": inside}
    )
    hidden = {"hidden": base.tensors["hidden"]}
    target = Catalog(
        "dcp",
        None,
        {"w": base.tensors["w"]},
        objects={"state": StoredObject("state", value={"rng": TensorLeaf("hidden"), "n": 1})},
        hidden=hidden,
    )
    images = laid_out(target)
    source_store = MemoryStore(
        {"w": plain_bytes(counted(2)), "h": plain_bytes(counted(3, dtype=torch.int32))}
    )
    source = catalog_of_arrays(
        format="x",
        arrays={
            "w": StoredArray("w", "float32", (2,), Extent("w", 0)),
            "hidden": StoredArray("hidden", "int32", (3,), Extent("h", 0)),
        },
    )
    folder = write_files(
        materialized(images, target=target, source=source, store=source_store), tmp_path / "made"
    )
    state = torch_objects(folder)["state"]
    assert_same_tree(state, {"rng": counted(3, dtype=torch.int32), "n": 1})


def test_an_object_of_foreign_classes_stops_no_tool_of_torch(tmp_path: Path) -> None:
    enum = Inert("reduce", Global("megatron.core.enums", "ModelType"), (1,))
    value = make_namespace({"model_type": enum, "lr": 0.1})
    arrays = {"w": PlannedArray("w", "float32", (2,))}
    objects = {
        "args": StoredObject("args", value=value),
        "lr": StoredObject("lr", value=make_namespace({"lr": 0.1})),
    }
    target = catalog_of_arrays(format="dcp", arrays=arrays, objects=objects)
    source = catalog_of_arrays(
        format="x", arrays={"w": StoredArray("w", "float32", (2,), Extent("w", 0))}
    )
    store = MemoryStore({"w": plain_bytes(counted(2))})
    files = materialized(laid_out(target), target=target, source=source, store=store)
    folder = write_files(files, tmp_path / "made")
    dcp_to_torch_save(folder, tmp_path / "all.pt")
    result = torch.load(tmp_path / "all.pt", weights_only=False)
    assert list(result["args"]) == ["__ckpt_inert__"]
    assert result["lr"].lr == 0.1
    again = attributes(read_whole(folder)[0].objects["args"].value)
    assert again is not None
    assert again["lr"] == 0.1
    assert isinstance(again["model_type"], Inert)
    assert again["model_type"].fn == enum.fn
    assert again["model_type"].args == (1,)


def test_an_array_with_fewer_axes_becomes_a_chunk_of_the_stacked_tensor() -> None:
    arrays = [PlannedArray(f"layer{n}", "float32", (2, 3)) for n in range(4)]
    target = Catalog(
        "dcp",
        None,
        with_fragments(
            {"w": Tensor("float32", (4, 2, 3))},
            lambda key: [
                Fragment(Box((n, 0, 0), (1, 2, 3)), array, (0, 0)) for n, array in enumerate(arrays)
            ],
        ),
    )
    images = laid_out(target)
    assert [placed.array.name for placed in images[0].arrays] == [
        "layer0",
        "layer1",
        "layer2",
        "layer3",
    ]
    metadata = parse_metadata(literal_bytes(images[-1]), label="made")
    assert [chunk.box for chunk in metadata.chunks("w")] == [
        Box((n, 0, 0), (1, 2, 3)) for n in range(4)
    ]


def test_an_array_in_several_fragments_is_one_chunk() -> None:
    array = PlannedArray("whole", "float32", (4, 3))
    rows = [Fragment(Box((2 + n, 0), (1, 3)), array, (n, 0)) for n in range(4)]
    other = Fragment(Box((0, 0), (2, 3)), PlannedArray("first", "float32", (2, 3)), (0, 0))
    target = Catalog(
        "dcp", None, with_fragments({"w": Tensor("float32", (6, 3))}, lambda key: [*rows, other])
    )
    metadata = parse_metadata(literal_bytes(laid_out(target)[-1]), label="made")
    assert [chunk.box for chunk in metadata.chunks("w")] == [
        Box((2, 0), (4, 3)),
        Box((0, 0), (2, 3)),
    ]
    shifted = replace(rows[1], at=(2, 0))
    broken = Catalog("dcp", None, with_fragments(target.tensors, lambda key: [rows[0], shifted]))
    with pytest.raises(UnsupportedError, match="not a chunk"):
        laid_out(broken)


def test_two_chunks_at_one_element_are_refused() -> None:
    arrays = [PlannedArray("one", "float32", (2, 3)), PlannedArray("two", "float32", (2, 3))]
    target = Catalog(
        "dcp",
        None,
        with_fragments(
            {"w": Tensor("float32", (2, 3))},
            lambda key: [Fragment(Box((0, 0), (2, 3)), array, (0, 0)) for array in arrays],
        ),
    )
    with pytest.raises(UnsupportedError, match="two chunks begin"):
        laid_out(target)


def test_zips_of_equal_chunks_share_their_literals() -> None:
    """10⁴ chunks cost memory for their columns, not for their zips."""
    import tracemalloc

    arrays = {"a": [PlannedArray(f"a{n}", "float32", (1, 3)) for n in range(10_000)]}
    target = made_catalog(arrays, (10_000, 3))
    tracemalloc.start()
    images = laid_out(target)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(images[0].arrays) == 10_000
    assert used < 10_000 * 2000


# ---- bad input


def damaged(written: Path, folder: Path, damage: Callable[[Path], object]) -> Path:
    shutil.copytree(written, folder)
    damage(folder)
    return folder


def test_an_absent_file_is_named_with_a_tensor(written: Path, tmp_path: Path) -> None:
    folder = damaged(written, tmp_path / "x", lambda f: (f / "__0_0.distcp").unlink())
    with pytest.raises(MissingShardError) as caught:
        read(folder)
    assert caught.value.file == "__0_0.distcp"
    assert caught.value.key is not None


def test_a_short_file_is_named_with_a_tensor_behind_its_end(written: Path, tmp_path: Path) -> None:
    def cut(folder: Path) -> None:
        path = folder / "__0_0.distcp"
        path.write_bytes(path.read_bytes()[:-100])

    with pytest.raises(TruncatedError) as caught:
        read(damaged(written, tmp_path / "x", cut))
    assert caught.value.file == "__0_0.distcp"
    assert caught.value.key is not None
    assert caught.value.span is not None


@pytest.mark.parametrize("leftover", [".metadata.tmp", "__0_0.distcp"])
def test_an_unfinished_save_is_called_so(tmp_path: Path, leftover: str) -> None:
    (tmp_path / leftover).write_bytes(b"")
    store = LocalStore(tmp_path)
    assert dcp.FORMAT.sniff(store)
    with pytest.raises(MissingShardError, match="did not finish"):
        dcp.FORMAT.read(store)


def test_other_directories_are_not_taken_for_dcp(golden: Path, tmp_path: Path) -> None:
    assert not dcp.FORMAT.sniff(LocalStore(tmp_path))
    assert not dcp.FORMAT.sniff(LocalStore(golden / "hf" / "llama" / "torch_single"))


def test_a_path_out_of_the_directory_is_refused(written: Path, tmp_path: Path) -> None:
    def escape(folder: Path) -> None:
        metadata = FileSystemReader(folder).read_metadata()
        for info in metadata.storage_data.values():
            info.relative_path = "../secret"
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    with pytest.raises(UnsafeError):
        read(damaged(written, tmp_path / "x", escape))


@pytest.mark.parametrize("n_bytes", [0, 1, 100, 3000])
def test_a_cut_metadata_is_corrupt(written: Path, tmp_path: Path, n_bytes: int) -> None:
    def cut(folder: Path) -> None:
        path = folder / ".metadata"
        path.write_bytes(path.read_bytes()[:n_bytes])

    with pytest.raises(CorruptError) as caught:
        read(damaged(written, tmp_path / "x", cut))
    assert caught.value.file == ".metadata"


def test_an_item_that_is_no_torch_zip_is_an_error_of_ours(written: Path, tmp_path: Path) -> None:
    def scribble(folder: Path) -> None:
        path = folder / "__0_0.distcp"
        path.write_bytes(b"\xff" * path.stat().st_size)

    catalog, store = read(damaged(written, tmp_path / "x", scribble))
    array = catalog.fragments("model.scalar")[0].array
    assert array is not None
    with pytest.raises(CheckpointingException):
        array.locate(store)
