"""Zips that torch did not write: how much of them is inflated to check their sums."""

from __future__ import annotations

import io
import zipfile

import pytest

from core.files.store import MemoryStore
from core.formats.torch import other_pickles
from core.formats.torch.other_pickles import damaged_member


def damaged_zip(first: bytes) -> bytes:
    """A zip whose second member, stored as it is, differs from its CRC-32."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("first.npy", first, zipfile.ZIP_DEFLATED)
        archive.writestr("second.npy", b"true bytes", zipfile.ZIP_STORED)
    return stream.getvalue().replace(b"true bytes", b"Xrue bytes")


def damage(data: bytes) -> str | None:
    return damaged_member(MemoryStore({"a.npz": data}), "a.npz", len(data))


@pytest.fixture(autouse=True)
def _few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 GiB, as 64 KiB."""
    monkeypatch.setattr(other_pickles, "_MAX_CHECKED_BYTES", 1 << 16)


def test_every_member_of_a_large_zip_is_checked() -> None:
    plain = bytes(number * number * 251 >> 7 & 255 for number in range(1 << 18))
    assert damage(damaged_zip(plain)) == "second.npy: Bad CRC-32 for file 'second.npy'"


def test_a_small_zip_is_inflated_up_to_the_limit_whatever_its_ratio() -> None:
    assert damage(damaged_zip(bytes(1 << 15))) == "second.npy: Bad CRC-32 for file 'second.npy'"


def test_what_comes_after_a_bomb_is_not_checked() -> None:
    bomb = damaged_zip(bytes(1 << 22))
    assert len(bomb) * 100 < 1 << 22
    assert damage(bomb) is None
