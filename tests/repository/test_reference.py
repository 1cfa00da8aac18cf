"""docs/reference: its generated blocks are what the code says, and what its pages show is true."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path

import pytest

from ckpt_cli.app import main
from ckpt_cli.options.launch import LaunchOptions
from ckpt_cli.options.worker import WorkerOptions
from core.engine.fingerprint.definition import form_of, format_lanes
from core.engine.fingerprint.kernel import products_in_numpy
from core.engine.fingerprint.sums import FormSum
from core.publish.stage.workers_lock import WAIT_SECONDS
from core.verbs.checks.finding import codes

DATA_KEYS = {"model", "dtypes", "parallel", "rank", "value"}
"""Fields whose own keys are data, not part of a schema."""
WHERE_IT_APPLIES = {"launch", "map", "maps", "rank", "rank_grid", "sizes", "store"}
"""Fields that a schema names and not every answer has."""


def test_generated_pages_are_what_the_code_says(repo_dir: Path) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/make_reference", "--check"],
        cwd=repo_dir,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_code_has_an_anchor(repo_dir: Path) -> None:
    page = (repo_dir / "docs/reference/checks.md").read_text("utf-8")
    assert re.findall(r'<a id="(ck\d{3})"></a>', page) == [code.lower() for code in codes()]


@pytest.mark.parametrize(
    ("shape", "itemsize"),
    [
        ((), 8),
        ((3,), 2),
        ((5, 7, 11), 4),
        ((2, 1031), 4),
        ((1, 4099), 2),
        ((3, 96, 8), 1),
        ((0, 4), 4),
    ],
)
def test_the_fingerprint_of_the_page_is_ours(
    repo_dir: Path, shape: tuple[int, ...], itemsize: int
) -> None:
    (code,) = re.findall(
        r"```python\n(.*?)```", (repo_dir / "docs/reference/fp1.md").read_text("utf-8"), re.DOTALL
    )
    names: dict[str, object] = {}
    exec(code, names)
    data = random.Random(0).randbytes(prod(shape) * itemsize)
    ours = FormSum(form_of(shape, itemsize), products_in_numpy)
    ours.add_run(0, memoryview(data))
    assert names["fp1"](data, shape, itemsize) == format_lanes(ours.lanes)  # type: ignore[operator]


def schema_text(repo_dir: Path, name: str) -> str:
    page = (repo_dir / "docs/reference/json.md").read_text("utf-8")
    return page.partition(f"<!-- generated: schema {name} -->")[2].partition("<!-- end")[0]


def top_keys(text: str) -> set[str]:
    """The names of an object's own fields, out of a schema's text."""
    keys, depth = set(), 0
    for part in re.finditer(r'"(?P<key>[\w-]+)":|[{\[]|[}\]]', text):
        if part["key"]:
            keys |= {part["key"]} if depth == 1 else set()
        else:
            depth += 1 if part[0] in "{[" else -1
    return keys


def keys_of(value: object) -> Iterator[str]:
    """The names of fields at any depth of an answer."""
    for key, part in value.items() if isinstance(value, dict) else ():
        yield key
        yield from () if key in DATA_KEYS else keys_of(part)
    for part in value if isinstance(value, list) else ():
        yield from keys_of(part)


def test_the_waits_of_workers_are_the_usual_ones_of_the_options(repo_dir: Path) -> None:
    page = (repo_dir / "docs/reference/launch-waits.md").read_text("utf-8")
    limits = {
        row[0].strip(): row[1].strip()
        for row in re.findall(r"^\| ([^|]+)\|([^|]+)\|", page, re.MULTILINE)
    }
    worker, launch = WorkerOptions(), LaunchOptions()
    assert limits["a heartbeat from a worker or host"] == f"{worker.timeout_s:g} s"
    assert (
        limits["workers to join, with a different launcher (`python -m ckpt_cli.worker`)"]
        == f"{worker.join_timeout_s:g} s"
    )
    assert limits["workers to exit when they are stopped"] == f"{launch.shutdown_timeout} s"
    dead_run = "workers of a dead run that are still writing to the stage"
    assert limits[dead_run] == f"{WAIT_SECONDS:g} s"
    assert f"`--max-restarts` times ({launch.max_restarts} by default)" in page


def test_an_error_has_the_fields_of_the_page(
    repo_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (repo_dir / "docs/reference/exit-codes.md").read_text("utf-8")
    (line,) = re.findall(r'^\{"error": .*$', text, re.MULTILINE)
    assert main(["inspect", "no-such-path", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert {"code", "message", "exit_code"} <= set(error) <= set(re.findall(r'"(\w+)":', line))


def test_the_schemas_have_the_fields_of_real_answers(
    golden: Path, tmp_path: Path, repo_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = golden / "mcore_legacy/dense_gqa/tp2_pp1"
    other = golden / "mcore_legacy/dense_gelu/tp1_pp1"
    commands: dict[str, list[object]] = {
        "ckpt.inspect/1": ["inspect", run, "decoder.layers.0.mlp.*", "--values", 2],
        "ckpt.inspect-list/1": ["inspect", golden / "torch_dcp"],
        "ckpt.plan/1": ["reshard", run, tmp_path / "half", "--tp-new", 1, "--dry-run", "--rank", 0],
        "ckpt.explain/1": ["reshard", run, tmp_path / "half", "--tp-new", 1, "--explain"],
        "ckpt.transfer/1": ["reshard", run, tmp_path / "half", "--tp-new", 1],
        "ckpt.manifest-report/1": ["manifest", tmp_path / "half", "--force"],
        "ckpt-manifest": [],  # the file that the command before has written
        "ckpt.diff/1": ["diff", run, other],
        "ckpt.validate/1": ["validate", run, tmp_path / "half"],
        "ckpt.newest/1": ["validate", "--newest-valid", run],
        "ckpt.prune/1": ["prune", run, "--keep-last", 1, "--dry-run"],
        "ckpt.checks/1": ["validate", "--list-checks"],
    }
    answer: dict[str, str] = {}
    for name, arguments in commands.items():
        if arguments:
            main([*map(str, arguments), "--json"])
            answer = json.loads(capsys.readouterr().out)
        else:
            answer = json.loads(Path(answer["manifest"]).read_text())
        assert answer["schema"] == name
        text = schema_text(repo_dir, name)
        assert top_keys(text) - WHERE_IT_APPLIES == set(answer) - WHERE_IT_APPLIES, name
        named = set(re.findall(r'"([\w-]+)":', text + schema_text(repo_dir, "FINDING")))
        assert set(keys_of(answer)) - named == set(), name
