"""Bring the names of Megatron-FSDP's checkpoints into those of torch_dist without stacks.

``--ckpt-format fsdp_dtensor`` stores global tensors with PyTorch DCP. Their names are those of the
wrapped modules, gated layers are stored in halves, and an optimizer's settings by parameter::

    model.module.decoder.layers.0.mlp.linear_fc1.weight_w       gate rows (F, H), float32
    model.module.decoder.layers.0.mlp.linear_fc1.weight_v       up rows (F, H)
    optimizer.state.module.module.module.decoder.layers.0.mlp.linear_fc1.weight_w.exp_avg
    optimizer.param_to_group_meta.module.module.module.decoder.layers.0.….weight.lr      an object

The same in the form that ``core.megatron.reshard.from_global`` reads::

    model.module.decoder.layers.0.mlp.linear_fc1.weight         (2F, H), as the run computes with it
    optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc1.weight
    optimizer.state.fp32_param.decoder.layers.0.mlp.linear_fc1.weight    the stored weight
    optimizer                                                   an object: kind and groups

The stored weights are the fp32 masters: Megatron-FSDP makes the weights of a bf16 or fp16 run from
them when it loads, and so does this module if the optimizer is carried. Without it the weights stay
as stored.

Experts are numbered over the whole model, whatever the EP size was. The tensors depend on the TP
size only by the padding rows of the vocabulary, and not at all on the number of data parallel
ranks.

Versions: megatron-core 0.14 to HEAD (0.20 dev), the distributed optimizer with Adam.
Source: Megatron-LM d98e8a64 and megatron-core 0.16.1 ``core/optimizer/distrib_optimizer.py``
    (``sharded_param_state_fsdp_dtensor``), ``core/transformer/fsdp_dtensor_checkpoint.py``,
    ``core/distributed/fsdp/mcore_fsdp_adapter.py``; checkpoints that megatron-core 0.16.1 wrote,
    pinned in tests/golden (``megatron_fsdp``). Grouped experts (``experts.linear_fc1.weight0_w``)
    were read in the source: the module needs a GPU.

The extra states of modules are not stored. Those of the local implementation are None, and made
anew; those of Transformer Engine (float8 scales) begin anew.

Not supported: numbers of steps as a tensor of each parameter (torch's Adam in place of Apex's or
Transformer Engine's). ``core.megatron.reshard.to_fsdp_dtensor`` writes this form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from core.engine.catalog.catalog import Catalog, StoredObject
from core.engine.catalog.optimizer_keys import MASTER, STATES, state_key
from core.engine.catalog.tensor import Tensor, concat
from core.errors import CorruptError, MissingShardError, UnsupportedError
from core.megatron.extras.common_state import OPTIMIZER
from core.megatron.model.args import fields_of, replaced
from core.pickle.inert import as_mapping
from core.values import n_text

_GROUPS = "optimizer.param_to_group_meta."
_HALF = re.compile(r"(?P<param>.*\.linear_fc1\.(?:weight|bias)\d*)_(?P<half>[wv])", re.DOTALL)
_LINEAR = re.compile(r"(?P<module>.*\.(?:linear_\w+|eh_proj|(?:in|out)_proj))\.weight", re.DOTALL)
_WRAPPERS = re.compile(r"(?:module\.)+")
_PREFIX = re.compile(r"model\.(?:module\.)*")


def is_fsdp_dtensor(catalog: Catalog) -> bool:
    """Return whether a catalog has the names of Megatron-FSDP's checkpoints."""
    return any(key.startswith(_GROUPS) for key in catalog.objects) or any(
        _HALF.fullmatch(key) for key in catalog.tensors
    )


def from_fsdp_dtensor(catalog: Catalog, *, carries_optimizer: bool = True) -> Catalog:
    """Return a catalog of Megatron-FSDP with the names and shapes of torch_dist.

    Args:
        catalog: any catalog of global tensors with loaded objects; one that does not have the names
            of Megatron-FSDP is returned as it is.
        carries_optimizer: make the masters of the optimizer, and cast the weights to the dtype that
            the run computes with.

    Raises:
        MissingShardError: a gated layer lacks one of its halves.
        CorruptError: the halves of a gated layer do not fit, or the optimizer has a state of a
            parameter that the model does not have.
        UnsupportedError: the optimizer has states other than those of Adam's kind.
    """
    if not is_fsdp_dtensor(catalog):
        return catalog

    # Name the states of the optimizer like the parameters, halves of gated layers included.
    tensors = {
        _state_name(key) if key.startswith(STATES) else key: tensor
        for key, tensor in catalog.tensors.items()
    }
    catalog = _with_extra_states(_join_halves(replace(catalog, tensors=tensors)))
    if not any(key.startswith(_GROUPS) for key in catalog.objects):
        return catalog
    objects = {
        key: item for key, item in catalog.objects.items() if not key.startswith("optimizer.")
    }
    groups = _groups_of(catalog.objects)
    objects[OPTIMIZER] = StoredObject(
        OPTIMIZER, value={"kind": "distributed", "param_groups": groups}
    )
    # Written without Megatron-FSDP, the optimizer has the buffers of Megatron's own DDP.
    args = None if catalog.args is None else replaced(catalog.args, {"use_megatron_fsdp": False})
    catalog = replace(
        catalog, objects=objects, args=args, skeleton=_without_optimizer(catalog.skeleton)
    )
    return _with_masters(catalog) if carries_optimizer else catalog


def _state_name(key: str) -> str:
    """Return the key of a state in the global form.

    Raises:
        UnsupportedError: the state is not known to have its parameter's shape.
    """
    param, _, state = _WRAPPERS.sub("", key.removeprefix(STATES), count=1).rpartition(".")
    if state in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
        return state_key(state, param)
    raise UnsupportedError(
        f"the optimizer state {state!r} is not supported in fsdp_dtensor checkpoints, because only "
        "exp_avg, exp_avg_sq and momentum_buffer are known to have their parameters' shapes",
        key=key,
        hint="drop the optimizer with --no-optim; the stored weights are the master weights, so no "
        "precision is lost",
    )


def _join_halves(catalog: Catalog) -> Catalog:
    """Return a catalog in which the halves of gated layers, and of their states, are one tensor.

    Raises:
        MissingShardError: a half is missing.
        CorruptError: the halves have different shapes or dtypes.
    """
    # Find both halves of every gated layer's parameter.
    tensors: dict[str, Tensor] = {}
    for key, tensor in catalog.tensors.items():
        match = _HALF.fullmatch(key)
        if match is None:
            tensors[key] = tensor
            continue
        param = match["param"]
        other_key = f"{param}_{'v' if match['half'] == 'w' else 'w'}"
        other = catalog.tensors.get(other_key)
        if other is None:
            raise MissingShardError(
                "this half of the gated layer is missing, but the other half is present",
                key=other_key,
            )
        if param in tensors:
            continue
        if (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
            raise CorruptError(
                f"this half is {tensor.dtype} of shape {tensor.shape}, but the other half, "
                f"{other_key}, is {other.dtype} of shape {other.shape}",
                key=key,
            )
        # Gate rows come first.
        tensors[param] = concat([tensor, other] if match["half"] == "w" else [other, tensor])
    return replace(catalog, tensors=tensors)


def _with_extra_states(catalog: Catalog) -> Catalog:
    """Add the extra states of linear modules of the local implementation, which are None.

    Megatron-FSDP leaves all extra states out, and Megatron's loader of torch_dist asks for them.
    Modules of Transformer Engine load without theirs.
    """
    if _arguments(catalog).get("transformer_impl") != "local":
        return catalog
    states = [
        f"{match['module']}._extra_state"
        for key in catalog.tensors
        if not key.startswith(STATES) and (match := _LINEAR.fullmatch(key)) is not None
    ]
    objects = {key: StoredObject(key) for key in states}
    return replace(catalog, objects={**objects, **catalog.objects})


def _arguments(catalog: Catalog) -> Mapping[str, object]:
    """Return the training arguments; {} if there are none."""
    return {} if catalog.args is None else fields_of(catalog.args)


def _groups_of(objects: Mapping[str, StoredObject]) -> list[object]:
    """Return the groups of an optimizer: parameters with the same settings are one group."""
    # The settings of a parameter are single objects, or one that is a dict.
    settings_of: dict[str, dict[str, object]] = {}
    for key, item in objects.items():
        if not key.startswith(_GROUPS):
            continue
        name = _WRAPPERS.sub("", key.removeprefix(_GROUPS), count=1)
        whole = as_mapping(item.value)
        if whole is not None:
            settings_of.setdefault(name, {}).update({str(k): v for k, v in whole.items()})
        else:
            param, _, setting = name.rpartition(".")
            settings_of.setdefault(param, {})[setting] = item.value

    groups: list[tuple[dict[str, object], list[str]]] = []
    for param, settings in settings_of.items():
        for other, params in groups:
            if other == settings:
                params.append(param)
                break
        else:
            groups.append((settings, [param]))
    return [{**settings, "params": params} for settings, params in groups]


def _without_optimizer(skeleton: object) -> object:
    """Return the containers of a checkpoint without those of its optimizer."""
    mapping = as_mapping(skeleton)
    if mapping is None:
        return skeleton
    return {name: value for name, value in mapping.items() if name != OPTIMIZER}


def _with_masters(catalog: Catalog) -> Catalog:
    """Add the stored weights as masters, and cast those of trained parameters.

    Raises:
        CorruptError: a state has no parameter.
    """
    args = _arguments(catalog)
    dtype = "bfloat16" if args.get("bf16") else "float16" if args.get("fp16") else None
    prefix = next(
        (match[0] for key in catalog.tensors if (match := _PREFIX.match(key)) is not None), ""
    )
    tensors = dict(catalog.tensors)
    weights: dict[str, str] = {}
    for key in catalog.tensors:
        if not key.startswith(STATES):
            continue
        name = key.removeprefix(STATES).partition(".")[2]
        weight = f"{prefix}{name}"
        master = state_key(MASTER, name)
        if master in weights:
            continue
        if weight not in catalog.tensors:
            raise CorruptError(
                "the optimizer has state for a parameter that the model does not have", key=key
            )
        weights[master] = weight
        tensor = catalog.tensors[weight]
        tensors[master] = replace(tensor, dtype="float32")
        if dtype is not None:
            tensors[weight] = replace(tensor, dtype=dtype)

    cast = [weight for weight in weights.values() if catalog.tensors[weight].dtype != dtype]
    note = (
        f"the checkpoint stores fp32 master weights in place of {n_text(len(cast), 'weight')}; "
        f"ckpt carries them over unchanged as master weights, and rounds them to {dtype}, the "
        "run's compute dtype, as the model's weights"
    )
    result = replace(catalog, tensors=tensors)
    return result.noted([note]) if dtype is not None and cast else result
