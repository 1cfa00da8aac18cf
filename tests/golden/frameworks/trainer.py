"""Runs the Trainer of transformers for two steps on a tiny model, as its users do.

    python trainer.py CASE FOLDER

Writes FOLDER/checkpoint-2, and FOLDER/truth.pt: the names of the optimizer's parameters in the
order of its numbers, taken from the live optimizer.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}

import torch
import transformers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CASES = {
    "llama": {"weight_decay": 0.1},
    "llama_tied_bf16": {},
    "llama_adafactor": {"optim": "adafactor"},
    "gpt2": {"weight_decay": 0.1},
    "bert": {"weight_decay": 0.1},
}


def model_of(case: str) -> PreTrainedModel:
    torch.manual_seed(7)
    if case == "gpt2":
        sizes = {"vocab_size": 48, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
        return GPT2LMHeadModel(GPT2Config(**sizes, **TOKENS))
    sizes = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    if case == "bert":
        config = BertConfig(**sizes, num_attention_heads=2, max_position_embeddings=16)
        return BertForSequenceClassification(config)
    is_tied = case == "llama_tied_bf16"
    config = LlamaConfig(
        **sizes,
        **TOKENS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=is_tied,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16 if is_tied else torch.float32)


class Samples(torch.utils.data.Dataset[dict[str, object]]):
    def __init__(self, *, are_classified: bool) -> None:
        self._are_classified = are_classified

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, object]:
        tokens = torch.randint(3, 48, (6,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": index % 2 if self._are_classified else tokens}


def main(case: str, folder: str) -> None:
    transformers.logging.set_verbosity_error()
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=2,
        save_steps=2,
        per_device_train_batch_size=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
        learning_rate=1e-2,
        logging_steps=1,
        **CASES[case],
    )
    trainer = Trainer(
        model_of(case), arguments, train_dataset=Samples(are_classified=case == "bert")
    )
    trainer.train()
    name_of = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    groups = [
        [name_of[id(parameter)] for parameter in group["params"]]
        for group in trainer.optimizer.param_groups
    ]
    if trainer.is_world_process_zero():
        torch.save(groups, Path(folder) / "truth.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
