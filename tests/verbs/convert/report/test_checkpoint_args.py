"""The options that a script needs beside ``--use-checkpoint-args``, for models from Hugging Face.

The lines of all families were parsed with the parsers of Megatron-LM core_v0.16.1 and d98e8a64,
and the arguments that their ``load_args_from_checkpoint`` returned were those of the checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from core.hf.to_megatron import to_megatron
from core.megatron.model.args import fields_of
from core.verbs.convert.report.checkpoint_args import list_uncopied_options
from tests.hf.models import catalog_of, config_of, saved

LOCAL = "--bf16 --transformer-impl local"
NORM = "--norm-epsilon 1e-06"
OPTIONS = {
    "llama": f"{LOCAL} {NORM}",
    "qwen3": f"{LOCAL} {NORM} --qk-layernorm",
    "gpt2": LOCAL,
    "nemotron": f"{LOCAL} --apply-layernorm-1p",
    "smollm3": f"{LOCAL} {NORM} --no-rope-freq '[0,1,0]'",
    "gemma2": (
        f"{LOCAL} {NORM} --apply-layernorm-1p --openai-gelu --window-size 4,0 "
        "--window-attn-skip-freq '[1,0,1]'"
    ),
    "glm4_moe": (
        f"{LOCAL} --moe-router-dtype fp32 --moe-router-num-groups 2 --moe-router-group-topk 1"
    ),
    "deepseek_v3": (
        f"{LOCAL} {NORM} --qk-layernorm --multi-latent-attention --q-lora-rank 12 "
        "--kv-lora-rank 10 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 8 --rope-type rope "
        "--moe-router-dtype fp32 --moe-router-num-groups 2 --moe-router-group-topk 1"
    ),
    "qwen3_yarn": (
        f"{LOCAL} {NORM} --qk-layernorm --rotary-scaling-factor 4.0 "
        "--yarn-original-max-position-embeddings 16 --yarn-beta-fast 8 --yarn-beta-slow 1"
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_model_from_hugging_face_needs(name: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path / "model")
    _, catalog = catalog_of(folder)
    model = to_megatron(catalog, config_of(folder), transformer_impl="local")
    options = " ".join(list_uncopied_options(fields_of(model.args)))
    assert options == f"--use-checkpoint-args {OPTIONS[name]}"


def test_a_factor_that_the_parser_does_not_take_is_omitted() -> None:
    name = "rotary_seq_len_interpolation_factor"
    assert list(list_uncopied_options({name: 2.5})) == ["--use-checkpoint-args"]
    assert list(list_uncopied_options({name: 2.0}))[1:] == [
        "--rotary-seq-len-interpolation-factor 2"
    ]
