"""Entries that an index or a header lists without data: refused, and left out on request.

Each case takes a checkpoint of other software, and adds an entry to its index alone. With
``drop_missing`` the result is what the unchanged checkpoint becomes.
"""

from __future__ import annotations

import json
import pickle
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt_cli.app import main
from core.errors import MissingShardError
from core.formats.missing_entries import DROP_MISSING
from core.opening.open import open_checkpoint
from core.verbs.convert.run import Job, run
from core.verbs.diff.run import DiffJob, diff
from core.verbs.validate.run import validate

ARCHIVES = Path(__file__).parents[1] / "golden"
KEY = "mtp.fc.weight"


def add_to_weight_map(folder: Path) -> str:
    (path,) = folder.glob("*.index.json")
    index = json.loads(path.read_text())
    index["weight_map"][KEY] = max(index["weight_map"].values())
    path.write_text(json.dumps(index))
    return KEY


def add_to_header(folder: Path) -> str:
    """As torch's consolidation does for a tensor of which no rank has a piece."""
    add_to_weight_map(folder)
    path = max(folder.glob("*.safetensors"))
    data = path.read_bytes()
    n_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + n_bytes])
    header[KEY] = {"shape": [], "dtype": "", "data_offsets": [0, 0]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + n_bytes :])
    return KEY


def add_to_dcp(folder: Path) -> str:
    metadata = dcp.FileSystemReader(folder).read_metadata()
    size = torch.Size([4, 2])
    metadata.state_dict_metadata[KEY] = TensorStorageMetadata(
        TensorProperties(torch.float32), size, [ChunkStorageMetadata(torch.Size([0, 0]), size)]
    )
    if metadata.planner_data is not None:
        metadata.planner_data[KEY] = (KEY,)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return KEY


def add_to_orbax(folder: Path) -> str:
    path = folder / "_METADATA"
    tree = json.loads(path.read_text())
    text, row = next(
        (text, row)
        for text, row in tree["tree_metadata"].items()
        if row["value_metadata"]["value_type"] in ("jax.Array", "np.ndarray")
    )
    row = json.loads(json.dumps(row))
    row["key_metadata"][-1]["key"] = "lost"
    tree["tree_metadata"][f"{text}, lost"] = row
    path.write_text(json.dumps(tree))
    return ".".join(step["key"] for step in row["key_metadata"])


def add_to_consolidated(folder: Path) -> str:
    """Remove an array that the consolidated metadata lists."""
    shutil.rmtree(folder / "lost")
    return "lost"


def zarr_group(folder: Path, *, has_lost: bool) -> None:
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(folder, mode="w", zarr_format=2)
    for name in ("a", "sub/b", "lost")[: 2 + has_lost]:
        group.create_array(name, shape=(4, 4), chunks=(2, 4), dtype="float32")[:] = 1
    zarr.consolidate_metadata(folder)


CASES: dict[str, tuple[str, Callable[[Path], str]]] = {
    "safetensors index": ("hf/llama/safetensors_sharded", add_to_weight_map),
    "safetensors header": ("hf/llama/safetensors_sharded", add_to_header),
    "bin index": ("hf/llama/bin_sharded", add_to_weight_map),
    "flax index": ("pieces", add_to_weight_map),
    "DCP": ("torch_dcp/fsdp2_dp2", add_to_dcp),
    "torch_dist": ("mcore_torch_dist/dense_gqa/tp2_pp2/iter_0000010", add_to_dcp),
    "Orbax": ("orbax/ocdbt_zarr2", add_to_orbax),
    "zarr": ("zarr", add_to_consolidated),
}


@pytest.mark.parametrize("case", CASES)
def test_entry_without_data_is_refused_and_left_out_on_request(
    case: str, golden: Path, tmp_path: Path
) -> None:
    name, add_entry = CASES[case]
    source, original = tmp_path / "source", golden / name
    if case == "zarr":
        original = tmp_path / "original"
        zarr_group(original, has_lost=False)
        zarr_group(source, has_lost=True)
    else:
        if case == "flax index":
            with tarfile.open(ARCHIVES / "flax.tar.xz") as archive:
                archive.extractall(tmp_path / "flax", filter="data")
            original = tmp_path / "flax" / name
        shutil.copytree(original, source)
    key = add_entry(source)

    with pytest.raises(MissingShardError) as error:
        open_checkpoint(source)
    assert error.value.key == key
    assert error.value.hint is not None
    assert DROP_MISSING in error.value.hint
    assert key in {finding.key for finding in validate(source).findings}

    for path, to in ((source, tmp_path / "a.pt"), (original, tmp_path / "b.pt")):
        report = run(Job(src=path, dst=to, to="torch", drop_missing=path is source))
        assert any(f"but no file contains: {key}" in note for note in report.notes) == (
            path is source
        )
    assert diff(DiffJob(a=tmp_path / "a.pt", b=tmp_path / "b.pt")).same


def test_command_line_has_the_option_of_the_hint(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    shutil.copytree(golden / "hf/llama/safetensors_sharded", source)
    add_to_weight_map(source)
    command = ["convert", str(source), str(tmp_path / "out.pt")]
    assert main(command) == 3
    assert "--drop-missing" in capsys.readouterr().err
    assert main([*command, "--drop-missing"]) == 0
