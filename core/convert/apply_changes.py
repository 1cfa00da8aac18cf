"""Everything a job changes about a catalog's entries, in one order; no data moves here.

===  ==============================================  ===================================================================
 1    ``dequantize``                                  float8 and int8 tensors times scales (``core.changes.quantize``)
 2    ``include``, ``exclude``                        which entries there are (``core.changes.select``)
 3    ``strip_prefix``, ``add_prefix``, ``rename``    what they are called (``core.changes.rename``)
 4    ``untie``, ``tie``                              tensors written twice, or once (``core.changes.tie``)
 5    ``stack_layers``, ``unstack_layers``            layers along an axis or apart (``core.changes.restack``)
 6    ``dtype``                                       casts (``core.changes.select``)
 7    ``quantize``                                    float8 with scales (``core.changes.quantize``)
===  ==============================================  ===================================================================

Each step sees the names that the ones before it made.

A Hugging Face configuration beside the weights follows: ``quantization_config`` goes or comes, the dtype that it states
for the whole model changes with a cast of the whole model, and ``tie_word_embeddings`` says whether there still is an
output layer of its own.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from core.arrays.dtypes import dtype_of
from core.catalog.catalog import Catalog
from core.catalog.files_beside import carried_of, with_documents
from core.catalog.key_patterns import some_of
from core.catalog.mapping_attributes import attributes_of, without_tensors_of
from core.changes.quantize import Requantized, dequantized, is_float8, quantized
from core.changes.rename import Renamed, add_prefix, rename, strip_prefix
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
"""How a configuration calls the dtype: transformers since version 5, and before."""


@dataclass(frozen=True, slots=True)
class Changed:
    """A catalog after a job's changes.

    Args:
        catalog: the catalog.
        renamed: (old key, new key) of what prefixes and ``rename`` changed, in order.
        left_out: keys of entries that ``include`` and ``exclude`` left out, or ``tie``.
        notes: what the user should know.
        config_notes: the same of the configuration, for destinations that hold it.
    """

    catalog: Catalog
    renamed: tuple[tuple[str, str], ...] = ()
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    config_notes: tuple[str, ...] = ()


def changed(catalog: Catalog, job: Job, *, config: Mapping[str, object] | None = None) -> Changed:
    """The catalog after all changes that the job asks for, in the module's order.

    Args:
        catalog: global tensors, all objects loaded.
        config: the parsed ``config.json`` that is carried beside the weights, where there is one; a changed one takes
            its place in ``Catalog.documents``. One that is there already counts instead.

    Raises:
        UsageError, UnsupportedError, CorruptError: as the steps raise them.
    """
    notes: list[str] = []
    attributes = attributes_of(catalog.skeleton)
    stated = config_beside(catalog, config)
    edits: dict[str, object] = {}
    if job.dequantize is not None:
        wide = dequantized(catalog, job.dequantize, block=_block_of(stated), config=stated)
        before = Counter("float8" if is_float8(catalog.tensors[key].dtype) else "int8" for key in wide.keys)
        catalog = wide.catalog
        notes += [f"{n} {kind} tensors become {dtype_of(job.dequantize).name}" for kind, n in before.items()]
        notes += wide.notes
        if not wide.left:
            edits["quantization_config"] = None
    weights = quantized_weights(catalog.tensors, stated if job.dequantize is None else None)
    chosen = select(catalog, include=job.include, exclude=job.exclude)
    catalog, left_out = chosen.catalog, chosen.left_out
    _refuse_torn(weights, catalog)
    if left_out:
        notes.append(f"{len(left_out)} entries left out by --include/--exclude")
    catalog, renamed = _renamed(catalog, job)
    n_before = len(catalog.tensors)
    if job.untie:
        catalog = untie(catalog, job.untie)
        notes += [f"{added} is written as a copy of {original}" for added, original in job.untie]
        n_states = len(catalog.tensors) - n_before - len(job.untie)
        notes += [f"{n_states} tensors of the optimizer are written as copies with them"] if n_states > 0 else []
        n_before = len(catalog.tensors)
    if job.tie:
        catalog = tie(catalog, job.tie)
        left_out += tuple(gone for gone, _ in job.tie)
        notes += [f"{gone} is left out, as it equals {kept}" for gone, kept in job.tie]
        n_states = n_before - len(catalog.tensors) - len(job.tie)
        notes += [f"{n_states} tensors of the optimizer are left out with them"] if n_states > 0 else []
    edits |= _tie_edits(job)
    catalog = _restacked(catalog, job, notes)
    if job.dtype:
        config_now = stated if job.dequantize is None else None
        weights = quantized_weights(catalog.tensors, config_now)
        if weights or any(glob is None for glob, _ in job.dtype):
            check_scheme(config_now, doing="--dtype")
        parts = {key for weight in weights for key in weight.keys}
        cast = retyped(catalog, cast_of(job.dtype, catalog.tensors, quantized=parts))
        notes += [*_left_narrow(job, catalog, cast), *_left_quantized(job, weights, catalog, cast)]
        catalog = cast
        edits |= _dtype_edits(job, stated)
    if job.quantize:
        narrow = quantized(catalog, job.quantize)
        catalog = narrow.catalog
        notes += [f"{len(narrow.keys)} tensors become float8_e4m3fn with scales", *narrow.notes]
        edits["quantization_config"] = _quantization_config(narrow, catalog)
    values = {id(attribute.value) for attribute in attributes_of(catalog.skeleton)}
    lost = [attribute for attribute in attributes if id(attribute.value) not in values]
    if lost:  # new names make the containers anew
        catalog = without_tensors_of(catalog, lost)
        notes.append(attributes_note(lost))
    config_notes: tuple[str, ...] = ()
    if edits:
        catalog, config_notes = _with_config(catalog, stated, edits)
    return Changed(catalog, renamed, left_out, tuple(notes), config_notes)


def _renamed(catalog: Catalog, job: Job) -> tuple[Catalog, tuple[tuple[str, str], ...]]:
    """The catalog under its new keys, and (first key, last key) of what changed."""
    last_of = {key: key for key in (*catalog.tensors, *catalog.objects)}

    def note(made: Renamed) -> Catalog:
        nonlocal last_of
        steps = dict(made[1])
        last_of = {first: steps.get(key, key) for first, key in last_of.items()}
        return made[0]

    if job.strip_prefix:
        catalog = note(strip_prefix(catalog, job.strip_prefix))
    if job.add_prefix is not None:
        catalog = note(add_prefix(catalog, job.add_prefix))
    catalog = note(rename(catalog, job.rename))
    return catalog, tuple((old, new) for old, new in last_of.items() if old != new)


def _restacked(catalog: Catalog, job: Job, notes: list[str]) -> Catalog:
    if job.stack_layers and job.unstack_layers is not None:
        raise UsageError("--stack-layers and --unstack-layers contradict each other", hint="give one")
    if job.stack_layers:
        made = stack_layers(catalog)
        notes += [f"the layers of {made.n_groups} tensors are stacked", *made.notes]
        return made.catalog
    if job.unstack_layers is not None:
        made = unstack_layers(catalog, job.unstack_layers)
        notes += [f"{made.n_groups} stacked tensors become one a layer", *made.notes]
        return made.catalog
    return catalog


def config_beside(catalog: Catalog, config: Mapping[str, object] | None) -> Mapping[str, object] | None:
    """The configuration that will lie beside the weights, or None."""
    document = catalog.documents.get(CONFIG)
    if document is not None:
        return parse_json_object(document, file=CONFIG)
    return config if CONFIG in carried_of(catalog) else None


def _block_of(config: Mapping[str, object] | None) -> tuple[int, int]:
    """Rows and columns of a block of scales, as the configuration says; 128 × 128 where it says nothing.

    Raises:
        CorruptError: it says something else than two positive numbers.
    """
    stated = None if config is None else config.get("quantization_config")
    found = stated.get("weight_block_size") if isinstance(stated, Mapping) else None
    if found is None:
        return BLOCK, BLOCK
    if isinstance(found, list) and len(found) == 2 and all(type(n) is int and n > 0 for n in found):
        return found[0], found[1]
    raise CorruptError(f"quantization_config.weight_block_size is {found!r}, not two positive numbers", file=CONFIG)


def _dtype_edits(job: Job, config: Mapping[str, object] | None) -> dict[str, object]:
    """What a cast of the whole model changes in the configuration."""
    dtype = next((dtype_of(name).name for glob, name in reversed(job.dtype) if glob is None), None)
    if dtype is None or config is None:
        return {}
    return {name: dtype for name in _DTYPE_NAMES if name in config}


def _left_narrow(job: Job, before: Catalog, after: Catalog) -> list[str]:
    """A note on float8 tensors that a cast of the whole model passes over."""
    if all(glob is not None for glob, _ in job.dtype):
        return []
    metas = before.tensors.values()
    left = [meta.key for meta in metas if is_float8(meta.dtype) and after.tensors[meta.key].dtype == meta.dtype]
    return [f"{len(left)} float8 tensors stay as they are; --dtype GLOB=DTYPE casts them"] if left else []


def _left_quantized(job: Job, weights: Sequence[QuantizedWeight], before: Catalog, after: Catalog) -> list[str]:
    """Notes on the float tensors of quantized weights that a cast passes over, by scheme."""
    kept: dict[str, list[str]] = {}
    wanted = {dtype_of(name).name for _, name in job.dtype}
    for weight in weights:
        for key in weight.keys:
            meta = before.tensors[key]
            is_float = dtype_of(meta.dtype).kind == "float" and wanted != {meta.dtype}
            if is_float and after.tensors[key].dtype == meta.dtype:
                kept.setdefault(weight.scheme.name, []).append(key)
    return [
        f"scales and the like of {name} weights stay as they are ({some_of(keys)}): in another type they would be "
        "other weights"
        for name, keys in kept.items()
    ]


def _refuse_torn(weights: Sequence[QuantizedWeight], chosen: Catalog) -> None:
    """Raise if the user's globs keep the numbers of a quantized weight without their scales.

    Raises:
        UsageError: they do.
    """
    for weight in weights:
        gone = next((key for key in weight.scales if key not in chosen.tensors), None)
        if weight.key in chosen.tensors and gone is not None:
            can_be_wide = weight.scheme.dequantize is not None
            raise UsageError(
                f"--include or --exclude leaves {weight.key!r}, a {weight.scheme.name} weight, without {gone!r}: "
                "its numbers mean nothing alone",
                key=weight.key,
                hint="apply the scales with --dequantize bf16" if can_be_wide else "leave both out, or keep both",
            )


def _tie_edits(job: Job) -> dict[str, object]:
    """What ties between the input and the output embedding change in the configuration."""
    edits: dict[str, object] = {}
    for is_tied, pairs in ((False, job.untie), (True, job.tie)):
        if any(OUTPUT.search(first) and INPUT.search(second) for first, second in pairs):
            edits["tie_word_embeddings"] = is_tied
    return edits


def _quantization_config(made: Requantized, catalog: Catalog) -> dict[str, object]:
    """What DeepSeek-V3's configuration says of such scales."""
    per_block = [bool(catalog.tensors[f"{key}_scale_inv"].shape) for key in made.keys]
    stated: dict[str, object] = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
    stated["weight_block_size"] = [BLOCK, BLOCK] if any(per_block) else None
    left = [key.removesuffix(".weight") for key in made.left if key.endswith(".weight")]
    if left:
        stated["modules_to_not_convert"] = left
    return stated


def _with_config(
    catalog: Catalog, config: Mapping[str, object] | None, edits: Mapping[str, object]
) -> tuple[Catalog, tuple[str, ...]]:
    """The catalog with the changed configuration as a document, and notes; unchanged where there is none."""
    if config is None:
        stale = f"{CONFIG} stays as it is, although {', '.join(edits)} changed"
        return catalog, (stale,) if CONFIG in carried_of(catalog) else ()
    made = {name: value for name, value in config.items() if name not in edits or edits[name] is not None}
    made |= {name: value for name, value in edits.items() if value is not None}
    if made == config:
        return catalog, ()
    data = json.dumps(made, indent=2, ensure_ascii=False) + "\n"
    note = f"{CONFIG}: {', '.join(_edit_text(config, name, value) for name, value in edits.items())}"
    return with_documents(catalog, {CONFIG: data.encode()}), (note,)


def _edit_text(config: Mapping[str, object], name: str, value: object) -> str:
    """``dtype is now float32``, ``quantization_config is gone``."""
    if value is None:
        return f"{name} is gone"
    if isinstance(value, (str, bool)):
        return f"{name} is now {str(value).lower() if isinstance(value, bool) else value}"
    return f"{name} is {'changed' if name in config else 'new'}"
