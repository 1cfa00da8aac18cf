"""Find values inside objects by a dotted path, such as ``args.hidden_size``.

A path begins with the name of an object, and goes on with keys of mappings, attributes of
instances, and indices of lists. Besides the objects of the catalog these names lead to values:
``args`` (the training arguments), the entries that all ranks share (``opt_param_scheduler``),
``config`` (``config.json`` next to the weights), and ``__metadata__`` and ``__attributes__`` (the
attributes of the checkpoint, of its tensors and containers).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from core.engine.catalog.attributes import build_entry_values
from core.engine.catalog.catalog import StoredObject
from core.engine.catalog.key_patterns import matcher
from core.errors import CheckpointingException
from core.opening.source_files import config_of_source
from core.pickle.inert import Inert, as_mapping, attributes

if TYPE_CHECKING:
    from core.engine.catalog.catalog import Catalog
    from core.opening.open import Checkpoint

_MAX_DEPTH = 24
"""Maximum number of names on a path; deeper values are shown as a part of their container."""
_MAX_VALUES = 10_000
"""Maximum number of values that a pattern is tried on."""
_MAX_INT = 1 << 64
_WILD = "*?["


def shared_objects(checkpoint: Checkpoint, view: Catalog) -> dict[str, StoredObject]:
    """Return the values that are not objects of the catalog, by the first name of their paths."""
    values: dict[object, object] = dict(view.common or checkpoint.catalog.common or {})
    for name, value in build_entry_values(checkpoint.catalog).items():
        values.setdefault(name, value)
    args = view.args if checkpoint.catalog.args is None else checkpoint.catalog.args
    if args is not None:
        values["args"] = args
    # ``summarize`` reports a damaged config.json.
    with suppress(CheckpointingException):
        config = config_of_source(checkpoint)
        if config is not None:
            values["config"] = dict(config)
    return {
        name: StoredObject(name, value)
        for name, value in values.items()
        if isinstance(name, str) and name not in view.objects
    }


def values_at(
    checkpoint: Checkpoint, objects: Mapping[str, StoredObject], pattern: str
) -> dict[str, object]:
    """Return the values inside objects that a path or a pattern selects, by path.

    The names before the first special character of a pattern have to be those of a container:
    ``args.*_size`` selects, ``*_size`` does not.

    Raises:
        UsageError: not a valid pattern.
        CheckpointingException: an object cannot be read.
    """
    for root in roots_of(pattern, objects):
        value = object_value(checkpoint, objects[root])
        path = pattern[len(root) + 1 :]
        for exact in _follow(value, path):
            return {pattern: exact}
        # A pattern: try it on all paths below its literal names.
        start = min((path.find(char) for char in _WILD if char in path), default=-1)
        if start < 0:
            continue
        literal = path[:start].rpartition(".")[0]
        prefix = f"{root}.{literal}" if literal else root
        for container in _follow(value, literal) if literal else (value,):
            matches = matcher(pattern)
            values = {key: item for key, item in leaves(container, prefix) if matches(key)}
            if values:
                return values
    return {}


def roots_of(path: str, objects: Mapping[str, StoredObject]) -> Iterator[str]:
    """Yield the objects whose names begin a path and leave something of it, the longest first."""
    for at in range(len(path) - 1, 0, -1):
        if path[at] == "." and path[:at] in objects:
            yield path[:at]


def object_value(checkpoint: Checkpoint, item: StoredObject) -> object:
    """Return the inert value of an object; read it from its own stream if it has one.

    Raises:
        CheckpointingException: the stream cannot be read.
    """
    if item.raw_key is None:
        return item.value
    from core.formats.torch.tree import load_object

    stream = checkpoint.catalog.fragments(item.raw_key)[0].array
    assert stream is not None
    value, _ = load_object(checkpoint.store, stream, key=item.key)
    return value


def _follow(value: object, path: str, depth: int = 0) -> Iterator[object]:
    """Yield the values at a path, whose names may contain dots; usually none or one."""
    if depth == _MAX_DEPTH:
        return
    for name, item in _parts(value):
        if name == path:
            yield item
        elif path.startswith(f"{name}."):
            yield from _follow(item, path[len(name) + 1 :], depth + 1)


def leaves(container: object, prefix: str) -> list[tuple[str, object]]:
    """Return the paths and values of the parts of a container that have no named parts.

    At most ``_MAX_VALUES`` values; cyclic containers end at ``_MAX_DEPTH`` names.

    Args:
        prefix: path of the container.
    """
    values: list[tuple[str, object]] = []
    # Reversed on the stack, so that the parts come in their order.
    stack = [(prefix, container, 0)]
    while stack and len(values) < _MAX_VALUES:
        path, value, depth = stack.pop()
        parts = _parts(value) if depth < _MAX_DEPTH and not _is_short(value) else []
        if parts:
            stack += [(f"{path}.{name}", part, depth + 1) for name, part in reversed(parts)]
        elif depth:
            values.append((path, value))
    return values


def _is_short(value: object) -> bool:
    """Return whether a value is a list of plain numbers and texts, which is shown as one value."""
    return isinstance(value, (list, tuple)) and not any(
        isinstance(item, (dict, list, tuple, Inert)) for item in value
    )


def _parts(value: object) -> list[tuple[str, object]]:
    """Return the named parts of a mapping, an instance or a list; [] for other values."""
    mapping = as_mapping(value)
    entries = (attributes(value) or {}).items() if mapping is None else mapping.items()
    if entries:
        return [(str(name), item) for name, item in entries if _is_name(name)]
    if isinstance(value, (list, tuple)):
        return [(str(number), item) for number, item in enumerate(value[:_MAX_VALUES])]
    return []


def _is_name(name: object) -> bool:
    """Return whether a key can be a part of a path: text that is not empty, or a number."""
    # Python refuses to print integers of thousands of digits, which a hostile pickle may contain.
    return name != "" if isinstance(name, str) else isinstance(name, int) and abs(name) < _MAX_INT
