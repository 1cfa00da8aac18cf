"""Adapters of peft as those of Megatron-Bridge, against the parameters of Bridge's own ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import CheckpointingException, CorruptError, UnsupportedError, UsageError
from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.run import run
from tests.support.megatron_lora import FORMS
from tests.support.rank_files import MODEL_FILE, assert_same_bits, load_rank_file, rank_dirs

WEIGHTS = "adapter_model.safetensors"
START = "base_model.model.model.layers."


def to_ranks(adapters: Path, source: Path, dst: Path, **options: Any) -> Path:
    """Convert an adapter of peft to rank files of TP 2, PP 2."""
    run(
        Job(
            src=source,
            dst=dst,
            to="megatron",
            topology=TopologyChange(tp=2, pp=2),
            config=adapters / "hf" / "config.json",
            fsync=False,
            **options,
        )
    )
    return dst


@pytest.mark.parametrize("form", FORMS)
def test_every_rank_has_the_parameters_of_megatron_bridge(
    form: str, adapters: Path, tmp_path: Path
) -> None:
    dst = to_ranks(adapters, adapters / f"{form}_peft", tmp_path / "out")
    for folder, path in rank_dirs(dst).items():
        tp, pp = folder.removeprefix("mp_rank_").split("_")
        wanted = load_file(adapters / f"{form}_ranks" / f"tp{int(tp)}_pp{int(pp)}.safetensors")
        model = load_rank_file(path / MODEL_FILE)["model"]
        tensors = {name: tensor for name, tensor in model.items() if torch.is_tensor(tensor)}
        assert tensors.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert_same_bits(tensors[name], tensor, f"{folder}: {name}")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (".model.model.layers", ".model.layers"),
        (".model.model.layers", ".model.model.language_model.layers"),
        (".weight", ".default.weight"),
    ],
)
def test_other_spellings_of_an_adapter_become_the_same(
    old: str, new: str, adapters: Path, tmp_path: Path
) -> None:
    form = FORMS[0]
    expected = to_ranks(adapters, adapters / f"{form}_peft", tmp_path / "expected")
    shutil.copytree(adapters / f"{form}_peft", tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / WEIGHTS)
    renamed = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, tmp_path / "adapter" / WEIGHTS)
    result = to_ranks(adapters, tmp_path / "adapter", tmp_path / "out")
    for folder, path in rank_dirs(expected).items():
        model = load_rank_file(path / MODEL_FILE)["model"]
        other = load_rank_file(rank_dirs(result)[folder] / MODEL_FILE)["model"]
        assert model.keys() == other.keys()
        for name, tensor in model.items():
            if torch.is_tensor(tensor):
                assert_same_bits(other[name], tensor, f"{folder}: {name}")


@pytest.mark.parametrize("to", ["torch_dist", "megatron"])
def test_an_adapter_comes_back_with_its_configuration(
    to: str, adapters: Path, tmp_path: Path
) -> None:
    source = _partial(adapters, tmp_path)
    report = run(
        Job(
            src=source,
            dst=tmp_path / "megatron",
            to=to,
            topology=TopologyChange(tp=2, pp=1),
            config=adapters / "hf" / "config.json",
            fsync=False,
        )
    )
    # The configuration is in the arguments. Bridge's code would call the missing adapters.
    assert report.dropped == ()
    assert "because there are no adapters for k_proj and gate_proj; " in report.notes[-1]
    # Megatron's script loads no adapter without its model.
    assert "--load" not in report.next
    run(Job(src=tmp_path / "megatron", dst=tmp_path / "back", to="hf", fsync=False))
    weights, wanted = (load_file(path / WEIGHTS) for path in (tmp_path / "back", source))
    assert weights.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert_same_bits(weights[name], tensor, name)
    config = (tmp_path / "back" / "adapter_config.json").read_text()
    assert config == (source / "adapter_config.json").read_text()


def test_layers_of_an_adapter_are_stacked_along_the_axis_that_was_asked_for(
    adapters: Path, tmp_path: Path
) -> None:
    source, dst = adapters / "lora_peft", tmp_path / "adapter.safetensors"
    config = adapters / "hf" / "config.json"
    names = {"to": "safetensors", "names": "megatron", "config": config, "fsync": False}
    run(Job(src=source, dst=dst, stack_layers=True, layer_axis=1, **names))  # type: ignore[arg-type]
    (name,) = [
        name for name in load_file(dst) if name.endswith("linear_proj.adapter.linear_in.weight")
    ]
    layers = [
        load_file(source / WEIGHTS)[f"{START}{n}.self_attn.o_proj.lora_A.weight"] for n in (0, 1)
    ]
    assert_same_bits(load_file(dst)[name], torch.stack(layers, 1), name)


def _partial(adapters: Path, tmp_path: Path) -> Path:
    """A copy of an adapter that leaves k_proj and gate_proj out, as most do."""
    source = tmp_path / "adapter"
    shutil.copytree(adapters / "lora_peft", source)
    tensors = load_file(source / WEIGHTS)
    remaining = {n: t for n, t in tensors.items() if "k_proj" not in n and "gate_proj" not in n}
    save_file(remaining, source / WEIGHTS, {"format": "pt"})
    return source


def _configured(name: str, value: object) -> Callable[[Path], None]:
    def edit(adapter: Path) -> None:
        path = adapter / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))

    return edit


def _with_tensors(**tensors: tuple[int, int]) -> Callable[[Path], None]:
    def edit(adapter: Path) -> None:
        more = {
            name.replace("/", "."): torch.arange(shape[0] * shape[1]).reshape(shape).float()
            for name, shape in tensors.items()
        }
        save_file({**load_file(adapter / WEIGHTS), **more}, adapter / WEIGHTS, {"format": "pt"})

    return edit


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (_configured("use_dora", True), UnsupportedError, "use_dora"),
        (_configured("alpha_pattern", {"q_proj": 3}), UnsupportedError, "different ranks"),
        (_configured("r", 5), CorruptError, "specifies rank 5"),
        (
            _with_tensors(**{"base_model/model/lm_head/weight": (128, 32)}),
            UnsupportedError,
            "replaces tensors of the base model",
        ),
        (
            _with_tensors(
                **{
                    "base_model/model/lm_head/lora_A/weight": (4, 32),
                    "base_model/model/lm_head/lora_B/weight": (128, 4),
                }
            ),
            UnsupportedError,
            "no adapters for these layers: lm_head.weight",
        ),
        (
            _with_tensors(**{"base_model/model/model/layers/1/mlp/up_proj/lora_B/weight": (40, 4)}),
            CorruptError,
            "imply",
        ),
    ],
)
def test_what_adapters_of_megatron_cannot_be_is_refused(
    edit: Callable[[Path], None],
    error: type[CheckpointingException],
    message: str,
    adapters: Path,
    tmp_path: Path,
) -> None:
    source = tmp_path / "adapter"
    shutil.copytree(adapters / "lora_peft", source)
    edit(source)
    with pytest.raises(error, match=message):
        to_ranks(adapters, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_options_about_vocabularies_are_refused(adapters: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no effect: the source is an adapter"):
        to_ranks(adapters, adapters / "lora_peft", tmp_path / "out", vocab_size=128)
