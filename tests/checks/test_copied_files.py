"""A file copied over another rank's is found where it does not record the rank; ranks that may hold
the same are no alarm.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from core.checks.finding import Finding, Severity
from core.checks.level import Level
from core.convert.job import TopologyChange
from core.convert.run import Job, run
from core.errors import CorruptError
from core.validate.run import validate
from tests.checks.test_damages import copied
from tests.support.edited import edit_rank

MODEL = "model_optim_rng.pt"
OPTIM = "distrib_optim.pt"
GQA = "mcore_legacy/dense_gqa"


def found_in(path: Path) -> list[Finding]:
    findings = validate(path, level=Level.HEADERS).findings
    return [finding for finding in findings if finding.code == "CK508"]


def resharded(
    source: Path,
    dst: Path,
    *,
    files: tuple[str, str],
    change: Callable[[dict], object] | None = None,
    **sizes: int,
) -> Path:
    """Write rank files, which record no rank, and copy one of them over another."""
    run(Job(src=source, dst=dst, to="megatron", topology=TopologyChange(**sizes), fsync=False))
    (folder,) = dst.glob("iter_*")
    first, second = (folder / name / MODEL for name in files)
    if change is not None:
        edit_rank(first.parent, change)
    shutil.copyfile(first, second)
    return folder


def test_a_copied_distributed_optimizer_is_an_error_unless_it_is_left_out(
    golden: Path, tmp_path: Path
) -> None:
    folder = copied(golden / GQA / "tp2_pp1_dp2_distopt/iter_0000010", tmp_path)
    shutil.copyfile(folder / "mp_rank_00" / OPTIM, folder / "mp_rank_01" / OPTIM)
    (finding,) = found_in(folder)
    assert finding.severity == Severity.ERROR and finding.file == f"mp_rank_01/{OPTIM}"
    with pytest.raises(CorruptError, match=f"identical to mp_rank_00/{OPTIM}"):
        run(Job(src=folder, dst=tmp_path / "out", to="torch_dist", fsync=False))
    run(Job(src=folder, dst=tmp_path / "out", to="torch_dist", optim="drop", fsync=False))


def test_a_copied_tensor_parallel_rank_is_an_error(golden: Path, tmp_path: Path) -> None:
    folder = resharded(
        golden / GQA / "tp1_pp1",
        tmp_path / "ranks",
        files=("mp_rank_00", "mp_rank_01"),
        tp=2,
    )
    (finding,) = found_in(folder)
    assert finding.severity == Severity.ERROR and "different parts of" in finding.message
    for name in ("torch_dist", "megatron", "torch"):
        with pytest.raises(CorruptError, match=f"identical to mp_rank_00/{MODEL}"):
            run(Job(src=folder, dst=tmp_path / "out", to=name, fsync=False))


@pytest.mark.parametrize(
    ("source", "severity"),
    [("tp1_pp1", Severity.WARNING), ("tp1_pp1_optim", Severity.ERROR)],
)
def test_equal_stages_are_a_suspicion_and_with_moments_an_error(
    golden: Path, tmp_path: Path, source: str, severity: Severity
) -> None:
    folder = resharded(
        golden / GQA / source,
        tmp_path / "ranks",
        files=("mp_rank_00_001", "mp_rank_00_002"),
        pp=4,
    )
    (finding,) = found_in(folder)
    assert finding.severity == severity and finding.file == f"mp_rank_00_002/{MODEL}"
    job = Job(src=folder, dst=tmp_path / "out", to="torch_dist", fsync=False)
    if severity == Severity.ERROR:
        with pytest.raises(CorruptError, match="identical"):
            run(job)
    else:  # a model that was deepened with copies of its layers looks like that
        assert any(f"identical to mp_rank_00_001/{MODEL}" in note for note in run(job).notes)


def test_equal_experts_are_a_suspicion(golden: Path, tmp_path: Path) -> None:
    folder = resharded(
        golden / "mcore_legacy/moe_seq/tp1_pp1",
        tmp_path / "ranks",
        files=("mp_rank_00_000", "mp_rank_00_001"),
        ep=2,
    )
    (finding,) = found_in(folder)
    assert finding.severity == Severity.WARNING and "local_experts.2" in finding.message


def test_ranks_of_constants_are_no_alarm(golden: Path, tmp_path: Path) -> None:
    def fill(content: dict) -> None:
        for number, tensor in enumerate(content["model"].values()):
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(number % 2)

    folder = resharded(
        golden / GQA / "tp1_pp1",
        tmp_path / "ranks",
        files=("mp_rank_00", "mp_rank_01"),
        change=fill,
        tp=2,
    )
    assert found_in(folder) == []
    assert run(Job(src=folder, dst=tmp_path / "out", to="torch_dist", fsync=False))


def test_files_without_checksums_are_not_compared(golden: Path, tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        folder = resharded(
            golden / GQA / "tp1_pp1",
            tmp_path / "ranks",
            files=("mp_rank_00", "mp_rank_01"),
            change=lambda content: None,
            tp=2,
        )
    finally:
        torch.serialization.set_crc32_options(True)
    assert found_in(folder) == []
