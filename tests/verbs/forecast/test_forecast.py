"""Free space and time of a plan agree with the run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckpt_cli.app import main
from core.errors import CapacityError
from core.progress import Phase, Progress
from core.verbs.convert.prepare import prepare
from core.verbs.convert.run import Job, run
from core.verbs.forecast.forecast import Forecast, forecast


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({f"w{i}": torch.arange(i * 50_000, (i + 1) * 50_000) for i in range(8)}, path)
    return path


def forecast_of(job: Job) -> Forecast:
    with prepare(job) as prepared:
        return forecast(prepared, prepare_seconds=0.0)


def too_large(folder: Path) -> Path:
    """A sparse file whose copy does not fit on the disk."""
    n_bytes = shutil.disk_usage(folder).free + (64 << 30)
    header = json.dumps(
        {"w": {"dtype": "U8", "shape": [n_bytes], "data_offsets": [0, n_bytes]}}
    ).encode()
    path = folder / "large.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + n_bytes)
    return path


def test_both_disks_are_measured_and_nothing_is_left(source: Path, tmp_path: Path) -> None:
    dst = tmp_path / "new" / "folder" / "out.pt"
    expected = forecast_of(Job(src=source, dst=dst, to="torch"))
    assert expected.reading is not None and expected.reading.bytes_per_second > 0
    assert expected.writing is not None and expected.writing.bytes_per_second > 0
    assert expected.seconds is not None and expected.seconds > 0
    assert expected.free_bytes > 0
    assert os.listdir(tmp_path) == [source.name]


@pytest.mark.parametrize("options", [[], ["--force"], ["--resume"]])
def test_the_plan_fails_for_lack_of_space_with_the_error_of_the_run(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["convert", str(too_large(tmp_path)), str(tmp_path / "out.pt"), *options]
    assert main(arguments) == CapacityError.exit_code
    of_run = capsys.readouterr().err
    assert main([*arguments, "--dry-run"]) == CapacityError.exit_code
    page, of_plan = capsys.readouterr()
    # The bytes that are free may change from one moment to the next.
    assert of_plan.split("but only")[0] == of_run.split("but only")[0] != ""
    assert of_plan.splitlines()[1:] == of_run.splitlines()[1:]
    assert "too little" in page and "not measured" in page
    assert main([*arguments, "--dry-run", "--json"]) == CapacityError.exit_code
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "capacity"
    assert os.listdir(tmp_path) == ["large.safetensors"]


def test_what_an_interrupted_run_has_written_counts_as_free_and_as_done(
    source: Path, tmp_path: Path
) -> None:
    job = Job(src=source, dst=tmp_path / "out.pt", to="torch", resume=True)

    def stop(progress: Progress) -> None:
        if progress.phase is Phase.COPYING and progress.done > progress.total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(job, progress=stop)
    present = forecast_of(job)
    assert present.resumed_bytes > 0
    other = forecast_of(Job(src=source, dst=tmp_path / "other.pt", to="torch", resume=True))
    assert other.resumed_bytes == 0
    assert run(job).bytes_resumed == present.resumed_bytes


def test_hard_links_need_no_space_and_read_nothing(golden: Path, tmp_path: Path) -> None:
    job = Job(src=golden / "torch_dcp/fsdp2_dp2", dst=tmp_path / "out", metadata_only=True)
    expected = forecast_of(job)
    assert expected.reading is None
    assert expected.seconds is not None


def test_a_folder_that_cannot_be_written_is_said(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    expected = forecast_of(Job(src=source, dst=tmp_path / "file" / "out.pt", to="torch"))
    assert expected.seconds is None
    assert expected.unknown is not None and "not a directory" in expected.unknown
