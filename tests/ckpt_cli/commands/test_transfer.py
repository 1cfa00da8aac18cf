from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ckpt_cli.app import main
from core.engine.catalog.stored import PlannedArray
from core.formats.torch.zip.tree_layout import plan_tree
from core.pickle.inert import TensorLeaf

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line in this process; returns exit code, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main(list(map(str, arguments)))
        out, err = capsys.readouterr()
        return code, out, err

    return call


def shown(*arguments: object, run: Run) -> Any:
    """The JSON object of a clean run."""
    code, out, err = run(*arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def files_in(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its relative name."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_convert_writes_what_it_reports(golden: Path, tmp_path: Path, run: Run) -> None:
    report = shown(
        "convert", golden / "torch_dcp/tp2_only", tmp_path / "out.pt", "--to", "torch", run=run
    )
    assert report["schema"] == "ckpt.transfer/1"
    assert report["dry_run"] is False
    assert report["dst"] == str(tmp_path / "out.pt")
    assert report["format"] == "torch"
    assert report["n_tensors"] == 21
    assert report["bytes_written"] == (tmp_path / "out.pt").stat().st_size
    page = shown("inspect", tmp_path / "out.pt", run=run)
    before = shown("inspect", golden / "torch_dcp/tp2_only", run=run)
    assert {t["key"]: t["shape"] for t in page["tensors"]} == {
        t["key"]: t["shape"] for t in before["tensors"]
    }


def test_the_summary_names_the_destination_and_what_was_not_carried(
    golden: Path, tmp_path: Path, run: Run
) -> None:
    source = golden / "mcore_legacy/dense_gqa/tp2_pp2_optim"
    code, out, err = run(
        "reshard", source, tmp_path / "out", "--tp", 2, "--tp-new", 1, "--no-optim"
    )
    assert (code, err) == (0, "")
    assert out.startswith(f"✓ wrote {tmp_path / 'out'}")
    assert "31" in out
    assert "not carried" in out
    assert "optimizer" in out
    assert (tmp_path / "out/latest_checkpointed_iteration.txt").exists()


def test_reshard_changes_the_parallel_sizes(golden: Path, tmp_path: Path, run: Run) -> None:
    shown(
        "reshard",
        golden / "mcore_legacy/dense_gqa/tp2_pp2",
        tmp_path / "out",
        "--target-tp",
        4,
        "--pp_new=1",
        run=run,
    )
    page = shown("inspect", tmp_path / "out", run=run)
    assert (page["parallel"]["tp"], page["parallel"]["pp"], page["ranks"]) == (4, 1, 4)


def test_a_wrong_assertion_about_the_source_is_refused(
    golden: Path, tmp_path: Path, run: Run
) -> None:
    source = golden / "mcore_legacy/dense_gqa/tp2_pp2"
    code, out, err = run(
        "reshard", source, tmp_path / "out", "--tensor-model-parallel-size", 8, "--tp-new", 1
    )
    assert (code, out) == (2, "")
    assert "TP 2" in err
    assert list(tmp_path.iterdir()) == []


def test_an_optimizer_is_left_out_of_a_hugging_face_directory_with_one_line(
    golden: Path, tmp_path: Path, run: Run
) -> None:
    source = golden / "mcore_legacy/dense_gqa/tp2_pp2_optim"
    code, out, err = run("convert", source, tmp_path / "out", "--to", "hf")
    assert (code, err) == (0, "")
    lines = [line.strip() for line in out.splitlines() if "optimizer (" in line]
    assert lines == ["not carried  optimizer (Hugging Face checkpoints do not include it)"]


def test_an_optimizer_is_not_left_out_of_other_formats_silently(
    golden: Path, tmp_path: Path, run: Run
) -> None:
    source = golden / "mcore_legacy/dense_gqa/tp2_pp2_optim"
    code, _, err = run("convert", source, tmp_path / "out", "--to", "dcp", "--names", "hf")
    assert code == 4
    assert "--no-optim" in err
    assert list(tmp_path.iterdir()) == []


def test_each_reason_for_not_carrying_something_is_one_line(
    golden: Path, tmp_path: Path, run: Run
) -> None:
    command = ("convert", golden / "torch_dcp/fsdp2_dp2", tmp_path / "a.safetensors")
    options = ("--to", "safetensors", "--no-optim")
    plan = shown(*command, *options, "--dry-run", run=run)
    [reason] = plan["dropped_reasons"]
    assert reason["n_entries"] > 12
    assert len(reason["examples"]) == 2
    line = (
        f"{reason['n_entries']} entries such as {', '.join(reason['examples'])} "
        f"({reason['reason']})"
    )
    _, out, _ = run(*command, *options, "--dry-run")
    assert sum("not carried" in text for text in out.splitlines()) == 1
    assert line in out
    code, out, err = run(*command, *options, "-q")
    assert (code, out, err) == (0, "", f"note: not carried: {line}\n")


def test_files_of_the_directory_are_counted_by_reason(
    golden: Path, tmp_path: Path, run: Run
) -> None:
    source = tmp_path / "source"
    shutil.copytree(golden / "hf/llama/safetensors_single", source)
    for name in ("a.log", "b.log", "c.log"):
        (source / name).write_text("x")
    report = shown("convert", source, tmp_path / "out", "--to", "dcp", run=run)
    assert {
        "reason": "other files in the directory",
        "n_entries": 3,
        "examples": ["a.log", "b.log"],
    } in report["dropped_reasons"]
    assert "other files in the directory: a.log, b.log, c.log" in report["dropped"]


def test_the_next_line_is_in_both_reports_but_not_in_the_quiet_one(
    golden: Path, tmp_path: Path, run: Run
) -> None:
    command = ("convert", golden / "torch_dcp/tp2_only")
    line = f'torch.load("{tmp_path / "a.pt"}", weights_only=True)'
    assert shown(*command, tmp_path / "a.pt", run=run)["next"] == line
    _, out, _ = run(*command, tmp_path / "b.pt")
    assert out.splitlines()[-1].split(maxsplit=1) == ["next", line.replace("a.pt", "b.pt")]
    assert run(*command, tmp_path / "c.pt", "-q") == (0, "", "")


def test_without_a_destination_a_name_beside_the_source_is_proposed(
    golden: Path, tmp_path: Path, run: Run
) -> None:
    source = tmp_path / "source"
    shutil.copytree(golden / "torch_dcp/tp2_only", source)
    code, out, _ = run("convert", source, "--to", "torch")
    assert code == 0
    assert "no DST given" in out
    assert sorted(path.name for path in tmp_path.iterdir() if "manifest" not in path.name) == [
        "source",
        "source.pt",
    ]


def test_quiet_prints_nothing_unless_something_was_left_behind(
    golden: Path, tmp_path: Path, run: Run
) -> None:
    assert run(
        "convert", golden / "torch_dcp/tp2_only", tmp_path / "a.pt", "--to", "torch", "-q"
    ) == (0, "", "")
    source = golden / "mcore_legacy/dense_gqa/tp2_pp2_optim"
    code, out, err = run("reshard", source, tmp_path / "b", "--tp-new", 1, "--no-optim", "-q")
    assert (code, out) == (0, "")
    assert err.startswith("note: not carried: optimizer")
    assert err.count("\n") == 1
    assert run(
        "reshard", source, tmp_path / "c", "--tp-new", 1, "--no-optim", "-q", "--dry-run"
    ) == (0, "", err)


def test_a_dry_run_says_whether_the_command_would_work(
    run: Run, golden: Path, tmp_path: Path
) -> None:
    source = golden / "torch_dcp/tp2_only"
    arguments = ("convert", source, tmp_path / "out", "--to", "safetensors")
    code, out, _ = run(*arguments, "--dry-run")
    assert code == 0
    assert ", enough for " in out and "(dry run: nothing was written)" in out
    assert run(*arguments, "-q")[0] == 0
    _, out, _ = run(*arguments, "--dry-run")
    assert "already exists, so the run would refuse it" in out
    assert "--force replaces it" in run(*arguments, "--dry-run", "--force")[1]


def test_a_dry_run_writes_nothing_and_tells_everything(
    golden: Path, tmp_path: Path, run: Run
) -> None:
    source = golden / "mcore_legacy/dense_gqa/tp4_pp1"
    arguments = ("reshard", source, tmp_path / "out", "--tp-new", 2, "--dry-run", "--rank", 1)
    plan = shown(*arguments, run=run)
    assert plan["schema"] == "ckpt.plan/1"
    assert plan["dry_run"] is True
    assert plan["dst"] == str(tmp_path / "out")
    assert plan["rank"]["number"] == 1
    assert set(plan["rank"]["files"]) <= {
        f"mp_rank_{rank:02d}/model_optim_rng.pt" for rank in range(4)
    }
    assert "mp_rank_03/model_optim_rng.pt" in plan["rank"]["files"]
    code, out, _ = run(*arguments)
    assert code == 0
    assert out.startswith(f"would write {tmp_path / 'out'}")
    assert "(dry run: nothing was written)" in out and ", enough for " in out
    assert "rank 1 needs" in out
    command = f"ckpt reshard {source} {tmp_path / 'out'} --tp-new 2"
    assert out.endswith(f"next  {command}\n")
    assert list(tmp_path.iterdir()) == []
    # An empty directory is as good as none.
    (tmp_path / "out").mkdir()
    assert run(*arguments)[1].endswith(f"next  {command}\n")
    assert shown(*arguments, run=run)["dst_exists"] is False
    # Nobody is told to paste --force; the plan only says what it would do.
    shutil.copytree(golden / "torch_dcp/tp2_only", tmp_path / "out", dirs_exist_ok=True)
    _, out, _ = run(*arguments)
    assert "already exists" in out and "next  " not in out
    _, out, _ = run(*arguments, "--force")
    assert out.endswith(f"next  {command} --force\n")
    assert shown(*arguments, run=run)["dst_exists"] is True


def test_the_plan_holds_what_is_then_written(golden: Path, tmp_path: Path, run: Run) -> None:
    arguments = (
        "convert",
        golden / "mcore_legacy/dense_gelu/tp2_pp2",
        tmp_path / "out",
        "--to",
        "torch_dist",
    )
    plan = shown(*arguments, "--dry-run", run=run)
    shown(*arguments, run=run)
    written = {name: len(data) for name, data in files_in(tmp_path / "out").items()}
    assert {item["path"]: item["bytes"] for item in plan["files"]}.items() <= written.items()


def test_renames_are_listed_and_done(golden: Path, tmp_path: Path, run: Run) -> None:
    arguments = (
        "convert",
        golden / "torch_dcp/tp2_only",
        tmp_path / "o.pt",
        "--to",
        "torch",
        "--rename",
        r"^model\.=m_",
    )
    code, out, _ = run(*arguments, "--dry-run")
    assert code == 0
    assert re.search(r"renames +model\.embed_tokens\.weight (→|->) m_embed_tokens\.weight", out)
    shown(*arguments, run=run)
    keys = [tensor["key"] for tensor in shown("inspect", tmp_path / "o.pt", run=run)["tensors"]]
    assert "m_norm.weight" in keys
    assert not any(key.startswith("model.") for key in keys)


def test_casts_and_globs_are_honoured(golden: Path, tmp_path: Path, run: Run) -> None:
    shown(
        "convert",
        golden / "torch_dcp/fsdp2_dp2",
        tmp_path / "o.pt",
        "--to",
        "torch",
        "--include",
        "app.model.*",
        "--exclude",
        "*.norm.*",
        "--dtype",
        "bf16",
        "--dtype",
        "*embed*=fp32",
        run=run,
    )
    dtypes = {t["key"]: t["dtype"] for t in shown("inspect", tmp_path / "o.pt", run=run)["tensors"]}
    assert all(key.startswith("app.model.") and ".norm." not in key for key in dtypes)
    assert {key for key, dtype in dtypes.items() if dtype == "float32"} == {
        "app.model.model.embed_tokens.weight"
    }
    assert "bfloat16" in dtypes.values()


def test_an_existing_destination_is_refused_and_replaced_only_by_force(
    golden: Path, tmp_path: Path, run: Run
) -> None:
    arguments = ("convert", golden / "torch_dcp/tp2_only", tmp_path / "out.pt", "--to", "torch")
    assert run(*arguments)[0] == 0
    first = files_in(tmp_path)
    code, out, err = run(*arguments, "--dtype", "bf16")
    assert (code, out) == (2, "")
    assert "exists" in err
    assert files_in(tmp_path) == first
    assert run(*arguments, "--dtype", "bf16", "--force")[0] == 0
    assert files_in(tmp_path)["out.pt"] != first["out.pt"]
    (tmp_path / "out.pt.ckpt-manifest.json").unlink()
    (tmp_path / "out.pt").write_bytes(b"precious")
    assert run(*arguments, "--force")[0] == 2
    assert (tmp_path / "out.pt").read_bytes() == b"precious"


def test_a_memory_limit_that_cannot_hold_is_refused(golden: Path, tmp_path: Path, run: Run) -> None:
    code, _, err = run(
        "convert",
        golden / "torch_dcp/tp2_only",
        tmp_path / "o",
        "--to",
        "torch",
        "--memory",
        "1MiB",
    )
    assert code == 7
    assert "memory" in err
    assert list(tmp_path.iterdir()) == []


def test_switching_checks_off_changes_no_tensor(golden: Path, tmp_path: Path, run: Run) -> None:
    arguments = ("convert", golden / "torch_dcp/tp2_only", "--to", "torch_dist")
    shown(*arguments, tmp_path / "a", run=run)
    shown(*arguments, tmp_path / "b", "--no-fsync", "--no-digest", "--threads", 1, run=run)
    a, b = files_in(tmp_path / "a"), files_in(tmp_path / "b")
    assert {name: data for name, data in a.items() if name.endswith(".distcp")} == {
        name: data for name, data in b.items() if name.endswith(".distcp")
    }


def big_sparse_file(path: Path, n_bytes: int) -> None:
    """A torch file with one tensor of ``n_bytes`` zeros that takes no room on the disk."""
    array = PlannedArray("w", "uint8", (n_bytes,))
    plan = plan_tree({"w": TensorLeaf("w")}, lambda key: array, prefix="big")
    with path.open("wb") as file:
        file.truncate(plan.size)
        for offset, data in plan.literals(lambda name: 0):
            file.seek(offset)
            file.write(data)


def started(*arguments: object, stage: Path, repo_dir: Path) -> subprocess.Popen[str]:
    """A process that has begun to write into its stage."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ckpt_cli", *map(str, arguments)],
        cwd=repo_dir,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60  # against hanging only
    while not (stage.exists() and any(path.stat().st_blocks > 0 for path in stage.iterdir())):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.long)],
)
def test_a_signal_leaves_nothing_behind(
    number: signal.Signals, tmp_path: Path, repo_dir: Path
) -> None:
    big_sparse_file(tmp_path / "big.pt", 1 << 30)
    arguments = ["convert", tmp_path / "big.pt", tmp_path / "out", "--to", "dcp"]
    process = started(*arguments, stage=tmp_path / ".out.ckpt-stage/data", repo_dir=repo_dir)
    os.kill(process.pid, number)
    with suppress(ProcessLookupError):
        os.kill(process.pid, number)  # once more: nothing interrupts the cleaning up
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    label = "interrupted" if number == signal.SIGINT else f"interrupted ({number.name})"
    advice = "rerun with --resume to keep partial work next time"
    assert (out, err) == ("", f"{label}: nothing was written ({advice})\n")
    assert [path.name for path in tmp_path.iterdir()] == ["big.pt"]


def test_an_interrupted_run_with_resume_goes_on(tmp_path: Path, repo_dir: Path, run: Run) -> None:
    big_sparse_file(tmp_path / "big.pt", 1 << 29)
    arguments = ["convert", tmp_path / "big.pt", tmp_path / "out", "--to", "dcp", "--resume"]
    process = started(*arguments, stage=tmp_path / ".out.ckpt-stage/data", repo_dir=repo_dir)
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert out == ""
    stage_dir = tmp_path / ".out.ckpt-stage"
    words = shlex.join(map(str, ["ckpt", *arguments]))
    kept = (
        f" the output is kept in {stage_dir}; continue: {words} (or remove it: rm -r {stage_dir})"
    )
    assert err.startswith("interrupted (SIGTERM): ") and err.endswith(f"{kept}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.ckpt-stage", "big.pt"]
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["big.pt", "out"]


@pytest.mark.parametrize(
    ("options", "dst", "format"),
    [
        ((), "o.pt", "torch"),
        ((), "o.safetensors", "safetensors"),
        (("--names", "hf"), "o", "safetensors"),
        (("--dtype", "fp16"), "o", "megatron"),
        (("--dtype", "fp16"), "o.pt", "torch"),
        (("--to", "dcp"), "o.pt", "dcp"),
    ],
)
def test_the_format_need_not_be_said_where_something_else_tells_it(
    options: tuple[str, ...], dst: str, format: str, golden: Path, tmp_path: Path, run: Run
) -> None:
    source = golden / "mcore_legacy/dense_gqa/tp2_pp1"
    plan = shown("convert", source, tmp_path / dst, *options, "--dry-run", run=run)
    assert plan["target_format"] == format
    if format == "megatron":  # nothing but the content changes
        assert sum("mp_rank_" in item["path"] for item in plan["files"]) == 2


def test_tensors_that_are_tied_and_differ_are_the_users_mistake(
    golden: Path, tmp_path: Path, run: Run
) -> None:
    tie = "lm_head.weight=model.embed_tokens.weight"
    code, out, err = run(
        "convert",
        golden / "hf/llama/safetensors_single",
        tmp_path / "o",
        "--to",
        "hf",
        "--tie",
        tie,
    )
    assert (code, out) == (2, "")
    assert (
        "--tie cannot drop 'lm_head.weight', which differs from 'model.embed_tokens.weight'" in err
    )
    assert "ranks" not in err
    assert list(tmp_path.iterdir()) == []
