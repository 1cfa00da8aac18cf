"""The reports of the commands: what they contain, and what they never contain."""

from __future__ import annotations

import json
import math
import re
import shutil
from base64 import b64encode
from collections.abc import Callable
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ckpt_cli.app import main
from ckpt_cli.html_report.page import json_block
from tests.support.edited import copied
from tests.support.hostile_names import HOSTILE_NAMES, write_named_tensors

RANKS = "mcore_legacy/dense_gqa/tp2_pp2_optim"


class Page(HTMLParser):
    """The tags, attributes, text and scripts of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.raw: dict[str, list[str]] = {"script": [], "style": []}
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._inside = tag if tag in self.raw else ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.raw[self._inside].append(data)
        else:
            self.text += data

    @property
    def data(self) -> dict[str, object]:
        """The data block."""
        return dict(json.loads(self.raw["script"][0]))

    @property
    def ids(self) -> list[str | None]:
        return [value for name, value in self.attributes if name == "id"]


@pytest.fixture(scope="module")
def broken_ranks(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without one rank."""
    path = tmp_path_factory.mktemp("broken") / "ranks"
    shutil.copytree(golden / RANKS, path)
    shutil.rmtree(path / "iter_0000010" / "mp_rank_01_001")
    return path


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., Page]:
    """Runs a command with --report, and returns the page."""

    def call(*arguments: object, code: int = 0) -> Page:
        path = tmp_path / "report.html"
        assert main([*map(str, arguments), "--report", str(path)]) == code
        html = path.read_text("utf-8")
        check_page(html)
        return Page(html)

    return call


def check_page(html: str) -> None:
    """What holds for every report."""
    page = Page(html)
    assert html.startswith("<!doctype html>\n<!-- report of ckpt")
    # One script and one style sheet, which the policy names by their hashes, and nothing else.
    policy = next(
        value for name, value in page.attributes if name == "content" and "default" in (value or "")
    )
    assert policy is not None and policy.startswith("default-src 'none'")
    _, script = page.raw["script"]
    (style,) = page.raw["style"]
    for text in (script, style):
        assert f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" in policy
    assert "unsafe" not in policy and "http" not in policy
    names = {name for name, _ in page.attributes}
    assert not {name for name in names if name.startswith("on")} and "style" not in names
    assert not {"src", "srcset", "action"} & names
    assert all((value or "").startswith("#") for name, value in page.attributes if name == "href")
    assert not {"img", "iframe", "link", "object", "form", "base"} & set(page.tags)
    # Readers of screens: landmarks, a language, one title, and unique ids that labels refer to.
    assert {"header", "nav", "main", "footer"} <= set(page.tags) and page.tags.count("h1") == 1
    assert ("lang", "en") in page.attributes
    assert len(page.ids) == len(set(page.ids))
    labels = {value for name, value in page.attributes if name in ("for", "aria-labelledby")}
    assert labels <= set(page.ids)


def test_inspect_shows_summary_sizes_ranks_and_tensors(
    golden: Path, report: Callable[..., Page], capsys: pytest.CaptureFixture[str]
) -> None:
    page = report("inspect", golden / RANKS)
    assert {"summary", "sizes", "ranks", "tensors"} <= set(page.ids)
    assert "TP 2 · PP 2" in page.text
    table = page.data["table"]
    assert isinstance(table, dict) and len(table["rows"]) > 10 and table["withoutMap"] == 0
    # The page of the terminal is as without a report; stderr names the file.
    out, err = capsys.readouterr()
    assert re.fullmatch(r"report: \S+report\.html \(.* KiB\)\n", err)
    assert main(["inspect", str(golden / RANKS), "--all"]) == 0
    assert capsys.readouterr().out == out


def test_inspect_with_stats_has_the_values_of_each_tensor(
    golden: Path, report: Callable[..., Page]
) -> None:
    table = report("inspect", golden / RANKS, "--stats").data["table"]
    assert isinstance(table, dict)
    described = [values for row in table["rows"] for values in row[-2]]
    assert len(described) == 31
    assert {"min", "max", "mean", "std", "NaN", "Inf", "zeros"} <= set(described[0])
    # The bins hold every finite value.
    for row in table["rows"]:
        for values in row[-2]:
            _, zeros, negative, positive = values["bins"]
            assert zeros + sum(negative) + sum(positive) == math.prod(row[2])


def test_inspect_of_a_damaged_checkpoint_shows_the_damage(
    golden: Path, tmp_path: Path, report: Callable[..., Page], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "checkpoint"
    shutil.copytree(golden / "hf/llama/safetensors_sharded", path)
    (path / "model-00002-of-00003.safetensors").unlink()
    page = report("inspect", path, code=3)
    assert "problems" in page.ids
    assert "model-00002-of-00003.safetensors" in page.text
    error, note = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and note.startswith("report: ")


def test_json_of_stdout_stays_alone(
    golden: Path, report: Callable[..., Page], capsys: pytest.CaptureFixture[str]
) -> None:
    report("inspect", golden / RANKS, "--json")
    assert json.loads(capsys.readouterr().out)["schema"] == "ckpt.inspect/1"


def test_reshard_shows_both_layouts_and_what_moves(
    golden: Path, tmp_path: Path, report: Callable[..., Page], capsys: pytest.CaptureFixture[str]
) -> None:
    page = report(
        "reshard", golden / RANKS, tmp_path / "out", "--tp-new", 4, "--pp-new", 1, "--dry-run"
    )
    assert {"summary", "moves", "tensors", "files"} <= set(page.ids)
    table = page.data["table"]
    assert isinstance(table, dict)
    row = next(row for row in table["rows"] if "linear_fc1" in str(row[0]))
    maps, layouts = table["layouts"]["maps"], table["layouts"]["boxes"]
    before, after = (
        len(layouts[maps[n if isinstance(n, int) else n[0]][0]]) for n in (row[5], row[6])
    )
    assert after == 2 * before
    assert str(table["command"]).endswith("… --explain --map KEY")
    # The command for the run itself does not repeat the report.
    assert "--report" not in capsys.readouterr().out


def test_convert_has_a_report_too(
    golden: Path, tmp_path: Path, report: Callable[..., Page]
) -> None:
    page = report("convert", golden / RANKS, tmp_path / "out", "--to", "dcp", "--dry-run")
    assert "moves" in page.ids


def test_validate_places_findings_on_the_grid(
    broken_ranks: Path, report: Callable[..., Page]
) -> None:
    page = report("validate", broken_ranks, code=1)
    assert "✗ missing" in page.text and "error CK160" in page.text
    assert ("data-filter-rank", "pp1-tp1") in page.attributes
    assert ("data-ranks", "rank:pp1-tp1;") in page.attributes


def test_validate_places_findings_on_the_grid_of_deepspeeds_ranks(
    golden: Path, tmp_path: Path, report: Callable[..., Page], capsys: pytest.CaptureFixture[str]
) -> None:
    path = copied(golden, "deepspeed/zero1_dp2_bf16", tmp_path)
    next(path.rglob("bf16_zero_pp_rank_1_*optim_states.pt")).unlink()
    page = report("validate", path, code=1)
    assert "✗ missing" in page.text
    assert "2 data-parallel ranks, 80.4 KiB, 1 file missing" in page.text
    assert ("data-filter-rank", "optimizer-dp1") in page.attributes
    assert ("data-ranks", "rank:optimizer-dp1;") in page.attributes
    # The terminal has the same picture below the findings.
    assert "optimizer  58.4 KiB  missing" in capsys.readouterr().out


def test_validate_lists_several_checkpoints_the_worst_first(
    golden: Path, broken_ranks: Path, report: Callable[..., Page]
) -> None:
    page = report("validate", golden / RANKS, broken_ranks, code=1)
    assert page.text.index("error CK160") < page.text.index("No findings")
    assert "1 with errors" in page.text


def test_diff_lists_the_worst_tensor_first(tmp_path: Path, report: Callable[..., Page]) -> None:
    names = [f"layers.{i}.weight" for i in range(4)]
    a = write_named_tensors(tmp_path / "a.safetensors", names)
    b = write_named_tensors(tmp_path / "b.safetensors", [*names[:3], "layers.9.weight"])
    data = bytearray(b.read_bytes())
    data[-33] = 0x40  # the last element of layer 1
    b.write_bytes(data)
    page = report("diff", a, b, code=1)
    assert {"heat", "worst"} <= set(page.ids)
    order = [page.text.rindex(name) for name in ("layers.3", "layers.9", "layers.1")]
    assert order == sorted(order)


def test_every_name_of_a_checkpoint_is_text(tmp_path: Path, report: Callable[..., Page]) -> None:
    path = write_named_tensors(tmp_path / "model.safetensors", HOSTILE_NAMES)
    page = report("inspect", path)
    text = json.dumps(page.data) + page.text
    assert "(10,000 characters)" in text and "a" * 700 not in text
    assert "\x1b" not in text and "\u202e" not in text
    for command in (("convert", path, tmp_path / "o", "--to", "dcp", "-n"), ("validate", path)):
        report(*command)
    b = write_named_tensors(tmp_path / "b.safetensors", HOSTILE_NAMES[3:])
    report("diff", path, b, code=1)


def test_json_in_the_page_cannot_end_its_script() -> None:
    text = json_block({"<!--": "</script>&\u2028"})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"<!--": "</script>&\u2028"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inspect", "SRC", "--report", "x.txt"), "does not end in .html"),
        (("inspect", "SRC", "--report", "/no/such/dir/x.html"), "directory does not exist"),
        (
            ("reshard", "SRC", "out", "--tp-new", "1", "--report", "x.html"),
            "--report has no effect: only --dry-run reports a plan",
        ),
        (("diff", "SRC", "SRC", "--report", "x.json"), "does not end in .html"),
    ],
)
def test_reports_that_cannot_be_written_are_refused_before_any_work(
    arguments: tuple[str, ...], message: str, golden: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(golden / RANKS) if word == "SRC" else word for word in arguments]
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_another_file_is_not_overwritten_but_a_report_is(
    golden: Path, tmp_path: Path, report: Callable[..., Page], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.html"
    path.write_text("<!doctype html>\n<p>my page")
    assert main(["inspect", str(golden / RANKS), "--report", str(path)]) == 2
    assert "not a ckpt report" in capsys.readouterr().err
    path.unlink()
    report("inspect", golden / RANKS)
    report("inspect", golden / RANKS)


def test_a_device_that_is_full_is_a_clear_error(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "full.html"
    path.symlink_to("/dev/full")
    assert main(["inspect", str(golden / RANKS), "--report", str(path)]) == 7
    assert "full" in capsys.readouterr().err
