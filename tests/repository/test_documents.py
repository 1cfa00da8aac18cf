"""What README.md and docs/ show: their commands run and print what stands there."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_cli.app import parse_command
from core.formats.registry import formats
from tests.support import forked
from tests.support.documents import ROOT, fences, is_shown, pages, problems_of, steps_of

README = ROOT / "README.md"
DOCS = ROOT / "docs"
GUIDES = [
    page for folder in ("guide", "howto", "adding") for page in sorted((DOCS / folder).glob("*.md"))
]
START_MANY = {
    "launch.md",
    "ci.md",
    "megatron-rank-files.md",
    "torch-dist-and-zarr.md",
    "first-steps.md",
}
"""Pages whose commands start processes, or go through many checkpoints."""
PAGES = [page for page in pages() if steps_of(page.read_text("utf-8"))]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.long if page.name in START_MANY else ())
        for page in PAGES
    ],
    ids=name_of,
)
def test_the_commands_of_a_page_run_and_print_what_it_shows(page: Path, tmp_path: Path) -> None:
    problems = problems_of(page.read_text("utf-8"), tmp_path)
    assert problems == [], "\n".join(
        [*problems, f"python -m tests.support.documents --write {name_of(page)}"]
    )


@pytest.mark.long
@pytest.mark.slow
def test_the_pictures_are_what_the_program_shows() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/make_pictures", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
def test_the_playground_is_packed_from_golden_checkpoints(golden: Path) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/make_playground", "--check", "--golden", golden],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_picture_is_on_a_page_and_loads_nothing() -> None:
    text = "\n".join(page.read_text("utf-8") for page in pages())
    pictures = sorted((DOCS / "pictures").glob("*.svg"))
    assert pictures
    for path in pictures:
        assert f"pictures/{path.name})" in text
        assert "url(http" not in path.read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("page", [README, ROOT / "docs/guide/python.md"], ids=name_of)
def test_the_python_of_a_page_runs(page: Path, golden: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/llama").symlink_to(golden / "mcore_legacy/dense_gqa/tp4_pp1_optim")
    lines = [line for _, block in fences(page.read_text("utf-8"), "python") for line in block]
    done = forked.run(["-c", "\n".join(lines)], cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]


def test_every_command_that_needs_hosts_or_devices_can_be_parsed() -> None:
    """Those of ``sh`` blocks, which cannot run here: several hosts, GPUs, checkpoints that are not
    in the tests.
    """
    problems, n_commands = [], 0
    for page in pages():
        for words in commands_in_shell_blocks(page.read_text("utf-8")):
            if words[0].endswith("-completion"):
                continue  # acts while it is parsed
            n_commands += 1
            try:
                assert callable(parse_command(words))
            except Exception as err:
                problems.append(f"{name_of(page)}: ckpt {' '.join(words)}: {err}")
    assert problems == []
    assert n_commands > 5


def commands_in_shell_blocks(text: str) -> Iterator[list[str]]:
    """Yield the arguments of ``ckpt …`` lines in ``sh`` blocks; comments and variables are cut
    off.
    """
    for _, lines in fences(text, "sh"):
        for line in "\n".join(lines).replace("\\\n", " ").splitlines():
            if match := re.match(r"(?:[A-Z_]+=\S+ )*ckpt (.+?)(?:\s+#.*)?$", line):
                yield [word.strip("'\"") for word in match[1].split()]


def test_the_readme_lists_every_format_and_whether_it_is_written() -> None:
    rows = re.findall(
        r"^\| `(\w+)`[^|]*\|[^|]*\| yes \| (yes|no)", README.read_text("utf-8"), re.MULTILINE
    )
    expected = {format.name: "no" if format.lay_out is None else "yes" for format in formats()}
    assert dict(rows) == {**expected, "hf": "yes"}


def test_modules_named_in_the_guides_exist() -> None:
    others = [README, ROOT / "CONTRIBUTING.md", DOCS / "explanation/architecture.md"]
    missing = [
        f"{name_of(page)}: {name}"
        for page in [*others, *GUIDES]
        for name in re.findall(r"`((?:core|ckpt_cli)\.[\w./-]+)`", page.read_text("utf-8"))
        if not is_importable(name)
    ]
    assert missing == []


def is_importable(name: str) -> bool:
    """Return whether a dotted name is a module, or an attribute of one."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_what_is_shown_is_compared_apart_from_times_and_gaps() -> None:
    output = ["✓ wrote x", "  time  0.31 s (1.02 MiB/s)", "  note  a", "  note  b"]
    assert is_shown(["✓ wrote x", "  time  12.5 s (880 KiB/s)", "  note  a", "  note  b"], output)
    assert is_shown(["✓ wrote x", "  time  0.04 s", "…"], output)
    assert is_shown(["✓ wrote x", "…"], output)
    assert is_shown(["…", "  note  b"], output)
    assert not is_shown(["✓ wrote x", "…", "  note  a"], output)
    assert not is_shown(["✓ wrote x"], output)
    assert not is_shown(
        ["✓ wrote x", "  time  0.31 s (1.02 MiB/s)", "  note  a", "  note  c"], output
    )
