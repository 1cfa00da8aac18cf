"""``as_megatron`` with a small package in the place of megatron-core, in processes that have
imported nothing of Megatron.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

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


SERVER = """
import json, os, sys
import core.dist_checkpointing
assert not any(name.partition(".")[0] == "megatron" for name in sys.modules)
for line in sys.stdin:
    folder, script, out, err = json.loads(line)
    pid = os.fork()
    if pid == 0:
        for name, number in ((out, 1), (err, 2)):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
        sys.path.insert(0, folder)
        code = 1
        try:
            exec(script, {"__name__": "__main__"})
            sys.stdout.flush()
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
"""Runs scripts one by one, each in a fork of a process that has imported this project and torch,
which takes seconds.
"""
Run = Callable[[Path, str], str]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Run a script that finds the small package, and return what it prints."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin is not None and server.stdout is not None

        def call(folder: Path, script: str) -> str:
            out, err = folder / "out.txt", folder / "err.txt"
            server.stdin.write(json.dumps([str(folder), script, str(out), str(err)]) + "\n")
            server.stdin.flush()
            assert server.stdout.readline() == "0\n", err.read_text()
            return out.read_text()

        yield call
        server.stdin.close()


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


def test_it_is_too_late_once_megatrons_own_package_is_imported(folder: Path, run: Run) -> None:
    shown = run(
        folder,
        "import megatron.core.layers\n" + HOOK + "from core.errors import UsageError\n"
        "try:\n"
        "    as_megatron()\n"
        "except UsageError as err:\n"
        "    print(err)\n",
    )
    assert shown == (
        "megatron.core.dist_checkpointing has been imported already, so it cannot be replaced. "
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
