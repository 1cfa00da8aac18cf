"""Find out which modules are known: standard library, a well-known distribution, or installed.

Nothing is imported for that, and no code of a package runs. An installed package only makes a
verdict stricter, because a class of an unknown module is not trusted anyway.

Source: ``sys.stdlib_module_names``; ``pickle/calls.toml`` for the distributions; PEP 610 for
``direct_url.json``.
"""

from __future__ import annotations

import json
import os
import site
import sys
import sysconfig
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from core.pickle.call_table import packages

_STANDARD = frozenset(sys.stdlib_module_names) | frozenset(sys.builtin_module_names)


@lru_cache(maxsize=1 << 14)
def is_known_package(module: str) -> bool:
    """Return whether a module's top-level package is known; ``__main__`` never is."""
    top = module.partition(".")[0]
    if top == "__main__":
        return False
    return top in _STANDARD or top in packages() or (top.isidentifier() and _is_installed(top))


def _is_installed(top: str) -> bool:
    """Return whether a package is in an install directory and is not one of the user's own."""
    # The list of names first: the finders take 0.2 ms a name, and a hostile pickle has many names.
    if top not in _installed_names():
        return False
    try:
        spec = find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return False
    if spec is None:
        return False
    # The finders may find another package of that name first, such as in the working directory.
    paths = [
        path for path in (spec.origin, *(spec.submodule_search_locations or ())) if path is not None
    ]
    roots = _install_dirs()
    is_inside = any(Path(root) in Path(path).parents for path in paths for root in roots)
    return is_inside and top not in _local_packages()


@lru_cache(maxsize=1)
def _install_dirs() -> tuple[str, ...]:
    """Return the directories in which this Python's packages are installed."""
    paths = sysconfig.get_paths()
    user_dir = site.getusersitepackages()
    return tuple(
        {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
        | {*site.getsitepackages(), user_dir}
    )


@lru_cache(maxsize=1)
def _installed_names() -> frozenset[str]:
    """Return the names of all files and directories in install directories, up to the first dot."""
    roots = _install_dirs()
    # Search paths below an install directory, such as those that ``.pth`` files add.
    search_dirs = [
        path for path in sys.path if any(Path(root) in Path(path).parents for root in roots)
    ]
    names: set[str] = set()
    for folder in (*roots, *search_dirs):
        with suppress(OSError):
            names.update(name.partition(".")[0] for name in os.listdir(folder))
    return frozenset(names)


@lru_cache(maxsize=1)
def _local_packages() -> frozenset[str]:
    """Return the packages that were installed from a local directory: the user's own projects."""
    from importlib.metadata import distributions  # slow to import, and seldom needed

    names: set[str] = set()
    for distribution in distributions():
        try:
            origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        except (OSError, ValueError):
            continue
        # PEP 610: ``dir_info`` marks a directory, as opposed to an archive that was downloaded.
        if (
            isinstance(origin, dict)
            and str(origin.get("url", "")).startswith("file:")
            and "dir_info" in origin
        ):
            names.update(
                path.parts[0].removesuffix(".py") for path in distribution.files or () if path.parts
            )
    return frozenset(names)
