"""Convert the global form of Megatron's adapters to a directory of peft.

``adapter_config.json`` is the text that came with the adapter, or describes what the run that
trained it recorded (``core.formats.mcore.run_config``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.dropped import ADAPTER_CONFIG, Dropped, dropped_each
from core.engine.catalog.facets import HuggingFaceModel, WeightFileFacts
from core.engine.catalog.key_patterns import natural_order
from core.engine.catalog.optimizer_keys import NOT_IN_HF
from core.engine.catalog.tensor import Tensor
from core.errors import CorruptError, MissingShardError, UnsupportedError, list_some
from core.hf.adapters.linear import (
    ADAPTER,
    CANONICAL,
    LINEAR_IN,
    LINEAR_OUT,
    MAX_LAYERS,
    WEIGHT,
    adapted_pairs,
    linear_layers_of,
    module_of,
)
from core.hf.adapters.peft import PREFIX, check_config, parse_config
from core.hf.choice import choose_family
from core.hf.config_json.origin import origin_of, parse_origin
from core.hf.family import Family
from core.hf.name_tables import Pair
from core.hf.tensors.fuse import take_apart
from core.hf.tensors.hf_tensor import weights_in
from core.hf.traits import model_of
from core.hf.values import CONFIG
from core.megatron.extras.common_state import get_common_state
from core.megatron.model.args import ADAPTER_ARGUMENT, fields_of

_STEM = "adapter_model"
_TARGETS, _TRANSPOSED = "target_modules", "fan_in_fan_out"


def adapter_to_peft(
    catalog: Catalog,
    *,
    model_type: str | None = None,
    family: Family | None = None,
    config: bytes | None = None,
) -> Catalog:
    """Return an adapter under peft's names, with its ``adapter_config.json``.

    Args:
        catalog: the global form of Megatron's adapters.
        model_type: the family of the base model; None for the one that the arguments describe.
        family: the family, in place of ``model_type``.
        config: content of the base model's ``config.json``, or None.

    Raises:
        UnsupportedError: the base model belongs to no known family, a layer has no counterpart, or
            the run recorded no alpha.
        MissingShardError: one of two matrices is missing.
        CorruptError: shapes and arguments contradict each other.
    """
    # Find the family of the base model by its arguments.
    fields = fields_of(catalog.args)
    n_rows = fields.get("vocab_size") or fields.get("padded_vocab_size")
    model = model_of(fields, n_rows=n_rows if isinstance(n_rows, int) else 1, n_tensors=MAX_LAYERS)
    origin = (
        origin_of(fields) if config is None else parse_origin(config, file=CONFIG, is_passed=True)
    )
    family = choose_family(
        fields,
        model.features,
        requested=family or model_type,
        origin=origin,
    )

    # Take the adapters apart, layer by layer; none may be left over.
    weights = weights_in(catalog)
    recorded = fields.get(ADAPTER_ARGUMENT)
    if not isinstance(recorded, str):
        raise UnsupportedError(
            "the checkpoint does not record the alpha of its adapters",
            hint="copy run_config.yaml, in which Megatron-Bridge records alpha, next to the "
            "weights",
        )
    text = recorded.encode()
    check_config(parse_config(text))
    rank = parse_config(text)["r"]
    tensors: dict[str, Tensor] = {}
    used: set[str] = set()
    modules: set[str] = set()
    orientations: set[bool] = set()
    for pair in adapted_pairs(family, model):
        for key, name, part in _adapters_of(pair, weights):
            meta = weights[key]
            n_rows = linear_layers_of(pair)[part].shape[0]
            expected = (rank, pair.shape[1]) if key.endswith(LINEAR_IN) else (n_rows, rank)
            is_fused = key.endswith(ADAPTER + LINEAR_OUT)
            stored = (pair.shape[0], rank) if is_fused else expected
            if meta.shape != stored:
                raise CorruptError(
                    f"the tensor has shape {meta.shape}, but the training arguments and the "
                    f"adapter's configuration imply {stored}",
                    key=key,
                )
            used.add(key)
            orientations.add(pair.is_transposed)
            modules.add(module_of(pair.tensors[part].names[0]))
            tensor = catalog.tensors[key]
            tensors[name] = (
                take_apart(pair.strips, part, tensor, (n_rows, meta.shape[1]))
                if is_fused
                else tensor
            )
    unused = weights.keys() - used
    if unused:
        raise UnsupportedError(
            f"{family.model_type} models in transformers cannot have these adapters: "
            f"{list_some(unused)}",
            key=min(unused),
            hint="ckpt does not convert adapters of experts, embeddings and output layers; drop "
            "them with --exclude",
        )

    if len(orientations) > 1:
        raise UnsupportedError(
            f"{family.model_type} models store some of the adapted weights transposed and others "
            f"not, and {_TRANSPOSED} in {ADAPTER_CONFIG} has a single value for all of them"
        )

    states = [entry for entry in catalog.dropped if entry.is_listed and entry.is_of_optimizer]
    dropped = [entry for entry in catalog.dropped if entry not in states]
    if states:
        of_states = tuple(tensor for entry in states for tensor in entry.tensors)
        dropped.append(Dropped(("optimizer",), NOT_IN_HF, tensors=of_states))
    objects = [key for key in catalog.objects if "_extra_state" not in key]
    names = dict.fromkeys((*objects, *map(str, get_common_state(catalog))))
    return Catalog(
        format=catalog.format,
        version=None,
        tensors={name: tensors[name] for name in sorted(tensors, key=natural_order)},
        files={ADAPTER_CONFIG: _completed(text, modules, is_transposed=True in orientations)},
        notes=catalog.notes,
        dropped=(*dropped, *dropped_each(names, "not stored in PEFT adapters")),
        facets={
            HuggingFaceModel: HuggingFaceModel(family.model_type),
            WeightFileFacts: WeightFileFacts(_STEM),
        },
    )


def _adapters_of(pair: Pair, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, str, int]]:
    """Yield the adapters of a layer.

    Args:
        pair: the layer's weight.
        weights: all tensors of the checkpoint.

    Yields:
        Key of the tensor, peft's name, and number of the part in ``pair.tensors``.

    Raises:
        MissingShardError: one of two matrices is missing.
    """
    for name in pair.names:
        start = name.removesuffix(WEIGHT) + ADAPTER
        for number, tensor in enumerate(pair.tensors):
            module = PREFIX + tensor.names[0].removesuffix(WEIGHT)
            canonical = CANONICAL.get(module_of(tensor.names[0]))
            for inner in ("", *(() if canonical is None else (f"{canonical}.",))):
                keys = {
                    f"{start}{inner}{LINEAR_IN}": f"{module}.lora_A.weight",
                    f"{start}{inner}{LINEAR_OUT}": f"{module}.lora_B.weight",
                }
                present = [key for key in keys if key in weights]
                if len(present) == 1:
                    raise MissingShardError(
                        "this adapter's other matrix is not in the checkpoint", key=present[0]
                    )
                yield from ((key, keys[key], number) for key in present)


def _completed(text: bytes, modules: set[str], *, is_transposed: bool) -> bytes:
    """Return the configuration with what it lacks, or states otherwise, about the adapted weights.

    Args:
        text: content of ``adapter_config.json``.
        modules: names of the adapted modules.
        is_transposed: the base stores their weights as (in, out).
    """
    config = parse_config(text)
    changes: dict[str, object] = {}
    if _TARGETS not in config:
        changes[_TARGETS] = sorted(modules)
    if bool(config.get(_TRANSPOSED)) != is_transposed:
        changes[_TRANSPOSED] = is_transposed
    return json.dumps({**config, **changes}, indent=2).encode() if changes else text
