"""Measurements read and write little, at places of the files, and leave nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from core.errors import StorageError
from core.files.store import LocalStore
from core.verbs.forecast.disk_rates import SAMPLE_BYTES, measure_reading, measure_writing


class CountingStore(LocalStore):
    """Counts the bytes that are read of every file."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.counts: dict[str, int] = {}

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        super().read_into(name, offset, buffer)
        self.counts[name] = self.counts.get(name, 0) + len(buffer)


@pytest.mark.parametrize("n_bytes", [1, 1000, 30 << 20, 1 << 40])
def test_no_more_is_read_than_the_sample(n_bytes: int, tmp_path: Path) -> None:
    sizes = {"a": 40 << 20, "b": 60 << 20, "c": 3, "empty": 0}
    for name, size in sizes.items():
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, size)
    store = CountingStore(tmp_path)
    assert measure_reading(store, sizes, n_bytes=n_bytes, threads=2) is not None
    assert 0 < sum(store.counts.values()) <= min(n_bytes + 8, SAMPLE_BYTES)


def test_a_rate_is_measured_although_the_time_is_over_before_a_thread_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a busy machine, where a rate of 0 was divided by."""
    monkeypatch.setattr("core.verbs.forecast.disk_rates.SAMPLE_SECONDS", -1.0)
    (tmp_path / "a").write_bytes(bytes(100))
    rate = measure_reading(LocalStore(tmp_path), {"a": 100}, n_bytes=100, threads=2)
    assert rate is not None
    assert rate.bytes_per_second > 0


def test_nothing_to_read_gives_no_rate(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    store = LocalStore(tmp_path)
    assert measure_reading(store, {"empty": 0}, n_bytes=5, threads=2) is None
    assert measure_reading(store, {"empty": 0}, n_bytes=0, threads=2) is None


@pytest.mark.parametrize("n_bytes", [0, 1, 5000, 1 << 40])
@pytest.mark.parametrize("syncs", [True, False])
def test_writing_leaves_nothing(n_bytes: int, syncs: bool, tmp_path: Path) -> None:
    rate = measure_writing(tmp_path, n_bytes=n_bytes, syncs=syncs)
    assert rate.bytes_per_second > 0 and rate.seconds_per_file > 0
    assert os.listdir(tmp_path) == []


def test_a_file_is_no_folder_to_write_into(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="not a directory"):
        measure_writing(tmp_path / "file", n_bytes=1, syncs=False)
