"""Writes a checkpoint in the layout of NeMo 2, on a CPU.

    python nemo2.py FOLDER NEMO

``NEMO`` is a checkout of NeMo (8cfedd72 here), which itself does not install on a CPU: its
``nemo/lightning/io/mixin.py`` alone is run, with nemo_run and fiddle, and writes
``FOLDER/llama/context`` of classes with the names and the fields of NeMo's Llama. megatron-core
writes ``FOLDER/llama/weights``, with the keys that NeMo gives it and the entries of Lightning's
state. ``FOLDER/truth.safetensors`` are the model's parameters.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import save_file
from torch.nn import functional

GPT, LLAMA = "nemo.collections.llm.gpt.model.base", "nemo.collections.llm.gpt.model.llama"
SIZES = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "layernorm_epsilon": 1e-6,
}


def install(nemo: Path) -> type:
    """Return NeMo's ``IOMixin``, without the other modules of NeMo and of nemo_run."""
    # The packages whose own modules import all of NeMo, and what launches jobs in nemo_run.
    spec = importlib.util.find_spec("nemo_run")
    assert spec is not None and spec.submodule_search_locations
    places = {
        "nemo_run": list(spec.submodule_search_locations),
        "nemo": [str(nemo / "nemo")],
        "nemo.utils": [],
        "nemo.lightning": [str(nemo / "nemo/lightning")],
        "nemo.lightning.io": [str(nemo / "nemo/lightning/io")],
        "nemo.lightning.io.connector": [],
        "nemo.collections": [],
        "nemo.collections.llm": [],
        "nemo.collections.llm.gpt": [],
        "nemo.collections.llm.gpt.model": [],
        GPT: [],
        LLAMA: [],
    }
    for name, folders in places.items():
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = folders
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    sys.modules["nemo.utils"].logging = logging
    sys.modules["nemo.lightning.io.connector"].ModelConnector = object
    from nemo.lightning.io.mixin import IOMixin

    return IOMixin


def placed(module: str, thing: Any) -> Any:
    """Let a class or a function be one of a module of NeMo, as its ``_target_`` is recorded."""
    thing.__module__, thing.__qualname__ = module, thing.__name__
    setattr(sys.modules[module], thing.__name__, thing)
    return thing


def write_context(folder: Path, mixin: type) -> None:
    """Write ``context`` of a Llama with NeMo's serializer."""

    def default_layer_spec(config: object) -> None: ...
    def gpt_forward_step(model: object, batch: object) -> None: ...
    def gpt_data_step(batches: object) -> None: ...

    for function in (default_layer_spec, gpt_forward_step, gpt_data_step):
        placed(GPT, function)

    @dataclass
    class GPTConfig(TransformerConfig, mixin):
        fp16_lm_cross_entropy: bool = False
        parallel_output: bool = True
        share_embeddings_and_output_weights: bool = True
        make_vocab_size_divisible_by: int = 128
        position_embedding_type: Literal["learned_absolute", "rope"] = "learned_absolute"
        rotary_base: int = 10000
        rotary_percent: float = 1.0
        seq_len_interpolation_factor: float | None = None
        seq_length: int = 1024
        attention_softmax_in_fp32: bool = False
        masked_softmax_fusion: bool = True
        cross_entropy_loss_fusion: bool = True
        gradient_accumulation_fusion: bool = False
        deallocate_pipeline_outputs: bool = True
        scatter_embedding_sequence_parallel: bool = True
        tp_only_amax_red: bool = False
        use_transformer_engine_full_layer_spec: bool = False
        transformer_layer_spec: Callable[..., Any] = default_layer_spec
        forward_step_fn: Callable[..., Any] = gpt_forward_step
        data_step_fn: Callable[..., Any] = gpt_data_step
        generation_config: object | None = None
        vocab_size: int | None = None
        tp_comm_overlap_cfg: str | None = None

    @dataclass
    class LlamaConfig(placed(GPT, GPTConfig)):
        normalization: str = "RMSNorm"
        activation_func: Callable[..., Any] = functional.silu
        gated_linear_unit: bool = True
        position_embedding_type: str = "rope"
        add_bias_linear: bool = False
        seq_length: int = 4096
        attention_dropout: float = 0.0
        hidden_dropout: float = 0.0
        share_embeddings_and_output_weights: bool = False
        bias_activation_fusion: bool = True
        persist_layer_norm: bool = True
        bias_dropout_fusion: bool = True
        apply_rope_fusion: bool = False

    class LlamaModel(mixin):
        def __init__(self, config=None, optim=None, tokenizer=None, model_transform=None) -> None:
            self.config = config

    class Trainer(mixin):
        def __init__(self, max_steps: int = 1) -> None:
            pass

    class TrainerContext(mixin):
        def __init__(self, model: object, trainer: object, extra: object = None) -> None:
            pass

    class AutoTokenizer(mixin):
        def __init__(self, pretrained_model_name: str, use_fast: bool = True) -> None:
            pass

    for kind in (LlamaConfig, LlamaModel, Trainer, TrainerContext, AutoTokenizer):
        placed(LLAMA, kind)
    config = LlamaConfig(**SIZES, seq_length=64, params_dtype=torch.bfloat16, bf16=True)
    model = LlamaModel(config, tokenizer=AutoTokenizer("meta-llama/Llama-3.1-8B"))
    context = TrainerContext(model, Trainer(10))
    context.io_dump(folder / "context", yaml_attrs=["model"])


def write_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Write ``weights`` of a random Llama with megatron-core, and return its parameters."""
    torch.cuda.synchronize = lambda *args: None
    torch.cuda.current_device = lambda: "cpu"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    parallel_state.initialize_model_parallel(1, 1)
    torch.manual_seed(7)
    config = TransformerConfig(
        **SIZES,
        normalization="RMSNorm",
        activation_func=functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        bf16=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=128,
        max_sequence_length=64,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    ).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))

    progress = {"ready": 1, "completed": 0, "started": 1, "processed": 0}
    state = {
        "epoch": 0,
        "global_step": 10,
        "pytorch-lightning_version": "2.5.2",
        "state_dict": OrderedDict(),
        "loops": {
            "fit_loop": {
                "state_dict": {},
                "epoch_progress": {"total": progress, "current": dict(progress)},
            }
        },
        "callbacks": {},
        "lr_schedulers": [{"last_epoch": 10, "_step_count": 11}],
        "hparams_name": "kwargs",
        "hyper_parameters": {},
        "sharded_state_dict": model.sharded_state_dict(prefix="module."),
    }
    (folder / "weights").mkdir(parents=True)
    dist_checkpointing.save(state, str(folder / "weights"))
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def main(folder: str, nemo: str) -> None:
    out = Path(folder)
    save_file(write_weights(out / "llama"), out / "truth.safetensors")
    write_context(out / "llama", install(Path(nemo)))


if __name__ == "__main__":
    main(*sys.argv[1:])
