"""Manifests state what was written."""

from __future__ import annotations

import json
import zlib

import pytest

from core.arrays.checksum import digest_of
from core.engine.catalog.file_image import FileImage, literal_file
from core.engine.copy.options import CopyOptions
from core.engine.copy.run import execute
from core.engine.plan.plan import make_plan
from core.errors import CorruptError, MissingShardError, UnsupportedError
from core.files.store import MemoryStore
from core.publish.manifest.of_copy import MANIFEST, finish_files, read_manifest, write_manifest
from tests.support.boxes import Model, pieces, written

SHAPE = (12, 8)


def make_store(
    *, crc: bool = True, digest: bool = True, extra: list[FileImage] | None = None
) -> MemoryStore:
    """A stage with a manifest."""
    model = Model({"w": SHAPE}, {"w": pieces("w", SHAPE, 1, 4)})
    source = model.source()
    target, images = Model({"w": SHAPE}, {"w": pieces("w", SHAPE, 0, 3)}).target()
    images = [
        FileImage(
            i.path,
            i.size,
            i.arrays,
            lambda crc_of, i=i: [(1, b"%4x" % (crc_of(i.arrays[0].array.name) >> 16))],
        )
        for i in images
    ] + (extra or [])
    plan = make_plan(source, target, images)
    stage = MemoryStore()
    result = execute(plan, model.store, stage, CopyOptions(crc=crc, digest=digest))
    files = finish_files(plan, result, stage, crc=crc)
    write_manifest(stage, MANIFEST, plan, result, files, tool="ckpt-toolkit 0", crc=crc)
    for name, array in written(stage, images).items():
        assert result.digest_of(name) == (digest_of(array.tobytes()).hex() if digest else None)
    return stage


def test_a_manifest_states_sizes_crcs_and_digests_of_files_and_arrays() -> None:
    stage = make_store(
        extra=[literal_file("index.json", b"{}", is_metadata=True), FileImage("empty", 0)]
    )
    manifest = read_manifest(stage)
    assert manifest.tool == "ckpt-toolkit 0"
    assert [file.path for file in manifest.files] == ["out0", "out1", "index.json", "empty"]
    for file in manifest.files:
        content = bytes(stage.contents[file.path])
        assert (file.n_bytes, file.crc) == (len(content), zlib.crc32(content))
    assert [array.name for array in manifest.arrays] == ["w/0/0", "w/0/1", "w/0/2"]
    for array in manifest.arrays:
        content = stage.read(array.file, array.offset, 4 * 8 * 4)
        assert (array.key, array.dtype, array.shape) == ("w", "int32", (4, 8))
        assert (array.crc, array.digest) == (zlib.crc32(content), digest_of(content).hex())


def test_manifests_of_equal_work_are_byte_identical() -> None:
    assert make_store().contents == make_store().contents


def test_what_is_switched_off_is_null() -> None:
    manifest = read_manifest(make_store(crc=False, digest=False))
    assert manifest.digest is None
    assert {(array.crc, array.digest) for array in manifest.arrays} == {(None, None)}
    assert {file.crc for file in manifest.files} == {None}


def test_metadata_files_are_written_last() -> None:
    order: list[str] = []
    images = [
        FileImage(
            "meta", 1, (), lambda crc_of: order.append("meta") or [(0, b"m")], is_metadata=True
        ),  # type: ignore[func-returns-value]
        FileImage("data", 1, (), lambda crc_of: order.append("data") or [(0, b"d")]),  # type: ignore[func-returns-value]
    ]
    make_store(extra=images)
    assert order == ["data", "meta"]


@pytest.mark.parametrize("literal", [(8, b"x"), (-1, b"x"), (9_999, b"x")])
def test_literals_on_arrays_or_outside_the_file_are_refused(literal: tuple[int, bytes]) -> None:
    model = Model({"w": SHAPE}, {"w": pieces("w", SHAPE, 1, 1)})
    source = model.source()
    target, images = model.target()
    images = [FileImage(i.path, i.size, i.arrays, lambda crc_of: [literal]) for i in images]
    plan = make_plan(source, target, images)
    stage = MemoryStore()
    result = execute(plan, model.store, stage)
    with pytest.raises(CorruptError, match="overlap other bytes or extend past"):
        finish_files(plan, result, stage)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"schema": "x"}', '{"schema": "ckpt-manifest", "version": 1}', "[" * 100_000],
)
def test_what_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(CorruptError, match="not a ckpt manifest"):
        read_manifest(MemoryStore({MANIFEST: text.encode()}))


def test_newer_and_missing_manifests_are_told_apart() -> None:
    newer = json.dumps({"schema": "ckpt-manifest", "version": 3})
    with pytest.raises(UnsupportedError, match="reads only versions up to"):
        read_manifest(MemoryStore({MANIFEST: newer.encode()}))
    with pytest.raises(MissingShardError):
        read_manifest(MemoryStore())
