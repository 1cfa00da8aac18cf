"""Rank files and global tensors that do not make the model of their arguments: every contradiction
is named.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from core.errors import UnsupportedError
from core.verbs.checks.finding import Level, Severity
from core.verbs.convert.run import Job, run
from core.verbs.validate.run import validate
from tests.support.edited import (
    Rows,
    chunks_of,
    copied,
    counted,
    edit_rank,
    edit_rows,
    found_in,
    nothing,
)
from tests.support.rank_files import MODEL_FILE

RANKS = "mcore_legacy/dense_gqa/tp2_pp2"
TIED = "mcore_legacy/dense_gelu/tp2_pp2"
EXPERTS = "mcore_legacy/moe_seq/tp2_pp1_ep2"
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"
FC2 = "decoder.layers.1.mlp.linear_fc2.weight"
NORM = "decoder.layers.1.input_layernorm.weight"


def every_rank(folder: Path, change: Any = nothing) -> None:
    """Changes the files of all ranks."""
    for path in sorted(folder.glob("mp_rank_*")):
        edit_rank(path, change)


def test_saving_rank_files_again_is_no_damage(golden: Path, tmp_path: Path) -> None:
    folder = copied(golden, RANKS, tmp_path)
    every_rank(folder)
    assert found_in(folder, Level.HEADERS) == []


def test_every_argument_that_a_rank_contradicts_is_named(golden: Path, tmp_path: Path) -> None:
    folder = copied(golden, RANKS, tmp_path)
    every_rank(folder)

    def change(loaded: dict[str, Any]) -> None:
        loaded["args"].hidden_size = 128
        loaded["args"].num_query_groups = 8

    edit_rank(folder / "mp_rank_00_000", change)  # the first one: the others are right, being more
    edit_rank(folder / "mp_rank_01_001", lambda loaded: setattr(loaded["args"], "num_layers", 8))
    findings = [finding for finding in found_in(folder, Level.HEADERS) if finding.code == "CK301"]
    assert [(finding.rank, finding.message.split()[1]) for finding in findings] == [
        ("mp_rank_00_000", "hidden_size"),
        ("mp_rank_00_000", "num_query_groups"),
        ("mp_rank_01_001", "num_layers"),
    ]


def test_tensors_that_some_ranks_lack_or_hold_otherwise_are_named_with_the_rank(
    golden: Path, tmp_path: Path
) -> None:
    import torch

    folder = copied(golden, RANKS, tmp_path)

    def lose(loaded: dict[str, Any]) -> None:
        del loaded["model"][FC1]

    def widen(loaded: dict[str, Any]) -> None:
        loaded["model"][FC2] = loaded["model"][FC2].float()
        loaded["model"][NORM] = torch.zeros(7, dtype=torch.bfloat16)

    edit_rank(folder / "mp_rank_01_000", lose)
    edit_rank(folder / "mp_rank_01_001", widen)
    findings = {(finding.code, finding.rank) for finding in found_in(folder)}
    assert ("CK303", "mp_rank_01_000") in findings
    assert ("CK305", "mp_rank_01_001") in findings
    differing = [finding.key for finding in found_in(folder) if finding.code == "CK305"]
    assert len(differing) == 2


def test_a_tensor_that_the_first_rank_lacks_is_said_once(golden: Path, tmp_path: Path) -> None:
    folder = copied(golden, "mcore_legacy/dense_gqa/tp4_pp1", tmp_path)
    edit_rank(folder / "mp_rank_00", lambda loaded: loaded["model"].pop(FC1))
    findings = [finding for finding in found_in(folder) if finding.code == "CK303"]
    assert [(finding.rank, finding.message.split()[0]) for finding in findings] == [
        ("mp_rank_00", FC1)
    ]


def test_missing_layers_and_tensors_are_all_named(golden: Path, tmp_path: Path) -> None:
    folder = copied(golden, RANKS, tmp_path)

    def change(loaded: dict[str, Any]) -> None:
        model = loaded["model"]
        for name in [name for name in model if name.startswith("decoder.layers.0.")]:
            del model[name]

    for rank in ("mp_rank_00_001", "mp_rank_01_001"):
        edit_rank(folder / rank, change)
    for rank in ("mp_rank_00_000", "mp_rank_01_000"):
        edit_rank(
            folder / rank, lambda loaded: loaded["model"].pop("embedding.word_embeddings.weight")
        )
    findings = found_in(folder)
    assert {"CK304", "CK311"} <= set(counted(findings))
    assert any(finding.key == "embedding.word_embeddings.weight" for finding in findings)


def test_a_tied_copy_that_is_missing_or_of_another_shape_is_named(
    golden: Path, tmp_path: Path
) -> None:
    folder = copied(golden, TIED, tmp_path)
    head = "output_layer.weight"
    edit_rank(
        folder / "mp_rank_00_001",
        lambda loaded: loaded["model"].update({head: loaded["model"][head][:-1]}),
    )
    findings = found_in(folder)
    assert ("CK305", "mp_rank_00_001") in {(finding.code, finding.rank) for finding in findings}
    for rank in ("mp_rank_00_001", "mp_rank_01_001"):
        edit_rank(folder / rank, lambda loaded: loaded["model"].pop(head))
    assert counted(found_in(folder)) == {
        "CK306": 1
    }  # ranks of one length: the first stands for both
    findings = [finding for finding in found_in(folder, Level.HEADERS) if finding.code == "CK306"]
    assert [finding.rank for finding in findings] == ["mp_rank_00_001", "mp_rank_01_001"]


def test_missing_experts_are_named_by_layer(golden: Path, tmp_path: Path) -> None:
    folder = copied(golden, EXPERTS, tmp_path)

    def change(loaded: dict[str, Any]) -> None:
        model = loaded["model"]
        for name in [name for name in model if ".2.mlp.experts.local_experts.1." in name]:
            del model[name]

    every_rank(folder, change)
    assert [finding.key for finding in found_in(folder)] == ["decoder.layers.2.mlp.experts"]
    findings = [finding for finding in found_in(folder, Level.HEADERS) if finding.code == "CK313"]
    assert [finding.key for finding in findings] == ["decoder.layers.2.mlp.experts"]
    assert "experts 1, 3 of 4" in findings[0].message


def test_shapes_that_contradict_the_arguments_are_named(golden: Path, tmp_path: Path) -> None:
    folder = copied(golden, RANKS, tmp_path)
    every_rank(folder, lambda loaded: setattr(loaded["args"], "num_query_groups", 2))
    findings = found_in(folder)
    assert counted(findings)["CK314"] == 4  # the fused QKV of four layers
    assert {finding.severity for finding in findings} == {Severity.ERROR}


def test_a_rank_that_is_missing_is_said_once_and_not_by_what_follows(
    golden: Path, tmp_path: Path
) -> None:
    folder = copied(golden, EXPERTS, tmp_path)
    shutil.rmtree(folder / "mp_rank_01_001")
    edit_rank(
        folder / "mp_rank_00_000", lambda loaded: loaded["args"].__dict__.update(ffn_hidden_size=1)
    )
    findings = found_in(folder)
    assert counted(findings)["CK160"] == 1
    assert "CK313" not in counted(findings)
    assert "CK301" in counted(findings)  # another damage is found all the same


def test_a_rank_file_that_cannot_be_read_hides_no_damage_to_others(
    golden: Path, tmp_path: Path
) -> None:
    import torch

    folder = copied(golden, RANKS, tmp_path)
    (folder / "mp_rank_00_000" / MODEL_FILE).write_bytes(b"PK\x03\x04 no more")

    def change(loaded: dict[str, Any]) -> None:
        loaded["model"][FC2] = torch.zeros(3, 3, dtype=torch.bfloat16)

    edit_rank(folder / "mp_rank_01_001", change)
    findings = {(finding.code, finding.rank) for finding in found_in(folder, Level.HEADERS)}
    assert any(code == "CK305" and rank == "mp_rank_01_001" for code, rank in findings)


def test_an_unknown_tensor_is_a_note(golden: Path, tmp_path: Path) -> None:
    import torch

    folder = copied(golden, RANKS, tmp_path)
    every_rank(
        folder,
        lambda loaded: loaded["model"].update({"decoder.layers.0.surprise.weight": torch.zeros(4)}),
    )
    assert found_in(folder) == []
    notes = {
        finding.key for finding in found_in(folder, least=Severity.NOTE) if finding.code == "CK315"
    }
    assert notes == {f"decoder.layers.{number}.surprise.weight" for number in (0, 2)}


@pytest.mark.parametrize(
    ("args", "severity"),
    [
        ({"vocab_size": 4000}, Severity.ERROR),
        ({"padded_vocab_size": 448}, Severity.WARNING),
        ({"padded_vocab_size": None, "vocab_size": 200}, Severity.WARNING),
    ],
)
def test_odd_padding_of_the_vocabulary_is_found(
    golden: Path, tmp_path: Path, args: dict[str, Any], severity: Severity
) -> None:
    folder = copied(golden, RANKS, tmp_path)
    every_rank(folder, lambda loaded: vars(loaded["args"]).update(args))
    findings = [finding for finding in found_in(folder) if finding.code == "CK316"]
    assert {finding.key for finding in findings} == {
        "embedding.word_embeddings.weight",
        "output_layer.weight",
    }
    assert {finding.severity for finding in findings} == {severity}


def test_a_global_checkpoint_that_lacks_tensors_and_layers_is_incomplete(
    golden: Path, tmp_path: Path
) -> None:
    folder = copied(golden, "mcore_torch_dist/dense_gqa/tp2_pp2", tmp_path)
    stack = "decoder.layers.mlp.linear_fc2.weight"

    def change(rows: Rows) -> None:
        del rows["output_layer.weight"]
        row = rows[stack]
        chunks = [chunk for chunk in chunks_of(rows, stack) if chunk.offset[0] < 3]
        rows[stack] = row._replace(shape=(3, *row.shape[1:]), chunks=chunks)  # type: ignore[union-attr, call-arg]

    edit_rows(folder, change)
    findings = found_in(folder)
    assert counted(findings) == {"CK304": 1, "CK311": 2}
    assert {finding.key for finding in findings} == {
        stack,
        "output_layer.weight",
        "decoder.layers.3.mlp.linear_fc2.weight",
    }


@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_parts_of_models_without_padding_are_no_damage_in_formats_that_hold_anything(
    golden: Path, tmp_path: Path, to: str
) -> None:
    target = tmp_path / ("out.pt" if to == "torch" else "out")
    run(Job(src=golden / RANKS, dst=target, to=to, fsync=False))
    assert found_in(target, Level.HEADERS) == []
    part = tmp_path / ("part.pt" if to == "torch" else "part")
    run(Job(src=golden / RANKS, dst=part, to=to, exclude=("output_layer*",), fsync=False))
    assert found_in(part, Level.HEADERS) == []
    assert "CK311" in counted(found_in(part, least=Severity.NOTE))


def test_extra_states_of_different_lengths_are_no_damage(golden: Path, tmp_path: Path) -> None:
    import torch

    folder = copied(golden, RANKS, tmp_path)
    name = "decoder.layers.0.mlp.linear_fc1._extra_state"
    every_rank(
        folder, lambda loaded: loaded["model"].update({name: torch.zeros(47, dtype=torch.uint8)})
    )
    edit_rank(
        folder / "mp_rank_01_000",
        lambda loaded: loaded["model"].update({name: torch.zeros(0, dtype=torch.uint8)}),
    )
    assert found_in(folder, Level.HEADERS) == []


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        (
            "decoder.layers.mlp.experts.experts.linear_fc1.weight",
            "mlp.experts.local_experts.3.linear_fc1.weight",
        ),
        (
            "decoder.layers.mlp.experts.experts.linear_fc2.weight",
            "mlp.experts.local_experts.3.linear_fc2.weight",
        ),
        ("decoder.layers.mlp.router.weight", "mlp.router.weight"),
        ("decoder.layers.self_attention.linear_proj.weight", "self_attention.linear_proj.weight"),
        ("decoder.layers.mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        ("decoder.final_layernorm.weight", None),
    ],
)
def test_what_every_layer_lacks_is_missed(
    golden: Path, tmp_path: Path, lost: str, named: str | None
) -> None:
    folder = copied(golden, "mcore0121_zarr/moe_seq/tp2_pp2_ep2", tmp_path)
    shutil.rmtree(folder / lost)
    findings = found_in(folder)
    assert {finding.code for finding in findings} == {"CK311"}
    keys = {finding.key for finding in findings}
    assert (lost if named is None else f"decoder.layers.2.{named}") in keys
    assert all(named is None or str(key).endswith(named.rpartition(".3.")[2]) for key in keys)


@pytest.mark.parametrize(
    "case",
    ["dense_gqa/tp2_pp1", "dense_gqa/tp2_pp2", "dense_gqa/tp1_pp2", "moe_seq/tp1_pp1_ep2"],
)
def test_a_rank_file_under_another_name_is_no_damaged_model(
    golden: Path, tmp_path: Path, case: str
) -> None:
    files = sorted((golden / "mcore_legacy" / case).glob("iter_*/mp_rank_*/model_optim_rng.pt"))
    assert files
    for file in files:
        path = tmp_path / f"{file.parent.name}.pt"
        shutil.copy(file, path)
        for level in Level:
            assert validate(path, level=level).findings == ()
        with pytest.raises(UnsupportedError, match="file is from one rank") as caught:
            run(Job(src=path, dst=tmp_path / "out", to="megatron", fsync=False))
        assert "mp_rank_00/model_optim_rng.pt" in str(caught.value.hint)


@pytest.mark.parametrize("case", ["dense_gqa/tp2_pp2", "moe_seq/tp2_pp1_ep2"])
def test_a_complete_torch_file_is_not_taken_for_one_rank(
    golden: Path, tmp_path: Path, case: str
) -> None:
    path = tmp_path / "all.pt"
    run(Job(src=golden / "mcore_legacy" / case, dst=path, to="torch", optim="drop", fsync=False))
    run(Job(src=path, dst=tmp_path / "again", to="megatron", fsync=False))
    assert validate(path, level=Level.DEEP).findings == ()
