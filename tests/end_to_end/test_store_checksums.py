"""Checksums that a store states find damage: with a manifest, also without reading."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from ckpt_cli.app import main
from core.files.object_listing import forget_listings
from tests.support.crc64 import HAS_AWSCRT, crc64_nvme
from tests.support.object_stores import s3_server

SOURCE = "hf/llama/safetensors_sharded"


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """Returns a client of moto's S3 with a bucket ``runs``."""
    with pytest.MonkeyPatch.context() as monkeypatch, s3_server(monkeypatch) as client:
        client.create_bucket(Bucket="runs")
        yield client


@pytest.fixture
def checkpoint(golden: Path, tmp_path: Path) -> Path:
    """Returns a checkpoint with a manifest."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(golden / SOURCE, folder)
    assert main(["manifest", "-q", str(folder)]) == 0
    return folder


SUMS = {
    "CRC32": lambda data: zlib.crc32(data).to_bytes(4, "big"),
    "CRC32C": lambda data: google_crc32c.value(data).to_bytes(4, "big"),
    "CRC64NVME": lambda data: crc64_nvme(data).to_bytes(8, "big"),
    "SHA256": lambda data: hashlib.sha256(data).digest(),
    "SHA1": lambda data: hashlib.sha1(data).digest(),
}


def put(client: Any, folder: Path, prefix: str, algorithm: str, damaged: str | None = None) -> None:
    """Upload a directory with checksums; a damaged file keeps the checksum of the intact one."""
    forget_listings()
    for path in folder.iterdir():
        data = path.read_bytes()
        text = base64.b64encode(SUMS[algorithm](data)).decode()
        if path.name == damaged:
            data = data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]
        client.put_object(
            Bucket="runs",
            Key=f"{prefix}/{path.name}",
            Body=data,
            ChecksumAlgorithm=algorithm,
            **{f"Checksum{algorithm}": text},
        )


def findings(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> tuple[int, list[dict[str, Any]]]:
    capsys.readouterr()
    code = main(["validate", "--json", *words])
    report = json.loads(capsys.readouterr().out)
    return code, [
        finding
        for finding in report["checkpoints"][0]["findings"]
        if finding["code"] in ("CK806", "CK830", "CK831", "CK832", "CK833")
    ]


def test_a_manifest_is_compared_without_reading(
    client: Any, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(client, checkpoint, "a", "CRC32")
    code, (note,) = findings(["s3://runs/a"], capsys)
    assert (code, note["code"]) == (0, "CK832")
    assert "the store's CRC-32 matches the manifest (the data was not read)" in note["message"]

    # Another file was uploaded, with its own checksum, which is the right one for its bytes.
    shard = sorted(checkpoint.glob("*.safetensors"))[0]
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    put(client, checkpoint, "a", "CRC32")
    code, (error, note) = findings(["s3://runs/a"], capsys)
    assert (code, error["code"], error["file"]) == (1, "CK830", shard.name)
    assert error["expected"] == f"CRC-32 {zlib.crc32(data):08x}"
    assert error["found"] == f"{zlib.crc32(shard.read_bytes()):08x}"
    code, (error, note) = findings(["--deep", "s3://runs/a"], capsys)
    assert (code, error["code"], note["code"]) == (1, "CK806", "CK832")


def test_prune_needs_no_reading_where_the_manifest_is_compared(
    client: Any, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, algorithm in ((1, "CRC32"), (2, "CRC32C")):
        put(client, checkpoint, f"run/checkpoint-{number}", algorithm)
    words = ["prune", "s3://runs/run", "--keep-last", "1", "--yes"]
    # The store's checksums of the newest one are not those of its manifest.
    assert main(words) == 2
    assert "--deep" in capsys.readouterr().err
    put(client, checkpoint, "run/checkpoint-2", "CRC32")
    assert main(words) == 0
    assert "removed 1 iteration" in capsys.readouterr().out


def test_other_checksums_cannot_be_compared_with_a_manifest(
    client: Any, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(client, checkpoint, "b", "CRC32C")
    code, (note,) = findings(["s3://runs/b"], capsys)
    assert (code, note["code"]) == (0, "CK833")
    assert "the store reports CRC-32C, but the manifest has CRC-32" in note["message"]


@pytest.mark.first(2)
@pytest.mark.parametrize("algorithm", ["CRC32", "CRC32C", "SHA256", "SHA1"])
def test_what_is_read_is_compared(
    client: Any,
    golden: Path,
    algorithm: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, prefix = golden / SOURCE, f"c-{algorithm}"
    name = {"CRC32": "CRC-32", "CRC32C": "CRC-32C", "SHA256": "SHA-256", "SHA1": "SHA-1"}[algorithm]
    n_files = len(list(folder.iterdir()))
    put(client, folder, prefix, algorithm)
    code, (note,) = findings(["--deep", f"s3://runs/{prefix}"], capsys)
    assert (code, note["code"]) == (0, "CK832")
    assert note["message"].startswith(f"{n_files} files (")
    assert note["message"].endswith(f": the store's {name} matches the data read")

    damaged = sorted(folder.glob("*.safetensors"))[0].name
    put(client, folder, prefix, algorithm, damaged)
    code, (error, note) = findings(["--deep", f"s3://runs/{prefix}"], capsys)
    assert (code, error["code"], error["file"]) == (1, "CK831", damaged)
    intact = SUMS[algorithm]((folder / damaged).read_bytes())
    assert error["expected"] == f"{name} {intact.hex()}"
    assert note["message"].startswith(f"{n_files - 1} files (")


def test_the_default_of_s3_needs_awscrt(
    client: Any, golden: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(client, golden / SOURCE, "d", "CRC64NVME")
    code, (note,) = findings(["--deep", "s3://runs/d"], capsys)
    ending = "matches the data read" if HAS_AWSCRT else "requires awscrt: pip install awscrt"
    assert (code, note["code"]) == (0, "CK832" if HAS_AWSCRT else "CK833")
    assert ("the store's" if HAS_AWSCRT else "states") + " CRC-64/NVME" in note["message"]
    assert note["message"].endswith(ending)


def test_a_checksum_of_parts_that_are_not_listed_is_not_compared(
    client: Any, golden: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = golden / "hf/llama/safetensors_single/model.safetensors"
    target = {"Bucket": "runs", "Key": "e/model.safetensors"}
    upload = client.create_multipart_upload(**target, ChecksumAlgorithm="SHA256")["UploadId"]
    part = client.upload_part(
        **target,
        UploadId=upload,
        PartNumber=1,
        Body=path.read_bytes(),
        ChecksumAlgorithm="SHA256",
    )
    stated = {key: part[key] for key in ("ETag", "ChecksumSHA256") if key in part}
    client.complete_multipart_upload(
        **target, UploadId=upload, MultipartUpload={"Parts": [{"PartNumber": 1, **stated}]}
    )
    code, (note,) = findings(["--deep", "s3://runs/e/model.safetensors"], capsys)
    assert (code, note["code"]) == (0, "CK833")
    assert note["message"] == (
        "model.safetensors: the store reports SHA-256 checksums of parts, but not where each "
        "part begins"
    )
