"""What an object store refuses, or fails to do, is said in one line, with the next step."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt_cli.app import main
from core.files import object_client
from core.files.object_listing import forget_listings
from core.files.remote_path import location_of
from core.files.requests import failure
from core.files.requests.traffic import traffic_so_far
from tests.support.certificates import self_signed
from tests.support.object_stores import mounted_store
from tests.support.s3.client import ACCESS_KEY, SECRET, TOKEN, S3Server
from tests.support.s3.rules import EXPIRED, SLOW_DOWN, Rule

MODEL = "hf/llama/safetensors_single"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are repeated at once."""
    monkeypatch.setattr(failure, "_FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(failure, "_LONGEST_WAIT_S", 0.01)


@pytest.fixture
def store(golden: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """Returns a store of tests/golden whose answers a test can replace."""
    with mounted_store(golden, monkeypatch, is_constant=True) as store:
        yield store


REFUSALS = {
    "no bucket": (
        "ListObjectsV2",
        404,
        "NoSuchBucket",
        "no such bucket: runs",
        "check the bucket name",
    ),
    "signed region": (
        "ListObjectsV2",
        400,
        "AuthorizationHeaderMalformed",
        "a different region",
        "region=NAME",
    ),
    "region": ("ListObjectsV2", 301, "PermanentRedirect", "in a different region", "region=NAME"),
    "clock": ("ListObjectsV2", 403, "RequestTimeTooSkewed", "this machine's clock", "NTP"),
    "key": ("ListObjectsV2", 403, "InvalidAccessKeyId", "access denied", "AWS_ACCESS_KEY_ID"),
    "no listing": ("ListObjectsV2", 403, "AccessDenied", "no permission to list", "s3:ListBucket"),
    "no reading": ("GetObject", 403, "AccessDenied", "no permission to read", "s3:GetObject"),
    "failure": (
        "GetObject",
        501,
        "NotImplemented",
        "the request failed (501",
        "run the command again",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_names_the_reason_and_the_next_step(
    store: S3Server, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused, status, code, message, hint = REFUSALS[name]
    store.set_rules(Rule(operation=refused, status=status, code=code, times=None))
    for options in ([], ["--debug"]):
        assert main(["inspect", f"s3://runs/{MODEL}", *options]) == 6
        shown = capsys.readouterr()
        error, at, advice = shown.err.splitlines()[-3:]
        assert message in error and error.startswith("error: ")
        assert f"s3://runs/{MODEL}" in at
        assert hint in advice
        for secret in (ACCESS_KEY, SECRET, TOKEN):
            assert secret not in shown.out + shown.err


def test_a_single_object_is_read_where_the_bucket_may_not_be_listed(store: S3Server) -> None:
    # S3 answers 403 for what does not exist, too.
    denied = Rule(status=403, code="AccessDenied", times=None)
    store.set_rules(
        replace(denied, operation="ListObjectsV2"),
        replace(denied, key=r"^(?!.*model\.safetensors$)"),
    )
    assert main(["inspect", f"s3://runs/{MODEL}/model.safetensors"]) == 0
    assert main(["validate", "--deep", f"s3://runs/{MODEL}/model.safetensors", "-q"]) == 0


MIDWAY = {
    "expired": (
        Rule(status=400, code="ExpiredToken"),
        "credentials have expired (400 ExpiredToken)",
    ),
    "changed": (Rule(status=412, code="PreconditionFailed"), "changed while it was being read"),
    "throttled": (Rule(status=503, code="SlowDown"), "throttling requests (503 SlowDown)"),
    "cut": (Rule("truncate"), "it closed the connection"),
}


@pytest.mark.parametrize("name", MIDWAY)
def test_a_copy_that_fails_in_the_middle_leaves_nothing(
    store: S3Server, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rule, message = MIDWAY[name]
    # The first two requests for content are those for the metadata.
    store.set_rules(replace(rule, operation="GetObject", first=3, times=None))
    assert main(["convert", f"s3://runs/{MODEL}", str(tmp_path / "out"), "--to", "dcp"]) == 6
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "rule", [Rule(status=500), SLOW_DOWN, Rule("cut"), Rule("truncate", operation="GetObject")]
)
def test_a_failure_that_passes_is_not_seen(
    store: S3Server, golden: Path, tmp_path: Path, rule: Rule
) -> None:
    operations = ("ListObjectsV2", "HeadObject", "GetObject")
    is_of = [name for name in operations if re.fullmatch(rule.operation, name)]
    store.set_rules(*(replace(rule, operation=name, times=2) for name in is_of))
    options = ["--to", "dcp", "-q"]
    assert main(["convert", f"s3://runs/{MODEL}", str(tmp_path / "a"), *options]) == 0
    assert main(["convert", str(golden / MODEL), str(tmp_path / "b"), *options]) == 0
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "-q"]) == 0


def test_a_certificate_that_is_not_trusted_is_named(
    golden: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    certificate = self_signed(tmp_path / "server.pem")
    with mounted_store(golden, monkeypatch, certificate=certificate) as store:
        assert main(["inspect", f"s3://runs/{MODEL}"]) == 6
        assert store.take_log() == []
    assert "its certificate is not trusted" in capsys.readouterr().err


def test_one_variable_makes_a_certificate_trusted_for_reading_and_writing(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = self_signed(tmp_path / "server.pem")
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    with mounted_store(golden, monkeypatch, certificate=certificate):
        words = ["convert", f"s3://runs/{MODEL}", "s3://runs/out", "--to", "dcp", "-q"]
        assert main(words) == 6
        assert main([*words, "--storage-option", "allow_invalid_certificates=true"]) == 0
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert main([*words, "--force"]) == 0


def test_missing_credentials_are_named(
    store: S3Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    # The metadata service of a machine without roles.
    store.set_rules(Rule(key="^(api|meta-data)/", status=404, code="NotFound", times=None))
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{store.port}")
    assert main(["inspect", f"s3://runs/{MODEL}"]) == 6
    assert "no credentials found" in capsys.readouterr().err


def test_unsigned_requests_by_the_environment_are_as_patient_as_signed_ones(
    store: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{store.port}")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    assert main(["inspect", f"s3://runs/{MODEL}"]) == 0
    client: Any = object_client.client_of(location_of("s3://runs"))  # type: ignore[arg-type]
    assert "timeout" not in client.client_options


def test_a_metadata_service_that_does_not_answer_is_not_waited_for(
    store: S3Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    options = {**object_client._IMPATIENT["client_options"], "timeout": "1s"}
    monkeypatch.setitem(object_client._IMPATIENT, "client_options", options)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert main(["inspect", f"s3://runs/{MODEL}"]) == 6
    assert "no credentials found" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["127.0.0.1:9000", "minio"])
def test_an_endpoint_without_a_scheme_is_a_usage_error(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "s3://runs/a", "--storage-option", f"endpoint={value}"]) == 2
    assert f"use --storage-option endpoint=https://{value}" in capsys.readouterr().err


def test_options_of_object_stores_are_refused_for_web_servers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["inspect", "https://127.0.0.1:9/a", "--storage-option", "region=eu"]) == 2
    assert "--storage-option region is not supported for https:// URLs" in capsys.readouterr().err


def test_a_web_server_that_does_not_answer_is_no_store(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["inspect", "https://127.0.0.1:9/a", "--storage-option", "timeout=5s"]
    assert main(words) == 6
    shown = capsys.readouterr().err
    assert (
        "the request to the server failed" in shown and "the host and the port of the URL" in shown
    )


def test_an_endpoint_in_the_environment_that_is_no_url_is_named(
    monkeypatch: pytest.MonkeyPatch, store: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"127.0.0.1:{store.port}")
    assert main(["inspect", "s3://runs/a"]) == 6
    assert "the endpoint is not a URL" in capsys.readouterr().err


def test_an_unknown_host_is_named(
    monkeypatch: pytest.MonkeyPatch, store: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://no-such-host.invalid")
    assert main(["inspect", f"s3://runs/{MODEL}"]) == 6
    assert "its host name could not be resolved" in capsys.readouterr().err


def test_a_server_that_refuses_head_is_read_by_get(
    store: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"{store.url}/runs/{MODEL}/model.safetensors"
    store.set_rules(Rule(status=403, operation="HeadObject", code="AccessDenied", times=None))
    assert main(["inspect", url]) == 0
    forget_listings()
    store.set_rules(Rule(status=403, code="AccessDenied", times=None))
    assert main(["inspect", url]) == 6
    assert "access denied, or no such object" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://host/a/model.safetensors?X-Amz-Signature=hidden", "must not contain a query"),
        ("https://me:hidden@host/a", "must not contain a password"),
    ],
)
def test_addresses_with_secrets_are_refused_and_not_shown(
    url: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["inspect", url], ["convert", url, str(tmp_path / "out"), "--to", "dcp"]):
        assert main([*words, "--debug"]) == 2
        shown = capsys.readouterr()
        assert message in shown.err
        assert "host/a" in shown.err
        assert "hidden" not in shown.out + shown.err


def test_the_query_of_an_address_is_in_no_message(
    store: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    # Azure's signature is part of every address, and the client's messages have the address.
    store.set_rules(Rule(status=409, code="Odd", times=None))
    options = [f"endpoint={store.url}", "account_name=a", "sas_token=sv=1&sp=r&sig=hidden"]
    words = [word for option in options for word in ("--storage-option", option)]
    assert main(["inspect", "az://c/x", "--debug", *words]) == 6
    shown = capsys.readouterr()
    assert "the request failed (409 Odd)" in shown.err
    assert "hidden" not in shown.out + shown.err


@pytest.mark.parametrize(
    "status", [429, 503, *(pytest.param(n, marks=pytest.mark.long) for n in (500, 408))]
)
def test_requests_that_are_repeated_are_counted(
    store: S3Server, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    store.set_rules(Rule(status=status, code="Later", operation="GetObject", times=3))
    before = traffic_so_far()
    assert main(["inspect", f"s3://runs/{MODEL}"]) == 0
    traffic = traffic_so_far() - before
    log = [entry for entry in store.take_log() if "X-Amz-Signature" not in entry.query]
    assert traffic.n_requests == len(log)
    # One of the three may be the question how long to wait.
    n_failed = sum(entry.status == status for entry in log)
    assert traffic.n_retries == n_failed >= 2


@pytest.mark.parametrize("name", ["s3", "https"])
def test_a_store_that_asks_for_a_pause_gets_it(store: S3Server, name: str) -> None:
    asks = Rule(status=503, code="SlowDown", headers={"Retry-After": "1"}, times=4)
    store.set_rules(replace(asks, operation="GetObject"))
    root = "s3://runs" if name == "s3" else f"{store.url}/runs"
    assert main(["inspect", f"{root}/{MODEL}/model.safetensors"]) == 0
    refused = [entry for entry in store.take_log() if entry.status == 503]
    answered = [entry.begun for entry in refused]
    # Each refusal, and the question that follows it, precede a pause of a second.
    assert len(refused) == 4
    assert answered[2] - answered[1] >= 1.0


def test_a_store_that_asks_for_too_long_a_pause_is_given_up(
    store: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    asks = Rule(status=429, code="Later", headers={"Retry-After": "3600"}, times=None)
    store.set_rules(replace(asks, operation="GetObject"))
    assert main(["inspect", f"s3://runs/{MODEL}/model.safetensors"]) == 6
    assert "asks clients to wait 3,600 s" in capsys.readouterr().err


def test_a_token_that_expires_in_the_middle_is_named(
    store: S3Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.set_rules(replace(EXPIRED, operation="GetObject", first=3, times=None))
    assert main(["convert", f"s3://runs/{MODEL}", str(tmp_path / "out"), "--to", "dcp"]) == 6
    err = capsys.readouterr().err
    assert "credentials have expired (403 ExpiredToken)" in err
    assert "renew the credentials" in err
    assert list(tmp_path.iterdir()) == []


def test_a_body_that_is_shorter_than_the_range_is_found(
    store: S3Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The answer is complete as HTTP has it.
    store.set_rules(Rule(fault="length", operation="GetObject", first=3, times=None))
    assert main(["convert", f"s3://runs/{MODEL}", str(tmp_path / "out"), "--to", "dcp"]) == 3
    assert "bytes too early" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_bit_that_flips_on_the_way_is_found_by_the_checksum(
    store: S3Server, golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(golden / MODEL, tmp_path / "a")
    assert main(["manifest", "-q", str(tmp_path / "a")]) == 0
    store.mount("listed", tmp_path / "a")
    store.set_rules(Rule(fault="flip", operation="GetObject", key="safetensors$", times=None))
    assert main(["validate", "--deep", "s3://listed"]) == 1
    assert "checksum" in capsys.readouterr().out
