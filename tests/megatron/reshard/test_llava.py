"""Megatron-LM's LLaVA: a language model, and beside it a vision tower of Megatron's layers.

``llava`` (rank files of two TP ranks) and ``llava_dist`` (torch_dist) were saved by megatron-core
from one model (tests/golden).
"""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import core
from core.errors import MissingShardError, UnsupportedError
from core.verbs.checks.finding import Finding, Level, Severity
from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.run import run
from core.verbs.validate.run import validate
from tests.opening.test_config_beside import errors_of, stored_tensors
from tests.support.archives import unpacked
from tests.support.edited import lose_tensors
from tests.support.rank_files import (
    assert_same_bits,
    assert_same_weights,
    load_rank_file,
    rank_dirs,
)

TOWERS = ("vision_model.*", "vision_projection.*")
LAYERS = "vision_model.decoder.layers."
LOST_LAYER = f"{LAYERS}0.*"
LOST_TENSORS = (
    f"{LAYERS}0.mlp.linear_fc2.bias",
    f"{LAYERS}1.input_layernorm.weight",
    "vision_projection.encoder.linear_fc2.weight",
)
_LOCAL = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return unpacked("megatron_frameworks", tmp_path)


def errors_in(path: Path) -> list[Finding]:
    findings = validate(path, level=Level.METADATA).findings
    return [finding for finding in findings if finding.severity > Severity.NOTE]


def reshard(source: Path, target: Path, *, tp: int, pp: int = 1, to: str | None = None) -> Path:
    topology = TopologyChange(tp=tp, pp=pp)
    run(Job(src=source, dst=target, to=to, topology=topology, is_reshard=True, fsync=False))
    return target


def assert_same_torch_dist(ours: Path, theirs: Path) -> None:
    """The same tensors, chunks and objects."""
    values, expected = stored_tensors(ours), stored_tensors(theirs)
    assert values.keys() == expected.keys()
    for key, value in expected.items():
        assert_same_bits(values[key], value, key)
    metas, expected_metas = (
        dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        for folder in (ours, theirs)
    )
    assert metas.keys() == expected_metas.keys()
    for key in expected:
        boxes, expected_boxes = (
            sorted((*chunk.offsets, *chunk.sizes) for chunk in item[key].chunks)
            for item in (metas, expected_metas)
        )
        assert boxes == expected_boxes, key


@pytest.mark.each_value
@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("name", ["llava", "llava_dist"])
def test_a_complete_model_has_no_findings(name: str, level: Level, models: Path) -> None:
    findings = validate(models / name, level=level).findings
    assert not [finding for finding in findings if finding.severity > Severity.NOTE]


@pytest.mark.first(3)
@pytest.mark.parametrize("lost", [LOST_LAYER, *LOST_TENSORS, *TOWERS])
def test_what_rank_files_lack_of_the_tower_is_found(lost: str, models: Path) -> None:
    for folder in rank_dirs(models / "llava").values():
        path = folder / "model_optim_rng.pt"
        content = load_rank_file(path)
        names = [name for name in content["model"] if fnmatch(name, lost)]
        assert names
        for name in names:
            del content["model"][name]
        torch.save(content, path)
    (finding,) = errors_in(models / "llava")
    assert finding.code == ("CK304" if lost == LOST_LAYER else "CK311")
    assert lost.removesuffix(".*") == finding.key
    if lost not in ("vision_projection.encoder.linear_fc2.weight", *TOWERS):
        with pytest.raises(MissingShardError):
            reshard(models / "llava", models / "one", tp=1)


@pytest.mark.first(3)
@pytest.mark.parametrize(
    "lost",
    [
        *TOWERS,
        f"{LAYERS}mlp.linear_fc1.bias",
        f"{LAYERS}pre_mlp_layernorm.weight",
        f"{LAYERS}self_attention.linear_proj.weight",
    ],
)
def test_what_torch_dist_lacks_of_the_tower_is_found(lost: str, models: Path) -> None:
    lose_tensors(models / "llava_dist/iter_0000005", lost)
    findings = errors_in(models / "llava_dist")
    assert {finding.code for finding in findings} == {"CK311"}
    # A stack of layers is missing from each of them.
    keys = {lost.removesuffix(".*")}
    if lost.startswith(LAYERS):
        keys = {lost.replace(LAYERS, f"{LAYERS}{layer}.") for layer in range(2)}
    assert {finding.key for finding in findings} == keys


@pytest.mark.first(1)
@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (1, 1), (2, 2)])
def test_rank_files_at_other_sizes_and_back_are_the_same(tp: int, pp: int, models: Path) -> None:
    other = reshard(models / "llava", models / "other", tp=tp, pp=pp)
    back = reshard(other, models / "back", tp=2)
    assert_same_weights(back, models / "llava")
    for name, folder in rank_dirs(back).items():
        ours, theirs = (
            load_rank_file(path / "model_optim_rng.pt")["model"]
            for path in (folder, rank_dirs(models / "llava")[name])
        )
        assert list(ours) == list(theirs)
        assert ours._metadata.keys() == theirs._metadata.keys()


def test_the_joined_tower_is_that_of_torch_dist(models: Path) -> None:
    core.convert(models / "llava", models / "one.safetensors")
    joined = load_file(models / "one.safetensors")
    n_compared = 0
    for key, stored in stored_tensors(models / "llava_dist/iter_0000005").items():
        if key.startswith(LAYERS):
            sub = key.removeprefix(LAYERS)
            for fused, local in _LOCAL:
                sub = sub.replace(fused, local)
            for layer, tensor in enumerate(stored):
                assert_same_bits(joined[f"{LAYERS}{layer}.{sub}"], tensor, key)
        elif key.startswith("vision_"):
            assert_same_bits(joined[key], stored, key)
        else:
            continue
        n_compared += 1
    assert n_compared == 21


def test_torch_dist_is_written_at_other_sizes(models: Path) -> None:
    reshard(models / "llava_dist", models / "one", tp=1)
    ours = stored_tensors(models / "one/iter_0000005")
    theirs = stored_tensors(models / "llava_dist/iter_0000005")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_rank_files_become_the_torch_dist_that_megatron_saves(models: Path) -> None:
    reshard(models / "llava", models / "one", tp=2, to="torch_dist")
    ours, theirs = models / "one/iter_0000005", models / "llava_dist/iter_0000005"
    assert_same_torch_dist(ours, theirs)


def test_torch_dist_becomes_the_rank_files_that_megatron_saves(models: Path) -> None:
    back = reshard(models / "llava_dist", models / "back", tp=2, to="megatron")
    assert_same_weights(back, models / "llava")
    for name, folder in rank_dirs(back).items():
        ours, theirs = (
            load_rank_file(path / "model_optim_rng.pt")["model"]
            for path in (folder, rank_dirs(models / "llava")[name])
        )
        assert list(ours) == list(theirs)


@pytest.mark.first(1)
@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (1, 1), (2, 2)])
def test_torch_dist_through_rank_files_of_other_sizes_is_the_same(
    tp: int, pp: int, models: Path
) -> None:
    other = reshard(models / "llava_dist", models / "other", tp=tp, pp=pp, to="megatron")
    assert not errors_of(other)
    reshard(other, models / "back", tp=2, to="torch_dist")
    assert_same_torch_dist(models / "back/iter_0000005", models / "llava_dist/iter_0000005")


@pytest.mark.parametrize(("name", "to"), [("llava", "torch_dist"), ("llava_dist", "megatron")])
def test_the_language_model_alone_is_converted_under_its_own_names(
    name: str, to: str, models: Path
) -> None:
    run(Job(src=models / name, dst=models / "text", to=to, exclude=TOWERS, fsync=False))
    assert not errors_of(models / "text")
    core.convert(models / "text", models / "text.safetensors")
    names = load_file(models / "text.safetensors")
    assert not [key for key in names if key.startswith(("vision_", "language_model."))]
    assert len(names) == (28 if to == "megatron" else 16)


def test_transformers_has_no_such_model(models: Path) -> None:
    with pytest.raises(UnsupportedError, match="transformers has no model") as caught:
        core.convert(models / "llava", models / "hf", to="hf")
    assert all(tower in str(caught.value) for tower in TOWERS)


@pytest.mark.parametrize("to", ["megatron", "torch_dist"])
def test_gate_and_up_rows_of_a_projection_are_cut_apart(to: str, models: Path) -> None:
    name = "vision_projection.encoder.linear_fc1.weight"
    gates, ups = [], []
    for rank, folder in enumerate(rank_dirs(models / "llava").values()):
        path = folder / "model_optim_rng.pt"
        content = load_rank_file(path)
        model = content["model"]
        gates.append(model[name])
        ups.append(model[name] + 1 + rank)
        model[name] = torch.cat([gates[-1], ups[-1]])
        bias = name.replace("weight", "bias")
        model[bias] = torch.cat([model[bias], model[bias]])
        torch.save(content, path)
    single = reshard(models / "llava", models / "one", tp=1, to=to)
    core.convert(single, models / "one.safetensors")
    assert torch.equal(load_file(models / "one.safetensors")[name], torch.cat([*gates, *ups]))
    back = reshard(single, models / "back", tp=2, to="megatron")
    assert_same_weights(back, models / "llava")


def test_a_projection_without_its_second_layer_is_no_internal_error(models: Path) -> None:
    for folder in rank_dirs(models / "llava").values():
        path = folder / "model_optim_rng.pt"
        content = load_rank_file(path)
        del content["model"]["vision_projection.encoder.linear_fc2.weight"]
        torch.save(content, path)
    other = reshard(models / "llava", models / "one", tp=1)
    (folder,) = rank_dirs(other).values()
    assert (
        "vision_projection.encoder.linear_fc1.weight"
        in (load_rank_file(folder / "model_optim_rng.pt")["model"])
    )


def test_names_below_another_module_are_those_of_the_model(models: Path) -> None:
    for folder in rank_dirs(models / "llava").values():
        path = folder / "model_optim_rng.pt"
        content = load_rank_file(path)
        model = content["model"]
        content["model"] = {f"module.{name}": leaf for name, leaf in model.items()}
        torch.save(content, path)
    result = run(
        Job(src=models / "llava", dst=models / "one.safetensors", to="safetensors", fsync=False)
    )
    assert "ckpt removes the prefix 'module.' from the tensor names" in result.notes
    original = unpacked("megatron_frameworks", models / "original") / "llava"
    core.convert(original, models / "two.safetensors")
    ours, theirs = (load_file(models / f"{name}.safetensors") for name in ("one", "two"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
