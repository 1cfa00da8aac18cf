"""Megatron itself runs what ``to_megatron`` made, and finds the logits that transformers finds.

That proves what no comparison of bytes can: the order of query, key and value rows, of gate and up
rows, what the rotary embeddings turn, which experts the router means, and that the arguments
describe the model.

One process without a GPU builds every model from the arguments as Megatron's training script does
(every field of its configuration that an argument has the name of) and loads the weights strictly.
Rotary scaling of Llama 3 is in it, and YaRN for latent attention, whose attention core
megatron-core 0.16.1 cannot build without Transformer Engine: there a plain softmax of the same
arguments stands in for it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from core.engine.catalog.facets import MegatronModel
from core.hf.family import families
from core.hf.to_megatron import to_megatron
from tests.hf.models import (
    MODELS,
    arguments,
    catalog_of,
    config_of,
    contents,
    loaded_model,
    logits,
    saved,
    tensor_of,
)
from tests.support.asked import told
from tests.support.covering import covering_cases, every_third
from tests.support.facets import facet_of

if (
    importlib.util.find_spec("megatron") is None
    or importlib.util.find_spec("megatron.core") is None
):
    pytest.skip("megatron-core is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow

SCRIPT = r"""
import contextlib, copy, dataclasses, json, math, sys, types, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist

torch.cuda.synchronize = lambda *args, **kwargs: None
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.Stream = lambda *args, **kwargs: None
torch.Tensor.cuda = lambda self, *args, **kwargs: self
torch.nn.Module.cuda = lambda self, *args, **kwargs: self
torch.compile = lambda function, **options: function
ones = torch.ones
torch.ones = lambda *args, device=None, **kwargs: ones(*args, **kwargs)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def rearrange(x, pattern, **sizes):
    # einops for single-letter axes, of which neighbours may be one axis: "l b (h p)".
    def axes(text):
        for group, letters in ((group, group.strip("()").split()) for group in groups(text)):
            yield letters

    def groups(text):
        text = text.strip()
        while text:
            end = text.index(")") + 1 if text[0] == "(" else (text + " ").index(" ")
            yield text[:end]
            text = text[end:].strip()

    before, after = (list(axes(text)) for text in pattern.split("->"))
    for number, letters in reversed(list(enumerate(before))):
        if len(letters) > 1:
            x = x.unflatten(number, [sizes.get(letter, -1) for letter in letters])
    flat = [letter for letters in before for letter in letters]
    x = x.permute([flat.index(letter) for letters in after for letter in letters])
    for number, letters in enumerate(after):
        if len(letters) > 1:
            x = x.flatten(number, number + len(letters) - 1)
    return x


def scan(x, dt, a, b, c, chunk_size, *, D, z, dt_bias, dt_softplus, **unused):
    # The recurrence of Mamba-2, one position after the other; heads share b and c by group.
    dt = torch.nn.functional.softplus(dt + dt_bias)
    b, c = (tensor.repeat_interleave(x.shape[2] // tensor.shape[2], 2) for tensor in (b, c))
    state, rows = 0, []
    for t in range(x.shape[1]):
        step = dt[:, t, :, None, None]
        state = state * torch.exp(step * a[:, None, None]) + (
            step * x[:, t, :, :, None] * b[:, t, :, None]
        )
        rows.append((state * c[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    result = torch.stack(rows, 1)
    return result if z is None else result * torch.nn.functional.silu(z)


class GatedNorm(torch.nn.Module):
    # The norm of mamba_ssm over the channels of each group, behind the gate.
    def __init__(self, size, *, eps, group_size, norm_before_gate, **unused):
        super().__init__()
        assert not norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.eps, self.group = eps, group_size

    def forward(self, x, z):
        x = (x * torch.nn.functional.silu(z)).unflatten(-1, (-1, self.group))
        x = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return x.flatten(-2) * self.weight


for name, members in {
    "einops": {"rearrange": rearrange, "repeat": None},
    "mamba_ssm": {},
    "mamba_ssm.ops": {},
    "mamba_ssm.ops.triton": {},
    "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": GatedNorm},
    "mamba_ssm.ops.triton.ssd_combined": {
        "mamba_chunk_scan_combined": scan,
        "mamba_split_conv1d_scan_combined": None,
    },
    "mamba_ssm.ops.triton.selective_state_update": {"selective_state_update": None},
    "megatron.core.inference.contexts.attention_context.triton.tensor_ops": dict.fromkeys(
        ("tensor_get_slice_after", "tensor_masked_update", "tensor_merge", "tensor_swap")
    ),
}.items():
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__dict__.update(members)
# What gated delta nets take from another package; their deterministic mode is torch's.
for name in ("fla", "fla.modules", "fla.modules.l2norm", "fla.ops", "fla.ops.gated_delta_rule"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["fla.modules.l2norm"].l2norm = lambda x: x * (x.square().sum(-1, True) + 1e-6).rsqrt()
sys.modules["fla.ops.gated_delta_rule"].chunk_gated_delta_rule = None

from safetensors.torch import load_file, save_file
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm import mamba_block
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils, router
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import is_layer_window_attention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

parallel_state.initialize_model_parallel(1, 1)
# There is no dropout, so no random states are needed.
CudaRNGStatesTracker.fork = lambda self, *args: contextlib.nullcontext()
# Without Transformer Engine, 0.16.1 looks at the first name, which it does not define, and takes
# the engine to be there in the second module.
moe_utils.te_general_gemm = None
sigmoid_routing = router.topk_routing_with_score_function
multi_latent_attention.HAVE_TE = False


class PlainAttention(torch.nn.Module):
    # The attention core: of latent attention, and of Gemma 2, which caps its scores.
    def __init__(self, config, layer_number, softmax_scale=None, **unused):
        super().__init__()
        self.config, self.layer, self.scale = config, layer_number, softmax_scale
        if self.scale is None:
            self.scale = getattr(config, "query_pre_attn_scalar", 1) ** -0.5

    def forward(self, query, key, value, mask, **unused):
        heads = query.shape[2] // key.shape[2]
        key, value = (tensor.repeat_interleave(heads, 2) for tensor in (key, value))
        scores = torch.einsum("sbhc,tbhc->bhst", query, key) * self.scale
        cap = getattr(self.config, "attn_logit_softcapping", None)
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        if is_layer_window_attention(
            self.config.window_size, self.config.window_attn_skip_freq, self.layer
        ):
            n = query.shape[0]
            mask = mask | ~torch.ones(n, n).triu(-self.config.window_size[0]).bool()
        weights = scores.masked_fill(mask, -math.inf).softmax(-1)
        return torch.einsum("bhst,tbhc->sbhc", weights, value).flatten(2)


class Indexer(torch.nn.Module):
    # The indexer of sparse attention: which keys a query may see.
    def __init__(self, config):
        super().__init__()
        self.heads, self.size = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        self.top, self.base = config.dsa_indexer_topk, config.rotary_base
        self.rotated = config.qk_pos_emb_head_dim
        self.is_interleaved = config.indexer_is_interleaved
        common = {"config": config, "init_method": config.init_method, "bias": False}
        hidden = config.hidden_size
        self.linear_wq_b = ColumnParallelLinear(
            config.q_lora_rank, self.heads * self.size, **common
        )
        self.linear_wk = ColumnParallelLinear(hidden, self.size, **common)
        self.k_norm = torch.nn.LayerNorm(self.size, eps=1e-6)
        self.linear_weights_proj = ColumnParallelLinear(hidden, self.heads, **common)

    def rotate(self, x):
        half = torch.arange(0, self.rotated, 2) / self.rotated
        angles = torch.outer(torch.arange(x.shape[0]), self.base**-half)[:, None, None]
        turned = x[..., : self.rotated]
        first, second = (
            (turned[..., ::2], turned[..., 1::2]) if self.is_interleaved else turned.chunk(2, -1)
        )
        cos, sin = angles.cos(), angles.sin()
        both = first * cos - second * sin, second * cos + first * sin
        return torch.cat((*both, x[..., self.rotated :]), -1)

    def forward(self, x, compressed, mask):
        query = self.rotate(self.linear_wq_b(compressed)[0].unflatten(-1, (self.heads, -1)))
        key = self.rotate(self.k_norm(self.linear_wk(x)[0])[:, :, None])[:, :, 0]
        scores = torch.einsum("sbhc,tbc->bsth", query, key).relu()
        weights = self.linear_weights_proj(x)[0] * (self.heads * self.size) ** -0.5
        scores = torch.einsum("bsth,sbh->bst", scores, weights)
        chosen = scores.masked_fill(mask[:, 0], -math.inf).topk(self.top).indices
        return mask | torch.ones_like(mask).scatter(-1, chosen[:, None], False)


class SparseAttention(PlainAttention):
    # Latent attention to the keys that an indexer chooses.
    def __init__(self, config, layer_number, **others):
        super().__init__(config, layer_number, **others)
        # is_dsa_skip_topk_layer in Megatron-LM d98e8a64: such a layer uses an earlier one's choice.
        every, n_first = config.indexers
        is_shared = max(layer_number - max(n_first, 1), 0) % every != 0
        self.indexer = None if is_shared else Indexer(config)

    def forward(self, query, key, value, mask, *, x, qr, **unused):
        if self.indexer is not None:
            self.config.choice = self.indexer(x, qr, mask)
        return super().forward(query, key, value, self.config.choice)


class Norm(torch.nn.Module):
    # A norm that stores its weight minus one, which the local implementation does not have.
    def __init__(self, config, hidden_size, eps=1e-5, **unused):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size))
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size))
        self.eps = config.layernorm_epsilon
        self.one = float(config.layernorm_zero_centered_gamma)

    def forward(self, x):
        if hasattr(self, "bias"):
            shape = self.weight.shape
            return torch.nn.functional.layer_norm(x, shape, self.weight + 1, self.bias, self.eps)
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (self.weight + self.one)


class WholeNorm(Norm):
    # A norm over the channels of all heads, as in Megatron-Bridge's OLMoESelfAttention.
    def forward(self, x):
        return super().forward(x.flatten(2)).view(x.shape)


class PostNormLinear(RowParallelLinear):
    # Megatron-Bridge's TERowParallelLinearLayerNorm, without Transformer Engine.
    def __init__(self, input_size, output_size, *, config, **others):
        super().__init__(input_size, output_size, config=config, **others)
        self.post_layernorm = Norm(config, output_size)

    def forward(self, x):
        output, bias = super().forward(x)
        return self.post_layernorm(output), bias


class TwoBases(torch.nn.Module):
    # The rotary embeddings of Gemma 3, for layers with a window and for others.
    def __init__(self, args):
        super().__init__()
        self.both = [
            RotaryEmbedding(args["kv_channels"], 1.0, rotary_base=base, use_cpu_initialization=True)
            for base in args["rotary_base"]
        ]
        # Megatron-Bridge scales the positions of the layers without a window.
        self.both[1].inv_freq /= args["rope_scaling_factor"]

    def get_rotary_seq_len(self, *args):
        return self.both[0].get_rotary_seq_len(*args)

    def forward(self, length, **unused):
        return torch.stack([each(length) for each in self.both])


class TwoBasesAttention(SelfAttention):
    # The attention of a layer of Gemma 3, which chooses between them.
    def forward(self, *args, rotary_pos_emb=None, **others):
        has_window = is_layer_window_attention(
            self.config.window_size, self.config.window_attn_skip_freq, self.layer_number
        )
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb[1 - has_window], **others)


def softmax_routing(logits, topk, *, expert_bias, **unused):
    # The router of ERNIE 4.5: the bias is added to probabilities.
    probabilities = logits.float().softmax(-1)
    chosen = (probabilities + expert_bias).topk(topk).indices
    weights = probabilities.gather(1, chosen)
    weights = weights / weights.sum(-1, True)
    routed = torch.zeros_like(probabilities).scatter(1, chosen, weights)
    return routed, torch.zeros_like(routed).scatter(1, chosen, 1).bool()


def squared_relu(x):
    return torch.nn.functional.relu(x).square()


def tanh_gelu(x):
    return torch.nn.functional.gelu(x, approximate="tanh")


def hybrid(args, config):
    # mamba_layer_specs.py with the local modules.
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.models.mamba.mamba_model import MambaModel
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.attention import SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import (
        MoETransformerLayer,
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    mamba_block.TENorm = WrappedTorchNorm
    mixer = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=DotProductAttention,
        linear_proj=RowParallelLinear,
    )
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    moe = get_moe_module_spec(use_te=False, num_experts=8, moe_grouped_gemm=False)
    add = get_bias_dropout_add
    layers = {
        "mamba_layer": (
            MambaLayer,
            MambaLayerSubmodules(
                norm=WrappedTorchNorm, mixer=ModuleSpec(MambaMixer, submodules=mixer), mamba_bda=add
            ),
        ),
        "attention_layer": (
            TransformerLayer,
            TransformerLayerSubmodules(
                input_layernorm=WrappedTorchNorm,
                self_attention=ModuleSpec(
                    SelfAttention, {"attn_mask_type": AttnMaskType.causal}, attention
                ),
                self_attn_bda=add,
            ),
        ),
        "mlp_layer": (
            MLPLayer,
            TransformerLayerSubmodules(
                pre_mlp_layernorm=WrappedTorchNorm, mlp=ModuleSpec(MLP, submodules=mlp), mlp_bda=add
            ),
        ),
        "moe_layer": (
            MoETransformerLayer,
            TransformerLayerSubmodules(pre_mlp_layernorm=WrappedTorchNorm, mlp=moe, mlp_bda=add),
        ),
    }
    specs = {name: ModuleSpec(module, submodules=parts) for name, (module, parts) in layers.items()}
    return MambaModel(
        config,
        ModuleSpec(
            mamba_block.MambaStack, submodules=mamba_block.MambaStackSubmodules(**specs)
        ),
        vocab_size=args["vocab_size"],
        max_sequence_length=args["max_position_embeddings"],
        hybrid_override_pattern=args["hybrid_override_pattern"],
        position_embedding_type=args["position_embedding_type"],
        share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"],
        parallel_output=False,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    ).eval()


def scale(module, factors):
    # What a module of megatron-core returns, with or without a bias, times factors.
    module.register_forward_hook(
        lambda _, __, out: (out[0] * factors, *out[1:]) if isinstance(out, tuple) else out * factors
    )


class ScaledKeys(SelfAttention):
    # Megatron-Bridge's FalconH1SelfAttention.
    def get_query_key_value_tensors(self, *args, **others):
        query, key, value = super().get_query_key_value_tensors(*args, **others)
        return query, key * self.key_multiplier, value


class FalconLayer(torch.nn.Module):
    # Megatron-Bridge's FalconH1Layer of the same parts, with the local modules.
    def __init__(self, args, config, number):
        super().__init__()
        from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
        from megatron.core.transformer.attention import SelfAttentionSubmodules
        from megatron.core.transformer.dot_product_attention import DotProductAttention
        from megatron.core.transformer.enums import AttnMaskType
        from megatron.core.transformer.mlp import MLP, MLPSubmodules
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        groups = ProcessGroupCollection.use_mpu_process_groups()
        hidden, self.args = args["hidden_size"], args
        self.norm = WrappedTorchNorm(config, hidden, config.layernorm_epsilon)
        self.mamba_mixer = MambaMixer(
            config,
            MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
            hidden,
            rmsnorm=args["rmsnorm"],
            layer_number=number,
            pg_collection=groups,
        )
        attention = SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
        )
        self.self_attention = ScaledKeys(
            config, attention, number, AttnMaskType.causal, pg_collection=groups
        )
        self.self_attention.key_multiplier = args["key_multiplier"]
        self.pre_mlp_layernorm = WrappedTorchNorm(config, hidden, config.layernorm_epsilon)
        fc = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        self.mlp = MLP(config, fc, tp_group=groups.tp)
        # One factor for each of z, x, B, C and dt; one for the gate, one behind the MLP.
        inner = args["mamba_num_heads"] * args["mamba_head_dim"]
        group = args["mamba_num_groups"] * args["mamba_state_dim"]
        sizes = torch.tensor([inner, inner, group, group, args["mamba_num_heads"]])
        factors = torch.tensor(args["ssm_multipliers"])
        scale(self.mamba_mixer.in_proj, factors.repeat_interleave(sizes))
        scale(self.mamba_mixer, args["ssm_out_multiplier"])
        scale(self.self_attention, args["attention_out_multiplier"])
        gate, down = args["mlp_multipliers"]
        ffn = args["ffn_hidden_size"]
        scale(self.mlp.linear_fc1, torch.tensor([gate, 1.0]).repeat_interleave(ffn))
        scale(self.mlp, down)

    def forward(self, x, mask, rotary):
        y = self.norm(x)
        mamba, _ = self.mamba_mixer(y * self.args["ssm_in_multiplier"])
        attention, _ = self.self_attention(
            y * self.args["attention_in_multiplier"], mask, rotary_pos_emb=rotary
        )
        x = x + mamba + attention
        return x + self.mlp(self.pre_mlp_layernorm(x))[0]


class Falcon(torch.nn.Module):
    # Megatron-Bridge's FalconH1Model.
    def __init__(self, args, config):
        super().__init__()
        from megatron.core.models.common.embeddings.language_model_embedding import (
            LanguageModelEmbedding,
        )
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        hidden, n_rows = args["hidden_size"], args["vocab_size"]
        self.embedding = LanguageModelEmbedding(
            config, n_rows, args["max_position_embeddings"], "rope"
        )
        scale(self.embedding, args["embedding_multiplier"])
        self.rotary_pos_emb = RotaryEmbedding(
            args["kv_channels"], 1.0, rotary_base=args["rotary_base"], use_cpu_initialization=True
        )
        self.decoder = torch.nn.Module()
        layers = [FalconLayer(args, config, 1 + number) for number in range(args["num_layers"])]
        self.decoder.layers = torch.nn.ModuleList(layers)
        self.decoder.final_norm = WrappedTorchNorm(config, hidden, config.layernorm_epsilon)
        self.output_layer = ColumnParallelLinear(
            hidden, n_rows, config=config, init_method=config.init_method, bias=False
        )
        scale(self.output_layer, args["lm_head_multiplier"])

    def forward(self, tokens, positions, mask):
        x = self.embedding(tokens, positions)
        rotary = self.rotary_pos_emb(tokens.shape[1])
        for layer in self.decoder.layers:
            x = layer(x, mask, rotary)
        return self.output_layer(self.decoder.final_norm(x))[0].transpose(0, 1)


def built(args, family):
    is_latent = args["multi_latent_attention"]
    kind = MLATransformerConfig if is_latent else TransformerConfig
    names = [field.name for field in dataclasses.fields(kind)]
    fields = {name: args[name] for name in names if name in args}
    fields |= {
        "params_dtype": torch.float32,
        "gated_linear_unit": args["swiglu"]
        or args["quick_geglu"]
        or args.get("gated_linear_unit", False),
        "activation_func": squared_relu
        if args["squared_relu"]
        else tanh_gelu
        if args["openai_gelu"]
        else quick_gelu
        if args["quick_geglu"]
        else torch.nn.functional.gelu
        if args.get("bias_gelu_fusion") is not None
        else torch.nn.functional.silu,
        "num_moe_experts": args["num_experts"],
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # Its GELU is the one by tanh.
        "bias_activation_fusion": args.get("bias_gelu_fusion", False),
        "deterministic_mode": bool(args.get("experimental_attention_variant")),
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
    }
    router.topk_routing_with_score_function = (
        softmax_routing if family == "ernie4_5_moe" else sigmoid_routing
    )
    if args.get("hybrid_override_pattern"):
        return hybrid(args, kind(**fields, use_mamba_mem_eff_path=False))
    if family == "falcon_h1":
        return Falcon(args, kind(**fields, use_mamba_mem_eff_path=False)).eval()
    config = kind(**fields)
    if args["position_embedding_type"] == "yarn":  # training/argument_utils.py
        config.yarn_rotary_scaling_factor = args["rotary_scaling_factor"]
        config.yarn_mscale = args["mscale"]
        config.yarn_mscale_all_dim = args["mscale_all_dim"]
        for name in ("original_max_position_embeddings", "beta_fast", "beta_slow"):
            setattr(config, f"yarn_{name}", args[f"yarn_{name}"])
        config.yarn_correction_range_round_to_int = args["yarn_correction_range_round_to_int"]
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=args["normalization"]
    )
    if args.get("heterogeneous_layers_config_encoded_json"):
        from megatron.core.models.gpt.heterogeneous import heterogeneous_layer_specs as layers
        from megatron.core.transformer.heterogeneous import heterogeneous_config

        names = ("path", "encoded_json")
        names = [f"heterogeneous_layers_config_{name}" for name in names]
        fields |= {name: args[name] for name in names}
        config = heterogeneous_config.HeterogeneousTransformerConfig(**fields)
        spec = layers.get_gpt_heterogeneous_layer_spec(config, use_te=False)
    is_linear = [False] * config.num_layers
    is_sparse = config.experimental_attention_variant == "dsa"
    if is_sparse:
        config.indexer_is_interleaved = args["dsa_indexer_rope_interleaved"]
        config.indexers = (
            args.get("dsa_indexer_topk_freq", 1),
            args.get("dsa_indexer_skip_topk_offset", 0),
        )
    elif config.experimental_attention_variant:
        # The lists of experimental_attention_variant_module_specs.py, without Transformer Engine.
        every = config.linear_attention_freq
        is_linear = every if isinstance(every, list) else [
            bool(number % every) for number in range(1, config.num_layers + 1)
        ]
        spec.layer_specs = [copy.deepcopy(layer) for layer in spec.layer_specs]
        modules = gated_delta_net.GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=Norm, out_proj=RowParallelLinear
        )
    for number, layer in enumerate(spec.layer_specs):
        parts = layer.submodules
        if is_linear[number]:
            parts.self_attention = ModuleSpec(
                module=gated_delta_net.GatedDeltaNet, submodules=modules
            )
        if is_latent or family == "gemma2":
            core = SparseAttention if is_sparse else PlainAttention
            parts.self_attention.submodules.core_attention = core
        if args["layernorm_zero_centered_gamma"]:
            parts.input_layernorm = parts.pre_mlp_layernorm = spec.layer_norm = Norm
            if args["qk_layernorm"] and not is_linear[number]:
                parts.self_attention.submodules.q_layernorm = Norm
                parts.self_attention.submodules.k_layernorm = Norm
        if family in ("gemma2", "gemma3_text", "exaone4", "olmo2", "olmo3", "glm4"):
            parts.self_attention.submodules.linear_proj = PostNormLinear
            parts.mlp.submodules.linear_fc2 = PostNormLinear
        if family in ("exaone4", "olmo2", "olmo3"):
            parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
        if family == "gemma3_text":
            parts.self_attention.module = TwoBasesAttention
    if family == "gemma2":
        config.query_pre_attn_scalar = args["query_pre_attn_scalar"]
        config.attn_logit_softcapping = args["attn_logit_softcapping"]
    model = GPTModel(
        config,
        spec,
        vocab_size=args["vocab_size"],
        max_sequence_length=args["max_position_embeddings"],
        position_embedding_type=args["position_embedding_type"],
        rotary_percent=args.get("rotary_percent", 1.0),
        rotary_base=10000 if family == "gemma3_text" else args.get("rotary_base", 10000),
        rope_scaling=args.get("use_rope_scaling", False),
        rope_scaling_factor=args.get("rope_scaling_factor", 8.0),
        seq_len_interpolation_factor=args.get("rotary_seq_len_interpolation_factor"),
        share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"],
        parallel_output=False,
    ).eval()
    # What Megatron-Bridge's providers change in the models that they build.
    if family == "gemma3_text":
        model.rotary_pos_emb = TwoBases(args)
    if family.startswith("gemma"):
        model.embedding.register_forward_hook(lambda _, __, x: x * args["hidden_size"] ** 0.5)
    if family in ("olmo2", "olmo3", "olmoe", "minimax_m2"):
        for layer in model.decoder.layers:
            attention, head = layer.self_attention, args["kv_channels"]
            attention.q_layernorm = WholeNorm(config, head * args["num_attention_heads"])
            attention.k_layernorm = WholeNorm(config, head * args["num_query_groups"])
    return model


for case in json.load(sys.stdin):
    model = built(case["args"], case["family"])
    weights = load_file(case["weights"])
    order = [name for name in model.state_dict() if "local_tokens_per_expert" not in name]
    weights |= dict.fromkeys(case["states"])
    absent = model.load_state_dict(weights, strict=False)
    left = [name for name in absent.missing_keys if "local_tokens_per_expert" not in name]
    if left or absent.unexpected_keys:
        raise SystemExit(f"{case['name']}: missing {left}, unexpected {absent.unexpected_keys}")
    if [name for name in order if name != "output_layer.weight"] != case["order"]:
        pairs = [(a, b) for a, b in zip(order, case["order"]) if a != b]
        counts = f"{len(order)} {len(case['order'])}"
        raise SystemExit(f"{case['name']}: another order: {pairs[:4]} {counts}")
    tokens = torch.tensor(case["tokens"])[None]
    n = tokens.shape[1]
    mask = torch.triu(torch.ones(1, 1, n, n, dtype=torch.bool), 1)
    with torch.no_grad():
        found = model(tokens, torch.arange(n)[None], mask)
    cap = case["args"].get("final_logit_softcapping")
    if cap is not None:
        found = cap * torch.tanh(found / cap)
    save_file({"logits": found.contiguous()}, case["out"])
"""

# Megatron has no longrope, and no YaRN of some layers alone.
RUN = tuple(name for name in MODELS if name not in ("phi3_longrope", "olmo3_yarn"))


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Path]:
    """Directories of the models in float32; Megatron's logits are in ``<name>.logits`` beside
    each.
    """
    root = tmp_path_factory.mktemp("logits")
    cases = []
    paths: dict[str, Path] = {}
    items = [item for item in request.session.items if item.path == request.path]
    chosen = [getattr(item, "callspec", None) for item in items]
    names = {spec.params.get("name") for spec in chosen if spec is not None}
    for name in (name for name in RUN if name in names):
        folder = paths[name] = saved(name, root / name, dtype=torch.float32)
        store, source = catalog_of(folder)
        middle = to_megatron(source, config_of(folder), transformer_impl="local")
        data = contents(middle, store)
        weights = root / f"{name}.weights"
        save_file(
            {key: tensor_of(data[key], tensor.dtype) for key, tensor in middle.tensors.items()},
            weights,
        )
        args = {key: value for key, value in arguments(middle).items() if key != "params_dtype"}
        order = facet_of(middle, MegatronModel).order
        assert order is not None
        cases.append(
            {
                "name": name,
                "family": MODELS[name][0],
                "weights": str(weights),
                "args": args,
                "states": sorted(middle.objects),
                "order": [key for key in order if key != "output_layer.weight"],
                "tokens": [token * 7 % 130 for token in range(3, 33)],
                "out": str(root / f"{name}.logits"),
            }
        )
    told("-c", SCRIPT, question=cases, timeout=1200)
    return paths


def test_the_table_of_families_may_say_that_all_were_compared() -> None:
    # The layers of Ling 2 and Sarvam are those of GLM-4.5 and DeepSeek-V3, and MiMo's those of
    # Qwen2 (test_published_families); Step-3.5 has a forward of its own (test_step3p5),
    # Llama-Nemotron a model (test_nemotron_nas).
    absent = {"bailing_moe_v2", "mimo", "nemotron-nas", "sarvam_mla", "sarvam_moe", "step3p5"}
    assert {MODELS[name][0] for name in RUN} == set(families()) - absent


@pytest.mark.parametrize(
    "name", every_third(covering_cases(RUN, lambda name: {"family": MODELS[name][0]}), start=1)
)
def test_megatron_and_transformers_find_the_same_logits(
    folders: dict[str, Path], name: str
) -> None:
    from safetensors.torch import load_file

    folder = folders[name]
    theirs = logits(loaded_model(folder))
    ours = load_file(folder.parent / f"{name}.logits")["logits"]
    assert ours.shape == theirs.shape
    if name == "ministral3":  # Megatron does not scale the scores of the positions after these
        ours, theirs = ours[:, :16], theirs[:, :16]
    assert theirs.std() > 0.1
    assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4), (ours - theirs).abs().max()
