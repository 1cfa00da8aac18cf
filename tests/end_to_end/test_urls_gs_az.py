"""Checkpoints are read from the stores of Google and Azure as from a directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_cli.app import main
from core.errors import SourceChangedError
from core.files.remote_path import location_of
from core.files.remote_store import RemoteStore
from tests.support.emulators import Upload, azurite, fake_gcs

SOURCES = {
    "mcore_legacy/dense_gqa/tp2_pp1_optim": ["--to", "torch_dist"],
    "mcore_torch_dist/dense_gqa/tp2_pp2": ["--to", "megatron", "--tp-new", "1"],
    "mcore0121_zarr/dense_gqa/tp2_pp2": ["--to", "dcp"],
    "hf/llama/safetensors_single": ["--to", "megatron", "--tp-new", "2"],
}
EMULATORS = {"gs": fake_gcs, "az": azurite}
ALGORITHMS = {"gs": "CRC-32C", "az": "MD5"}
STORE_CODES = ("CK704", "CK832", "CK833")


@pytest.fixture(scope="module", params=EMULATORS)
def store(
    request: pytest.FixtureRequest, golden: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Upload]]:
    """Returns the scheme of a store that holds ``SOURCES`` in ``runs``, and writes to it."""
    folder = tmp_path_factory.mktemp("emulator")
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        EMULATORS[request.param](monkeypatch, folder) as upload,
    ):
        for name in SOURCES:
            for path in (golden / name).rglob("*"):
                if path.is_file():
                    upload(path.relative_to(golden).as_posix(), path.read_bytes())
        yield request.param, upload


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "ckpt-manifest.json"
    }


def report(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    capsys.readouterr()
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_read_equals_what_is_read_from_a_directory(
    store: tuple[str, Upload],
    golden: Path,
    tmp_path: Path,
    name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    scheme, options = store[0], SOURCES[name]
    url = f"{scheme}://runs/{name}"
    assert main(["convert", url, str(tmp_path / "a"), *options, "-q"]) == 0
    assert main(["convert", str(golden / name), str(tmp_path / "b"), *options, "-q"]) == 0
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert main(["diff", url, str(golden / name), "-q"]) == 0
    pages, verdicts = [], []
    for path in (url, str(golden / name)):
        pages.append(report(["inspect", path], capsys)[1])
        code, verdict = report(["validate", "--deep", path], capsys)
        verdicts.append((code, verdict["checkpoints"][0]["findings"]))
    assert pages[0] | {"path": None} == pages[1] | {"path": None}
    assert [
        (code, [item for item in findings if item["code"] not in STORE_CODES])
        for code, findings in verdicts
    ] == [(verdicts[1][0], [item for item in verdicts[1][1] if item["code"] != "CK704"])] * 2
    # The store states a checksum of every file.
    notes = [item["message"] for item in verdicts[0][1] if item["code"] in STORE_CODES]
    assert len(notes) == 1
    assert notes[0].endswith(f"the store's {ALGORITHMS[scheme]} matches the data read")


def test_an_object_that_changes_meanwhile_is_an_error(store: tuple[str, Upload]) -> None:
    scheme, upload = store
    upload("changing/a.bin", b"1" * 200_000)
    opened = RemoteStore(location_of(f"{scheme}://runs/changing"))  # type: ignore[arg-type]
    assert opened.read("a.bin", 0, 4) == b"1111"
    opened.verify_unchanged()
    upload("changing/a.bin", b"2" * 200_000)
    with pytest.raises(SourceChangedError):
        opened.verify_unchanged()


def test_a_container_that_does_not_exist_is_named(
    store: tuple[str, Upload], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", f"{store[0]}://nowhere/x"]) == 6
    # fake-gcs-server answers 500 instead of 404.
    messages = {"gs": "the request failed (500", "az": "no such bucket: nowhere"}
    assert messages[store[0]] in capsys.readouterr().err


def test_a_manifest_is_written_to_azure(
    store: tuple[str, Upload], golden: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scheme, upload = store
    if scheme == "gs":
        pytest.skip("fake-gcs-server does not take objects by the XML API")
    name = "hf/llama/safetensors_single"
    for path in (golden / name).iterdir():
        upload(f"listed/{path.name}", path.read_bytes())
    assert main(["manifest", "az://runs/listed", "-q"]) == 0
    assert main(["manifest", "az://runs/listed"]) == 2
    assert "the manifest already exists" in capsys.readouterr().err
    assert main(["manifest", "az://runs/listed", "--force", "-q"]) == 0
    assert main(["validate", "--deep", "az://runs/listed", "-q"]) == 0


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_written_to_azure_equals_what_is_written_to_a_directory(
    store: tuple[str, Upload],
    golden: Path,
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if store[0] == "gs":
        pytest.skip("fake-gcs-server does not take objects by the XML API")
    # Parts so short that an object has several.
    monkeypatch.setattr("core.files.multipart.stream.PART_BYTES", 1 << 20)
    options, url = SOURCES[name], f"az://runs/out/{name}"
    assert main(["convert", f"az://runs/{name}", url, *options, "-q", "--verify"]) == 0
    assert main(["convert", url, str(tmp_path / "a"), "--to", "safetensors", "-q"]) == 0
    assert main(["convert", str(golden / name), str(tmp_path / "c"), *options, "-q"]) == 0
    assert (
        main(["convert", str(tmp_path / "c"), str(tmp_path / "b"), "-q", "--to", "safetensors"])
        == 0
    )
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert main(["convert", f"az://runs/{name}", url, *options, "-q"]) == 2
    assert "the destination already exists" in capsys.readouterr().err
    assert main(["convert", f"az://runs/{name}", url, *options, "-q", "--force"]) == 0
    assert main(["validate", "--deep", url, "-q"]) == 0
