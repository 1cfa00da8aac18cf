"""docs/examples: the files for Slurm, MPI and Kubernetes are well formed, and their commands are
ones that parse.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from ckpt_cli.app import parse_command
from ckpt_cli.options.worker import parse_worker_arguments

SCRIPTS = ("launch.sbatch", "launch-mpi.sh")


@pytest.fixture
def stand_ins(tmp_path: Path) -> dict[str, str]:
    """An environment in which srun, mpirun and ckpt print how they are called."""
    for name in ("srun", "mpirun", "ckpt"):
        path = tmp_path / name
        path.write_text(f'#!/usr/bin/env bash\nprintf "%s\\n" {name} "$@"\n')
        path.chmod(0o755)
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/usr/bin/env bash\nprintf 'node3\\nnode4\\n'\n")
    scontrol.chmod(0o755)
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "12345",
        "SLURM_JOB_NODELIST": "node[3-4]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NTASKS_PER_NODE": "8",
    }


def called(script: Path, *arguments: str, environ: dict[str, str]) -> list[str]:
    done = subprocess.run(
        ["bash", script, *arguments], env=environ, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def check_launch(words: list[str]) -> None:
    """Fails unless ``ckpt WORDS`` is a line that ``ckpt launch`` takes."""
    assert words[0] == "launch"
    assert callable(parse_command(words))


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_bash_and_say_how_they_are_called(name: str, repo_dir: Path) -> None:
    script = repo_dir / "docs/examples" / name
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK)
    done = subprocess.run(["bash", script], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")


def test_slurm_starts_an_agent_on_each_host(repo_dir: Path, stand_ins: dict[str, str]) -> None:
    words = called(
        repo_dir / "docs/examples/launch.sbatch", "a", "b", "--tp-new", "4", environ=stand_ins
    )
    command = words[words.index("ckpt") + 1 :]
    check_launch(command)
    assert command[command.index("--rdzv-endpoint") + 1] == "node3:22345"
    assert command[command.index("--") :] == ["--", "reshard", "a", "b", "--tp-new", "4"]


def test_slurm_starts_the_workers_itself(repo_dir: Path, stand_ins: dict[str, str]) -> None:
    script = repo_dir / "docs/examples/launch.sbatch"
    words = called(script, "a", "b", "--tp-new", "4", environ={**stand_ins, "WORKERS": "srun"})
    _, command = parse_worker_arguments(words[words.index("ckpt_cli.worker") + 1 :])
    assert command == ["reshard", "a", "b", "--tp-new", "4"]


def test_mpi_starts_the_workers(repo_dir: Path, stand_ins: dict[str, str]) -> None:
    script = repo_dir / "docs/examples/launch-mpi.sh"
    words = called(
        script, "16", "a", "b", "--tp-new", "4", environ={**stand_ins, "HOSTS": "node3:8,node4:8"}
    )
    assert words[:5] == ["mpirun", "-n", "16", "--host", "node3:8,node4:8"]
    assert "MASTER_ADDR=node3" in words
    assert parse_worker_arguments(words[words.index("ckpt_cli.worker") + 1 :])[1] == [
        "reshard",
        "a",
        "b",
        "--tp-new",
        "4",
    ]


def test_the_kubernetes_job_is_one_and_its_command_parses(repo_dir: Path) -> None:
    service, job = yaml.safe_load_all(
        (repo_dir / "docs/examples/launch-k8s.yaml").read_text("utf-8")
    )
    assert (service["kind"], service["spec"]["clusterIP"], job["kind"]) == (
        "Service",
        "None",
        "Job",
    )
    spec = job["spec"]
    pod = spec["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    (script,) = container["args"]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    words = shlex.split(script[script.index("ckpt launch") :].replace("\\\n", " "))
    check_launch(words[1:])
    assert int(words[words.index("--nnodes") + 1]) == spec["completions"] == spec["parallelism"]
    assert words[words.index("--rdzv-endpoint") + 1].startswith(
        f"{job['metadata']['name']}-0.{pod['subdomain']}:"
    )
