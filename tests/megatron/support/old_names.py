"""Rank files of megatron.legacy, made of those that megatron-core saved: other names, nested dicts,
older row orders.

A script of its own: it works on loaded tensors and shares no code with the rules.
"""

from __future__ import annotations

import argparse
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support.rank_files import MODEL_FILE, load_rank_file, rank_dirs

NEW = {
    r"^embedding\.": "language_model.embedding.",
    r"^(?:decoder|encoder)\.layers\.": "language_model.encoder.layers.",
    r"^(?:decoder|encoder)\.final_layernorm": "language_model.encoder.final_norm",
    r"input_layernorm": "input_norm",
    r"pre_mlp_layernorm": "post_attention_norm",
    r"self_attention\.linear_qkv": "self_attention.query_key_value",
    r"self_attention\.linear_proj": "self_attention.dense",
    r"mlp\.experts\.local_experts": "mlp.local_experts",
    r"linear_fc1": "dense_h_to_4h",
    r"linear_fc2": "dense_4h_to_h",
}
"""As the last releases of megatron.legacy named GPT models; without heads."""
OLD = {
    **NEW,
    r"^decoder\.layers\.": "language_model.transformer.layers.",
    r"^decoder\.final_layernorm": "language_model.transformer.final_layernorm",
    r"input_layernorm": "input_layernorm",
    r"pre_mlp_layernorm": "post_attention_layernorm",
    r"self_attention\.linear_qkv": "attention.query_key_value",
    r"self_attention\.linear_proj": "attention.dense",
}
"""As the first ones did."""
TIED = {r"^output_layer\.weight": "word_embeddings_for_head.weight"}
UNTIED = {r"^output_layer\.": "language_model.output_layer."}
BERT = {
    **NEW,
    **TIED,
    r"^lm_head\.layer_norm": "lm_head.norm",
    r"^output_layer\.bias": "lm_head.bias",
    r"^pooler\.": "language_model.pooler.",
}
T5 = {
    **NEW,
    r"^decoder\.layers\.": "language_model.decoder.layers.",
    r"^decoder\.final_layernorm": "language_model.decoder.final_norm",
    r"(?<=decoder\.layers\.\d\.)pre_cross_attn_layernorm": "post_attention_norm",
    r"(?<=decoder\.layers\.\d\.)pre_mlp_layernorm": "post_inter_attention_norm",
    r"cross_attention\.linear_q\.": "inter_attention.query.",
    r"cross_attention\.linear_kv": "inter_attention.key_value",
    r"cross_attention\.linear_proj": "inter_attention.dense",
    r"^lm_head\.output_layer\.bias": "lm_head.bias",
    r"^(?:output_layer|position_embeddings)\..*": "",
}
DICTS = tuple(
    """
    language_model language_model.embedding language_model.embedding.word_embeddings
    language_model.embedding.position_embeddings
    language_model.embedding.tokentype_embeddings language_model.encoder
    language_model.transformer language_model.decoder language_model.pooler
    language_model.output_layer lm_head binary_head word_embeddings_for_head
    """.split()
)
PLAIN = ("language_model", "language_model.embedding")
"""Those of them that are no OrderedDict."""


def renamed(name: str, names: Mapping[str, str]) -> str:
    """A name of megatron-core's as megatron.legacy has it; empty for what it does not have."""
    new_name = name
    for pattern, new in reversed(names.items()):
        new_name, n = re.subn(pattern, new, new_name)
        if pattern.startswith(("^", r"(?<=decoder")) and n and not new:
            return ""
    return new_name


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict in the dicts of megatron.legacy, with what torch notes about the modules of
    each.
    """
    root: dict[str, Any] = {}
    for name, value in flat.items():
        into, start = root, ""
        parts = name.split(".")
        for n in range(1, len(parts)):
            path = ".".join(parts[:n])
            if path in DICTS:
                key = path.removeprefix(start)
                into = into.setdefault(key, {} if path in PLAIN else OrderedDict())
                start = path + "."
        into[name.removeprefix(start)] = value
    _note(root)
    return root


def _note(container: dict[str, Any]) -> None:
    """Gives every OrderedDict the notes that ``Module.state_dict`` makes: the version of every
    module in it.
    """
    for value in container.values():
        if isinstance(value, dict):
            _note(value)
    if isinstance(container, OrderedDict):
        modules = {"": {"version": 1}}
        for name in container:
            parts = name.split(".")[:-1]
            modules |= {".".join(parts[: n + 1]): {"version": 1} for n in range(len(parts))}
        container._metadata = OrderedDict(modules)  # type: ignore[attr-defined]


def old_order(
    version: float, *, heads: int, channels: int
) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """A function that gives a rank's fused tensors the rows that an old version had.

    Args:
        heads: of the rank.
    """

    def reordered(name: str, tensor: torch.Tensor) -> torch.Tensor:
        match = re.search(r"\.(query_)?key_value\.(weight|bias)$", name)
        if match is None or version >= 2:
            return tensor
        rows = tensor.view(heads, 3 if match[1] else 2, channels, *tensor.shape[1:])
        return (rows.transpose(0, 1) if version == 0 else rows.transpose(1, 2)).reshape(
            tensor.shape
        )

    return reordered


def rewrite(
    source: Path,
    target: Path,
    names: Mapping[str, str],
    *,
    version: float | None = 3.0,
    change: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, tensor: tensor,
    more_args: Mapping[str, object] | None = None,
    keep: tuple[str, ...] = (),
) -> None:
    """Writes a root of rank files under old names.

    Args:
        source, target: roots.
        version: the checkpoint_version; None leaves it out.
        change: (new name, tensor) → the tensor to save.
        more_args: arguments to set.
        keep: other entries to keep.
    """
    target.mkdir(parents=True, exist_ok=True)
    (target / "latest_checkpointed_iteration.txt").write_text("10")
    for folder, path in rank_dirs(source).items():
        loaded = load_rank_file(path / MODEL_FILE)
        plain = {name: value for name, value in vars(loaded["args"]).items() if _is_plain(value)}
        root: dict[str, Any] = {
            "args": argparse.Namespace(**{**plain, **(more_args or {})}),
            "iteration": 10,
        }
        if version is not None:
            root["checkpoint_version"] = version
        for chunk in (name for name in loaded if name.startswith("model")):
            flat = {
                renamed(name, names): value
                for name, value in loaded[chunk].items()
                if "_extra_state" not in name
            }
            flat.pop("", None)
            last = [name for name in flat if name.startswith("word_embeddings_for_head")]
            flat |= {name: flat.pop(name) for name in last}
            root[chunk] = nested({name: change(name, value) for name, value in flat.items()})
        root |= {name: loaded[name] for name in keep}
        out = target / "iter_0000010" / folder
        out.mkdir(parents=True)
        torch.save(root, out / MODEL_FILE)


def _is_plain(value: object) -> bool:
    return (
        value is None
        or isinstance(value, (int, float, str, bool))
        or (isinstance(value, list) and not value)
    )


def assert_same_nested(found_root: Path, wanted_root: Path) -> None:
    """Every rank file holds the same nested model, in the same order, with the same bits, types and
    versions.
    """
    our_dirs, wanted = rank_dirs(found_root), rank_dirs(wanted_root)
    assert list(our_dirs) == list(wanted)
    for folder in wanted:
        ours, theirs = (
            load_rank_file(our_dirs[folder] / MODEL_FILE),
            load_rank_file(wanted[folder] / MODEL_FILE),
        )
        chunks = [name for name in theirs if name.startswith("model")]
        assert [name for name in ours if name.startswith("model")] == chunks
        for chunk in chunks:
            _same(ours[chunk], theirs[chunk], f"{folder} {chunk}")


def _same(ours: Any, theirs: Any, where: str) -> None:
    if isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype, where
        assert torch.equal(ours, theirs), where
        return
    assert type(ours) is type(theirs), where
    assert list(ours) == list(theirs), where
    for name in theirs:
        _same(ours[name], theirs[name], f"{where}.{name}")
    if isinstance(theirs, OrderedDict):
        assert sorted(ours._metadata) == sorted(theirs._metadata), where
