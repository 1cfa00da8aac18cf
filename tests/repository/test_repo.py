"""The repository itself: what lies in it, and that its pins fit together."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

MACHINE_PATHS = tuple(
    f"/{name}/" for name in ("work", "farm", "root", "tmp/bash_jobs", "opt/wheels", "opt/pypi")
)
"""Beginnings of paths that exist on somebody's machine only."""

NAMES_OF_NOTHING = {"utils.py", "helpers.py", "manager.py", "common.py"}
GIVEN_NAMES = {"core/dist_checkpointing/strategies/common.py", "core/dist_checkpointing/utils.py"}
"""Names that the documented API prescribes."""


def files_of(repo_dir: Path) -> list[Path]:
    """The files that belong to the repository: git's view, or all but the ignored folders where
    there is no git.
    """
    listed = subprocess.run(
        [
            "git",
            "-c",
            "safe.directory=*",
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ],
        cwd=repo_dir,
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0:
        paths = [repo_dir / os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
    else:
        paths = [
            path
            for path in repo_dir.rglob("*")
            if not any(
                part.startswith(".") or part == "__pycache__"
                for part in path.relative_to(repo_dir).parts
            )
        ]
    return [path for path in paths if path.is_file()]


def test_no_path_of_a_machine_is_in_the_tree(repo_dir: Path) -> None:
    begins = re.compile("(?<![\\w.*/])(?:" + "|".join(map(re.escape, MACHINE_PATHS)) + ")")
    places = []
    for path in files_of(repo_dir):
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        places += [
            f"{path.name}:{i}: {line}"
            for i, line in enumerate(text.splitlines(), 1)
            if begins.search(line)
        ]
    assert places == []


def test_no_file_is_large(repo_dir: Path) -> None:
    assert [path.name for path in files_of(repo_dir) if path.stat().st_size > 12 << 20] == []


def test_files_are_named_after_a_noun(repo_dir: Path) -> None:
    paths = {path.relative_to(repo_dir).as_posix(): path.name for path in files_of(repo_dir)}
    assert [
        path for path, name in paths.items() if name in NAMES_OF_NOTHING and path not in GIVEN_NAMES
    ] == []


@pytest.mark.parametrize(
    "name",
    [
        "scripts/setup",
        "scripts/demo",
        "scripts/test",
        "scripts/weekly",
        "scripts/check",
        "scripts/bench",
        "scripts/browser-tests",
        ".ci/run",
    ],
)
def test_scripts_can_be_run(name: str, repo_dir: Path) -> None:
    assert os.access(repo_dir / name, os.X_OK)


def pins(repo_dir: Path) -> dict[str, Requirement]:
    lines = (repo_dir / "constraints.txt").read_text("utf-8").splitlines()
    rows = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(row.name): row for row in rows}


def test_constraints_are_exact_and_hold_on_every_machine(repo_dir: Path) -> None:
    for row in pins(repo_dir).values():
        assert re.fullmatch(r"==[0-9][0-9.]*(\.?(post|rc|b|a)[0-9]+)?", str(row.specifier)), row
        assert row.url is None
        assert row.marker is None


def test_every_dependency_is_pinned_to_a_version_it_allows(repo_dir: Path) -> None:
    project = tomllib.loads((repo_dir / "pyproject.toml").read_text("utf-8"))
    wanted = [
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["torch"],
        *project["project"]["optional-dependencies"]["test"],
        *project["build-system"]["requires"],
    ]
    pinned = pins(repo_dir)
    for row in map(Requirement, wanted):
        if row.name == project["project"]["name"]:  # the extras that another one includes
            continue
        version = str(pinned[canonicalize_name(row.name)].specifier).removeprefix("==")
        assert row.specifier.contains(version), f"{row} but {version} in constraints.txt"


def test_the_distribution_holds_what_is_no_python_file(repo_dir: Path) -> None:
    project = tomllib.loads((repo_dir / "pyproject.toml").read_text("utf-8"))
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["core", "ckpt_cli"]
    templates = "ckpt_cli/html_report/templates"
    for name in (
        "core/py.typed",
        "ckpt_cli/py.typed",
        "core/megatron/rules/megatron.toml",
        *(f"{templates}/{file}" for file in ("base.html.j2", "report.css", "report.js")),
    ):
        assert (repo_dir / name).is_file()
