"""Derive the names and shapes of the tensors that transformers stores for a ``config.json``.

::

    config.json ── _derive_model ─▶ Model ── pairs_of (hf/tables) ─▶ Expected: names, shape, stack

The same tables map names to Megatron's, so every accepted name can be converted. Unlike
``core.hf.config_json``, this module accepts features that Megatron cannot express (sliding
windows, rotary scaling), as they change neither names nor shapes.

Source: transformers 5.23.0 ``models/*/modeling_*.py``; its defaults for missing values are
``[defaults]`` of the tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field

from core.arrays.box import Shape
from core.hf.config_json.config import count_query_groups, stated_blocks
from core.hf.config_json.experts import dense_layers, has_experts, shared_size
from core.hf.config_json.hybrid import PATTERN, PREDICTION, completed
from core.hf.family import Family, find_family
from core.hf.name_tables import BODY, pairs_of
from core.hf.settings import indexer_types
from core.hf.traits import (
    FEATURES,
    Model,
    hybrid_features,
    indexer_sizes,
    kinds_of,
    linear_sizes,
    mamba_sizes,
)
from core.hf.values import count_of, number_of, read_architecture
from core.values import dataclass

_HEADS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "ForSequenceClassification": {"score.weight": ("labels", "hidden_size")},
    "ForTokenClassification": {
        "score.weight": ("labels", "hidden_size"),
        "score.bias": ("labels",),
    },
    "ForQuestionAnswering": {
        "qa_outputs.weight": ("ends", "hidden_size"),
        "qa_outputs.bias": ("ends",),
    },
}
"""End of a class name → tensors of its head and their shapes, the same in every family
(``modeling_layers.py``). ``ends`` are the start and end of an answer."""


@dataclass(frozen=True, slots=True)
class Expected:
    """A tensor that a model should have.

    Args:
        names: name that transformers writes, then others that it reads.
        shape: extents in elements.
        stack: name and shape of a tensor that may contain those of all experts instead; None if
            there is no such tensor.
        is_optional: it may be missing because it equals another tensor.
    """

    names: tuple[str, ...]
    shape: Shape
    stack: tuple[str, Shape] | None = None
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Described:
    """The model class that a configuration describes.

    Args:
        family: family of the model.
        has_head: the model is the family's language model; otherwise it is the body with ``head``.
        head: tensor name → named sizes of another head, an entry of ``_HEADS``.
    """

    family: Family
    has_head: bool
    head: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def find_model_class(config: Mapping[str, object]) -> Described | None:
    """Return the model class that a configuration names; None if its tensor names are unknown.

    A model may have another head (a classifier) or none. Other classes use their own names, such as
    a draft model for speculative decoding whose model type is ``llama``.
    """
    family = find_family(config.get("model_type"))
    if family is None:
        return None
    # A configuration without a class describes at least the body.
    architecture = read_architecture(config)
    stem = family.architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    if architecture is None or architecture == f"{stem}Model":
        return Described(family, has_head=False)
    head = next(
        (
            head
            for name, head in _HEADS.items()
            if architecture == stem + name
            or (architecture in family.classifiers and architecture.endswith(name))
        ),
        None,
    )
    if head is not None and family.body != BODY:
        # Models from before transformers 4.40 call the head of a tagger otherwise.
        old = "classifier." if architecture == f"{stem}ForTokenClassification" else "score."
        head = {name.replace("score.", old): shape for name, shape in head.items()}
    elif head is not None and config.get("token_classification_bias") is False:
        head = {name: shape for name, shape in head.items() if name != "score.bias"}
    if head is not None:
        return Described(family, has_head=False, head=head)
    return Described(family, has_head=True) if architecture == family.architecture else None


def count_labels(config: Mapping[str, object]) -> int:
    """Return the number of labels of a classifier.

    transformers assumes two if the configuration names none.

    Raises:
        CorruptError: it is not a positive number.
    """
    names = config.get("id2label")
    if isinstance(names, Mapping) and names:
        return len(names)
    return count_of(config, "num_labels", default=2)


def expected_head(config: Mapping[str, object], model: Described) -> tuple[Expected, ...]:
    """Return the tensors of a head other than the language model's.

    Raises:
        CorruptError: the configuration lacks a size.
    """
    sizes = {
        "labels": count_labels(config),
        "ends": 2,
        "hidden_size": count_of(config, "hidden_size"),
    }
    return tuple(
        Expected((name,), tuple(sizes[size] for size in shape))
        for name, shape in model.head.items()
    )


def unchecked_text(config: Mapping[str, object]) -> str | None:
    """Describe what cannot be compared with a configuration.

    Returns:
        None if the names of the model are known.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or find_model_class(config) is not None:
        return None
    name = read_architecture(config) or f"a {model_type} model"
    return (
        f"the tensor names of {name[:80]}, because there is no table for them; only the sizes in "
        "config.json were compared, and the layers with each other"
    )


def declares_tie(config: Mapping[str, object], family: Family) -> bool:
    """Return whether the configuration ties the output layer to the input embedding."""
    return bool({**family.defaults, **config}.get("tie_word_embeddings", False))


def stated_experts(config: Mapping[str, object], family: Family) -> int:
    """Return the number of experts per layer; 0 in a model without experts.

    Args:
        config: ``config.json`` with the family's defaults (``core.hf.config_json.hybrid``).

    Raises:
        CorruptError: the configuration does not contain it.
    """
    return number_of(config, family.config["num_experts"]) if has_experts(config, family) else 0


def expected_tensors(
    config: Mapping[str, object],
    family: Family,
    *,
    n_layers: int,
    n_experts: int,
    n_rows_router: int,
    n_mtp: int,
) -> Iterator[Expected]:
    """Yield every tensor of a model, including the head of an untied one.

    The names begin with ``model.``, even if the family has another prefix.

    Args:
        config: parsed ``config.json``.
        family: family of the model.
        n_layers: number of layers to describe, at most as many as the configuration declares.
        n_experts: number of experts per layer to describe.
        n_rows_router: number of experts that a router chooses from.
        n_mtp: number of multi-token prediction layers.

    Raises:
        CorruptError: the configuration lacks a size.
    """
    model = _derive_model(
        config,
        family,
        n_layers=n_layers,
        n_experts=n_experts,
        n_rows_router=n_rows_router,
        n_mtp=n_mtp,
    )
    for pair in pairs_of(family, model):
        if pair.packed is not None:
            # One tensor for all experts, described with the first of them.
            if pair.packed.number == 0:
                yield Expected((pair.packed.key,), pair.packed.tensor_shape(pair.shape))
            continue
        stack = None if pair.stack is None else (pair.stack[0], (pair.stack[2], *pair.shape))
        if pair.entry is not None:
            if pair.entry[0] == 0:
                for tensor in pair.tensors:
                    yield Expected(tensor.names, (pair.entry[1], *tensor.shape))
            continue
        for tensor in pair.tensors:
            names = dict.fromkeys(
                (BODY + name.removeprefix(family.body) if name.startswith(family.body) else name)
                for name in tensor.names
            )
            yield Expected(tuple(names), tensor.shape, stack)
        for name in (*pair.copies, *pair.twins):
            yield Expected((name,), pair.shape, is_optional=True)


def _derive_model(
    config: Mapping[str, object],
    family: Family,
    *,
    n_layers: int,
    n_experts: int,
    n_rows_router: int,
    n_mtp: int,
) -> Model:
    """Derive the sizes and traits of the model that a configuration describes.

    Args: see ``expected_tensors``.

    Raises:
        CorruptError: the configuration lacks a size.
    """
    # Sizes of every family. Missing optional values have transformers' defaults.
    config = completed(config, family)
    heads = number_of(config, family.config.get("num_attention_heads", ("num_attention_heads",)))
    hidden = count_of(config, "hidden_size")
    groups = count_query_groups(config, family, n_heads=heads)
    head = max(hidden // heads, 1)
    if family.config.get("kv_channels") != ():
        head = count_of(config, "head_dim", default=head)
    # A hybrid model may have no MLP; Megatron wants a size all the same.
    ffn_names = family.config.get("ffn_hidden_size", ("intermediate_size",))
    default_ffn = 4 * hidden if PATTERN in family.settings else None
    sizes = {
        "one": 1,
        "vocab": count_of(config, "vocab_size"),
        "hidden": hidden,
        "hidden2": 2 * hidden,
        "ffn": number_of(config, ffn_names, default=default_ffn),
        "heads": heads,
        "head": head,
        "q": heads * head,
        "kv": groups * head,
        "qkv": (heads + 2 * groups) * head,
    }
    if "learned" in family.rope:
        sizes["positions"] = number_of(config, family.config["max_position_embeddings"])
    # Traits decide which tensors exist; some features bring sizes of their own.
    traits = set(family.requires) | {"tied" if declares_tie(config, family) else "untied"}
    has_bias = "linear_bias" in family.requires
    traits |= {name for name in ("attention_bias", "mlp_bias") if has_bias or config.get(name)}
    traits |= {
        feature for feature, arg in FEATURES.items() if config.get(family.switches.get(arg, ""))
    }
    if "latent" in family.requires:
        kv_lora, rotated = count_of(config, "kv_lora_rank"), count_of(config, "qk_rope_head_dim")
        plain, value = count_of(config, "qk_nope_head_dim"), count_of(config, "v_head_dim")
        sizes |= {
            "o": heads * value,
            "q_b": heads * (plain + rotated),
            "kv_lora": kv_lora,
            "kv_a": kv_lora + rotated,
            "kv_b": heads * (plain + value),
        }
        if config.get("q_lora_rank") is None:
            traits.add("no_q_lora")
        else:
            traits.add("q_lora")
            sizes["q_lora"] = count_of(config, "q_lora_rank")
    if "sparse" in family.requires:
        sizes |= indexer_sizes(
            heads=count_of(config, "index_n_heads"), head_dim=count_of(config, "index_head_dim")
        )
    kinds = kinds_of(str(config[PATTERN]))[:n_layers] if PATTERN in family.settings else None
    if kinds is not None:
        traits |= hybrid_features(kinds)
    if kinds is not None or "parallel_mamba" in family.requires:
        names = family.config
        sizes |= mamba_sizes(
            heads=number_of(config, names["mamba_num_heads"]),
            head_dim=number_of(config, names["mamba_head_dim"]),
            groups=number_of(config, names["mamba_num_groups"]),
            state=number_of(config, names["mamba_state_dim"]),
        )
    prediction = None
    if kinds is not None and n_mtp:
        prediction = kinds_of(str(config[PREDICTION]))
    has_moe = has_experts(config, family)
    if has_moe:
        latent = config.get("moe_latent_size")
        traits |= set() if latent is None else {"moe_latent"}
        sizes |= {
            "experts": n_rows_router,
            "moe_in": hidden if latent is None else count_of(config, "moe_latent_size"),
            "moe_ffn": number_of(config, family.config["moe_ffn_hidden_size"]),
            "moe_ffn2": 2 * number_of(config, family.config["moe_ffn_hidden_size"]),
        }
        if "shared_expert" in (*family.requires, *family.allows, *family.experts.requires):
            shared = shared_size(config, family)
            sizes |= {"shared_ffn": shared} if shared else {}
            traits |= {"shared_expert"} if shared else set()
    linear = None
    if "linear_attention" in family.requires:
        sizes |= linear_sizes(config)
        # A pattern of another length than the number of layers is not this comparison's problem.
        types = config.get("layer_types")
        if isinstance(types, list) and len(types) >= n_layers:
            linear = frozenset(n for n in range(n_layers) if types[n] == "linear_attention")
        else:
            from core.megatron.model.args import linear_layers

            every = family.settings["linear_attention_freq"].every
            interval = count_of(config, "full_attention_interval", default=every)
            linear = linear_layers({"linear_attention_freq": interval}, n_layers)
    window = None
    if "head_gate" in family.requires:
        from core.hf.config_json.per_layer import per_layer_arguments
        from core.megatron.model.blocks import window_layers_of

        n_all = count_of(config, "num_hidden_layers")
        window = window_layers_of({**per_layer_arguments(config), "num_layers": n_all})
        if window is not None:
            sizes |= {"window_heads": window.n_heads, "window_q": window.n_heads * head}
    unindexed: frozenset[int] = frozenset()
    if (indexers := family.settings.get("dsa_indexer_topk_freq")) is not None:
        types = indexer_types(config, n_layers, name=indexers.name)
        unindexed = frozenset(n for n in range(n_layers) if types[n] == "shared")
    return Model(
        n_layers=n_layers,
        n_mtp=n_mtp,
        n_experts=n_experts,
        n_groups=groups,
        dense=dense_layers(config, family, n_layers=n_layers) if has_moe else None,
        sizes=sizes,
        features=frozenset(),
        traits=frozenset(traits - {"moe"}),
        is_local=True,
        kinds=kinds,
        prediction=prediction,
        linear=linear,
        window=None if window is None else window.layers,
        unindexed=unindexed,
        blocks=stated_blocks(config, family) if "blocks" in family.requires else None,
    )
