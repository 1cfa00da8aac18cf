"""The files from which NeMo takes what Megatron-LM's arguments say.

``model_config.yaml`` on disk, as NeMo 1 writes a model of Megatron-core in a ``.nemo`` archive,
here unpacked::

    gpt/
    ├── model_config.yaml    the section ``model`` of the run's configuration, resolved
    ├── model_weights/       torch_dist or zarr; keys begin with ``model.``
    └── 1f3a…_tokenizer.model …

    mcore_gpt: true
    encoder_seq_length: 4096
    num_layers: 32
    activation: fast-swiglu
    normalization: rmsnorm
    bias: false
    …

Fields become those of Megatron-core's ``TransformerConfig``, as NeMo makes them, and then
arguments (``run_config``). Nothing that the file names is imported or called.

Versions: NeMo 1.21 to 2.0 with ``mcore_gpt: true``.

Not supported: models of NeMo's own layers (``mcore_gpt: false``), which are not stored as
torch_dist.

Source: NeMo 2.0 ``collections/nlp/models/language_modeling/{megatron_base_model,
megatron_gpt_model}.py`` (``build_transformer_config``, ``model_provider_func``,
``sharded_state_dict``), ``examples/nlp/language_modeling/conf/megatron_llama_config.yaml``.

``context/model.yaml`` on disk, as ``ModelCheckpoint`` of NeMo 2 writes a checkpoint::

    model--val_loss=2.31-step=9-consumed_samples=80.0-last/
    ├── weights/             torch_dist; keys begin with ``module.``; Lightning's state in common.pt
    └── context/
        ├── model.yaml       the model, as nemo_run's serializer writes it
        ├── io.json          the complete run; never read
        └── nemo_tokenizer/  and files with random names, pickles among them; never opened

    _target_: nemo.collections.llm.gpt.model.llama.LlamaModel
    config:
      _target_: nemo.collections.llm.gpt.model.llama.LlamaConfig
      activation_func: {_call_: false, _target_: torch.nn.functional.silu}
      num_layers: 32
      …

The section ``config`` has the fields of Megatron-core's ``TransformerConfig``, as Megatron-Bridge's
``run_config.yaml`` has (``run_config``). Nothing that the file names is imported or called.

Versions: NeMo 2 up to 8cfedd72 (2025-09).

NeMo sets the parallel sizes later than it writes the file; TP and PP are those that the tensors
show (``core.megatron.extras.saved_sizes``). Lightning's names of entries are not Megatron's: the
model's tensors begin with ``module.``, and the scheduler is in a list
(``core.megatron.extras.schedule``).

Not supported: other parallel sizes (torch_dist loads at any of them); rope scalings other than
those of Llama 3.1; checkpoints of adapters alone, which NeMo writes as directories of peft
(``hf_adapter``).

Source: NeMo 8cfedd72 ``lightning/{ckpt_utils,megatron_parallel}.py``,
``lightning/io/{mixin,pl}.py``, ``collections/llm/gpt/model/{base,llama}.py``; nemo_run 0.11.1
``core/serialization/yaml.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog
from core.errors import CorruptError, UnsupportedError
from core.pickle.inert import Global

if TYPE_CHECKING:
    from core.files.store import ReadStore

MODEL_WEIGHTS = "model_weights"
"""Directory of the torch_dist or zarr checkpoint."""
MODEL_CONFIG = "model_config.yaml"
_RENAMED: Mapping[str, str] = {
    "encoder_seq_length": "seq_length",
    "bias": "add_bias_linear",
    "qkv_bias": "add_qkv_bias",
    "rotary_percentage": "rotary_percent",
    "scale_positional_embedding": "rope_scaling",
}
"""Field of the file → field of Megatron-core's model, where the names differ."""
_DEFAULTS: Mapping[str, object] = {
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "bias_activation_fusion": True,
    "layernorm_epsilon": 1e-5,
    "make_vocab_size_divisible_by": 128,
    "position_embedding_type": "learned_absolute",
    "rotary_base": 10000,
    "rotary_interleaved": False,
    "rotary_percent": 1.0,
    "share_embeddings_and_output_weights": True,
}
"""What NeMo takes for fields that the file leaves out."""
_NORMS = {"layernorm": "LayerNorm", "layernorm1p": "LayerNorm", "rmsnorm": "RMSNorm"}
_ACTIVATIONS = {
    "gelu": "torch.nn.functional.gelu",
    "geglu": "torch.nn.functional.gelu",
    "reglu": "torch.nn.functional.relu",
    "squared-relu": "megatron.core.activations.squared_relu",
    "swiglu": "torch.nn.functional.silu",
}
_TANH_GELU = "megatron.core.activations.fast_gelu"
_PARALLEL_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
)


def with_nemo_config(catalog: Catalog, store: ReadStore) -> Catalog:
    """Take the training arguments from ``model_config.yaml``, if there is one and no others.

    A file that cannot be used is noted: the tensors do not depend on it.

    Args:
        catalog: the checkpoint in ``model_weights``.
        store: the directory of the file.
    """
    from core.formats.mcore.run_config import find_embedding, get_arguments, with_arguments
    from core.megatron.extras.saved_sizes import get_saved_sizes

    if catalog.args is not None or not store.exists(MODEL_CONFIG):
        return catalog
    try:
        fields = get_arguments(_read_model(store))
    except (CorruptError, UnsupportedError) as err:
        note = (
            f"there are no training arguments, because {MODEL_CONFIG} cannot be used: {err.message}"
        )
        return replace(catalog, notes=(*catalog.notes, note))
    fields |= get_saved_sizes(catalog)
    embedding = find_embedding(catalog)
    if embedding is not None:
        fields["params_dtype"] = Global("torch", embedding.dtype)
    note = f"the training arguments were taken from {MODEL_CONFIG} (NeMo 1)"
    common: dict[object, object] = {
        "checkpoint_version": 3.0,
        "iteration": catalog.iteration or 1,
    }
    return with_arguments(catalog, common, fields, note=note)


def _read_model(store: ReadStore) -> dict[str, object]:
    """Return the fields of Megatron-core's model that the file stands for.

    Raises:
        CorruptError: the file is not YAML, or not that of a model.
        UnsupportedError: the model is not one of Megatron-core, or has an unknown activation or
            norm.
    """
    from core.formats.mcore.run_config import read_yaml

    content = {str(name): value for name, value in read_yaml(store, MODEL_CONFIG).items()}
    # What refers to another field, or is missing (???), is no value.
    stated = {
        _RENAMED.get(name, name): value
        for name, value in content.items()
        if not (isinstance(value, str) and ("${" in value or value == "???"))
    }
    sizes = [stated.get(name) for name in ("num_layers", "hidden_size", "num_attention_heads")]
    if not all(type(size) is int and size > 0 for size in sizes):
        raise CorruptError(
            "num_layers, hidden_size or num_attention_heads is missing or not a positive integer",
            file=MODEL_CONFIG,
        )
    if stated.get("mcore_gpt") is False:
        raise UnsupportedError("mcore_gpt is false, so the model has NeMo's own layers")
    model = {**_DEFAULTS, **stated}
    _, hidden, heads = sizes
    assert isinstance(hidden, int) and isinstance(heads, int)
    defaults = {"ffn_hidden_size": 4 * hidden, "kv_channels": hidden // heads}
    model |= {name: size for name, size in defaults.items() if model.get(name) is None}
    for name in _PARALLEL_SIZES:
        model.setdefault(name, 1)

    norm = str(stated.get("normalization", "layernorm")).lower()
    if norm == "layernorm1p":
        model["layernorm_zero_centered_gamma"] = True
    activation = str(stated.get("activation", "gelu")).removeprefix("fast-")
    for name, value, table in (
        ("normalization", norm, _NORMS),
        ("activation", activation, _ACTIVATIONS),
    ):
        if value not in table:
            raise UnsupportedError(f"the {name} {value[:80]!r} is not one of {', '.join(table)}")
    model["normalization"] = _NORMS[norm]
    model["gated_linear_unit"] = activation.endswith("glu")
    # The GELU by tanh takes precedence over the function of any activation.
    function = _TANH_GELU if stated.get("openai_gelu") is True else _ACTIVATIONS[activation]
    model["activation_func"] = {"_target_": function}
    has_engine = stated.get("transformer_engine") is True
    model["transformer_impl"] = "transformer_engine" if has_engine else "local"
    return model


WEIGHTS = "weights"
"""Directory of the torch_dist checkpoint."""
MODEL_YAML = "context/model.yaml"
_CONFIG = "config"
_ROPE = {"low_freq_factor": 1, "high_freq_factor": 4, "old_context_len": 8192}
"""Numbers that ``--use-rope-scaling`` of Megatron-LM stands for; only the factor is an argument."""


def has_weights_below(store: ReadStore) -> bool:
    """Return whether a directory is a checkpoint of NeMo 2."""
    return any(store.exists(f"{WEIGHTS}/{name}") for name in ("metadata.json", ".metadata"))


def with_nemo_context(catalog: Catalog, store: ReadStore) -> Catalog:
    """Take the training arguments from ``context/model.yaml``, if there is one and no others.

    A file that cannot be used is noted: the tensors do not depend on it.

    Args:
        catalog: the torch_dist checkpoint in ``weights``.
        store: the directory above.
    """
    from core.formats.mcore.run_config import get_arguments, read_yaml, with_arguments
    from core.megatron.extras.saved_sizes import get_saved_sizes

    if catalog.args is not None or not store.exists(MODEL_YAML):
        return catalog
    # Lightning's state takes the place of Megatron's.
    common = catalog.common or {}
    step = common.get("global_step")
    if catalog.iteration is None and type(step) is int:
        catalog = replace(catalog, iteration=step, common={**common, "iteration": step})
    try:
        model = read_yaml(store, MODEL_YAML, allows_aliases=True).get(_CONFIG)
        if not isinstance(model, dict) or not model:
            raise CorruptError(
                "the file has no config section, so NeMo did not write it", file=MODEL_YAML
            )
        fields = get_arguments({str(name): value for name, value in model.items()})
        fields |= _rope_of(fields)
    except (CorruptError, UnsupportedError) as err:
        note = (
            f"there are no training arguments, because {MODEL_YAML} cannot be used: {err.message}"
        )
        return replace(catalog, notes=(*catalog.notes, note))
    fields |= {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        **get_saved_sizes(catalog),
    }
    note = f"the training arguments were taken from {MODEL_YAML} (NeMo 2)"
    return with_arguments(catalog, {"checkpoint_version": 3.0}, fields, note=note)


def _rope_of(fields: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments of a rope that is scaled as that of Llama 3.1; {} for any other model.

    Raises:
        UnsupportedError: Megatron-LM's arguments cannot express the scaling.
    """
    factor = fields.get("scale_factor")
    if factor is None:
        return {}
    for name, number in _ROPE.items():
        if fields.get(name, number) != number:
            raise UnsupportedError(
                f"{name} is {fields[name]}, but Megatron-LM's arguments allow only {number}"
            )
    return {"use_rope_scaling": True, "rope_scaling_factor": factor}
