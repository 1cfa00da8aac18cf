"""Names of Hugging Face and of Megatron through whole conversions; tests/hf looks at the maps
themselves.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    UnsupportedError,
    UsageError,
)
from core.files.store import LocalStore
from core.formats.torch import format as torch_file
from core.verbs.convert.run import Job, TopologyChange, run
from tests.hf.models import loaded_model, logits
from tests.support.materialize import tensor_bytes
from tests.support.real_readers import of_tensor, read_safetensors

GOLD = "mcore_legacy/dense_gqa"


def _model(folder: Path, rank: str) -> dict[str, bytes]:
    """The weights of one rank file, in their order."""
    file = next(folder.glob(f"iter_*/{rank}/model_optim_rng.pt"))
    store = LocalStore(file.parent, entry=file.name)
    catalog = torch_file.read(store)
    return {
        key: tensor_bytes(catalog, store, key).tobytes()
        for key in catalog.tensors
        if key.startswith("model.")
    }


def test_megatron_to_hugging_face_and_back_gives_megatrons_own_files(
    golden: Path, tmp_path: Path
) -> None:
    run(Job(src=golden / GOLD / "tp4_pp1", dst=tmp_path / "hf", to="hf", fsync=False))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["model_type"] == "qwen2"
    size = TopologyChange(tp=2)
    back = Job(
        src=tmp_path / "hf",
        dst=tmp_path / "back",
        to="megatron",
        topology=size,
        make_vocab_size_divisible_by=64,
        transformer_impl="local",
        fsync=False,
    )
    run(back)
    for rank in ("mp_rank_00", "mp_rank_01"):
        wanted, model = _model(golden / GOLD / "tp2_pp1", rank), _model(tmp_path / "back", rank)
        assert list(model) == list(wanted)
        for key, data in wanted.items():
            assert model[key] == data, key


@pytest.mark.slow
def test_transformers_loads_what_was_a_megatron_checkpoint(golden: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run(
        Job(
            src=golden / GOLD / "tp2_pp2",
            dst=tmp_path / "hf",
            to="safetensors",
            names="hf",
            fsync=False,
        )
    )
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True, torch_dtype=torch.bfloat16
    )
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    weights = _model(golden / GOLD / "tp1_pp1", "mp_rank_00")[
        "model.embedding.word_embeddings.weight"
    ]
    embedding = of_tensor(model.model.embed_tokens.weight)[2]
    assert embedding == weights[: len(embedding)]
    assert torch.isfinite(model(torch.arange(12)[None]).logits).all()


@pytest.mark.each_value
@pytest.mark.parametrize("source", ["safetensors_sharded", "bin_sharded"])
@pytest.mark.parametrize("model", ["llama", "qwen2_tied"])
def test_hugging_face_directories_become_rank_files_and_come_back(
    model: str, source: str, golden: Path, tmp_path: Path
) -> None:
    first = read_safetensors(golden / "hf" / model / "safetensors_sharded")
    run(
        Job(
            src=golden / "hf" / model / source,
            dst=tmp_path / "ranks",
            to="megatron",
            topology=TopologyChange(tp=2, pp=3),
            fsync=False,
        )
    )
    assert len(list(tmp_path.glob("ranks/iter_*/mp_rank_*"))) == 6
    run(Job(src=tmp_path / "ranks", dst=tmp_path / "back", to="hf", fsync=False))
    assert read_safetensors(tmp_path / "back") == first
    run(Job(src=tmp_path / "ranks", dst=tmp_path / "dist", to="torch_dist", fsync=False))
    run(Job(src=tmp_path / "dist", dst=tmp_path / "again", to="hf", fsync=False))
    assert read_safetensors(tmp_path / "again") == first


def test_a_config_beside_nothing_makes_a_model_of_any_state_dict(
    golden: Path, tmp_path: Path
) -> None:
    hf = golden / "hf/llama/safetensors_single"
    wanted = read_safetensors(hf)
    run(Job(src=hf, dst=tmp_path / "step.dcp", to="dcp", add_prefix="app.model.", fsync=False))
    job = Job(
        src=tmp_path / "step.dcp",
        dst=tmp_path / "ranks",
        to="megatron",
        config=hf / "config.json",
        strip_prefix=("app.model.",),
        topology=TopologyChange(tp=2),
        fsync=False,
    )
    report = run(job)
    assert any("padded vocabularies are multiples of 128" in note for note in report.notes)
    run(Job(src=tmp_path / "ranks", dst=tmp_path / "back", to="hf", fsync=False))
    assert read_safetensors(tmp_path / "back") == wanted
    run(replace(job, dst=tmp_path / "hf", to="hf", topology=None))
    assert read_safetensors(tmp_path / "hf") == wanted
    assert (tmp_path / "hf/config.json").read_bytes() == (hf / "config.json").read_bytes()


def test_a_config_that_is_not_needed_or_not_there_is_refused(golden: Path, tmp_path: Path) -> None:
    hf = golden / "hf/llama/safetensors_single"
    with pytest.raises(UsageError, match="SRC already has a config.json"):
        run(
            Job(src=hf, dst=tmp_path / "out", to="megatron", config=hf / "config.json", fsync=False)
        )
    with pytest.raises(UsageError, match="--config has no effect"):
        run(
            Job(
                src=golden / GOLD / "tp1_pp1",
                dst=tmp_path / "out",
                to="torch_dist",
                config=hf / "config.json",
                fsync=False,
            )
        )
    with pytest.raises(MissingShardError):
        run(
            Job(
                src=golden / "torch_dcp/tp2_only",
                dst=tmp_path / "out",
                to="hf",
                config=tmp_path / "no",
                fsync=False,
            )
        )


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("to", "names"), [("hf", None), ("megatron", None), ("dcp", "hf"), ("dcp", "megatron")]
)
def test_megatrons_tensors_without_arguments_are_refused_with_what_can_be_done(
    to: str, names: str | None, golden: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(golden / "mcore0161_torch_dist/dense_gqa/tp2_pp2", tmp_path / "source")
    torch.save({"iteration": 10}, next(source.rglob("common.pt")))
    job = Job(src=source, dst=tmp_path / "out", to=to, names=names, fsync=False)
    with pytest.raises(UnsupportedError, match="has no training arguments") as refusal:
        run(job)
    hint = str(refusal.value.hint)
    assert "--config FILE" in hint
    assert hint.endswith("keep the names: --to safetensors, dcp or torch")
    # The configuration of another model, which has three layers, does not help.
    config = golden / "hf/llama/safetensors_single/config.json"
    with pytest.raises(CorruptError, match=r"tensor is \(4, 64\), but the model has 3 layers"):
        run(replace(job, config=config))
    for target in ("safetensors", "dcp", "torch"):
        run(Job(src=source, dst=tmp_path / target, to=target, fsync=False))


def test_a_config_that_describes_no_model_is_refused_as_such(golden: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 32}')
    source, config = golden / "torch_dcp/fsdp2_dp2", tmp_path / "config.json"
    with pytest.raises(UsageError, match="the file has no model_type, so it does not describe"):
        run(Job(src=source, dst=tmp_path / "out", to="hf", config=config, fsync=False))


def test_names_of_megatron_may_be_asked_for_in_any_format(golden: Path, tmp_path: Path) -> None:
    src = golden / "hf/llama/safetensors_single"
    run(Job(src=src, dst=tmp_path / "out.pt", to="torch", names="megatron", fsync=False))
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert "decoder.layers.0.self_attention.linear_qkv.weight" in loaded["model"]


def test_layers_of_a_converted_model_can_be_stacked_and_quantized(
    golden: Path, tmp_path: Path
) -> None:
    run(
        Job(
            src=golden / GOLD / "tp2_pp1",
            dst=tmp_path / "hf",
            to="hf",
            quantize=((None, "block"),),
            fsync=False,
        )
    )
    tensors = read_safetensors(tmp_path / "hf")
    assert tensors["model.layers.0.mlp.up_proj.weight"][0] == "float8_e4m3fn"
    assert tensors["model.layers.0.mlp.up_proj.weight_scale_inv"][1] == (1, 1)
    assert tensors["model.embed_tokens.weight"][0] == "bfloat16"
    assert "quantization_config" in json.loads((tmp_path / "hf" / "config.json").read_text())
    run(Job(src=tmp_path / "hf", dst=tmp_path / "wide", dequantize="bfloat16", fsync=False))
    wide = read_safetensors(tmp_path / "wide")
    assert wide["model.layers.0.mlp.up_proj.weight"][0] == "bfloat16"
    assert not any("scale_inv" in key for key in wide)
    assert "quantization_config" not in json.loads((tmp_path / "wide" / "config.json").read_text())


def test_options_of_the_vocabulary_are_refused_where_they_have_no_effect(
    golden: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="--make-vocab-size-divisible-by has no effect"):
        run(
            Job(
                src=golden / GOLD / "tp1_pp1",
                dst=tmp_path / "out",
                to="hf",
                make_vocab_size_divisible_by=64,
                fsync=False,
            )
        )
    src = golden / "hf/llama/safetensors_single"
    with pytest.raises(UsageError, match="no padding rows"):
        run(Job(src=src, dst=tmp_path / "out", to="megatron", keep_padded_vocab=True, fsync=False))
    with pytest.raises(
        UsageError, match=r"--vocab-size 10 does not match vocab_size \d+ in config\.json"
    ):
        run(Job(src=src, dst=tmp_path / "out", to="megatron", vocab_size=10, fsync=False))


@pytest.mark.parametrize(
    ("to", "name"), [("torch", "o.pt"), ("megatron", "o"), ("zarr", "o"), ("hf", "o.safetensors")]
)
def test_a_size_of_files_is_refused_where_it_has_no_effect(
    to: str, name: str, golden: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="--max-shard-size has no effect"):
        run(
            Job(
                src=golden / "hf/llama/safetensors_single",
                dst=tmp_path / name,
                to=to,
                max_shard_size=10,
            )
        )


@pytest.mark.parametrize(
    ("source", "to", "names", "error", "message"),
    [
        (f"{GOLD}/tp1_pp1", "safetensors", "gguf", UsageError, "--names: unknown value 'gguf'"),
        (f"{GOLD}/tp1_pp1", "safetensors", "megatron:llama", UsageError, "unknown value"),
        (f"{GOLD}/tp1_pp1", "hf", "hf:llama", UnsupportedError, "llama"),
        (
            "mcore_legacy/dense_gelu/tp1_pp1",
            "hf",
            "hf:starcoder2",
            UnsupportedError,
            "does not belong to the starcoder2 family, because argument add_qkv_bias is True",
        ),
        ("torch_dcp/fsdp2_dp2", "hf", None, CheckpointingException, "neither Megatron's names"),
        (
            "torch_dcp/fsdp2_dp2",
            "dcp",
            "megatron",
            UsageError,
            "neither Megatron's names nor Hugging Face's",
        ),
        (
            f"{GOLD}/tp1_pp1",
            "hf",
            "megatron",
            UsageError,
            "--to hf and --names megatron cannot be combined",
        ),
        (
            f"{GOLD}/tp1_pp1",
            "megatron",
            "hf",
            UsageError,
            "--names hf and --to megatron cannot be combined",
        ),
        (
            "hf/llama/safetensors_single",
            "megatron",
            "hf",
            UsageError,
            "--names hf and --to megatron cannot be combined",
        ),
        (
            "hf/llama/safetensors_single",
            "hf",
            "hf:qwen3",
            UsageError,
            "already have the Hugging Face names of 'llama'",
        ),
        (
            "hf/llama/safetensors_single",
            "hf",
            "hf:typo",
            UsageError,
            "already have the Hugging Face names",
        ),
        (
            "hf/llama/safetensors_single/model.safetensors",
            "hf",
            None,
            UnsupportedError,
            "Hugging Face's names and a config.json",
        ),
        (
            "hf/llama/torch_single/model_zip.pt",
            "megatron",
            None,
            UnsupportedError,
            "cannot be written as megatron",
        ),
    ],
)
def test_names_that_cannot_be_had_are_refused(
    source: str,
    to: str,
    names: str | None,
    error: type[CheckpointingException],
    message: str,
    golden: Path,
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=message) as refusal:
        run(Job(src=golden / source, dst=tmp_path / "out", to=to, names=names, fsync=False))
    assert refusal.value.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("source", "to", "options"),
    [
        (f"{GOLD}/tp1_pp1", "hf", {"include": ("decoder.layers.0.*",)}),
        (f"{GOLD}/tp1_pp1", "hf", {"rename": (("decoder", "x"),)}),
        ("hf/llama/safetensors_single", "megatron", {"exclude": ("lm_head.*",)}),
        ("hf/llama/safetensors_single", "torch_dist", {"strip_prefix": ("model.",)}),
    ],
)
def test_what_the_users_options_take_away_is_not_called_missing(
    source: str, to: str, options: dict[str, Any], golden: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="incomplete") as refusal:
        run(Job(src=golden / source, dst=tmp_path / "out", to=to, fsync=False, **options))
    assert refusal.value.key


@pytest.mark.parametrize("source", [f"{GOLD}/tp1_pp1", "hf/llama/safetensors_single"])
@pytest.mark.parametrize("to", ["megatron", "torch_dist"])
def test_megatron_is_given_no_scales(source: str, to: str, golden: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Megatron cannot load float8 weights with scales"):
        run(
            Job(
                src=golden / source,
                dst=tmp_path / "out",
                to=to,
                quantize=((None, "block"),),
                fsync=False,
            )
        )


def test_a_cast_is_told_of_the_arguments_only_where_there_are_some(
    golden: Path, tmp_path: Path
) -> None:
    half = ((None, "fp16"),)
    for to, is_told in (("hf", False), ("megatron", True)):
        report = run(
            Job(src=golden / GOLD / "tp1_pp1", dst=tmp_path / to, to=to, dtype=half, fsync=False)
        )
        assert any("training arguments are unchanged" in note for note in report.notes) == is_told
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "float16"


def test_advice_for_megatron_is_not_given_to_transformers(golden: Path, tmp_path: Path) -> None:
    source = golden / "mcore_legacy/dense_gqa/tp2_pp1_optim"
    report = run(Job(src=source, dst=tmp_path / "out", to="hf", optim="drop", fsync=False))
    assert not any("Megatron" in text or "--no-load" in text for text in report.dropped)
    assert sum("optimizer" in text for text in report.dropped) == 1


def test_names_alone_go_where_no_configuration_can(golden: Path, tmp_path: Path) -> None:
    report = run(
        Job(src=golden / GOLD / "tp2_pp1", dst=tmp_path / "out", to="dcp", names="hf", fsync=False)
    )
    assert not any("config.json" in text for text in (*report.notes, *report.dropped))
    assert sum("args" in text for text in report.dropped) == 1


def test_what_a_directory_holds_beside_its_model_is_told_of(golden: Path, tmp_path: Path) -> None:
    source = tmp_path / "checkpoint-3"
    shutil.copytree(golden / "hf/llama/safetensors_sharded", source)
    for name in (
        "optimizer.pt",
        "training_args.bin",
        "notes.txt",
        "trainer_state.json",
        ".gitattributes",
    ):
        (source / name).write_bytes(b"{}")
    (source / "1_Pooling").mkdir()
    report = run(Job(src=source, dst=tmp_path / "out", to="hf", fsync=False))
    assert len(report.dropped) == 1
    left_out = "1_Pooling/, notes.txt, optimizer.pt, training_args.bin"
    assert sorted(
        report.dropped[0].removeprefix("other files in the directory: ").split(", ")
    ) == left_out.split(", ")
    assert (tmp_path / "out" / "trainer_state.json").read_bytes() == b"{}"
    again = run(
        Job(
            src=tmp_path / "out",
            dst=tmp_path / "again",
            to="hf",
            max_shard_size=1 << 14,
            fsync=False,
        )
    )
    assert (again.dropped, again.notes) == ((), ())
    carried = {path.name for path in source.glob("*.json")} - {"model.safetensors.index.json"}
    assert carried <= {path.name for path in (tmp_path / "again").iterdir()}


def test_files_beside_the_weights_are_one_line_of_a_summary(golden: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(golden / "hf/llama/safetensors_single", source)
    (source / "tokenizer.json").write_text("{}")
    for to in ("megatron", "dcp"):
        lines = [
            text
            for text in run(Job(src=source, dst=tmp_path / to, to=to, fsync=False)).dropped
            if "token" in text
        ]
        assert len(lines) == 1
        assert lines[0].startswith("sidecar files, which this format")
        assert "generation_config.json, tokenizer.json" in lines[0]


@pytest.mark.slow
def test_a_tied_output_layer_is_one_for_transformers_too(golden: Path, tmp_path: Path) -> None:
    """The configuration says whether there is one; otherwise transformers would make one up, or
    ignore ours.
    """
    embedding = "model.embed_tokens.weight"
    tied = golden / "hf/qwen2_tied/safetensors_single"
    report = run(
        Job(
            src=tied,
            dst=tmp_path / "apart",
            to="hf",
            untie=(("lm_head.weight", embedding),),
            fsync=False,
        )
    )
    assert "config.json: tie_word_embeddings is now false" in report.notes
    apart = loaded_model(tmp_path / "apart")
    assert apart.lm_head.weight is not apart.model.embed_tokens.weight
    run(Job(src=tmp_path / "apart", dst=tmp_path / "ranks", to="megatron", fsync=False))
    assert "model.output_layer.weight" in _model(tmp_path / "ranks", "mp_rank_00")
    tie = (("lm_head.weight", embedding),)
    run(Job(src=tmp_path / "apart", dst=tmp_path / "tied", to="hf", tie=tie, fsync=False))
    again = loaded_model(tmp_path / "tied")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(logits(again), logits(apart))
    run(
        Job(
            src=tmp_path / "apart", dst=tmp_path / "tied-ranks", to="megatron", tie=tie, fsync=False
        )
    )
    assert "model.output_layer.weight" not in _model(tmp_path / "tied-ranks", "mp_rank_00")


def test_float8_weights_are_not_taken_for_numbers_of_their_own(
    golden: Path, tmp_path: Path
) -> None:
    small = tmp_path / "float8"
    src = golden / "hf/llama/safetensors_single"
    run(Job(src=src, dst=small, to="hf", quantize=((None, "block"),), fsync=False))
    with pytest.raises(UsageError, match="that have scales") as refusal:
        run(Job(src=small, dst=tmp_path / "out", to="hf", dtype=((None, "bf16"),), fsync=False))
    assert "--dequantize" in str(refusal.value.hint)
    with pytest.raises(UnsupportedError, match="the weights are quantized") as refused:
        run(Job(src=small, dst=tmp_path / "out", to="megatron", fsync=False))
    assert "--dequantize bf16" in str(refused.value.hint)
    report = run(
        Job(src=small, dst=tmp_path / "out", to="megatron", dequantize="bf16", fsync=False)
    )
    assert not any("config.json" in note for note in report.notes)
