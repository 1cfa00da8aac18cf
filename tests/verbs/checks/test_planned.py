from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from core.errors import UsageError
from core.verbs.checks.finding import Finding, Severity
from core.verbs.checks.plan_request import PlanRequest, parse_plan_request
from core.verbs.convert.run import Job, TopologyChange, run
from core.verbs.validate.run import validate


def asked(path: Path, text: str) -> dict[str, list[Finding]]:
    """The findings of ``--plan-for``, by code."""
    by_code: dict[str, list[Finding]] = {}
    for finding in validate(path, plan_for=parse_plan_request(text)).findings:
        if finding.code.startswith("CK9"):
            by_code.setdefault(finding.code, []).append(finding)
    return by_code


def test_a_request_names_sizes_and_a_format() -> None:
    assert parse_plan_request("tp=4, PP=2,format=torch_dist") == PlanRequest(
        {"tp": 4, "pp": 2}, "torch_dist"
    )
    assert str(parse_plan_request("tp=4,format=zarr")) == "tp=4,format=zarr"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tp",
        "tp=",
        "tp=0",
        "tp=10000000000",
        "tp=x",
        "tp=-1",
        "tp=٣",
        "dp=2",
        "tp=1,tp=2",
        "format=gguf",
        "format=hf,format=dcp",
        "tp=2,",
    ],
)
def test_what_is_no_request_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--plan-for"):
        parse_plan_request(text)


def test_nothing_is_said_without_a_request(golden: Path) -> None:
    findings = validate(golden / "mcore_legacy/dense_gqa/tp2_pp2").findings
    assert not [finding for finding in findings if finding.code.startswith("CK9")]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        (
            "mcore_legacy/dense_gqa/tp2_pp2",
            "tp=2,pp=2",
            "the checkpoint was saved with these sizes",
        ),
        ("mcore_legacy/dense_gqa/tp2_pp2", "tp=4,pp=1", "(megatron, "),
        (
            "mcore_legacy/dense_gqa/tp2_pp2",
            "tp=2,pp=2,format=torch_dist",
            "(torch_dist, ",
        ),
        (
            "mcore_torch_dist/dense_gqa/tp2_pp2_optim",
            "tp=4,pp=1",
            "Megatron can load this torch_dist checkpoint at these sizes",
        ),
        (
            "mcore_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_dpreshardable",
            "tp=4,pp=1",
            "(torch_dist, ",
        ),
        ("hf/llama/safetensors_sharded", "tp=2", "(megatron, "),
        ("mcore_legacy/dense_gqa/tp2_pp2", "format=hf", "(safetensors, "),
    ],
)
def test_a_plan_that_is_possible_says_how(name: str, text: str, says: str, golden: Path) -> None:
    by_code = asked(golden / name, text)
    (how,) = by_code["CK902"]
    assert says in how.message
    assert "CK901" not in by_code


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("mcore_legacy/dense_gqa/tp2_pp2", "tp=3", "8 attention heads are not divisible by TP 3"),
        ("torch_dcp/fsdp2_dp2", "tp=2", "neither Megatron's names and training arguments"),
    ],
)
def test_a_plan_that_is_impossible_says_why(name: str, text: str, says: str, golden: Path) -> None:
    (why,) = asked(golden / name, text)["CK901"]
    assert why.severity == Severity.ERROR
    assert says in why.message
    assert why.hint


def test_what_would_not_be_carried_is_named(golden: Path) -> None:
    by_code = asked(golden / "mcore_legacy/dense_gqa/tp2_pp2", "tp=1,pp=1")
    assert ["rng_state" in finding.message for finding in by_code["CK903"]] == [True]


def test_what_it_says_is_what_is_then_written(golden: Path, tmp_path: Path) -> None:
    source = golden / "mcore_legacy/dense_gqa/tp2_pp2"
    (how,) = asked(source, "tp=4,pp=1")["CK902"]
    words = shlex.split(how.hint or "")
    assert words[:3] == ["run:", "ckpt", "reshard"]
    assert words[-4:] == ["--tp-new", "4", "--pp-new", "1"]
    job = Job(
        src=Path(words[3]),
        dst=tmp_path / "out",
        topology=TopologyChange(tp=4, pp=1),
        is_reshard=True,
        fsync=False,
    )
    report = run(job)
    size, n_files = re.findall(r"write ([\d.]+) MiB \(megatron, (\d+) files\)", how.message)[0]
    assert size == f"{report.bytes_written / 2**20:.1f}"
    assert int(n_files) == len(report.files)


def test_the_format_is_named_as_it_was_asked_for(golden: Path) -> None:
    """``--to safetensors`` would keep Megatron's names."""
    (how,) = asked(golden / "mcore_legacy/dense_gqa/tp2_pp2", "format=hf")["CK902"]
    assert (how.hint or "").endswith("DST --to hf")


def test_nothing_is_written_for_an_answer(golden: Path, tmp_path: Path) -> None:
    (tmp_path / "source").symlink_to(golden / "mcore_legacy/dense_gqa/tp2_pp2")
    asked(tmp_path / "source", "tp=4,pp=1")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_broken_checkpoint_has_an_answer_too(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("x")
    assert "CK901" in asked(tmp_path, "tp=2")
