"""V-shaped pipelines, and files of pipeline stages that were exchanged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import CheckpointingException, CorruptError, UnsupportedError
from core.megatron.model.pipeline import Pipeline, split_layers
from core.verbs.checks.finding import Finding, Level, Severity
from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.run import run
from core.verbs.validate.run import validate
from tests.support.edited import edit_rank
from tests.support.rank_files import MODEL_FILE, load_rank_file, rank_dirs

V_OF_TWO = ((0, 0), (0, 1), (1, 1), (1, 0))
"""(virtual stage, stage) of each chunk in the order of the model."""
V_ARGUMENTS: dict[str, dict[str, object]] = {
    "sail-sg": {"zero_bubble_v_schedule": True, "enable_zero_bubble": True},
    "1F1B-V": {"enable_1f1b_v": True, "enable_zero_bubble": True},
    "Primus": {"patch_primus_pipeline": True, "pp_algorithm": "zbv-formatted"},
    "MindSpeed": {
        "schedules_method": "dualpipev",
        "virtual_pipeline_model_parallel_size": None,
        "num_virtual_stages_per_pipeline_rank": None,
    },
    "no argument": {},
}


def copied(golden: Path, case: str, root: Path) -> Path:
    """A copy of a checkpoint without a manifest."""
    shutil.copytree(golden / "mcore_legacy" / case, root)
    for manifest in root.rglob("ckpt-manifest.json"):
        manifest.unlink()
    return root


def make_v_shaped(golden: Path, root: Path, arguments: dict[str, object], tp: int = 1) -> Path:
    """Rank files of two stages, of which the first has chunks 0 and 3 of the model."""
    folders = rank_dirs(copied(golden, f"dense_gqa/tp{tp}_pp2_vpp2", root))
    chunks = {name: load_rank_file(path / MODEL_FILE)["model1"] for name, path in folders.items()}
    for name, path in folders.items():
        start, _, stage = name.rpartition("_")
        other = chunks[f"{start}_{1 - int(stage):03d}"]

        def change(file: dict[str, Any], other: object = other) -> None:
            file["model1"] = other
            vars(file["args"]).update(arguments)

        edit_rank(path, change)
    return root


def convert(source: Path, target: Path, **options: Any) -> None:
    run(Job(src=source, dst=target, fsync=False, **options))


def as_tensors(root: Path, target: Path) -> dict[str, bytes]:
    from safetensors.torch import load_file

    convert(root, target, to="safetensors")
    return {
        name: tensor.contiguous().view(torch.uint8).numpy().tobytes()
        for path in target.rglob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def findings_of(root: Path) -> list[Finding]:
    return list(validate(root, level=Level.DEEP).findings)


@pytest.mark.each_value
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("fork", V_ARGUMENTS)
def test_a_v_shaped_pipeline_is_the_model_that_it_holds(
    golden: Path, tmp_path: Path, fork: str, tp: int
) -> None:
    source = make_v_shaped(golden, tmp_path / "v", V_ARGUMENTS[fork], tp)
    expected = as_tensors(golden / f"mcore_legacy/dense_gqa/tp{tp}_pp2_vpp2", tmp_path / "expected")
    assert as_tensors(source, tmp_path / "out") == expected
    assert findings_of(source) == []

    # At the same sizes the files stay V-shaped where an argument says so; at others they are not.
    same, other = tmp_path / "same", tmp_path / "other"
    convert(source, same, to="megatron", topology=TopologyChange(tp=1, pp=2, vpp=2))
    convert(source, other, to="megatron", topology=TopologyChange(tp=2, pp=2, vpp=1))
    assert as_tensors(same, tmp_path / "same again") == expected
    assert as_tensors(other, tmp_path / "other again") == expected
    first = load_rank_file(rank_dirs(same)["mp_rank_00_000"] / MODEL_FILE)
    has_end = any("final_layernorm" in name for name in first["model1"])
    assert has_end == (fork != "no argument")
    changed = vars(load_rank_file(rank_dirs(other)["mp_rank_00_000"] / MODEL_FILE)["args"])
    for name in ("zero_bubble_v_schedule", "enable_1f1b_v", "patch_primus_pipeline"):
        assert not changed.get(name)
    assert changed.get("schedules_method") is None


def test_the_chunks_of_a_v_are_numbered_down_and_up() -> None:
    split = split_layers(8, pp=4, vpp=2, pipeline=Pipeline(is_v_shaped=True))
    assert split.chunks == ((0, 0), (0, 1), (0, 2), (0, 3), (1, 3), (1, 2), (1, 1), (1, 0))
    for layer in range(8):
        vp, pp, number = split.chunk_of(layer)
        assert split.offset(vp, pp) + number == layer
    loss = Pipeline(is_v_shaped=True, counts_loss=True, counts_embedding=True)
    assert split_layers(6, pp=2, vpp=2, pipeline=loss).counts == ((1, 2), (1, 2))


def make_uneven(golden: Path, root: Path, counts: list[list[int]], **arguments: object) -> Path:
    """A V of two stages and four chunks of as many layers; ``root.whole`` has them in one stage."""
    n_layers = sum(map(sum, counts))
    single = copied(golden, "dense_gqa/tp1_pp1", root.with_suffix(".whole"))

    def lengthen(file: dict[str, Any]) -> None:
        vars(file["args"]).update(num_layers=n_layers, encoder_num_layers=n_layers)
        for name, tensor in [*file["model"].items()]:
            start, _, rest = name.partition(".0.")
            for number in range(4, n_layers) if start == "decoder.layers" else ():
                is_tensor = isinstance(tensor, torch.Tensor)
                file["model"][f"{start}.{number}.{rest}"] = tensor + number if is_tensor else tensor

    edit_rank(rank_dirs(single)["mp_rank_00"], lengthen)
    (rank_path,) = rank_dirs(shutil.copytree(single, root)).values()
    model, numbers = load_rank_file(rank_path / MODEL_FILE)["model"], iter(range(n_layers))
    layers = {chunk: [*islice(numbers, counts[chunk[0]][chunk[1]])] for chunk in V_OF_TWO}
    assert not [*numbers]
    fields = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    ends = {(0, 0): "embedding.", (1, 0): ("decoder.final_layernorm.", "output_layer.")}
    chunks = {
        chunk: {
            f"decoder.layers.{local}.{name.split('.', 3)[3]}": tensor
            for local, number in enumerate(layers[chunk])
            for name, tensor in model.items()
            if name.startswith(f"decoder.layers.{number}.")
        }
        | {name: model[name] for name in model if name.startswith(ends.get(chunk, ()))}
        for chunk in V_OF_TWO
    }
    for stage in range(2):
        path = shutil.copytree(rank_path, rank_path.parent / f"mp_rank_00_{stage:03d}")

        def change(file: dict[str, Any], stage: int = stage) -> None:
            del file["model"]
            file |= {f"model{v}": chunks[v, stage] for v in range(2)}
            vars(file["args"]).update({**fields, "schedules_method": "dualpipev", **arguments})

        edit_rank(path, change)
    shutil.rmtree(rank_path)
    return root


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("counts", "first", "last"),
    [([[2, 1], [2, 1]], 2, 2), ([[3, 1], [1, 1]], 3, None), ([[1, 1], [3, 1]], None, 3)],
)
def test_an_uneven_v_is_read_by_the_layers_of_its_first_and_last_chunk(
    golden: Path, tmp_path: Path, counts: list[list[int]], first: int | None, last: int | None
) -> None:
    source = make_uneven(
        golden,
        tmp_path / "v",
        counts,
        decoder_first_pipeline_num_layers=first,
        decoder_last_pipeline_num_layers=last,
    )
    expected = as_tensors(tmp_path / "v.whole", tmp_path / "expected")
    assert as_tensors(source, tmp_path / "out") == expected
    assert not [finding for finding in findings_of(source) if finding.severity > Severity.NOTE]
    same = tmp_path / "same"
    convert(source, same, to="megatron", topology=TopologyChange(tp=2, pp=2, vpp=2))
    assert as_tensors(same, tmp_path / "same again") == expected


def test_an_uneven_v_that_its_files_contradict_is_refused(golden: Path, tmp_path: Path) -> None:
    source = make_uneven(
        golden, tmp_path / "v", [[2, 1], [2, 1]], decoder_first_pipeline_num_layers=3
    )
    assert "CK304" in {finding.code for finding in findings_of(source)}
    with pytest.raises(CheckpointingException, match="layers"):
        convert(source, tmp_path / "out", to="safetensors")


@pytest.mark.parametrize(
    "arguments",
    [
        {"pipeline_model_parallel_layout": "Et|t|t|tL"},
        {"num_layer_list": "1,1,1,1"},
        {"standalone_embedding_stage": True},
    ],
)
def test_a_v_with_a_layout_is_refused_with_the_way_out(
    golden: Path, tmp_path: Path, arguments: dict[str, object]
) -> None:
    source = make_uneven(golden, tmp_path / "v", [[1, 1], [1, 1]], **arguments)
    with pytest.raises(UnsupportedError, match="V-shaped pipeline distributes") as caught:
        convert(source, tmp_path / "out", to="safetensors")
    assert "torch_dist" in (caught.value.hint or "")
    assert {finding.code for finding in findings_of(source)} >= {"CK319"}


@pytest.mark.parametrize("has_copy", [True, False])
def test_multi_token_prediction_is_at_the_end_of_a_v(
    megatron_predictions: Path, tmp_path: Path, has_copy: bool
) -> None:
    complete, source = megatron_predictions / "one/rank_files", tmp_path / "v"
    sizes = TopologyChange(tp=1, pp=2, vpp=2, pipeline=Pipeline())
    convert(complete, source, to="megatron", topology=sizes, optim="drop")
    for manifest in source.rglob("ckpt-manifest.json"):
        manifest.unlink()
    paths = [*rank_dirs(source).values()]
    chunks = [load_rank_file(path / MODEL_FILE)["model1"] for path in paths]
    for path, other in zip(paths, reversed(chunks), strict=True):

        def change(file: dict[str, Any], other: dict[str, object] = other) -> None:
            file["model1"] = other
            vars(file["args"])["schedules_method"] = "dualpipev"
            if not has_copy:
                other.pop("embedding.word_embeddings.weight", None)

        edit_rank(path, change)
    assert any(name.startswith("mtp.") for name in chunks[1])
    assert not [finding for finding in findings_of(source) if finding.severity > Severity.NOTE]
    convert(complete, tmp_path / "whole", to="megatron", optim="drop")
    assert as_tensors(source, tmp_path / "out") == as_tensors(tmp_path / "whole", tmp_path / "all")


def change_args(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    def change_file(file: dict[str, Any]) -> None:
        change(vars(file["args"]))

    for path in rank_dirs(root).values():
        edit_rank(path, change_file)


def forget_ranks(root: Path) -> None:
    change_args(root, lambda fields: fields.pop("rank", None))


def exchange(root: Path, a: str, b: str) -> None:
    """Exchange the files of two ranks."""
    first, second = (rank_dirs(root)[name] / MODEL_FILE for name in (a, b))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


@pytest.mark.parametrize(
    "case", ["dense_gqa/tp1_pp2", "dense_gqa/tp1_pp2_vpp2", "dense_gelu/tp1_pp2"]
)
def test_exchanged_stages_are_named_by_the_places_of_their_ends(
    golden: Path, tmp_path: Path, case: str
) -> None:
    root = copied(golden, case, tmp_path / "a")
    forget_ranks(root)
    exchange(root, "mp_rank_00_000", "mp_rank_00_001")
    assert "CK309" in {finding.code for finding in findings_of(root)}
    with pytest.raises(CorruptError, match="it belongs to .*pipeline stage") as caught:
        convert(root, tmp_path / "out", to="safetensors")
    assert "pipeline stage 0" in str(caught.value)
    assert "pipeline stage 1" in str(caught.value)


def test_arguments_of_a_v_that_the_places_contradict_are_an_error(
    golden: Path, tmp_path: Path
) -> None:
    root = copied(golden, "dense_gqa/tp1_pp2_vpp2", tmp_path / "a")
    change_args(root, lambda fields: fields.update(zero_bubble_v_schedule=True))
    with pytest.raises(
        CorruptError, match="chunk 1 of pipeline stage 1, but .* belongs to chunk 1 of"
    ):
        convert(root, tmp_path / "out", to="safetensors")


def test_what_nothing_proves_is_a_note(golden: Path, tmp_path: Path) -> None:
    root = copied(golden, "dense_gqa/tp2_pp1", tmp_path / "a")
    assert findings_of(root) == []
    forget_ranks(root)
    fill_padding(root, draw)  # as Megatron initializes it
    exchange(root, "mp_rank_00", "mp_rank_01")
    assert [finding.code for finding in findings_of(root)] == ["CK509"]
    two_stages = copied(golden, "dense_gqa/tp1_pp2", tmp_path / "b")
    forget_ranks(two_stages)
    assert findings_of(two_stages) == []  # the embedding and the output layer tell them apart


VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def fill_padding(root: Path, fill: Callable[[torch.Tensor, int], object]) -> None:
    """Change the rows of a vocabulary of 300 that pad the last of two ranks."""

    def change(file: dict[str, Any]) -> None:
        for name in VOCABULARY:
            fill(file["model"][name], 300 - len(file["model"][name]))

    edit_rank(rank_dirs(root)["mp_rank_01"], change)


def repeat(rows: torch.Tensor, n_true: int) -> None:
    rows[n_true:] = rows[n_true - 1]


def draw(rows: torch.Tensor, n_true: int) -> None:
    rows[n_true:] = torch.randn(rows[n_true:].shape)


@pytest.mark.parametrize("fill", [repeat, None])
def test_padding_that_another_rank_than_the_last_has_proves_an_exchange(
    golden: Path, tmp_path: Path, fill: Callable[[torch.Tensor, int], object] | None
) -> None:
    # The padding is zeros, or the last row again, as Megatron's converters write it.
    root = copied(golden, "dense_gqa/tp2_pp1", tmp_path / "a")
    forget_ranks(root)
    if fill is not None:
        fill_padding(root, fill)
    assert "CK507" not in {finding.code for finding in findings_of(root)}
    exchange(root, "mp_rank_00", "mp_rank_01")
    (finding,) = [finding for finding in findings_of(root) if finding.code == "CK507"]
    assert (finding.rank or "").endswith("mp_rank_00")
    with pytest.raises(CorruptError, match="vocabulary padding"):
        convert(root, tmp_path / "out", to="safetensors")


@pytest.mark.parametrize("n_equal", [20, 84, 90])
def test_rows_that_are_equal_on_the_first_rank_are_no_padding_beside_it(
    golden: Path, tmp_path: Path, n_equal: int
) -> None:
    root = copied(golden, "dense_gqa/tp2_pp1", tmp_path / "a")
    forget_ranks(root)

    def change(file: dict[str, Any]) -> None:
        for name in VOCABULARY:
            file["model"][name][-n_equal:] = 0

    edit_rank(rank_dirs(root)["mp_rank_00"], change)
    assert "CK507" not in {finding.code for finding in findings_of(root)}
    # Without padding to compare with, rows in another number prove nothing.
    if n_equal != 84:
        fill_padding(root, draw)
        assert "CK507" not in {finding.code for finding in findings_of(root)}
