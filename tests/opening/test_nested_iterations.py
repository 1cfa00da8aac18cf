"""A training root whose iterations hold DeepSpeed's directory: every verb reads the same
checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpt_cli.app import main
from core.errors import UsageError
from core.opening.open import open_checkpoint
from core.publish.manifest.inventory import default_manifest_path
from core.verbs.checks.check import Level, Severity
from core.verbs.validate.newest import find_newest_valid
from core.verbs.validate.run import Validation, validate
from tests.support.rank_files import load_rank_file

RUNS = ("trainer/zero2_dp2", "trainer/zero3_dp2", "accelerate/zero2_dp2")
STEP = "checkpoint-2/global_step2"


@pytest.fixture
def run(golden: Path, tmp_path: Path) -> Path:
    """A writable run of the Trainer with ZeRO-2."""
    return Path(shutil.copytree(golden / "trainer/zero2_dp2", tmp_path / "run"))


@pytest.mark.parametrize("name", RUNS)
def test_a_root_its_iteration_and_the_directory_of_deepspeed_are_one_checkpoint(
    golden: Path, name: str
) -> None:
    step = max((golden / name).glob("*/latest")).parent
    inner = step / (step / "latest").read_text()
    for path in (golden / name, step, inner):
        opened = open_checkpoint(path)
        assert (opened.format.name, opened.path, opened.iteration) == ("deepspeed", inner, 2)


def test_every_verb_names_the_same_directory(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(*arguments: object) -> dict[str, object]:
        assert main([str(argument) for argument in arguments]) == 0
        page: dict[str, object] = json.loads(capsys.readouterr().out)
        return page

    for path in (run, run / "checkpoint-2", run / STEP):
        assert answer("inspect", path, "--json")["path"] == str(run / STEP)
        (checkpoint,) = answer("validate", path, "--json")["checkpoints"]  # type: ignore[misc]
        assert checkpoint["path"] == str(run / STEP)
        assert answer("convert", path, run / "out.pt", "--dry-run", "--json")["src"] == str(
            run / STEP
        )
        assert answer("diff", path, run / STEP, "--json")["same"] is True
        assert default_manifest_path(path) == run / STEP / "ckpt-manifest.json"
        assert answer("validate", path, "--iteration", 2, "--json")["checkpoints"][0][
            "path"
        ] == str(run / STEP)  # type: ignore[index]


def test_an_iteration_is_chosen_by_the_number_of_its_directory(run: Path) -> None:
    (run / STEP).rename(run / "checkpoint-2/global_step7")
    (run / "checkpoint-2/latest").write_text("global_step7")
    assert open_checkpoint(run, iteration=2).path == run / "checkpoint-2/global_step7"
    assert open_checkpoint(run, iteration=1).path == run / "checkpoint-1/global_step1"
    assert validate(run, iteration=1).path == str(run / "checkpoint-1/global_step1")
    with pytest.raises(UsageError, match="iteration 3 not found"):
        open_checkpoint(run, iteration=3)


@pytest.mark.each_value
@pytest.mark.parametrize("level", list(Level), ids=lambda level: level.name.lower())
@pytest.mark.parametrize(
    "file", ["zero_pp_rank_1_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"]
)
def test_a_cut_rank_file_is_found_from_the_root(run: Path, file: str, level: Level) -> None:
    os.truncate(run / STEP / file, 1000)
    for path in (run, run / "checkpoint-2"):
        errors = [
            finding
            for finding in validate(path, level=level).findings
            if finding.severity == Severity.ERROR
        ]
        assert [error.file for error in errors] == [file]

    def is_whole(path: Path) -> tuple[bool, Validation]:
        validation = validate(path, level=level)
        return validation.worst is None or validation.worst < Severity.ERROR, validation

    newest = find_newest_valid(run, is_whole)
    assert newest.path == str(run / "checkpoint-1")
    assert [skipped.path for skipped in newest.skipped] == [str(run / "checkpoint-2")]


def test_without_its_tracker_deepspeeds_directory_comes_before_copies_of_the_weights(
    run: Path,
) -> None:
    (run / "checkpoint-2/latest").unlink()
    opened = open_checkpoint(run)
    assert opened.path == run / STEP
    assert any("model.safetensors" in note for note in opened.notes)
    assert ("CK514", "../latest") in [
        (finding.code, finding.file) for finding in validate(run).findings
    ]


def test_a_tracker_below_the_root_that_leads_nowhere_is_told(run: Path) -> None:
    (run / "checkpoint-2/latest").write_text("global_step9")
    for path in (run, run / "checkpoint-2"):
        report = validate(path)
        findings = [
            (finding.code, finding.file)
            for finding in report.findings
            if finding.severity > Severity.NOTE
        ]
        assert findings == [("CK510", "latest")]
        assert report.path == str(run / "checkpoint-2")


def test_a_link_that_leads_back_ends(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").symlink_to(tmp_path, target_is_directory=True)
    assert validate(tmp_path).format is None


class Command:
    """An object that runs a command when it is loaded."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("true",)


def test_a_damaged_iteration_is_refused_with_one_that_can_be_read(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = golden / "mcore_legacy/dense_gqa/tp2_pp2"
    for number in (5, 10, 20):
        shutil.copytree(source / "iter_0000010", tmp_path / f"run/iter_{number:07d}")
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("10")
    assert main(["inspect", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    for number in (10, 20):
        (tmp_path / f"run/iter_{number:07d}/mp_rank_01_001/model_optim_rng.pt").unlink()
    words = ["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "dcp"]
    assert main(words) == 3
    intact = f"{tmp_path}/run/iter_0000005"
    assert f"; or use {intact}, which can be read" in capsys.readouterr().err
    # Nobody is sent to an iteration that would run code.
    file = tmp_path / "run/iter_0000005/mp_rank_00_000/model_optim_rng.pt"
    content = load_rank_file(file)
    plain = (int, float, str, list, type(None))
    args = {name: item for name, item in vars(content["args"]).items() if isinstance(item, plain)}
    content["args"] = Namespace(**args)
    torch.save({**content, "hook": Command()}, file)
    open_checkpoint(tmp_path / "run/iter_0000005").store.close()
    assert main(words) == 3
    assert "iter_0000005" not in capsys.readouterr().err
    assert main([words[0], intact, *words[2:]]) == 5
