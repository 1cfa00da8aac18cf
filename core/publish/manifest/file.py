"""Write and read manifests: sizes, CRC-32s, content digests and fingerprints of a checkpoint.

A manifest is ``ckpt-manifest.json`` in the checkpoint's directory, or ``FILE.ckpt-manifest.json``
next to a single file::

    {"schema": "ckpt-manifest", "version": 2, "tool": "ckpt-toolkit 0.1.0",
     "digest": "xxh3-128/1MiB",
     "files": [
      {"path": "model.pt", "size": 1234, "crc32": "89abcdef", "digest": "…"},
      …],
     "arrays": [
      {"key": "w", "name": "w", "file": "model.pt", "offset": 64, "dtype": "float32",
       "shape": [2, 3],
       "crc32": "…", "digest": "…"},
      …],
     "fingerprint": "fp1",
     "fingerprints": [
      {"key": "w", "dtype": "float32", "shape": [2, 3], "sum": "…"},
      …]}

There is one entry per line, in the order of the plan or of the checkpoint. Time stamps and absolute
paths are omitted, so equal work gives equal manifests.

``arrays`` lists the stored arrays whose bytes are dense in a file. ``name`` is the name of the
array, ``key`` the first tensor that it contains (a part of). Sums that were switched off are null.
The files of a copy have no digest, but their arrays have.

``fingerprints`` lists the canonical tensors (``core.opening.canonical``), whose keys are the same
in every format and layout; ``fingerprint`` names the definition of the sums
(``core.engine.fingerprint.definition``). Version 1 has neither of the two; a manifest without
fingerprints is written as version 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from core.errors import CorruptError, UnsupportedError
from core.files.json_object import parse_json_object, read_small_file
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.fingerprint.definition import Fingerprint
    from core.files.store import ReadStore, WriteStore

MANIFEST = "ckpt-manifest.json"
SCHEMA = "ckpt-manifest"
VERSION = 2
MAX_BYTES = 512 << 20
"""Maximum size of a manifest that is read."""
MAX_VALUES = 12_000_000
"""Maximum number of JSON values in a manifest; 10⁵ arrays have 2 · 10⁶."""


def manifest_name(file: str | None = None) -> str:
    """Return the file name of the manifest of a directory, or of a single file."""
    return MANIFEST if file is None else f"{file}.{MANIFEST}"


@dataclass(frozen=True, slots=True)
class FileSum:
    """The entry of a file in a manifest.

    Args:
        path: relative to the checkpoint.
        n_bytes: size of the file.
        crc: CRC-32 of the entire file; None if checksums are switched off.
        digest: digest of the entire file, hexadecimal; None if it was not computed.
    """

    path: str
    n_bytes: int
    crc: int | None
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class ManifestArray:
    """The entry of a stored array in a manifest.

    Args:
        key: key of the first tensor that the array contains.
        name: name of the array.
        file: path of its file, relative to the checkpoint.
        offset: position of its first byte in the file.
        dtype, shape: form of the array; the shape is in elements.
        crc: CRC-32 of its bytes; None if checksums are switched off.
        digest: digest of its bytes, hexadecimal; None if digests are switched off.
    """

    key: str
    name: str
    file: str
    offset: int
    dtype: str
    shape: tuple[int, ...]
    crc: int | None
    digest: str | None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a manifest.

    Args:
        tool: name and version of the software that wrote the manifest.
        digest: name of the digest; None if there are no digests.
        files: the files.
        arrays: the arrays.
        scheme: name of the fingerprints' definition; None if there are no fingerprints.
        fingerprints: key of the canonical tensor → fingerprint.
    """

    tool: str
    digest: str | None
    files: tuple[FileSum, ...]
    arrays: tuple[ManifestArray, ...]
    scheme: str | None = None
    fingerprints: Mapping[str, Fingerprint] = field(default_factory=dict)


def manifest_lines(
    tool: str,
    digest: str | None,
    files: Iterable[FileSum],
    arrays: Iterable[ManifestArray],
    fingerprints: Mapping[str, Fingerprint] | None = None,
) -> Iterator[str]:
    """Yield the text of a manifest, a few lines at a time.

    Args:
        tool: name and version of the writing software.
        digest: name of the digest; None if there are no digests.
        files, arrays: the entries.
        fingerprints: key of the canonical tensor → fingerprint; None for a manifest without
            fingerprints.
    """
    from core.engine.fingerprint.definition import SCHEME

    # The version is the lowest that can hold the content, so that older programs can read it.
    version = 1 if fingerprints is None else VERSION
    # The JSON is assembled by hand, so that the text of 10⁵ entries is never in memory at once.
    head = {"schema": SCHEMA, "version": version, "tool": tool, "digest": digest}
    yield json.dumps(head, ensure_ascii=False)[:-1] + ',\n"files": [\n'
    yield from _entry_lines(
        {
            "path": file.path,
            "size": file.n_bytes,
            "crc32": _hex(file.crc),
            **({} if file.digest is None else {"digest": file.digest}),
        }
        for file in files
    )
    yield '],\n"arrays": [\n'
    yield from _entry_lines(
        {
            "key": array.key,
            "name": array.name,
            "file": array.file,
            "offset": array.offset,
            "dtype": array.dtype,
            "shape": list(array.shape),
            "crc32": _hex(array.crc),
            "digest": array.digest,
        }
        for array in arrays
    )
    if fingerprints is not None:
        yield f'],\n"fingerprint": "{SCHEME}",\n"fingerprints": [\n'
        yield from _entry_lines(
            {
                "key": key,
                "dtype": fingerprint.dtype,
                "shape": list(fingerprint.shape),
                "sum": fingerprint.text,
            }
            for key, fingerprint in fingerprints.items()
        )
    yield "]}\n"


def _entry_lines(entries: Iterable[dict[str, object]]) -> Iterator[str]:
    """Yield the entries of a list as JSON, one per line."""
    separator = ""
    for entry in entries:
        text = json.dumps(entry, ensure_ascii=False)
        try:
            text.encode()
        except UnicodeEncodeError:  # a file name that is not UTF-8, or a lone surrogate in a key
            text = json.dumps(entry)
        yield separator + text
        separator = ",\n"


def _hex(crc: int | None) -> str | None:
    return None if crc is None else f"{crc:08x}"


def write_lines(store: WriteStore, name: str, lines: Iterable[str]) -> None:
    """Write a text file, a thousand lines at a time.

    Raises:
        CapacityError, StorageError: the system cannot write.
    """
    store.create(name, 0)
    offset = 0
    pending: list[str] = []
    for line in lines:
        pending.append(line)
        if len(pending) == 1000:
            offset += _put(store, name, offset, pending)
            pending = []
    _put(store, name, offset, pending)


def _put(store: WriteStore, name: str, offset: int, lines: list[str]) -> int:
    """Write lines at an offset, and return their number of bytes."""
    data = "".join(lines).encode()
    store.write(name, offset, data)
    return len(data)


def read_manifest(store: ReadStore, name: str = MANIFEST) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        MissingShardError: the file does not exist.
        CorruptError: the file is not a manifest, or damaged.
        UnsupportedError: the manifest has a newer version.
        StorageError: the file cannot be read.
    """
    data = read_small_file(store, name, max_bytes=MAX_BYTES)
    try:
        content: Any = parse_json_object(data, file=name, max_values=MAX_VALUES)
        # A file of another program fails here; an entry of the wrong type, while it is parsed.
        if content["schema"] != SCHEMA:
            raise ValueError(content["schema"])
        if content["version"] > VERSION:
            raise UnsupportedError(
                f"the manifest has version {content['version']}, but this version of ckpt reads "
                f"only versions up to {VERSION}",
                file=name,
                hint="upgrade ckpt, or create a new manifest with ckpt manifest",
            )
        digest, scheme = content["digest"], content.get("fingerprint")
        return Manifest(
            tool=str(content["tool"]),
            digest=None if digest is None else str(digest),
            files=tuple(_parse_file(entry) for entry in content["files"]),
            arrays=tuple(_parse_array(entry) for entry in content["arrays"]),
            scheme=None if scheme is None else str(scheme),
            fingerprints={
                str(entry["key"]): _parse_fingerprint(entry, scheme)
                for entry in content.get("fingerprints", ())
            },
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, CorruptError) as err:
        # CorruptError is the JSON parser's, and has a reason; the others do not mean much to users.
        reason = "an entry is missing or has the wrong type"
        if isinstance(err, CorruptError):
            reason = err.message
        raise CorruptError(
            f"not a ckpt manifest: {reason}",
            file=name,
            hint="delete the file, and create a new manifest with ckpt manifest",
        ) from err


def _parse_file(entry: Any) -> FileSum:
    return FileSum(
        str(entry["path"]),
        int(entry["size"]),
        _crc(entry["crc32"]),
        _optional_text(entry.get("digest")),
    )


def _parse_fingerprint(entry: Any, scheme: object) -> Fingerprint:
    from core.engine.fingerprint.definition import SCHEME, Fingerprint, parse_lanes

    text = str(entry["sum"])
    # Sums of a later scheme may have another form; they are compared as texts, if at all.
    if scheme == SCHEME:
        parse_lanes(text)
    return Fingerprint(str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), text)


def _optional_text(value: Any) -> str | None:
    return None if value is None else str(value)


def _crc(text: Any) -> int | None:
    return None if text is None else int(text, 16)


def _parse_array(entry: Any) -> ManifestArray:
    return ManifestArray(
        str(entry["key"]),
        str(entry["name"]),
        str(entry["file"]),
        int(entry["offset"]),
        str(entry["dtype"]),
        tuple(int(n) for n in entry["shape"]),
        _crc(entry["crc32"]),
        _optional_text(entry["digest"]),
    )
