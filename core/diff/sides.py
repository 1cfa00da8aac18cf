"""Two checkpoints under the same names, so that they can be compared.

==================  ==================  ===========================================================================
 A                   B                   compared as
==================  ==================  ===========================================================================
 Megatron's          Megatron's          global per-layer tensors, without padding rows; names of one implementation
 Megatron's          Hugging Face's      the model's tensors under Megatron's names (``core.hf.to_megatron``)
 anything else       anything else       the names that they have
 rank files          rank files          rank by rank, where one of the layouts is not understood
==================  ==================  ===========================================================================

What cannot be compared is told in ``Side.left_out``, and is no reason to call two checkpoints equal.
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
        source: it, opened.
        catalog: its tensors under the names of the comparison.
        entries: what else is compared, by name.
        left_out: what of it is not compared although it should be, with the reason.
        notes: what the user should know.
    """

    source: Checkpoint
    catalog: Catalog
    entries: Mapping[str, object]
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def topology(self) -> Topology | None:
        """Its parallel sizes, where it has Megatron's layout."""
        return self.catalog.facet(Topology)


def sides_of(a: Checkpoint, b: Checkpoint, *, rules: Rules) -> tuple[Side, Side]:
    """Both checkpoints in a form that can be compared.

    Raises:
        UnsupportedError: one of them holds rank files that are not understood, and the other is something else.
        CheckpointingException: an object cannot be read.
    """
    forms = canonical(a, rules=rules), canonical(b, rules=rules)
    if not (forms[0].is_global and forms[1].is_global):
        return _rank_by_rank((a, b), forms)
    if forms[0].has_layout and forms[1].has_layout:
        sides = _of_one_implementation((a, b), forms, rules)
        return sides if not any(side.left_out for side in sides) else (_model_of(sides[0]), _model_of(sides[1]))
    if forms[0].has_layout:
        return _with_hf(a, forms[0], b, forms[1])
    if forms[1].has_layout:
        other, one = _with_hf(b, forms[1], a, forms[0])
        return one, other
    return _side(a, forms[0]), _side(b, forms[1])


def _side(source: Checkpoint, form: Canonical, catalog: Catalog | None = None) -> Side:
    """A side as it is."""
    catalog = form.catalog if catalog is None else catalog
    left_out: tuple[str, ...] = ()
    if form.failure is not None and form.has_layout:
        left_out = (f"the optimizer's state is not understood: {form.failure}",)
    notes = () if form.failure is None or form.has_layout else (f"its layout is not understood: {form.failure}",)
    return Side(source, catalog, _entries(catalog, source.store), left_out, notes)


def _rank_by_rank(sources: tuple[Checkpoint, Checkpoint], forms: tuple[Canonical, Canonical]) -> tuple[Side, Side]:
    failure = next(form.failure for form in forms if not form.is_global)
    if not all(source.catalog.is_rank_local for source in sources):
        raise UnsupportedError(
            f"only one of them is understood as a whole: {failure.message if failure else 'rank files'}",
            key=failure.key if failure else None,
            hint=failure.hint if failure else None,
        )
    made = []
    for source, form in zip(sources, forms, strict=True):
        catalog = loaded(source.catalog, source.store, load_object)
        notes = () if form.failure is None else (f"compared rank by rank: {form.failure}",)
        made.append(Side(source, catalog, _entries(catalog, source.store), (), notes))
    return made[0], made[1]


def _of_one_implementation(
    sources: tuple[Checkpoint, Checkpoint], forms: tuple[Canonical, Canonical], rules: Rules
) -> tuple[Side, Side]:
    """Two Megatron checkpoints; B under the names of A's implementation."""
    one, other = forms
    first = _side(sources[0], one)
    try:
        is_local = _is_local(one.catalog, rules)
        if is_local == _is_local(other.catalog, rules):
            return first, _side(sources[1], other)
        name = "local" if is_local else "transformer_engine"
        second = _side(sources[1], other, with_implementation(other.catalog, name, rules=rules))
        note = f"its names are those of the other implementation; compared as {name}"
        return first, replace(second, notes=(*second.notes, note))
    except CheckpointingException as err:
        second = _side(sources[1], other)
        return first, replace(second, notes=(*second.notes, f"names are compared as they are: {err}"))


def _model_of(side: Side) -> Side:
    """A side without its optimizer, which is not understood on one of them."""
    catalog = side.catalog
    tensors = {key: meta for key, meta in catalog.tensors.items() if not is_optimizer_key(key)}
    entries = {name: value for name, value in side.entries.items() if name != OPTIMIZER}
    return replace(side, catalog=replace(catalog, tensors=tensors), entries=entries)


def _is_local(catalog: Catalog, rules: Rules) -> bool:
    return facts_of(catalog.args, names=rules.model_of(catalog.tensors)).is_local


def _with_hf(megatron: Checkpoint, form: Canonical, other: Checkpoint, plain: Canonical) -> tuple[Side, Side]:
    """A Megatron checkpoint and one that may have Hugging Face's names."""
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
    notes = [f"{n_more} tensors of the optimizer have no place beside Hugging Face's names"] if n_more else []
    first = Side(megatron, replace(form.catalog, tensors=model), {}, (), tuple(notes))
    model = {key: meta for key, meta in mapped.tensors.items() if role_of(key) == "model"}
    note = f"compared under Megatron's names ({config.get('model_type')})"
    return first, Side(other, replace(mapped.without_facets(Topology), tensors=model), {}, (), (note,))


def _entries(catalog: Catalog, store: ReadStore) -> dict[str, object]:
    """What is no tensor, by name."""
    found: dict[str, object] = {str(name): value for name, value in (catalog.common or {}).items()}
    for key, item in catalog.objects.items():
        if not (EXTRA_STATE in key and item.value in (None, [None])):
            found[key] = item.value
    for attribute in attributes_of(catalog.skeleton):
        if attribute.name != VERSIONS:  # of modules, which formats other than torch's do not have
            found[f"{attribute.key} (attribute)"] = attribute.value
    optimizer = catalog.optimizer
    if optimizer is not None:
        step = _number(catalog, store, optimizer.step)
        groups = [dict(group.settings) for group in optimizer.groups]
        found[OPTIMIZER] = {**({} if step is None else {"step": step}), "param_groups": groups, **optimizer.entries}
    for path, key in carried_of(catalog).items():
        found[path] = _document(store, path, key)
    return found


def _number(catalog: Catalog, store: ReadStore, value: object) -> object:
    """A number, where it is stored as a tensor of one element."""
    if not isinstance(value, TensorLeaf) or catalog.meta(value.key).n_elements != 1:
        return value
    return first_values(store, catalog, value.key, 1)[0]


def _document(store: ReadStore, path: str, key: str) -> object:
    """A file beside the weights: what a configuration says, the bytes of any other."""
    if path.endswith("config.json"):
        with suppress(CorruptError):
            return read_json_object(store, path, max_bytes=_MAX_CONFIG_BYTES)
    return TensorLeaf(key)


_MAX_CONFIG_BYTES = 1 << 20
