"""Give tensors and objects new keys: by regular expressions, without a prefix, or with one.

The optimizer's entries follow their parameters: ``optimizer.state.model.w.exp_avg`` becomes
``optimizer.state.w.exp_avg`` when ``model.w`` becomes ``w``, and so do Megatron's
(``optimizer.state.exp_avg.w``). An optimizer may use the names that parameters have inside the
model's container (``optimizer.state.w.exp_avg`` next to ``model.w``). Regular expressions apply to
the optimizer's keys too; an entry that they change directly does not follow its parameter. The
lists of names in parameter groups (``optimizer.param_groups.0.params``) always follow.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from shlex import quote

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import MegatronModel, TorchDistFacts
from core.engine.catalog.key_patterns import LIST_THEM
from core.engine.catalog.optimizer_keys import BITSANDBYTES, MASTERS, MOMENTS, is_optimizer_key
from core.errors import CorruptError, UsageError
from core.pickle.inert import ObjectLeaf, TensorLeaf
from core.pickle.nesting import LeafEntry, entries, join_path, map_leaves, nest_leaves
from core.values import dataclass

_OF_PARAMETER = re.compile(
    r"(?P<before>(?:.*?\.)??(?:state|param_groups)\.)(?P<parameter>.+?)"
    rf"(?P<after>(?:\.(?:{BITSANDBYTES}|exp_avg|exp_avg_sq|max_exp_avg_sq))?\.[^.]+)",
    re.DOTALL,
)
_MEGATRONS = re.compile(
    rf"(?P<before>(?:chained_\d+\.)?optimizer\.state\.(?:{'|'.join(sorted(MOMENTS | MASTERS))})\.)"
    r"(?P<parameter>.+)(?P<after>)",
    re.DOTALL,
)
_PARAMETERS = re.compile(r"(?:.*\.)?param_groups\.\d+\.(?:params|param_names)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class RenamedCatalog:
    """A catalog under new keys.

    Args:
        catalog: the changed catalog.
        renamed: (old, new) for every key that changed.
    """

    catalog: Catalog
    renamed: Sequence[tuple[str, str]] = ()


def rename(catalog: Catalog, rules: Sequence[tuple[str, str]]) -> RenamedCatalog:
    """Rename tensors and objects by regular expressions, one after the other.

    Args:
        rules: ``(pattern, replacement)`` pairs.

    Raises:
        UsageError: a pattern is not valid, matches nothing, or two keys become one.
    """
    # Compile the rules.
    compiled = []
    for pattern, replacement in rules:
        try:
            compiled.append((re.compile(pattern), replacement))
        except re.error as err:
            raise UsageError(
                f"--rename: {pattern!r} is not a valid regular expression: {err}"
            ) from err
    if not compiled:
        return RenamedCatalog(catalog)

    # Apply them to every key, each to the result of the one before.
    new_of: dict[str, str] = {}
    used = [False] * len(compiled)
    for key in (*catalog.tensors, *catalog.objects):
        new = key
        for number, (expression, replacement) in enumerate(compiled):
            try:
                substituted = expression.sub(replacement, new)
            except (re.error, IndexError) as err:  # a group that the expression does not have
                raise UsageError(
                    f"--rename: {replacement!r} is not a valid replacement for "
                    f"{expression.pattern!r}: {err}"
                ) from err
            used[number] |= substituted != new
            new = substituted
        new_of[key] = new

    # A rule that matches nothing is a typing error.
    for (expression, _), was_used in zip(compiled, used, strict=True):
        if not was_used:
            raise UsageError(f"--rename: {expression.pattern!r} matches no key", hint=LIST_THEM)
    return _under(catalog, _with_states(catalog, new_of), option="--rename")


def strip_prefix(catalog: Catalog, prefixes: Sequence[str]) -> RenamedCatalog:
    """Remove prefixes from the keys that begin with them, one prefix after the other.

    Args:
        prefixes: texts such as ``model.``.

    Raises:
        UsageError: no key has a prefix, a key would be empty, or two keys become one.
    """
    new_of = {key: key for key in (*catalog.tensors, *catalog.objects)}
    for prefix in prefixes:
        # Refuse a prefix that no key begins with. It may be one inside the keys: name the option
        # for that.
        prefixed = {key for key, new in new_of.items() if prefix and new.startswith(prefix)}
        if not prefixed:
            inner = next((new for new in new_of.values() if prefix and f".{prefix}" in new), None)
            hint = (
                LIST_THEM
                if inner is None
                else f"the key {inner!r} contains it, so use --rename '{re.escape(prefix)}='"
            )
            raise UsageError(f"--strip-prefix: no key begins with {prefix!r}", hint=hint)
        # Refuse "model" for "model.": every key would begin with a dot.
        dotted = next((key for key in prefixed if new_of[key].startswith(f"{prefix}.")), None)
        if dotted is not None:
            raise UsageError(
                f"--strip-prefix: without {prefix!r}, the key begins with a dot",
                key=dotted,
                hint=f"include the dot: --strip-prefix {quote(prefix + '.')}",
            )
        new_of = {
            key: new[len(prefix) :] if key in prefixed else new for key, new in new_of.items()
        }
    return _under(catalog, _with_states(catalog, new_of), option="--strip-prefix")


def add_prefix(catalog: Catalog, prefix: str) -> RenamedCatalog:
    """Put a prefix before the keys of the model.

    These are the keys of all tensors except the optimizer's, and of objects below the same first
    names. In an optimizer's entry for a parameter, the parameter's name gets the prefix.

    Args:
        prefix: a text such as ``model.``.

    Raises:
        UsageError: the prefix is empty.
    """
    if not prefix:
        raise UsageError("--add-prefix: the prefix is empty")
    # Objects have no mark of the model: those of its modules are extra states, others are
    # schedulers, random states and the like.
    model = {key for key in catalog.tensors if not is_optimizer_key(key)}
    modules = {key.partition(".")[0] for key in model if "." in key}
    model |= {
        key
        for key in catalog.objects
        if key.partition(".")[0] in modules and not is_optimizer_key(key)
    }
    new_of = {
        key: prefix + key if key in model else key for key in (*catalog.tensors, *catalog.objects)
    }
    return _under(catalog, _with_states(catalog, new_of), option="--add-prefix")


@dataclass(frozen=True, slots=True)
class OwnedEntry:
    """An entry of an optimizer that belongs to one parameter.

    Args:
        before, parameter, after: the parts of its key: ``optimizer.state.``, ``w``, ``.exp_avg``,
            or Megatron's ``optimizer.state.exp_avg.``, ``w`` and the empty string.
        tensor: the key of the parameter's tensor, which may be in a container (``model.w``).
    """

    before: str
    parameter: str
    after: str
    tensor: str

    def of(self, tensor: str) -> str:
        """Return the key of the entry for a parameter whose tensor has the key ``tensor``."""
        return f"{self.before}{self.name_of(tensor)}{self.after}"

    def name_of(self, tensor: str) -> str:
        """Return the optimizer's name of a parameter whose tensor has the key ``tensor``."""
        return tensor.removeprefix(self.tensor.removesuffix(self.parameter))


def _of_parameter(key: str) -> re.Match[str] | None:
    """Match a key of an optimizer's entry for a parameter; None for any other key."""
    return _MEGATRONS.fullmatch(key) or _OF_PARAMETER.fullmatch(key)


def owned_entries(catalog: Catalog) -> dict[str, OwnedEntry]:
    """Return the optimizer's entries that belong to a parameter of the catalog, by key.

    Parameter names that are not keys are looked up below the first names of the model's keys;
    all of them must be keys there, or none is assigned a parameter.
    """
    # Split the keys, and look up their parameters. torch numbers the parameters of a state dict;
    # such entries belong to no key.
    matches = {
        key: match
        for key in (*catalog.tensors, *catalog.objects)
        if (match := _of_parameter(key)) is not None
    }
    names = {match["parameter"] for match in matches.values() if not match["parameter"].isdecimal()}
    tensor_of = {name: name for name in names if name in catalog.tensors}
    unresolved = names - tensor_of.keys()
    if unresolved:
        # Find the shortest container, such as ``model.``, in which all the other names are keys.
        first = min(unresolved)
        tensors = [
            key
            for key in catalog.tensors
            if key.endswith(f".{first}") and not is_optimizer_key(key)
        ]
        for container in sorted((key[: -len(first)] for key in tensors), key=len):
            if all(container + name in catalog.tensors for name in unresolved):
                tensor_of |= {name: container + name for name in unresolved}
                break
    return {
        key: OwnedEntry(
            match["before"], match["parameter"], match["after"], tensor_of[match["parameter"]]
        )
        for key, match in matches.items()
        if match["parameter"] in tensor_of
    }


def _with_states(catalog: Catalog, new_of: Mapping[str, str]) -> dict[str, str]:
    """Add new keys for the optimizer's entries of the parameters that get a new one."""
    result = dict(new_of)
    owned = owned_entries(catalog)
    # Without its container, a key is what the optimizer calls it, although that may begin like the
    # container (``model.model.w``).
    contained = [entry for entry in owned.values() if entry.tensor != entry.parameter]
    if contained and all(new_of[entry.tensor] == entry.parameter for entry in contained):
        owned = {key: entry for key, entry in owned.items() if entry.tensor == entry.parameter}
    for key, entry in owned.items():
        if new_of[key] == key and new_of[entry.tensor] != entry.tensor:
            result[key] = entry.of(new_of[entry.tensor])
    return result


def _under(catalog: Catalog, new_of: Mapping[str, str], *, option: str) -> RenamedCatalog:
    """Return the catalog under new keys.

    Args:
        new_of: old key → new key, for every tensor and object.
        option: name of the option, for errors.

    Raises:
        UsageError: a new key is empty, or two keys become one.
    """
    old_of: dict[str, str] = {}
    for old, new in new_of.items():
        if not new:
            raise UsageError(f"{option} results in an empty key", key=old)
        if new in old_of:
            raise UsageError(f"{option} gives {old_of[new]!r} and {old!r} the same key", key=new)
        old_of[new] = old
    changes = [(old, new) for old, new in new_of.items() if old != new]
    followed = with_parameters(catalog, {old: (new,) for old, new in changes})
    return RenamedCatalog(rename_entries(followed, new_of), changes)


def with_parameters(catalog: Catalog, new_of: Mapping[str, Sequence[str]]) -> Catalog:
    """Replace the names of parameters in the parameter groups.

    A group uses the names of the optimizer's entries, which may differ from the model's keys
    (``optimizer.state.w.exp_avg`` next to ``model.w``).

    Args:
        new_of: old key → new keys, of the keys that change: several if a tensor is split, none if
            it is dropped.
    """
    # Add the names of the parameters in the optimizer's entries. A parameter whose entries moved
    # elsewhere keeps its name; one whose entries were dropped loses it.
    names = dict(new_of)
    for key, new_keys in new_of.items():
        old, matches = _of_parameter(key), [_of_parameter(new) for new in new_keys]
        if old is not None:
            names[old["parameter"]] = [
                new["parameter"]
                for new in matches
                if new is not None and new["before"] == old["before"]
            ] or ([old["parameter"]] if new_keys else [])

    def with_new_names(params: Iterable[object]) -> list[object]:
        result = [
            new
            for name in params
            for new in (names.get(name, (name,)) if isinstance(name, str) else (name,))
        ]
        return list(dict.fromkeys(result))

    # Replace them in the groups that are objects, and in those of Megatron's optimizer.
    objects = {
        key: replace(item, value=with_new_names(item.value))
        if _PARAMETERS.fullmatch(key) is not None and isinstance(item.value, list)
        else item
        for key, item in catalog.objects.items()
    }
    # Plain values stand in the skeleton, too.
    skeleton = catalog.skeleton
    if skeleton is not None:
        skeleton = map_leaves(
            skeleton,
            lambda entry: (
                with_new_names(entry.leaf)
                if isinstance(entry.leaf, list) and _PARAMETERS.fullmatch(entry.key) is not None
                else entry.leaf
            ),
        )
    optimizer = catalog.optimizer
    if optimizer is not None:
        groups = tuple(
            group
            if group.params is None
            else replace(group, params=tuple(map(str, with_new_names(group.params))))
            for group in optimizer.groups
        )
        catalog = replace(catalog, optimizer=replace(optimizer, groups=groups))
    return replace(catalog, objects=objects, skeleton=skeleton)


def rename_entries(catalog: Catalog, new_of: Mapping[str, str]) -> Catalog:
    """Replace the keys of a catalog in its tensors, objects, skeleton and facets.

    Hidden tensors keep theirs, which are not names that users see. Facets of formats with keys in
    them (the true shapes of Megatron-FSDP) were used up when the model was brought into this form.

    Args:
        new_of: old key → new key, for every tensor and object; the new keys are unique.
    """
    # Facets refer to keys as well: the order in rank files, and facts by tensor.
    model, torch_dist = catalog.facet(MegatronModel), catalog.facet(TorchDistFacts)
    if model is not None and model.order is not None:
        catalog = catalog.with_facet(
            replace(model, order=tuple(new_of.get(key, key) for key in model.order))
        )
    if torch_dist is not None and torch_dist.mcore_data is not None:
        mcore_data = {new_of.get(key, key): facts for key, facts in torch_dist.mcore_data.items()}
        catalog = catalog.with_facet(replace(torch_dist, mcore_data=mcore_data))
    return replace(
        catalog,
        tensors={new_of[key]: tensor for key, tensor in catalog.tensors.items()},
        objects={
            new_of[key]: replace(item, key=new_of[key]) for key, item in catalog.objects.items()
        },
        skeleton=None if catalog.skeleton is None else move_leaves(catalog.skeleton, new_of),
    )


def move_leaves(skeleton: object, new_of: Mapping[str, str]) -> object:
    """Move the leaves of a skeleton to the paths of their new keys.

    A leaf stays in its container if its new key begins with the container's path, and containers
    within it remain as far as the new key names them. Any other leaf goes to the root, under its
    complete new key. Leaves that get the same key become one leaf, at the position of the first.

    Args:
        new_of: old key → new key; keys that are missing do not change.
    """

    def with_key(leaf: object, key: str) -> object:
        return replace(leaf, key=key) if isinstance(leaf, (TensorLeaf, ObjectLeaf)) else leaf

    if all(new_of.get(entry.key, entry.key) == entry.key for entry in entries(skeleton)):
        return skeleton
    leaves: dict[tuple[object, ...], object] = {}
    placed: set[str] = set()
    for entry in entries(skeleton):
        new = new_of.get(entry.key, entry.key)
        if new != entry.key and new in placed:
            continue
        placed.add(new)
        leaves[new_path(entry, new)] = with_key(entry.leaf, new)
    return nest_again(leaves)


def nest_again(leaves: Mapping[tuple[object, ...], object]) -> object:
    """Nest leaves in containers by their changed paths.

    Raises:
        UsageError: the new keys do not fit the containers.
    """
    try:
        return nest_leaves(leaves)
    except CorruptError as err:
        raise UsageError(
            f"the new keys cannot be nested in the state dict: {err.message}",
            key=err.key,
            hint="choose different names, or first convert to a format without nesting (--to "
            "safetensors)",
        ) from err


def new_path(entry: LeafEntry, new: str) -> tuple[object, ...]:
    """Return the path of a leaf under a new key, by the rule of ``move_leaves``."""
    path = entry.path
    if new == entry.key:
        return path
    # The innermost container that the new key still begins with.
    for depth in range(len(path) - 1, 0, -1):
        prefix = join_path(path[:depth]) + "."
        if new.startswith(prefix) and len(new) > len(prefix):
            return (*path[:depth], *_split_below(path[depth + 1 :], new[len(prefix) :]))
    return (new,)


def _split_below(names: tuple[object, ...], key: str) -> tuple[object, ...]:
    """Split the end of a key into a path that ends with as many of ``names`` as it still has.

    Names may contain dots, so that the key alone does not determine the path.
    """
    for first in range(len(names)):
        tail = join_path(names[first:])
        if key == tail:
            return names[first:]
        if key.endswith(f".{tail}") and len(key) > len(tail) + 1:
            return (key[: -len(tail) - 1], *names[first:])
    return (key,)
