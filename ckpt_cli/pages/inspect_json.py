"""The object of ``ckpt inspect --json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ckpt_cli.pages.inspect_listing import listed_json
from ckpt_cli.pages.inspect_object import object_json, plain_json
from ckpt_cli.pages.inspect_page import choose_catalog, map_of
from ckpt_cli.pages.inspect_stats import stats_json
from ckpt_cli.pages.inspect_tensor import number_json, place_json
from ckpt_cli.pages.pictures.shards import map_json
from core.megatron.optimizer.form import role_of
from core.verbs.inspect.preview import first_values, places_of
from core.verbs.inspect.summary import bare_key

if TYPE_CHECKING:
    from core.engine.catalog.tensor import Tensor
    from core.engine.numbers.statistics import ValueStatistics
    from core.opening.open import Checkpoint
    from core.verbs.inspect.model_description import ModelDescription
    from core.verbs.inspect.summary import Summary


def inspect_json(
    checkpoint: Checkpoint,
    summary: Summary,
    tensors: Mapping[str, Tensor],
    objects: list[str],
    *,
    is_selected: bool,
    n_values: int,
    statistics: Mapping[str, ValueStatistics | None],
    has_maps: bool = False,
) -> dict[str, object]:
    """Return the object of ``--json``; its schema is in ``ckpt_cli.commands.inspect``.

    Args:
        is_selected: KEY selected the entries: add places of tensors and contents of objects.
        n_values: number of values to add of each selected tensor.
        statistics: description of the values of each tensor that was measured, by key.
        has_maps: add the map of each tensor.
    """
    return {
        "schema": "ckpt.inspect/1",
        "path": summary.path,
        "format": summary.format,
        "title": summary.title,
        "version": summary.version,
        "iteration": summary.iteration,
        "files": summary.n_files,
        "unopened_files": summary.n_unopened,
        "file_bytes": summary.file_bytes,
        "beside": sorted(checkpoint.catalog.files),
        "parallel": dict(summary.parallel),
        "ranks": summary.n_ranks,
        "model": dict(summary.model),
        "architecture": _architecture_json(summary.description),
        "groups": [
            {
                "name": group.name,
                "tensors": group.n_tensors,
                "elements": group.n_elements,
                "bytes": group.n_bytes,
                "dtypes": dict(group.dtypes),
            }
            for group in summary.groups
        ],
        "totals": {
            "tensors": summary.total.n_tensors,
            "elements": summary.total.n_elements,
            "bytes": summary.total.n_bytes,
            "objects": summary.n_objects,
        },
        "optimizer": summary.optimizer
        and {"format": summary.optimizer, "title": summary.optimizer_title},
        "can": [
            {"action": v.action, "possible": v.is_possible, "to": list(v.targets), "why": v.why}
            for v in summary.capabilities
        ],
        "iterations": [
            listed_json(item)
            for item in (summary.iterations.checkpoints if summary.iterations else ())
        ],
        "is_unsharded": summary.is_unsharded,
        "notes": list(summary.notes),
        "dropped": list(map(str, checkpoint.catalog.dropped)),
        "attributes": {
            path: plain_json(values)
            for path, values in summary.attributes.items()
            if path not in checkpoint.catalog.tensors
        },
        "tensors": [
            _tensor_json(
                checkpoint, summary, key, tensor, is_selected=is_selected, n_values=n_values
            )
            | ({"stats": stats_json(statistics[key])} if key in statistics else {})
            | ({"map": map_json(map_of(summary, checkpoint, key))} if has_maps else {})
            for key, tensor in tensors.items()
        ],
        "objects": [
            {"key": key, "value": object_json(summary.view.objects[key], checkpoint)}
            if is_selected
            else {"key": key}
            for key in objects
        ],
    }


def _architecture_json(model: ModelDescription) -> dict[str, object]:
    """Return the family and the sizes of a model; null for what is unknown."""
    return {
        "family": model.family,
        "parameters": model.n_parameters,
        "layers": model.n_layers,
        "hidden": model.hidden_size,
        "heads": model.n_heads,
        "groups": model.n_groups,
        "ffn": model.ffn_size,
        "swiglu": model.is_swiglu,
        "experts": model.n_experts,
        "experts_per_token": model.n_experts_per_token,
        "expert_ffn": model.expert_ffn_size,
        "vocabulary": model.vocab_size,
        "padded_vocabulary": model.padded_vocab_size,
        "tied": model.is_tied,
    }


def _tensor_json(
    checkpoint: Checkpoint,
    summary: Summary,
    key: str,
    tensor: Tensor,
    *,
    is_selected: bool,
    n_values: int,
) -> dict[str, object]:
    """Return a tensor, with its places and values only if it was selected by KEY."""
    catalog = choose_catalog(summary, checkpoint, key)
    entry: dict[str, object] = {
        "key": key,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "bytes": tensor.n_bytes,
        "group": role_of(bare_key(key, catalog)),
    }
    if key in summary.attributes:
        entry["attributes"] = plain_json(summary.attributes[key])
    if is_selected:
        entry["places"] = [place_json(place) for place in places_of(catalog, key)]
        if n_values:
            values = first_values(checkpoint.store, catalog, key, n_values)
            entry["values"] = [number_json(value) for value in values]
    return entry
