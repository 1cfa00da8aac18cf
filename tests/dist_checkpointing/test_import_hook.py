"""``as_megatron`` with a small package in the place of megatron-core, in processes that have
imported nothing of Megatron.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import forked

MEGATRON = {
    "__init__.py": "",
    "core/__init__.py": "",
    "core/layers.py": (
        "from .dist_checkpointing.mapping import ShardedTensor\n"
        "from megatron.core import dist_checkpointing\n"
    ),
    "core/dist_checkpointing/__init__.py": "from .mapping import ShardedTensor\n",
    "core/dist_checkpointing/mapping.py": "class ShardedTensor: ...\n",
    "core/dist_checkpointing/only_megatrons.py": "",
}
HOOK = "from core.dist_checkpointing import as_megatron\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in MEGATRON.items():
        path = tmp_path / "megatron" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


Run = Callable[[Path, str], str]


@pytest.fixture
def run() -> Run:
    """Run a script that finds the small package, and return what it prints."""

    def call(folder: Path, script: str) -> str:
        untouched = "import sys; assert 'megatron' not in sys.modules\n"
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        done = forked.run(["-W", "ignore", "-c", untouched + script], env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


def test_whatever_imports_megatrons_package_gets_ours(folder: Path, run: Run) -> None:
    run(
        folder,
        HOOK + "as_megatron()\n"
        "import core.dist_checkpointing.mapping as ours\n"
        "import megatron.core.layers as layers\n"
        "import megatron.core.dist_checkpointing.mapping\n"
        "from megatron.core.dist_checkpointing.strategies import torch as theirs\n"
        "import core.dist_checkpointing.strategies.torch\n"
        "assert layers.ShardedTensor is ours.ShardedTensor\n"
        "assert layers.dist_checkpointing is core.dist_checkpointing\n"
        "assert megatron.core.dist_checkpointing.mapping is ours\n"
        "assert theirs is core.dist_checkpointing.strategies.torch\n"
        "assert megatron.core.__file__.endswith('megatron/core/__init__.py')\n"
        "assert ours.__spec__.name == ours.__name__ == 'core.dist_checkpointing.mapping'\n",
    )


def test_modules_are_imported_when_they_are_used_and_a_second_call_changes_nothing(
    folder: Path, run: Run
) -> None:
    run(
        folder,
        "import sys\n" + HOOK + "as_megatron()\n"
        "n_finders = len(sys.meta_path)\n"
        "assert not any(name.startswith('megatron') for name in sys.modules)\n"
        "import megatron.core.dist_checkpointing\n"
        "as_megatron()\n"
        "assert len(sys.meta_path) == n_finders\n"
        "assert 'megatron.core.dist_checkpointing.strategies.zarr' not in sys.modules\n",
    )


def test_a_module_that_only_megatron_has_is_not_found(folder: Path, run: Run) -> None:
    shown = run(
        folder,
        HOOK + "as_megatron()\n"
        "try:\n"
        "    import megatron.core.dist_checkpointing.only_megatrons\n"
        "except ModuleNotFoundError as err:\n"
        "    print(err)\n",
    )
    assert shown == "No module named 'megatron.core.dist_checkpointing.only_megatrons'\n"


def test_the_hook_is_too_late_once_megatrons_own_package_is_imported(
    folder: Path, run: Run
) -> None:
    shown = run(
        folder,
        "import megatron.core.layers\n" + HOOK + "from core.errors import UsageError\n"
        "try:\n"
        "    as_megatron()\n"
        "except UsageError as err:\n"
        "    print(err)\n",
    )
    assert shown == (
        "megatron.core.dist_checkpointing has already been imported, so it cannot be replaced. "
        "Call as_megatron() before the first import of megatron\n"
    )


def test_a_save_replaces_an_older_one_as_megatrons_training_script_expects(
    folder: Path, run: Run
) -> None:
    shown = run(
        folder,
        "import pathlib, torch.distributed as dist\n"
        "from core.dist_checkpointing import as_megatron, load_common_state_dict, save\n"
        f"dist.init_process_group('gloo', init_method='file://{folder}/meeting', "
        "rank=0, world_size=1)\n"
        f"target = pathlib.Path({str(folder)!r}, 'iter_0000010')\n"
        "target.mkdir()\n"
        "save({'iteration': 10}, target)\n"
        "try:\n"
        "    save({'iteration': 11}, target)\n"
        "except Exception as err:\n"
        "    print(type(err).__name__)\n"
        "as_megatron()\n"
        "save({'iteration': 12}, target)\n"
        "print(load_common_state_dict(target)['iteration'])\n",
    )
    assert shown == "UsageError\n12\n"
