"""A signal ends a command at once, whatever the store that it is waiting for does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.s3.client import S3Server, started_server
from tests.support.s3.rules import Rule

MODEL = "mcore_torch_dist/dense_gqa/tp2_pp2"
URL = f"s3://runs/{MODEL}"
GUARD_S = 20.0
"""Less than the time that a request may take to be answered."""
PROGRAM = """
import faulthandler, runpy, signal
faulthandler.register(signal.SIGUSR1)
runpy.run_module("ckpt_cli", run_name="__main__", alter_sys=True)
"""
"""Runs ckpt, which shows what its threads do when it is asked to."""
PHASES = {
    "listing": ("ListObjectsV2", 1, ["inspect", URL]),
    "reading metadata": ("GetObject", 1, ["inspect", URL]),
    "copying": ("GetObject", 8, ["convert", URL, "out", "--to", "dcp"]),
    "checking": ("GetObject", 6, ["validate", "--deep", URL]),
    "comparing": ("GetObject", 12, ["diff", URL, URL]),
    "asking for checksums": ("HeadObject", 1, ["validate", "--deep", URL]),
    "putting": ("PutObject", 1, ["manifest", f"s3://written/{MODEL}"]),
}


@pytest.fixture(scope="module")
def store(golden: Path) -> Iterator[S3Server]:
    """Returns a store of tests/golden in the buckets ``runs`` and ``written``."""
    with started_server() as server:
        server.mount("runs", golden)
        server.mount("written", golden)
        yield server


def end_when(
    is_reached: Callable[[], bool],
    store: S3Server,
    words: list[str],
    folder: Path,
    *,
    number: signal.Signals = signal.SIGINT,
) -> tuple[int, str]:
    """Run ckpt, send it a signal at a certain point, and return exit code and messages."""
    environment = {**os.environ, **store.environment(), "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words],
        env=environment,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not is_reached():
        assert process.poll() is None, f"too early: {process.communicate()[1]}"
        time.sleep(0.02)
    process.send_signal(number)
    try:
        _, err = process.communicate(timeout=GUARD_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGUSR1)
        time.sleep(1)
        process.kill()
        pytest.fail(f"it goes on after {GUARD_S:.0f} s:\n{process.communicate()[1]}")
    finally:
        process.kill()
    return process.returncode, err


@pytest.mark.parametrize(
    "phase",
    [
        # Each starts the program; others of its commands wait for the same kinds of requests.
        pytest.param(
            phase, marks=() if phase in ("listing", "copying", "putting") else pytest.mark.long
        )
        for phase in PHASES
    ],
)
def test_ctrl_c_ends_a_command_whose_store_does_not_answer(
    store: S3Server, tmp_path: Path, phase: str
) -> None:
    operation, first, words = PHASES[phase]
    store.set_rules(Rule(fault="hang", operation=operation, first=first, times=None))
    code, err = end_when(lambda: store.n_hanging() > 0, store, words, tmp_path)
    assert code == 130
    assert err.startswith("interrupted: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("operation", "number"),
    [
        ("UploadPart", signal.SIGTERM),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                ("UploadPart", signal.SIGINT),
                ("CreateMultipartUpload", signal.SIGINT),
                ("CreateMultipartUpload", signal.SIGTERM),
            ]
        ),
    ],
)
def test_a_silent_store_does_not_keep_an_upload_alive(
    store: S3Server, tmp_path: Path, operation: str, number: signal.Signals
) -> None:
    store.set_rules(Rule(fault="hang", operation=operation, first=2, times=None))
    words = ["convert", URL, "s3://written/out", "--to", "megatron"]
    code, err = end_when(lambda: store.n_hanging() > 0, store, words, tmp_path, number=number)
    assert code == 128 + number
    assert err.startswith("interrupted")
    assert store.settle()
    store.set_rules()
    assert store.objects("written", "out/") == {}
    assert store.objects("written", ".out.ckpt-stage/") == {}
    assert store.uploads() == []


def test_sigterm_does_the_same(store: S3Server, tmp_path: Path) -> None:
    store.set_rules(Rule(fault="hang", operation="GetObject", first=3, times=None))
    words = ["convert", URL, "out", "--to", "dcp"]
    code, err = end_when(
        lambda: store.n_hanging() > 0, store, words, tmp_path, number=signal.SIGTERM
    )
    assert code == 128 + signal.SIGTERM
    assert err.startswith("interrupted (SIGTERM): ")
    assert list(tmp_path.iterdir()) == []


def test_a_pause_that_the_store_asks_for_ends_too(store: S3Server, tmp_path: Path) -> None:
    headers = {"Retry-After": "240"}
    store.set_rules(Rule(status=503, code="SlowDown", headers=headers, times=None))
    store.take_log()
    code, _ = end_when(
        lambda: any(entry.operation == "GetObject" for entry in store.take_log()),
        store,
        ["inspect", URL],
        tmp_path,
    )
    assert code == 130


@pytest.mark.parametrize(
    ("first", "number"),
    [
        (1, signal.SIGTERM),
        # Of two files of data and the metadata: the metadata.
        pytest.param(3, signal.SIGINT, marks=pytest.mark.long),
    ],
)
def test_a_publication_that_a_store_does_not_answer_is_finished_by_the_next_run(
    store: S3Server, tmp_path: Path, first: int, number: signal.Signals
) -> None:
    dst = f"s3://written/published_{first}"
    words = ["convert", "s3://runs/hf/llama/safetensors_single", dst, "--to", "dcp"]
    store.set_rules(
        Rule(fault="hang", operation="CompleteMultipartUpload", first=first, times=None)
    )
    code, err = end_when(lambda: store.n_hanging() > 0, store, words, tmp_path, number=number)
    assert code == 128 + number
    assert "some of its objects may be in the bucket" in err
    assert store.settle()
    store.set_rules()
    environment = {**os.environ, **store.environment(), "PYTHONPATH": os.getcwd()}
    again = [sys.executable, "-m", "ckpt_cli", *words, "-q"]
    subprocess.run(again, env=environment, check=True, timeout=10 * GUARD_S)
    objects = store.objects("written", f"published_{first}/")
    names = {name.rpartition("/")[2] for name in objects}
    assert {".metadata", "ckpt-manifest.json"} < names
    assert store.objects("written", f".published_{first}.ckpt-stage/") == {}
    assert store.uploads() == []
