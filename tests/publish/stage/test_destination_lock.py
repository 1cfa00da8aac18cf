"""One run at a time writes a destination in a bucket; the lock of a dead run is taken over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_cli.app import main
from core.files.object_client import set_storage_options
from core.files.object_listing import forget_listings
from core.publish.stage.bucket import destination_lock
from core.publish.stage.bucket.destination_lock import LockOwner
from core.publish.stage.bucket.stage import BucketStage
from tests.support.object_stores import mounted_store
from tests.support.s3.client import S3Server
from tests.support.s3.rules import Rule

SOURCE = "s3://runs/hf/llama/safetensors_single"
WORDS = ["convert", SOURCE, "s3://runs/out", "--to", "dcp", "-q"]
LOCK = ".out.ckpt-stage/lock"


@pytest.fixture
def store(golden: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """Returns an S3 server whose bucket ``runs`` is tests/golden."""
    with mounted_store(golden, monkeypatch, is_constant=True) as server:
        yield server


def run(*words: str) -> int:
    forget_listings()
    set_storage_options({})
    return main([*words])


def put_lock(store: S3Server, **changes: Any) -> None:
    """Put the lock of a run on another host, or of what ``changes`` say."""
    owner = {
        "token": "theirs",
        "host": "elsewhere",
        "machine": "another",
        "pid": 7,
        "started": 1,
        "since": "2026-01-01 00:00:00 UTC",
    }
    store.put("runs", LOCK, json.dumps({**owner, **changes}).encode())


def notes(store: S3Server) -> list[str]:
    """Return the names of the objects in the hidden prefix."""
    return [key.rpartition("/")[2] for key in store.objects("runs", ".out.ckpt-stage/")]


def test_a_second_run_is_refused_while_the_first_works_and_not_after_it_was_killed(
    store: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    store.set_rules(Rule("hang", operation="UploadPart", times=1))
    first = subprocess.Popen([sys.executable, "-m", "ckpt_cli", *WORDS], env={**os.environ})
    try:
        while not store.n_hanging():
            assert first.poll() is None
            time.sleep(0.02)
        uploads = store.uploads()
        for more in ([], ["--force"], ["--resume"]):
            assert run(*WORDS, *more) == 6
            err = capsys.readouterr().err
            assert f"another run is writing to this destination: process {first.pid} on " in err
        assert store.uploads() == uploads != []
    finally:
        first.kill()
        first.wait()
    assert run(*WORDS) == 0
    assert (store.uploads(), notes(store)) == ([], [])


def test_the_lock_of_another_host_is_respected_until_it_is_silent(
    store: S3Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_lock(store)
    assert run(*WORDS) == 6
    err = capsys.readouterr().err
    assert "process 7 on elsewhere, since 2026-01-01" in err
    assert f"try again in 3 minutes, or delete s3://runs/{LOCK}" in err
    assert (notes(store), store.objects("runs", "out/")) == (["lock"], {})

    monkeypatch.setattr(destination_lock, "_SILENT_S", -1.0)
    assert run(*WORDS) == 0
    assert notes(store) == []


def test_a_lock_that_cannot_be_understood_is_respected(
    store: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    store.put("runs", LOCK, b"?")
    assert run(*WORDS) == 6
    assert f"or delete s3://runs/{LOCK} if it was killed" in capsys.readouterr().err
    assert notes(store) == ["lock"]


def test_the_number_of_a_dead_process_that_another_one_has_is_no_sign_of_life(
    store: S3Server,
) -> None:
    own = LockOwner.of_this_process()
    put_lock(store, machine=own.machine, pid=os.getppid(), started=1)
    assert run(*WORDS) == 0
    assert notes(store) == []


def test_a_run_whose_lock_was_taken_over_publishes_nothing(
    store: S3Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = BucketStage._make_visible

    def disturbed(self: BucketStage, *args: Any, **options: Any) -> None:
        put_lock(store)
        begin(self, *args, **options)

    monkeypatch.setattr(BucketStage, "_make_visible", disturbed)
    assert run(*WORDS) == 6
    assert "another run has taken over this destination" in capsys.readouterr().err
    assert (store.uploads(), store.objects("runs", "out/")) == ([], {})
    assert notes(store) == ["lock"]


def test_signs_of_life_are_put_and_removed(
    store: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(destination_lock, "_BEAT_S", 0.001)
    assert run(*WORDS) == 0
    puts = [entry.key for entry in store.take_log() if entry.operation == "PutObject"]
    assert any("/alive-" in key for key in puts)
    assert notes(store) == []
