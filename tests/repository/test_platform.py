"""What only Linux has is used in one place, which knows what to do without it."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.like_macos import LINUX_ONLY

ROOT = Path(__file__).resolve().parents[2]
HOMES = {
    "core/files/syscalls.py": {"os"},  # each function asks first, with hasattr
    "ckpt_cli/completion/deadline.py": {"time"},  # behind /proc, and its absence is handled
}


def test_names_that_only_linux_has_are_used_where_their_absence_is_handled() -> None:
    uses = []
    for path in [*ROOT.glob("core/**/*.py"), *ROOT.glob("ckpt_cli/**/*.py")]:
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
                continue
            module = node.value.id
            if node.attr in LINUX_ONLY.get(module, ()) and module not in HOMES.get(name, ()):
                uses.append(f"{name}:{node.lineno} uses {module}.{node.attr}")
    assert uses == []
