"""URLs are refused where a local path is expected; nothing is written to a path of that name."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from pathlib import Path

import pytest
import torch
from typer.main import get_command

from ckpt_cli.app import app, main
from ckpt_cli.options.typer_command import Group
from core import dist_checkpointing
from core.dist_checkpointing.core import CheckpointingConfig, save_config
from core.dist_checkpointing.storage_reader import CkptStorageReader
from core.dist_checkpointing.storage_writer import CkptStorageWriter
from core.errors import UsageError
from core.files.url import refuse_url
from core.opening.open import open_checkpoint
from core.verbs.convert.run import Job, run

SCHEMES = (
    "s3",
    "s3a",
    "gs",
    "gcs",
    "az",
    "abfs",
    "abfss",
    "http",
    "https",
    "hdfs",
    "hf",
    "file",
    "ssh",
    "msc",
    "S3",
)
URL = "hdfs://bucket/out"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current directory, in which nothing may have appeared at the end."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield folder
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_url_is_recognised_as_text_and_as_a_path(scheme: str) -> None:
    for path in (f"{scheme}://bucket/out", Path(f"{scheme}://bucket/out")):
        with pytest.raises(UsageError, match="is a URL") as refusal:
            refuse_url(path)
        assert f"{scheme.lower()}://" in str(refusal.value).lower()
        assert refusal.value.hint


@pytest.mark.parametrize(
    "path", ["out", "/data/s3://x", "./a:b", "C:/out", "a:b/c", "run:1", "10:30/x", "", "."]
)
def test_a_plain_path_is_no_url(path: str) -> None:
    refuse_url(path)


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("s3://b/out", "aws s3 sync"),
        ("gs://b/out", "gcloud storage rsync"),
        ("abfss://c@a.dfs.core.windows.net/x", "azcopy copy"),
        ("hdfs://name/x", "hdfs dfs -get"),
        ("hf://meta-llama/Llama-3-8B", "hf download meta-llama/Llama-3-8B --local-dir Llama-3-8B"),
        ("https://huggingface.co/org/model/tree/main", "hf download org/model --local-dir model"),
        ("https://example.com/model.safetensors", "curl -LO"),
        ("file:///data/a%20b", "pass the plain path: '/data/a b'"),
        ("file://localhost/data/x", "pass the plain path: /data/x"),
    ],
)
def test_the_refusal_names_the_way_around(url: str, advice: str) -> None:
    for path in (url, Path(url)):
        with pytest.raises(UsageError) as refusal:
            refuse_url(path)
        assert advice in str(refusal.value.hint)


def path_lines() -> list[list[str]]:
    """Return a command line for every parameter of the program that is a path, with a URL as its
    value.
    """
    group = get_command(app)
    assert isinstance(group, Group)
    lines = []
    for registered in app.registered_commands:
        assert registered.name is not None and registered.callback is not None
        hints = {
            name: str(parameter.annotation)
            for name, parameter in signature(registered.callback).parameters.items()
        }
        params = [
            param
            for param in group.commands[registered.name].params
            if "pathlib.Path" in hints[param.name or ""]
        ]
        arguments = [param for param in params if param.param_type_name == "argument"]
        n_others = len(arguments) - 1
        lines += [
            [registered.name, *["x"] * n, URL, *["x"] * (n_others - n)]
            for n in range(len(arguments))
        ]
        rest = ["validate", "x"] if registered.name == "launch" else ["x"] * len(arguments)
        if registered.name == "merge":
            lines = [
                [*line, "x", "-o", "y", "--average"] if line[0] == "merge" else line
                for line in lines
            ]
            rest = ["x", "x", "--average"]
        for param in params:
            if param.param_type_name == "option":
                lines += [[registered.name, option, URL, *rest] for option in param.opts]
    return [*lines, ["launch", "validate", URL], ["launch", "--", "convert", "x", URL]]


def test_the_lines_cover_every_verb_and_the_options_that_name_files() -> None:
    words = {word for line in path_lines() for word in line}
    assert words >= {
        "inspect",
        "convert",
        "reshard",
        "validate",
        "manifest",
        "diff",
        "launch",
        "--config",
        "--rules",
    }
    assert words >= {
        "-o",
        "--output",
        "--against",
        "--report",
        "--baseline",
        "--write-baseline",
        "--log-dir",
    }


@pytest.mark.parametrize("line", path_lines(), ids=" ".join)
def test_every_path_of_the_command_line_refuses_a_url(
    line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line) == 2
    captured = capsys.readouterr()
    assert "hdfs://bucket/out is a URL that ckpt cannot read" in captured.err
    assert "hdfs dfs -get" in captured.err
    assert captured.out == ""


def test_a_plan_names_sizes_and_no_url(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("s3://bucket/out", "format=s3://bucket/out"):
        assert main(["validate", str(golden / "torch_dcp/tp2_only"), "--plan-for", text]) == 2
        assert "--plan-for" in capsys.readouterr().err


def test_the_engine_refuses_urls_itself(golden: Path) -> None:
    source = golden / "torch_dcp/tp2_only"
    with pytest.raises(UsageError, match="hdfs://bucket/out is a URL"):
        run(Job(src=source, dst=Path("hdfs://bucket/out"), to="dcp"))
    for job in (
        Job(src=Path("hdfs://bucket/in"), to="dcp"),
        Job(src=source, to="hf", config=Path("s3://b/config.json")),
    ):
        with pytest.raises(UsageError, match="is a URL"):
            run(job)
    with pytest.raises(UsageError, match="is a URL"):
        open_checkpoint(Path("https://huggingface.co/org/model"))


def test_the_documented_interface_refuses_unknown_urls(tmp_path: Path) -> None:
    state = {"value": torch.ones(2)}
    for path in ("hdfs://bucket/out", Path("hdfs://bucket/out")):
        with pytest.raises(UsageError, match="hdfs://bucket/out is a URL"):
            dist_checkpointing.save(state, path)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="hdfs://bucket/out is a URL"):
            dist_checkpointing.load({}, path)
        with pytest.raises(UsageError, match="hdfs://bucket/out is a URL"):
            dist_checkpointing.load_common_state_dict(path)
        with pytest.raises(UsageError, match="hdfs://bucket/out is a URL"):
            save_config(CheckpointingConfig("torch_dist", 1), path)


def test_storage_of_torchs_own_checkpoints_refuses_urls(tmp_path: Path) -> None:
    writer = CkptStorageWriter(tmp_path / "out")
    reader = CkptStorageReader(tmp_path / "in")
    for refused in (CkptStorageWriter, CkptStorageReader, writer.reset, reader.reset):
        with pytest.raises(UsageError, match="hdfs://bucket/out is a URL"):
            refused(URL)


def test_a_path_on_another_host_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a path on another host"):
        refuse_url("user@host:/data/out")
    (tmp_path / "a@b:c").mkdir()
    refuse_url(tmp_path / "a@b:c")


@pytest.mark.parametrize("text", ["meta-llama/Llama-3-8B", "org/model.v1"])
def test_a_hub_id_says_what_it_is_and_how_to_get_it(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", text]) == 2
    err = capsys.readouterr().err
    assert "no such file or directory" in err
    assert f"hf download {text} --local-dir {text.partition('/')[2]}" in err


def test_a_misspelt_path_is_taken_for_no_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as refusal:
        open_checkpoint(Path("runs/absent"))
    assert "hf download" not in str(refusal.value)
    monkeypatch.chdir(tmp_path / "cwd")
