"""Results show themselves in a few lines, as text and as HTML."""

from __future__ import annotations

from pathlib import Path

import core
from core.values import Brief, list_facts, shown_briefly

RANKS = "mcore_legacy/dense_gqa/tp2_pp2_optim"
OTHER = "mcore_legacy/dense_gelu/tp1_pp1"


def test_results_of_all_verbs_and_of_opening_are_a_few_lines(golden: Path, tmp_path: Path) -> None:
    run = golden / RANKS
    with core.open(run) as checkpoint:
        results: dict[str, object] = {
            "megatron checkpoint": checkpoint,
            "wrote": core.convert(run, tmp_path / "dcp", to="dcp"),
            "no findings in": core.validate(run),
            "the same: 124 tensors": core.diff(run, tmp_path / "dcp"),
            "different: 146 of 146 tensors and": core.diff(run, golden / OTHER),
            "megatron checkpoint /": core.inspect(run),
            f"{run}: 1 iteration to keep, 0 to remove": core.prune(run, keep_last=1, dry_run=True),
        }
        for title, result in results.items():
            lines = repr(result).splitlines()
            assert lines[0].startswith(title)
            assert 2 < len(lines) < 30
            assert max(map(len, lines)) < 230
            html = result._repr_html_()  # type: ignore[attr-defined]
            assert html.startswith("<table>") and html.count("<tr>") == len(lines) - 1


def test_parts_of_results_are_short_too(golden: Path) -> None:
    source = core.open_checkpoint(golden / RANKS)
    difference = core.diff(golden / RANKS, golden / OTHER)
    parts = (source, source.catalog, difference.a, difference.tensors[0])
    source.store.close()
    assert max(len(repr(part)) for part in parts) < 300


def test_names_of_a_checkpoint_cannot_control_what_shows_them() -> None:
    @shown_briefly
    class Hostile:
        def brief(self) -> Brief:
            return Brief("a\x1b[2J", list_facts("<b>", ["<script>\n", *"abcdef"]))

    assert repr(Hostile()).splitlines()[:2] == ["a\\x1b[2J", "  <b>  <script>\\n"]
    assert repr(Hostile()).endswith("… 2 more")
    html = Hostile()._repr_html_()  # type: ignore[attr-defined]
    assert "<script>" not in html and "&lt;script&gt;" in html
