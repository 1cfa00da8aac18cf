"""Apply everything that a job changes about a catalog's entries, in one order; no data moves here.

===  ==============================================
===================================================================
 1    ``dequantize``                                  float8 and int8 tensors times scales
 (``core.changes.quantize``)
 2    ``include``, ``exclude``                        which entries there are
 (``core.changes.select``)
 3    ``strip_prefix``, ``add_prefix``, ``rename``    what they are called (``core.changes.rename``)
 4    ``untie``, ``tie``                              tensors written twice, or once
 (``core.changes.tie``)
 5    ``stack_layers``, ``unstack_layers``            layers along an axis or apart
 (``core.changes.restack``)
 6    ``dtype``                                       casts (``core.changes.select``)
 7    ``quantize``                                    float8 with scales (``core.changes.quantize``)
===  ==============================================
===================================================================

Each step sees the names that the steps before it made.

A Hugging Face ``config.json`` follows the changes: ``quantization_config`` is added or removed, the
dtype of the whole
model changes with a cast of the whole model, and ``tie_word_embeddings`` records whether there
still is an output layer
of its own.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from core.arrays.dtypes import dtype_of
from core.catalog.catalog import Catalog
from core.catalog.files_beside import carried_of, with_documents
from core.catalog.key_patterns import some_of
from core.catalog.mapping_attributes import MappingAttribute, attributes_of, without_tensors_of
from core.changes.quantize import QuantizedCatalog, dequantize, is_float8, quantize
from core.changes.rename import RenamedCatalog, add_prefix, rename, strip_prefix
from core.changes.restack import stack_layers, unstack_layers
from core.changes.select import cast_of, select
from core.changes.tie import INPUT, OUTPUT, tie, untie
from core.convert.job import Job
from core.convert.nesting_notes import attributes_note
from core.errors import CorruptError, UsageError
from core.files.json_object import parse_json_object
from core.formats.huggingface.files import CONFIG
from core.opening.target import retyped
from core.quantize.schemes import QuantizedWeight, check_scheme, quantized_weights
from core.quantize.to_float8 import BLOCK

_DTYPE_NAMES = ("dtype", "torch_dtype")
"""Names of the dtype in a configuration: in transformers since version 5, and before."""


@dataclass(frozen=True, slots=True)
class ChangedCatalog:
    """A catalog after a job's changes.

    Args:
        catalog: the changed catalog.
        renamed: (old key, new key) of each entry that prefixes and ``rename`` changed, in order.
        left_out: keys of entries that ``include`` and ``exclude`` left out, or ``tie``.
        notes: what the user should know.
        config_notes: what the user should know about the configuration, for destinations that hold
        it.
    """

    catalog: Catalog
    renamed: tuple[tuple[str, str], ...] = ()
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    config_notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _ChangeStep:
    """A catalog after one kind of change.

    Args:
        catalog: the changed catalog.
        notes: what the user should know.
        left_out: keys of entries that the change left out.
        edits: changes of the configuration, by name; None removes an entry.
    """

    catalog: Catalog
    notes: Sequence[str] = ()
    left_out: tuple[str, ...] = ()
    edits: Mapping[str, object] = field(default_factory=dict)


def apply_changes(
    catalog: Catalog, job: Job, *, config: Mapping[str, object] | None = None
) -> ChangedCatalog:
    """Apply all changes that the job asks for, in the module's order.

    Args:
        catalog: global tensors, all objects loaded.
        config: the parsed ``config.json`` that comes with the weights, or None. A changed one is
            put into ``Catalog.documents``; one that is already there is used instead of this.

    Raises:
        UsageError, UnsupportedError, CorruptError: as the steps raise them.
    """
    config = config_beside(catalog, config)
    attributes = attributes_of(catalog.skeleton)
    steps = [_dequantize(catalog, job, config)]
    # Once weights are dequantized, the configuration describes no scheme of theirs any more.
    scheme_config = config if job.dequantize is None else None
    steps.append(_select(steps[-1].catalog, job, scheme_config))
    catalog, renamed = _rename(steps[-1].catalog, job)
    steps.append(_tie(catalog, job))
    steps.append(_restack(steps[-1].catalog, job))
    steps.append(_cast(steps[-1].catalog, job, config, scheme_config))
    steps.append(_quantize(steps[-1].catalog, job))
    steps.append(_without_lost_attributes(steps[-1].catalog, attributes))
    catalog = steps[-1].catalog

    edits = {name: value for step in steps for name, value in step.edits.items()}
    config_notes: tuple[str, ...] = ()
    if edits:
        catalog, config_notes = _with_config(catalog, config, edits)
    return ChangedCatalog(
        catalog,
        renamed,
        tuple(key for step in steps for key in step.left_out),
        tuple(note for step in steps for note in step.notes),
        config_notes,
    )


def _dequantize(catalog: Catalog, job: Job, config: Mapping[str, object] | None) -> _ChangeStep:
    """Apply the scales of quantized tensors, if the job asks for that."""
    if job.dequantize is None:
        return _ChangeStep(catalog)
    result = dequantize(catalog, job.dequantize, block=_block_of(config), config=config)
    counts = Counter(
        "float8" if is_float8(catalog.tensors[key].dtype) else "int8" for key in result.keys
    )
    notes = [
        f"{n} {kind} tensors become {dtype_of(job.dequantize).name}" for kind, n in counts.items()
    ]
    edits: dict[str, object] = {} if result.remaining else {"quantization_config": None}
    return _ChangeStep(result.catalog, [*notes, *result.notes], edits=edits)


def _select(catalog: Catalog, job: Job, config: Mapping[str, object] | None) -> _ChangeStep:
    """Keep the entries that the user's globs choose.

    Raises:
        UsageError: a quantized weight would be left without its scales.
    """
    weights = quantized_weights(catalog.tensors, config)
    chosen = select(catalog, include=job.include, exclude=job.exclude)
    for weight in weights:
        missing = next((key for key in weight.scales if key not in chosen.catalog.tensors), None)
        if weight.key in chosen.catalog.tensors and missing is not None:
            can_be_wide = weight.scheme.dequantize is not None
            raise UsageError(
                f"--include or --exclude keeps {weight.key!r}, a {weight.scheme.name} weight, but drops its "
                f"scales {missing!r}",
                key=weight.key,
                hint="apply the scales with --dequantize bf16"
                if can_be_wide
                else "keep both, or drop both",
            )
    n_dropped = len(chosen.left_out)
    notes = [f"{n_dropped} entries left out by --include/--exclude"] if n_dropped else []
    return _ChangeStep(chosen.catalog, notes, chosen.left_out)


def _rename(catalog: Catalog, job: Job) -> tuple[Catalog, tuple[tuple[str, str], ...]]:
    """Return the catalog under its new keys, and (old, new) for the keys that changed."""
    last_of = {key: key for key in (*catalog.tensors, *catalog.objects)}

    def follow(result: RenamedCatalog) -> Catalog:
        nonlocal last_of
        steps = dict(result.renamed)
        last_of = {first: steps.get(key, key) for first, key in last_of.items()}
        return result.catalog

    if job.strip_prefix:
        catalog = follow(strip_prefix(catalog, job.strip_prefix))
    if job.add_prefix is not None:
        catalog = follow(add_prefix(catalog, job.add_prefix))
    catalog = follow(rename(catalog, job.rename))
    return catalog, tuple((old, new) for old, new in last_of.items() if old != new)


def _tie(catalog: Catalog, job: Job) -> _ChangeStep:
    """Write tied tensors separately or once, with their optimizer states."""
    notes: list[str] = []
    edits: dict[str, object] = {}
    n_before = len(catalog.tensors)
    if job.untie:
        catalog = untie(catalog, job.untie)
        notes += [f"{added} is written as a copy of {original}" for added, original in job.untie]
        n_states = len(catalog.tensors) - n_before - len(job.untie)
        notes += (
            [f"{n_states} optimizer tensors of tied weights are written as copies too"]
            if n_states > 0
            else []
        )
        n_before = len(catalog.tensors)
    if job.tie:
        catalog = tie(catalog, job.tie)
        notes += [
            f"{alias} is left out: it is identical to {original}" for alias, original in job.tie
        ]
        n_states = n_before - len(catalog.tensors) - len(job.tie)
        notes += (
            [f"{n_states} optimizer tensors of tied weights are left out too"]
            if n_states > 0
            else []
        )
    # The configuration records only ties between the input and the output embedding.
    for is_tied, pairs in ((False, job.untie), (True, job.tie)):
        if any(OUTPUT.search(first) and INPUT.search(second) for first, second in pairs):
            edits["tie_word_embeddings"] = is_tied
    return _ChangeStep(catalog, notes, tuple(alias for alias, _ in job.tie), edits)


def _restack(catalog: Catalog, job: Job) -> _ChangeStep:
    """Stack layers along an axis, or give each its own key.

    Raises:
        UsageError: the job asks for both.
    """
    if job.stack_layers and job.unstack_layers is not None:
        raise UsageError(
            "--stack-layers and --unstack-layers contradict each other", hint="use only one of them"
        )
    if job.stack_layers:
        result = stack_layers(catalog)
        return _ChangeStep(
            result.catalog, [f"layers stacked into {result.n_groups} tensors", *result.notes]
        )
    if job.unstack_layers is not None:
        result = unstack_layers(catalog, job.unstack_layers)
        note = f"{result.n_groups} stacked tensors split into one per layer"
        return _ChangeStep(result.catalog, [note, *result.notes])
    return _ChangeStep(catalog)


def _cast(
    catalog: Catalog,
    job: Job,
    config: Mapping[str, object] | None,
    scheme_config: Mapping[str, object] | None,
) -> _ChangeStep:
    """Give tensors other dtypes; the parts of quantized weights keep theirs.

    Args:
        config: the configuration, or None.
        scheme_config: the configuration if it still describes the scheme of quantized weights, or
            None.

    Raises:
        UnsupportedError: the weights have a quantization scheme that is not known.
    """
    if not job.dtype:
        return _ChangeStep(catalog)
    weights = quantized_weights(catalog.tensors, scheme_config)
    casts_all = any(glob is None for glob, _ in job.dtype)
    if weights or casts_all:
        check_scheme(scheme_config, doing="--dtype")
    parts = {key for weight in weights for key in weight.keys}
    result = retyped(catalog, cast_of(job.dtype, catalog.tensors, quantized=parts))
    notes = [
        *_uncast_float8_notes(job, catalog, result),
        *_uncast_scale_notes(job, weights, catalog, result),
    ]
    # A cast of the whole model changes the dtype that the configuration has for it.
    dtype = next((dtype_of(name).name for glob, name in reversed(job.dtype) if glob is None), None)
    edits: dict[str, object] = {}
    if dtype is not None and config is not None:
        edits = {name: dtype for name in _DTYPE_NAMES if name in config}
    return _ChangeStep(result, notes, edits=edits)


def _quantize(catalog: Catalog, job: Job) -> _ChangeStep:
    """Quantize the tensors that the job chooses to float8 with scales."""
    if not job.quantize:
        return _ChangeStep(catalog)
    result = quantize(catalog, job.quantize)
    notes = [f"{len(result.keys)} tensors become float8_e4m3fn with scales", *result.notes]
    edits = {"quantization_config": _quantization_config(result, result.catalog)}
    return _ChangeStep(result.catalog, notes, edits=edits)


def _without_lost_attributes(catalog: Catalog, before: Sequence[MappingAttribute]) -> _ChangeStep:
    """Leave out attributes of mappings that were replaced: new names make new containers.

    Args:
        before: attributes of the mappings before the changes.
    """
    values = {id(attribute.value) for attribute in attributes_of(catalog.skeleton)}
    lost = [attribute for attribute in before if id(attribute.value) not in values]
    if not lost:
        return _ChangeStep(catalog)
    return _ChangeStep(without_tensors_of(catalog, lost), [attributes_note(lost)])


def config_beside(
    catalog: Catalog, config: Mapping[str, object] | None
) -> Mapping[str, object] | None:
    """Return the ``config.json`` that the destination will have, or None."""
    document = catalog.documents.get(CONFIG)
    if document is not None:
        return parse_json_object(document, file=CONFIG)
    return config if CONFIG in carried_of(catalog) else None


def _block_of(config: Mapping[str, object] | None) -> tuple[int, int]:
    """Return rows and columns of a block of scales: those of the configuration, or 128 × 128.

    Raises:
        CorruptError: the configuration has something else than two positive numbers.
    """
    quantization = None if config is None else config.get("quantization_config")
    block = quantization.get("weight_block_size") if isinstance(quantization, Mapping) else None
    if block is None:
        return BLOCK, BLOCK
    if isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
        return block[0], block[1]
    raise CorruptError(
        f"quantization_config.weight_block_size is {block!r}, not two positive numbers", file=CONFIG
    )


def _uncast_float8_notes(job: Job, before: Catalog, after: Catalog) -> list[str]:
    """Return a note on the float8 tensors that a cast of the whole model leaves alone."""
    if all(glob is not None for glob, _ in job.dtype):
        return []
    metas = before.tensors.values()
    n_float8 = sum(
        is_float8(meta.dtype) and after.tensors[meta.key].dtype == meta.dtype for meta in metas
    )
    return (
        [f"{n_float8} float8 tensors keep their dtype; use --dtype GLOB=DTYPE to cast them"]
        if n_float8
        else []
    )


def _uncast_scale_notes(
    job: Job, weights: Sequence[QuantizedWeight], before: Catalog, after: Catalog
) -> list[str]:
    """Return notes, by scheme, on the float tensors of quantized weights that are not cast."""
    uncast: dict[str, list[str]] = {}
    wanted = {dtype_of(name).name for _, name in job.dtype}
    for weight in weights:
        for key in weight.keys:
            meta = before.tensors[key]
            is_float = dtype_of(meta.dtype).kind == "float" and wanted != {meta.dtype}
            if is_float and after.tensors[key].dtype == meta.dtype:
                uncast.setdefault(weight.scheme.name, []).append(key)
    return [
        f"scales and similar tensors of {name} weights keep their dtype ({some_of(keys)}): casting them would change "
        "the weights"
        for name, keys in uncast.items()
    ]


def _quantization_config(result: QuantizedCatalog, catalog: Catalog) -> dict[str, object]:
    """Return ``quantization_config`` for float8 weights with scales, as DeepSeek-V3 has it."""
    per_block = [bool(catalog.tensors[f"{key}_scale_inv"].shape) for key in result.keys]
    config: dict[str, object] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
    }
    config["weight_block_size"] = [BLOCK, BLOCK] if any(per_block) else None
    modules = [key.removesuffix(".weight") for key in result.remaining if key.endswith(".weight")]
    if modules:
        config["modules_to_not_convert"] = modules
    return config


def _with_config(
    catalog: Catalog, config: Mapping[str, object] | None, edits: Mapping[str, object]
) -> tuple[Catalog, tuple[str, ...]]:
    """Return the catalog with the edited configuration as a document, and notes on it.

    Args:
        config: the configuration before; None leaves the catalog unchanged.
        edits: new values by name; None removes an entry.
    """
    if config is None:
        stale = f"{CONFIG} is unchanged, although {', '.join(edits)} changed"
        return catalog, (stale,) if CONFIG in carried_of(catalog) else ()
    edited = {
        name: value
        for name, value in config.items()
        if name not in edits or edits[name] is not None
    }
    edited |= {name: value for name, value in edits.items() if value is not None}
    if edited == config:
        return catalog, ()
    data = json.dumps(edited, indent=2, ensure_ascii=False) + "\n"
    note = (
        f"{CONFIG}: {', '.join(_edit_text(config, name, value) for name, value in edits.items())}"
    )
    return with_documents(catalog, {CONFIG: data.encode()}), (note,)


def _edit_text(config: Mapping[str, object], name: str, value: object) -> str:
    """Return what an edit does: ``dtype is now float32``, ``quantization_config removed``."""
    if value is None:
        return f"{name} removed"
    if isinstance(value, (str, bool)):
        return f"{name} is now {str(value).lower() if isinstance(value, bool) else value}"
    return f"{name} {'changed' if name in config else 'added'}"
