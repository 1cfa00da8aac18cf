"""What only Linux has is used in one place, which knows what to do without it."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from tests.support.like_macos import LINUX_ONLY

HOMES = {
    "core/files/syscalls.py": {"os"},  # each function asks first, with hasattr
    "ckpt_cli/completion/deadline.py": {"time"},  # behind /proc, and its absence is handled
}


def test_names_that_only_linux_has_are_used_where_their_absence_is_handled(
    nodes: Mapping[str, list[ast.AST]],
) -> None:
    uses = []
    for name, nodes_of_module in nodes.items():
        for node in nodes_of_module:
            if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
                continue
            module = node.value.id
            if node.attr in LINUX_ONLY.get(module, ()) and module not in HOMES.get(name, ()):
                uses.append(f"{name}:{node.lineno} uses {module}.{node.attr}")
    assert uses == []
