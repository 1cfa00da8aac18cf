"""Zarr chunks that are not stored: groups of zarr-python and tensorstore, against what these
libraries read.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import zarr as zarr_python
from safetensors import safe_open

from ckpt_cli.app import main
from core.arrays.dtypes import DTYPES
from core.engine.catalog.catalog import Catalog
from core.errors import CorruptError, MissingShardError
from core.files.store import LocalStore, MemoryStore
from core.formats.registry import sniffed
from core.formats.zarr import format as zarr
from core.formats.zarr import format3 as zarr3
from core.formats.zarr.fill import fill_bytes, unstored
from core.opening.open import open_checkpoint
from core.verbs.convert.run import Job, run
from tests.support.materialize import tensor_bytes
from tests.support.teams import run_team
from tests.support.zarr_files import as_bytes, source_of, written
from tests.verbs.convert.workers.test_run import convert

NUMBERS: dict[str, object] = {
    "float32": 0.1,
    "float64": -1e300,
    "float16": "-Infinity",
    "complex64": [1.5, "NaN"],
    "bool": True,
    "int8": -7,
    "uint16": 65535,
    "int64": 2**62 + 1,
}
VALUES = (
    0,
    1,
    -7,
    255,
    2**63,
    1.5,
    0.1,
    -0.0,
    1e30,
    True,
    False,
    "NaN",
    "Infinity",
    "-Infinity",
    None,
    "abc",
    "AAAA",
    "0x7f",
    "0xff80",
    "0x7fc00001",
    "0x7ff8000000000001",
    [0.1, -2.0],
    [1.5, "NaN"],
    [1.0],
    {"a": 1},
)
DTYPE_NAMES = tuple(
    """
    float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz
    float8_e5m2fnuz int64 int8 uint8 uint16 bool complex64 complex128
    """.split()
)


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def filled_by_tensorstore(value: object, dtype: str, zarr_format: int) -> bytes | None:
    """An element of an array without chunks, as tensorstore reads it; None if it refuses the
    metadata.
    """
    if zarr_format == 3:
        plain = {"name": "bytes", "configuration": {"endian": "little"}}
        grid = {"name": "regular", "configuration": {"chunk_shape": [1]}}
        metadata = {
            "shape": [1],
            "chunk_grid": grid,
            "data_type": dtype,
            "fill_value": value,
            "codecs": [plain],
        }
    else:
        code = dtype if dtype in ml_dtypes.__dict__ else numpy_dtype(dtype).str
        metadata = {
            "shape": [1],
            "chunks": [1],
            "dtype": code,
            "fill_value": value,
            "compressor": None,
        }
    driver = "zarr" if zarr_format == 2 else "zarr3"
    spec = {"driver": driver, "kvstore": "memory://", "metadata": metadata}
    try:
        array = ts.open(spec, create=True, context=ts.Context()).result()
    except ValueError:
        return None
    return np.asarray(array.read().result()).tobytes()


@pytest.mark.parametrize(("dtype", "zarr_format"), [*product(DTYPE_NAMES, (2, 3))])
def test_a_fill_value_is_the_element_that_tensorstore_reads(dtype: str, zarr_format: int) -> None:
    for value in VALUES:
        ours = fill_bytes(value, dtype, zarr_format=zarr_format)
        if ours is not None:
            assert ours == filled_by_tensorstore(value, dtype, zarr_format), value
        # What is rounded, or too large, is refused rather than guessed; so are numbers for complex
        # types.
    wanted = {"bool": [False, True], "complex": [[0.1, -2.0]]}.get(DTYPES[dtype].kind, [0, 1])
    assert None not in [fill_bytes(value, dtype, zarr_format=zarr_format) for value in wanted]
    assert (fill_bytes(None, dtype, zarr_format=zarr_format) is None) == (zarr_format == 3)
    assert fill_bytes("AAAA", dtype, zarr_format=zarr_format) is None


def group_by_zarr_python(
    folder: Path, zarr_format: int, **arrays: tuple[str, object]
) -> dict[str, np.ndarray[Any, Any]]:
    """Write arrays of (7, 5) in chunks of (2, 3), of which some equal the fill value; return what
    zarr-python reads.
    """
    group: Any = zarr_python.open_group(folder, mode="w", zarr_format=zarr_format)
    for name, (dtype, fill) in arrays.items():
        element = np.frombuffer(fill_bytes(fill, dtype, zarr_format=zarr_format) or b"", dtype)[0]
        array = group.create_array(
            name, shape=(7, 5), chunks=(2, 3), dtype=dtype, fill_value=element
        )
        data = (np.arange(35).reshape(7, 5) % 2).astype(dtype)
        data[2:4, 3:] = data[6:, :3] = element
        array[...] = data
    read = zarr_python.open_group(folder, mode="r")
    return {name: np.asarray(read[name][...]) for name in arrays}  # type: ignore[index]


def check_reads(folder: Path, wanted: dict[str, np.ndarray[Any, Any]]) -> Catalog:
    store = LocalStore(folder)
    catalog = sniffed(store).read(store)
    for key, value in wanted.items():
        assert (tensor_bytes(catalog, store, key) == as_bytes(value)).all(), key
    return catalog


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_chunks_that_zarr_python_leaves_out_are_the_fill_value(
    zarr_format: int, tmp_path: Path
) -> None:
    arrays = {f"{dtype}": (dtype, fill) for dtype, fill in NUMBERS.items()}
    wanted = group_by_zarr_python(tmp_path / "z", zarr_format, **arrays)
    catalog = check_reads(tmp_path / "z", wanted)
    assert {tensor.key: tensor.n_chunks for tensor in unstored(catalog)} == dict.fromkeys(
        NUMBERS, 2
    )
    report = run(Job(src=tmp_path / "z", dst=tmp_path / "out", to="zarr3", verify=True))
    assert check_reads(tmp_path / "out", wanted)
    assert any("16 chunks of bool and 7 more are not stored" in note for note in report.notes)


def test_a_fill_value_of_null_means_zeros_as_zarr_python_and_tensorstore_read_it(
    tmp_path: Path,
) -> None:
    root: Any = zarr_python.open_group(tmp_path / "z", mode="w", zarr_format=2)
    root.create_array("w", shape=(4, 2), chunks=(2, 2), dtype="f4", fill_value=None)[:2] = 1
    assert json.loads((tmp_path / "z/w/.zarray").read_text())["fill_value"] is None
    check_reads(tmp_path / "z", {"w": np.array([[1, 1], [1, 1], [0, 0], [0, 0]], "f4")})


def test_inner_chunks_that_shards_leave_out_and_whole_shards_are_the_fill_value(
    tmp_path: Path,
) -> None:
    group: Any = zarr_python.open_group(tmp_path / "z", mode="w", zarr_format=3)
    array = group.create_array(
        "w", shape=(10, 6), chunks=(2, 3), shards=(4, 6), dtype="f4", fill_value=2.5
    )
    data = np.arange(60, dtype="f4").reshape(10, 6)
    data[2:4, :3] = data[4:8] = 2.5
    array[...] = data
    catalog = check_reads(tmp_path / "z", {"w": data})
    (tensor,) = unstored(catalog)
    assert (tensor.n_chunks, tensor.n_bytes) == (2, (6 + 24) * 4)
    run(Job(src=tmp_path / "z", dst=tmp_path / "out.safetensors", to="safetensors"))
    with safe_open(tmp_path / "out.safetensors", framework="np") as file:
        assert (file.get_tensor("w") == data).all()


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_chunks_that_were_removed_as_they_became_the_fill_value_are_it(
    zarr_format: int, tmp_path: Path
) -> None:
    group: Any = zarr_python.open_group(tmp_path / "z", mode="w", zarr_format=zarr_format)
    array = group.create_array("w", data=np.ones((4, 4), "f4"), chunks=(2, 2))
    array[...] = 0
    assert {path.name for path in (tmp_path / "z/w").rglob("*") if path.is_file()} <= {
        ".zarray",
        ".zattrs",
        "zarr.json",
    }
    check_reads(tmp_path / "z", {"w": np.zeros((4, 4), "f4")})


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
def test_bfloat16_chunks_that_tensorstore_leaves_out_are_the_fill_value(
    driver: str, tmp_path: Path
) -> None:
    metadata: dict[str, Any] = {
        "shape": [6],
        "chunks": [2],
        "dtype": "bfloat16",
        "fill_value": "NaN",
    }
    if driver == "zarr3":
        grid = {"name": "regular", "configuration": {"chunk_shape": [2]}}
        metadata = {"shape": [6], "chunk_grid": grid, "data_type": "bfloat16", "fill_value": "NaN"}
    spec = {"driver": driver, "kvstore": f"file://{tmp_path}/z/w/", "metadata": metadata}
    array = ts.open(spec, create=True).result()
    data = np.array([1, 2, math.nan, math.nan, 5, math.nan], ml_dtypes.bfloat16)
    array.write(data).result()
    check_reads(tmp_path / "z", {"w": np.asarray(array.read().result())})


@pytest.fixture
def group(tmp_path: Path) -> Path:
    """A group of zarr-python's with ``w``, of which chunk 1 is not stored."""
    root: Any = zarr_python.open_group(tmp_path / "group", mode="w", zarr_format=3)
    root.create_array("w", shape=(6,), chunks=(2,), dtype="f4")[...] = np.array(
        [1, 2, 0, 0, 5, 6], "f4"
    )
    assert not (tmp_path / "group/w/c/1").exists()
    return tmp_path / "group"


VERBS: dict[str, Callable[[Path, Path], list[object]]] = {
    "inspect": lambda group, out: ["inspect", group],
    "convert": lambda group, out: ["convert", group, out, "--to", "dcp"],
    "plan": lambda group, out: ["convert", group, out, "--to", "dcp", "--dry-run"],
    "validate": lambda group, out: ["validate", group],
    "deep": lambda group, out: ["validate", "--deep", group],
    "diff": lambda group, out: ["diff", group, group],
    "manifest": lambda group, out: ["manifest", group],
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_tells_of_chunks_that_are_not_stored(
    verb: str, group: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(word) for word in VERBS[verb](group, tmp_path / "out")]
    assert main(words) == 0
    page = capsys.readouterr().out
    assert "fill value" in page and "1 chunk" in page and "w/c/1" in page
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    (group / "ckpt-manifest.json").unlink(missing_ok=True)
    assert main([*words, "--missing-chunks", "error"]) == (1 if words[0] == "validate" else 3)
    outputs = capsys.readouterr()
    assert "1 chunk is missing" in outputs.out + outputs.err
    assert not (tmp_path / "out").exists()


def test_several_workers_write_fill_values_as_one_process_does(group: Path, tmp_path: Path) -> None:
    run(Job(src=group, dst=tmp_path / "one.pt", to="torch", fsync=False))
    run_team(2, convert, Job(src=group, dst=tmp_path / "two.pt", to="torch", fsync=False))
    assert (tmp_path / "two.pt").read_bytes() == (tmp_path / "one.pt").read_bytes()


def test_a_chunk_that_the_manifest_lists_is_missing(
    group: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["manifest", str(group)]) == 0
    assert open_checkpoint(group).notes  # the manifest does not list what was never there
    (group / "w/c/2").unlink()
    with pytest.raises(MissingShardError, match="only 1 of 3 chunks exist") as caught:
        open_checkpoint(group)
    assert caught.value.file == "w/c/2"
    assert main(["validate", str(group)]) == 1
    assert "CK141" in capsys.readouterr().out


def test_a_chunk_of_a_group_of_ours_is_missing_though_zarr_would_fill_it(tmp_path: Path) -> None:
    source, store = source_of({"w": ("float32", (4, 6))}, chunks={"w": (2, 3)})
    folder = written(source, store, zarr3.FORMAT, tmp_path / "ours")
    (folder / "ckpt-manifest.json").unlink(missing_ok=True)
    (folder / "w/c/1/0").unlink()
    with pytest.raises(MissingShardError, match="only 3 of 4 chunks exist"):
        zarr3.FORMAT.read(LocalStore(folder))


@pytest.mark.parametrize(
    "gone", [(), ("metadata.json",), ("common.pt",), ("metadata.json", "common.pt")]
)
def test_a_chunk_of_a_megatron_checkpoint_is_missing_whatever_else_is_lost(
    gone: tuple[str, ...], golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "run"
    shutil.copytree(golden / "mcore0121_zarr/dense_gqa/tp2_pp2", root)
    (folder,) = root.glob("iter_*")
    (folder / "embedding.word_embeddings.weight/0.0").unlink()
    for name in gone:
        (folder / name).unlink()
    if len(gone) != 1:
        with pytest.raises(MissingShardError, match="only 1 of 2 chunks exist"):
            zarr.FORMAT.read(LocalStore(folder))
    assert main(["validate", str(root)]) == 1
    assert "CK141" in capsys.readouterr().out


@pytest.mark.parametrize(("zarr_format", "name"), [(2, "c/0"), (2, "c.0"), (3, "0"), (3, "c.0")])
def test_chunks_under_names_of_another_kind_are_not_read_as_fill_values(
    zarr_format: int, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root: Any = zarr_python.open_group(tmp_path / "z", mode="w", zarr_format=zarr_format)
    root.create_array("w", shape=(2,), chunks=(2,), dtype="f4")[...] = 1
    path = tmp_path / "z/w" / name
    path.parent.mkdir(exist_ok=True)
    (tmp_path / "z/w" / ("0" if zarr_format == 2 else "c/0")).rename(path)
    store = LocalStore(tmp_path / "z")
    with pytest.raises(CorruptError):
        sniffed(store).read(store)
    assert main(["validate", str(tmp_path / "z")]) == 1
    assert "CK144" in capsys.readouterr().out


def test_a_grid_of_very_many_absent_chunks_takes_few_fragments() -> None:
    metadata = {
        "zarr_format": 2,
        "shape": [10**6, 10**5],
        "chunks": [1, 10],
        "dtype": "<f4",
        "order": "C",
        "fill_value": 1.5,
        "compressor": None,
        "filters": None,
    }
    store = MemoryStore(
        {".zgroup": b"{}", "w/.zarray": json.dumps(metadata).encode(), "w/5.7": bytes(40)}
    )
    catalog = zarr.FORMAT.read(store)
    assert len(catalog.fragments("w")) <= 1 + 2 * 3
    assert sum(fragment.box.n_elements for fragment in catalog.fragments("w")) == 10**11
    (tensor,) = unstored(catalog)
    assert tensor.n_chunks == 10**10 - 1


def test_metadata_that_ask_for_absurdly_many_fill_values_are_refused() -> None:
    metadata = {
        "zarr_format": 2,
        "shape": [1 << 50],
        "chunks": [1 << 20],
        "dtype": "<f4",
        "order": "C",
        "fill_value": 0,
        "compressor": None,
        "filters": None,
    }
    store = MemoryStore({".zgroup": b"{}", "w/.zarray": json.dumps(metadata).encode()})
    with pytest.raises(MissingShardError, match=f"0 of {1 << 30} chunks exist"):
        zarr.FORMAT.read(store)


@pytest.mark.parametrize("value", ["abc", 2**40, {"a": 1}])
def test_a_fill_value_that_the_type_cannot_hold_fills_nothing(value: object) -> None:
    metadata = {
        "zarr_format": 2,
        "shape": [4],
        "chunks": [2],
        "dtype": "<i4",
        "order": "C",
        "fill_value": value,
        "compressor": None,
        "filters": None,
    }
    files = {
        ".zgroup": b"{}",
        "w/.zarray": json.dumps(metadata).encode(),
        "w/0": bytes(8),
        "w/1": bytes(8),
    }
    assert zarr.FORMAT.read(MemoryStore(files)).tensors  # as long as it is not needed
    del files["w/1"]
    with pytest.raises(MissingShardError, match="only 1 of 2 chunks exist"):
        zarr.FORMAT.read(MemoryStore(files))


def test_zarr_3_metadata_without_a_fill_value_fill_nothing(group: Path) -> None:
    path = group / "w/zarr.json"
    metadata = json.loads(path.read_text())
    del metadata["fill_value"]
    path.write_text(json.dumps(metadata))
    with pytest.raises(MissingShardError, match="only 2 of 3 chunks exist"):
        zarr3.FORMAT.read(LocalStore(group))
