"""Multi-token prediction with tied embeddings in several pipeline stages, as Megatron-LM writes it.

Every layout of the golden archive holds the same values, so what is resharded must equal what
Megatron saved at the other layout. Only the output layer that Megatron does not use, in a last
stage with predictions, has values of its own there.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from core.errors import CheckpointingException
from core.megatron.model.pipeline import Pipeline, parse_layout
from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.run import Report, run

STEP = "iter_0000003"
APART = Pipeline(layout=parse_layout("Ett|ttm|L"))
LAYOUTS = {
    "one": TopologyChange(tp=1, pp=1),
    "pp2": TopologyChange(tp=1, pp=2, pipeline=Pipeline()),
    "tp2_pp2": TopologyChange(tp=2, pp=2, pipeline=Pipeline()),
    "apart": TopologyChange(tp=1, pp=3, pipeline=APART),
}
SOURCES = (
    *(f"{name}/rank_files" for name in LAYOUTS),
    "one/torch_dist",
    "apart/torch_dist",
)
SHORT = (("one/torch_dist", "pp2"), ("tp2_pp2/rank_files", "apart"), ("apart/rank_files", "one"))
"""Pairs of every run of the tests."""
COPY = "output_layer.weight"


def reshard(src: Path, dst: Path, layout: str, *, to: str = "megatron") -> Report:
    """Reshard a checkpoint to one of the layouts."""
    return run(Job(src=src, dst=dst, to=to, topology=LAYOUTS[layout], optim="carry", fsync=False))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """``RANK: PATH`` → tensor of the models and optimizers in rank files.

    The states of the output layer that Megatron does not use are left out: those of the last
    parameter with weight decay in the last stage. Its weight is returned.
    """
    flat: dict[str, torch.Tensor] = {}

    def add(path: str, node: object) -> None:
        if isinstance(node, torch.Tensor):
            flat[path] = node
        elif isinstance(node, dict | list):
            items = node.items() if isinstance(node, dict) else enumerate(node)
            for name, value in items:
                add(f"{path}/{name}", value)

    for file in sorted((folder / STEP).glob("*/model_optim_rng.pt")):
        root = torch.load(file, weights_only=False)
        has_own_head = {COPY, "embedding.word_embeddings.weight"} <= set(root["model"])
        optimizer = root["optimizer"]
        if has_own_head:
            number = optimizer["optimizer"]["param_groups"][0]["params"][-1]
            for state in ("exp_avg", "exp_avg_sq"):
                del optimizer["optimizer"]["state"][number][state]
            del optimizer["fp32_from_fp16_params"][0][-1]
        add(f"{file.parent.name}: model", root["model"])
        add(f"{file.parent.name}: optimizer", optimizer)
    return flat


def differences(result: Path, expected: Path) -> set[str]:
    """Return the paths of the tensors that differ; both must have the same, in the same order."""
    ours, theirs = tensors(result), tensors(expected)
    assert list(ours) == list(theirs)
    return {path for path, tensor in ours.items() if not torch.equal(tensor, theirs[path])}


@pytest.mark.parametrize(
    ("source", "layout"),
    [
        pytest.param(source, layout, marks=() if (source, layout) in SHORT else pytest.mark.long)
        for source in SOURCES
        for layout in LAYOUTS
    ],
)
def test_rank_files_equal_those_of_megatron_at_the_layout(
    megatron_predictions: Path, tmp_path: Path, source: str, layout: str
) -> None:
    report = reshard(megatron_predictions / source, tmp_path / "out", layout)
    wrong = differences(tmp_path / "out", megatron_predictions / layout / "rank_files")
    assert {re.sub(r".*: model/", "", path) for path in wrong} <= (
        {COPY} if layout in ("pp2", "tp2_pp2") else set()
    )

    # What is not used is not carried, and the result says so.
    is_dropped = any(text.startswith(f"{COPY} (not used") for text in report.dropped)
    assert is_dropped == source.startswith(("pp2", "tp2_pp2"))


def test_the_output_layer_that_is_not_used_becomes_a_copy_of_the_embedding(
    megatron_predictions: Path, tmp_path: Path
) -> None:
    reshard(megatron_predictions / "one" / "torch_dist", tmp_path / "out", "pp2")
    last = torch.load(
        tmp_path / "out" / STEP / "mp_rank_00_001" / "model_optim_rng.pt", weights_only=False
    )
    embedding = last["model"]["embedding.word_embeddings.weight"]
    assert torch.equal(last["model"][COPY], embedding)
    masters = last["optimizer"]["fp32_from_fp16_params"][0]
    assert torch.equal(masters[-1], masters[0]) and torch.equal(masters[0].bfloat16(), embedding)


def test_torch_dist_equals_that_of_megatron(megatron_predictions: Path, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    reshard(
        megatron_predictions / "tp2_pp2" / "rank_files", tmp_path / "out", "apart", to="torch_dist"
    )
    trees = []
    for folder in (tmp_path / "out", megatron_predictions / "apart" / "torch_dist"):
        dcp_to_torch_save(folder / STEP, tmp_path / "tree.pt")
        tree = torch.load(tmp_path / "tree.pt", weights_only=False)
        trees.append({key: value for key, value in tree.items() if torch.is_tensor(value)})
    ours, theirs = trees
    assert set(ours) == set(theirs) and len(ours) > 60
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []


@pytest.mark.parametrize(
    ("layout", "rank", "name"),
    [
        ("pp2", "mp_rank_00_001", "embedding.word_embeddings.weight"),
        ("apart", "mp_rank_00_001", "embedding.word_embeddings.weight"),
        ("apart", "mp_rank_00_002", COPY),
    ],
)
def test_copies_of_the_embedding_that_differ_are_refused(
    megatron_predictions: Path, tmp_path: Path, layout: str, rank: str, name: str
) -> None:
    src = tmp_path / "src"
    shutil.copytree(megatron_predictions / layout / "rank_files", src)
    file = src / STEP / rank / "model_optim_rng.pt"
    root = torch.load(file, weights_only=False)
    root["model"][name][3, 5] += 1
    torch.save(root, file)
    with pytest.raises(CheckpointingException, match="embedding"):
        reshard(src, tmp_path / "out", "one")
    assert not (tmp_path / "out").exists()
