"""core.publish.stage.destination: what a destination says of itself before a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.errors import UsageError
from core.files.remote_path import location_of
from core.publish.stage.destination import choose_destination
from core.publish.stage.protocol import StageRequest


@pytest.mark.parametrize(
    ("location", "needs_links", "message"),
    [
        ("hdfs://host/out", False, "is a URL that ckpt cannot read"),
        ("user@host:/run/out", False, "a path on another host"),
        ("https://host/out", False, "ckpt cannot write to a web server"),
        ("s3://bucket", False, "the destination is an entire bucket"),
        ("s3://bucket/out", True, "makes hard links, which object stores do not support"),
    ],
)
def test_a_place_that_cannot_be_written_to_is_refused(
    location: str, needs_links: bool, message: str
) -> None:
    destination = choose_destination(location_of(location))
    with pytest.raises(UsageError, match=message):
        destination.check_writable(needs_links=needs_links)


@pytest.mark.parametrize(("location", "is_on_disk"), [("out", True), ("s3://bucket/out", False)])
def test_only_a_destination_on_disk_has_space_to_measure(
    location: str, is_on_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    destination = choose_destination(location_of(location))
    destination.check_writable(needs_links=False)
    space = destination.find_space(StageRequest(n_bytes=1 << 60))
    assert destination.is_on_disk == is_on_disk == (space is not None)
    assert space is None or (space.shortage is not None and space.folder.is_dir())
    assert not any(tmp_path.iterdir())
