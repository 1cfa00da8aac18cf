"""Wheel and source distribution: built, installed alone, and used without PyTorch."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from core.version import __version__, read_commit

COMMANDS = (
    "ckpt demo",
    "ckpt inspect playground/runs/llama --report page.html",
    "ckpt convert playground/runs/titan model.safetensors --no-optim --include app.model.*",
    "ckpt convert playground/runs/llama hf --to hf",
    "ckpt reshard playground/runs/llama tp2 --tp-new 2",
    "ckpt validate tp2 --deep --report findings.html",
    "ckpt diff playground/runs/llama tp2 --report differences.html",
    "ckpt merge playground/models/llama playground/models/llama-bin -o mean --average",
    "ckpt help facts/formats",
    "ckpt help docs/examples/resume.sh",
)
MISSING = "error: ckpt launch needs PyTorch, which is not installed"


def run(command: list[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in an environment that knows nothing of this tree."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"CKPT_PROGRESS": "none", "PYTHONNOUSERSITE": "1"}
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, check=False
    )


def build(kind: str, source: Path, folder: Path) -> Path:
    """Build a ``wheel`` or an ``sdist`` from a tree or a source distribution; return its file."""
    folder.mkdir()
    if kind == "wheel":
        arguments: list[str | Path] = ["wheel", "--no-deps", "--wheel-dir", folder, source]
    else:
        arguments = ["install", "--target", folder / "hatchling", "hatchling>=1.27"]
    result = run([sys.executable, "-m", "pip", "--quiet", *arguments], folder)
    if "No matching distribution found for hatchling" in result.stderr:
        pytest.skip("no package index: hatchling cannot be installed")
    assert result.returncode == 0, result.stderr
    if kind == "sdist":
        program = (
            f"import os, sys; sys.path.insert(0, {str(folder / 'hatchling')!r}); "
            "from hatchling.build import build_sdist; build_sdist(sys.argv[1])"
        )
        result = run([sys.executable, "-c", program, folder], source)
        assert result.returncode == 0, result.stderr
    (path,) = folder.glob("ckpt_toolkit-*")
    return path


def make_environment(folder: Path) -> tuple[Path, Path]:
    """Make a virtual environment with nothing in it; return its python and site-packages."""
    venv.create(folder, with_pip=False)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    return folder / "bin" / "python", site_packages


def link_dependencies(wheel: Path, site_packages: Path) -> set[str]:
    """Link what a plain installation would bring from this environment; return the projects."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    rows = re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)
    wanted, projects = [Requirement(row) for row in rows], set[str]()
    while wanted:
        row = wanted.pop()
        if row.name in projects or not (row.marker is None or row.marker.evaluate({"extra": ""})):
            continue
        projects.add(row.name)
        distribution = importlib.metadata.distribution(row.name)
        wanted += map(Requirement, distribution.requires or ())
        for top in {path.parts[0] for path in distribution.files or ()} - {"..", "__pycache__"}:
            target = site_packages / top
            if not target.exists():
                target.symlink_to(Path(str(distribution.locate_file(top))))
    return projects


def check_use(python: Path, folder: Path) -> None:
    """Run the commands with an installation, and one that needs PyTorch."""
    folder.mkdir()
    program = python.with_name("ckpt")
    version = run([program, "--version"], folder).stdout
    assert version == f"ckpt {__version__} ({read_commit()})\n"
    for command in COMMANDS:
        result = run([program, *command.split()[1:]], folder)
        assert result.returncode == 0, (command, result.stdout, result.stderr)
    for name in ("page.html", "findings.html", "differences.html"):
        assert "</html>" in (folder / name).read_text("utf-8")
    result = run([program, "launch", "--", "validate", "tp2"], folder)
    assert result.returncode == 4
    assert result.stderr == f"{MISSING}\n  hint: pip install 'ckpt-toolkit[torch]'\n"
    assert run([python, "-c", "import torch"], folder).returncode == 1


@pytest.mark.slow
def test_a_wheel_works_with_what_it_requires_and_no_more(repo_dir: Path, tmp_path: Path) -> None:
    wheel = build("wheel", repo_dir, tmp_path / "dist")
    python, site_packages = make_environment(tmp_path / "environment")
    projects = link_dependencies(wheel, site_packages)
    assert not projects & {"torch", "zarr", "tensorstore"}
    install: list[str | Path] = ["-m", "pip", "--python", python, "install", "--no-deps", wheel]
    result = run([sys.executable, *install], tmp_path)
    assert result.returncode == 0, result.stderr
    check_use(python, tmp_path / "work")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_pip_installs_it_with_what_it_needs(kind: str, repo_dir: Path, tmp_path: Path) -> None:
    built = build(kind, repo_dir, tmp_path / "dist")
    python, _ = make_environment(tmp_path / "environment")
    install: list[str | Path] = ["-m", "pip", "--python", python, "--quiet", "install", built]
    result = run([sys.executable, *install], tmp_path)
    assert result.returncode == 0, result.stderr
    check_use(python, tmp_path / "work")


@pytest.mark.long
@pytest.mark.slow
def test_a_wheel_from_a_source_distribution_without_git_is_the_same(
    repo_dir: Path, tmp_path: Path
) -> None:
    sdist = build("sdist", repo_dir, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (tree,) = (tmp_path / "source").iterdir()
    shutil.rmtree(tree / "tests")  # what is installed needs none of them
    contents = []
    for source, name in ((repo_dir, "from_git"), (tree, "from_sdist")):
        with zipfile.ZipFile(build("wheel", source, tmp_path / name)) as archive:
            assert len(archive.namelist()) == len(set(archive.namelist()))
            rows = {row.filename: row.CRC for row in archive.infolist()}
            contents.append({name: crc for name, crc in rows.items() if "/RECORD" not in name})
    assert contents[0] == contents[1]
    assert "core/commit.txt" in contents[0]


def test_the_citation_names_this_version(repo_dir: Path) -> None:
    citation = yaml.safe_load((repo_dir / "CITATION.cff").read_text("utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert (citation["cff-version"], citation["version"]) == ("1.2.0", __version__)


def test_the_conda_recipe_requires_what_the_project_does(repo_dir: Path) -> None:
    recipe = yaml.safe_load((repo_dir / "docs/examples/conda/recipe.yaml").read_text("utf-8"))
    project = tomllib.loads((repo_dir / "pyproject.toml").read_text("utf-8"))["project"]
    renamed = {"xxhash": "python-xxhash", "zlib-ng": "python-zlib-ng"}
    rows = [Requirement(row) for row in project["dependencies"]]
    wanted = {f"{renamed.get(row.name, row.name.lower())} {row.specifier}" for row in rows}
    assert set(recipe["requirements"]["run"]) == wanted | {f"python {project['requires-python']}"}
    assert recipe["context"]["version"] == __version__
    (entry,) = recipe["build"]["python"]["entry_points"]
    assert entry == f"ckpt = {project['scripts']['ckpt']}"


def test_the_image_installs_the_wheel_with_the_extras_that_are_asked_for(
    repo_dir: Path, tmp_path: Path
) -> None:
    text = (repo_dir / "docs/examples/Dockerfile").read_text("utf-8")
    (line,) = re.findall(r"^RUN (.*)$", text, re.MULTILINE)
    wheel = tmp_path / "ckpt_toolkit-0-py3-none-any.whl"
    wheel.touch()
    (tmp_path / "pip").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "pip").chmod(0o755)
    install, _, remove = line.replace("/tmp/dist", str(tmp_path)).partition("; rm -r ")
    assert remove == str(tmp_path)
    done = subprocess.run(
        ["sh", "-c", install],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "EXTRAS": "[torch]"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"install --no-cache-dir {wheel}[torch]\n"
