"""What megatron-core itself makes of small models: a script of its own process, which needs
megatron-core and no GPU.

    python kinds_oracle.py FOLDER < cases.json

Every rank of every case is built in turn on a backend without communication. Megatron's
``sharded_state_dict`` says where each of its elements is in the global tensors; the rank's weights
are set to a function of key and global index accordingly. What is written:
``CASE.RANK.safetensors``, the rank's parameters; ``CASE.dist.safetensors``, the tensors of
torch_dist; ``CASE.json``, the names of every rank in order and the coordinates of ranks.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import sys
import types
import warnings
import zlib
from pathlib import Path

warnings.simplefilter("ignore")


def stubbed() -> None:
    """Stands in for packages and calls that models need for being built, though not for having
    parameters.
    """
    import torch

    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.Stream = lambda *args, **kwargs: None
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self

    class GatedNorm(torch.nn.Module):
        def __init__(self, size, *, dtype=None, device=None, **unused):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype))

    contents = {
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": GatedNorm},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": None,
            "mamba_split_conv1d_scan_combined": None,
        },
        "mamba_ssm.ops.triton.selective_state_update": {"selective_state_update": None},
        "fla.modules.l2norm": {"l2norm": None},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": None},
    }
    triton = types.ModuleType(
        "megatron.core.inference.contexts.attention_context.triton.tensor_ops"
    )
    names = ("tensor_get_slice_after", "tensor_masked_update", "tensor_merge", "tensor_swap")
    triton.__dict__.update(dict.fromkeys(names))
    sys.modules[triton.__name__] = triton
    for name, members in contents.items():
        parts = name.split(".")
        for end in range(1, len(parts)):
            sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        module = types.ModuleType(name)
        module.__dict__.update(members)
        sys.modules[name] = module
    try:
        import einops  # noqa: F401
    except ImportError:
        module = types.ModuleType("einops")
        module.rearrange = module.repeat = None
        sys.modules["einops"] = module


stubbed()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import (  # noqa: E402
    get_gpt_heterogeneous_layer_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.ssm import gated_delta_net, mamba_block, mamba_mixer  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker  # noqa: E402
from megatron.core.transformer import multi_latent_attention  # noqa: E402
from megatron.core.transformer.heterogeneous.heterogeneous_config import (  # noqa: E402
    HeterogeneousTransformerConfig,
)
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig  # noqa: E402
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

CudaRNGStatesTracker.fork = lambda self, *args: contextlib.nullcontext()
moe_utils.te_general_gemm = None
multi_latent_attention.HAVE_TE = False
mamba_block.TENorm = WrappedTorchNorm


class PlainAttention(torch.nn.Module):
    def __init__(self, **unused):
        super().__init__()


def config_of(args, tp, pp, ep):
    kind = MLATransformerConfig if args.get("multi_latent_attention") else TransformerConfig
    if "heterogeneous_layers_config_encoded_json" in args["config"]:
        kind = HeterogeneousTransformerConfig
    return kind(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        add_bias_linear=False,
        normalization="RMSNorm",
        **args["config"],
    )


def gpt_model(args, config, *, is_first, is_last):
    if config.heterogeneous_block_specs:
        spec = get_gpt_heterogeneous_layer_spec(config, use_te=False)
    else:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm"
        )
    if args["config"].get("experimental_attention_variant"):
        linear = gated_delta_net.GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
        )
        first = get_transformer_layer_offset(config)
        spec.layer_specs = [copy.deepcopy(layer) for layer in spec.layer_specs]
        for number, layer in enumerate(spec.layer_specs, start=first + 1):
            layer.submodules = dataclasses.replace(layer.submodules, sharded_state_dict_keys_map={})
            if number % config.linear_attention_freq:
                layer.submodules.self_attention = ModuleSpec(
                    module=gated_delta_net.GatedDeltaNet, submodules=linear
                )
    if args.get("multi_latent_attention"):
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = PlainAttention
    mtp = None
    if config.mtp_num_layers:  # a stage may have predictions and no layers
        layers = get_gpt_decoder_layer_specs(
            config, use_transformer_engine=False, normalization="RMSNorm"
        )
        mtp = get_gpt_mtp_block_spec(config, layers[-1], use_transformer_engine=False)
    return GPTModel(
        config,
        spec,
        vocab_size=args["vocab_size"],
        max_sequence_length=32,
        pre_process=is_first,
        post_process=is_last,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=args["is_tied"],
        mtp_block_spec=mtp,
    )


def mamba_model(args, config, *, is_first, is_last):
    from megatron.core.models.common.embeddings import language_model_embedding  # noqa: F401
    from megatron.core.models.mamba.mamba_model import MambaModel
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    mixer = mamba_mixer.MambaMixerSubmodules(
        in_proj=ColumnParallelLinear, out_proj=RowParallelLinear
    )
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=PlainAttention,
        linear_proj=RowParallelLinear,
    )
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    stack = ModuleSpec(
        module=mamba_block.MambaStack,
        submodules=mamba_block.MambaStackSubmodules(
            mamba_layer=ModuleSpec(
                module=MambaLayer,
                submodules=MambaLayerSubmodules(
                    norm=WrappedTorchNorm,
                    mixer=ModuleSpec(module=mamba_mixer.MambaMixer, submodules=mixer),
                ),
            ),
            attention_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=WrappedTorchNorm,
                    self_attention=ModuleSpec(module=SelfAttention, submodules=attention),
                ),
            ),
            mlp_layer=ModuleSpec(
                module=MLPLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=WrappedTorchNorm, mlp=ModuleSpec(module=MLP, submodules=mlp)
                ),
            ),
        ),
    )
    return MambaModel(
        config,
        stack,
        vocab_size=args["vocab_size"],
        max_sequence_length=32,
        pre_process=is_first,
        post_process=is_last,
        hybrid_override_pattern=args["pattern"],
        share_embeddings_and_output_weights=args["is_tied"],
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )


def run(case, folder):
    args, (tp, pp, ep) = case["args"], case["sizes"]
    global_tensors: dict[str, torch.Tensor] = {}
    ranks = []
    for rank in range(tp * pp * ep if tp < ep else tp * pp):
        world = tp * pp * ep if tp < ep else tp * pp
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        parallel_state.initialize_model_parallel(
            tp, pp, expert_model_parallel_size=ep, create_gloo_process_groups=False
        )
        config = config_of(args, tp, pp, ep)
        build = mamba_model if args.get("pattern") else gpt_model
        model = build(
            args,
            config,
            is_first=parallel_state.is_pipeline_first_stage(),
            is_last=parallel_state.is_pipeline_last_stage(),
        )
        groups = ProcessGroupCollection.use_mpu_process_groups()
        sharded = model.sharded_state_dict(
            metadata={"dp_cp_group": groups.dp_cp, **case.get("metadata", {})}
        )
        apply_factories(sharded)
        for tensor in tensors_of(sharded):
            filled(tensor, global_tensors)
        tensors, names = {}, []
        for name, value in model.state_dict().items():
            names.append([name, value is not None])
            if value is not None:
                tensors[name] = value.detach().clone().contiguous()
        save_file(tensors, folder / f"{case['name']}.{rank}.safetensors")
        ranks.append(
            {
                "tp": parallel_state.get_tensor_model_parallel_rank(),
                "pp": parallel_state.get_pipeline_model_parallel_rank(),
                "ep": parallel_state.get_expert_model_parallel_rank(),
                "names": names,
            }
        )
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    save_file(global_tensors, folder / f"{case['name']}.dist.safetensors")
    (folder / f"{case['name']}.json").write_text(json.dumps(ranks))


def tensors_of(value):
    if isinstance(value, ShardedTensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)


def filled(tensor, global_tensors):
    """Gives a shard the values of its place in the global tensor."""
    shape = tensor.global_shape
    values = global_tensors.get(tensor.key)
    if values is None:
        n = 1
        for extent in shape:
            n *= extent
        assert n <= 4096, (tensor.key, shape)
        start = zlib.crc32(tensor.key.encode()) % 4096 * 4096
        values = global_tensors[tensor.key] = (
            (torch.arange(n) + start).reshape(shape).to(tensor.data.dtype)
        )
    at = tuple(slice(o, o + n) for o, n in zip(tensor.global_offset, shape_of(tensor), strict=True))
    with torch.no_grad():
        tensor.data.copy_(values[at].reshape(tensor.data.shape))


def shape_of(tensor):
    return (*(1 for _ in range(tensor.prepend_axis_num)), *tensor.local_shape)


if __name__ == "__main__":
    for case in json.load(sys.stdin):
        try:
            run(case, Path(sys.argv[1]))
        except Exception as err:
            import traceback

            traceback.print_exc()
            raise SystemExit(f"{case['name']}: {type(err).__name__}: {err}") from err
