"""Torch zips without a directory: ``inspect`` shows the tensors whose records are complete."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import CheckpointingException, CorruptError
from core.files.store import LocalStore
from core.formats.torch.format import read_file_catalog
from core.opening.damaged import open_readable_part
from core.verbs.checks.finding import Level, Severity
from core.verbs.convert.job import Job
from core.verbs.convert.run import run
from core.verbs.validate.run import validate
from tests.support.rank_files import MODEL_FILE


def state() -> dict[str, Any]:
    model = {f"layers.{n}.weight": torch.arange(40.0 * n, 40.0 * n + 40) for n in range(6)}
    model["tied"] = model["layers.1.weight"]
    return {"model": model, "iteration": 7}


@pytest.fixture
def intact(tmp_path: Path) -> Path:
    torch.save(state(), tmp_path / "intact.pt")
    return tmp_path / "intact.pt"


def positions(path: Path) -> dict[str, tuple[int, int]]:
    """Return key → first byte and end of the tensors of an intact file."""
    arrays = [
        fragment.array
        for fragment in read_file_catalog(LocalStore(path.parent), path.name).all_fragments()
    ]
    return {
        item.name: (item.extent.offset, item.extent.offset + item.n_bytes)
        for item in arrays
        if item is not None
    }


def readable(path: Path) -> dict[str, tuple[int, int]]:
    """Return the same of the tensors that can be read of a damaged file."""
    checkpoint = open_readable_part(path)
    assert len(checkpoint.problems) == 1 and checkpoint.problems[0].file == path.name
    return {
        array.name: (array.extent.offset, array.extent.offset + array.n_bytes)
        for array in (fragment.array for fragment in checkpoint.catalog.all_fragments())
        if array is not None
    }


def test_a_cut_file_shows_the_tensors_before_the_cut(intact: Path) -> None:
    expected = positions(intact)
    data = intact.read_bytes()
    pickle_end = data.index(b"PK\x07\x08") + 16
    for size in range(pickle_end + 1, len(data), 37):
        (cut := intact.with_name("cut.pt")).write_bytes(data[:size])
        # The checksum after a tensor's bytes proves that they are its bytes.
        assert readable(cut) == {
            key: (start, end) for key, (start, end) in expected.items() if end + 16 <= size
        }, size
        assert open_readable_part(cut).iteration == 7


def test_a_file_without_its_pickle_shows_nothing(intact: Path) -> None:
    intact.write_bytes(intact.read_bytes()[:150])
    with pytest.raises(CorruptError, match="cut short"):
        open_readable_part(intact)


def directory_zeroed(data: bytes) -> bytes:
    at = data.index(b"PK\x01\x02")
    return data[:at] + bytes(20) + data[at + 20 :]


def zeroed_behind(data: bytes) -> bytes:
    return data[: len(data) * 3 // 4] + bytes(len(data) - len(data) * 3 // 4)


@pytest.mark.parametrize("damage", [directory_zeroed, zeroed_behind])
def test_a_damaged_directory_is_not_needed(intact: Path, damage: Callable[[bytes], bytes]) -> None:
    expected, data = positions(intact), damage(intact.read_bytes())
    intact.write_bytes(data)
    zeros_at = len(data.rstrip(b"\0"))
    assert readable(intact) == {
        key: span for key, span in expected.items() if span[1] + 16 <= zeros_at
    }


def test_a_cut_file_is_not_converted_and_the_error_says_what_to_do(
    intact: Path, tmp_path: Path
) -> None:
    intact.write_bytes(intact.read_bytes()[:-30])
    with pytest.raises(CorruptError, match="cut short") as caught:
        run(Job(src=intact, dst=tmp_path / "out.safetensors", to="safetensors"))
    assert "copy the file again" in str(caught.value.hint)
    assert not (tmp_path / "out.safetensors").exists()


def test_a_cut_shard_shows_its_readable_tensors(golden: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(golden / "hf/llama/bin_sharded", tmp_path / "model"))
    index = json.loads((model / "pytorch_model.bin.index.json").read_text())
    shard = model / sorted(set(index["weight_map"].values()))[0]
    lost = list(positions(shard).items())[-1]
    shard.write_bytes(shard.read_bytes()[: lost[1][1] - 4])
    keys = {
        key for key, file in index["weight_map"].items() if file != shard.name or key != lost[0]
    }
    # Tensors behind the last one in the file are lost with it.
    assert set(open_readable_part(model).catalog.tensors) <= keys
    assert any(
        index["weight_map"][key] == shard.name for key in open_readable_part(model).catalog.tensors
    )


@pytest.mark.parametrize(
    "name",
    ["mcore_legacy/dense_gqa/tp2_pp1_dp2_distopt", "deepspeed/zero3_dp2_bf16"],
)
def test_a_cut_file_of_a_rank_named_alone_shows_its_tensors(
    name: str, golden: Path, tmp_path: Path
) -> None:
    files = sorted((golden / name).rglob("*.pt"))
    assert {MODEL_FILE} & {file.name for file in files} or "deepspeed" in name
    for file in files:
        (tmp_path / file.parent.name).mkdir(exist_ok=True)
        cut = tmp_path / file.parent.name / file.name
        cut.write_bytes(file.read_bytes()[:-100])
        try:
            n_expected = len(positions(file))
        except CheckpointingException:
            continue
        assert len(open_readable_part(cut).catalog.tensors) == n_expected


@pytest.mark.parametrize("level", list(Level))
def test_bytes_behind_a_zip_are_noted_and_reported(
    intact: Path, tmp_path: Path, level: Level
) -> None:
    expected = positions(intact)
    intact.write_bytes(intact.read_bytes() + bytes(100))
    assert positions(intact) == expected
    assert torch.load(intact)["iteration"] == 7
    (finding,) = validate(intact, level=level).findings
    assert (finding.code, finding.severity) == ("CK112", Severity.WARNING)
    result = run(Job(src=intact, dst=tmp_path / "out.pt", to="torch"))
    assert any("100 bytes after the end of the zip" in note for note in result.notes)
    assert positions(tmp_path / "out.pt").keys() == expected.keys()


def test_a_rank_file_with_bytes_behind_it_is_reported_at_the_lowest_level(
    golden: Path, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(golden / "mcore_legacy/dense_gqa/tp2_pp2", tmp_path / "run"))
    *_, last = sorted(root.rglob(MODEL_FILE))
    last.write_bytes(last.read_bytes() + bytes(512))
    assert [finding.code for finding in validate(root).findings] == ["CK112"]
