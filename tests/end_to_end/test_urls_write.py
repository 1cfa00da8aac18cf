"""Checkpoints are written to object stores: the same bytes as in a directory, or nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpt_cli.app import main
from core.engine.team.protocol import Team
from core.files.multipart.ordered import OrderedUploads
from core.files.object_client import put_object
from core.files.object_listing import forget_listings
from core.files.remote_path import location_of
from core.files.requests.traffic import traffic_so_far
from core.publish.stage.bucket.stage import BucketStage
from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.run import run as run_job
from core.verbs.convert.workers.run import run_shared
from tests.support.object_stores import mounted_store
from tests.support.s3.client import S3Server
from tests.support.s3.rules import SLOW_DOWN, Rule
from tests.support.teams import run_team

CONVERSIONS = {
    "mcore_legacy/dense_gqa/tp2_pp1": ["--to", "torch_dist"],
    "mcore_torch_dist/dense_gqa/tp2_pp2": ["--to", "megatron", "--tp-new", "1"],
    "mcore0121_zarr/dense_gqa/tp2_pp2": ["--to", "dcp"],
    "hf/llama/safetensors_single": ["--to", "megatron", "--tp-new", "2"],
    "torch_dcp/fsdp2_dp2": ["--to", "safetensors"],
    "mcore_torch_dist/dense_gelu/tp2_pp2": ["--to", "zarr3"],
    "mcore_legacy/dense_gelu/tp2_pp1": ["--to", "zarr"],
}


@pytest.fixture
def store(golden: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """Returns an S3 server whose bucket ``runs`` is tests/golden."""
    with mounted_store(golden, monkeypatch, is_constant=True) as server:
        yield server


def run(*words: str | Path) -> int:
    forget_listings()
    return main([str(word) for word in words])


def contents(server: S3Server, prefix: str, *, bucket: str = "runs") -> dict[str, str]:
    """Return name → SHA-256 of the objects below a prefix."""
    objects = server.objects(bucket, f"{prefix}/")
    return {key.removeprefix(f"{prefix}/"): digest for key, digest in objects.items()}


@pytest.mark.parametrize(
    "name",
    [
        # Of each kind of source and destination one: other tests read from stores, too.
        pytest.param(name, marks=pytest.mark.long if name.startswith("mcore") else ())
        for name in CONVERSIONS
    ],
)
def test_what_is_written_to_s3_equals_what_is_written_to_a_directory(
    store: S3Server, golden: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = CONVERSIONS[name]
    assert run("convert", f"s3://runs/{name}", "s3://runs/out", *options, "-q") == 0
    assert run("convert", golden / name, tmp_path / "out", *options, "-q") == 0
    expected = {
        path.relative_to(tmp_path / "out").as_posix(): sha256(path.read_bytes()).hexdigest()
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert contents(store, "out") == expected
    # A checkpoint of Megatron has none of Hugging Face's names.
    code = run("validate", "--deep", "s3://runs/out", "--against", f"s3://runs/{name}")
    assert code == name.startswith("hf/")
    assert_nothing_remains(store)


def assert_nothing_remains(server: S3Server, bucket: str = "runs") -> None:
    assert server.uploads() == []
    assert [key for key in server.keys(bucket) if ".ckpt-stage" in key] == []


def test_single_files_have_their_manifest_beside_them(store: S3Server) -> None:
    source = "s3://runs/hf/llama/safetensors_single"
    assert run("convert", source, "s3://runs/one/model.pt", "--to", "torch", "-q") == 0
    assert set(contents(store, "one")) == {"model.pt", "model.pt.ckpt-manifest.json"}
    assert run("validate", "--deep", "s3://runs/one/model.pt") == 0
    assert_nothing_remains(store)


def test_an_existing_destination_is_replaced_by_force_only(
    store: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "s3://runs/hf/llama/safetensors_single"
    assert run("convert", source, "s3://runs/out", "--to", "hf", "-q") == 0
    before = contents(store, "out")
    assert run("convert", source, "s3://runs/out", "--to", "dcp", "-q") == 2
    assert "the destination already exists" in capsys.readouterr().err
    assert contents(store, "out") == before
    assert run("convert", source, "s3://runs/out", "--to", "dcp", "-q", "--force") == 0
    after = contents(store, "out")
    assert ".metadata" in after and "model.safetensors" in before.keys() - after.keys()
    assert_nothing_remains(store)


def test_the_source_cannot_be_replaced(store: S3Server, capsys: pytest.CaptureFixture[str]) -> None:
    source = "s3://runs/hf/llama/safetensors_single"
    assert run("convert", source, "s3://runs/a/b", "--to", "dcp", "-q") == 0
    assert run("convert", "s3://runs/a/b", "s3://runs/a", "--to", "dcp", "--force") == 2
    assert "ckpt replaces only checkpoints" in capsys.readouterr().err
    assert run("convert", "s3://runs/a/b", "s3://runs/a/b", "--to", "torch_dist", "--force") == 2
    assert "replacing the destination would remove" in capsys.readouterr().err
    run("convert", "s3://runs/a/b", "s3://runs/a/b", "--to", "torch_dist", "--force", "--dry-run")
    assert "replacing the destination would remove" in "".join(capsys.readouterr())
    assert run("validate", "--deep", "s3://runs/a/b") == 0


def test_the_result_is_verified_before_its_manifest_is_published(
    store: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "s3://runs/mcore_legacy/dense_gqa/tp2_pp1_optim"
    words = ["--tp-new", "1", "--verify", "--fingerprint", "--json"]
    assert run("reshard", source, "s3://runs/out", *words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bytes_verified"] > 0 and report["n_fingerprints"] > 0
    assert run("validate", "--deep", "s3://runs/out") == 0
    assert_nothing_remains(store)


def test_json_counts_requests_and_retries(
    store: S3Server, golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "hf/llama/safetensors_single"
    assert run("convert", golden / source, tmp_path / "out", "--to", "dcp", "--json") == 0
    assert "store" not in json.loads(capsys.readouterr().out)

    store.set_rules(replace(SLOW_DOWN, operation="UploadPart", times=2))
    before = traffic_so_far()
    assert run("convert", f"s3://runs/{source}", "s3://runs/out", "--to", "dcp", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    sent = report["store"]
    assert sent["retries"] - before.n_retries == 2
    assert sent["requests"] - before.n_requests >= 10
    assert sent["bytes"] - before.n_bytes >= report["bytes_read"] + report["bytes_written"]

    before = traffic_so_far()
    assert run("validate", "--deep", "s3://runs/out", "--json") == 0
    validated = json.loads(capsys.readouterr().out)
    assert validated["store"]["requests"] > before.n_requests
    assert validated["store"]["bytes"] - before.n_bytes >= report["bytes_written"]


REFUSALS = {
    ("https://example.org/x",): "ckpt cannot write to a web server",
    ("s3://runs",): "the destination is an entire bucket",
    ("s3://runs/x", "--metadata-only"): "--metadata-only makes hard links",
    ("s3://runs/a/../b",): "is not a valid object name",
}


@pytest.mark.parametrize("words", REFUSALS)
def test_what_cannot_be_written_is_refused(
    store: S3Server, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    source = "s3://runs/hf/llama/safetensors_single"
    assert run("convert", source, *words, "--to", "dcp") == 2
    assert REFUSALS[words] in capsys.readouterr().err


@pytest.mark.long
def test_a_new_destination_may_be_verified_with_force(
    store: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "s3://runs/hf/llama/safetensors_single"
    words = ["convert", source, "s3://runs/x", "--to", "dcp", "--verify", "--force"]
    assert run(*words, "-q") == 0
    before = contents(store, "x")
    assert run(*words) == 2
    assert "to replace a checkpoint" in capsys.readouterr().err
    assert contents(store, "x") == before
    assert_nothing_remains(store)


def test_a_plan_asks_the_store_what_is_there(
    store: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "s3://runs/hf/llama/safetensors_single"
    assert run("convert", source, "s3://runs/out", "--to", "dcp", "--dry-run", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["free_bytes"], plan["dst_exists"]) == (None, False)
    assert contents(store, "out") == {}
    assert run("convert", source, "s3://runs/hf/llama", "--to", "dcp", "--dry-run") == 0
    page = capsys.readouterr().out
    assert "free space" not in page and "not measured" in page


def test_a_failed_run_leaves_nothing(store: S3Server, capsys: pytest.CaptureFixture[str]) -> None:
    source = "s3://runs/mcore_torch_dist/dense_gqa/tp2_pp2"
    store.set_rules(Rule(status=403, code="AccessDenied", operation="UploadPart", first=3))
    assert run("convert", source, "s3://runs/out", "--to", "megatron") == 6
    assert "s3:PutObject" in capsys.readouterr().err
    assert contents(store, "out") == {}
    assert_nothing_remains(store)


@pytest.mark.parametrize("first", [pytest.param(1, marks=pytest.mark.long), 3])
def test_a_failed_run_is_continued(
    store: S3Server, capsys: pytest.CaptureFixture[str], first: int
) -> None:
    source = "s3://runs/mcore_torch_dist/dense_gqa/tp2_pp2"
    words = ["convert", source, "s3://runs/out", "--to", "megatron", "--resume", "--json"]
    rule = Rule(status=403, code="AccessDenied", operation="UploadPart", first=first, times=None)
    store.set_rules(rule)
    assert run(*words) == 6
    assert contents(store, "out") == {}
    store.set_rules()
    capsys.readouterr()
    assert run(*words) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["bytes_resumed"] > 0) == (first > 1)
    assert run("validate", "--deep", "s3://runs/out") == 0
    assert_nothing_remains(store)


@pytest.mark.parametrize(
    "operation",
    [
        "CompleteMultipartUpload",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("DeleteObjects", "DeleteObject")),
    ],
)
@pytest.mark.parametrize("first", [pytest.param(1, marks=pytest.mark.long), 2])
def test_an_interrupted_publication_is_finished(
    store: S3Server, golden: Path, operation: str, first: int
) -> None:
    source = "s3://runs/hf/llama/safetensors_single"
    assert run("convert", source, "s3://runs/whole", "--to", "dcp", "-q") == 0
    assert run("convert", source, "s3://runs/out", "--to", "hf", "-q") == 0
    words = ["convert", source, "s3://runs/out", "--to", "dcp", "-q", "--force"]
    store.set_rules(
        Rule(status=403, code="AccessDenied", operation=operation, first=first, times=None)
    )
    run(*words)
    store.set_rules()
    assert run(*words) == 0
    assert without_manifest(contents(store, "out")) == without_manifest(contents(store, "whole"))
    assert_nothing_remains(store)


@pytest.mark.parametrize("first", [1, 2, 3, 4])
def test_old_and_new_objects_are_never_gone_together(
    store: S3Server, golden: Path, first: int
) -> None:
    source = "s3://runs/hf/llama/safetensors_single"
    assert run("convert", source, "s3://runs/out", "--to", "hf", "-q") == 0
    old = contents(store, "out")
    words = ["convert", source, "s3://runs/out", "--to", "dcp", "-q", "--force"]
    rule = Rule(status=403, code="AccessDenied", operation="PutObject", first=first, times=None)
    store.set_rules(rule)
    failed = run(*words) != 0
    store.set_rules()
    # The old checkpoint is there, or everything that the next run needs to finish the new one.
    assert contents(store, "out") == old or not failed or store.uploads()
    assert run(*words) == 0
    assert run("validate", "--deep", "s3://runs/out") == 0
    assert_nothing_remains(store)


@pytest.mark.parametrize("option", ["--verify", "--fingerprint"])
def test_what_can_be_read_back_only_after_the_replacement_is_refused(
    store: S3Server, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    source = "s3://runs/hf/llama/safetensors_single"
    assert run("convert", source, "s3://runs/out", "--to", "hf", "-q") == 0
    old = contents(store, "out")
    assert run("convert", source, "s3://runs/out", "--to", "dcp", "--force", option) == 2
    assert "--verify and --fingerprint cannot be combined" in capsys.readouterr().err
    assert contents(store, "out") == old
    assert_nothing_remains(store)


def without_manifest(objects: dict[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in objects.items() if "manifest" not in name}


def test_another_writer_is_not_overwritten(
    store: S3Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "s3://runs/hf/llama/safetensors_single"
    begin = BucketStage._make_visible

    def disturbed(self: BucketStage, *args: Any, **options: Any) -> None:
        put_object(location_of("s3://runs/out/.metadata"), b"theirs", replace=False)  # type: ignore[arg-type]
        begin(self, *args, **options)

    monkeypatch.setattr(BucketStage, "_make_visible", disturbed)
    assert run("convert", source, "s3://runs/out", "--to", "dcp") == 2
    assert "another process has created the object" in capsys.readouterr().err
    assert list(contents(store, "out")) == [".metadata"]
    assert_nothing_remains(store)


def _reshard(team: Team, job: Job, environment: dict[str, str]) -> None:
    os.environ.update(environment)  # a server forks the workers
    run_shared(job, team)


def test_several_workers_write_to_s3(store: S3Server, golden: Path, tmp_path: Path) -> None:
    source = "mcore_legacy/dense_gqa/tp2_pp1"
    store.mount("few", golden / source, f"{source}/")
    job = Job(
        src=golden / source,
        dst=tmp_path / "out",
        topology=TopologyChange(tp=4),
        is_reshard=True,
        verify=True,
        fingerprint=True,
    )
    run_job(job)
    expected = {
        path.relative_to(tmp_path / "out").as_posix(): sha256(path.read_bytes()).hexdigest()
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    src, dst = location_of(f"s3://few/{source}"), location_of("s3://few/out")
    run_team(2, _reshard, replace(job, src=src, dst=dst), store.environment())
    assert without_manifest(contents(store, "out", bucket="few")) == without_manifest(expected)
    assert run("validate", "--deep", "s3://few/out") == 0
    assert_nothing_remains(store, "few")


@pytest.mark.long  # starts processes that import torch
@pytest.mark.parametrize(
    ("bucket", "words"), [("runs", []), ("few", ["--verify", "--fingerprint"])]
)
def test_launched_workers_write_to_s3(
    store: S3Server, golden: Path, tmp_path: Path, bucket: str, words: list[str]
) -> None:
    source = "mcore_legacy/dense_gqa/tp2_pp1"
    # Of a bucket with less than 1,000 objects, one answer lists everything.
    store.mount("few", golden / source, f"{source}/")
    options = ["--tp", "2", "--tp-new", "4", "-q", *words]
    launch = [sys.executable, "-m", "ckpt_cli", "launch", "--nproc-per-node", "2", "--"]
    done = subprocess.run(
        [*launch, "reshard", f"s3://{bucket}/{source}", f"s3://{bucket}/out", *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert run("reshard", golden / source, tmp_path / "out", *options) == 0
    expected = {
        path.relative_to(tmp_path / "out").as_posix(): sha256(path.read_bytes()).hexdigest()
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert without_manifest(contents(store, "out", bucket=bucket)) == without_manifest(expected)
    assert run("validate", "--deep", f"s3://{bucket}/out") == 0
    assert_nothing_remains(store, bucket)


def test_stores_take_less_memory_beside_a_large_runtime(store: S3Server, golden: Path) -> None:
    job = Job(
        src=location_of("s3://runs/mcore_legacy/dense_gqa/tp2_pp1_optim"),
        dst=location_of("s3://runs/out"),
        memory_bytes=512 << 20,
        beside_bytes=330 << 20,
    )
    assert run_job(job).n_tensors > 0
    assert_nothing_remains(store)


@pytest.fixture
def without_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets obstore upload, as for stores other than S3."""
    monkeypatch.setattr("core.publish.stage.bucket.stage.upload_client", OrderedUploads)


@pytest.mark.usefixtures("without_boto3")
def test_parts_are_sent_in_order_without_boto3(
    store: S3Server, golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core.files.multipart.stream.PART_BYTES", 5 << 20)
    rng = np.random.default_rng(7)
    tensors = {f"w{n}": rng.random((1 << 20,), np.float32) for n in range(9)}
    save_file(tensors, tmp_path / "model.safetensors")
    source = tmp_path / "model.safetensors"
    for name in ("mcore_torch_dist/dense_gqa/tp2_pp2", "torch_dcp/fsdp2_dp2"):
        words = ["convert", golden / name, f"s3://runs/{name}-out", *CONVERSIONS[name], "-q"]
        assert run(*words) == 0
        assert run("validate", "--deep", f"s3://runs/{name}-out") == 0
    store.take_log()
    assert run("convert", source, "s3://runs/out", "--to", "dcp", "-q", "--verify") == 0
    assert any(entry.operation == "UploadPart" for entry in store.take_log())
    assert run("convert", source, tmp_path / "out", "--to", "dcp", "-q") == 0
    digest = sha256((tmp_path / "out" / "__0_0.distcp").read_bytes()).hexdigest()
    assert contents(store, "out")["__0_0.distcp"] == digest
    assert_nothing_remains(store)


@pytest.mark.each_value
@pytest.mark.usefixtures("without_boto3")
@pytest.mark.parametrize("options", [[], ["--resume"], ["--force"]])
@pytest.mark.parametrize("operation", ["UploadPart", "CompleteMultipartUpload", "PutObject"])
def test_a_failed_run_in_order_leaves_nothing(
    store: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
    options: list[str],
) -> None:
    monkeypatch.setattr("core.files.multipart.stream.PART_BYTES", 5 << 20)
    save_file({"w": np.ones((5 << 20,), np.float32)}, tmp_path / "model.safetensors")
    store.set_rules(Rule(status=403, code="AccessDenied", operation=operation, times=None))
    source = tmp_path / "model.safetensors"
    assert run("convert", source, "s3://runs/out", "--to", "dcp", *options) == 6
    store.set_rules()
    assert contents(store, "out") == {}
    assert_nothing_remains(store)


def test_a_run_that_was_killed_while_it_verified_is_repeated(
    store: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "s3://runs/hf/llama/safetensors_single"
    words = ["convert", source, "s3://runs/out", "--to", "dcp", "-q", "--verify"]
    with monkeypatch.context() as patch:
        patch.setattr("core.verbs.convert.verify.verify", lambda *args, **options: 1 / 0)
        patch.setattr(BucketStage, "_clean_up", lambda self: None)
        assert run(*words) == 70
    assert ".metadata" in contents(store, "out")
    assert run("convert", source, "s3://runs/out", "--to", "torch_dist") == 2  # another job
    assert run(*words) == 0
    assert run("validate", "--deep", "s3://runs/out") == 0
    assert_nothing_remains(store)


def test_the_caller_hears_of_a_publication_in_a_store_when_it_is_complete(
    store: S3Server, golden: Path
) -> None:
    publications: list[tuple[int, set[str]]] = []
    job = Job(
        src=golden / "hf/llama/safetensors_single", dst=location_of("s3://runs/out"), to="dcp"
    )
    run_job(
        job,
        publishing=lambda report, inode: publications.append((inode, set(contents(store, "out")))),
    )
    assert publications == [(0, {".metadata", "__0_0.distcp", "ckpt-manifest.json"})]


def test_an_upload_that_was_begun_twice_is_aborted(store: S3Server) -> None:
    source = "s3://runs/hf/llama/safetensors_single"
    store.set_rules(Rule("lost", operation="CreateMultipartUpload", first=1, times=2))
    assert run("convert", source, "s3://runs/out", "--to", "dcp", "-q") == 0
    assert_nothing_remains(store)


def test_a_note_that_cannot_be_deleted_does_no_harm(
    store: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "s3://runs/hf/llama/safetensors_single"
    words = ["convert", source, "s3://runs/out", "--to", "dcp"]
    store.set_rules(Rule(status=403, code="AccessDenied", operation="DeleteObjects", times=None))
    assert run(*words) == 0
    assert "could not be deleted" in capsys.readouterr().out
    store.set_rules()
    assert run(*words) == 0
    assert_nothing_remains(store)


@pytest.mark.long
def test_the_report_counts_requests_and_repetitions(
    store: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    store.set_rules(replace(SLOW_DOWN, operation="UploadPart"))
    source = "s3://runs/hf/llama/safetensors_single"
    assert run("convert", source, "s3://runs/out", "--to", "dcp") == 0
    assert re.search(r"store +[\d,]+ requests \(\d+ repeated\)", capsys.readouterr().out)


@pytest.mark.long  # uploads that are resumed, and those begun twice, have tests above
def test_of_two_uploads_of_an_object_the_recorded_one_is_finished(store: S3Server) -> None:
    source = "s3://runs/hf/llama/safetensors_single"
    words = ["convert", source, "s3://runs/out", "--to", "dcp", "-q", "--resume"]
    store.set_rules(
        Rule("lost", operation="CreateMultipartUpload", times=3),
        Rule(status=403, code="AccessDenied", operation="CompleteMultipartUpload", times=None),
    )
    assert run(*words) == 6
    assert len(store.uploads()) > len(set(store.uploads()))
    store.set_rules()
    assert run(*words) == 0
    assert run("validate", "--deep", "s3://runs/out") == 0
    assert_nothing_remains(store)


@pytest.mark.parametrize("key", [".distcp", pytest.param(".metadata", marks=pytest.mark.long)])
def test_a_publication_whose_answer_is_lost_is_finished_by_the_next_run(
    store: S3Server,
    golden: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    key: str,
) -> None:
    source = "s3://runs/hf/llama/safetensors_single"
    assert run("convert", source, "s3://runs/whole", "--to", "dcp", "-q") == 0
    words = ["convert", source, "s3://runs/out", "--to", "dcp", "-q"]
    store.set_rules(
        Rule("lost", operation="CompleteMultipartUpload", key=key),
        Rule("cut", operation="CompleteMultipartUpload", key=key, first=2, times=None),
    )
    monkeypatch.setattr("core.files.multipart.s3_client._N_ATTEMPTS", 3)
    assert run(*words) == 6
    assert "run the same command again to finish the publication" in capsys.readouterr().err
    store.set_rules()
    assert run(*words) == 0
    assert without_manifest(contents(store, "out")) == without_manifest(contents(store, "whole"))
    assert_nothing_remains(store)
