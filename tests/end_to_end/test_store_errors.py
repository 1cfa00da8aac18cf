"""What an object store refuses, or fails to do, is said in one line, with the next step."""

from __future__ import annotations

import datetime
import ipaddress
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_cli.app import main
from core.files import object_client
from tests.support.faulty_store import ACCESS_KEY, SECRET, TOKEN, Fault, FaultyStore, faulty_store

MODEL = "hf/llama/safetensors_single"


@pytest.fixture
def store(golden: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    """Returns a store of tests/golden whose answers a test can replace."""
    with faulty_store(golden, monkeypatch) as store:
        yield store


REFUSALS = {
    "no bucket": ("list", 404, "NoSuchBucket", "no such bucket: runs", "check the name"),
    "signed region": ("list", 400, "AuthorizationHeaderMalformed", "another region", "region=NAME"),
    "region": ("list", 301, "PermanentRedirect", "in another region", "region=NAME"),
    "clock": ("list", 403, "RequestTimeTooSkewed", "the clock of this machine", "NTP"),
    "key": ("list", 403, "InvalidAccessKeyId", "access denied", "AWS_ACCESS_KEY_ID"),
    "no listing": ("list", 403, "AccessDenied", "no permission to list", "s3:ListBucket"),
    "no reading": ("get", 403, "AccessDenied", "no permission to read", "s3:GetObject"),
    "failure": ("get", 501, "NotImplemented", "the request failed (501", "run again"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_names_the_reason_and_the_next_step(
    store: FaultyStore, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused, status, code, message, hint = REFUSALS[name]
    store.fault_for = lambda operation, key, n_before: (
        Fault(status, code) if operation == refused else None
    )
    for options in ([], ["--debug"]):
        assert main(["inspect", f"s3://runs/{MODEL}", *options]) == 6
        shown = capsys.readouterr()
        error, at, advice = shown.err.splitlines()[-3:]
        assert message in error and error.startswith("error: ")
        assert f"s3://runs/{MODEL}" in at
        assert hint in advice
        for secret in (ACCESS_KEY, SECRET, TOKEN):
            assert secret not in shown.out + shown.err


def test_a_single_object_is_read_where_the_bucket_may_not_be_listed(store: FaultyStore) -> None:
    # S3 answers 403 for what does not exist, too.
    store.fault_for = lambda operation, key, n_before: (
        Fault(403, "AccessDenied")
        if operation == "list" or not key.endswith("model.safetensors")
        else None
    )
    assert main(["inspect", f"s3://runs/{MODEL}/model.safetensors"]) == 0
    assert main(["validate", "--deep", f"s3://runs/{MODEL}/model.safetensors", "-q"]) == 0


MIDWAY = {
    "expired": (Fault(400, "ExpiredToken"), "credentials have expired (400 ExpiredToken)"),
    "changed": (Fault(412, "PreconditionFailed"), "changed while it was being read"),
    "throttled": (Fault(503, "SlowDown"), "throttling requests (503 SlowDown)"),
    "cut": (Fault(0), "it cut the connection"),
}


@pytest.mark.parametrize("name", MIDWAY)
def test_a_copy_that_fails_in_the_middle_leaves_nothing(
    store: FaultyStore, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fault, message = MIDWAY[name]
    # The first two requests for content are those for the metadata.
    store.fault_for = lambda operation, key, n_before: (
        fault if operation == "get" and n_before >= 2 else None
    )
    assert main(["convert", f"s3://runs/{MODEL}", str(tmp_path / "out"), "--to", "dcp"]) == 6
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", [Fault(500, "InternalError"), Fault(503, "SlowDown"), Fault(0)])
def test_a_failure_that_passes_is_not_seen(
    store: FaultyStore, golden: Path, tmp_path: Path, fault: Fault
) -> None:
    store.fault_for = lambda operation, key, n_before: fault if n_before < 2 else None
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
    with faulty_store(golden, monkeypatch, certificate=certificate) as store:
        assert main(["inspect", f"s3://runs/{MODEL}"]) == 6
    assert "its certificate is not trusted" in capsys.readouterr().err
    assert store.asked == []


def test_missing_credentials_are_named(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    # The metadata service of a machine without roles: the server, which has no such object.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{store.port}")
    assert main(["inspect", f"s3://runs/{MODEL}"]) == 6
    assert "no credentials found" in capsys.readouterr().err


def test_a_metadata_service_that_does_not_answer_is_not_waited_for(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    assert f"write --storage-option endpoint=https://{value}" in capsys.readouterr().err


def test_an_endpoint_in_the_environment_that_is_no_url_is_named(
    monkeypatch: pytest.MonkeyPatch, store: FaultyStore, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"127.0.0.1:{store.port}")
    assert main(["inspect", "s3://runs/a"]) == 6
    assert "the endpoint is not a URL" in capsys.readouterr().err


def self_signed(path: Path) -> Path:
    """Write a certificate of 127.0.0.1 that signs itself, and its key, to a file."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    path.write_bytes(
        key.private_bytes(
            pem, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
        + certificate.public_bytes(pem)
    )
    return path
