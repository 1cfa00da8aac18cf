"""Ways to break the files of a real checkpoint, for tests of checks: each is a function of a
path.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core.files.store import LocalStore
from core.formats.torch.zip.container import CENTRAL, LOCAL, Archive, read_archive

Change = Callable[[bytearray], None]


def patched(path: Path, change: Change) -> None:
    """The file with some of its bytes changed."""
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def cut(path: Path, *, n_bytes: int = 100) -> None:
    """The file without its last bytes."""
    path.write_bytes(path.read_bytes()[:-n_bytes])


def lengthened(path: Path, *, n_bytes: int = 8) -> None:
    """The file with zeros behind it."""
    path.write_bytes(path.read_bytes() + bytes(n_bytes))


def zeroed(path: Path) -> None:
    """As many zeros."""
    path.write_bytes(bytes(path.stat().st_size))


def piped(path: Path) -> None:
    """A pipe in place of the file."""
    path.unlink()
    os.mkfifo(path)


def archive_of(path: Path) -> Archive:
    """The directory of an intact torch zip."""
    return read_archive(LocalStore(path.parent), path.name)


def entry_of(data: bytes | bytearray, record: str) -> tuple[int, int]:
    """Where the directory entry and the local header of a record begin."""
    at = data.index(b"PK\x01\x02", 0)
    while data[at : at + 4] == b"PK\x01\x02":
        fields = CENTRAL.unpack_from(data, at)
        name = bytes(data[at + CENTRAL.size : at + CENTRAL.size + fields[10]])
        if name.partition(b"/")[2] == record.encode():
            return at, fields[16]
        at += CENTRAL.size + fields[10] + fields[11] + fields[12]
    raise AssertionError(f"no record {record}")


def renamed_record(record: str, name: str, *, both: bool = True) -> Change:
    """A record gets a name of the same length, in the directory and, with ``both``, in its
    header.
    """
    assert len(record) == len(name)

    def change(data: bytearray) -> None:
        entry, header = entry_of(data, record)
        for start in (entry + CENTRAL.size, header + LOCAL.size)[: 2 if both else 1]:
            at = data.index(record.encode(), start)
            data[at : at + len(name)] = name.encode()

    return change


def flagged(record: str, *, flags: int = 0, method: int | None = None) -> Change:
    """A record gets flags or another method, in the directory and in its header."""

    def change(data: bytearray) -> None:
        entry, header = entry_of(data, record)
        for at in (entry + 8, header + 6):
            data[at] |= flags
            if method is not None:
                data[at + 2] = method

    return change


def grown(record: str, n_bytes: int) -> Change:
    """The directory says that a record is longer."""

    def change(data: bytearray) -> None:
        entry, _ = entry_of(data, record)
        for at in (entry + 20, entry + 24):
            size = int.from_bytes(data[at : at + 4], "little") + n_bytes
            data[at : at + 4] = size.to_bytes(4, "little")

    return change


def behind(path: Path, record: str, *, at: int) -> Change:
    """A byte behind a record's data is flipped."""
    end = archive_of(path).records[record].span[1]

    def change(data: bytearray) -> None:
        data[end + at] ^= 0xFF

    return change


def inside(path: Path, record: str, old: bytes, new: bytes) -> Change:
    """Bytes of a record are replaced where they are, and no CRC is corrected."""
    start, stop = archive_of(path).records[record].span

    def change(data: bytearray) -> None:
        at = data.index(old, start, stop)
        data[at : at + len(old)] = new

    return change


def repacked(path: Path, record: str, change: Callable[[bytes], bytes]) -> None:
    """A zip in which a record was changed and everything else, CRCs too, is right."""
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    (name,) = [name for name in entries if name.partition("/")[2] == record]
    entries[name] = change(entries[name])
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)


def reheaded(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A safetensors file with another header, and its data as they were."""
    data = path.read_bytes()
    n = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + n])
    change(header)
    with_text(path, json.dumps(header))


def with_text(path: Path, text: str) -> None:
    """A safetensors file whose header is this text."""
    data = path.read_bytes()
    n = int.from_bytes(data[:8], "little")
    path.write_bytes(len(text.encode()).to_bytes(8, "little") + text.encode() + data[8 + n :])


def json_changed(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A JSON file with another content."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def circular(path: Path) -> None:
    """The state dict of a torch file with an entry that is the state dict."""
    import torch

    is_zip = path.read_bytes().startswith(b"PK")
    state = torch.load(path)
    state["self"] = state
    torch.save(state, path, _use_new_zipfile_serialization=is_zip)


def calling(path: Path, *, module: str = "torch.utils.collect_env", name: str = "run") -> None:
    """The file with a call in its first pickle whose result is dropped: a zip, a stream of torch,
    or a pickle.
    """
    call = f"c{module}\n{name}\n".encode() + b"X\x02\0\0\0id\x85R0"
    data = path.read_bytes()
    if not data.startswith(b"PK"):
        path.write_bytes(data[:2] + call + data[2:])
        return
    with zipfile.ZipFile(path) as archive:
        records = {item.filename: archive.read(item) for item in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for record, content in records.items():
            is_pickle = record.endswith("/data.pkl")
            archive.writestr(record, content[:2] + call + content[2:] if is_pickle else content)


def tarred(path: Path, *names: str) -> None:
    """A tar file of empty pickles in place of the file."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 4
            archive.addfile(member, io.BytesIO(b"\x80\x02N."))
