"""A file copied over another rank's is found where it does not record the rank; ranks that may hold
the same are no alarm.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.errors import CorruptError, UnsupportedError
from core.verbs.checks.finding import Finding, Level, Severity
from core.verbs.convert.job import TopologyChange
from core.verbs.convert.run import Job, run
from core.verbs.validate.run import validate
from tests.support.archives import unpacked
from tests.support.edited import edit_rank
from tests.support.rank_files import load_rank_file
from tests.verbs.checks.test_damages import copied

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
    assert (
        finding.severity == Severity.ERROR
        and "should contain a different part of" in finding.message
    )
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


@pytest.mark.parametrize("is_expanded", [False, True])
def test_ranks_of_constants_are_no_alarm(golden: Path, tmp_path: Path, is_expanded: bool) -> None:
    def fill(content: dict) -> None:
        for number, (name, tensor) in enumerate(content["model"].items()):
            if isinstance(tensor, torch.Tensor):
                if is_expanded:  # one element in the file
                    element = torch.full([1] * tensor.dim(), number % 2, dtype=tensor.dtype)
                    content["model"][name] = element.expand(tensor.shape)
                else:
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


def test_a_distributed_optimizer_of_norms_is_the_same_on_every_rank(
    golden: Path, tmp_path: Path
) -> None:
    folder = copied(golden / GQA / "tp2_pp1_dp2_distopt/iter_0000010", tmp_path)
    weights = load_rank_file(folder / "mp_rank_00" / MODEL)["model"]
    norms = [weight for name, weight in weights.items() if "norm.weight" in name]
    masters = torch.cat([norm.float() for norm in reversed(norms)])  # in the order of buffers
    remainders = torch.arange(len(masters)).float() * 37 - 4000
    job = Job(src=folder, dst=tmp_path / "out", to="torch_dist", fsync=False)
    for values in (masters, remainders):
        torch.manual_seed(0)
        states = {name: torch.rand(len(values)) for name in ("exp_avg", "exp_avg_sq")}
        buffer = {"param": values, **states, "numel_unpadded": len(values)}
        content = {"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): buffer}}
        for rank in ("mp_rank_00", "mp_rank_01"):
            torch.save(content, folder / rank / OPTIM)
        assert found_in(folder) == []
        if values is masters:
            run(job)
        else:  # what cannot be converted is refused for the true reason
            with pytest.raises(UnsupportedError, match="remainders"):
                run(replace(job, force=True))


def test_replicas_of_deepspeeds_expert_parallel_ranks_are_no_alarm(tmp_path: Path) -> None:
    path = unpacked("deepspeed_parallel", tmp_path / "golden") / "moe_zero0"
    files = [path / f"global_step2/expp_rank_{n}_mp_rank_00_optim_states.pt" for n in (0, 1)]
    # With frozen experts, both ranks have the states of the other parameters.
    content = torch.load(files[0], weights_only=False)
    optimizer = content["optimizer"]
    states = optimizer["optimizer_state_dict"]
    dense = [n for n, group in enumerate(states["param_groups"]) if not group.get("moe")]
    states["param_groups"] = [states["param_groups"][n] for n in dense]
    numbers = {number for group in states["param_groups"] for number in group["params"]}
    states["state"] = {n: state for n, state in states["state"].items() if n in numbers}
    optimizer["fp32_groups"] = [optimizer["fp32_groups"][n] for n in dense]
    for file in files:
        with file.open("wb") as stream:  # the files are alike: a path would be recorded in each
            torch.save(content, stream)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert found_in(path) == []
    assert run(Job(src=path, dst=tmp_path / "out", to="dcp", fsync=False))


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
