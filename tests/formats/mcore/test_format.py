"""Megatron's torch_dist directories: three dialects read, and written again."""

from __future__ import annotations

import io
import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from core.engine.catalog.catalog import Catalog, StoredObject, catalog_of_arrays
from core.engine.catalog.facets import TorchDistFacts
from core.engine.catalog.stored import PlannedArray
from core.errors import CorruptError, MissingShardError, UnsafeError, UnsupportedError
from core.files.store import LocalStore
from core.formats.dcp import torch_dist
from core.formats.torch.format import load_object
from core.megatron.extras.sharded_objects import is_sharded_object
from core.opening.objects import loaded
from core.opening.open import open_checkpoint
from core.opening.target import partitioned
from core.pickle.inert import ObjectLeaf, TensorLeaf, attributes, walk
from tests.support.facets import facet_of, with_facts
from tests.support.materialize import materialized, tensor_bytes, write_files

CASES = {
    "mcore_torch_dist/dense_gqa/tp2_pp2": "common_object",
    "mcore_torch_dist/dense_gqa/tp2_pp2_optim": "common_object",
    "mcore_torch_dist/moe_seq/tp2_pp2_ep2": "common_object",
    "mcore0161_torch_dist/dense_gqa/tp2_pp2_optim": "common_pt",
    "mcore0161_torch_dist/dense_gelu/tp2_pp2": "common_pt",
    "mcore0121_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_fully_sharded_model_space": "0.12",
    "mcore0121_torch_dist/moe_seq/tp2_pp2_ep2": "0.12",
}


def folder_of(golden: Path, case: str) -> Path:
    folder = golden / case / "iter_0000010"
    if not folder.is_dir():
        pytest.skip(f"{case} is not in the golden data")
    return folder


def read(folder: Path) -> tuple[Catalog, LocalStore]:
    store = LocalStore(folder)
    return torch_dist.FORMAT.read(store), store


def rewritten(
    source_dir: Path, folder: Path, *, by: str = "as_stored", dialect: str | None = None
) -> Path:
    source, store = read(source_dir)
    source = loaded(source, store)
    target = partitioned(source, format="torch_dist", by=by)
    if dialect is not None:
        target = with_facts(target, TorchDistFacts, dialect=dialect)
    assert torch_dist.FORMAT.lay_out is not None
    images = torch_dist.FORMAT.lay_out(target)
    return write_files(materialized(images, target=target, source=source, store=store), folder)


def item_bytes(folder: Path, key: str) -> bytes:
    """The stream of an object, by torch's own metadata."""
    metadata = FileSystemReader(folder).read_metadata()
    info = next(info for index, info in metadata.storage_data.items() if index.fqn == key)
    return (folder / info.relative_path).read_bytes()[info.offset : info.offset + info.length]


def plain_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# ---- reading


@pytest.mark.parametrize(("case", "dialect"), CASES.items())
def test_each_dialect_is_recognised(golden: Path, case: str, dialect: str) -> None:
    folder = folder_of(golden, case)
    store = LocalStore(folder)
    assert torch_dist.FORMAT.sniff(store)
    catalog = torch_dist.FORMAT.read(store)
    assert facet_of(catalog, TorchDistFacts).dialect == dialect
    assert catalog.iteration == 10
    args = attributes(catalog.args)
    assert args is not None
    assert args["num_layers"] == 4
    assert catalog.skeleton is None
    assert torch_dist.COMMON_OBJECT not in catalog.objects


@pytest.mark.parametrize("case", CASES)
def test_objects_are_the_sharded_objects(golden: Path, case: str) -> None:
    catalog, store = read(folder_of(golden, case))
    assert any(key.startswith("rng_state/shard_0.0_") for key in catalog.objects)
    for key, stored in catalog.objects.items():
        assert is_sharded_object(key)
        assert stored.raw_key in catalog.hidden
    extra = next(key for key in catalog.objects if "_extra_state/shard_" in key)
    raw_key = catalog.objects[extra].raw_key
    assert raw_key is not None
    stream = catalog.fragments(raw_key)[0].array
    assert stream is not None
    assert load_object(store, stream, key=extra)[0] == [None]


@pytest.mark.parametrize("case", CASES)
def test_the_tensors_of_the_common_state_are_hidden_ones(golden: Path, case: str) -> None:
    catalog, store = read(folder_of(golden, case))
    leaves = [node for node in walk(catalog.common) if isinstance(node, TensorLeaf)]
    if "optim" in case or "distopt" in case:
        assert leaves
    for leaf in leaves:
        assert leaf.key in catalog.hidden
        assert leaf.key not in catalog.tensors
        assert tensor_bytes(catalog, store, leaf.key).size == catalog.hidden[leaf.key].n_bytes


@pytest.mark.parametrize("model", ["dense_gqa", "dense_gelu"])
@pytest.mark.parametrize(
    "family", ["mcore_torch_dist", "mcore0161_torch_dist", "mcore0121_torch_dist"]
)
def test_stacked_weights_equal_the_oracle(golden: Path, family: str, model: str) -> None:
    catalog, store = read(folder_of(golden, f"{family}/{model}/tp2_pp2"))
    oracle = load_file(golden / "oracle" / model / "global.safetensors")
    compared = set()
    for name, tensor in oracle.items():
        head, _, rest = name.partition("decoder.layers.")
        if rest and not head:
            layer, _, sub = rest.partition(".")
            key = f"decoder.layers.{sub}"
            if key not in catalog.tensors:
                continue
            values = tensor_bytes(catalog, store, key)[int(layer)]
        elif name in catalog.tensors:
            values = tensor_bytes(catalog, store, name)[: tensor.shape[0]]
        else:
            continue
        compared.add(name)
        assert values.tobytes() == plain_bytes(tensor), name
    assert len(compared) > 20


def test_reformulated_tensors_are_shown_as_stored_with_their_true_shape_beside_them(
    golden: Path,
) -> None:
    case = "mcore0121_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_fully_sharded_model_space"
    catalog, _ = read(folder_of(golden, case))
    key = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight"
    assert catalog.tensors[key].shape == (4, 4, 1, 3072)
    facts = facet_of(catalog, TorchDistFacts).mcore_data
    assert facts is not None and facts[key] == {"nd_reformulated_orig_global_shape": (4, 192, 64)}


def test_a_plain_dcp_directory_is_not_torch_dist(golden: Path) -> None:
    assert not torch_dist.FORMAT.sniff(LocalStore(golden / "torch_dcp" / "tp2_only"))


def test_torch_is_not_needed_to_read(golden: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from pathlib import Path; from core.files.store import LocalStore;"
        " from core.formats.dcp import torch_dist;"
        "torch_dist.FORMAT.read(LocalStore(Path(sys.argv[1])));"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    for case in ("mcore_torch_dist/dense_gqa/tp2_pp2", "mcore0161_torch_dist/dense_gqa/tp2_pp2"):
        folder = str(folder_of(golden, case))
        subprocess.run(
            [sys.executable, "-c", code, folder],
            check=True,
            cwd=Path(__file__).resolve().parents[3],
        )


# ---- writing


@pytest.mark.each_value
@pytest.mark.parametrize("by", ["as_stored", "whole"])
@pytest.mark.parametrize("case", CASES)
def test_what_we_wrote_reads_back_equal(golden: Path, tmp_path: Path, case: str, by: str) -> None:
    source_dir = folder_of(golden, case)
    source, source_store = read(source_dir)
    ours, store = read(rewritten(source_dir, tmp_path / "ours", by=by))
    assert facet_of(ours, TorchDistFacts) == facet_of(source, TorchDistFacts)
    assert set(ours.tensors) == set(source.tensors)
    assert set(ours.objects) == set(source.objects)
    for key in source.tensors:
        assert ours.tensors[key] == source.tensors[key]
        assert (
            tensor_bytes(ours, store, key).tobytes()
            == tensor_bytes(source, source_store, key).tobytes()
        ), key


@pytest.mark.parametrize("case", CASES)
def test_the_config_is_written_as_megatron_writes_it(
    golden: Path, tmp_path: Path, case: str
) -> None:
    source_dir = folder_of(golden, case)
    ours = rewritten(source_dir, tmp_path / "ours")
    assert (ours / "metadata.json").read_bytes() == (source_dir / "metadata.json").read_bytes()
    assert (ours / "common.pt").exists() == (source_dir / "common.pt").exists()


@pytest.mark.parametrize("case", CASES)
def test_the_metadata_says_to_torch_what_megatron_said(
    golden: Path, tmp_path: Path, case: str
) -> None:
    source_dir = folder_of(golden, case)
    if CASES[case] == "0.12":
        pytest.skip("the original needs megatron's classes to be unpickled")
    ours = FileSystemReader(rewritten(source_dir, tmp_path / "ours")).read_metadata()
    theirs = FileSystemReader(source_dir).read_metadata()
    assert ours.planner_data is None
    assert set(ours.state_dict_metadata) == set(theirs.state_dict_metadata)
    for key, item in theirs.state_dict_metadata.items():
        our_entry = ours.state_dict_metadata[key]
        assert type(our_entry) is type(item)
        if isinstance(item, TensorStorageMetadata):
            assert isinstance(our_entry, TensorStorageMetadata)
            assert our_entry.size == item.size
            assert our_entry.properties == item.properties
            assert sorted(map(str, our_entry.chunks)) == sorted(map(str, item.chunks))
        else:
            assert isinstance(our_entry, BytesStorageMetadata)
    assert set(ours.storage_data) == set(theirs.storage_data)


@pytest.mark.parametrize("case", [case for case, dialect in CASES.items() if dialect != "0.12"])
def test_torch_loads_every_object_that_we_wrote(golden: Path, tmp_path: Path, case: str) -> None:
    source_dir = folder_of(golden, case)
    ours = rewritten(source_dir, tmp_path / "ours")
    pytest.importorskip("numpy")
    keys = [
        key
        for key in read(source_dir)[0].objects
        if not key.startswith("rerun_state_machine_state")  # names classes of Megatron
    ]
    assert keys
    for key in keys:
        result = torch.load(io.BytesIO(item_bytes(ours, key)), weights_only=False)
        assert described(result) == described(
            torch.load(io.BytesIO(item_bytes(source_dir, key)), weights_only=False)
        )


def described(value: object) -> object:
    """A loaded object in a form that ``==`` compares bit for bit."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), tuple(value.shape), plain_bytes(value))
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (type(value), [described(item) for item in value])
    if hasattr(value, "tobytes"):
        return (str(value.dtype), value.shape, value.tobytes())
    return value


def test_a_common_file_takes_the_place_of_a_common_object(golden: Path, tmp_path: Path) -> None:
    source_dir = folder_of(golden, "mcore_torch_dist/dense_gqa/tp2_pp2_optim")
    ours = rewritten(source_dir, tmp_path / "ours", dialect="common_pt")
    catalog, _ = read(ours)
    assert facet_of(catalog, TorchDistFacts).dialect == "common_pt"
    config = json.loads((ours / "metadata.json").read_text())
    assert config["common_backend"] == "torch"
    assert catalog.common is not None
    assert set(catalog.common) == set(read(source_dir)[0].common or {})


def test_two_runs_give_the_same_bytes(golden: Path, tmp_path: Path) -> None:
    source_dir = folder_of(golden, "mcore0161_torch_dist/dense_gqa/tp2_pp2_optim")
    first, second = (rewritten(source_dir, tmp_path / name) for name in ("first", "second"))
    names = sorted(path.name for path in first.iterdir())
    assert names and names == sorted(path.name for path in second.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_metadata_is_the_last_image() -> None:
    target = catalog_of_arrays(
        format="torch_dist", arrays={"w": PlannedArray("w", "float32", (2, 3))}
    )
    images = torch_dist.lay_out(target)
    assert [image.path for image in images] == [
        "__0_0.distcp",
        "metadata.json",
        "common.pt",
        ".metadata",
    ]
    assert [image.is_metadata for image in images] == [False, False, False, True]


def test_objects_that_are_no_sharded_objects_join_the_common_state(tmp_path: Path) -> None:
    skeleton = {
        "model": {"w": TensorLeaf("model.w")},
        "sched": {"steps": [{"n": 1}, {"n": ObjectLeaf("sched.steps.1.n")}]},
        "iteration": 7,
    }
    objects = {
        "sched.steps.0.n": StoredObject("sched.steps.0.n", value=1),
        "sched.steps.1.n": StoredObject("sched.steps.1.n", value=2),
        "iteration": StoredObject("iteration", value=7),
        "x/shard_0_1": StoredObject("x/shard_0_1", value=["x"]),
        "elsewhere": StoredObject("elsewhere", value=3),
    }
    target = catalog_of_arrays(
        format="torch_dist",
        arrays={"model.w": PlannedArray("model.w", "float32", (2, 3))},
        objects=objects,
        skeleton=skeleton,
    )
    images = torch_dist.lay_out(replace(target, common={"args": None}))
    common = next(image for image in images if image.path == "common.pt")
    content = bytearray(common.size)
    for offset, data in common.literals(lambda name: 0):
        content[offset : offset + len(data)] = data
    assert torch.load(io.BytesIO(bytes(content)), weights_only=True) == {
        "sched": {"steps": [{"n": 1}, {"n": 2}]},
        "iteration": 7,
        "elsewhere": 3,
        "args": None,
    }


def test_an_unknown_dialect_is_refused() -> None:
    target = catalog_of_arrays(format="torch_dist", arrays={}).with_facet(
        TorchDistFacts(dialect="0.99")
    )
    with pytest.raises(UnsupportedError, match=r"0\.99"):
        torch_dist.lay_out(target)


# ---- bad input


@pytest.fixture
def copied(golden: Path, tmp_path: Path) -> Callable[[str], Path]:
    def copy(case: str) -> Path:
        return Path(shutil.copytree(folder_of(golden, case), tmp_path / "copy"))

    return copy


HEAD = "mcore_torch_dist/dense_gqa/tp2_pp2"
V0161 = "mcore0161_torch_dist/dense_gqa/tp2_pp2"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "17", '{"sharded_backend": "torch_dist"', "\xff\xfe", "[" * 100_000]
)
def test_bad_json_is_corrupt_and_names_the_file(copied: Callable[[str], Path], text: str) -> None:
    folder = copied(HEAD)
    (folder / "metadata.json").write_text(text, encoding="latin-1")
    assert torch_dist.FORMAT.sniff(LocalStore(folder))
    with pytest.raises(CorruptError) as caught:
        read(folder)
    assert caught.value.file == "metadata.json"


def test_dcp_files_under_the_name_of_the_zarr_backend_are_refused(
    copied: Callable[[str], Path],
) -> None:
    folder = copied(HEAD)
    (folder / "metadata.json").write_text(
        '{"sharded_backend": "zarr", "sharded_backend_version": 1}'
    )
    assert torch_dist.FORMAT.sniff(LocalStore(folder))
    with pytest.raises(CorruptError, match="'zarr'"):
        read(folder)


def test_a_newer_version_of_the_backend_is_refused(copied: Callable[[str], Path]) -> None:
    folder = copied(HEAD)
    (folder / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 2}'
    )
    with pytest.raises(UnsupportedError, match="version 2"):
        read(folder)


def test_a_missing_config_is_an_unfinished_save(copied: Callable[[str], Path]) -> None:
    folder = copied(V0161)
    (folder / "metadata.json").unlink()
    assert torch_dist.FORMAT.sniff(LocalStore(folder))
    with pytest.raises(MissingShardError, match=r"metadata\.json"):
        read(folder)


def test_a_missing_common_state_is_named(copied: Callable[[str], Path]) -> None:
    folder = copied(V0161)
    (folder / "common.pt").unlink()
    with pytest.raises(MissingShardError, match=r"common\.pt"):
        read(folder)


def test_a_missing_metadata_is_named(copied: Callable[[str], Path]) -> None:
    folder = copied(V0161)
    (folder / ".metadata").unlink()
    with pytest.raises(MissingShardError, match="a copy left the file out") as caught:
        read(folder)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("copy .metadata from the original")


@pytest.mark.parametrize("name", ["common.pt", "__1_0.distcp", ".metadata"])
def test_a_cut_file_is_named(copied: Callable[[str], Path], name: str) -> None:
    folder = copied(V0161)
    path = folder / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CorruptError) as caught:
        read(folder)
    assert caught.value.file == name


def test_a_common_state_that_is_no_dict_is_corrupt(copied: Callable[[str], Path]) -> None:
    folder = copied(V0161)
    torch.save([1, 2], folder / "common.pt")
    with pytest.raises(CorruptError, match="not a dict"):
        read(folder)


def test_a_common_state_that_runs_code_runs_nothing(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    class Attack:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            import os

            return os.system, (f"touch {tmp_path / 'run'}",)

    folder = copied(V0161)
    torch.save({"args": Attack(), "iteration": 10}, folder / "common.pt")
    catalog, _ = read(folder)
    assert not (tmp_path / "run").exists()
    assert "system" in repr(catalog.args)
    metadata = pickle.dumps(Attack())
    (folder / ".metadata").write_bytes(metadata)
    with pytest.raises(UnsafeError):
        open_checkpoint(folder)
    assert not (tmp_path / "run").exists()
