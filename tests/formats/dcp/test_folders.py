"""DCP directories that are one checkpoint: a model and its optimizer, as accelerate saves them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dist_cp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckpt_cli.app import main
from core.errors import MissingShardError, UnsupportedError
from core.opening.open import open_checkpoint
from core.verbs.checks.finding import Level, Severity
from core.verbs.convert.run import Job, run
from core.verbs.validate.run import validate
from tests.support.broken import Change, patched

SOURCE = "accelerate/fsdp2_dp2/checkpoint_0"
MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"


def loaded_by_torch(folder: Path, tmp_path: Path) -> dict[str, object]:
    dcp_to_torch_save(folder, tmp_path / "by_torch.pt")
    loaded: dict[str, object] = torch.load(tmp_path / "by_torch.pt", weights_only=False)
    return loaded


def assert_equal(ours: object, theirs: object) -> None:
    """Equal trees, tensors bit for bit."""
    if isinstance(theirs, dict):
        assert isinstance(ours, dict)
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert_equal(ours[name], theirs[name])
    elif isinstance(theirs, torch.Tensor):
        assert isinstance(ours, torch.Tensor)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(ours, theirs)
    else:
        assert ours == theirs


def flipped(at: int) -> Change:
    """Flip a bit of the byte there."""

    def change(data: bytearray) -> None:
        data[at] ^= 1

    return change


def test_model_and_optimizer_of_accelerate_are_one_checkpoint(golden: Path, tmp_path: Path) -> None:
    opened = open_checkpoint(golden / SOURCE)
    assert (opened.format.name, opened.path) == ("dcp", golden / SOURCE)
    run(Job(src=golden / SOURCE, dst=tmp_path / "out.pt", to="torch", fsync=False))
    ours = torch.load(tmp_path / "out.pt", weights_only=True)
    assert {"model", "optimizer", "scheduler", "random_states_1"} <= ours.keys()
    for folder in (MODEL, OPTIMIZER):
        for name, value in loaded_by_torch(golden / SOURCE / folder, tmp_path).items():
            assert_equal(ours[name], value)


def test_one_dcp_directory_of_both_is_read_by_torch(golden: Path, tmp_path: Path) -> None:
    run(Job(src=golden / SOURCE, dst=tmp_path / "out", to="dcp", fsync=False))
    ours = loaded_by_torch(tmp_path / "out", tmp_path)
    theirs = loaded_by_torch(golden / SOURCE / MODEL, tmp_path)
    theirs |= loaded_by_torch(golden / SOURCE / OPTIMIZER, tmp_path)
    assert_equal({name: ours[name] for name in theirs}, theirs)
    scheduler = torch.load(golden / SOURCE / "scheduler.bin", weights_only=True)
    assert_equal(ours["scheduler"], scheduler)
    assert main(["diff", str(golden / SOURCE), str(tmp_path / "out")]) == 0


def test_each_directory_is_a_checkpoint_of_its_own(golden: Path) -> None:
    for folder in (MODEL, OPTIMIZER):
        assert open_checkpoint(golden / SOURCE / folder).path == golden / SOURCE / folder


def test_entries_of_a_second_model_have_its_number(tmp_path: Path) -> None:
    for number in range(2):
        weights = {"w": torch.arange(6.0) + number, "b": torch.ones(number + 1)}
        states = {
            "state": {"w": {"exp_avg": torch.arange(3.0) - number}},
            "param_groups": [{"lr": 0.1 + number}],
        }
        dist_cp.save(
            {"model": weights}, checkpoint_id=tmp_path / "two" / f"pytorch_model_fsdp_{number}"
        )
        dist_cp.save({"optimizer": states}, checkpoint_id=tmp_path / "two" / f"optimizer_{number}")
    run(Job(src=tmp_path / "two", dst=tmp_path / "out.pt", to="torch", fsync=False))
    ours = torch.load(tmp_path / "out.pt", weights_only=True)
    assert sorted(ours) == ["model", "model_1", "optimizer", "optimizer_1"]
    assert torch.equal(ours["model_1"]["w"], torch.arange(6.0) + 1)
    assert ours["optimizer_1"]["param_groups"][0]["lr"] == 1.1


def test_entries_of_one_name_in_two_directories_are_refused(tmp_path: Path) -> None:
    for folder in (MODEL, OPTIMIZER):
        dist_cp.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / folder)
    with pytest.raises(UnsupportedError, match="both contain an entry with this name"):
        open_checkpoint(tmp_path)


def test_half_of_a_save_is_refused(golden: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(golden / SOURCE, tmp_path / "checkpoint_0"))
    os.unlink(path / OPTIMIZER / ".metadata")
    with pytest.raises(MissingShardError, match=f"{OPTIMIZER}/.metadata is missing"):
        open_checkpoint(path)
    shutil.rmtree(path / MODEL)
    with pytest.raises(UnsupportedError):
        open_checkpoint(path)


def test_a_small_torch_file_beside_directories_is_never_the_checkpoint(
    golden: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(golden / SOURCE, tmp_path / "checkpoint_0"))
    for folder in (MODEL, OPTIMIZER):
        (path / folder).rename(path / f"my_{folder}")
    with pytest.raises(UnsupportedError) as refusal:
        open_checkpoint(path)
    assert all(str(path / f"my_{name}") in str(refusal.value.hint) for name in (MODEL, OPTIMIZER))
    assert [
        finding.code for finding in validate(path).findings if finding.severity == Severity.ERROR
    ] == ["CK100"]


def test_a_flipped_byte_in_either_directory_is_found(golden: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(golden / SOURCE, tmp_path / "checkpoint_0"))
    assert validate(path, level=Level.DEEP).worst in (None, Severity.NOTE)
    opened = open_checkpoint(path)
    for key in ("model.0.weight", "optimizer.state.0.weight.exp_avg"):
        array = opened.catalog.fragments(key)[1].array
        assert array is not None
        extent = array.locate(opened.store).extent
        patched(path / extent.file, flipped(extent.offset + 5))
        errors = [
            finding
            for finding in validate(path, level=Level.DEEP).findings
            if finding.severity == Severity.ERROR
        ]
        assert [(error.code, error.file) for error in errors] == [("CK701", extent.file)]
        patched(path / extent.file, flipped(extent.offset + 5))


def test_links_need_one_directory(golden: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="separate directories"):
        run(Job(src=golden / SOURCE, dst=tmp_path / "out", metadata_only=True, fsync=False))
