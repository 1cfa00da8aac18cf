"""Give the tensors of two checkpoints the same names, so that they can be compared.

===================  =============  ===========================================================
 A                    B              compared as
===================  =============  ===========================================================
 Megatron             Megatron       global per-layer tensors without padding rows, under the
                                     names of A's implementation (local, Transformer Engine)
 Megatron             Hugging Face   the model's tensors under Megatron's names
                                     (``core.hf.to_megatron``)
 any other            any other      their own names
 rank files           rank files     rank by rank, if one of the layouts is not understood
===================  =============  ===========================================================

``Side.left_out`` reports the parts that cannot be compared; two checkpoints with such parts do not
count as equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from core.engine.catalog.attributes import build_entry_values, turn_into_attributes
from core.engine.catalog.catalog import Catalog, file_key
from core.engine.catalog.mapping_attributes import VERSIONS, attributes_of
from core.engine.catalog.optimizer_keys import is_optimizer_key
from core.errors import CheckpointingException, CorruptError, UnsupportedError
from core.files.json_object import read_json_object
from core.formats.huggingface.files import CONFIG, read_config_json
from core.megatron.extras.common_state import EXTRA_STATE, OPTIMIZER
from core.megatron.model.args import parse_facts
from core.megatron.model.topology import Topology
from core.megatron.optimizer.form import role_of
from core.megatron.placement.implementation import with_implementation
from core.megatron.rules.rules import Rules
from core.opening.canonical import canonical
from core.opening.objects import loaded
from core.opening.open import Checkpoint
from core.opening.source_files import config_of_source
from core.pickle.inert import TensorLeaf
from core.values import dataclass
from core.verbs.inspect.preview import first_values

if TYPE_CHECKING:
    from core.files.store import ReadStore
    from core.opening.canonical import Canonical

_MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two checkpoints of a comparison.

    Args:
        source: the opened checkpoint.
        catalog: the tensors, under the names of the comparison.
        entries: name → value of the entries that are not tensors.
        left_out: parts that cannot be compared although they should be, with the reasons.
        notes: remarks for the user.
    """

    source: Checkpoint
    catalog: Catalog
    entries: Mapping[str, object]
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return repr(self.source)

    @property
    def title(self) -> str:
        """The path, with format, parallel sizes and iteration."""
        parts = [self.source.format.name]
        if self.topology is not None:
            parts.append(str(self.topology))
        if self.source.iteration is not None:
            parts.append(f"iteration {self.source.iteration}")
        return f"{self.source.path}  ({', '.join(parts)})"

    @property
    def topology(self) -> Topology | None:
        """Parallel sizes of a checkpoint in Megatron's layout, or None for other layouts."""
        return self.catalog.facet(Topology)


def sides_of(a: Checkpoint, b: Checkpoint, *, rules: Rules) -> tuple[Side, Side]:
    """Bring two checkpoints into a form in which they can be compared.

    Raises:
        UnsupportedError: only one of them has rank files whose layout is not understood.
        CheckpointingException: an object cannot be read.
    """
    form_a, form_b = canonical(a, rules=rules), canonical(b, rules=rules)
    if not (form_a.is_global and form_b.is_global):
        return _rank_by_rank((a, b), (form_a, form_b))
    if form_a.has_layout and form_b.has_layout:
        side_a, side_b = _of_one_implementation((a, b), (form_a, form_b), rules)
        # If an optimizer is not understood on one side, neither side's can be compared.
        if side_a.left_out or side_b.left_out:
            return _model_of(side_a), _model_of(side_b)
        return side_a, side_b
    if form_a.has_layout:
        return _with_hf(a, form_a, b, form_b)
    if form_b.has_layout:
        megatron, other = _with_hf(b, form_b, a, form_a)
        return other, megatron
    side_a, side_b = _side(a, form_a), _side(b, form_b)
    return side_a, _named_like(side_b, side_a)


def _named_like(side: Side, first: Side) -> Side:
    """Return a model's side with the names of the first one, if only the spellings differ.

    Both must be models of transformers, whose versions name some tensors differently.
    """
    from core.hf.names import is_hf
    from core.hf.tensors.spelling import name_like

    if not all(is_hf(each.catalog, config_of_source(each.source)) for each in (side, first)):
        return side
    catalog, new_of = name_like(side.catalog, first.catalog)
    if not new_of:
        return side
    old, new = next(iter(new_of.items()))
    note = (
        f"{len(new_of):,} tensors have names from a different transformers version ({old}), so "
        f"they are compared under the other checkpoint's names ({new})"
    )
    return replace(side, catalog=catalog, notes=(*side.notes, note))


def _side(source: Checkpoint, form: Canonical, catalog: Catalog | None = None) -> Side:
    """Build a side from a catalog, by default that of the canonical form."""
    catalog = form.catalog if catalog is None else catalog
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    # With a layout, the failure is that of the optimizer, which is missing then. Without one, the
    # tensors can still be compared under their stored names.
    if form.failure is not None and form.has_layout:
        left_out = (f"cannot interpret the optimizer state: {form.failure}",)
    elif form.failure is not None:
        notes = (f"cannot interpret the layout: {form.failure}",)
    return Side(source, catalog, _entries(catalog, source.store), left_out, notes)


def _rank_by_rank(
    sources: tuple[Checkpoint, Checkpoint], forms: tuple[Canonical, Canonical]
) -> tuple[Side, Side]:
    """Build both sides with the tensors of single ranks.

    Raises:
        UnsupportedError: one of the checkpoints does not consist of rank files.
    """
    failure = next(form.failure for form in forms if not form.is_global)
    if not all(source.catalog.is_rank_local for source in sources):
        reason = failure.message if failure else "rank files"
        raise UnsupportedError(
            f"only one of the two checkpoints' layouts can be interpreted: {reason}",
            key=failure.key if failure else None,
            hint=failure.hint if failure else None,
        )
    sides = []
    for source, form in zip(sources, forms, strict=True):
        catalog = loaded(source.catalog, source.store)
        notes = () if form.failure is None else (f"compared rank by rank: {form.failure}",)
        sides.append(Side(source, catalog, _entries(catalog, source.store), (), notes))
    return sides[0], sides[1]


def _of_one_implementation(
    sources: tuple[Checkpoint, Checkpoint], forms: tuple[Canonical, Canonical], rules: Rules
) -> tuple[Side, Side]:
    """Build the sides of two Megatron checkpoints, B's with the names of A's implementation.

    The implementations, Megatron's own and Transformer Engine, name some tensors differently.
    """
    a, b = forms
    side_a = _side(sources[0], a)
    try:
        is_local = _is_local(a.catalog, rules)
        if is_local == _is_local(b.catalog, rules):
            return side_a, _side(sources[1], b)
        name = "local" if is_local else "transformer_engine"
        side_b = _side(sources[1], b, with_implementation(b.catalog, name, rules=rules))
        note = f"its tensor names come from a different implementation; compared as {name}"
    except CheckpointingException as err:
        side_b = _side(sources[1], b)
        note = f"its tensor names cannot be mapped to the other implementation's: {err.message}"
    return side_a, replace(side_b, notes=(*side_b.notes, note))


def _model_of(side: Side) -> Side:
    """Drop the optimizer from a side."""
    catalog = side.catalog
    tensors = {key: tensor for key, tensor in catalog.tensors.items() if not is_optimizer_key(key)}
    entries = {name: value for name, value in side.entries.items() if name != OPTIMIZER}
    return replace(side, catalog=replace(catalog, tensors=tensors), entries=entries)


def _is_local(catalog: Catalog, rules: Rules) -> bool:
    """Return whether the names are those of Megatron's local implementation."""
    return parse_facts(catalog.args, names=rules.model_of(catalog.tensors)).is_local


def _with_hf(
    megatron: Checkpoint, form: Canonical, other: Checkpoint, plain: Canonical
) -> tuple[Side, Side]:
    """Build the sides of a Megatron checkpoint and another, which may be Hugging Face's.

    Args:
        form: the canonical form of ``megatron``.
        plain: the canonical form of ``other``, without a layout.

    Returns:
        Both with Megatron's names if the other has Hugging Face's and a config.json, else each with
        its own names.

    Raises:
        CheckpointingException: Hugging Face's names cannot be mapped to Megatron's.
    """
    from core.hf.names import is_hf
    from core.hf.to_megatron import to_megatron

    catalog = plain.catalog
    config = read_config_json(other.store) if CONFIG in catalog.files else None
    if not is_hf(catalog, config):
        note = (
            "its tensor names are neither Megatron's nor those of a Hugging Face model with a "
            "config.json, so the tensors are compared under their stored names"
        )
        second = _side(other, plain)
        return _side(megatron, form), replace(second, notes=(*second.notes, note))
    assert config is not None

    # Map the names to those of the implementation that wrote the Megatron checkpoint.
    is_local = parse_facts(form.catalog.args).is_local
    implementation = "local" if is_local else "transformer_engine"
    mapped = to_megatron(catalog, config, transformer_impl=implementation)

    # Keep only the model: a Hugging Face checkpoint has neither an optimizer nor arguments.
    model, mapped_model = (
        {key: tensor for key, tensor in tensors.items() if role_of(key) == "model"}
        for tensors in (form.catalog.tensors, mapped.tensors)
    )
    n_dropped = len(form.catalog.tensors) - len(model)
    dropped = (
        f"{n_dropped} optimizer tensors are not compared, because Hugging Face checkpoints have no "
        "optimizer"
    )
    first = Side(
        megatron,
        replace(form.catalog, tensors=model),
        entries={},
        notes=(dropped,) if n_dropped else (),
    )
    second = Side(
        other,
        replace(mapped.without_facets(Topology), tensors=mapped_model),
        entries={},
        notes=(f"compared under Megatron's names ({config.get('model_type')})",),
    )
    return first, second


def _entries(catalog: Catalog, store: ReadStore) -> dict[str, object]:
    """Collect name → value of the entries that are not tensors.

    Raises:
        CheckpointingException: a value or a small file cannot be read.
    """
    catalog = turn_into_attributes(catalog)
    result: dict[str, object] = {str(name): value for name, value in (catalog.common or {}).items()}
    for key, item in catalog.objects.items():
        # Modules without a state have an empty extra state, which some formats do not store.
        if not (EXTRA_STATE in key and item.value in (None, [None])):
            result[key] = item.value
    for attribute in attributes_of(catalog.skeleton):
        if attribute.name != VERSIONS:  # only torch's files record the versions of modules
            result[f"{attribute.key} (attribute)"] = attribute.value
    # An optimizer gets the same entries, whatever form its format stores it in.
    optimizer = catalog.optimizer
    if optimizer is not None:
        step = _number(catalog, store, optimizer.step)
        groups = [dict(group.settings) for group in optimizer.groups]
        result[OPTIMIZER] = {
            **({} if step is None else {"step": step}),
            "param_groups": groups,
            **optimizer.entries,
        }
    result |= {path: _document(store, path) for path in catalog.files}
    # Metadata and attributes get the same entries too.
    return result | build_entry_values(catalog)


def _number(catalog: Catalog, store: ReadStore, value: object) -> object:
    """Read a number that may be stored as a tensor of one element; return other values as is."""
    if not isinstance(value, TensorLeaf) or catalog.tensor(value.key).n_elements != 1:
        return value
    return first_values(store, catalog, value.key, 1)[0]


def _document(store: ReadStore, path: str) -> object:
    """Return the parsed content of a configuration, or a tensor with the bytes of any other file.

    A configuration that is not JSON is compared as bytes too.
    """
    if path.endswith("config.json"):
        with suppress(CorruptError):
            return read_json_object(store, path, max_bytes=_MAX_CONFIG_BYTES)
    return TensorLeaf(file_key(path))
