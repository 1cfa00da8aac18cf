"""A model of a family that nobody has: Llama with the gate and up matrices as one tensor, and the
table that docs/howto/huggingface-megatron.md shows for it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "huggingface-megatron.md"


def write_starship(llama_dir: Path, folder: Path) -> None:
    """Write the model, and ``starship.toml`` in the current directory of the page.

    Args:
        llama_dir: the Llama that it is made from, with one or several weight files.
        folder: the directory that gets ``models/starship`` and ``starship.toml``.
    """
    tensors = {
        key: tensor
        for path in sorted(llama_dir.glob("*.safetensors"))
        for key, tensor in load_file(path).items()
    }
    for gate in [key for key in tensors if key.endswith(".mlp.gate_proj.weight")]:
        layer = gate.removesuffix("gate_proj.weight")
        parts = [tensors.pop(f"{layer}{name}_proj.weight") for name in ("gate", "up")]
        tensors[f"{layer}thrust.weight"] = torch.cat(parts)
    config = json.loads((llama_dir / "config.json").read_text())
    config |= {"model_type": "starship", "architectures": ["StarshipForCausalLM"]}

    model_dir = folder / "models" / "starship"
    model_dir.mkdir(parents=True)
    save_file(tensors, model_dir / "model.safetensors")
    (model_dir / "config.json").write_text(json.dumps(config))
    table = re.search(r"```toml\n(model_type = \"starship\".*?)```", PAGE.read_text("utf-8"), re.S)
    assert table is not None
    (folder / "starship.toml").write_text(table[1])
