"""The Python of docs/howto/training-script.md runs as it stands there."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from tests.support import forked

ROOT = Path(__file__).resolve().parent.parent.parent
N_RANKS = 2


@pytest.mark.dist
@pytest.mark.slow
def test_the_examples_of_the_page_run_one_after_the_other(tmp_path):
    page = ROOT / "docs/howto/training-script.md"
    save, convert = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    (tmp_path / "train.py").write_text(save)
    (tmp_path / "convert.py").write_text(convert)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    # What torchrun tells each rank; torchrun itself and its workers would import torch again.
    run_ranks_of(
        "train.py", tmp_path, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE=N_RANKS
    )
    done = forked.run(["convert.py"], cwd=tmp_path, env=environment(), timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    assert [path.name for path in sorted((tmp_path / "model").iterdir())] == ["model.safetensors"]


def run_ranks_of(script: str, folder: Path, **variables: object) -> None:
    """Run a script on all ranks at once, to its end."""
    running = []
    for rank in range(N_RANKS):
        with (folder / f"printed{rank}").open("w") as output, open(os.devnull) as nothing:
            running.append(
                forked.start(
                    [script],
                    stdin=nothing.fileno(),
                    stdout=output.fileno(),
                    stderr=output.fileno(),
                    env=environment(RANK=rank, LOCAL_RANK=rank, **variables),
                    cwd=folder,
                )
            )
    codes = [program.wait(240) for program in running]
    assert codes == [0] * N_RANKS, [
        (folder / f"printed{rank}").read_text()[-4000:] for rank in range(N_RANKS)
    ]


def environment(**variables: object) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        **{name: str(value) for name, value in variables.items()},
    }
