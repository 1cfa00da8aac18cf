"""Damage to the metadata of real checkpoints: every tensor that is concerned is named, not only the
first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from core.verbs.checks.check import Level
from tests.support.edited import Rows, chunks_of, copied, counted, edit_pickle, edit_rows, found_in

DIST = "mcore_torch_dist/dense_gqa/tp2_pp2_optim"
DCP = "torch_dcp/fsdp2_dp2"
FC1 = "decoder.layers.mlp.linear_fc1.weight"
FC2 = "decoder.layers.mlp.linear_fc2.weight"
PROJ = "decoder.layers.self_attention.linear_proj.weight"
QKV = "decoder.layers.self_attention.linear_qkv.weight"


def test_rewriting_the_metadata_alone_is_no_damage(golden: Path, tmp_path: Path) -> None:
    folder = copied(golden, DIST, tmp_path)
    edit_rows(folder, lambda rows: None)
    assert found_in(folder, Level.HEADERS) == []


def test_several_kinds_of_damage_are_found_in_one_run(golden: Path, tmp_path: Path) -> None:
    folder = copied(golden, DIST, tmp_path)

    def damage(rows: Rows) -> None:
        chunks_of(rows, FC1).pop(0)
        first = chunks_of(rows, FC2)[0]
        chunks_of(rows, FC2)[1] = chunks_of(rows, FC2)[1]._replace(
            offset=first.offset, shape=first.shape
        )
        chunks_of(rows, PROJ).append(chunks_of(rows, PROJ)[0])
        last = chunks_of(rows, QKV)[-1]
        chunks_of(rows, QKV)[-1] = last._replace(offset=tuple(i + 1 for i in last.offset))

    edit_rows(folder, damage)
    findings = found_in(folder)
    by_code = {(finding.code, finding.key) for finding in findings}
    assert ("CK201", FC1) in by_code
    assert {code for code, key in by_code if key == FC2} >= {"CK201"}
    assert ("CK204", PROJ) in by_code
    assert ("CK203", QKV) in by_code
    gap = next(finding for finding in findings if (finding.code, finding.key) == ("CK201", FC1))
    assert gap.expected is not None and "elements" in gap.expected


def test_overlapping_chunks_are_told_from_gaps(golden: Path, tmp_path: Path) -> None:
    folder = copied(golden, DCP, tmp_path)
    key = "app.model.lm_head.weight"

    def damage(rows: Rows) -> None:
        _, second = chunks_of(rows, key)
        chunks_of(rows, key)[1] = second._replace(offset=(second.offset[0] - 1, 0))

    edit_rows(folder, damage)
    assert {(finding.code, finding.key) for finding in found_in(folder)} == {
        ("CK202", key),
        ("CK201", key),
    }


@pytest.mark.parametrize("n_lost", [1, 3])
def test_every_chunk_without_an_item_is_named(golden: Path, tmp_path: Path, n_lost: int) -> None:
    folder = copied(golden, DCP, tmp_path)
    lost: list[Any] = []

    def damage(metadata: Any) -> None:
        indexes = [
            index
            for index in metadata.storage_data
            if index.offset is not None and "lm_head" in index.fqn
        ]
        lost.extend(indexes[:n_lost])
        for index in lost:
            del metadata.storage_data[index]

    edit_pickle(folder, damage)
    findings = found_in(folder)
    assert counted(findings) == {"CK205": len(lost)}
    assert {finding.key for finding in findings} == {index.fqn for index in lost}


def test_an_object_without_an_item_and_a_shape_that_is_none_are_named(
    golden: Path, tmp_path: Path
) -> None:
    import torch

    folder = copied(golden, DCP, tmp_path)
    names: list[str] = []

    def damage(metadata: Any) -> None:
        entries = metadata.state_dict_metadata
        names.append(next(key for key, entry in entries.items() if not hasattr(entry, "size")))
        for index in [index for index in metadata.storage_data if index.fqn == names[0]]:
            del metadata.storage_data[index]
        names.append("app.model.lm_head.weight")
        object.__setattr__(entries[names[1]], "size", torch.Size([130]))

    edit_pickle(folder, damage)
    findings = {(finding.code, finding.key) for finding in found_in(folder)}
    assert ("CK205", names[0]) in findings
    assert ("CK203", names[1]) in findings


@pytest.mark.parametrize("change", ["dtype", "shape"])
def test_items_of_another_dtype_or_shape_are_found_when_they_are_opened(
    golden: Path, tmp_path: Path, change: str
) -> None:
    folder = copied(golden, DCP, tmp_path)
    keys = ["app.model.lm_head.weight", "app.model.model.norm.weight"]

    def damage(rows: Rows) -> None:
        for key in keys:
            row = rows[key]
            assert not isinstance(row, type(None))
            if change == "dtype":
                rows[key] = row._replace(dtype="float16")  # type: ignore[call-arg]
                continue
            chunks = [
                chunk._replace(
                    offset=(2 * chunk.offset[0], *chunk.offset[1:]),
                    shape=(2 * chunk.shape[0], *chunk.shape[1:]),
                )
                for chunk in chunks_of(rows, key)
            ]
            shape = row.shape  # type: ignore[union-attr]
            rows[key] = row._replace(shape=(2 * shape[0], *shape[1:]), chunks=chunks)  # type: ignore[call-arg]

    edit_rows(folder, damage)
    assert {finding.code for finding in found_in(folder)} <= {
        "CK403"
    }  # states have not that shape, either
    findings = {
        (finding.code, finding.key)
        for finding in found_in(folder, Level.HEADERS)
        if finding.code == "CK207"
    }
    assert findings == {("CK207", key) for key in keys}
