"""ckpt starts in projects that have a folder ``core`` of their own, as Megatron's tree has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CKPT = Path(sys.executable).with_name("ckpt")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "__init__.py").write_text("raise RuntimeError('the wrong core')\n")
    return tmp_path


def run(
    *command: str | Path, cwd: Path, python_path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if python_path is not None:
        environ["PYTHONPATH"] = str(python_path)
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environ, capture_output=True, text=True
    )


@pytest.mark.each_value
@pytest.mark.parametrize("on_path", [False, True], ids=["in the directory", "on PYTHONPATH"])
@pytest.mark.parametrize("program", [(CKPT,), (sys.executable, "-m", "ckpt_cli")], ids=str)
def test_commands_start(
    program: tuple[str | Path, ...], on_path: bool, project: Path, golden: Path
) -> None:
    checkpoint = golden / "mcore_legacy/dense_gqa/tp2_pp2"
    where = {"python_path": project} if on_path else {}
    for command in (["inspect", checkpoint], ["validate", checkpoint, "--deep"]):
        result = run(*program, *command, cwd=project, **where)
        assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.dist
@pytest.mark.long  # starts three processes that import torch
@pytest.mark.slow
def test_workers_start(project: Path, golden: Path) -> None:
    checkpoint = golden / "mcore_legacy/dense_gqa/tp2_pp2"
    result = run(
        CKPT,
        "launch",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "0",
        "--",
        "convert",
        checkpoint,
        "out",
        "--to",
        "torch_dist",
        cwd=project,
        python_path=project,
    )
    assert result.returncode == 0, result.stderr
    assert (project / "out").is_dir()


def test_another_core_that_was_imported_first_is_named(project: Path) -> None:
    (project / "core" / "__init__.py").write_text("")
    code = "import core, ckpt_cli.app"
    result = run(sys.executable, "-c", code, cwd=project)
    assert result.returncode == 1
    message = result.stderr.splitlines()[-1]
    assert message.startswith(
        "ImportError: a different package named 'core' has already been imported"
    )
    assert str(project / "core" / "__init__.py") in message
    assert message.endswith("import ckpt_cli first, or run python -m ckpt_cli")


def test_the_python_interface_is_imported_from_ckpt_cli_beside_another_core(project: Path) -> None:
    code = "from ckpt_cli import core as ckpt; print(ckpt.open.__module__, ckpt.__file__)"
    root = Path(__file__).resolve().parents[2]
    result = run(sys.executable, "-c", code, cwd=project, python_path=root)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.split() == ["core.api.checkpoint", str(root / "core/__init__.py")]


def test_importing_ckpt_cli_first_gives_its_own_core(project: Path) -> None:
    code = "import ckpt_cli, core, core.errors; print(core.__file__)"
    result = run(sys.executable, "-c", code, cwd=project)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.strip() != str(project / "core" / "__init__.py")
