"""Histograms on one line, and the lines of an outlier layer."""

from __future__ import annotations

import numpy as np
import pytest

from ckpt_cli.pages.inspect_stats import stats_lines
from ckpt_cli.pages.pictures.histogram import histogram_text, scale_of
from ckpt_cli.screen.terminal import Screen, columns_of
from core.engine.catalog.tensor import Tensor
from core.engine.numbers.histogram import Histogram
from core.engine.numbers.statistics import ValueStatistics, describe


def lines_of(layers: dict[str, np.ndarray], screen: Screen, *, has_members: bool) -> list[str]:
    parts: dict[str, ValueStatistics | None] = {
        key: describe(memoryview(values.astype("f4").tobytes()), "float32")
        for key, values in layers.items()
    }
    tensors = {key: Tensor("float32", values.shape) for key, values in layers.items()}
    return list(
        stats_lines(screen, tensors, parts, is_flat=False, has_members=has_members, sort=None)
    )


def layers_of(n: int, **scales: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        f"layers.{number}.weight": rng.standard_normal(1000) * scales.get(f"l{number}", 0.02)
        for number in range(n)
    }


def test_numbers_are_in_the_column_of_their_sign_and_power() -> None:
    histogram = Histogram({2: 4}, {2: 8, 0: 1})
    scale = scale_of(histogram)
    text = histogram_text(histogram, 0, scale)
    assert len(text) == 25
    assert (text[0], text[-1], text[-3]) == ("▄", "█", "▁")
    assert text.strip(" ▄█▁") == ""
    assert scale.limits == ("-8", "8")


def test_zeros_and_tiny_numbers_are_in_the_middle() -> None:
    histogram = Histogram({0: 2}, {0: 4, -100: 1})
    scale = scale_of(histogram)
    assert histogram_text(histogram, 0, scale)[12] == "▂"
    # However many there are, the others keep their shape.
    text = histogram_text(histogram, 10**9, scale)
    assert (text[0], text[12], text[-1]) == ("▄", "█", "█")


def test_positive_numbers_alone_have_all_columns() -> None:
    histogram = Histogram({}, {0: 1, -20: 1})
    scale = scale_of(histogram)
    text = histogram_text(histogram, 0, scale)
    assert (len(text), text[-1], text[-21]) == (25, "█", "█")
    assert scale.limits == ("0", "2")


def test_limits_beyond_floats_are_powers() -> None:
    assert scale_of(Histogram({}, {1023: 1})).limits == ("0", "2^1024")


def test_every_folded_layer_has_a_line_on_which_the_outlier_is_marked() -> None:
    lines = lines_of(layers_of(6, l3=0.5), Screen(80), has_members=True)
    members = [line for line in lines if line.startswith("    layers.")]
    assert [line.split()[0] for line in members] == [f"layers.{n}" for n in range(6)]
    assert [n for n, line in enumerate(members) if "× std" in line] == [3]
    # To one scale: only the outlier reaches the ends.
    bars = {line.split()[0]: line for line in members}
    assert bars["layers.3"].rstrip().count("▁") > 0
    assert max(map(columns_of, lines)) <= 80


def test_without_key_a_folded_row_has_one_histogram() -> None:
    lines = lines_of(layers_of(6), Screen(80), has_members=False)
    assert sum("█" in line for line in lines) == 1
    assert any(line.startswith("    -0.125 ") and line.endswith(" 0.125") for line in lines)


def test_of_very_many_layers_the_unusual_ones_are_shown() -> None:
    lines = lines_of(layers_of(100, l77=9.0), Screen(80), has_members=True)
    members = [line for line in lines if line.startswith("    layers.")]
    assert len(members) == 64
    assert any("layers.77 " in line and "×" in line for line in members)
    assert any("… 36 more tensors" in line for line in lines)


def test_nan_is_named_and_not_counted() -> None:
    layers = layers_of(4)
    layers["layers.2.weight"][:3] = np.nan
    lines = lines_of(layers, Screen(80), has_members=True)
    (line,) = (line for line in lines if line.startswith("    layers.2"))
    assert "3 NaN or Inf" in line


@pytest.mark.parametrize("has_unicode", [True, False])
def test_histograms_of_zeros_are_left_out(*, has_unicode: bool) -> None:
    lines = lines_of({"a": np.zeros(4)}, Screen(80, has_unicode=has_unicode), has_members=True)
    assert not any("histograms" in line for line in lines)
    assert lines[1].split()[0] == "a"


def test_ascii_terminals_get_ascii() -> None:
    lines = lines_of(layers_of(4, l1=0.5), Screen(80, has_unicode=False), has_members=True)
    assert all(line.isascii() for line in lines)
    assert any("#" in line for line in lines)
    assert any(" <- 2" in line for line in lines)
