from __future__ import annotations

from ckpt_cli.pages.transfer import explain_lines
from ckpt_cli.screen.terminal import Screen
from core.verbs.convert.explain import LayoutLine

LINE = LayoutLine(
    names="decoder.layers.[0-3].mlp.linear_fc1.weight",
    n_tensors=4,
    shape=(192, 64),
    rule="split",
    cut="axis 0 over TP 2, in 2 parts of 96 + 96",
    shard=(96, 64),
    states=("fp32_param", "exp_avg", "exp_avg_sq"),
    pattern="linear_fc1",
    where="megatron.toml [[rule]] 43",
    source="transformer/mlp.py: each rank holds [gate; up]",
)


def test_an_explanation_is_one_line_a_tensor_where_there_is_room() -> None:
    for screen in (Screen(), Screen(width=250)):
        [line] = explain_lines(screen, [LINE])
        assert line.startswith(
            "decoder.layers.[0-3].mlp.linear_fc1.weight  [192, 64]  split, axis 0 over TP 2"
        )
        assert ": [96, 64] each, with fp32_param, exp_avg, exp_avg_sq  megatron.toml" in line


def test_an_explanation_is_wrapped_below_its_tensor_in_a_narrow_terminal() -> None:
    lines = list(explain_lines(Screen(width=80), [LINE]))
    assert lines == [
        "decoder.layers.[0-3].mlp.linear_fc1.weight  [192, 64]",
        "    split, axis 0 over TP 2, in 2 parts of 96 + 96: [96, 64] each, with",
        "    fp32_param, exp_avg, exp_avg_sq",
        "    megatron.toml [[rule]] 43: transformer/mlp.py: each rank holds [gate; up]",
    ]
