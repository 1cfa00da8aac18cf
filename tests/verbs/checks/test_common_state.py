"""What stands beside the model contradicts itself, the directory's name, or what lies there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core.errors import CheckpointingException, CorruptError
from core.opening.open import open_checkpoint
from core.verbs.checks.check import Level
from core.verbs.convert.run import Job, run
from tests.support.edited import Rows, copied, counted, edit_rank, edit_rows, found_in

RANKS = "mcore_legacy/dense_gqa/tp2_pp2_optim"
DIST = "mcore_torch_dist/dense_gqa/tp2_pp2"
ZARR = "mcore0121_zarr/dense_gqa/tp2_pp2"


def test_ranks_of_another_step_are_named_and_the_others_are_not(
    golden: Path, tmp_path: Path
) -> None:
    folder = copied(golden, RANKS, tmp_path)
    edit_rank(folder / "mp_rank_00_000", lambda loaded: loaded.update(iteration=20))

    def change(loaded: dict[str, Any]) -> None:
        loaded["checkpoint_version"] = 2.0
        loaded["opt_param_scheduler"]["num_steps"] = 7
        del loaded["rng_state"]

    edit_rank(folder / "mp_rank_01_001", change)
    findings = {
        (finding.code, finding.rank, finding.key) for finding in found_in(folder, Level.HEADERS)
    }
    assert findings == {
        ("CK503", "mp_rank_00_000", "iteration"),
        ("CK503", "mp_rank_01_001", "checkpoint_version"),
        ("CK503", "mp_rank_01_001", "opt_param_scheduler"),
        ("CK505", "mp_rank_01_001", "rng_state"),
    }


def test_a_renamed_iteration_is_found(golden: Path, tmp_path: Path) -> None:
    folder = copied(golden, DIST, tmp_path)
    folder = folder.rename(folder.parent / "iter_0000020")
    (finding,) = found_in(folder)
    assert (finding.code, finding.found) == ("CK502", "iteration 10")


def test_versions_that_nobody_writes_are_found(golden: Path, tmp_path: Path) -> None:
    folder = copied(golden, RANKS, tmp_path)
    for rank in sorted(folder.glob("mp_rank_*")):
        edit_rank(rank, lambda loaded: loaded.update(checkpoint_version=9))
    assert "CK504" in counted(found_in(folder))


def test_absent_random_states_are_named_one_by_one(golden: Path, tmp_path: Path) -> None:
    folder = copied(golden, DIST, tmp_path)
    gone = ["rng_state/shard_0.1_2.2", "rng_state/shard_1.0_2.2"]

    def change(rows: Rows) -> None:
        for key in gone:
            del rows[key]

    edit_rows(folder, change)
    findings = found_in(folder)
    assert {(finding.code, finding.key) for finding in findings} == {("CK505", key) for key in gone}


def test_a_backend_that_does_not_lie_there_is_found(golden: Path, tmp_path: Path) -> None:
    for name, other in ((DIST, "zarr"), (ZARR, "torch_dist")):
        folder = copied(golden, name, tmp_path / other)
        config = json.loads((folder / "metadata.json").read_text())
        (folder / "metadata.json").write_text(json.dumps({**config, "sharded_backend": other}))
        assert "CK506" in counted(found_in(folder))


@pytest.mark.parametrize("source", [DIST, ZARR])
@pytest.mark.parametrize(
    "config", [{"sharded_backend": name} for name in ("evil", "../x", 7, None)] + [{}], ids=str
)
def test_an_unknown_backend_is_refused_and_found(
    golden: Path, tmp_path: Path, source: str, config: dict[str, object]
) -> None:
    """``{}`` beside DCP files and Megatron's common state: Megatron would not load it either."""
    folder = copied(golden, source, tmp_path)
    (folder / "metadata.json").write_text(json.dumps(config))
    assert counted(found_in(folder)) == {"CK506": 1}
    with pytest.raises(CheckpointingException) as caught:
        open_checkpoint(folder)
    assert caught.value.file == "metadata.json"


def test_a_metadata_json_of_other_software_says_nothing(golden: Path, tmp_path: Path) -> None:
    folder = copied(golden, "torch_dcp/fsdp2_dp2", tmp_path)
    (folder / "metadata.json").write_text('{"author": "me"}')
    assert found_in(folder) == []
    checkpoint = open_checkpoint(folder)
    checkpoint.store.close()
    assert checkpoint.format.name == "dcp"


def test_a_version_of_the_backend_that_is_not_known_is_an_error(
    golden: Path, tmp_path: Path
) -> None:
    folder = copied(golden, DIST, tmp_path)
    (folder / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 2}'
    )
    assert counted(found_in(folder)) == {"CK506": 1}


def test_absent_arguments_are_a_warning_where_the_names_are_megatrons(
    golden: Path, tmp_path: Path
) -> None:
    import torch

    folder = copied(golden, "mcore0161_torch_dist/dense_gqa/tp2_pp2", tmp_path)
    torch.save({"iteration": 10, "checkpoint_version": 3.0}, folder / "common.pt")
    assert counted(found_in(folder)) == {"CK501": 1}


def _exchange(a: Path, b: Path) -> None:
    aside = a.with_name("aside")
    a.rename(aside)
    b.rename(a)
    aside.rename(b)


def test_rank_directories_that_were_exchanged_are_found_by_the_numbers_in_them(
    golden: Path, tmp_path: Path
) -> None:
    ranks = {
        RANKS: ("mp_rank_00_001", "mp_rank_01_001"),
        "mcore_legacy/dense_gqa/tp2_pp1_dp2_distopt": ("mp_rank_00", "mp_rank_01"),
        "mcore_legacy/moe_seq/tp2_pp1_ep2": ("mp_rank_01_000", "mp_rank_01_001"),
    }
    for number, (name, (a, b)) in enumerate(ranks.items()):
        folder = copied(golden, name, tmp_path / str(number))
        _exchange(folder / a, folder / b)
        findings = {(finding.code, finding.rank) for finding in found_in(folder, Level.HEADERS)}
        assert {("CK507", a), ("CK507", b)} <= findings
        with pytest.raises(CorruptError, match=r"global rank \d wrote this file"):
            run(Job(src=folder, dst=tmp_path / "out", to="torch_dist", fsync=False))


def test_a_file_copied_over_another_ranks_is_found(golden: Path, tmp_path: Path) -> None:
    folder = copied(golden, "mcore_legacy/moe_seq/tp2_pp1_ep2", tmp_path)
    file = "model_optim_rng.pt"
    (folder / "mp_rank_00_001" / file).write_bytes((folder / "mp_rank_00_000" / file).read_bytes())
    findings = {(finding.code, finding.rank) for finding in found_in(folder, Level.HEADERS)}
    assert findings == {("CK507", "mp_rank_00_000"), ("CK507", "mp_rank_00_001")}
    with pytest.raises(CorruptError, match="wrote the files of mp_rank_00_000, mp_rank_00_001"):
        run(Job(src=folder, dst=tmp_path / "out", to="hf", fsync=False))
    assert not (tmp_path / "out").exists()


def test_tools_that_leave_one_number_in_all_files_are_fine(golden: Path, tmp_path: Path) -> None:
    folder = copied(golden, RANKS, tmp_path)
    for rank in sorted(folder.glob("mp_rank_*")):
        edit_rank(rank, lambda loaded: setattr(loaded["args"], "rank", 0))
    assert found_in(folder, Level.HEADERS) == []
