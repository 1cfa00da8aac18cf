"""Saves a tiny pipeline of diffusers with random weights, as ``save_pretrained`` does.

    python diffusers_pipeline.py FOLDER

Writes FOLDER/pipeline, a StableDiffusionPipeline (unet, vae, text_encoder, tokenizer, scheduler),
and FOLDER/fp16, the same in float16 as variant ``fp16``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer


def tokenizer_of(folder: Path) -> CLIPTokenizer:
    letters = [*"abcdefgh"]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))


def main(folder: str) -> None:
    torch.manual_seed(3)
    sizes = {"sample_size": 8, "norm_num_groups": 2, "layers_per_block": 1}
    unet = UNet2DConditionModel(
        **sizes,
        in_channels=4,
        out_channels=4,
        block_out_channels=(4, 8),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=2,
    )
    vae = AutoencoderKL(**sizes, block_out_channels=(4,), latent_channels=4)
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            hidden_size=8,
            intermediate_size=12,
            num_attention_heads=2,
            num_hidden_layers=1,
            vocab_size=18,
            max_position_embeddings=16,
            bos_token_id=16,
            eos_token_id=17,
            pad_token_id=17,
        )
    )
    with tempfile.TemporaryDirectory() as words:
        tokenizer = tokenizer_of(Path(words))
    pipeline = StableDiffusionPipeline(
        unet=unet,
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        scheduler=DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(f"{folder}/pipeline")
    pipeline.to(torch.float16).save_pretrained(f"{folder}/fp16", variant="fp16")


if __name__ == "__main__":
    main(*sys.argv[1:])
