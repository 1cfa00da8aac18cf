"""The verbs that look at checkpoints, run by the ranks of a team: the lead prints what one process
prints.
"""

from __future__ import annotations

import io
import json
import re
import shutil
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from ckpt_cli.app import main
from ckpt_cli.workers import current_team as teamwork
from core.engine.team.protocol import ALONE, Team
from tests.support.teams import run_team

Said = tuple[int, str, str]
"""Exit code, stdout, stderr."""


def run_on_rank(team: Team, words: list[str]) -> Said:
    """What the command says on one rank."""
    teamwork.join(team)
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = main(words)
    finally:
        teamwork.join(ALONE)
    return code, out.getvalue(), err.getvalue()


def several(team: Team, commands: list[list[str]]) -> list[Said]:
    return [run_on_rank(team, words) for words in commands]


def together(n: int, commands: list[list[str]]) -> list[Said]:
    """What the lead says; the others return the same codes and print nothing."""
    lead, *rest = run_team(n, several, commands)
    for other in rest:
        assert [outcome[0] for outcome in other] == [outcome[0] for outcome in lead]
        assert all(outcome[1:] == ("", "") for outcome in other), other
    return lead


def timeless(outcome: Said) -> Said:
    """Without what differs from run to run."""
    return (
        outcome[0],
        re.sub(r'time="[^"]*"|timestamp="[^"]*"|,? in [0-9.]+ m?s[^\n]*', "", outcome[1]),
        outcome[2],
    )


@pytest.fixture(scope="module")
def damaged(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("damaged") / "model"
    shutil.copytree(golden / "hf/llama/bin_sharded", path, copy_function=shutil.copyfile)
    file = sorted(path.glob("*.bin"))[0]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)
    return path


def test_validate(golden: Path, damaged: Path, tmp_path: Path) -> None:
    intact = str(golden / "hf/llama/safetensors_sharded")
    roots = golden / "mcore_torch_dist/dense_gqa/tp2_pp2"
    commands = [
        ["validate", "--deep", intact, str(damaged)],
        ["validate", "--deep", "--format", "junit", str(damaged)],
        ["validate", intact],
        ["validate", "--list-checks"],
        ["validate", "--newest-valid", "--deep", str(roots)],
        ["validate", "--newest-valid", str(tmp_path)],
        ["validate", "--all-iterations", "--deep", str(roots)],
    ]
    assert [timeless(outcome) for outcome in together(3, commands)] == [
        timeless(run_on_rank(ALONE, words)) for words in commands
    ]


def test_the_json_of_validate_says_who_read_how_much(golden: Path, damaged: Path) -> None:
    paths = [str(golden / "hf/llama/safetensors_sharded"), str(damaged)]
    words = ["validate", "--deep", "--json", *paths]
    (outcome,) = together(3, [words])
    report, alone = json.loads(outcome[1]), json.loads(run_on_rank(ALONE, words)[1])
    launch = report.pop("launch")
    for checkpoint in (*report["checkpoints"], *alone["checkpoints"]):
        del checkpoint["seconds"]
    assert report == alone and outcome[0] == 1
    assert launch["n_workers"] == 3 and [worker["rank"] for worker in launch["workers"]] == [
        0,
        1,
        2,
    ]
    assert sum(worker["read_bytes"] for worker in launch["workers"]) == sum(
        entry["bytes"] for entry in report["checkpoints"]
    )


def test_baselines_and_reports_are_written_once(damaged: Path, tmp_path: Path) -> None:
    baseline, report = tmp_path / "baseline.json", tmp_path / "report.sarif"
    first, second = together(
        2,
        [
            ["validate", "--deep", "--write-baseline", str(baseline), str(damaged)],
            [
                "validate",
                "--deep",
                "--baseline",
                str(baseline),
                "--report",
                str(report),
                str(damaged),
            ],
        ],
    )
    assert first[0] == 0 and first[2].startswith("wrote ") and second[0] == 0
    assert json.loads(report.read_text())["runs"]


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "name", ["hf/llama/bin_sharded", "mcore_legacy/dense_gqa/tp2_pp1_dp2_distopt"]
)
def test_manifest(golden: Path, tmp_path: Path, name: str) -> None:
    texts = []
    reports = []
    for n in (1, 3):
        output = tmp_path / f"{n}.ckpt-manifest.json"
        words = ["manifest", "--json", "-o", str(output), str(golden / name)]
        code, out, err = run_on_rank(ALONE, words) if n == 1 else together(n, [words])[0]
        assert (code, err) == (0, "")
        texts.append(output.read_bytes())
        reports.append(json.loads(out))
        again = run_on_rank(ALONE, words) if n == 1 else run_team(n, run_on_rank, words)[0]
        assert again[0] == 2
    assert texts[0] == texts[1]
    read = sum(worker["read_bytes"] for worker in reports[1].pop("launch")["workers"])
    assert read >= reports[1]["n_bytes"] == reports[0]["n_bytes"]
    assert reports[0]["n_read_again"] == reports[1]["n_read_again"]


def test_no_manifest_is_made_of_damage(damaged: Path, tmp_path: Path) -> None:
    words = ["manifest", "-o", str(tmp_path / "manifest.json"), str(damaged)]
    outcomes = run_team(2, run_on_rank, words)
    assert outcomes[0] == outcomes[1] == run_on_rank(ALONE, words) and outcomes[0][0] == 3


def test_a_mistake_is_an_error_of_every_rank(golden: Path, tmp_path: Path) -> None:
    intact = str(golden / "hf/llama/safetensors_sharded")
    nowhere = str(tmp_path / "nowhere")
    for words in (
        ["validate", nowhere],
        ["validate", "--against", nowhere, intact],
        ["validate", "--rules", nowhere, intact],
    ):
        outcomes = run_team(2, run_on_rank, words)
        assert outcomes[0] == outcomes[1] == run_on_rank(ALONE, words) and outcomes[0][0] == 2


def test_diff(golden: Path, damaged: Path) -> None:
    single, other = (
        str(golden / "hf/llama/safetensors_single"),
        str(golden / "hf/llama/bin_sharded"),
    )
    commands = [
        ["diff", single, other],
        ["diff", other, str(damaged)],
        ["diff", "--quiet", other, str(damaged)],
        ["diff", "--stat-only", single, other],
    ]
    assert [timeless(shown) for shown in together(3, commands)] == [
        timeless(run_on_rank(ALONE, words)) for words in commands
    ]
    words = ["diff", "--json", other, str(damaged)]
    (outcome,) = together(3, [words])
    report, alone = json.loads(outcome[1]), json.loads(run_on_rank(ALONE, words)[1])
    launch = report.pop("launch")
    del report["seconds"], alone["seconds"]
    assert report == alone and outcome[0] == 1
    assert sum(worker["read_bytes"] for worker in launch["workers"]) >= report["bytes_read"] > 0
