"""Checkpoints of other software that ckpt does not read: how they are recognised, and what to do.

A directory is recognised by its names alone, before the formats are asked: files of several ranks
would otherwise be taken for one model, or for several. A file is recognised by its name, or by its
first bytes if no format has recognised it.

Source: the software's own writers, at the versions named in each row (August to November 2026).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field

from core.errors import UnsupportedError
from core.files.source_store import SourceStore
from core.values import dataclass

_HEAD_BYTES = 16


@dataclass(frozen=True, slots=True)
class OtherSoftware:
    """A kind of checkpoint that is named, but not read.

    Args:
        title: what it is, a noun with its article.
        hint: what the user can do; None for the list of formats that are read.
        names: folder ("" for the directory itself) → expressions; each must match the whole name of
            a file in it, or of a subfolder with a slash after it.
        at_least: minimum number of names that the first expression matches.
        without: expression that no name in the directory may match.
        file: expression that is found in the name of a single file, or in the names of a
            directory that no format recognises.
        head: expression that the first bytes of a single file match.
        before_formats: a format would take a file of that name for its own.
    """

    title: str
    hint: str | None = None
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    at_least: int = 1
    without: str | None = None
    file: str | None = None
    head: bytes | None = None
    before_formats: bool = False


_JOIN_NEURON = (
    "merge its shards with neuronx_distributed.scripts.checkpoint_converter --convert_to_full_state"
)

OTHER_SOFTWARE = (
    # Directories.
    OtherSoftware(
        "a vLLM or SGLang sharded_state checkpoint, whose tensors are split and fused for its "
        "ranks",
        "convert the original model instead, or load the checkpoint with --load-format "
        "sharded_state",
        # vLLM model_executor/model_loader/sharded_state_loader.py
        {"": (r"model-rank-\d+-part-\d+\.safetensors",)},
    ),
    OtherSoftware(
        "a TensorRT-LLM checkpoint, whose tensors are split and fused for its ranks",
        "convert the original model instead",
        # TensorRT-LLM examples/*/convert_checkpoint.py
        {"": (r"rank\d+\.safetensors", r"config\.json")},
        at_least=2,
    ),
    OtherSoftware(
        "a TensorRT-LLM engine, which is compiled for one kind of GPU",
        "convert the original model instead",
        {"": (r"rank\d+\.engine",)},
    ),
    OtherSoftware(
        "a torch_checkpointing checkpoint in safetensors files",
        "load it with torch_checkpointing, and save it as .pt files (the default), which ckpt "
        "reads",
        # torch_checkpointing 0.1 distributed_metadata.py, checkpoint_layout.py
        {"": (r".+_\d+\.safetensors", r"metadata\.pkl")},
    ),
    OtherSoftware(
        "a checkpoint from Meta's Llama code that is split for model parallelism "
        "(consolidated.00.pth …)",
        "merge its files with transformers: "
        "python -m transformers.models.llama.convert_llama_weights_to_hf",
        {"": (r"consolidated\.\d\d\.pth",)},
        at_least=2,
        without=r"(model|pytorch_model)\b.*\.(safetensors|bin)",
    ),
    OtherSoftware(
        "a nanotron checkpoint, which has one file for each parameter and rank",
        "convert it with nanotron's examples/llama/convert_nanotron_to_hf.py",
        # nanotron 0.4 constants.py, serialize/utils.py
        {"": (r"checkpoint_metadata\.json", r"model/")},
    ),
    OtherSoftware(
        "an AWS Neuron checkpoint (neuronx-distributed), which is split for its ranks",
        _JOIN_NEURON,
        # neuronx-distributed trainer/checkpoint.py
        {"model": (r"dp_rank_\d+(_ep_rank_\d+)?_tp_rank_\d+_pp_rank_\d+(\.pt)?(\.tensors/)?",)},
    ),
    OtherSoftware(
        "the model of an AWS Neuron checkpoint (neuronx-distributed), which is split for its ranks",
        _JOIN_NEURON,
        {
            "": (
                r"(dp_rank_\d+(_ep_rank_\d+)?_)?tp_rank_\d+_pp_rank_\d+(_dp_rank_\d+)?(\.pt)?(\.tensors/)?",
            )
        },
    ),
    OtherSoftware(
        "an OLMo-core checkpoint",
        "convert it with OLMo-core's src/examples/huggingface/convert_checkpoint_to_hf.py",
        # OLMo-core train/checkpoint.py
        {"": (r"model_and_optim/", r"\.metadata\.json")},
    ),
    OtherSoftware(
        "a torchsnapshot snapshot",
        "load it with torchsnapshot.Snapshot.get_state_dict_for_key, and save it with torch.save",
        {"": (r"\.snapshot_metadata",)},
    ),
    # Files, and directories with such files.
    OtherSoftware(
        "a Keras file",
        "load it with keras.saving.load_model, and save the weights with "
        "safetensors.numpy.save_file",
        file=r"\.keras$",
        before_formats=True,
    ),
    OtherSoftware("a Keras file", file=r"\.h5$"),
    OtherSoftware(
        "a PaddlePaddle file",
        "load it with paddle.load, and save it with safetensors.paddle.save_file",
        file=r"\.(pdparams|pdopt|pdmodel|pdiparams)$",
    ),
    OtherSoftware("a GGUF file", file=r"\.gguf$"),
    OtherSoftware("a NeMo archive", file=r"\.nemo$"),
    OtherSoftware("a Flax file", file=r"\.msgpack$"),
    OtherSoftware("an ONNX model", file=r"\.onnx$"),
    OtherSoftware("a NumPy archive", file=r"\.npz$"),
    OtherSoftware("a NumPy array", file=r"\.npy$"),
    OtherSoftware(
        "a TensorFlow checkpoint",
        file=r"(\.data-\d+-of-\d+|\.ckpt(-\d+)?\.(index|meta)|^saved_model\.pb)$",
    ),
    OtherSoftware(
        "a tensorizer file",
        "load it with tensorizer.TensorDeserializer, and save it with safetensors or torch.save",
        head=rb"\|TZR\|",  # tensorizer 2 serialization.py
    ),
    OtherSoftware(
        "a MindSpore checkpoint file",
        "load it with mindspore.load_checkpoint, and save it with "
        'mindspore.save_checkpoint(…, format="safetensors")',
        # A protocol buffer: a value (field 1) that begins with its tag (field 1), a name.
        head=rb"\x0a[\x80-\xff]{0,4}[\x00-\x7f]\x0a[\x01-\x7f][!-~]",
    ),
)
"""The kinds of checkpoints, the first match wins."""


def refuse_other_software(store: SourceStore) -> None:
    """Raise if a directory, or a file by its name, is of software that ckpt does not read.

    Only rows that a format would misunderstand are compared; the others are for what no format
    recognises.

    Raises:
        UnsupportedError: it is.
        StorageError: a directory cannot be listed.
    """
    if store.entry is not None:
        rows = (row for row in OTHER_SOFTWARE if row.before_formats)
        row = next((row for row in rows if re.search(row.file or "$^", store.entry)), None)
    else:
        entries: dict[str, list[str]] = {}

        def count(folder: str, expression: str) -> int:
            if folder and folder not in entries and not count("", f"{folder}/"):
                entries[folder] = []
            if folder not in entries:
                entries[folder] = store.files(folder) + [
                    f"{name}/" for name in store.folders(folder)
                ]
            return sum(re.fullmatch(expression, name) is not None for name in entries[folder])

        row = next(
            (
                row
                for row in OTHER_SOFTWARE
                if row.names
                and (row.without is None or not count("", row.without))
                and all(
                    count(folder, expression) >= (1 if number else row.at_least)
                    for folder, expressions in row.names.items()
                    for number, expression in enumerate(expressions)
                )
            ),
            None,
        )
    if row is not None:
        raise UnsupportedError(f"ckpt cannot read {row.title}", file=store.label, hint=row.hint)


def explain_unrecognised(store: SourceStore, *, known: str) -> UnsupportedError | None:
    """Return the error for a file or directory of other software that no format recognises.

    Args:
        known: the hint for kinds without one of their own.
    """
    names = store.files() if store.entry is None else [store.entry]
    row = next(
        (
            row
            for row in OTHER_SOFTWARE
            if row.file is not None and any(re.search(row.file, name) for name in names)
        ),
        None,
    )
    if row is None and store.entry is not None:
        head = store.read(store.entry, 0, min(store.size(store.entry), _HEAD_BYTES))
        row = next(
            (row for row in OTHER_SOFTWARE if row.head is not None and re.match(row.head, head)),
            None,
        )
    if row is None:
        return None
    return UnsupportedError(
        f"ckpt cannot read {row.title}", file=store.label, hint=row.hint or known
    )
