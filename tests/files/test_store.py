"""core.files.store: names from untrusted files, damaged and hostile directories."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from core.errors import (
    MissingShardError,
    SourceChangedError,
    StorageError,
    TruncatedError,
    UnsafeError,
)
from core.files.store import MAX_OPEN_FILES, LocalStore, MemoryStore, check_name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc/passwd",
        "..",
        "a/../b",
        "../a",
        "a//b",
        "./a",
        "a/.",
        "a\0b",
        "a\\b",
        "a/",
        None,
        7,
        b"a",
    ],
)
def test_names_that_lead_elsewhere_are_refused(name: object) -> None:
    with pytest.raises(UnsafeError, match="not a path inside"):
        check_name(name)


@pytest.mark.parametrize(
    "name", ["a", "a/b.pt", "...", ".metadata", "mp_rank_00/model_optim_rng.pt", "décor"]
)
def test_plain_names_pass(name: str) -> None:
    assert check_name(name) == name


def test_reading_past_the_end_names_the_file_and_the_range(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    store = LocalStore(tmp_path)
    assert store.read("a", 2, 3) == b"234"
    with pytest.raises(TruncatedError) as caught:
        store.read("a", 8, 4)
    assert caught.value.file == "a"
    assert caught.value.span == (8, 12)
    assert caught.value.exit_code == 3


def test_a_missing_file_is_a_missing_shard(tmp_path: Path) -> None:
    with pytest.raises(MissingShardError, match="does not exist"):
        LocalStore(tmp_path).read("absent", 0, 1)


def test_a_link_that_leads_to_itself_is_to_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(StorageError, match="symbolic links") as refusal:
        LocalStore(tmp_path).read("loop", 0, 1)
    assert "replace the symbolic link" in str(refusal.value.hint)


def test_fifos_and_directories_are_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    store = LocalStore(tmp_path)
    for name in ("pipe", "folder"):
        with pytest.raises((UnsafeError, StorageError)):
            store.read(name, 0, 1)


def test_symbolic_links_to_files_are_followed(tmp_path: Path) -> None:
    outside = tmp_path / "blobs"
    outside.mkdir()
    (outside / "x").write_bytes(b"data")
    inside = tmp_path / "snapshot"
    inside.mkdir()
    (inside / "model.bin").symlink_to(outside / "x")
    store = LocalStore(inside)
    assert store.files() == ["model.bin"]
    assert store.read("model.bin", 0, 4) == b"data"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "secret").chmod(0)
    with pytest.raises(StorageError, match="permission denied"):
        LocalStore(tmp_path).read("secret", 0, 1)


def test_a_source_that_changes_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    store = LocalStore(tmp_path)
    store.read("a", 0, 3)
    store.verify_unchanged()
    (tmp_path / "a").write_bytes(b"newer")
    with pytest.raises(SourceChangedError, match="changed"):
        store.verify_unchanged()


def test_more_files_than_descriptors_can_be_read(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    names = [f"f{number}" for number in range(MAX_OPEN_FILES + 20)]
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    for _ in range(2):
        for name in names:
            assert store.read(name, 0, len(name)) == name.encode()
    store.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_store_that_nobody_closed_leaves_no_file_open(tmp_path: Path) -> None:
    def open_files() -> list[str]:
        links = (Path("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd"))
        targets = [os.readlink(link) for link in links if link.is_symlink()]
        return [target for target in targets if target.startswith(str(tmp_path))]

    (tmp_path / "a").write_bytes(b"data")
    store = LocalStore(tmp_path)
    store.read("a", 0, 4)
    assert len(open_files()) == 1
    del store
    assert open_files() == []


def test_listing_an_absent_folder_is_empty(tmp_path: Path) -> None:
    assert LocalStore(tmp_path / "none").files() == []
    assert LocalStore(tmp_path).folders("none") == []


def test_memory_store_behaves_like_a_directory() -> None:
    store = MemoryStore({"a": b"12", "d/b": b"3"})
    assert store.files() == ["a"]
    assert store.folders() == ["d"]
    assert store.files("d") == ["b"]
    store.create("c", 4)
    store.write("c", 1, b"xy")
    assert store.read("c", 0, 4) == b"\0xy\0"
    with pytest.raises(TruncatedError):
        store.read("a", 1, 2)
