"""Apply a job's changes to the entries of a catalog, in a fixed order; no data moves here.

===  ============================================  ==============================================
 1   ``dequantize``, ``dequantize_optim``          float8, int8 and MXFP4 times scales, states too
 2   ``include``, ``exclude``                      selection of entries
 3   ``strip_prefix``, ``add_prefix``, ``rename``  names of entries
 4   ``untie``, ``tie``                            a tensor written twice, or two equal ones once
 5   ``stack_layers``, ``unstack_layers``          layers along an axis, or one key per layer
 6   ``dtype``                                     casts
 7   ``quantize``                                  float8 weights with scales
===  ============================================  ==============================================

``core.engine.changes`` does the work. Each step matches the names that the steps before it
produced.

A Hugging Face ``config.json`` follows the changes: ``quantization_config`` is added or removed, the
dtype of the model changes when all of the model is cast, and ``tie_word_embeddings`` becomes false
where a change leaves the output layer and the embedding two different tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from shlex import quote as quoted_word
from typing import TYPE_CHECKING

from core.arrays.dtypes import dtype_called, dtype_of
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.key_patterns import some_of
from core.engine.catalog.mapping_attributes import (
    attributes_of,
    record_attributes,
    without_tensors_of,
)
from core.engine.catalog.optimizer_keys import is_optimizer_key
from core.engine.changes.rename import RenamedCatalog, add_prefix, rename, strip_prefix
from core.engine.changes.select import build_dtype_rule, select
from core.errors import CorruptError, UsageError
from core.files.json_object import parse_json_object
from core.formats.huggingface.files import CONFIG
from core.opening.target import retyped
from core.values import dataclass, n_text
from core.verbs.convert.job import Job

if TYPE_CHECKING:
    from core.engine.quantize.schemes import QuantizedWeight
    from core.hf.ties import TiePair

_DTYPE_NAMES = ("dtype", "torch_dtype")
"""Names of the dtype in a configuration: in transformers since version 5, and before."""


@dataclass(frozen=True, slots=True)
class ChangedCatalog:
    """A catalog after a job's changes.

    Args:
        catalog: the changed catalog.
        renamed: (old key, new key) of each entry that prefixes and ``rename`` changed, in order.
        excluded: keys of entries that ``include``, ``exclude`` and ``tie`` dropped.
        notes: notes for the user.
        config_notes: notes on the configuration, for destinations that store it.
    """

    catalog: Catalog
    renamed: tuple[tuple[str, str], ...] = ()
    excluded: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    config_notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _ChangeStep:
    """A catalog after one kind of change.

    Args:
        catalog: the changed catalog.
        notes: notes for the user.
        excluded: keys of entries that the change dropped.
        edits: changes of the configuration, by name; None removes an entry.
    """

    catalog: Catalog
    notes: Sequence[str] = ()
    excluded: tuple[str, ...] = ()
    edits: Mapping[str, object] = field(default_factory=dict)


def apply_changes(
    catalog: Catalog, job: Job, *, config: Mapping[str, object] | None = None
) -> ChangedCatalog:
    """Apply all changes that the job requests, in the module's order.

    Args:
        catalog: global tensors, all objects loaded.
        job: the conversion.
        config: the parsed ``config.json`` that comes with the weights, or None. A changed one is
            put into ``Catalog.files``; one that the program made is used instead of this.

    Raises:
        UsageError: options contradict each other, or a pattern matches nothing.
        UnsupportedError: a tensor cannot be changed as requested, or the quantization scheme of
            the weights is unknown.
        CorruptError: scales or the configuration do not fit the weights.
    """
    config = config_beside(catalog, config)
    before = catalog
    attributes = attributes_of(catalog.skeleton)

    # Apply the seven changes of the table. Dequantized weights have no scheme any more.
    steps = [_dequantize(catalog, job, config)]
    scheme_config = config if job.dequantize is None else None
    if job.dequantize_optim:
        steps.append(_dequantize_optim(steps[-1].catalog))
    steps.append(_select(steps[-1].catalog, job, scheme_config))
    catalog, renamed = _rename(steps[-1].catalog, job)
    steps.append(_tie(catalog, job, config))
    steps.append(_restack(steps[-1].catalog, job))
    steps.append(_cast(steps[-1].catalog, job, config, scheme_config))
    if job.quantize:
        steps.append(_quantize(steps[-1].catalog, job))
    if not (job.tie or job.untie):
        steps.append(_untie_changed(before, steps[-1].catalog, dict(renamed), config))
    catalog = steps[-1].catalog
    notes = [note for step in steps for note in step.notes]

    # New names build new containers; those lose the attributes that the mappings had.
    values = {id(attribute.value) for attribute in attributes_of(catalog.skeleton)}
    lost = [attribute for attribute in attributes if id(attribute.value) not in values]
    if lost:
        record = record_attributes(attribute.key for attribute in lost)
        catalog = without_tensors_of(catalog, lost)
        catalog = replace(catalog, dropped=(*catalog.dropped, *record))

    # Let config.json follow.
    edits = {name: value for step in steps for name, value in step.edits.items()}
    config_notes: tuple[str, ...] = ()
    if edits:
        catalog, config_notes = _edit_config(catalog, config, edits)
    excluded = tuple(key for step in steps for key in step.excluded)
    return ChangedCatalog(catalog, renamed, excluded, tuple(notes), config_notes)


def _dequantize(catalog: Catalog, job: Job, config: Mapping[str, object] | None) -> _ChangeStep:
    """Apply the scales of quantized tensors, if the job requests it.

    Raises:
        CorruptError: the configuration has a block size that is not two positive numbers.
    """
    if job.dequantize is None:
        return _ChangeStep(catalog)
    from core.arrays.dtypes import is_float8
    from core.engine.changes.quantize import dequantize
    from core.engine.quantize.to_float8 import BLOCK

    # Blocks of scales have the shape that the configuration records, or 128 × 128.
    quantization = None if config is None else config.get("quantization_config")
    block = quantization.get("weight_block_size") if isinstance(quantization, Mapping) else None
    if block is None:
        block = [BLOCK, BLOCK]
    elif not (
        isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    ):
        raise CorruptError(
            f"quantization_config.weight_block_size is {block!r}, not two positive integers",
            file=CONFIG,
        )
    n_rows, n_columns = block

    result = dequantize(catalog, job.dequantize, block=(n_rows, n_columns), config=config)
    counts = Counter(
        "float8" if is_float8(catalog.tensors[key].dtype) else "int8"
        for key in result.keys
        if key in catalog.tensors
    )
    notes = [
        f"{n_text(n, f'{kind} tensor is', f'{kind} tensors are')} dequantized to "
        f"{dtype_called(job.dequantize).name}"
        for kind, n in counts.items()
    ]
    edits: dict[str, object] = {} if result.remaining else {"quantization_config": None}
    return _ChangeStep(result.catalog, [*notes, *result.notes], edits=edits)


def _dequantize_optim(catalog: Catalog) -> _ChangeStep:
    """Dequantize the states of the optimizer."""
    from core.engine.changes.optimizer_states import dequantize_states

    result = dequantize_states(catalog)
    notes = [f"{len(result.keys)} 8-bit or 4-bit optimizer states are dequantized to float32"]
    if result.renamed:
        n = len(result.renamed)
        notes.append(f"{n} float32 optimizer states are renamed to exp_avg and exp_avg_sq")
    if result.kept:
        notes.append(
            f"{len(result.kept)} of the dequantized states keep their bitsandbytes names (state1, "
            "state2), which bitsandbytes' 32-bit optimizers load"
        )
    return _ChangeStep(result.catalog, notes)


def _select(catalog: Catalog, job: Job, config: Mapping[str, object] | None) -> _ChangeStep:
    """Keep the entries that the user's globs choose.

    Raises:
        UsageError: a quantized weight would be left without its scales.
    """
    if not (job.include or job.exclude):
        return _ChangeStep(catalog)
    from core.engine.quantize.schemes import quantized_weights
    from core.opening.numbered_optimizers import keys_of_numbered

    weights = quantized_weights(catalog.tensors, config)
    selection = select(catalog, include=job.include, exclude=job.exclude)
    tensors = selection.catalog.tensors
    for weight in weights:
        missing = next((key for key in weight.scales if key not in tensors), None)
        if weight.key in tensors and missing is not None:
            raise UsageError(
                f"--include or --exclude keeps the {weight.scheme.name} weight {weight.key!r}, "
                f"but drops its scales {missing!r}",
                key=weight.key,
                hint="apply the scales with --dequantize bf16"
                if weight.scheme.dequantize is not None
                else "keep both or drop both",
            )
    n_dropped = len(selection.excluded)
    notes = (
        [f"{n_text(n_dropped, 'entry', 'entries')} dropped by --include or --exclude"]
        if n_dropped
        else []
    )
    # States without a name cannot follow the parameters that are dropped.
    if any(key in catalog.tensors and not is_optimizer_key(key) for key in selection.excluded):
        notes += [
            f"{key} identifies parameters by number, so the states of dropped parameters are kept; "
            "to drop only those states, add --param-order model; to drop all states, add "
            f"--exclude {quoted_word(f'{key}.*')}"
            for key in keys_of_numbered(selection.catalog)
        ]
    return _ChangeStep(selection.catalog, notes, selection.excluded)


def _rename(catalog: Catalog, job: Job) -> tuple[Catalog, tuple[tuple[str, str], ...]]:
    """Rename the entries, and return the catalog and (old, new) for the keys that changed."""
    results: list[RenamedCatalog] = []
    if job.strip_prefix:
        results.append(strip_prefix(catalog, job.strip_prefix))
    if job.add_prefix is not None:
        results.append(add_prefix(results[-1].catalog if results else catalog, job.add_prefix))
    results.append(rename(results[-1].catalog if results else catalog, job.rename))

    # Join the steps: an entry that was renamed twice is reported with its first and last key.
    new_keys = {key: key for key in (*catalog.tensors, *catalog.objects)}
    for result in results:
        changed = dict(result.renamed)
        new_keys = {old: changed.get(key, key) for old, key in new_keys.items()}
    return results[-1].catalog, tuple((old, new) for old, new in new_keys.items() if old != new)


def _tie(catalog: Catalog, job: Job, config: Mapping[str, object] | None) -> _ChangeStep:
    """Write tied tensors separately or once, with their optimizer states."""
    if not (job.tie or job.untie):
        return _ChangeStep(catalog)
    from core.engine.changes.tie import INPUT, OUTPUT, tie, untie
    from core.hf.ties import edit_tie

    notes: list[str] = []
    edits: dict[str, object] = {}
    for pairs, change, becomes_tied, result in (
        (job.untie, untie, False, "written as a copy of"),
        (job.tie, tie, True, "dropped because it is identical to"),
    ):
        if not pairs:
            continue
        n_before = len(catalog.tensors)
        catalog = change(catalog, pairs)
        notes += [f"{key} is {result} {original}" for key, original in pairs]
        # Tensors that came or went with the pairs are optimizer states of the tied weights.
        n_states = abs(len(catalog.tensors) - n_before) - len(pairs)
        if n_states > 0:
            fate = "dropped" if becomes_tied else "written as copies"
            notes.append(f"{n_states} optimizer tensors of the tied weights are {fate} too")
        # The configuration records only ties between the input and the output embedding.
        if any(OUTPUT.search(key) and INPUT.search(original) for key, original in pairs):
            edits |= edit_tie(config or {}, is_tied=becomes_tied)
    return _ChangeStep(catalog, notes, tuple(alias for alias, _ in job.tie), edits)


def _untie_changed(
    before: Catalog,
    after: Catalog,
    new_of: Mapping[str, str],
    config: Mapping[str, object] | None,
) -> _ChangeStep:
    """Untie the output layer in the configuration if the changes made it differ from the embedding.

    Args:
        before, after: the catalog before and after all changes.
        new_of: new key by old key of the entries that were renamed.
        config: the configuration, or None.
    """
    if config is None or after is before:
        return _ChangeStep(after)
    from core.hf.ties import edit_tie, find_tie_pair, is_tied

    first, pair = (find_tie_pair(catalog.tensors, config) for catalog in (before, after))
    if pair is None or not {pair.embedding, pair.head} <= after.tensors.keys():
        return _ChangeStep(after)
    if not is_tied(config, has_head=first is None or first.head in before.tensors):
        return _ChangeStep(after)

    # Both are still one tensor if they were, under whatever names, and have one dtype.
    def have_one_dtype(catalog: Catalog, names: TiePair) -> bool:
        return len({catalog.tensors[key].dtype for key in (names.embedding, names.head)}) == 1

    was_pair = (
        first is not None
        and {first.embedding, first.head} <= before.tensors.keys()
        and new_of.get(first.head, first.head) == pair.head
        and new_of.get(first.embedding, first.embedding) == pair.embedding
    )
    if was_pair and first is not None:
        if have_one_dtype(after, pair) or not have_one_dtype(before, first):
            return _ChangeStep(after)
    note = (
        f"{CONFIG} ties {pair.head} to {pair.embedding}, but the two now differ, so both are "
        "written"
    )
    return _ChangeStep(after, [note], edits=edit_tie(config, is_tied=False))


def _restack(catalog: Catalog, job: Job) -> _ChangeStep:
    """Stack layers along an axis, or give each its own key.

    Raises:
        UsageError: the job requests both.
    """
    if job.stack_layers and job.unstack_layers is not None:
        raise UsageError(
            "--stack-layers and --unstack-layers cannot be combined", hint="use only one"
        )
    if job.stack_layers:
        from core.engine.changes.restack.stack import stack_layers

        result = stack_layers(catalog, axis=job.layer_axis)
        note = f"the layers are stacked into {n_text(result.n_groups, 'tensor')}"
    elif job.unstack_layers is not None:
        from core.engine.changes.restack.unstack import unstack_layers

        result = unstack_layers(catalog, job.unstack_layers, axis=job.layer_axis)
        note = f"{result.n_groups} stacked tensors are split into one tensor per layer"
    else:
        return _ChangeStep(catalog)
    return _ChangeStep(result.catalog, [note, *result.notes])


def _cast(
    catalog: Catalog,
    job: Job,
    config: Mapping[str, object] | None,
    scheme_config: Mapping[str, object] | None,
) -> _ChangeStep:
    """Cast tensors to other dtypes; the parts of quantized weights keep theirs.

    Args:
        catalog: the catalog before the cast.
        job: the conversion.
        config: the configuration, or None.
        scheme_config: the configuration if it still describes the scheme of quantized weights, or
            None.

    Raises:
        UnsupportedError: the quantization scheme of the weights is unknown.
    """
    if not job.dtype:
        return _ChangeStep(catalog)
    from core.arrays.dtypes import is_float8
    from core.engine.quantize.schemes import check_scheme, quantized_weights

    weights = quantized_weights(catalog.tensors, scheme_config)
    # The glob None stands for the complete model; its last dtype wins.
    model_dtypes = [dtype_called(name).name for glob, name in job.dtype if glob is None]
    if weights or model_dtypes:
        check_scheme(scheme_config, doing="--dtype")
    parts = {key for weight in weights for key in weight.keys}
    result = retyped(catalog, build_dtype_rule(job.dtype, catalog.tensors, quantized=parts))

    notes = []
    edits: dict[str, object] = {}
    if model_dtypes:
        n_float8 = sum(
            is_float8(tensor.dtype) and result.tensors[key].dtype == tensor.dtype
            for key, tensor in catalog.tensors.items()
        )
        if n_float8:
            notes.append(
                f"{n_text(n_float8, 'float8 tensor')} not cast (to cast them: --dtype GLOB=DTYPE)"
            )
        edits = {name: model_dtypes[-1] for name in _DTYPE_NAMES if name in (config or ())}
    notes += _uncast_scale_notes(job, weights, catalog, result)
    return _ChangeStep(result, notes, edits=edits)


def _quantize(catalog: Catalog, job: Job) -> _ChangeStep:
    """Quantize the tensors that the job selects to float8 with scales."""
    from core.engine.changes.quantize import quantize
    from core.engine.quantize.to_float8 import BLOCK

    result = quantize(catalog, job.quantize)
    notes = [
        f"{len(result.keys)} tensors are quantized to float8_e4m3fn with scales",
        *result.notes,
    ]

    scales = [result.catalog.tensors.get(f"{key}_scale_inv") for key in result.keys]
    modules = [key.removesuffix(".weight") for key in result.remaining if key.endswith(".weight")]
    if None in scales:
        # One scale for each tensor: describe them as compressed-tensors does, which vLLM, SGLang
        # and transformers read. Its target is every linear layer, and so a tied output layer.
        number: dict[str, object] = {"num_bits": 8, "type": "float", "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": {**number, "strategy": "tensor", "dynamic": False},
            "input_activations": {**number, "strategy": "tensor", "dynamic": True},
        }
        if "lm_head.weight" not in result.keys:
            modules = [*modules, *({"lm_head"} - {*modules})]
        config: dict[str, object] = {
            "config_groups": {"group_0": group},
            "format": "float-quantized",
            "ignore": modules,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        }
    else:
        # Blocks: as DeepSeek-V3 does.
        config = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
        }
        if modules:
            config["modules_to_not_convert"] = modules
        if any(tensor is not None and not tensor.shape for tensor in scales):
            notes.append(
                "some scales apply to blocks and some to entire tensors; transformers dequantizes "
                "both, but vLLM and SGLang expect only one kind"
            )
    return _ChangeStep(result.catalog, notes, edits={"quantization_config": config})


def config_beside(
    catalog: Catalog, config: Mapping[str, object] | None
) -> Mapping[str, object] | None:
    """Return the ``config.json`` that the destination will have, or None."""
    content = catalog.files.get(CONFIG)
    if isinstance(content, bytes):
        return parse_json_object(content, file=CONFIG)
    return None if content is None else config


def _uncast_scale_notes(
    job: Job, weights: Sequence[QuantizedWeight], before: Catalog, after: Catalog
) -> list[str]:
    """Write a note, for each scheme, on the float tensors of quantized weights that are not cast.

    Args:
        job: the conversion.
        weights: the quantized weights.
        before, after: the catalog before and after the cast.
    """
    uncast: dict[str, list[str]] = {}
    requested = {dtype_called(name).name for _, name in job.dtype}
    for weight in weights:
        for key in weight.keys:
            tensor = before.tensors[key]
            is_float = dtype_of(tensor.dtype).kind == "float" and requested != {tensor.dtype}
            if is_float and after.tensors[key].dtype == tensor.dtype:
                uncast.setdefault(weight.scheme.name, []).append(key)
    return [
        f"scales and similar tensors of {name} weights keep their dtype ({some_of(keys)}), "
        "because casting them would change the weights"
        for name, keys in uncast.items()
    ]


def _edit_config(
    catalog: Catalog, config: Mapping[str, object] | None, edits: Mapping[str, object]
) -> tuple[Catalog, tuple[str, ...]]:
    """Return the catalog with the edited configuration among its files, and notes.

    Args:
        catalog: the changed catalog.
        config: the configuration before; None leaves the catalog unchanged, with a note if it
            carries a config.json, which then no longer describes the model.
        edits: new values by name; None removes an entry.
    """
    from core.hf.ties import TEXT_CONFIG, with_config

    if config is None:
        stale = f"{CONFIG} is unchanged, although {', '.join(edits)} changed"
        return catalog, (stale,) if CONFIG in catalog.files else ()
    edited = {
        name: value
        for name, value in (dict(config) | dict(edits)).items()
        if value is not None or name not in edits
    }
    if edited == config:
        return catalog, ()

    # Describe each edit: dtype is now float32, quantization_config removed.
    texts = []
    for name, value in edits.items():
        if value is None:
            texts.append(f"{name} removed")
        elif name == TEXT_CONFIG:
            continue  # repeats what is stated beside it
        elif isinstance(value, (str, bool)):
            texts.append(
                f"{name} is now {str(value).lower() if isinstance(value, bool) else value}"
            )
        else:
            texts.append(f"{name} {'changed' if name in config else 'added'}")
    note = f"{CONFIG}: {', '.join(texts)}"
    return with_config(catalog, edited), (note,)
