"""``context/model.yaml``, from which NeMo 2 takes what Megatron-LM's arguments say.

On disk, as ``ModelCheckpoint`` of NeMo 2 writes a checkpoint::

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

from core.catalog.catalog import Catalog
from core.errors import CorruptError, UnsupportedError

if TYPE_CHECKING:
    from core.files.store import ReadStore

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
    from core.formats.mcore.run_config import arguments_of, read_yaml, with_arguments
    from core.megatron.extras.saved_sizes import read_saved_sizes

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
            raise CorruptError("it has no section config, so it is not NeMo's", file=MODEL_YAML)
        fields = arguments_of({str(name): value for name, value in model.items()})
        fields |= _rope_of(fields)
    except (CorruptError, UnsupportedError) as err:
        note = f"no training arguments: {MODEL_YAML} cannot be used: {err.message}"
        return replace(catalog, notes=(*catalog.notes, note))
    fields |= {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        **read_saved_sizes(catalog),
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
                f"{name} is {fields[name]}, and Megatron-LM's arguments only express {number}"
            )
    return {"use_rope_scaling": True, "rope_scaling_factor": factor}
