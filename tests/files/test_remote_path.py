"""A URL is a path that never touches the local file system."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from core.errors import UsageError
from core.files.remote_path import RemotePath, location_of


@pytest.mark.parametrize("text", ["s3://bucket/a/b", "gs://b/x", "az://c/x", "https://host/x"])
def test_urls_are_remote_also_after_pathlib_has_seen_them(text: str) -> None:
    for path in (location_of(text), location_of(Path(text))):
        assert isinstance(path, RemotePath)
        assert str(path) == text


@pytest.mark.parametrize("text", ["a/b", "/a/b", "./s3:/x", "C:/x", "s3", "hdfs://x/y", ""])
def test_other_paths_are_local(text: str) -> None:
    assert type(location_of(text)) is type(Path(text))


@pytest.mark.parametrize("text", ["s3://bucket/../x", "gs://b/a/..", "az://c/a\nb", "s3://b/\x01"])
def test_names_that_no_store_takes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a valid object name"):
        location_of(text)


def test_a_file_url_is_a_local_path() -> None:
    assert location_of("file:///data/a%20b") == Path("/data/a b")
    assert location_of("file://localhost/data/x") == Path("/data/x")


def test_its_parts() -> None:
    path = location_of("s3://bucket/runs/llama/iter_0000010")
    assert isinstance(path, RemotePath)
    assert (path.scheme, path.bucket, path.key) == ("s3", "bucket", "runs/llama/iter_0000010")
    assert path.name == "iter_0000010"
    assert str(path.parent) == "s3://bucket/runs/llama"
    assert str(path / "mp_rank_00" / "x.pt") == f"{path}/mp_rank_00/x.pt"
    assert location_of("s3://bucket").parent == location_of("s3://bucket/x").parent
    assert path.resolve() == path.absolute() == path
    assert pickle.loads(pickle.dumps(path)) == path


def test_nothing_of_a_remote_path_is_local() -> None:
    path = location_of("s3://bucket/x")
    for operation in (os.stat, os.listdir, open, Path.read_bytes, Path.mkdir):
        with pytest.raises(UsageError, match="is a URL"):
            operation(path)  # type: ignore[operator]
