"""Storage options reach the part of the client that knows them, or are refused by name."""

from __future__ import annotations

import pytest

from ckpt_cli.app import main
from core.errors import UsageError
from core.files.object_listing import forget_listings
from core.files.requests.client_settings import boto3_settings, sort_options


def test_options_of_the_http_client_are_told_from_those_of_the_store() -> None:
    settings = sort_options({"region": "a", "timeout": "30s", "AWS_ALLOW_HTTP": "true"})
    assert settings.config == {"region": "a"}
    assert settings.client == {"timeout": "30s", "allow_http": "true"}


UNUSABLE = {
    "timeout=ten": "'ten' is not a valid duration",
    "timeout=3": "as in 30s or 2m",
    "allow_http=maybe": "'maybe' is neither true nor false",
    "skip_signature=perhaps": "'perhaps' is neither true nor false",
    "proxy_url=::::": "--storage-option proxy_url: the value is not valid",
    "conditional_put=odd": "the value 'odd' is not valid",
    "default_headers=a": "ckpt does not accept this obstore option",
    "root_certificate=a": "SSL_CERT_FILE",
    "endpoint=http://": "not a valid endpoint URL",
    "endpoint=ftp://host": "not a valid endpoint URL",
}


@pytest.mark.parametrize(
    ("url", "option"),
    [
        *(("s3://runs/a", option) for option in UNUSABLE),
        ("gs://runs/a", "timeout=ten"),
        ("az://runs/a", "allow_http=maybe"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(
    url: str, option: str, capfd: pytest.CaptureFixture[str]
) -> None:
    forget_listings()
    words = ["--storage-option", option]
    if url.startswith("az"):
        words += ["--storage-option", "account_name=a"]
    assert main(["inspect", url, *words]) == 2
    err = capfd.readouterr().err
    assert UNUSABLE[option] in err
    assert "panicked" not in err


def test_a_setting_of_the_environment_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "hidden")
    assert main(["inspect", "s3://runs/a", "--storage-option", "region=b"]) == 2
    err = capfd.readouterr().err
    assert "an environment variable: the value is neither true nor false" in err
    assert "hidden" not in err


def test_boto3_gets_the_same_options() -> None:
    client = {
        "timeout": "1m 30s",
        "connect_timeout": "500ms",
        "allow_invalid_certificates": "true",
        "proxy_url": "http://proxy",
        "user_agent": "me",
    }
    assert boto3_settings(client, endpoint=None) == {
        "read_timeout": 90.0,
        "connect_timeout": 0.5,
        "verify": False,
        "proxies": {"http": "http://proxy", "https": "http://proxy"},
        "user_agent": "me",
    }
    with pytest.raises(UsageError, match="begins with http:"):
        boto3_settings({"allow_http": "false"}, endpoint="http://host")
    with pytest.raises(UsageError, match="is not a valid duration"):
        boto3_settings({"timeout": "2weeks"}, endpoint=None)
