"""Names that try to run something, to break out of a page, or to mislead its reader."""

from __future__ import annotations

import json
from pathlib import Path

HOSTILE_NAMES = (
    "<script>owned=1</script>",
    "</script><script>owned=1</script>",
    '"><img src=x onerror=owned=1>',
    "' autofocus onfocus=owned=1 '",
    "<!--<script>",
    "{{ 7*7 }}{% raw %}",
    "javascript:owned=1",
    "]]><b>",
    "&lt;b&gt;",
    "esc\x1b[31mred\x07",
    "right\u202eleft",
    "line\nbreak\u2028",
    "__proto__",
    "layers.0.<svg/onload=owned=1>",
    "layers.1.<svg/onload=owned=1>",
    "a" * 10_000,
)


def write_named_tensors(path: Path, names: tuple[str, ...] | list[str]) -> Path:
    """Write a safetensors file with a float32 tensor of four elements for each name."""
    header = {
        name: {"dtype": "F32", "shape": [4], "data_offsets": [16 * at, 16 * at + 16]}
        for at, name in enumerate(names)
    }
    data = json.dumps(header).encode()
    path.write_bytes(len(data).to_bytes(8, "little") + data + bytes(16 * len(names)))
    return path
