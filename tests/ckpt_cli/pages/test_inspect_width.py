"""The pages of ``ckpt inspect`` fit into a narrow terminal."""

from __future__ import annotations

from pathlib import Path

from ckpt_cli.pages.inspect_listing import listing_lines
from ckpt_cli.pages.inspect_stats import stats_lines
from ckpt_cli.screen.terminal import Screen, columns_of
from core.engine.catalog.tensor import Tensor
from core.engine.numbers.statistics import ValueStatistics
from core.opening.listing import ListedCheckpoint, Listing


def statistics(*keys: str) -> tuple[dict[str, Tensor], dict[str, ValueStatistics | None]]:
    part = ValueStatistics(
        n_elements=8, n_zeros=5376, least=-0.00452, greatest=0.00364, total=-1.67e-05, square=1e-5
    )
    return dict.fromkeys(keys, Tensor("float32", (8,))), dict.fromkeys(keys, part)


def test_a_long_name_has_a_line_above_its_figures() -> None:
    name = "optimizer.state.exp_avg.decoder.layers.self_attention.linear_qkv.weight"
    tensors, parts = statistics(name, "bias")
    lines = list(stats_lines(Screen(width=80), tensors, parts, is_flat=False, sort=None))
    assert max(map(columns_of, lines)) <= 80
    at = lines.index(name)
    assert lines[at + 1].split()[0] == "-0.00452"
    assert lines[at + 2].split()[:2] == ["bias", "-0.00452"]
    # All on one line where there is room.
    lines = list(stats_lines(Screen(width=160), tensors, parts, is_flat=False, sort=None))
    assert lines[1].startswith(f"{name}  -0.00452")


def test_folded_rows_say_how_many_tensors_they_are() -> None:
    tensors, parts = statistics("layers.0.weight", "layers.1.weight", "bias")
    lines = list(stats_lines(Screen(width=80), tensors, parts, is_flat=False, sort=None))
    assert lines[-1].startswith("3 tensors in 2 rows")
    lines = list(stats_lines(Screen(width=80), tensors, parts, is_flat=True, sort=None))
    assert lines[-1].startswith("3 tensors, ")


def test_the_command_of_a_listed_checkpoint_has_its_own_line_in_a_narrow_terminal() -> None:
    path = Path("/data/runs/llama-3-8b/checkpoints/iter_0000010")
    listing = Listing((ListedCheckpoint(path, None, 10, 3, 1 << 20, 1.7e9),), None)
    lines = list(listing_lines(Screen(width=80), Path("/data/runs"), listing, limit=0))
    assert lines[-1] == f"    ckpt inspect {path}"
    assert max(map(columns_of, lines)) <= 80
    lines = list(listing_lines(Screen(width=120), Path("/data/runs"), listing, limit=0))
    assert lines[-1].endswith(f"10  ?       ckpt inspect {path}")
