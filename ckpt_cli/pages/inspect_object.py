"""Objects (arguments, random states, optimizer settings) as JSON values.

Nothing in them is ever executed.

An instance becomes ``{"<class>": "argparse.Namespace", …attributes}``, a class or function its
dotted name, a tensor ``{"<tensor>": key}``, and bytes their number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

from ckpt_cli.screen.blocks import Block, Cell, Table, first_lines, title_cell
from ckpt_cli.screen.terminal import escaped, shortened
from core.engine.catalog.catalog import StoredObject
from core.opening.open import Checkpoint
from core.pickle.inert import NO_STATE, Global, Inert, ObjectLeaf, TensorLeaf, as_mapping
from core.verbs.inspect.nested import object_value

MAX_DEPTH = 24
"""Maximum nesting of the JSON value; deeper containers become "…"."""
MAX_NODES = 20_000
"""Maximum number of values in the JSON value; the others are counted."""
_MAX_CELL = 60
"""Maximum length of a value in a list."""
_MOST_ATTRIBUTES = 6
"""Maximum number of attributes that are shown on one line."""
_MAX_BITS = 8192
"""Maximum size of an integer that is written in digits."""


def object_json(item: StoredObject, checkpoint: Checkpoint) -> object:
    """Return an object as a JSON value; read it from its own stream if the metadata omit it."""
    return plain_json(object_value(checkpoint, item))


def plain_json(value: object) -> object:
    """Return an inert value as a JSON value."""
    return _JsonConverter().convert(value)


def attribute_facts(values: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return attributes as facts, one for each; only the first has a label."""
    return [
        ("" if number else "attributes", f"{escaped(name)}: {format_value(plain_json(value))}")
        for number, (name, value) in enumerate(values.items())
    ]


def attributes_text(values: Mapping[str, object]) -> str:
    """Return the first attributes on one line, such as ``step: 1200 · title: a run``.

    Long values are shortened, and attributes that are left out are counted.
    """
    texts = [
        f"{name}: {shortened(format_value(plain_json(value)), _MAX_CELL)}"
        for name, value in islice(values.items(), _MOST_ATTRIBUTES)
    ]
    n_more = len(values) - len(texts)
    return " · ".join([*texts, *([f"… {n_more} more"] if n_more else [])])


def object_blocks(entries: Sequence[tuple[str, object]], *, limit: int) -> Iterator[Block]:
    """Yield objects: single values beside their keys, containers as JSON below theirs.

    Args:
        entries: key and JSON value of each.
        limit: maximum number of lines of each container; 0 for all.
    """
    # The JSON text may contain characters that a terminal obeys.
    rows: list[tuple[Cell, str]] = []
    for key, value in entries:
        if not isinstance(value, (dict, list)):
            rows.append((title_cell(key), format_value(value)))
            continue
        yield Table(rows, align="<<")
        rows = []
        yield title_cell(key)
        text = json.dumps(value, indent=2)
        yield partial(first_lines, lines=list(map(escaped, text.splitlines())), limit=limit)
    yield Table(rows, align="<<")


def format_value(value: object) -> str:
    """Return a JSON value on one line; text without quotation marks."""
    return escaped(value if isinstance(value, str) else json.dumps(value))


def value_cell(value: object) -> Cell:
    """Return the cell of an object in a list: its value if that is short, else ``object``."""
    text = format_value(value)
    if isinstance(value, dict) or len(text) > _MAX_CELL:
        return Cell("object", ("dim",))
    return Cell(text)


class _JsonConverter:
    """Converts an inert tree into JSON values.

    The conversion ends for every tree (deep, cyclic, shared a million times).
    """

    def __init__(self) -> None:
        self._n_remaining = MAX_NODES

    def convert(self, value: object, depth: int = 0) -> object:
        """Return the value as JSON; "…" if the value is nested too deeply or the tree too large.

        Args:
            depth: number of containers around the value.
        """
        self._n_remaining -= 1
        # Numbers, text and references stand for themselves.
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, int):
            return int(value) if value.bit_length() <= _MAX_BITS else hex(value)
        if isinstance(value, float):
            return value if math.isfinite(value) else str(value)
        if isinstance(value, (bytes, bytearray)):
            return f"<{len(value)} bytes>"
        if isinstance(value, TensorLeaf):
            return {"<tensor>": value.key}
        if isinstance(value, ObjectLeaf):
            return {"<object>": value.key}
        if isinstance(value, (Global, complex)):
            return str(value)
        # Containers are converted recursively, within the limits.
        if depth >= MAX_DEPTH or self._n_remaining <= 0:
            return "…"
        mapping = as_mapping(value)
        if mapping is not None:
            return self._entries(mapping, depth)
        if isinstance(value, Inert):
            return self._instance(value, depth)
        if isinstance(value, (list, tuple, set, frozenset)):
            return self._items(list(value), depth)
        return f"<{type(value).__name__}>"

    def _instance(self, value: Inert, depth: int) -> dict[str, object]:
        """Convert an instance: its class, arguments, state (usually attributes) and items."""
        result: dict[str, object] = {"<class>": value.class_name}
        if value.args:
            result["<arguments>"] = self._items(value.args, depth)
        if isinstance(value.state, dict):
            result.update(self._entries(value.state, depth))
        elif value.state is not NO_STATE:
            result["<state>"] = self.convert(value.state, depth + 1)
        if value.items:
            result["<items>"] = self._items(value.items, depth)
        return result

    def _entries(self, mapping: dict[object, object], depth: int) -> dict[str, object]:
        """Convert a mapping, with keys as text, until the limit on values is reached."""
        result: dict[str, object] = {}
        for number, (name, item) in enumerate(mapping.items()):
            if self._n_remaining <= 0:
                result["…"] = f"{len(mapping) - number} more"
                break
            result[name if isinstance(name, str) else str(self.convert(name, depth + 1))] = (
                self.convert(item, depth + 1)
            )
        return result

    def _items(self, items: Sequence[object], depth: int) -> list[object]:
        """Convert a sequence until the limit on values is reached."""
        result: list[object] = []
        for number, item in enumerate(items):
            if self._n_remaining <= 0:
                result.append(f"… {len(items) - number} more")
                break
            result.append(self.convert(item, depth + 1))
        return result
