"""Lets DeepSpeed convert a checkpoint to its universal form, and keeps what it made."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from deepspeed.checkpoint.ds_to_universal import main as convert


def write_truth(folder: str) -> None:
    """Write FOLDER/truth.pt: parameter → file → content, of FOLDER/global_step2."""
    output = Path(folder) / "universal"
    convert(
        Namespace(
            input_folder=f"{folder}/global_step2",
            output_folder=str(output),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=False,
        )
    )
    truth = {
        parameter.name: {path.stem: _content(path) for path in sorted(parameter.glob("*.pt"))}
        for parameter in sorted((output / "zero").iterdir())
        if parameter.is_dir()
    }
    torch.save(truth, f"{folder}/truth.pt")
    rmtree(output)


def _content(path: Path) -> Any:
    """Return a file's content, DeepSpeed's SubparamShape as a dict."""
    content = torch.load(path, weights_only=False)
    if isinstance(content, dict) and "sub_param_shape" in content:
        content["sub_param_shape"] = vars(content["sub_param_shape"])
    return content
