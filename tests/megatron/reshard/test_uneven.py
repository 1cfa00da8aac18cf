"""Golden weights at uneven layouts, through the command line: what every chunk holds, the
arguments, and back again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_cli.app import main
from core.megatron.model.args import fields_of, parse_facts
from core.opening.open import open_checkpoint
from tests.support.rank_files import (
    MODEL_FILE,
    assert_same_bits,
    assert_same_weights,
    load_rank_file,
    rank_dirs,
)

DENSE = Path("mcore_legacy/dense_gqa")
TIED = Path("mcore_legacy/dense_gelu")
EXPERTS = Path("mcore_legacy/moe_seq")


def reshard(src: Path, dst: Path, *options: object) -> None:
    command = ["reshard", str(src), str(dst), "--no-optim", "--no-fsync", "-q", *map(str, options)]
    assert main(command) == 0


def layers_in(entries: dict[str, Any]) -> list[int]:
    """Local numbers of the layers of a chunk."""
    return sorted(
        {int(name.split(".")[2]) for name in entries if name.startswith("decoder.layers.")}
    )


def chunks_of(root: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """(stage, chunk) → entries, of the first TP and EP rank of every stage."""
    chunks: dict[tuple[int, str], dict[str, Any]] = {}
    for path in rank_dirs(root).values():
        loaded = load_rank_file(path / MODEL_FILE)
        stage = int(path.name.split("_")[3])
        for name in loaded:
            if name.startswith("model"):
                chunks.setdefault((stage, name), loaded[name])
    return chunks


COUNTED = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
CASES = [
    (DENSE / "tp2_pp2", "tp2_pp2", ["--decoder-first-pipeline-num-layers", 1], [[1, 3]], {}),
    (
        DENSE / "tp1_pp1",
        "tp1_pp1",
        ["--pp-new", 2, "--decoder-last-pipeline-num-layers", 3],
        [[1, 3]],
        {},
    ),
    (
        DENSE / "tp2_pp1",
        "tp2_pp1",
        [
            "--pp-new",
            3,
            "--decoder-first-pipeline-num-layers",
            1,
            "--target-decoder-last-pipeline-num-layers",
            1,
        ],
        [[1, 2, 1]],
        {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 1},
    ),
    (
        DENSE / "tp2_pp2_vpp2",
        "tp2_pp2",
        ["--vpp-new", 2, "--pipeline-model-parallel-layout-new", "E|t*2|,tt|L"],
        [[0, 2], [2, 0]],
        {
            "pipeline_model_parallel_layout": "E|(tt|)*2L",
            "num_virtual_stages_per_pipeline_rank": None,
        },
    ),
    (
        DENSE / "tp4_pp1",
        "tp4_pp1",
        ["--tp-new", 2, "--pp-new", 4, "--pipeline-model-parallel-layout", "E||t*4|L"],
        [[0, 0, 4, 0]],
        {"pipeline_model_parallel_layout": "E||t*4|L"},
    ),
    (
        DENSE / "tp1_pp1",
        "tp1_pp1",
        ["--pp-new", 2, "--vpp-new", 3, *COUNTED],
        [[0, 1], [1, 1], [1, 0]],
        {
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        },
    ),
    (
        TIED / "tp2_pp1",
        "tp2_pp1",
        ["--pp-new", 3, "--pipeline-model-parallel-layout", "E|(t*2|)*1t*2L"],
        [[0, 2, 2]],
        {"pipeline_model_parallel_layout": "E|tt|ttL"},
    ),
    (
        TIED / "tp1_pp2",
        "tp1_pp2",
        [
            "--vpp-new",
            2,
            "--decoder-first-pipeline-num-layers",
            2,
            "--decoder-last-pipeline-num-layers",
            2,
        ],
        [[1, 1], [1, 1]],
        {"decoder_first_pipeline_num_layers": 2, "num_virtual_stages_per_pipeline_rank": 2},
    ),
    (
        EXPERTS / "tp1_pp1_ep2",
        "tp1_pp1_ep2",
        [
            "--tp-new",
            2,
            "--pp-new",
            2,
            "--ep-new",
            4,
            "--etp-new",
            1,
            "--decoder-first-pipeline-num-layers",
            3,
        ],
        [[3, 1]],
        {"decoder_first_pipeline_num_layers": 3, "expert_model_parallel_size": 4},
    ),
]


FURTHER = (0, 4, 6)
"""Numbers of the cases that are further examples: of a first stage, and of layouts in one text."""


@pytest.mark.parametrize(
    ("source", "back", "options", "counts", "args"),
    [
        pytest.param(*case, marks=pytest.mark.long if number in FURTHER else ())
        for number, case in enumerate(CASES)
    ],
)
def test_uneven_layouts_of_golden_weights(
    golden: Path,
    tmp_path: Path,
    source: Path,
    back: str,
    options: list[object],
    counts: list[list[int]],
    args: dict[str, object],
) -> None:
    reshard(golden / source, tmp_path / "a", *options)
    chunks = chunks_of(tmp_path / "a")
    vpp, pp = len(counts), len(counts[0])
    names = ["model"] if vpp == 1 else [f"model{v}" for v in range(vpp)]
    assert set(chunks) == {(p, name) for p in range(pp) for name in names}
    for v, row in enumerate(counts):
        for p, count in enumerate(row):
            entries = chunks[p, names[v]]
            assert layers_in(entries) == list(range(count))
            assert ("embedding.word_embeddings.weight" in entries) == ((v, p) == (0, 0))
            assert ("decoder.final_layernorm.weight" in entries) == ((v, p) == (vpp - 1, pp - 1))
            assert ("output_layer.weight" in entries) == ((v, p) == (vpp - 1, pp - 1))
            if (v, p) not in ((0, 0), (vpp - 1, pp - 1)) and count == 0:
                assert not entries
    written = fields_of(open_checkpoint(tmp_path / "a").catalog.args)
    for name, value in args.items():
        assert written[name] == value, name
    assert parse_facts(open_checkpoint(tmp_path / "a").catalog.args).topology.vpp == vpp
    home = ["--vpp-new", 1, "--no-account-for-embedding-in-pipeline-split"]
    sizes = dict(zip(("tp", "pp"), (text[2:] for text in back.split("_")), strict=False))
    home += [word for name, size in sizes.items() for word in (f"--{name}-new", size)]
    if "ep2" in back:
        home += ["--ep-new", "2", "--etp-new", "1"]
    reshard(tmp_path / "a", tmp_path / "b", *home)
    assert_same_weights(tmp_path / "b", golden / source.parent / back)
    reshard(tmp_path / "b", tmp_path / "c", *options)
    assert_same_weights(tmp_path / "c", tmp_path / "a")


def test_tied_embeddings_stand_in_the_last_chunk_of_an_uneven_pipeline(
    golden: Path, tmp_path: Path
) -> None:
    reshard(
        golden / TIED / "tp1_pp1",
        tmp_path / "a",
        "--pp-new",
        3,
        "--pipeline-model-parallel-layout",
        "E|t*4|L",
    )
    chunks = chunks_of(tmp_path / "a")
    copy, embedding = (
        chunks[2, "model"]["output_layer.weight"],
        chunks[0, "model"]["embedding.word_embeddings.weight"],
    )
    assert isinstance(copy, torch.Tensor)
    assert_same_bits(copy, embedding, "output_layer.weight")
    assert "output_layer.weight" not in chunks[1, "model"]


def test_an_uneven_source_keeps_its_way_until_the_stages_change(
    golden: Path, tmp_path: Path
) -> None:
    layout = ["--pp-new", 2, "--pipeline-model-parallel-layout", "Ettt|tL"]
    reshard(golden / DENSE / "tp1_pp1", tmp_path / "a", *layout)
    reshard(tmp_path / "a", tmp_path / "b", "--tp-new", 2)
    assert [layers_in(entries) for entries in chunks_of(tmp_path / "b").values()] == [
        [0, 1, 2],
        [0],
    ]
    reshard(tmp_path / "a", tmp_path / "c", "--vpp-new", 2)
    assert [layers_in(entries) for entries in chunks_of(tmp_path / "c").values()] == [[0]] * 4
    assert (
        fields_of(open_checkpoint(tmp_path / "c").catalog.args)["pipeline_model_parallel_layout"]
        is None
    )
    reshard(tmp_path / "a", tmp_path / "d", "--to", "torch_dist")
    reshard(tmp_path / "d", tmp_path / "e", "--to", "megatron")
    assert_same_weights(tmp_path / "e", tmp_path / "a")


def test_weights_of_hugging_face_become_an_uneven_layout(golden: Path, tmp_path: Path) -> None:
    layout = ["--tp-new", "2", "--pp-new", "3", "--pipeline-model-parallel-layout", "E|t*3|L"]
    source = str(golden / "hf/llama/safetensors_single")
    assert (
        main(
            [
                "convert",
                source,
                str(tmp_path / "a"),
                "--to",
                "megatron",
                "--no-fsync",
                "-q",
                *layout,
            ]
        )
        == 0
    )
    assert (
        main(["convert", source, str(tmp_path / "b"), "--to", "megatron", "--no-fsync", "-q"]) == 0
    )
    ranks = [path / MODEL_FILE for path in sorted((tmp_path / "a/iter_0000001").iterdir())]
    assert len(ranks) == 6
    assert [layers_in(load_rank_file(path)["model"]) for path in ranks[:3]] == [[], [0, 1, 2], []]
    reshard(tmp_path / "a", tmp_path / "c", "--tp-new", 1, "--pp-new", 1)
    first, other = (
        load_rank_file(tmp_path / name / "iter_0000001/mp_rank_00" / MODEL_FILE)["model"]
        for name in "bc"
    )
    assert list(first) == list(other)
    for name, tensor in first.items():
        if isinstance(tensor, torch.Tensor):
            assert_same_bits(other[name], tensor, name)


def test_a_model_that_does_not_divide_becomes_torch_dist_and_back(
    golden: Path, tmp_path: Path
) -> None:
    layout = ["--pp-new", 2, "--vpp-new", 3, "--pipeline-model-parallel-layout", "E|t|t|t|t|L"]
    reshard(golden / DENSE / "tp2_pp1", tmp_path / "a", *layout)
    reshard(tmp_path / "a", tmp_path / "b", "--to", "torch_dist")
    reshard(tmp_path / "b", tmp_path / "c", "--to", "megatron", "--pp-new", 1, "--vpp-new", 1)
    assert_same_weights(tmp_path / "c", golden / DENSE / "tp2_pp1")


@pytest.mark.parametrize(
    "source", ["tp2_pp2_optim", pytest.param("tp2_pp1_dp2_distopt", marks=pytest.mark.long)]
)
def test_optimizers_take_any_way_to_an_uneven_layout(
    golden: Path, tmp_path: Path, source: str
) -> None:
    def moved(src: Path, dst: str, *options: object) -> dict[str, bytes]:
        command = ["reshard", src, tmp_path / dst, "--no-fsync", "-q", "--rng", "drop", *options]
        assert main(list(map(str, command))) == 0
        root = tmp_path / dst / "iter_0000010"
        return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.pt")}

    target = [
        "--tp-new",
        2,
        "--pp-new",
        4,
        "--vpp-new",
        1,
        "--pipeline-model-parallel-layout",
        "E||t*4|L",
    ]
    detour = [
        "--tp-new",
        1,
        "--pp-new",
        2,
        "--vpp-new",
        2,
        "--pipeline-model-parallel-layout",
        "E|tt|t|tL",
    ]
    straight = moved(golden / DENSE / source, "a", *target)
    moved(golden / DENSE / source, "b", *detour)
    assert moved(tmp_path / "b", "c", *target) == straight
    even = [
        "--tp-new",
        2,
        "--pp-new",
        source[6],
        "--vpp-new",
        1,
        "--no-account-for-loss-in-pipeline-split",
    ]
    assert moved(tmp_path / "c", "d", *even) == moved(golden / DENSE / source, "e", *even)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pp-new", 3], "PP sizes that work: 1, 2, 4"),
        (["--pp-new", 3], "--pipeline-model-parallel-layout"),
        (
            ["--decoder-first-pipeline-num-layers", 2],
            "requires more than one pipeline stage hint: use --pp-new",
        ),
        (
            ["--pp-new", 2, "--decoder-first-pipeline-num-layers", 4],
            "leaves 0 of 4 layers for the other 1",
        ),
        (
            ["--pp-new", 3, "--decoder-first-pipeline-num-layers", 1],
            "remaining 3 layers cannot be divided evenly among the other 2",
        ),
        (
            ["--pp-new", 2, "--pipeline-model-parallel-layout", "Ett|tL"],
            "has 3 layers (t), but the model has 4",
        ),
        (
            ["--pp-new", 2, "--pipeline-model-parallel-layout", "Ett|tt|L"],
            "3 parts, which does not match PP 2",
        ),
        (
            ["--pp-new", 2, "--vpp-new", 2, "--pipeline-model-parallel-layout", "Ett|ttL"],
            "does not match PP 2 and VPP 2",
        ),
        (
            ["--pp-new", 2, "--pipeline-model-parallel-layout", "Ett|t?L"],
            "contains unknown letters: '?'",
        ),
        (
            [
                "--pp-new",
                2,
                "--pipeline-model-parallel-layout",
                "Ett|ttL",
                "--decoder-last-pipeline-num-layers",
                2,
            ],
            "cannot be combined",
        ),
        (["--to", "safetensors", "--decoder-last-pipeline-num-layers", 2], "has no effect"),
    ],
)
def test_distributions_that_do_not_work_are_refused(
    golden: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[object],
    message: str,
) -> None:
    code = main(
        [
            "reshard",
            str(golden / DENSE / "tp1_pp1"),
            str(tmp_path / "x"),
            "--no-optim",
            *map(str, options),
        ]
    )
    assert code in (2, 4)
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "x").exists()
