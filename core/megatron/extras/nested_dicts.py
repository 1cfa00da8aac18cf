"""Nested state dicts, as models of ``megatron.legacy`` save them.

::

    model
    ├── language_model
    │   ├── embedding
    │   │   ├── word_embeddings      OrderedDict  weight
    │   │   └── position_embeddings  OrderedDict  weight
    │   ├── encoder                  OrderedDict  layers.0.input_norm.weight …
    │   └── output_layer             OrderedDict  weight
    └── word_embeddings_for_head     OrderedDict  weight

``encoder`` is ``transformer`` in older files; ``word_embeddings_for_head`` is in the last of
several pipeline stages. A full name is the path, joined by dots
(``language_model.encoder.layers.0.input_norm.weight``); a nesting lists the names of the dicts, so
that writing can build the same ones.

Source: Megatron-LM 00caa53a
    ``megatron/legacy/model/{language_model,gpt_model,bert_model,t5_model}.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import MegatronModel
from core.engine.catalog.mapping_attributes import VERSIONS, record_attributes
from core.errors import CorruptError
from core.megatron.extras.common_state import EXTRA_STATE, is_ordered, module_versions
from core.megatron.rules.rules import GPT, Rules, Wrapper
from core.pickle.inert import as_mapping, make_ordered_dict
from core.values import dataclass

MAX_DEPTH = 8
_WRAPPED = "module."
"""Beginning of all names in the state dict of a model that another module wraps for training."""
Nesting = Mapping[str, bool]
"""Full name of a dict (``""`` for the outermost) → True for an OrderedDict."""


@dataclass(frozen=True, slots=True)
class FlatDict:
    """A state dict without its nesting.

    Args:
        entries: name → tensor or object.
        nesting: the dicts that were flattened.
        versions: module → its entry in torch's ``_metadata``.
        outer: beginning of all names that was removed, such as ``module.``.
        wrapper: the names of the complete model, if the beginning of its GPT model's was removed.
    """

    entries: dict[str, object] = field(default_factory=dict)
    nesting: dict[str, bool] = field(default_factory=dict)
    versions: dict[str, object] = field(default_factory=dict)
    outer: str = ""
    wrapper: Wrapper | None = None


@dataclass(frozen=True, slots=True)
class _NestedDict:
    """A dict under construction.

    Args:
        name: full name of the dict.
    """

    name: str
    entries: dict[object, object] = field(default_factory=dict)


def flattened(container: object, *, rank: str) -> FlatDict:
    """Return the entries of a model chunk's state dict by full names.

    Args:
        rank: the rank's directory, for messages.

    Raises:
        CorruptError: the state dict is not a dict, is nested deeper than ``MAX_DEPTH``, or has two
            entries with the same full name.
    """
    flat = FlatDict()
    _flatten(container, "", flat, depth=0, rank=rank)
    return flat


def drop_versions(catalog: Catalog) -> Catalog:
    """Return the global form without the versions of modules, which only rank files store."""
    model = catalog.facet(MegatronModel)
    if model is None or not model.module_versions:
        return catalog
    dropped = (*catalog.dropped, *record_attributes([f"model.{VERSIONS}"]))
    return replace(catalog, dropped=dropped).with_facet(replace(model, module_versions={}))


def without_outer_names(flat: FlatDict, rules: Rules) -> FlatDict:
    """Return a chunk's state dict with names as a GPT model alone has them.

    Training scripts may save the model inside another module: one that wraps it for training
    (``module.``), or one that has towers beside it (``language_model.``, Megatron-LM's LLaVA). A
    model of megatron.legacy has ``language_model.`` as well, but other names after it.
    """
    entries, versions = flat.entries, flat.versions
    outer = ""
    while entries and all(name.startswith(_WRAPPED) for name in entries):
        entries = {name.removeprefix(_WRAPPED): leaf for name, leaf in entries.items()}
        versions = {module.removeprefix(_WRAPPED): item for module, item in versions.items()}
        outer += _WRAPPED
    stacks = (*GPT.stacks, "decoder.final_layernorm.")
    wrapper = next(
        (
            wrapper
            for wrapper in rules.wrappers
            if any(name.startswith(tuple(wrapper.text + s for s in stacks)) for name in entries)
            and not any(name.startswith(rules.main_stacks) for name in entries)
        ),
        None,
    )
    if wrapper is not None:
        entries = {name.removeprefix(wrapper.text): leaf for name, leaf in entries.items()}
        # The GPT model's own entry is that of the complete model, which remains.
        own = wrapper.text.rstrip(".")
        versions = {
            module.removeprefix(wrapper.text): item
            for module, item in versions.items()
            if module != own
        }
    if not outer and wrapper is None:
        return flat
    return FlatDict(entries, flat.nesting, versions, outer, wrapper)


def _flatten(container: object, prefix: str, into: FlatDict, *, depth: int, rank: str) -> None:
    """Add the entries of a state dict, and of the dicts within it, under their full names."""
    entries = as_mapping(container)
    if entries is None:
        kind = type(container).__name__
        raise CorruptError(f"the model's state dict is a {kind}, not a dict", rank=rank)
    if depth > MAX_DEPTH:
        raise CorruptError(
            f"state dicts are nested deeper than {MAX_DEPTH} levels", key=prefix, rank=rank
        )

    # Record the dict's class and versions, from which writing builds the same dicts.
    into.nesting[prefix] = is_ordered(container)
    for module, version in module_versions(container).items():
        into.versions[_joined(prefix, module) if module else prefix] = version

    # An extra state may be a dict as well, but it is not a state dict.
    for name, leaf in entries.items():
        full_name = _joined(prefix, str(name))
        if as_mapping(leaf) is not None and not full_name.endswith(EXTRA_STATE):
            _flatten(leaf, full_name, into, depth=depth + 1, rank=rank)
            continue
        if full_name in into.entries:
            raise CorruptError("two entries of the model have this name", key=full_name, rank=rank)
        into.entries[full_name] = leaf


def nested(
    entries: Mapping[object, object], versions: Mapping[str, object], nesting: Nesting
) -> object:
    """Return the state dict of a chunk, nested like the source's, without empty dicts.

    Args:
        entries: full name → tensor or object, in order.
        versions: module of this chunk → its entry in torch's ``_metadata``.
    """
    # Put every entry into the innermost dict around it; dicts are created when first needed, so
    # that they are in the order of their first entries.
    branches = {"": _NestedDict("")}

    def branch(name: str) -> _NestedDict:
        if name not in branches:
            branches[name] = _NestedDict(name)
            outer = branch(_around(name, nesting))
            outer.entries[name.removeprefix(_joined(outer.name, ""))] = branches[name]
        return branches[name]

    for name, leaf in entries.items():
        parent = branch(_around(str(name), nesting))
        parent.entries[str(name).removeprefix(_joined(parent.name, ""))] = leaf

    # Give the version of each module to the dict that contains the module, or that is its own.
    versions_of: dict[str, dict[object, object]] = {}
    for module, version in versions.items():
        owner = module if module in nesting else _around(module, nesting)
        local_name = module.removeprefix(owner).removeprefix("." if owner else "")
        versions_of.setdefault(owner, {})[local_name] = version
    return _finished(branches[""], versions_of, nesting)


def _finished(
    branch: _NestedDict, versions: Mapping[str, dict[object, object]], nesting: Nesting
) -> object:
    """Build a dict, and the dicts in it, as plain or ordered ones.

    Args:
        versions: name of a dict → ``_metadata`` of the modules in it.
    """
    entries = {
        name: _finished(leaf, versions, nesting) if isinstance(leaf, _NestedDict) else leaf
        for name, leaf in branch.entries.items()
    }
    if not nesting.get(branch.name):
        return entries
    container = make_ordered_dict(entries)
    if branch.name in versions:
        container.state = {"_metadata": make_ordered_dict(versions[branch.name])}
    return container


def _joined(prefix: str, name: str) -> str:
    """Return a name with a prefix and a dot; the name alone without a prefix."""
    return f"{prefix}.{name}" if prefix else name


def _around(name: str, nesting: Nesting) -> str:
    """Return the name of the innermost dict that contains an entry or another dict."""
    while name:
        name = name.rpartition(".")[0]
        if name in nesting:
            break
    return name
