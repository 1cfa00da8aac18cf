"""``run_config.yaml``, from which Megatron-Bridge takes what Megatron-LM's arguments say.

On disk, in the directory of an iteration, as ``yaml.safe_dump`` writes it::

    checkpoint: {…}
    model:
      _target_: megatron.bridge.models.gpt_provider.GPTModelProvider
      activation_func: {_call_: false, _target_: torch.nn.functional.silu}
      gated_linear_unit: true
      hidden_size: 4096
      tensor_model_parallel_size: 8
      …

Numbers, strings and lists of the section ``model`` become training arguments; some have another
name there, or follow from several fields. Objects (initializers, layer specifications, enums) say
nothing about a layout and are left out. Of the section ``peft``, which checkpoints of adapters
have, rank and alpha become an argument (``core.megatron.model.args.ADAPTER_ARGUMENT``).

Versions: Megatron-Bridge 067f987d (2026-08), with the model providers of that version. The sections
on the optimizer and the training are not read, nor is ``train_state.pt``.

Not supported: aliases and merge keys of YAML, which such a file does not need.

Source: a checkpoint that Megatron-Bridge 067f987d wrote on a CPU, whose run_config.yaml is in
tests/golden; Megatron-LM d98e8a64 ``training/arguments.py`` for the names of the arguments.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.dropped import Dropped
from core.engine.catalog.tensor import Tensor
from core.errors import CorruptError, UnsupportedError
from core.pickle.fields import mapping_or_empty, text_or_none
from core.pickle.inert import Global, make_namespace

if TYPE_CHECKING:
    from core.files.store import ReadStore

RUN_CONFIG = "run_config.yaml"
_MODEL, _PEFT = "model", "peft"
_MAX_BYTES = 1 << 20
_MAX_DEPTH = 50
_EMBEDDING = "embedding.word_embeddings.weight"
_FUSED_NORM, _FUSED = ".mlp.linear_fc1.layer_norm_weight", ".mlp.linear_fc1.weight"
"""The norm before an MLP, and a weight that only layers without experts have.

The local specification stores every norm under that name, also those before experts.
"""

_LORA = ("LoRA", "VLMLoRA", "CanonicalLoRA", "DoRA")
"""Classes of the section ``peft`` that peft knows as LoRA."""
_WINDOWS = "sliding_attention_setting"
"""Field with the sizes of layers with a window; the only mapping among the fields."""
_RENAMED: Mapping[str, str] = {
    "num_moe_experts": "num_experts",
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "rope_scaling": "use_rope_scaling",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}
"""Field of the model → training argument, where the names differ."""


def with_run_config(catalog: Catalog, store: ReadStore) -> Catalog:
    """Take the training arguments from ``run_config.yaml``, if there is one and no others.

    A file that cannot be used is noted: the tensors do not depend on it.
    """
    if catalog.args is not None or not store.exists(RUN_CONFIG):
        return catalog
    try:
        content = {
            str(section): {str(name): value for name, value in fields.items()}
            for section, fields in read_yaml(store, RUN_CONFIG).items()
            if section in (_MODEL, _PEFT) and isinstance(fields, dict)
        }
        if not content.get(_MODEL):
            raise CorruptError(
                "the file has no model section, so Megatron-Bridge did not write it",
                file=RUN_CONFIG,
            )
        fields = get_arguments(content[_MODEL])
        fields |= _adapter_of(content.get(_PEFT), base=content[_MODEL].get("hf_model_id"))
    except (CorruptError, UnsupportedError) as err:
        note = (
            f"there are no training arguments, because {RUN_CONFIG} cannot be used: {err.message}"
        )
        return replace(catalog, notes=(*catalog.notes, note))
    note = f"the training arguments were taken from {RUN_CONFIG} (Megatron-Bridge)"
    catalog = with_arguments(catalog, {}, fields, note=note)
    return replace(
        catalog,
        dropped=(
            *catalog.dropped,
            Dropped((RUN_CONFIG,), "its model section was used as the training arguments"),
        ),
    )


def find_embedding(catalog: Catalog) -> Tensor | None:
    """Return the word embeddings of a Megatron model, whatever the prefix of their name."""
    return next(
        (tensor for key, tensor in catalog.tensors.items() if key.endswith(_EMBEDDING)), None
    )


def with_arguments(
    catalog: Catalog, common: Mapping[object, object], fields: Mapping[str, object], *, note: str
) -> Catalog:
    """Return a catalog with training arguments.

    Args:
        catalog: the checkpoint.
        common: further entries of the common state, if it does not have them.
        fields: the arguments, from ``get_arguments``; those that the tensors tell are added.
        note: where they come from.
    """
    # The rows of the embedding tell how the vocabulary was padded; the file says only to what.
    derived: dict[str, object] = {}
    embedding = find_embedding(catalog)
    if embedding is not None and embedding.shape:
        derived["padded_vocab_size"] = embedding.shape[0]
    if _has_local_norms(catalog.tensors):
        derived["transformer_impl"] = "local"
    args = make_namespace({**fields, **derived})
    return replace(
        catalog,
        args=args,
        common={**common, **(catalog.common or {}), "args": args},
        notes=(*catalog.notes, note),
    )


def _has_local_norms(names: Iterable[str]) -> bool:
    """Return whether layers with experts have the norm of Megatron's local specification.

    The provider states an implementation that its layer specification need not have.
    """
    present = set(names)
    return any(
        name.endswith(_FUSED_NORM) and name.removesuffix(_FUSED_NORM) + _FUSED not in present
        for name in present
    )


def read_yaml(
    store: ReadStore, file: str, *, allows_aliases: bool = False
) -> Mapping[object, object]:
    """Return the mapping in a YAML file of plain values, {} if it contains another value.

    Args:
        store, file: the file.
        allows_aliases: values may be repeated by an alias: the caller looks at values of a fixed
            depth, as a small file may stand for a huge tree.

    Raises:
        CorruptError: the file is not YAML.
        UnsupportedError: the file uses aliases or merge keys, or is too large.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    size = store.size(file)
    if size > _MAX_BYTES:
        raise UnsupportedError(
            f"the file is {size:,} bytes long; the limit is {_MAX_BYTES:,}", file=file
        )
    data = bytes(store.read(file, 0, size))
    try:
        # Look at the events first: the loader recurses (libyaml's crashes on deep nesting), and
        # aliases and merge keys let a small file stand for a huge one.
        depth = 0
        for event in yaml.parse(data, Loader=loader):
            is_alias = isinstance(event, yaml.AliasEvent) and not allows_aliases
            if is_alias or (isinstance(event, yaml.ScalarEvent) and event.value == "<<"):
                raise UnsupportedError("YAML aliases and merge keys are not supported", file=file)
            depth += isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent))
            depth -= isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent))
            if depth > _MAX_DEPTH:
                raise UnsupportedError(
                    f"values are nested more than {_MAX_DEPTH} levels deep", file=file
                )
        content = yaml.load(data, Loader=loader)
    # Numbers and dates out of range are ValueErrors.
    except (yaml.YAMLError, ValueError, OverflowError) as err:
        raise CorruptError(
            f"the file is not valid YAML: {' '.join(str(err).split())[:200]}", file=file
        ) from err
    return content if isinstance(content, dict) else {}


def _adapter_of(peft: Mapping[str, object] | None, *, base: object) -> dict[str, object]:
    """Return the argument for the configuration of adapters, {} if they are none of LoRA.

    Args:
        peft: the section.
        base: the Hugging Face name of the base model, if it is known.
    """
    from core.megatron.model.args import ADAPTER_ARGUMENT

    if peft is None:
        return {}
    kind = (_target_of(peft) or "").rpartition(".")[2]
    rank, alpha = peft.get("dim"), peft.get("alpha")
    numbers = (rank, alpha, peft.get("dropout", 0.0))
    if kind not in _LORA or any(type(number) not in (int, float) for number in numbers):
        return {}
    config = {
        "base_model_name_or_path": text_or_none(base) or "",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": alpha,
        "lora_dropout": numbers[2],
        "peft_type": "LORA",
        "r": rank,
        "task_type": "CAUSAL_LM",
        "use_dora": kind == "DoRA",
    }
    return {ADAPTER_ARGUMENT: json.dumps(config)}


def get_arguments(model: Mapping[str, object]) -> dict[str, object]:
    """Return the training arguments that the fields of a model provider stand for."""
    fields: dict[str, object] = {}
    for name, value in model.items():
        items = value if isinstance(value, list) else [value]
        if all(item is None or isinstance(item, (bool, int, float, str)) for item in items):
            fields[_RENAMED.get(name, name)] = value
    if isinstance(model.get(_WINDOWS), dict):
        fields[_WINDOWS] = model[_WINDOWS]

    # Arguments that are told by a function, a dtype or the absence of a number.
    activation = _target_of(model.get("activation_func"))
    is_gated = bool(model.get("gated_linear_unit"))
    fields["swiglu"] = is_gated and activation == "torch.nn.functional.silu"
    fields["quick_geglu"] = is_gated and (activation or "").endswith(".quick_gelu")
    if is_gated and activation in _OTHER_GATES:
        fields["glu_activation"] = _OTHER_GATES[activation]
    fields["squared_relu"] = not is_gated and (activation or "").endswith(".squared_relu")
    if not is_gated and activation == "torch.nn.functional.gelu":
        fields["bias_gelu_fusion"] = bool(model.get("bias_activation_fusion"))
    fields["untie_embeddings_and_output_weights"] = not model.get(
        "share_embeddings_and_output_weights", True
    )
    fields["group_query_attention"] = model.get("num_query_groups") not in (
        None,
        model.get("num_attention_heads"),
    )
    dtype = (_target_of(model.get("params_dtype")) or "").removeprefix("torch.")
    if dtype:
        fields["params_dtype"] = Global("torch", dtype)
    fields.setdefault("max_position_embeddings", model.get("seq_length"))
    return fields


_OTHER_GATES = {"torch.nn.functional.gelu": "geglu", "torch.nn.functional.relu": "reglu"}
"""Activation of a gate → its name in the argument of forks; Megatron itself has no argument."""


def _target_of(value: object) -> str | None:
    """Return the dotted name of a function or a dtype, as the file writes it."""
    return text_or_none(mapping_or_empty(value).get("_target_"))
