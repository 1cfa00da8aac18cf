"""Adapters that Megatron-Bridge wrote (``tests/golden/README.md``)."""

from __future__ import annotations

from pathlib import Path

from tests.support.archives import unpacked

FORMS = ("lora", "canonical")


def unpack_adapters(folder: Path) -> Path:
    """Unpack the archive.

    Returns:
        The directory with the base model ``hf`` and, for each of ``FORMS``, ``FORM`` (torch_dist of
        the adapter at TP 2, PP 2), ``FORM_peft`` (Bridge's export), ``FORM_merged`` (Bridge's
        export of the merged weights) and ``FORM_ranks`` (each rank's parameters).
    """
    return unpacked("megatron_lora", folder)
