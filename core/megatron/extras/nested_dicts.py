"""State dicts within state dicts, as models of ``megatron.legacy`` save themselves.

::

    model
    ├── language_model
    │   ├── embedding
    │   │   ├── word_embeddings      OrderedDict  weight
    │   │   └── position_embeddings  OrderedDict  weight
    │   ├── encoder                  OrderedDict  layers.0.input_norm.weight …   ("transformer" in older files)
    │   └── output_layer             OrderedDict  weight
    └── word_embeddings_for_head     OrderedDict  weight                         (last of several pipeline stages)

Names are those of the path, joined by dots (``language_model.encoder.layers.0.input_norm.weight``),
and a nesting tells at which dots a dict ends, so that writing gives the same dicts.

Source: Megatron-LM 00caa53a
    ``megatron/legacy/model/{language_model,gpt_model,bert_model,t5_model}.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from core.errors import CorruptError
from core.megatron.extras.common_state import EXTRA_STATE, is_ordered, module_versions
from core.pickle.inert import as_mapping, make_ordered_dict

MAX_DEPTH = 8
Nesting = Mapping[str, bool]
"""The names of a state dict (``""``) and of the dicts within it → whether each is an
OrderedDict.
"""


@dataclass(frozen=True, slots=True)
class FlatDict:
    """A state dict without its nesting.

    Args:
        entries: name → tensor or object.
        nesting: the dicts that it was made of.
        versions: module → what torch notes about it.
    """

    entries: dict[str, object] = field(default_factory=dict)
    nesting: dict[str, bool] = field(default_factory=dict)
    versions: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _NestedDict:
    """A dict under construction."""

    name: str
    entries: dict[object, object] = field(default_factory=dict)


def flattened(container: object, *, rank: str) -> FlatDict:
    """Return the entries of a model chunk's state dict by full names.

    Args:
        rank: the rank's directory, for messages.

    Raises:
        CorruptError: the state dict is not a dict, is nested too deeply, or has two entries of one
            name.
    """
    flat = FlatDict()
    _flatten(container, "", flat, depth=0, rank=rank)
    return flat


def _flatten(container: object, prefix: str, into: FlatDict, *, depth: int, rank: str) -> None:
    """Add the entries of a state dict, and of the dicts within it, under their full names."""
    entries = as_mapping(container)
    if entries is None:
        raise CorruptError(f"the model is a {type(container).__name__}, not a dict", rank=rank)
    if depth > MAX_DEPTH:
        raise CorruptError(
            f"state dicts are nested deeper than {MAX_DEPTH} levels", key=prefix, rank=rank
        )

    # Note what writing needs in order to give the same dicts.
    into.nesting[prefix] = is_ordered(container)
    for module, version in module_versions(container).items():
        into.versions[_joined(prefix, module) if module else prefix] = version
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
    """Return the state dict of a chunk, nested as others of the model are, without empty dicts.

    Args:
        entries: full name → tensor or object, in order.
        versions: module → what torch notes about it, of the modules of this chunk.
    """
    branches = {"": _NestedDict("")}

    def branch(name: str) -> _NestedDict:
        if name not in branches:
            branches[name] = new = _NestedDict(name)
            above = branch(_around(name, nesting))
            above.entries[name.removeprefix(_joined(above.name, ""))] = new
        return branches[name]

    for name, leaf in entries.items():
        into = branch(_around(str(name), nesting))
        into.entries[str(name).removeprefix(_joined(into.name, ""))] = leaf

    # The versions of modules go to the dict in which each module lies.
    inside: dict[str, dict[object, object]] = {}
    for module, version in versions.items():
        owner = module if module in nesting else _around(module, nesting)
        inside.setdefault(owner, {})[
            module.removeprefix(owner).removeprefix("." if owner else "")
        ] = version
    return _finished(branches[""], inside, nesting)


def _finished(
    branch: _NestedDict, versions: Mapping[str, dict[object, object]], nesting: Nesting
) -> object:
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
    return f"{prefix}.{name}" if prefix else name


def _around(name: str, nesting: Nesting) -> str:
    """Return the name of the innermost dict that an entry, or another dict, lies in."""
    while name:
        name = name.rpartition(".")[0]
        if name in nesting:
            break
    return name
