"""Lets Megatron-Bridge save random models, and its adapters, on CPUs with gloo.

    torchrun --nproc-per-node 1 megatron_bridge.py MODEL FOLDER MEGATRON_LM MEGATRON_BRIDGE
    torchrun --nproc-per-node 4 megatron_bridge.py adapters FOLDER MEGATRON_LM MEGATRON_BRIDGE

``MEGATRON_LM`` and ``MEGATRON_BRIDGE`` are checkouts (d98e8a64 and 067f987d here), of which
``megatron/core`` and ``src/megatron/bridge`` are used. ``FOLDER`` is recorded in the files, so it
should not be absolute. A MODEL, of ``MODELS`` or of ``tests/hf/composites.py``, becomes
``FOLDER/hf`` (transformers) and ``FOLDER/megatron`` (Bridge). ``adapters`` writes at TP 2, PP 2:
``FOLDER/FORM`` (the adapter alone), ``FORM_peft`` and ``FORM_merged`` (Bridge's exports) and
``FORM_ranks`` (each rank's parameters).

Transformer Engine is not there: layers are those of the local specification, and stubs stand in
for what Bridge imports of it and of other packages. Gemma 3's layers need it: Bridge builds its
tower and its projector around a plain GPT model.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
import typing
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
import typing_extensions
from safetensors.torch import save_file

LLAMA = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
ENDS = {"max_position_embeddings": 64, "tie_word_embeddings": False}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 3, "intermediate_size": 80, "vocab_size": 130}),
    "llama_base": ("llama", {"num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 128}),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 128, **EXPERTS},
    ),
}
UNFUSED = (
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "bias_dropout_fusion",
    "bias_activation_fusion",
    "apply_rope_fusion",
    "persist_layer_norm",
    "moe_permute_fusion",
    "moe_router_fusion",
)
NOT_INSTALLED = {
    "causal_conv1d",
    "diffusers",
    "flashinfer",
    "mamba_ssm",
    "modelopt",
    "multistorageclient",
    "nemo_run",
    "nvidia_resiliency_ext",
    "qwen_vl_utils",
    "torchvision",
    "transformer_engine",
    "wandb",
}


class _StubClass(type):
    """The class of whatever is imported from a package that is not installed."""

    def __getattr__(cls, name: str) -> Any:
        return _attribute(cls, name)

    def __or__(cls, other: object) -> Any:
        return object

    __ror__ = __or__


class _StubModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _attribute(self, name)


def _attribute(owner: object, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    result = _StubClass(name, (object,), {"__init__": lambda self, *args, **kwargs: None})
    setattr(owner, name, result)
    return result


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages ``NOT_INSTALLED``."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name.split(".")[0] in NOT_INSTALLED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _StubModule(spec.name)
        module.__path__ = []
        module.__version__ = "2.0.0"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install(megatron_lm: str, megatron_bridge: str) -> None:
    """Let Megatron-Bridge run in this process."""
    sys.path[:0] = [str(Path(megatron_lm)), str(Path(megatron_bridge) / "src")]
    typing.override = typing_extensions.override
    # What megatron-core tries to import it must not find: the stubs come after it.
    import megatron.core  # noqa: F401

    sys.meta_path.append(_Stubs())

    torch.cuda.current_device = lambda: "cpu"
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda *args: None)
    torch.cuda.Stream = torch.cuda.Event = _StubClass("Stream", (object,), {})
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self


def megatron_model(hf_dir: Path, *, tp: int = 1, pp: int = 1) -> tuple[Any, Any]:
    """Return the bridge of a model of transformers, and the Megatron model that it makes."""
    from megatron.bridge import AutoBridge
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )

    bridge = AutoBridge.from_hf_pretrained(str(hf_dir))
    text = getattr(bridge.hf_pretrained.config, "text_config", None)
    if getattr(text, "model_type", None) == "glm4v_moe_text":
        # Bridge looks for it where transformers 4 has it.
        text.partial_rotary_factor = text.rope_parameters["partial_rotary_factor"]
        use_single_experts(type(bridge._model_bridge))
    provider = bridge.to_megatron_provider(load_weights=True)
    provider.tensor_model_parallel_size, provider.pipeline_model_parallel_size = tp, pp
    provider.params_dtype, provider.bf16 = torch.float32, False
    if pp > 1:
        provider.pipeline_dtype = torch.float32
    provider.use_cpu_initialization = True
    for name in UNFUSED:
        if hasattr(provider, name):
            setattr(provider, name, False)
    if "Gemma3" in type(provider).__name__:
        use_plain_gpt(provider)
    else:
        n_experts = getattr(provider, "num_moe_experts", None)
        provider.moe_grouped_gemm = False
        provider.transformer_layer_spec = get_gpt_layer_local_spec(
            normalization="RMSNorm",
            num_experts=n_experts,
            moe_grouped_gemm=False,
            qk_layernorm=getattr(provider, "qk_layernorm", False),
        )
        if isinstance(getattr(provider, "moe_layer_freq", None), list):
            # Some layers have experts, others not: one specification per layer.
            provider.transformer_layer_spec = partial(
                get_gpt_decoder_block_spec, use_transformer_engine=False
            )
            provider.moe_shared_expert_overlap = False
    provider.finalize()
    model = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    return bridge, model


def use_single_experts(bridge_class: Any) -> None:
    """Let Bridge load experts into SequentialMLP as well; it has the names of grouped ones."""
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping

    rows = bridge_class.mapping_registry
    megatron = "language_model.decoder.layers.*.mlp.experts.local_experts.*"
    hf = "model.language_model.layers.*.mlp.experts.*"

    def with_single_experts(self: Any) -> Any:
        return MegatronMappingRegistry(
            *rows(self).mappings,
            GatedMLPMapping(
                megatron_param=f"{megatron}.linear_fc1.weight",
                gate=f"{hf}.gate_proj.weight",
                up=f"{hf}.up_proj.weight",
            ),
            AutoMapping(
                megatron_param=f"{megatron}.linear_fc2.weight", hf_param=f"{hf}.down_proj.weight"
            ),
        )

    bridge_class.mapping_registry = with_single_experts


def use_plain_gpt(provider: Any) -> None:
    """Let Bridge's Gemma 3 be a plain GPT model below its tower and its projector."""
    from megatron.bridge.models.gemma_vl import gemma3_vl_provider, modeling_gemma3_vl
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    class Norm(torch.nn.Module):
        """Stands in for Transformer Engine's norm, of the projector."""

        def __init__(self, config: object, size: int, eps: float) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(size))

    def plain_gpt(self: Any, *_: object, **__: object) -> Any:
        return GPTModel(
            self,
            get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True),
            vocab_size=130,
            max_sequence_length=64,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=True,
        )

    modeling_gemma3_vl.TENorm = Norm
    gemma3_vl_provider.Gemma3VLModelProvider.provide_language_model = plain_gpt
    provider.vision_projector_config.use_cpu_initialization = True
    provider.rotary_base, provider.layernorm_zero_centered_gamma = 10000, False


def write_model(name: str, folder: Path) -> None:
    """Write a random model as transformers saves it, before checkouts are on the path.

    Megatron-LM has a package ``tests`` as well.
    """
    from tests.hf.composites import COMPOSITES, saved_composite

    if name in COMPOSITES:
        saved_composite(name, folder)
        return
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, sizes = MODELS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **LLAMA, **ENDS, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def write_adapters(folder: Path) -> None:
    """Write both kinds of adapters of a Llama, and what Bridge makes of them."""
    from megatron.bridge.peft import utils
    from megatron.bridge.peft.canonical_lora import CanonicalLoRA
    from megatron.bridge.peft.lora import LoRA
    from megatron.bridge.training import model_load_save
    from megatron.core import parallel_state

    utils.HAVE_TE = False
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    container = model_load_save.ConfigContainer
    for form, kind in (("lora", LoRA), ("canonical", CanonicalLoRA)):
        bridge, model = megatron_model(folder / "hf", tp=2, pp=2)
        adapter = kind(dim=4, alpha=8)
        model = adapter(model, training=True)
        adapter.set_params_to_save(model)
        parameters = {
            name: parameter
            for name, parameter in model[0].named_parameters()
            if ".adapter." in name
        }
        with torch.no_grad():
            for name, parameter in parameters.items():
                seed = crc32(name.encode()) % 100_000 + 1000 * tp_rank + 77 * pp_rank
                generator = torch.Generator().manual_seed(seed)
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

        # As training saves with `peft` in its configuration: only the adapter.
        model_load_save.ConfigContainer = lambda adapter=adapter, **sections: container(
            **{**sections, "peft": adapter}
        )
        model_load_save.save_megatron_model(model, str(folder / form))
        bridge.save_hf_adapter(model, str(folder / f"{form}_peft"), adapter, show_progress=False)
        merged = {
            name: weight.detach().clone().contiguous()
            for name, weight in bridge.export_hf_weights(model, cpu=True, show_progress=False)
        }
        if dist.get_rank() == 0:
            (folder / f"{form}_merged").mkdir()
            save_file(merged, folder / f"{form}_merged/model.safetensors", {"format": "pt"})
        (folder / f"{form}_ranks").mkdir(exist_ok=True)
        ranks = {name: parameter.detach().contiguous() for name, parameter in parameters.items()}
        save_file(ranks, folder / f"{form}_ranks/tp{tp_rank}_pp{pp_rank}.safetensors")


def main(name: str, folder: str, megatron_lm: str, megatron_bridge: str) -> None:
    out, size = Path(folder), 2 if name == "adapters" else 1
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        write_model("llama_base" if name == "adapters" else name, out / "hf")
    dist.barrier()
    install(megatron_lm, megatron_bridge)
    from megatron.bridge.training.model_load_save import save_megatron_model
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(size, size)
    if name == "adapters":
        write_adapters(out)
    else:
        save_megatron_model(megatron_model(out / "hf")[1], str(out / "megatron"))


if __name__ == "__main__":
    main(*sys.argv[1:])
