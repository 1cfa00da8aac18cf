from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_cli.app import main
from core.verbs.checks.finding import codes
from tests.support.shown_errors import is_one_error

DCP = "torch_dcp/tp2_only"
RANKS = "mcore_legacy/dense_gqa/tp2_pp2"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``ckpt validate`` in this process; returns the exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main(["validate", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def good(golden: Path) -> Path:
    return golden / DCP


@pytest.fixture
def bad(golden: Path, tmp_path: Path) -> Path:
    """A checkpoint without one of its files."""
    path = Path(shutil.copytree(golden / DCP, tmp_path / "bad"))
    (path / "__1_0.distcp").unlink()
    return path


def shown(run: Run, *arguments: object) -> Any:
    return json.loads(run(*arguments, "--json")[1])


@pytest.mark.parametrize(
    "level", [[], ["--headers"], ["--deep"]], ids=lambda words: "".join(words) or "metadata"
)
@pytest.mark.parametrize("name", [DCP, RANKS])
def test_a_whole_checkpoint_has_no_findings_and_exit_code_0(
    name: str, level: list[str], golden: Path, run: Run
) -> None:
    code, out, err = run(golden / name, *level)
    assert (code, err) == (0, "")
    assert out.startswith("✓ no findings in")


def test_a_damaged_one_has_exit_code_1_in_every_format(bad: Path, run: Run) -> None:
    for format in ("text", "json", "junit", "sarif", "github"):
        code, out, err = run(bad, "--format", format)
        assert (code, err) == (1, "")
        assert "__1_0.distcp" in out


def test_every_finding_has_a_code_of_the_table_and_says_what_to_do(bad: Path, run: Run) -> None:
    (page,) = shown(run, bad)["checkpoints"]
    assert page["findings"]
    for finding in page["findings"]:
        assert finding["title"] == codes()[finding["code"]].title
        assert finding["hint"]
        assert finding["message"]


def test_several_paths_have_a_report_each(good: Path, bad: Path, run: Run) -> None:
    code, out, _ = run(good, bad)
    assert code == 1
    assert out.endswith("2 checkpoints: 1 with errors\n\n→ ckpt explain CK101\n")
    assert [checkpoint["valid"] for checkpoint in shown(run, good, bad)["checkpoints"]] == [
        True,
        False,
    ]


def test_files_of_one_checkpoint_are_one_checkpoint(good: Path, run: Run) -> None:
    files = [good / "__0_0.distcp", good / "__1_0.distcp", good / ".metadata", good]
    assert len(shown(run, *files)["checkpoints"]) == 1


def test_the_current_directory_is_looked_at_without_a_path(
    good: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(good)
    assert run()[0] == 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["no/such"], "no such file or directory"),
        (["--headers", "--deep"], "cannot be combined"),
        (["--json", "--format", "sarif"], "cannot be combined"),
        (["--format", "xml"], "'xml' is not one of: text, json, junit, sarif, github"),
        (["--ignore", "CK9999"], "neither a code nor CODE:GLOB"),
        (["--ignore", "CK199"], "no check has the code CK199"),
        (["--baseline", "no/such.json"], "no such file"),
        (["--baseline", "x", "--write-baseline", "y"], "cannot be combined"),
        (["--rules", "no/such.toml"], "--rules: file not found"),
        (["--plan-for", "tp=x"], "invalid size 'x'"),
        (["--iteration", "1", "--all-iterations"], "selects one iteration"),
        (["--newest-valid", "--all-iterations"], "considers all iterations anyway"),
        (["--newest-valid", "a", "b"], "accepts only one training root"),
        (["--newest-valid", "--format", "junit"], "does not support --format junit"),
        (["--newest-valid", "-o", "x"], "--output has no effect"),
        (["--newest-valid", "--report", "x.json"], "--report has no effect"),
        (["--newest-valid", "no/such"], "no such directory"),
        (["--report", "report.pdf"], "cannot infer a format from the file name"),
        (["--all-iterations"], "no iterations found"),
        (["-o", "no/such/dir/report.json"], "directory does not exist"),
        (["-o", "."], "path is a directory"),
        (["--threads", "0"], "not a whole number"),
        (["--memory", "much"], "'much' is not a valid size"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(
    words: list[str],
    text: str,
    good: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(good)
    code, _, err = run(*words)
    assert code == 2
    assert text in err
    assert is_one_error(err)


def test_a_missing_path_is_a_usage_error(run: Run) -> None:
    code, out, err = run("no/such")
    assert (code, out) == (2, "")
    assert "no such file or directory\n  at: file no/such\n" in err


@pytest.mark.parametrize("format", ["text", "json", "junit", "sarif", "github"])
def test_a_missing_path_does_not_hide_the_findings_of_the_others(
    format: str, good: Path, bad: Path, run: Run
) -> None:
    alone = run(bad, "--format", format)[1]
    code, out, err = run(good, "no/such", bad, "--format", format)
    assert code == 2
    assert err == ""
    assert "no/such" in out
    assert "no such file or directory" in out
    assert set(re.findall(r"CK\d{3}", alone)) <= set(re.findall(r"CK\d{3}", out))


def test_a_missing_path_is_told_of_each_checkpoint_in_json(good: Path, bad: Path, run: Run) -> None:
    pages = json.loads(run(good, "no/such", bad, "--json")[1])["checkpoints"]
    assert [page["valid"] for page in pages] == [True, False, False]
    assert [finding["code"] for finding in pages[1]["findings"]] == ["CK100"]
    assert pages[2]["findings"] == shown(run, bad)["checkpoints"][0]["findings"]


def test_what_was_looked_at_is_named_and_what_was_not_is_listed(
    golden: Path, tmp_path: Path, run: Run
) -> None:
    model = tmp_path / "model"
    shutil.copytree(golden / "hf/llama/safetensors_single", model)
    n_files = sum(1 for path in model.rglob("*") if path.is_file())
    shutil.copytree(golden / "hf/llama/safetensors_single", model / "checkpoint-10")
    shutil.copytree(golden / "torch_dcp/tp2_only", model / "exports/dcp")
    (model / "original").mkdir()
    shutil.copy(
        golden / "hf/llama/torch_single/model_zip.pt", model / "original/consolidated.00.pth"
    )
    (page,) = shown(run, model)["checkpoints"]
    assert (page["path"], page["valid"], page["files"]) == (str(model), True, n_files)
    (note,) = page["notes"]
    assert note.endswith(": checkpoint-10, original/consolidated.00.pth, exports/dcp")
    assert note in run(model)[1]
    # what lies there is not looked at, and so cannot be found damaged
    (model / "checkpoint-10/model.safetensors").write_bytes(b"x")
    assert run(model, "--deep")[0] == 0
    assert run(model / "checkpoint-10")[0] == 1


def test_the_iteration_of_a_root_is_named_and_the_others_are_listed(
    golden: Path, tmp_path: Path, run: Run
) -> None:
    for number in (10, 20, 30):
        shutil.copytree(
            golden / "mcore_torch_dist/dense_gqa/tp2_pp2/iter_0000010",
            tmp_path / f"iter_{number:07d}",
        )
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    (page,) = shown(run, tmp_path)["checkpoints"]
    assert page["path"] == str(tmp_path / "iter_0000020")
    assert (
        "2 other iterations were not checked (use --all-iterations): iter_0000010, iter_0000030"
        in page["notes"]
    )


def test_a_loose_file_of_a_project_is_not_taken_for_the_project(
    golden: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(26):
        (tmp_path / f"module_{number}.py").write_text("pass")
    shutil.copy(golden / "hf/llama/torch_single/model_zip.pt", tmp_path / "last.ckpt")
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(".")
    assert code == 1
    assert "contains one torch or safetensors file: last.ckpt" in out
    assert "27 files" not in out
    code, out, _ = run("last.ckpt")
    assert code == 0
    assert "in last.ckpt" in out
    assert "1 file," in out


def test_what_no_format_recognises_is_a_finding(tmp_path: Path, run: Run) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "note.txt").write_text("hello")
    for path in (tmp_path / "empty", tmp_path / "note.txt"):
        assert run(path)[0] == 1
        (page,) = shown(run, path)["checkpoints"]
        assert page["format"] is None
        assert page["findings"]


def test_ignored_codes_do_not_count(bad: Path, run: Run) -> None:
    ignored = {finding["code"] for finding in shown(run, bad)["checkpoints"][0]["findings"]}
    code, out, _ = run(bad, "--ignore", ",".join(sorted(ignored)))
    assert code == 0
    assert "ignored" in out
    assert run(bad, "--ignore", "CK:*.distcp")[0] == 0
    assert run(bad, "--ignore", "CK9")[0] == 1


def test_a_baseline_holds_for_what_is_known_and_for_nothing_else(
    bad: Path, run: Run, tmp_path: Path, good: Path
) -> None:
    baseline = tmp_path / "known.json"
    assert run(bad, "--write-baseline", baseline)[0] == 0
    code, out, _ = run(bad, "--baseline", baseline)
    assert code == 0
    assert "known" in out
    moved = bad.rename(tmp_path / "iter_0000020")
    assert run(moved, "--baseline", baseline)[0] == 0
    (moved / "__0_0.distcp").unlink()
    assert run(moved, "--baseline", baseline)[0] == 1
    assert run(good, "--baseline", baseline)[0] == 0


def test_a_shard_is_looked_at_alone(golden: Path, run: Run, tmp_path: Path) -> None:
    """As the hooks of pre-commit do; the others and the index are not asked for, and not missed."""
    folder = Path(shutil.copytree(golden / "hf/llama/safetensors_sharded", tmp_path / "shards"))
    shard = folder / "model-00002-of-00003.safetensors"
    assert run(shard)[1].startswith("✓ no findings")
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 10)
    findings = shown(run, shard)["checkpoints"][0]["findings"]
    assert [finding["code"] for finding in findings] == ["CK103"]


@pytest.mark.parametrize("option", ["-o", "--report", "--write-baseline"])
def test_only_reports_are_replaced_by_reports(
    bad: Path, option: str, run: Run, tmp_path: Path
) -> None:
    """A slip of the shell's completion names a file of the checkpoint."""
    weights = bad / "__0_0.distcp"
    weights = weights.rename(weights.with_suffix(".json"))
    before = weights.read_bytes()
    code, _, err = run(bad, option, weights)
    assert (code, weights.read_bytes() == before) == (2, True)
    assert "is not a ckpt report" in err
    for name in ("report.txt", "report.json", "report.sarif", "report.xml"):
        for _ in range(2):
            assert run(bad, option, tmp_path / name)[0] == (
                0 if option == "--write-baseline" else 1
            )


@pytest.mark.parametrize("format", ["text", "json", "junit", "sarif", "github"])
def test_a_report_of_any_format_is_replaced(
    format: str, good: Path, bad: Path, run: Run, tmp_path: Path
) -> None:
    for path in (bad, good, bad):
        assert run(path, "--format", format, "-o", tmp_path / "report")[0] == (path == bad)


def test_a_report_goes_into_a_file_and_people_still_see_the_page(
    bad: Path, run: Run, tmp_path: Path
) -> None:
    for name, begins in (
        ("r.json", '{"schema": "ckpt.validate/1"'),
        ("r.xml", "<?xml"),
        ("r.sarif", "{\n"),
        ("r.txt", "✗"),
    ):
        code, out, _ = run(bad, "-o", tmp_path / name)
        assert code == 1
        assert out.startswith("✗")
        assert (tmp_path / name).read_text("utf-8").startswith(begins)
    run(bad, "-o", tmp_path / "r.txt", "--format", "github")
    assert (tmp_path / "r.txt").read_text("utf-8").startswith("::error")
    run(bad, "-o", tmp_path / "r.json", "--format", "sarif")
    assert json.loads((tmp_path / "r.json").read_text())["version"] == "2.1.0"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "bad",
        "r.json",
        "r.sarif",
        "r.txt",
        "r.xml",
    ]


def test_one_run_makes_reports_for_several_readers(bad: Path, run: Run, tmp_path: Path) -> None:
    names = [tmp_path / name for name in ("r.xml", "r.sarif", "r.json", "r.txt")]
    words = [word for name in names for word in ("--report", name)]
    code, out, _ = run(bad, "--format", "github", *words)
    assert code == 1
    assert out.startswith("::error")
    assert [name.read_text("utf-8")[:1] for name in names] == ["<", "{", "{", "✗"]
    assert "version" in json.loads(names[1].read_text())


def test_a_report_replaces_the_file_behind_a_link(good: Path, run: Run, tmp_path: Path) -> None:
    (tmp_path / "real").write_text("✓ no findings in old")
    (tmp_path / "link.json").symlink_to(tmp_path / "real")
    assert run(good, "-o", tmp_path / "link.json")[0] == 0
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real").read_text())["valid"]


def test_a_report_may_go_to_a_device(good: Path, run: Run) -> None:
    assert run(good, "-o", os.devnull)[0] == 0
    assert run(good, "-o", "/dev/full")[0] == 7


def test_quiet_is_silent_about_what_is_whole(good: Path, bad: Path, run: Run) -> None:
    assert run(good, "-q") == (0, "", "")
    code, out, _ = run(good, bad, "-q")
    assert code == 1
    assert str(good) not in out


def test_strict_counts_warnings(golden: Path, tmp_path: Path, run: Run) -> None:
    path = Path(shutil.copytree(golden / DCP, tmp_path / "extra"))
    (path / "__7_0.distcp").write_bytes(b"x" * 100)  # of an earlier save, by the look of it
    (page,) = shown(run, path)["checkpoints"]
    assert page["counts"]["warning"]
    assert page["valid"]
    assert run(path)[0] == 0
    assert run(path, "--strict")[0] == 1
    strict = shown(run, path, "--strict")
    assert strict["strict"]
    assert strict["checkpoints"][0]["counts"]["warning"] == 0


def roots(golden: Path, folder: Path) -> Path:
    """A training root with two iterations, the newer of them damaged."""
    for number in (10, 20):
        shutil.copytree(golden / RANKS / "iter_0000010", folder / f"iter_{number:07d}")
    os.truncate(folder / "iter_0000020/mp_rank_01_001/model_optim_rng.pt", 1000)
    return folder


def test_newest_valid_prints_a_path_and_nothing_else(
    golden: Path, tmp_path: Path, run: Run
) -> None:
    root = roots(golden, tmp_path / "root")
    code, out, err = run("--newest-valid", root)
    assert (code, out) == (0, f"{root}/iter_0000010\n")
    assert err.startswith(f"skipped: {root}/iter_0000020: CK")
    assert run(root, "--newest-valid", "-q")[2] == ""
    page = shown(run, root, "--newest-valid")
    assert (page["schema"], page["path"], page["iteration"]) == (
        "ckpt.newest/1",
        f"{root}/iter_0000010",
        10,
    )
    assert page["level"] == "headers"
    assert [Path(skipped["path"]).name for skipped in page["skipped"]] == ["iter_0000020"]


def test_newest_valid_obeys_what_is_ignored(golden: Path, tmp_path: Path, run: Run) -> None:
    root = roots(golden, tmp_path / "root")
    assert run("--newest-valid", root, "--ignore", "CK")[1] == f"{root}/iter_0000020\n"


def test_without_a_whole_iteration_newest_valid_has_exit_code_1(
    golden: Path, tmp_path: Path, run: Run
) -> None:
    root = roots(golden, tmp_path / "root")
    shutil.rmtree(root / "iter_0000010")
    code, out, err = run("--newest-valid", root)
    assert (code, out) == (1, "")
    assert f"no valid iteration in {root}" in err
    assert shown(run, "--newest-valid", root)["path"] is None
    shutil.rmtree(root / "iter_0000020")
    assert run("--newest-valid", root) == (1, "", f"no iterations in {root}\n")


def test_iterations_are_chosen_one_or_all(golden: Path, tmp_path: Path, run: Run) -> None:
    root = roots(golden, tmp_path / "root")
    assert run(root, "--iteration", 10)[0] == 0
    assert run(root, "--iteration", 20, "--headers")[0] == 1
    assert run(root, "--iteration", 30)[0] == 2
    assert run(golden / DCP, "--iteration", 30)[0] == 2
    pages = shown(run, root, "--all-iterations", "--headers")["checkpoints"]
    assert [(Path(page["path"]).name, page["valid"]) for page in pages] == [
        ("iter_0000010", True),
        ("iter_0000020", False),
    ]


def test_all_codes_are_listed(run: Run) -> None:
    code, out, _ = run("--list-checks")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(codes())
    rows = shown(run, "--list-checks")["checks"]
    assert [row["code"] for row in rows] == list(codes())
    assert {row["level"] for row in rows} <= {"metadata", "headers", "deep"}


def test_codes_are_stable_in_form() -> None:
    for code in codes().values():
        assert code.code[:2] == "CK"
        assert code.code[2:].isdigit()
        assert len(code.code) == 5
        assert len(code.title) <= 60
        first = code.title.split()[0]
        assert first.islower() or first in ("NaN", "SHA-256")
        assert not code.title.endswith(".")
        assert code.hint
        assert not code.hint.endswith(".")


def test_newest_valid_of_a_single_checkpoint_says_that_it_is_one(golden: Path, run: Run) -> None:
    model = golden / "hf/llama/safetensors_sharded"
    _, out, err = run("--newest-valid", model)
    assert out == "" and f"it is a single checkpoint: ckpt validate --headers {model}" in err
