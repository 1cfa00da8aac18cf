"""Every rule about files, containers, trackers and indexes, shown by a real checkpoint in which one
thing is broken.

What is found is compared with the table in full, so a damage is neither overlooked nor reported
twice under two names.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from core.arrays.box import Box
from core.engine.catalog.facets import DcpFacts
from core.errors import StorageError
from core.files.store import LocalStore
from core.formats.dcp.columns import DcpItem
from core.formats.dcp.metadata_writer import ChunkRow, TensorRow, write_metadata
from core.formats.dcp.reading.stored_metadata import stated_metadata
from core.formats.zarr import format3 as zarr3
from core.opening.locate import locate_checkpoint
from core.verbs.checks import file_codes
from core.verbs.checks.check import Finding, Level, Severity, codes
from core.verbs.checks.containers import dcp_files
from core.verbs.checks.metadata import common_state, copied_files, unsafe
from core.verbs.checks.problems import finding_of
from core.verbs.checks.subject import Subject
from core.verbs.validate.run import validate
from tests.support import broken as b
from tests.support.damages import (
    FIRST,
    ITER,
    RANKS,
    SECOND,
    SHARDS,
    STEP,
    TABLE,
    TORCH,
    ZARR,
    ZARR3,
    ZERO,
    Row,
)
from tests.support.facets import with_facts
from tests.support.zarr_files import source_of, written


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A zarr 3 group with an array of shards of four inner chunks each."""
    catalog, store = source_of(
        {"w": ("float32", (8, 10)), "b": ("float32", (3,))}, chunks={"w": (4, 10)}
    )
    return written(
        catalog, store, zarr3.FORMAT, tmp_path_factory.mktemp("zarr3") / "group", shard_bytes=159
    )


_OF_FILES = [name for name in codes() if "CK100" < name < "CK200"]
_OF_TRACKERS = [name for name in codes() if "CK510" <= name <= "CK516"]
_OF_INDEXES = [name for name in codes() if "CK520" <= name <= "CK529"]


def copied(source: Path, tmp_path: Path) -> Path:
    """A writable copy."""
    if source.is_file():
        return Path(shutil.copyfile(source, tmp_path / source.name))
    return Path(shutil.copytree(source, tmp_path / "checkpoint", copy_function=shutil.copyfile))


def own(findings: tuple[Finding, ...]) -> list[tuple[str, str | None]]:
    """Code and file of what these checks found, and of what no check explained."""
    own_codes = {*_OF_FILES, *_OF_TRACKERS, *_OF_INDEXES, "CK207", "CK208", "CK209"}
    own_codes |= {
        code.code
        for code in (common_state.BACKEND, copied_files.COPIED, unsafe.DANGEROUS, unsafe.UNKNOWN)
    }
    return sorted(
        {
            (f.code, f.file)
            for f in findings
            if f.code in own_codes | {"CK100"} and f.severity > Severity.NOTE
        },
        key=lambda damage: (damage[0], damage[1] or ""),
    )


def row_id(row: Row) -> str:
    """Return the name of a row as part of a test's name."""
    return f"{row.source}-{row.what}".replace(" ", "_").replace("/", "_")


@pytest.mark.parametrize("row", TABLE, ids=row_id)
def test_a_damage_is_found_and_named(
    row: Row, golden: Path, sharded: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = copied(sharded if row.source == ZARR3 else golden / row.source, tmp_path)
    row.breaks(path / row.at if row.at else path)
    levels = (Level.METADATA, Level.HEADERS)
    is_long = request.config.getoption("--long") or row.level not in levels
    for level in levels if is_long else (row.level,):
        findings = validate(path, level=level).findings
        assert own(findings) == (
            sorted(row.found, key=lambda damage: (damage[0], damage[1] or ""))
            if level >= row.level
            else []
        )
        for finding in findings:
            assert finding.hint and finding.message and (finding.file or finding.key), finding


def test_every_code_has_a_broken_file() -> None:
    shown = {code for row in TABLE for code, _ in row.found}
    elsewhere = {"CK105", "CK148", "CK151", "CK153", "CK513", "CK524", "CK527"}
    assert {*_OF_FILES, *_OF_TRACKERS, *_OF_INDEXES} - shown == elsewhere


def test_several_damages_are_found_in_one_run(golden: Path, tmp_path: Path) -> None:
    path = copied(golden / RANKS, tmp_path)
    shutil.rmtree(path / ITER / "mp_rank_00_000")
    (path / ITER / "mp_rank_00_001" / "model_optim_rng.pt").write_bytes(b"")
    b.cut(path / ITER / "mp_rank_01_000" / "model_optim_rng.pt")
    (path / ITER / "mp_rank_00_001" / "x.tmp").write_bytes(b"x")
    assert own(validate(path).findings) == [
        ("CK102", "mp_rank_00_001/model_optim_rng.pt"),
        ("CK103", "mp_rank_01_000/model_optim_rng.pt"),
        ("CK107", "mp_rank_00_001/x.tmp"),
        ("CK160", "mp_rank_00_000"),
    ]


def test_several_damages_of_one_zip_are_found(golden: Path, tmp_path: Path) -> None:
    path = copied(golden / TORCH, tmp_path)
    for change in (
        b.flagged("data/1", flags=1),
        b.renamed_record("data/2", "data/x", both=False),
        b.grown("data/4", 1 << 20),
        b.inside(path, "byteorder", b"little", b"middle"),
    ):
        b.patched(path, change)
    assert [code for code, _ in own(validate(path).findings)] == [
        "CK122",
        "CK123",
        "CK124",
        "CK127",
    ]


def test_several_damages_of_a_dcp_checkpoint_are_found(golden: Path, tmp_path: Path) -> None:
    path = copied(golden / "torch_dcp/fsdp2_dp4", tmp_path)
    for rank in (0, 2):
        (path / f"__{rank}_0.distcp").unlink()
    b.cut(path / "__1_0.distcp")
    shutil.copy(path / "__3_0.distcp", path / "__7_0.distcp")
    assert own(validate(path).findings) == [
        ("CK101", "__0_0.distcp"),
        ("CK101", "__2_0.distcp"),
        ("CK103", "__1_0.distcp"),
        ("CK106", "__7_0.distcp"),
    ]


def test_several_damages_of_zarr_arrays_are_found(golden: Path, tmp_path: Path) -> None:
    path = copied(golden / ZARR, tmp_path) / ITER
    (path / "output_layer.weight" / "0.0").unlink()
    b.cut(path / "embedding.word_embeddings.weight" / "1.0")
    (path / "decoder.final_layernorm.weight" / ".zarray").write_text("{")
    assert own(validate(path).findings) == [
        ("CK140", "decoder.final_layernorm.weight/.zarray"),
        ("CK141", "output_layer.weight/0.0"),
        ("CK142", "embedding.word_embeddings.weight/1.0"),
    ]


def test_a_tensor_in_two_shards_is_found(golden: Path, tmp_path: Path) -> None:
    path = copied(golden / SHARDS, tmp_path)
    shutil.copy(path / FIRST, path / SECOND)
    assert {code for code, _ in own(validate(path).findings)} == {"CK521", "CK522", "CK524"}


def test_a_newer_iteration_is_a_note(golden: Path, tmp_path: Path) -> None:
    path = copied(golden / RANKS, tmp_path)
    (path / "iter_0000020").mkdir()
    findings = validate(path).findings
    assert own(findings) == []
    assert [
        (finding.code, finding.severity) for finding in findings if finding.code == "CK513"
    ] == [("CK513", Severity.NOTE)]


def test_items_that_share_bytes_are_found(golden: Path, tmp_path: Path) -> None:
    path = copied(golden / "torch_dcp/tp2_only", tmp_path)
    stated = stated_metadata(LocalStore(path))
    rows = [
        TensorRow(
            key,
            tensor.dtype,
            tensor.shape,
            [ChunkRow(*box_and_place(*chunk)) for chunk in stated.chunks(key)],
        )
        for key, tensor in stated.tensors.items()
    ]
    first, second = rows[0], rows[1]
    (chunk, *_), (other, *rest) = list(first.chunks), list(second.chunks)
    moved = other._replace(
        file=chunk.file, item_offset=chunk.item_offset + 8, item_bytes=chunk.item_bytes
    )
    (path / ".metadata").write_bytes(
        write_metadata(
            [first, second._replace(chunks=[moved, *rest]), *rows[2:]], planner_data=None
        )
    )
    damages = own(validate(path, level=Level.HEADERS).findings)
    assert {("CK151", chunk.file), ("CK152", chunk.file)} <= set(damages)


def box_and_place(
    box: Box, item: DcpItem
) -> tuple[tuple[int, ...], tuple[int, ...], str, int, int]:
    return box.offset, box.shape, item.file, item.offset, item.n_bytes


def test_items_that_no_entry_refers_to_are_a_note(golden: Path) -> None:
    place = locate_checkpoint(golden / "torch_dcp/tp2_only")
    subject = Subject(
        path=place.path,
        root=place.path,
        store=place.store,
        format=place.format,
        level=Level.METADATA,
    )
    assert subject.catalog is not None
    subject.catalog = with_facts(subject.catalog, DcpFacts, orphans=("gone",))
    assert [(f.code, f.key, f.severity) for f in dcp_files.check_data_files(subject)] == [
        ("CK153", "gone", Severity.NOTE)
    ]


def test_weights_without_a_configuration_are_a_note(golden: Path, tmp_path: Path) -> None:
    path = copied(golden / SHARDS, tmp_path)
    (path / "config.json").unlink()
    findings = validate(path).findings
    assert own(findings) == []
    assert [
        (finding.code, finding.severity) for finding in findings if finding.code == "CK527"
    ] == [("CK527", Severity.NOTE)]


def test_what_the_system_refuses_is_a_finding() -> None:
    finding = finding_of(
        StorageError("cannot read: input/output error", file="a.pt"), default=file_codes.MALFORMED
    )
    assert (finding.code, finding.file) == ("CK105", "a.pt")


def test_links_in_a_circle_end(golden: Path, tmp_path: Path) -> None:
    path = copied(golden / ZERO, tmp_path)
    for name in ("one", "other"):
        os.symlink("..", path / STEP / name)
    assert own(validate(path).findings) == []
