"""``ckpt explain`` and ``ckpt help TOPIC``."""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path

import pytest

from ckpt_cli.app import main
from ckpt_cli.commands.help import find_files, find_pages, link_commands, name_command
from core.verbs.explain.messages import read_messages


def shown(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    """Run ``ckpt`` and return what it prints on stdout."""
    assert main([str(word) for word in words]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_a_code_is_explained_with_its_cause_and_its_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = shown(capsys, "explain", "ck508", "CK101")
    assert out.startswith("CK508  a rank's file is a copy of another rank's file\n")
    assert "  cause  " in out and "ckpt validate PATH --headers" in out
    assert "\nCK101  a file is missing\n" in out


def test_a_pasted_finding_is_explained_by_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "explain", "  error CK701 checksum mismatch")
    assert out.startswith("CK701  checksum mismatch\n")


def test_an_unknown_code_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "CK999"]) == 2
    assert "no code CK999" in capsys.readouterr().err


def test_words_need_no_quotes_and_the_likeliest_message_is_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = shown(capsys, "explain", "Missing", "key", "in", "checkpoint", "state_dict:", "a.b")
    assert out.startswith("Missing key in checkpoint state_dict: …\n  printed by  PyTorch (DCP)\n")


def test_a_message_is_also_found_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "explain", "destination-exists").startswith(
        "the destination already exists\n"
    )


def test_a_log_is_read_from_stdin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = "step 1\nRuntimeError: PytorchStreamReader failed reading zip archive: failed\nfinding"
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{log} central directory\n"))
    assert "CK120" in shown(capsys, "explain", "-")


def test_a_text_of_which_nothing_is_known_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "explain", "the moon is full", code=1)
    assert out.startswith("this text matches no known message\n")
    assert "ckpt inspect PATH" in out and "ckpt validate PATH" in out


def test_a_misspelt_path_is_answered_with_the_nearest(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(golden / "torch_dcp/fsdp2_dp2", tmp_path / "titan")
    assert main(["explain", str(tmp_path / "titn")]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_a_checkpoint_that_opens_lists_what_can_be_made_of_it(
    golden: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shown(capsys, "explain", golden / "mcore_legacy/dense_gqa/tp2_pp1")
    assert "✓ no findings" in out
    assert "can  ✓ convert to" in out and "✓ reshard" in out


def test_the_findings_of_a_checkpoint_are_explained_with_its_path(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(golden / "mcore_legacy/dense_gqa/tp2_pp1", tmp_path / "run")
    iteration = tmp_path / "run/iter_0000010"
    shutil.rmtree(iteration / "mp_rank_01")
    out = shown(capsys, "explain", tmp_path / "run")
    assert "error CK160" in out and "\nCK160  a rank's files are missing\n" in out
    assert f"ckpt validate {iteration} --headers" in out
    # What the finding says of its own cause is not denied.
    assert "  usually  " in out and "  cause  " not in out
    for path in (tmp_path / "run", iteration):
        out = shown(capsys, "explain", path)
        assert f"ckpt validate --newest-valid {tmp_path / 'run'}\n" in out
    shutil.copytree(iteration, tmp_path / "alone")
    out = shown(capsys, "explain", tmp_path / "alone")
    assert "CK160" in out and "--newest-valid" not in out and "ROOT" not in out
    assert "to see what can be read: ckpt inspect" in out


def test_findings_end_with_the_command_that_explains_them_once(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(golden / "mcore_legacy/dense_gqa/tp2_pp1", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/iter_0000010/mp_rank_01")
    out = shown(capsys, "validate", tmp_path / "run", golden / "torch_dcp/tp2_only", code=1)
    assert out.count("→ ckpt explain CK160") == 1
    assert "ckpt explain" not in shown(capsys, "validate", golden / "torch_dcp/tp2_only")


def test_a_refusal_of_the_table_names_its_entry(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = golden / "torch_dcp/fsdp2_dp2"
    assert main(["convert", str(source), str(tmp_path / "x"), "--to", "hf"]) == 4
    assert capsys.readouterr().err.endswith("\n  more: ckpt explain names-unknown\n")
    (tmp_path / "notes.txt").touch()
    assert main(["convert", str(source), str(tmp_path), "--to", "torch"]) == 2
    assert "more: ckpt explain destination-exists" in capsys.readouterr().err


def test_help_lists_the_topics_below_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    program = shown(capsys, "--help")
    out = shown(capsys, "help")
    assert out.startswith(program)
    listed = out.removeprefix(program)
    for name in find_pages():
        assert (name.removeprefix("tasks/") if name.startswith("tasks/") else name) in listed


def test_every_topic_is_shown_as_it_stands_without_its_comments(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert len(find_pages()) > 30
    for name, path in find_pages().items():
        out = shown(capsys, "help", name)
        assert out.splitlines()[0] == path.read_text("utf-8").splitlines()[0]
        assert "<!--" not in out
        # The short name, unless it is also a command's or another page's.
        assert out == shown(capsys, *name_command(name).split()[1:])
    assert name_command("guide/prune") == "ckpt help guide/prune"
    assert name_command("guide/prune", "what-is-kept") == "ckpt help prune#what-is-kept"
    assert name_command("reference/formats") == "ckpt help formats"
    assert name_command("facts/formats") == "ckpt help facts/formats"
    assert shown(capsys, "help", "merge-lora") == shown(capsys, "help", "tasks/merge-lora")


def test_every_command_that_stands_for_a_link_shows_its_page_or_section(
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = (
        link_commands(path.read_text("utf-8"), name)
        for name, path in find_files().items()
        if path.suffix == ".md" and name != "index.md"
    )
    commands = {
        command for text in texts for command in re.findall(r"\(`ckpt ((?:help|ex)[^`]+)`\)", text)
    }
    assert len(commands) > 100
    assert all(shown(capsys, *command.split()) for command in commands)
    assert "explain CK601" in commands
    topics = [topic for message in read_messages().values() for topic in message.topics]
    assert all(shown(capsys, "help", topic).startswith("# ") for topic in topics)


def test_examples_are_printed_by_their_path_or_their_name(
    repo_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (repo_dir / "docs/examples").rglob("*.*"):
        if path.suffix != ".pyc":
            text = path.read_text("utf-8")
            assert shown(capsys, "help", path.relative_to(repo_dir)) == text
            assert shown(capsys, "help", path.name) == text
            assert f"{path.name}" in shown(capsys, "help")
    assert "FROM " in shown(capsys, "help", "docs/examples/Dockerfile")


def test_an_unknown_topic_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "deepsped"]) == 2
    assert "did you mean deepspeed?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("missing s3 credentials", "ckpt help stores#credentials-and-settings"),
        ("s3", "ckpt help stores"),
        ("resume on fewer GPUs at the same TP and PP", "ckpt help megatron-other-sizes"),
        ("change pipeline parallel size with optimizer", "ckpt help megatron-other-sizes"),
        ("optimizer states in bf16", "ckpt help optimizer-with-or-without"),
        ("drop the optimizer to save space", "ckpt help optimizer-with-or-without"),
        ("missing lm_head", "ckpt explain vllm-no-module"),
        (
            "what does ctrl-c leave and how to go on",
            "ckpt help convert#interruptions-and-existing-destinations",
        ),
        ("exit codes in CI", "ckpt help ci"),
        ("how much disk space do I need", "ckpt help convert#disk-space"),
        ("convert torch_dist to huggingface", "ckpt help torch-dist-to-hf"),
        (
            "convert hf model to megatron",
            "ckpt help huggingface-megatron#hugging-face-to-megatron",
        ),
        ("verl checkpoint without megatron args to hf", "ckpt help verl-to-hf"),
        ("fsdp2 checkpoint to single file", "ckpt help fsdp2-to-one-file"),
        ("deepspeed zero3 to fp32 single file", "ckpt help deepspeed#consolidate"),
        ("resume deepspeed on another number of gpus", "ckpt help deepspeed-other-size"),
        ("merge lora into base model", "ckpt help merge-lora"),
        ("how to prove the conversion is right", "ckpt help torch-dist-to-hf"),
        ("out of memory when converting", "ckpt explain out-of-memory"),
        ("which is the newest good checkpoint", "ckpt help newest-good-checkpoint"),
        ("remove old checkpoints", "ckpt help guide/prune"),
        ("tokenizer missing after conversion", "ckpt explain no-tokenizer"),
        ("dequantize fp8 deepseek weights", "ckpt help huggingface-megatron#float8"),
        (
            "megatron moe expert parallel change",
            "ckpt help megatron-rank-files#mixtures-of-experts",
        ),
        ("convert orbax jax to pytorch", "ckpt help orbax"),
        ("average checkpoints", "ckpt help merge#merge-methods"),
        ("CPU out of memory merging checkpoint", "ckpt help convert#memory"),
        ("loss spike after resuming from checkpoint", "ckpt help loss-jumps-after-resume"),
        (
            "pytorch_model.bin to safetensors split into shards max_shard_size",
            "ckpt help convert#change-the-content",
        ),
        ("delete old checkpoints keep last 3", "ckpt help guide/prune"),
        ("NaN in weights", "ckpt help validate#levels"),
        ("torch.compile _orig_mod. in names", "ckpt help convert#change-the-content"),
        ("load S3 checkpoint", "ckpt help stores"),
        ("dataloader state at other DP", "ckpt help formats#what-is-kept"),
    ],
)
def test_a_question_is_answered_by_one_of_the_five_sections(
    question: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shown(capsys, "help", *question.split())
    commands = re.findall(r"^  (ckpt (?:help|explain) \S+)$", out, re.MULTILINE)
    assert answer in commands and len(commands) <= 5
    # What is proposed opens.
    section = shown(capsys, *answer.split()[1:])
    assert len(section.splitlines()) > 3


def test_a_question_that_no_section_has_most_words_of_is_answered_by_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    question = ("zebra", "stripes", "giraffes", "merge", "lora")
    assert "ckpt help merge-lora" in shown(capsys, "help", *question)
    assert shown(capsys, "explain", *question, code=1).startswith("this text matches no")


def test_explain_searches_the_pages_if_no_message_has_the_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = shown(capsys, "explain", "how much disk space is needed")
    assert out.startswith("this text matches no known message, but these pages may help:\n")
    assert "\n  ckpt help convert#disk-space\n" in out
    out = shown(capsys, "explain", "Unable to locate credentials")
    assert out.startswith("Unable to locate credentials\n") and "ckpt help stores" in out


def test_a_section_is_shown_with_those_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "help", "convert#disk-space")
    assert out.startswith("## Disk space\n") and "\n## " not in out
    assert "\n### " in shown(capsys, "help", "troubleshooting#deepspeed")
    assert main(["help", "convert#disc-space"]) == 2
    assert "did you mean disk-space?" in capsys.readouterr().err


def test_a_command_of_several_words_is_a_question_and_a_page_may_be_spelled_as_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert shown(capsys, "help", "merge", "lora") == shown(capsys, "help", "merge-lora")
    assert "ckpt help merge-lora" in shown(capsys, "help", "merge", "an", "adapter")
    assert shown(capsys, "help", "merge").startswith("Usage: ckpt merge")


def test_a_topic_is_drawn_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("CKPT_PAGER", "")
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["help", "merge-lora"]) == 0
    out = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert "Merge a LoRA adapter into its base" in out
    assert "```" not in out and max(map(len, out.splitlines())) <= 80
    words = " ".join(out.split())
    assert "(ckpt help lora-adapters)" in words and ".md" not in words


def test_links_in_code_and_to_the_web_stay_as_they_are() -> None:
    text = (
        "[`a` b](../guide/merge.md#merge-methods) `[c](d.md)` [e](https://f.org/) ![g](h.svg)\n\n"
        "[here](#x)\n\n```python\na[0](b)\n```\n"
    )
    assert link_commands(text, "howto/ci.md") == (
        "`a` b (`ckpt help merge#merge-methods`) `[c](d.md)` [e](https://f.org/) ![g](h.svg)\n\n"
        "here (`ckpt help ci#x`)\n\n```python\na[0](b)\n```\n"
    )


def test_a_path_is_text_in_commands_and_cannot_control_the_terminal(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a\\q", "b\x1b[31m"):
        damaged = tmp_path / name
        shutil.copytree(golden / "mcore_legacy/dense_gqa/tp2_pp1_optim/iter_0000010", damaged)
        next(damaged.glob("*/*.pt")).unlink()
        assert main(["explain", str(damaged)]) == 0
        out = capsys.readouterr().out
        assert "\x1b" not in out and "CK101" in out
