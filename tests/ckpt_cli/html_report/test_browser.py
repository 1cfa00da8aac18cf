"""Reports in headless Chromium: they work, run nothing of a checkpoint, and load nothing.

axe-core is fetched by scripts/browser-tests; CKPT_AXE names its file.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_cli.app import main
from tests.support.chromium import Tab, chromium, chromium_path
from tests.support.hostile_names import HOSTILE_NAMES, write_named_tensors

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        chromium_path() is None, reason="no Chromium found: scripts/browser-tests installs it"
    ),
]
RANKS = "mcore_legacy/dense_gqa/tp2_pp2_optim"
REPORTS = ("inspect", "stacked", "zero", "reshard", "validate", "diff", "hostile")


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def reports(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A report of each command, and one of hostile names."""
    folder = tmp_path_factory.mktemp("reports")
    ranks, broken = golden / RANKS, folder / "broken"
    shutil.copytree(ranks, broken)
    shutil.rmtree(broken / "iter_0000010" / "mp_rank_01_001")
    lost = folder / "lost"
    shutil.copytree(golden / "deepspeed/zero3_dp2_bf16", lost)
    next(lost.rglob("zero_pp_rank_1_*_model_states.pt")).unlink()
    hostile = write_named_tensors(folder / "hostile.safetensors", HOSTILE_NAMES)
    fewer = write_named_tensors(folder / "fewer.safetensors", HOSTILE_NAMES[2:])
    commands: dict[str, tuple[object, ...]] = {
        "inspect": ("inspect", ranks, "--stats"),
        "reshard": ("reshard", ranks, folder / "out", "--tp-new", 4, "--pp-new", 1, "-n"),
        "stacked": ("inspect", golden / "mcore_torch_dist/dense_gqa/tp2_pp2", "--stats"),
        "validate": ("validate", broken),
        "zero": ("validate", lost),
        "diff": ("diff", hostile, fewer),
        "hostile": ("inspect", hostile),
    }
    paths = {name: folder / f"{name}.html" for name in commands}
    for name, words in commands.items():
        assert main([*map(str, words), "--report", str(paths[name])]) == (
            name in ("validate", "zero", "diff")
        )
    return paths


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("width", [1280, 390])
def test_a_report_fits_its_window_and_loads_nothing(
    name: str, width: int, tab: Tab, reports: dict[str, Path]
) -> None:
    tab.console.clear()
    tab.requests.clear()
    tab.open(reports[name], width=width)
    # Open every row, so that all that can be drawn is drawn.
    tab.run("document.querySelectorAll('.row-button').forEach((button) => button.click())")
    assert tab.run("document.documentElement.scrollWidth") <= width
    assert tab.console == []
    assert [url for url in tab.requests if not url.startswith("file://")] == []
    assert len(tab.requests) == 1


@pytest.mark.parametrize("name", ["hostile", "diff"])
def test_nothing_of_a_hostile_checkpoint_runs(
    name: str, tab: Tab, reports: dict[str, Path]
) -> None:
    tab.console.clear()
    tab.open(reports[name])
    tab.run("document.querySelectorAll('.row-button').forEach((button) => button.click())")
    assert tab.run("typeof owned") == "undefined"
    assert tab.run("document.querySelectorAll('main img, main script, main b b').length") == 0
    assert tab.console == []
    assert "<script>owned=1</script>" in tab.run("document.body.textContent")
    assert "(10,000 characters)" in tab.run("document.body.textContent")


@pytest.mark.parametrize(("name", "row"), [("stacked", "layer 3"), ("inspect", "layers.3.")])
def test_each_layer_has_a_line_of_its_values(
    name: str, row: str, tab: Tab, reports: dict[str, Path]
) -> None:
    tab.open(reports[name])
    tab.run("document.querySelectorAll('.row-button').forEach((button) => button.click())")
    lines = (
        "[...document.querySelectorAll('.lines')].find((place) =>"
        f" place.textContent.includes({json.dumps(row)})).querySelectorAll(':scope tbody tr')"
    )
    assert tab.run(f"{lines}.length") == 4
    assert tab.run(f"{lines}[3].querySelectorAll('svg rect').length") > 2
    assert row in tab.run(f"{lines}[3].querySelector('th').textContent")
    # Another layer's details come above the lines, as the first one's.
    tab.run(
        "(() => { const s = document.querySelector('.detail select'); if (s) { s.value = '2';"
        " s.dispatchEvent(new Event('change')); } })()"
    )
    assert tab.run("document.querySelector('.detail .sides + .lines') !== null")


def test_an_injected_script_is_refused_by_the_policy(tab: Tab, reports: dict[str, Path]) -> None:
    tab.open(reports["inspect"])
    tab.run(
        "(() => { const s = document.createElement('script'); s.textContent = 'owned = 1';"
        " document.body.append(s); const i = document.createElement('img');"
        " i.setAttribute('onerror', 'owned = 2'); i.src = 'https://example.com/x.png';"
        " document.body.append(i); })()"
    )
    tab.run("new Promise((resolve) => setTimeout(resolve, 100))")
    assert tab.run("typeof owned") == "undefined"


def test_the_filter_selects_single_layers_and_rows_unfold(
    tab: Tab, reports: dict[str, Path]
) -> None:
    tab.open(reports["inspect"])
    set_filter = (
        "new Promise((resolve) => { const f = document.getElementById('filter'); f.value = %s;"
        " f.dispatchEvent(new Event('input')); setTimeout(resolve, 200); })"
    )
    # The weight and its three states in the optimizer.
    tab.run(set_filter % json.dumps("layers.2.mlp fc1"))
    assert tab.run("document.getElementById('count').textContent").startswith("4 tensors of 124")
    tab.run("document.getElementById('order').value = 'name'")
    tab.run("document.getElementById('order').dispatchEvent(new Event('change'))")
    tab.run("document.querySelector('.row-button').click()")
    assert tab.run("document.querySelector('.detail h3').textContent").startswith(
        "decoder.layers.2."
    )
    assert tab.run("document.querySelectorAll('.detail .shards rect').length") == 4
    tab.run("document.querySelector('.row-button').click()")
    assert tab.run("document.querySelectorAll('.detail').length") == 0
    tab.run(set_filter % json.dumps("nothing like it"))
    assert tab.run("document.querySelectorAll('#tensor-table tbody tr').length") == 0


def test_moves_are_linked_between_source_and_target(tab: Tab, reports: dict[str, Path]) -> None:
    tab.open(reports["reshard"])
    tab.run("document.querySelector('.row-button').click()")
    assert tab.run("document.querySelectorAll('.detail svg.shards').length") == 2
    tip = tab.run("document.querySelector('.detail svg.shards g').dataset.tip")
    assert "to 2 boxes" in tip


def test_a_finding_is_reached_from_its_rank(tab: Tab, reports: dict[str, Path]) -> None:
    tab.open(reports["validate"])
    tab.run("document.querySelector('[data-filter-rank]').click()")
    shown = "document.querySelectorAll('.findings li:not([hidden])').length"
    assert tab.run(shown) >= 1
    assert "CK160" in tab.run("document.querySelector('.findings li:not([hidden])').textContent")
    assert tab.run("document.activeElement.type") == "search"


def test_the_keyboard_reaches_rows_and_the_parts_of_a_drawing(
    tab: Tab, reports: dict[str, Path]
) -> None:
    tab.open(reports["inspect"])
    tab.key("Tab", 9)
    assert tab.run("document.activeElement.className") == "skip"
    tab.run("document.querySelector('.treemap.wide [tabindex=\"0\"]').focus()")
    first = tab.run("document.activeElement.dataset.tip")
    tab.key("ArrowRight", 39)
    assert tab.run("document.activeElement.dataset.tip") != first
    assert tab.run("document.getElementById('tip').textContent") == tab.run(
        "document.activeElement.dataset.tip"
    )
    tab.run("document.querySelector('.row-button').focus()")
    tab.key("Enter", 13)
    assert tab.run("document.querySelector('.row-button').ariaExpanded") == "true"


def test_a_report_prints(tab: Tab, reports: dict[str, Path]) -> None:
    tab.open(reports["validate"])
    assert len(tab.call("Page.printToPDF")["data"]) > 10_000


@pytest.mark.skipif("CKPT_AXE" not in os.environ, reason="scripts/browser-tests fetches axe-core")
@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("dark", [False, True])
def test_axe_has_no_objections(name: str, dark: bool, tab: Tab, reports: dict[str, Path]) -> None:
    tab.open(reports[name], dark=dark)
    tab.run("document.querySelector('.row-button')?.click()")
    # Through the debugger: the policy refuses scripts in the page.
    tab.run(Path(os.environ["CKPT_AXE"]).read_text("utf-8"))
    violations = tab.run(
        "axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21aa', 'best-practice']})"
        ".then((result) => result.violations.map((v) =>"
        " `${v.id}: ${v.help}: ${v.nodes.slice(0, 3).map((n) => n.html).join(' ')}`))"
    )
    assert violations == []
