"""Tiny composite models of transformers, with numbers that follow from names and indices."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

_TEXT: dict[str, Any] = {
    "vocab_size": 130,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "intermediate_size": 24,
}
_VISION = {
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_QWEN2_5_VISION = {
    "depth": 2,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_heads": 2,
    "out_hidden_size": 16,
    "patch_size": 2,
}
_QWEN3_VISION = {
    "depth": 3,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_heads": 3,
    "out_hidden_size": 16,
    "patch_size": 2,
    "num_position_embeddings": 4,
    "spatial_merge_size": 2,
}
_AUDIO = {
    "d_model": 12,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 20,
    "num_mel_bins": 8,
    "max_source_positions": 10,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_QWEN3_5_TEXT = {
    **_TEXT,
    "head_dim": 8,
    "rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,
}
COMPOSITES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": {
                **_TEXT,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "mrope_section": [1, 1],
                },
            },
            "vision_config": _QWEN2_5_VISION,
        },
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {
                **_TEXT,
                "head_dim": 4,
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "vision_config": {**_VISION, "vision_use_head": False},
            "mm_tokens_per_image": 4,
        },
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {
            "text_config": {**_TEXT, "model_type": "mistral", "sliding_window": None},
            "vision_config": {**_VISION, "head_dim": 6},
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": {**_TEXT, "head_dim": 8, "rope_parameters": _MROPE},
            "vision_config": {**_QWEN3_VISION, "deepstack_visual_indexes": [0, 1]},
        },
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        {
            "text_config": {
                **_TEXT,
                "head_dim": 8,
                "rope_parameters": _MROPE,
                **_EXPERTS,
            },
            "vision_config": {**_QWEN3_VISION, "deepstack_visual_indexes": [0, 1]},
        },
    ),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        {"text_config": _QWEN3_5_TEXT, "vision_config": _QWEN3_VISION},
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeForConditionalGeneration",
        {
            "text_config": {
                **_QWEN3_5_TEXT,
                **_EXPERTS,
                "shared_expert_intermediate_size": 14,
            },
            "vision_config": _QWEN3_VISION,
        },
    ),
    "glm4v_moe": (
        "Glm4vMoeForConditionalGeneration",
        {
            "text_config": {
                **_TEXT,
                "num_hidden_layers": 4,
                "head_dim": 8,
                "use_qk_norm": False,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 10,
                "first_k_dense_replace": 1,
                "rope_parameters": {
                    **_MROPE,
                    "mrope_section": [1, 1],
                    "partial_rotary_factor": 0.5,
                },
            },
            "vision_config": {**_QWEN2_5_VISION, "image_size": 8},
        },
    ),
    "qwen2_5_omni": (
        "Qwen2_5OmniForConditionalGeneration",
        {
            "enable_audio_output": False,
            "thinker_config": {
                "text_config": {
                    **_TEXT,
                    "tie_word_embeddings": False,
                    "rope_parameters": {**_MROPE, "mrope_section": [1, 1]},
                },
                "vision_config": _QWEN2_5_VISION,
                "audio_config": {**_AUDIO, "output_dim": 16, "n_window": 2},
            },
        },
    ),
    "qwen3_omni_moe": (
        "Qwen3OmniMoeForConditionalGeneration",
        {
            "enable_audio_output": False,
            "thinker_config": {
                "text_config": {
                    **_TEXT,
                    "head_dim": 8,
                    "rope_parameters": _MROPE,
                    **_EXPERTS,
                },
                "vision_config": {**_QWEN3_VISION, "deepstack_visual_indexes": [0, 1]},
                "audio_config": {
                    **_AUDIO,
                    "output_dim": 16,
                    "n_window": 2,
                    "downsample_hidden_size": 4,
                    "conv_chunksize": 5,
                },
            },
        },
    ),
    "qwen2_audio": (
        "Qwen2AudioForConditionalGeneration",
        {
            "text_config": {**_TEXT, "model_type": "qwen2"},
            "audio_config": _AUDIO,
        },
    ),
}
"""Model type → (class, values of its configuration)."""


def saved_composite(name: str, folder: Path, **changes: Any) -> Path:
    """What ``save_pretrained`` writes of a composite model; every tensor has its own numbers."""
    import transformers

    architecture, values = COMPOSITES[name]
    config = transformers.AutoConfig.for_model(name, **{**values, **changes})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, architecture)(config)
        for key, value in model.state_dict().items():
            numbers = torch.arange(value.numel()) % 251 + crc32(key.encode()) % 1009
            value.copy_((numbers / 256).reshape(value.shape))
        model.save_pretrained(folder)
    return folder
