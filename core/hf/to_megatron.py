"""Convert Hugging Face names to the global Megatron form.

Fused tensors are fragments that point into the arrays of their parts; nothing is read or copied.
Every tensor of the source must be used: a name that is not in the family's table is an error, and
so is a missing tensor. The towers of composite models stay beside the text model
(``core.hf.towers``). States of an optimizer are converted like their parameters
(``core.hf.optimizer``).

The result has the fields and facets of ``core.megatron.reshard.from_ranks``: one rank,
``checkpoint_version`` 3.0, a vocabulary without padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.dropped import (
    FILES_BESIDE,
    Dropped,
    dropped_each,
    dropped_together,
    dropped_unlisted,
)
from core.engine.catalog.facets import MegatronModel
from core.engine.catalog.optimizer_keys import is_optimizer_key
from core.engine.quantize.schemes import quantized_weights
from core.errors import MissingShardError, UnknownTensorError, UnsupportedError, UsageError
from core.hf.config_json.config import build_arguments
from core.hf.config_json.hybrid import completed, count_predictions
from core.hf.config_json.origin import choose_config_text
from core.hf.detection import detect_family
from core.hf.family import Family
from core.hf.name_tables import BODY, pairs_of
from core.hf.notes import list_megatron_notes
from core.hf.optimizer.states import carrying_option, named_state_of, states_by_name
from core.hf.optimizer.to_global import NO_STATES, convert_states
from core.hf.tensors.global_tensor import global_tensor
from core.hf.text_model import is_composite
from core.hf.ties import with_embedding
from core.hf.traits import model_of
from core.hf.value_head import NOTE as HEAD_NOTE
from core.hf.value_head import find_value_head
from core.hf.values import ARGUMENT, CONFIG, UNUSED_WEIGHT_HINT
from core.megatron.extras.extra_states import list_extra_states
from core.megatron.model.topology import Topology
from core.pickle.fields import int_or_none
from core.pickle.inert import make_namespace
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore

_ITERATION = 1
"""Iteration of the result: Megatron does not load a checkpoint of iteration 0."""
_EXPERTS_BY_IMPL = {"transformer_engine": "te_grouped", "local": "sequential"}


@dataclass(frozen=True, slots=True)
class OptimizerTarget:
    """The optimizer of Megatron that the optimizer of a Hugging Face model is converted to.

    Args:
        is_distributed: it is the distributed one.
        store: the checkpoint's files, from which the number of steps is read.
    """

    is_distributed: bool
    store: ReadStore


def to_megatron(
    catalog: Catalog,
    config: Mapping[str, object],
    *,
    family: Family | None = None,
    transformer_impl: str | None = None,
    make_vocab_size_divisible_by: int = 128,
    optimizer: OptimizerTarget | None = None,
) -> Catalog:
    """Return the global Megatron form of a model with Hugging Face names.

    Args:
        catalog: flat keys, such as ``model.layers.0.self_attn.q_proj.weight``; states of an
            optimizer such as ``optimizer.state.model.norm.weight.exp_avg``.
        config: parsed ``config.json``.
        family: the model's family; None for the one of its ``model_type``, or else the one whose
            tensors it has (``core.hf.detection``).
        transformer_impl: implementation whose parameter names to use, ``local`` or
            ``transformer_engine``; None for that of the family, which is Transformer Engine unless
            the table of a user's own family states another.
        make_vocab_size_divisible_by: the padded vocabulary is a multiple of this times TP.
        optimizer: how to convert the optimizer; None refuses one.

    Raises:
        UnsupportedError: an unsupported family, quantized weights, a value that Megatron has no
            arguments for, or an optimizer that cannot be converted.
        MissingShardError: a tensor is missing.
        UnknownTensorError: the family has no such tensor.
        CorruptError: shapes, dtypes and configuration contradict each other.
        UsageError: an option has an invalid value.
    """
    if transformer_impl not in (None, *_EXPERTS_BY_IMPL):
        raise UsageError(
            f"transformer_impl is {transformer_impl!r}; expected 'local' or 'transformer_engine'"
        )
    _refuse_quantized(catalog, config)
    text = choose_config_text(config, catalog.documents.get(CONFIG))

    # Choose the family of the text model, towers aside.
    note = separated = None
    if family is None and is_composite(config):
        from core.hf.towers.to_megatron import separate_model

        separated = separate_model(catalog, config)
        catalog, config = separated.text, separated.config
    catalog = with_embedding(catalog, config)
    if family is None:
        family, note = detect_family(catalog.tensors, config)
    head = find_value_head(catalog.tensors, family)
    if head is not None:
        family = head.add_to(family)

    # A model without an optimizer begins training, one with it goes on.
    has_states = optimizer is not None and bool(states_by_name(catalog))
    iteration = (catalog.iteration or _ITERATION) if has_states else _ITERATION

    # Describe the model by training arguments. The number of multi-token prediction layers comes
    # from the tensors, as config.json may declare layers that the files do not contain.
    n_mtp = 0
    if "mtp" in family.allows:
        n_layers = int_or_none(completed(config, family).get("num_hidden_layers")) or 0
        n_mtp = count_predictions(catalog.tensors, config, family, n_layers=n_layers)
    fields = build_arguments(
        config,
        family,
        dtype=_dtype_of(catalog, family),
        transformer_impl=transformer_impl,
        divisible_by=make_vocab_size_divisible_by,
        iteration=iteration,
        n_mtp=n_mtp,
    )
    if head is not None:
        fields["untie_embeddings_and_output_weights"] = True
    n_rows = fields["vocab_size"]
    assert isinstance(n_rows, int)
    model = model_of(fields, n_rows=n_rows, n_tensors=len(catalog.tensors))

    # Convert the tensors. Every tensor of the source must be used or be known to be redundant.
    # One by one, as a damaged configuration may describe more of them than memory can hold.
    tensors = {pair.names[0]: global_tensor(catalog, pair) for pair in pairs_of(family, model)}
    ignored = {
        key for key in catalog.tensors if any(pattern.search(key) for pattern in family.ignored)
    }
    used = {key for tensor in tensors.values() for key in tensor.used} | ignored
    objects, order = list_extra_states(
        tensors, is_local=model.is_local, has_value_head=head is not None
    )

    # Convert the optimizer's states in the same way.
    states, restored = NO_STATES, None
    if optimizer is not None and has_states:
        from core.hf.optimizer.restored import restored_optimizer

        states = convert_states(catalog, pairs_of(family, model), tensors)
        used |= states.used
        restored = restored_optimizer(
            catalog,
            {
                name: (len(tensors[name].tensor.shape), tensors[name].used[0])
                for name in states.params
            },
            names=list(dict.fromkeys(k for n in states.params for k in tensors[n].used)),
            states=states.names,
            dtypes=[tensors[name].tensor.dtype for name in states.params],
            is_distributed=optimizer.is_distributed,
            store=optimizer.store,
        )
        if catalog.iteration is None and restored.n_steps:
            iteration = restored.n_steps  # every iteration is a step of the optimizer
    _refuse_leftover([key for key in catalog.tensors if key not in used], family)

    # Collect the facts that the writer needs and the notes for the user.
    args = make_namespace(
        {
            **fields,
            "iteration": iteration,
            **({} if restored is None else restored.arguments),
            ARGUMENT: text,
        }
    )
    common: dict[object, object] = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": iteration,
    }
    if restored is not None:
        tensors |= states.kept(restored.optimizer)
        common["opt_param_scheduler"] = dict(restored.scheduler)
    facts = MegatronModel(
        vocab_size=n_rows,
        expert_names=_EXPERTS_BY_IMPL["local" if model.is_local else "transformer_engine"],
        order=tuple(order),
    )
    notes = [
        *list_megatron_notes(
            tensors,
            family,
            config,
            fields,
            model,
            is_composite=separated is not None,
            transformer_impl=transformer_impl,
        ),
        *(() if note is None else (note,)),
        *(() if head is None else (HEAD_NOTE,)),
        *(() if restored is None else restored.notes),
    ]

    result = Catalog(
        format=catalog.format,
        version=None,
        tensors={name: item.tensor for name, item in tensors.items()},
        objects=objects,
        iteration=iteration,
        args=args,
        common=common,
        optimizer=None if restored is None else restored.optimizer,
        notes=(*catalog.notes, *notes),
        dropped=_dropped(catalog, ignored, has_optimizer=restored is not None),
        facets={MegatronModel: facts, Topology: Topology()},
    )
    return result if separated is None else separated.joined(result)


def _is_of_states(catalog: Catalog, key: str) -> bool:
    """Return whether an object is a setting of a parameter group, or a state of a parameter."""
    from core.hf.optimizer.groups import PARAM_GROUPS

    return key.startswith(PARAM_GROUPS) or named_state_of(catalog, key) is not None


def _dropped(catalog: Catalog, ignored: Set[str], *, has_optimizer: bool) -> tuple[Dropped, ...]:
    """Return the record of the entries that Megatron checkpoints cannot store.

    Args:
        ignored: tensors that can be computed from the configuration.
    """
    # Settings of the optimizer that is carried are in Megatron's groups, its steps as well.
    keys = [key for key in catalog.objects if not (has_optimizer and _is_of_states(catalog, key))]
    files = [path for path in catalog.files if path != CONFIG]
    settings: tuple[Dropped, ...] = ()
    computed: list[str] = []
    if has_optimizer:
        from core.hf.optimizer.groups import record_other_settings
        from core.hf.optimizer.states import STEP

        settings = record_other_settings(catalog)
        computed = [
            key
            for key in catalog.tensors
            if (state := named_state_of(catalog, key)) is not None and state[1] == STEP
        ]
    return (
        *catalog.dropped,
        *dropped_each(keys, "not stored in Megatron checkpoints"),
        *dropped_together(files, FILES_BESIDE),
        *dropped_each(sorted(ignored), f"follows from {CONFIG}", catalog.tensors),
        *settings,
        *dropped_unlisted(
            {key: catalog.tensors[key] for key in computed}, "stored in other entries"
        ),
    )


def _refuse_quantized(catalog: Catalog, config: Mapping[str, object]) -> None:
    """Raise if a weight is quantized: Megatron would use the stored numbers as weights.

    Raises:
        UnsupportedError: a weight is quantized, or there is a scale; the message names the scheme.
    """
    for weight in quantized_weights(catalog.tensors, config):
        raise UnsupportedError(
            f"the weights are quantized ({weight.scheme.name}), "
            "and Megatron cannot store their scales",
            key=weight.key,
            hint="apply the scales with --dequantize bf16"
            if weight.scheme.dequantize is not None
            else "dequantize the model with the library that quantized it, save it, and "
            "convert that copy",
        )
    # Scales without a quantized weight next to them: the weight is missing or has an unknown
    # scheme.
    for key in catalog.tensors:
        if key.endswith(("_scale_inv", ".weight_scale", ".input_scale")):
            raise UnsupportedError(
                "this is a quantized weight's scale, which Megatron cannot store",
                key=key,
                hint="apply the scales with --dequantize bf16; drop activation scales with "
                "--exclude",
            )


def _dtype_of(catalog: Catalog, family: Family) -> str:
    """Return the dtype of the embedding, which becomes ``params_dtype``."""
    first = family.first[0].hf[0]
    names = (
        first,
        *(body + first.removeprefix(family.body) for body in (*family.bodies[1:], BODY)),
    )
    key = next((name for name in names if name in catalog.tensors), None)
    if key is None:
        raise MissingShardError("the tensor is not in the checkpoint", key=first)
    return catalog.tensors[key].dtype


def _refuse_leftover(keys: Sequence[str], family: Family) -> None:
    """Raise for tensors that the family does not have.

    Raises:
        UnsupportedError: the first tensor is optimizer state.
        UnknownTensorError: it is any other tensor.
    """
    if not keys:
        return
    if is_optimizer_key(keys[0]):
        carrying = carrying_option(keys)
        raise UnsupportedError(
            f"optimizer state under Hugging Face names ({len(keys)} tensors) cannot be converted, "
            "because it belongs to no weight of the model or because this operation does not "
            "support it",
            key=keys[0],
            hint="drop the optimizer with --no-optim"
            + ("" if carrying is None else f", or keep it with {carrying}"),
        )
    suffix = f" (and {len(keys) - 1} more like it)" if len(keys) > 1 else ""
    raise UnknownTensorError(
        f"ckpt's table of {family.model_type} models has no such tensor{suffix}",
        key=keys[0],
        hint=UNUSED_WEIGHT_HINT,
    )
