"""Bring two checkpoints under the same names, so that they can be compared.

==================  ==================
===========================================================================
 A                   B                   compared as
==================  ==================
===========================================================================
 Megatron's          Megatron's          global per-layer tensors, without padding rows; names of
 one implementation
 Megatron's          Hugging Face's      the model's tensors under Megatron's names
 (``core.hf.to_megatron``)
 anything else       anything else       the names that they have
 rank files          rank files          rank by rank, where one of the layouts is not understood
==================  ==================
===========================================================================

What cannot be compared is reported in ``Side.left_out``; two checkpoints are not called equal in
spite of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from core.catalog.catalog import Catalog
from core.catalog.files_beside import carried_of
from core.catalog.mapping_attributes import VERSIONS, attributes_of
from core.changes.select import is_optimizer_key
from core.errors import CheckpointingException, CorruptError, UnsupportedError
from core.files.json_object import read_json_object
from core.formats.huggingface.files import CONFIG, config_of
from core.formats.torch.format import load_object
from core.inspect.preview import first_values
from core.megatron.extras.common_state import EXTRA_STATE, OPTIMIZER
from core.megatron.model.args import facts_of
from core.megatron.model.topology import Topology
from core.megatron.optimizer.form import role_of
from core.megatron.placement.implementation import with_implementation
from core.megatron.reshard.reshard import Rules
from core.opening.canonical import canonical
from core.opening.objects import loaded
from core.opening.open import Checkpoint
from core.pickle.inert import TensorLeaf

if TYPE_CHECKING:
    from core.files.store import ReadStore
    from core.opening.canonical import Canonical


@dataclass(frozen=True, slots=True)
class Side:
    """One of two checkpoints that are compared.

    Args:
        source: the opened checkpoint.
        catalog: its tensors under the names of the comparison.
        entries: everything else that is compared, by name.
        left_out: what cannot be compared although it should be, with the reason.
        notes: what the user should know.
    """

    source: Checkpoint
    catalog: Catalog
    entries: Mapping[str, object]
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def topology(self) -> Topology | None:
        """Return the parallel sizes of a checkpoint in Megatron's layout, or None."""
        return self.catalog.facet(Topology)


def sides_of(a: Checkpoint, b: Checkpoint, *, rules: Rules) -> tuple[Side, Side]:
    """Return both checkpoints in a form that can be compared.

    Raises:
        UnsupportedError: only one of them holds rank files whose layout is not understood.
        CheckpointingException: an object cannot be read.
    """
    forms = canonical(a, rules=rules), canonical(b, rules=rules)
    if not (forms[0].is_global and forms[1].is_global):
        return _rank_by_rank((a, b), forms)
    if forms[0].has_layout and forms[1].has_layout:
        sides = _of_one_implementation((a, b), forms, rules)
        return (
            sides
            if not any(side.left_out for side in sides)
            else (_model_of(sides[0]), _model_of(sides[1]))
        )
    if forms[0].has_layout:
        return _with_hf(a, forms[0], b, forms[1])
    if forms[1].has_layout:
        megatron, other = _with_hf(b, forms[1], a, forms[0])
        return other, megatron
    return _side(a, forms[0]), _side(b, forms[1])


def _side(source: Checkpoint, form: Canonical, catalog: Catalog | None = None) -> Side:
    """Return a side under its own names."""
    catalog = form.catalog if catalog is None else catalog
    left_out: tuple[str, ...] = ()
    if form.failure is not None and form.has_layout:
        left_out = (f"cannot interpret the optimizer state: {form.failure}",)
    notes = (
        ()
        if form.failure is None or form.has_layout
        else (f"cannot interpret the layout: {form.failure}",)
    )
    return Side(source, catalog, _entries(catalog, source.store), left_out, notes)


def _rank_by_rank(
    sources: tuple[Checkpoint, Checkpoint], forms: tuple[Canonical, Canonical]
) -> tuple[Side, Side]:
    """Return both sides rank by rank.

    Raises:
        UnsupportedError: one of them does not hold rank files.
    """
    failure = next(form.failure for form in forms if not form.is_global)
    if not all(source.catalog.is_rank_local for source in sources):
        raise UnsupportedError(
            f"the layout of only one of them can be interpreted: {failure.message if failure else 'rank files'}",
            key=failure.key if failure else None,
            hint=failure.hint if failure else None,
        )
    sides = []
    for source, form in zip(sources, forms, strict=True):
        catalog = loaded(source.catalog, source.store, load_object)
        notes = () if form.failure is None else (f"compared rank by rank: {form.failure}",)
        sides.append(Side(source, catalog, _entries(catalog, source.store), (), notes))
    return sides[0], sides[1]


def _of_one_implementation(
    sources: tuple[Checkpoint, Checkpoint], forms: tuple[Canonical, Canonical], rules: Rules
) -> tuple[Side, Side]:
    """Return two Megatron checkpoints, with B under the names of A's implementation."""
    a, b = forms
    side_a = _side(sources[0], a)
    try:
        is_local = _is_local(a.catalog, rules)
        if is_local == _is_local(b.catalog, rules):
            return side_a, _side(sources[1], b)
        name = "local" if is_local else "transformer_engine"
        side_b = _side(sources[1], b, with_implementation(b.catalog, name, rules=rules))
        note = f"its names are those of the other implementation; compared as {name}"
    except CheckpointingException as err:
        side_b, note = _side(sources[1], b), f"names are compared as they are: {err}"
    return side_a, replace(side_b, notes=(*side_b.notes, note))


def _model_of(side: Side) -> Side:
    """Return a side without its optimizer, whose form is unknown on one of the sides."""
    catalog = side.catalog
    tensors = {key: meta for key, meta in catalog.tensors.items() if not is_optimizer_key(key)}
    entries = {name: value for name, value in side.entries.items() if name != OPTIMIZER}
    return replace(side, catalog=replace(catalog, tensors=tensors), entries=entries)


def _is_local(catalog: Catalog, rules: Rules) -> bool:
    """Return whether the names are those of Megatron's local implementation."""
    return facts_of(catalog.args, names=rules.model_of(catalog.tensors)).is_local


def _with_hf(
    megatron: Checkpoint, form: Canonical, other: Checkpoint, plain: Canonical
) -> tuple[Side, Side]:
    """Return a Megatron checkpoint and another, under Megatron's names if it has Hugging Face's."""
    from core.hf import is_hf, to_megatron

    catalog = plain.catalog
    config = config_of(other.store) if CONFIG in carried_of(catalog) else None
    if not is_hf(catalog, config):
        note = "its names are neither Megatron's nor Hugging Face's with a config.json; compared as they are"
        second = _side(other, plain)
        return _side(megatron, form), replace(second, notes=(*second.notes, note))
    assert config is not None
    fields = form.catalog.args
    implementation = "local" if facts_of(fields).is_local else "transformer_engine"
    mapped = to_megatron(catalog, config, transformer_impl=implementation)
    model = {key: meta for key, meta in form.catalog.tensors.items() if role_of(key) == "model"}
    n_more = len(form.catalog.tensors) - len(model)
    notes = (
        [f"{n_more} optimizer tensors not compared: Hugging Face checkpoints have none"]
        if n_more
        else []
    )
    first = Side(megatron, replace(form.catalog, tensors=model), {}, (), tuple(notes))
    model = {key: meta for key, meta in mapped.tensors.items() if role_of(key) == "model"}
    note = f"compared under Megatron's names ({config.get('model_type')})"
    return first, Side(
        other, replace(mapped.without_facets(Topology), tensors=model), {}, (), (note,)
    )


def _entries(catalog: Catalog, store: ReadStore) -> dict[str, object]:
    """Return everything that is not a tensor, by name."""
    result: dict[str, object] = {str(name): value for name, value in (catalog.common or {}).items()}
    for key, item in catalog.objects.items():
        if not (EXTRA_STATE in key and item.value in (None, [None])):
            result[key] = item.value
    for attribute in attributes_of(catalog.skeleton):
        if attribute.name != VERSIONS:  # of modules, which formats other than torch's do not have
            result[f"{attribute.key} (attribute)"] = attribute.value
    optimizer = catalog.optimizer
    if optimizer is not None:
        step = _number(catalog, store, optimizer.step)
        groups = [dict(group.settings) for group in optimizer.groups]
        result[OPTIMIZER] = {
            **({} if step is None else {"step": step}),
            "param_groups": groups,
            **optimizer.entries,
        }
    for path, key in carried_of(catalog).items():
        result[path] = _document(store, path, key)
    return result


def _number(catalog: Catalog, store: ReadStore, value: object) -> object:
    """Return the value of a number that may be stored as a tensor of one element."""
    if not isinstance(value, TensorLeaf) or catalog.meta(value.key).n_elements != 1:
        return value
    return first_values(store, catalog, value.key, 1)[0]


def _document(store: ReadStore, path: str, key: str) -> object:
    """Return the parsed content of a configuration, or the bytes of any other file as a tensor."""
    if path.endswith("config.json"):
        with suppress(CorruptError):
            return read_json_object(store, path, max_bytes=_MAX_CONFIG_BYTES)
    return TensorLeaf(key)


_MAX_CONFIG_BYTES = 1 << 20
