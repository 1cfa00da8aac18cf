"""Sizes that most configurations state: vocabulary, hidden size, layers, experts, heads, channels of an MLP.

For families whose names are not known. Only what is certain counts: one embedding of tokens with fewer rows than the
vocabulary (more are usual: audio, images, padding) or a width that the configuration names nowhere; one stack of layers
of which there is another number than any that it states, or of which some in the middle are absent; experts of which
there are as many in every layer, but not as many as it states anywhere; and matrices of the usual names (``q_proj``,
``up_proj``) with a number of rows that follows from none of the heads and sizes that it states for any of its parts. A
model with several stacks (encoder and decoder, vision and text) is not judged by its layers, and neither is one without
a vocabulary.

Source: names in transformers 5.23.0 ``models/*/modeling_*.py``, ``models/*/configuration_*.py``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from core.arrays.dtypes import dtype_of, itemsize
from core.catalog.catalog import TensorMeta
from core.hf.proof.problem import Problem

_EMBEDDING = re.compile(r"(?:.*\.)?(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)\.weight")
_LAYER = re.compile(r"((?:[^.]+\.)*?(?:layers|h|blocks|layer))\.(\d{1,6})\.")
_VOCABULARY = ("vocab_size", "n_vocab")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
_EXPERT = re.compile(r"(.*\.experts)\.(\d{1,6})\.")
_STACKED_EXPERTS = re.compile(r".*\.experts\.\w+")
_HEADS = re.compile(r".*(num_heads|attention_heads|n_heads?)")
_GROUPS = re.compile(r".*(key_value_heads|kv_heads)")
_HEAD_WIDTH = re.compile(r".*(head_dim|head_size|d_kv|kv_channels)")
_INNER = re.compile(r".*(intermediate|ffn|mlp|inner).*")
_PROJECTION = re.compile(
    r"((?:model\.)?language_model\.(?:model\.)?layers|(?:model\.)?layers)\.\d{1,6}\."
    r"(?:self_attn\.([qkv]_proj|qkv_proj)|mlp\.(gate_proj|up_proj|gate_up_proj))\.weight"
)
_INNER_PROJECTION = re.compile(r"(.*\.layers?)\.\d{1,6}\.(?:(?:mlp\.)?(fc1)|intermediate\.(dense))\.weight")
_MOST_SIZES = 32
"""Different sizes of one kind; of more, what follows from each with each is not compared."""
_MOST_NAMED = 6
_COUNTS_LAYERS = re.compile(r".*(layer|depth|block|mtp|nextn).*", re.IGNORECASE)


def embeddings_of(tensors: Mapping[str, TensorMeta]) -> list[TensorMeta]:
    """Return the embeddings of tokens."""
    return [meta for key, meta in tensors.items() if _EMBEDDING.fullmatch(key)]


def contradictions(tensors: Mapping[str, TensorMeta], config: Mapping[str, object]) -> Iterator[Problem]:
    """Yield what contradicts the sizes that the configuration of a model of transformers states.

    Args:
        tensors: the tensors of the checkpoint, by key.
        config: the parsed ``config.json``.
    """
    text = config.get("text_config")
    parts = (config, text if isinstance(text, Mapping) else {})
    yield from _of_embedding(tensors, config, parts)
    yield from _of_layers(tensors, config, parts)
    yield from _of_experts(tensors, config)
    if _stated(parts, _VOCABULARY) is not None:
        yield from _of_projections(tensors, config)


def _of_embedding(
    tensors: Mapping[str, TensorMeta], config: Mapping[str, object], parts: tuple[Mapping[str, object], ...]
) -> Iterator[Problem]:
    """Yield a problem if the one embedding has an extent that the configuration does not state anywhere."""
    embeddings = embeddings_of(tensors)
    if len(embeddings) != 1:
        return
    (meta,) = embeddings
    rows, hidden = _stated(parts, _VOCABULARY), _stated(parts, _HIDDEN)
    is_wide = dtype_of(meta.dtype).kind == "float" and itemsize(meta.dtype) > 1  # packed ones have other extents
    if rows is None or hidden is None or len(meta.shape) != 2 or not is_wide:
        return
    numbers = {number for _, number in _numbers(config)}
    if (meta.shape[0] < rows and meta.shape[0] not in numbers) or meta.shape[1] not in numbers:
        yield Problem(
            kind="shape",
            message=f"shape {meta.shape}, but config.json makes it {(rows, hidden)} (elements)",
            key=meta.key,
            expected=str((rows, hidden)),
            found=str(meta.shape),
        )


def _of_layers(
    tensors: Mapping[str, TensorMeta], config: Mapping[str, object], parts: tuple[Mapping[str, object], ...]
) -> Iterator[Problem]:
    """Yield a problem if the one stack has a number of layers that the configuration does not state anywhere."""
    count = None if _stated(parts, _VOCABULARY) is None else _stated(parts, _LAYERS)
    numbers_of: dict[str, set[int]] = {}
    for key in tensors:
        match = _LAYER.match(key)
        if match is not None:
            numbers_of.setdefault(match[1], set()).add(int(match[2]))
    if count is None or len(numbers_of) != 1:
        return
    ((stack, numbers),) = numbers_of.items()
    last = max(numbers)
    stated = {number for name, number in _numbers(config) if _COUNTS_LAYERS.fullmatch(name)}
    if last + 1 not in stated | {count + number for number in stated}:  # behind the others may lie those for drafts
        yield Problem(
            kind="layers",
            message=f"config.json says {count} layers, there are tensors of {last + 1}",
            key=f"{stack}.{last}",
            expected=f"{count} layers",
            found=f"{last + 1}",
            is_lack=last + 1 < count,
        )
    elif len(numbers) < last + 1:
        absent = next(number for number in range(last) if number not in numbers)
        yield Problem(
            kind="layers",
            message=f"of {last + 1} layers, there are tensors of {len(numbers)}",
            key=f"{stack}.{absent}",
            expected=f"{last + 1} layers",
            found=f"{len(numbers)}",
            is_lack=True,
        )


def _of_experts(tensors: Mapping[str, TensorMeta], config: Mapping[str, object]) -> Iterator[Problem]:
    """Yield a problem if all layers have as many experts and the configuration states another number, or for one layer
    that lacks some that the others have.
    """
    numbers_of: dict[str, set[int]] = {}
    n_stacked: dict[str, int] = {}
    for key, meta in tensors.items():
        if (match := _EXPERT.match(key)) is not None:
            numbers_of.setdefault(match[1], set()).add(int(match[2]))
        elif (match := _STACKED_EXPERTS.fullmatch(key)) is not None and len(meta.shape) == 3:
            n_stacked[key] = meta.shape[0]
    count_of = {prefix: max(numbers) + 1 for prefix, numbers in numbers_of.items()}
    counts = Counter((*count_of.values(), *n_stacked.values()))
    stated = [number for name, number in _numbers(config) if name in _EXPERTS]
    if len(counts) == 2 and min(counts) < max(counts) in stated and counts[min(counts)] == 1 < counts[max(counts)]:
        count_of = {prefix: max(counts) for prefix in count_of}  # the last ones of one layer are absent
    for prefix, numbers in numbers_of.items():
        if len(numbers) < count_of[prefix]:
            yield Problem(
                kind="experts",
                message=f"of {count_of[prefix]} experts, there are tensors of {len(numbers)}",
                key=f"{prefix}.{next(number for number in range(count_of[prefix]) if number not in numbers)}",
                expected=f"{count_of[prefix]} experts",
                found=f"{len(numbers)}",
                is_lack=True,
            )
    others = {number for name, number in _numbers(config) if "expert" in name.lower()}
    others |= {number + other for number in stated[:_MOST_SIZES] for other in others}  # shared ones may be among them
    if stated and len(counts) == 1 and max(counts) not in others:
        yield Problem(
            kind="experts",
            message=f"config.json says {stated[0]} experts, there are tensors of {max(counts)}",
            key=next((f"{prefix}.{max(counts) - 1}" for prefix in numbers_of), next(iter(n_stacked), None)),
            expected=f"{stated[0]} experts",
            found=f"{max(counts)}",
            is_lack=max(counts) < stated[0],
        )


def _of_projections(tensors: Mapping[str, TensorMeta], config: Mapping[str, object]) -> Iterator[Problem]:
    """Yield a problem for matrices of a usual name if all layers have rows that follow from nothing that is stated.

    Layers with others than their sisters have kinds of which the configuration may say nothing.
    """
    # what is stated
    numbers = list(_numbers(config))
    is_latent = any("lora_rank" in name for name, _ in numbers)  # heads have parts of several widths
    heads = {number for name, number in numbers if _HEADS.fullmatch(name) and number > 0 and not is_latent}
    groups = {number for name, number in numbers if _GROUPS.fullmatch(name)}
    widths = set(_head_widths(config))
    if max(len(heads), len(groups), len(widths)) > _MOST_SIZES:
        return
    rows_of_groups = {n * width for n in groups for width in widths if heads}
    rows_of_mlp = {number for name, number in numbers if _INNER.fullmatch(name)}
    # the matrices of each stack, by name
    has_one_part = not any(isinstance(part, Mapping) and "model_type" in part for part in config.values())
    metas_of: dict[tuple[str, str], list[TensorMeta]] = {}
    for meta in tensors.values():
        match = _PROJECTION.fullmatch(meta.key) or (has_one_part and _INNER_PROJECTION.fullmatch(meta.key)) or None
        is_wide = len(meta.shape) == 2 and dtype_of(meta.dtype).kind == "float" and itemsize(meta.dtype) > 1
        if match is not None and is_wide:
            metas_of.setdefault((match[1], match[2] or match[3]), []).append(meta)
    # their rows
    for (_, name), metas in metas_of.items():
        first = metas[0]
        if name == "q_proj":
            output = tensors.get(first.key.replace("q_proj", "o_proj"))
            is_plain = output is not None and output.shape[-1:] == first.shape[:1]  # otherwise there is a gate as well
            stated = {n * width * times for n in heads for width in widths for times in ((1,) if is_plain else (1, 2))}
        elif name == "qkv_proj":
            stated = {(n + 2 * m) * width for n in heads for m in (*groups, n) for width in widths if groups}
        elif name in ("k_proj", "v_proj"):
            stated = rows_of_groups
        else:
            times = {"gate_up_proj": (2,), "fc1": (1, 2)}.get(name, (1,))  # a gate may lie in the same matrix
            stated = {number * n for number in rows_of_mlp for n in times}
        if stated and {meta.shape[0] for meta in metas} == {first.shape[0]} and first.shape[0] not in stated:
            some = [f"{number:,}" for number in sorted(stated)]
            text = " or ".join([*some[:_MOST_NAMED], *(["…"] if some[_MOST_NAMED:] else [])])
            yield Problem(
                kind="shape",
                message=f"{first.shape[0]:,} rows in every layer, but config.json makes it {text}",
                key=first.key,
                expected=f"{text} rows",
                found=str(first.shape),
            )


def _head_widths(config: Mapping[str, object]) -> Iterator[int]:
    """Yield the widths of heads of all parts of a model; without a ``head_dim``, one follows from others."""
    numbers = [(name, value) for name, value in config.items() if type(value) is int and value > 0]
    yield from (value for name, value in numbers if _HEAD_WIDTH.fullmatch(name))
    if config.get("head_dim") is None:
        heads = [value for name, value in numbers if _HEADS.fullmatch(name)]
        yield from (value // n for name, value in numbers if name in _HIDDEN for n in heads)
    for part in config.values():
        if isinstance(part, Mapping):
            yield from _head_widths(part)


def _stated(parts: tuple[Mapping[str, object], ...], names: tuple[str, ...]) -> int | None:
    """Return the first positive number that is stated under one of the names."""
    values = (part.get(name) for part in parts for name in names)
    return next((value for value in values if type(value) is int and value > 0), None)


def _numbers(value: object, name: str = "") -> Iterator[tuple[str, int]]:
    """Yield every integer of a configuration, at any depth, and the name it stands under."""
    if type(value) is int:
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(item, str(key))
    elif isinstance(value, list):
        yield name, len(value)  # a list says something of each layer
        for item in value:
            yield from _numbers(item, name)
