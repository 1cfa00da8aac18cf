"""Adapters and bases of Megatron, folded, against peft's form of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import UsageError
from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.run import run
from tests.support.archives import unpacked
from tests.support.megatron_lora import FORMS, unpack_adapters
from tests.support.rank_files import assert_same_bits
from tests.verbs.merge.test_adapter import fold
from tests.verbs.merge.test_merge import tensors_of


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that ``unpack_adapters`` describes, with the base as Megatron checkpoints."""
    folder = unpack_adapters(tmp_path_factory.mktemp("megatron_lora"))
    for to in ("megatron", "torch_dist"):
        topology = TopologyChange(tp=2, pp=2)
        run(Job(src=folder / "hf", dst=folder / to, to=to, topology=topology, fsync=False))
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_adapters_of_megatron_fold_as_those_of_peft(
    form: str, adapters: Path, tmp_path: Path
) -> None:
    first = fold(adapters / "hf", adapters / f"{form}_peft", tmp_path / "peft")
    second = fold(adapters / "hf", adapters / form, tmp_path / "megatron")
    wanted, tensors = tensors_of(first), tensors_of(second)
    merged, base = tensors_of(adapters / f"{form}_merged"), tensors_of(adapters / "hf")
    for name, tensor in wanted.items():
        assert_same_bits(tensors[name], tensor, name)
        # Megatron-Bridge's product is a float32 one of the machine.
        torch.testing.assert_close(tensor, merged[name], rtol=0, atol=2.0**-18)
        is_adapted = name.endswith("_proj.weight")
        assert is_adapted is not torch.equal(tensor, base[name]), name


@pytest.mark.parametrize("base", ["megatron", "torch_dist"])
def test_bases_of_megatron_fold_as_those_of_transformers(
    base: str, adapters: Path, tmp_path: Path
) -> None:
    adapter = adapters / "canonical_peft"
    wanted = tensors_of(fold(adapters / "hf", adapter, tmp_path / "hf"))
    folded = fold(adapters / base, adapter, tmp_path / "folded", verify=True)
    run(Job(src=folded, dst=tmp_path / "back", to="hf", fsync=False))
    tensors = tensors_of(tmp_path / "back")
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert_same_bits(tensors[name], tensor, name)


def test_an_adapter_of_transposed_square_matrices_says_so_after_megatron(tmp_path: Path) -> None:
    # GPT-2's attn.c_proj; Megatron-Bridge records nothing about the base's files.
    gpt2 = unpacked("lora", tmp_path) / "lora" / "gpt2"
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    weights = load_file(gpt2 / "adapter" / "adapter_model.safetensors")
    square = {key: weight for key, weight in weights.items() if "attn.c_proj.lora_" in key}
    assert square
    save_file(square, adapter / "adapter_model.safetensors")
    config = json.loads((gpt2 / "adapter" / "adapter_config.json").read_text())
    config |= {"bias": "none", "fan_in_fan_out": False}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    base = gpt2 / "base"
    ranks, back = tmp_path / "ranks", tmp_path / "back"
    run(Job(src=adapter, dst=ranks, to="megatron", config=base / "config.json", fsync=False))
    run(Job(src=ranks, dst=back, to="hf", fsync=False))
    assert json.loads((back / "adapter_config.json").read_text())["fan_in_fan_out"] is True
    assert load_file(back / "adapter_model.safetensors").keys() == square.keys()
    merged = tensors_of(gpt2 / "merged")
    for form in (ranks, back):
        tensors = tensors_of(fold(base, form, tmp_path / f"{form.name}_folded"))
        names = [name for name in tensors if name.endswith("attn.c_proj.weight")]
        assert names
        for name in names:
            wanted = merged.get(name, merged.get(name.removeprefix("transformer.")))
            assert wanted is not None
            assert_same_bits(tensors[name], wanted, name)


def test_a_model_is_not_an_adapter(adapters: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not an adapter"):
        fold(adapters / "hf", adapters / "megatron", tmp_path / "out")
