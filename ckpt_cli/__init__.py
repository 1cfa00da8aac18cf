"""The command line of the checkpoint toolkit: ``ckpt``, or ``python -m ckpt_cli``.

The library has the common name ``core``, which other projects use as well. So that a ``core``
folder in the working directory or on PYTHONPATH cannot take its place, importing this package loads
the ``core`` that is installed next to it. A script beside such a folder writes ``from ckpt_cli
import core as ckpt``.
"""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING


def _load_core() -> ModuleType:
    """Import the package ``core`` that is installed next to this one, whatever is in ``sys.path``.

    Raises:
        ImportError: another package named ``core`` has already been imported.
    """
    # If ``core`` is already there it must be the right one: two copies would not share classes. A
    # folder without __init__.py is imported as a package without a file.
    path = Path(__file__).resolve().parent.parent / "core" / "__init__.py"
    loaded = sys.modules.get("core")
    if loaded is not None:
        file = getattr(loaded, "__file__", None)
        if file is not None and Path(file).resolve() == path:
            return loaded
        where = file or ", ".join(getattr(loaded, "__path__", ["an unknown place"]))
        raise ImportError(
            f"a different package named 'core' has already been imported ({where}), but ckpt "
            f"needs its own ({path}); start a new process and import ckpt_cli first, or run "
            "python -m ckpt_cli"
        )
    # As the import system does, enter the module in ``sys.modules`` before it runs, because it
    # imports its own submodules, and remove it if it fails.
    spec = spec_from_file_location("core", path, submodule_search_locations=[str(path.parent)])
    assert spec is not None and spec.loader is not None, "the file has a Python suffix"
    module = module_from_spec(spec)
    sys.modules["core"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules["core"]
        raise
    return module


if TYPE_CHECKING:
    import core as core
else:
    core = _load_core()
