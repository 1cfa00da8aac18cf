"""Compare the tensors of a model of an unknown family with its configuration.

* sizes that most configurations contain: vocabulary, hidden size, layers, experts, heads;
* the towers of a composite model, whose names are known (``core.hf.towers.completeness``);
* layers and experts against each other (``core.engine.catalog.sister_layers``);
* an output layer, if the configuration declares it untied from the embedding;
* quantized weights against ``quantization_config``.

Other names are not compared: those of an unknown family are unknown. Of the sizes, only these
contradictions are reported:

* a single token embedding with fewer rows than the vocabulary (more are usual: audio, images,
  padding), or with a width that is nowhere in the configuration;
* a single stack of layers whose number of layers is nowhere in it;
* a number of experts that is the same in every layer, but nowhere in the configuration;
* matrices with usual names (``q_proj``, ``up_proj``) with a number of rows that does not follow
  from any of its numbers of heads and sizes.

The layers of a model with several stacks (encoder and decoder, vision and text) or without a
vocabulary are not checked.

Source: names in transformers 5.23.0 ``models/*/modeling_*.py``, ``models/*/configuration_*.py``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice

from core.arrays.dtypes import dtype_of, is_float8, itemsize
from core.engine.catalog.sister_layers import find_deviations
from core.engine.catalog.tensor import Tensor
from core.hf.proof.problem import Problem
from core.hf.proof.quantization import QuantizationScheme, is_sign, scheme_of
from core.hf.towers.completeness import find_missing_hf_tensors
from core.hf.values import read_architecture
from core.pickle.fields import find_size, mapping_or_empty
from core.values import dataclass

_MOST_MISSING = 1000
"""Maximum number of missing tensors to list: a damaged configuration may describe any number."""
_WITH_OUTPUT = ("ForCausalLM", "LMHeadModel")
_OUTPUT = re.compile(r"(^|.*\.)(lm_head|output|embed_out|head|output_layer|output_projection)\..*")
_EMBEDDING = re.compile(
    r"(?:.*\.)?(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)\.weight"
)
_LAYER = re.compile(r"((?:[^.]+\.)*?(?:layers|h|blocks|layer))\.(\d{1,6})\.")
_VOCABULARY = ("vocab_size", "n_vocab")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_EXPERTS = (
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
)
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
_INNER_PROJECTION = re.compile(
    r"(.*\.layers?)\.\d{1,6}\.(?:(?:mlp\.)?(fc1)|intermediate\.(dense))\.weight"
)
_MOST_SIZES = 32
"""Maximum number of different sizes of one kind; with more, their combinations are not compared."""
_MOST_NAMED = 6
_COUNTS_LAYERS = re.compile(r".*(layer|depth|block|mtp|nextn).*", re.IGNORECASE)


def find_problems(
    tensors: Mapping[str, Tensor], config: Mapping[str, object], *, has_own_file: bool
) -> Iterator[Problem]:
    """Yield the contradictions between tensors and configuration, and between layers of the model.

    Args:
        tensors: tensors of the checkpoint, by name.
        config: parsed ``config.json``; one without a ``model_type`` (of other software) is not
            compared.
        has_own_file: a separate file declares how the weights are quantized.
    """
    if not isinstance(config.get("model_type"), str):
        return
    text = config.get("text_config")
    scheme = scheme_of(config) or (scheme_of(text) if isinstance(text, Mapping) else None)
    # Matrices that may contain quantized numbers. Vectors of integers are usually buffers.
    narrow = [
        tensor
        for tensor in tensors.values()
        if len(tensor.shape) > 1
        and (is_float8(tensor.dtype) or dtype_of(tensor.dtype).kind != "float")
    ]
    yield from find_size_problems(tensors, config)
    yield from _check_output_layer(tensors, config)
    yield from _check_quantization(tensors, scheme, narrow, has_own_file=has_own_file)
    is_quantized = scheme is not None or has_own_file or bool(narrow)
    missing: list[str] = []
    if not is_quantized:
        missing += islice(find_missing_hf_tensors(tensors.keys(), config), _MOST_MISSING)
    for name in missing:
        yield Problem(
            kind="missing",
            message="the tensor is missing",
            key=name,
            expected="a tensor of the model",
            found="no such tensor",
            is_lack=True,
        )
    for deviation in find_deviations(tensors, config, is_quantized=is_quantized):
        # What the table has named is not repeated, nor is its layer.
        if not any(f"{name}.".startswith(f"{deviation.key}.") for name in missing):
            yield Problem(
                kind="layers" if deviation.is_layer else "sisters",
                message=deviation.message,
                key=deviation.key,
                expected=deviation.expected,
                found=deviation.found,
                is_lack=deviation.is_lack,
            )


def _check_output_layer(
    tensors: Mapping[str, Tensor], config: Mapping[str, object]
) -> Iterator[Problem]:
    """Yield a problem if the configuration requires an output layer that is missing."""
    architecture = read_architecture(config) or ""
    embeddings = embeddings_of(tensors)
    if config.get("tie_word_embeddings") is not False or not architecture.endswith(_WITH_OUTPUT):
        return
    if len(embeddings) != 1 or any(map(_OUTPUT.fullmatch, tensors)):
        return
    # Under whatever name, an output layer has as many rows (or columns) as the embedding.
    ((embedding_key, embedding),) = embeddings.items()
    if not any(
        embedding.shape[0] in tensor.shape
        for key, tensor in tensors.items()
        if key != embedding_key
    ):
        yield Problem(
            kind="ties",
            message="config.json declares untied embeddings, but the output layer is missing",
            key=embedding_key,
            expected="an output layer, or tie_word_embeddings",
            found="neither",
            is_lack=True,
        )


def _check_quantization(
    tensors: Mapping[str, Tensor],
    scheme: QuantizationScheme | None,
    narrow: list[Tensor],
    *,
    has_own_file: bool,
) -> Iterator[Problem]:
    """Yield a problem if configuration and tensors disagree on whether weights are quantized."""
    signs = [key for key in tensors if is_sign(key)]
    if scheme is None and signs and narrow and not has_own_file:
        yield Problem(
            kind="quantization",
            message=f"the checkpoint contains quantized weights ({len(signs):,} tensors), but "
            "config.json has no quantization_config",
            key=signs[0],
            expected="quantization_config",
            found="none",
        )
    if scheme is not None and scheme.is_never_wide and not signs and not narrow:
        yield Problem(
            kind="quantization",
            message=f"config.json declares quantized weights ({scheme.method}), "
            "but none are quantized",
            expected=f"weights quantized with {scheme.method}",
            found="weights that are not quantized",
        )


def embeddings_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the token embeddings."""
    return {key: tensor for key, tensor in tensors.items() if _EMBEDDING.fullmatch(key)}


def find_size_problems(
    tensors: Mapping[str, Tensor], config: Mapping[str, object]
) -> Iterator[Problem]:
    """Yield contradictions between tensors and the sizes in a configuration.

    Args:
        tensors: tensors of the checkpoint, by name.
        config: parsed ``config.json``.
    """
    parts = (config, mapping_or_empty(config.get("text_config")))
    yield from _check_embedding(tensors, config, parts)
    yield from _check_layers(tensors, config, parts)
    yield from _check_experts(tensors, config)
    if find_size(parts, _VOCABULARY) is not None:
        yield from _check_projections(tensors, config)


def _check_embedding(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, object],
    parts: tuple[Mapping[str, object], ...],
) -> Iterator[Problem]:
    """Yield a problem if the only embedding has an extent that is nowhere in the configuration."""
    embeddings = embeddings_of(tensors)
    if len(embeddings) != 1:
        return
    ((key, tensor),) = embeddings.items()
    rows, hidden = find_size(parts, _VOCABULARY), find_size(parts, _HIDDEN)
    # Packed weights have other extents.
    is_wide = dtype_of(tensor.dtype).kind == "float" and itemsize(tensor.dtype) > 1
    if rows is None or hidden is None or len(tensor.shape) != 2 or not is_wide:
        return
    numbers = {number for _, number in _all_numbers(config)}
    if (tensor.shape[0] < rows and tensor.shape[0] not in numbers) or tensor.shape[
        1
    ] not in numbers:
        yield Problem(
            kind="shape",
            message=f"the tensor has shape {tensor.shape}, but config.json implies "
            f"{(rows, hidden)}",
            key=key,
            expected=str((rows, hidden)),
            found=str(tensor.shape),
        )


def _check_layers(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, object],
    parts: tuple[Mapping[str, object], ...],
) -> Iterator[Problem]:
    """Yield a problem if the number of layers in the only stack is nowhere in the configuration."""
    count = None if find_size(parts, _VOCABULARY) is None else find_size(parts, _LAYERS)
    numbers_of: dict[str, set[int]] = {}
    for key in tensors:
        match = _LAYER.match(key)
        if match is not None:
            numbers_of.setdefault(match[1], set()).add(int(match[2]))
    # With several stacks, the number in the configuration may be that of any.
    if count is None or len(numbers_of) != 1:
        return
    ((stack, numbers),) = numbers_of.items()
    # The number must be in the configuration, alone or plus that of draft layers, which may follow.
    last = max(numbers)
    declared = {number for name, number in _all_numbers(config) if _COUNTS_LAYERS.fullmatch(name)}
    if last + 1 not in declared | {count + number for number in declared}:
        yield Problem(
            kind="layers",
            message=f"config.json declares {count} layers, but the checkpoint has tensors for "
            f"{last + 1}",
            key=f"{stack}.{last}",
            expected=f"{count} layers",
            found=f"{last + 1}",
            is_lack=last + 1 < count,
        )


def _check_experts(
    tensors: Mapping[str, Tensor], config: Mapping[str, object]
) -> Iterator[Problem]:
    """Yield problems if the number of experts is not in the configuration, or some are missing."""
    # Count the experts of each layer, stored as single tensors or stacked in one tensor.
    numbers_of: dict[str, set[int]] = {}
    n_stacked: dict[str, int] = {}
    for key, tensor in tensors.items():
        if (match := _EXPERT.match(key)) is not None:
            numbers_of.setdefault(match[1], set()).add(int(match[2]))
        elif (match := _STACKED_EXPERTS.fullmatch(key)) is not None and len(tensor.shape) == 3:
            n_stacked[key] = tensor.shape[0]
    count_of = {prefix: max(numbers) + 1 for prefix, numbers in numbers_of.items()}
    counts = Counter((*count_of.values(), *n_stacked.values()))
    declared = [number for name, number in _all_numbers(config) if name in _EXPERTS]

    # Report gaps in the numbering. If a single layer has fewer experts than the declared number,
    # its last experts are missing.
    if (
        len(counts) == 2
        and min(counts) < max(counts) in declared
        and counts[min(counts)] == 1 < counts[max(counts)]
    ):
        count_of = {prefix: max(counts) for prefix in count_of}
    for prefix, numbers in numbers_of.items():
        n_experts = count_of[prefix]
        if len(numbers) < n_experts:
            missing = next(number for number in range(n_experts) if number not in numbers)
            yield Problem(
                kind="experts",
                message=f"only {len(numbers)} of {n_experts} experts have tensors",
                key=f"{prefix}.{missing}",
                expected=f"{n_experts} experts",
                found=f"{len(numbers)}",
                is_lack=True,
            )

    # Report a number that no setting explains.
    numbers = {number for name, number in _all_numbers(config) if "expert" in name.lower()}
    # Shared experts may be stored with the others.
    possible = numbers | {
        number + shared for number in declared[:_MOST_SIZES] for shared in numbers
    }
    if declared and len(counts) == 1 and max(counts) not in possible:
        last = next(
            (f"{prefix}.{max(counts) - 1}" for prefix in numbers_of), next(iter(n_stacked), None)
        )
        yield Problem(
            kind="experts",
            message=f"config.json declares {declared[0]} experts, but the checkpoint has tensors "
            f"for {max(counts)}",
            key=last,
            expected=f"{declared[0]} experts",
            found=f"{max(counts)}",
            is_lack=max(counts) < declared[0],
        )


@dataclass(frozen=True, slots=True)
class _HeadSizes:
    """The sizes of attention and MLP in a configuration, for any part of the model.

    Args:
        heads, groups: numbers of query heads, and of key heads.
        widths: channels of a head.
        inner: inner channels of an MLP.
    """

    heads: frozenset[int]
    groups: frozenset[int]
    widths: frozenset[int]
    inner: frozenset[int]

    @classmethod
    def of(cls, config: Mapping[str, object]) -> _HeadSizes:
        """Collect the sizes of a configuration."""
        numbers = list(_all_numbers(config))
        # In latent attention, heads have parts of several widths: nothing follows from their
        # number.
        is_latent = any("lora_rank" in name for name, _ in numbers)
        heads = {
            number
            for name, number in numbers
            if _HEADS.fullmatch(name) and number > 0 and not is_latent
        }
        groups = {number for name, number in numbers if _GROUPS.fullmatch(name)}
        inner = {number for name, number in numbers if _INNER.fullmatch(name)}
        return cls(
            frozenset(heads), frozenset(groups), frozenset(_head_widths(config)), frozenset(inner)
        )

    def rows_of(self, name: str, *, may_be_gated: bool) -> set[int]:
        """Return the possible numbers of rows of a projection; empty if they are unknown.

        Args:
            name: last part of the module name, such as ``q_proj``.
            may_be_gated: ``q_proj`` may contain a gate as well.
        """
        if name == "q_proj":
            rows = {n * width for n in self.heads for width in self.widths}
            return rows | {2 * n for n in rows} if may_be_gated else rows
        if name == "qkv_proj":
            if not self.groups:
                return set()
            return {
                (n + 2 * m) * width
                for n in self.heads
                for m in (*self.groups, n)
                for width in self.widths
            }
        if name in ("k_proj", "v_proj"):
            return (
                {n * width for n in self.groups for width in self.widths} if self.heads else set()
            )
        # A gate may be in the same matrix.
        factors = {"gate_up_proj": (2,), "fc1": (1, 2)}.get(name, (1,))
        return {number * factor for number in self.inner for factor in factors}


def _check_projections(
    tensors: Mapping[str, Tensor], config: Mapping[str, object]
) -> Iterator[Problem]:
    """Yield a problem for projections whose number of rows does not follow from the configuration.

    If the number differs between layers, the model has kinds of layers that the configuration may
    not describe; these are not checked.
    """
    sizes = _HeadSizes.of(config)
    if max(len(sizes.heads), len(sizes.groups), len(sizes.widths)) > _MOST_SIZES:
        return
    for name, stack in _projections(tensors, config):
        first_key, first = next(iter(stack.items()))
        # With a gate, q_proj has more rows than the output projection has columns.
        output = tensors.get(first_key.replace("q_proj", "o_proj"))
        may_be_gated = output is None or output.shape[-1:] != first.shape[:1]
        possible = sizes.rows_of(name, may_be_gated=may_be_gated)
        is_uniform = {tensor.shape[0] for tensor in stack.values()} == {first.shape[0]}
        if possible and is_uniform and first.shape[0] not in possible:
            choices = [f"{number:,}" for number in sorted(possible)]
            text = " or ".join([*choices[:_MOST_NAMED], *(["…"] if choices[_MOST_NAMED:] else [])])
            yield Problem(
                kind="shape",
                message=f"the tensor has {first.shape[0]:,} rows in every layer, but config.json "
                f"implies {text}",
                key=first_key,
                expected=f"{text} rows",
                found=str(first.shape),
            )


def _projections(
    tensors: Mapping[str, Tensor], config: Mapping[str, object]
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield (last part of the module name, matrices of all layers) for each stack of layers."""
    # With an encoder of images or audio, names such as fc1 may be its own, with sizes of its own.
    has_one_part = not any(
        isinstance(part, Mapping) and "model_type" in part for part in config.values()
    )
    tensors_of: dict[tuple[str, str], dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _PROJECTION.fullmatch(key)
        if match is None and has_one_part:
            match = _INNER_PROJECTION.fullmatch(key)
        is_wide = (
            len(tensor.shape) == 2
            and dtype_of(tensor.dtype).kind == "float"
            and itemsize(tensor.dtype) > 1
        )
        if match is not None and is_wide:
            tensors_of.setdefault((match[1], match[2] or match[3]), {})[key] = tensor
    for (_, name), stack in tensors_of.items():
        yield name, stack


def _head_widths(config: Mapping[str, object]) -> Iterator[int]:
    """Yield the head widths in all parts of a configuration.

    Without ``head_dim`` they follow from other sizes.
    """
    numbers = [(name, value) for name, value in config.items() if type(value) is int and value > 0]
    yield from (value for name, value in numbers if _HEAD_WIDTH.fullmatch(name))
    if config.get("head_dim") is None:
        heads = [value for name, value in numbers if _HEADS.fullmatch(name)]
        yield from (value // n for name, value in numbers if name in _HIDDEN for n in heads)
    for part in config.values():
        if isinstance(part, Mapping):
            yield from _head_widths(part)


def _all_numbers(value: object, name: str = "") -> Iterator[tuple[str, int]]:
    """Yield (name, number) for every integer of a configuration, at any depth."""
    if type(value) is int:
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _all_numbers(item, str(key))
    elif isinstance(value, list):
        yield name, len(value)  # a list often has an entry for each layer
        for item in value:
            yield from _all_numbers(item, name)
