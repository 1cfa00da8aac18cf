"""Makes ``.nemo`` archives as NeMo makes them: a folder, added to a tar file of Python."""

from __future__ import annotations

import tarfile
from pathlib import Path

import torch


def nemo_archive(folder: Path, state: dict[str, object], *, mode: str = "w:") -> Path:
    """Write ``model.nemo`` with a state dict, a configuration and a tokenizer."""
    source = folder / "nemo"
    source.mkdir(parents=True)
    torch.save(state, source / "model_weights.ckpt")
    (source / "model_config.yaml").write_text("target: nemo.Model\n")
    (source / "0a1b_tokenizer.model").write_bytes(bytes(range(256)) * 9)
    path = folder / "model.nemo"
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        archive.add(source, arcname=".")
    return path
