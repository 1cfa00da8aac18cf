"""What the repository offers to other people's automation: its commands are read out of the files
and run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

ACTION = ".github/actions/ckpt-validate/action.yml"
HOOKS = ".pre-commit-hooks.yaml"
DCP = "torch_dcp/tp2_only"


def document(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


@pytest.fixture
def tools(repo_dir: Path, tmp_path: Path) -> Path:
    """A directory for PATH with ``ckpt`` in it, and a ``python`` that writes down what it is asked
    to install.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in (
        ("ckpt", f'PYTHONPATH={repo_dir} exec {sys.executable} -m ckpt_cli "$@"'),
        ("python", f'printf "%s\\n" "$*" >> {folder}/installed'),
    ):
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def good(golden: Path) -> Path:
    return golden / DCP


@pytest.fixture
def bad(golden: Path, tmp_path: Path) -> Path:
    path = Path(shutil.copytree(golden / DCP, tmp_path / "bad one"))
    os.truncate(path / "__1_0.distcp", 1000)
    return path


@dataclass(frozen=True)
class Runner:
    """Runs the steps of the composite action as GitHub's runner does.

    Args:
        action: the parsed file.
        folder: where the runner's files are.
        tools: for PATH.
        repo_dir: of this project.
    """

    action: Any
    folder: Path
    tools: Path
    repo_dir: Path

    def step(self, name: str, **inputs: str) -> subprocess.CompletedProcess[str]:
        """Runs one step with some inputs, the others at their defaults."""
        step = next(step for step in self.action["runs"]["steps"] if step["name"] == name)
        values = {
            key: str(spec.get("default", "")) for key, spec in self.action["inputs"].items()
        } | inputs
        env = {key: self._filled(text, values) for key, text in step.get("env", {}).items()}
        files = {name: str(self.folder / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        return subprocess.run(
            [
                "bash",
                "--noprofile",
                "--norc",
                "-eo",
                "pipefail",
                "-c",
                step["run"],
            ],  # as "shell: bash" does
            cwd=self.folder,
            env={
                "PATH": f"{self.tools}:{os.environ['PATH']}",
                "RUNNER_TEMP": str(self.folder),
                "GITHUB_ACTION_PATH": str(self.repo_dir / ACTION).rpartition("/")[0],
                "CKPT_PROGRESS": "none",  # which a busy machine would show on standard error
                **files,
                **env,
            },
            capture_output=True,
            text=True,
            check=False,
        )

    @staticmethod
    def _filled(text: str, values: dict[str, str]) -> str:
        return re.sub(r"\$\{\{ inputs\.([a-z-]+) \}\}", lambda match: values[match[1]], text)

    def file(self, name: str) -> str:
        return (self.folder / name).read_text("utf-8")


@pytest.fixture
def runner(repo_dir: Path, tools: Path, tmp_path: Path) -> Runner:
    (tmp_path / "runner").mkdir()
    return Runner(document(repo_dir / ACTION), tmp_path / "runner", tools, repo_dir)


def test_the_action_passes_what_is_whole(runner: Runner, good: Path) -> None:
    done = runner.step("Validate", paths=f"{good}\n\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("✓ no findings")
    assert runner.file("GITHUB_OUTPUT") == "valid=true\n"
    assert runner.file("GITHUB_STEP_SUMMARY").startswith("    ✓ no findings")


def test_the_action_fails_annotates_and_reports_what_is_not(
    runner: Runner, good: Path, bad: Path
) -> None:
    done = runner.step("Validate", paths=f"{good}\n{bad}\n", report="a report.sarif\nreport.xml\n")
    assert done.returncode == 1
    assert re.search(
        r"^::error file=.*/bad one/__1_0\.distcp,title=CK\d+ ", done.stdout, re.MULTILINE
    )
    assert runner.file("GITHUB_OUTPUT") == "valid=false\n"
    assert all(line.startswith("    ") for line in runner.file("GITHUB_STEP_SUMMARY").splitlines())
    assert '"version": "2.1.0"' in runner.file("a report.sarif")
    assert ElementTree.fromstring(runner.file("report.xml")).tag == "testsuites"


def test_the_actions_inputs_reach_the_command(
    runner: Runner, good: Path, bad: Path, tmp_path: Path
) -> None:
    assert runner.step("Validate", paths=str(bad), ignore="CK1\nCK2\nCK7:nothing").returncode == 0
    assert runner.step("Validate", paths=str(good), level="deep", strict="true").returncode == 0
    assert runner.step("Validate", paths=str(good), level="metadata").returncode == 0
    assert runner.step("Validate", paths=str(good), level="no such").returncode == 2
    assert runner.step("Validate", paths=str(tmp_path / "missing")).returncode == 2
    baseline = tmp_path / "known.json"
    subprocess.run(
        [runner.tools / "ckpt", "validate", "--headers", bad, "--write-baseline", baseline],
        check=True,
    )
    assert runner.step("Validate", paths=str(bad), baseline=str(baseline)).returncode == 0


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("$(touch owned)", marks=pytest.mark.long),
        '"; touch owned; "',
        pytest.param("`touch owned`", marks=pytest.mark.long),
        "--write-baseline=owned",
    ],
)
def test_no_input_of_the_action_is_run(text: str, runner: Runner) -> None:
    everything = dict.fromkeys(runner.action["inputs"], text)
    runner.step("Install ckpt", **everything)
    assert runner.step("Validate", **everything).returncode == 2
    assert runner.step("Validate", **everything | {"level": "headers"}).returncode == 2
    assert not (runner.folder / "owned").exists()


def test_no_step_has_an_input_in_its_script(repo_dir: Path) -> None:
    for step in document(repo_dir / ACTION)["runs"]["steps"]:
        assert "${{" not in step["run"]
        assert step["shell"] == "bash"


def test_the_action_installs_this_project_without_extras(runner: Runner, repo_dir: Path) -> None:
    assert runner.step("Install ckpt").returncode == 0
    (line,) = (runner.tools / "installed").read_text().splitlines()
    assert line.startswith("-m pip install --quiet ")
    assert Path(line.split()[-1]).resolve() == repo_dir
    project = tomllib.loads((repo_dir / "pyproject.toml").read_text("utf-8"))["project"]
    assert not any(row.startswith(("torch", "zarr>", "tensor")) for row in project["dependencies"])


def test_the_workflow_uses_inputs_that_the_action_has(repo_dir: Path) -> None:
    workflow = document(repo_dir / "docs/examples/github-workflow.yml")
    action = document(repo_dir / ACTION)
    (job,) = workflow["jobs"].values()
    (step,) = (step for step in job["steps"] if "ckpt-validate" in step["uses"])
    assert step["uses"].split("@")[0].endswith(ACTION.rpartition("/")[0])
    assert set(step["with"]) <= set(action["inputs"])
    assert {name for name, spec in action["inputs"].items() if spec.get("required")} <= set(
        step["with"]
    )


def test_the_workflow_runs_with_its_inputs(repo_dir: Path, runner: Runner, good: Path) -> None:
    workflow = document(repo_dir / "docs/examples/github-workflow.yml")
    (job,) = workflow["jobs"].values()
    (step,) = (step for step in job["steps"] if "ckpt-validate" in step["uses"])
    for path in step["with"]["paths"].splitlines():
        shutil.copytree(good, runner.folder / path)
    done = runner.step("Validate", **step["with"])
    assert (done.returncode, done.stderr) == (0, "")
    upload = next(step for step in job["steps"] if "upload-sarif" in step["uses"])
    assert (runner.folder / upload["with"]["sarif_file"]).is_file()


def test_the_gitlab_job_runs(
    repo_dir: Path, tools: Path, good: Path, bad: Path, tmp_path: Path
) -> None:
    (job,) = document(repo_dir / "docs/examples/gitlab-ci.yml").values()
    for path, source in (("checkpoints/base", good), ("checkpoints/tuned", bad)):
        shutil.copytree(source, tmp_path / path)
    (line,) = job["script"]
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    assert (
        subprocess.run(
            ["sh", "-c", line], cwd=tmp_path, env=env, capture_output=True, check=False
        ).returncode
        == 1
    )
    report = ElementTree.parse(tmp_path / job["artifacts"]["reports"]["junit"]).getroot()
    assert [suite.attrib["name"] for suite in report] == ["checkpoints/base", "checkpoints/tuned"]
    assert [suite.attrib["failures"] == "0" for suite in report] == [True, False]


def test_the_hooks_have_what_precommit_asks_for(repo_dir: Path) -> None:
    hooks = document(repo_dir / HOOKS)
    assert [hook["id"] for hook in hooks] == ["ckpt-validate", "ckpt-validate-system"]
    for hook in hooks:
        assert {"id", "name", "entry", "language"} <= set(hook)
        assert hook["language"] in ("python", "system")
        assert re.compile(hook["files"])


def test_the_hooks_look_at_files_of_checkpoints_only(repo_dir: Path) -> None:
    for hook in document(repo_dir / HOOKS):
        wanted = re.compile(hook["files"])
        for name in (
            "a/.metadata",
            ".metadata",
            "a/__0_0.distcp",
            "model.safetensors",
            "x/model_optim_rng.pt",
            "m.pth",
            "m.ckpt",
            "pytorch_model-00001-of-00002.bin",
            "model.safetensors.index.json",
        ):
            assert wanted.search(name), name
        for name in ("README.md", "a.py", "config.json", "data.bin", "metadata", "x.pt.txt"):
            assert not wanted.search(name), name


def test_a_hook_passes_whole_files_and_stops_others(
    repo_dir: Path, tools: Path, good: Path, bad: Path, tmp_path: Path
) -> None:
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    for hook in document(repo_dir / HOOKS):
        for folder, code in ((good, 0), (bad, 1)):
            names = [
                str(path)
                for path in sorted(folder.iterdir())
                if re.search(hook["files"], str(path))
            ]
            command = [*hook["entry"].split(), *names]
            done = subprocess.run(
                command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
            )
            assert (done.returncode, done.stderr) == (code, "")
            assert (done.stdout == "") == (code == 0)


def test_the_pytest_recipe_fails_where_a_checkpoint_is_damaged(
    repo_dir: Path, good: Path, bad: Path, tmp_path: Path
) -> None:
    shutil.copy(repo_dir / "docs/examples/test_checkpoints.py", tmp_path)
    env = {**os.environ, "PYTHONPATH": str(repo_dir), "CHECKPOINTS": f"{good}{os.pathsep}{bad}"}
    env.pop("PYTEST_ADDOPTS", None)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "test_checkpoints.py",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout
    assert "is not intact" in done.stdout
    assert "__1_0.distcp" in done.stdout


def test_a_training_resumes_from_the_newest_whole_iteration_or_not_at_all(
    repo_dir: Path, tools: Path, golden: Path, tmp_path: Path
) -> None:
    root = tmp_path / "a root"
    shutil.copytree(golden / "mcore_torch_dist/dense_gqa/tp2_pp2", root)
    shutil.copytree(root / "iter_0000010", root / "iter_0000020")
    os.truncate(root / "iter_0000020/.metadata", 100)
    (root / "latest_checkpointed_iteration.txt").write_text("20")
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}

    def resumed(folder: Path) -> tuple[int, str]:
        command = [repo_dir / "docs/examples/resume.sh", folder, "echo", "train"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    assert resumed(root) == (0, f"train --load {root} --ckpt-step 10\n")
    assert resumed(tmp_path / "new") == (0, "train\n")
    os.truncate(root / "iter_0000010/.metadata", 100)
    assert resumed(root) == (1, "")
