from __future__ import annotations

import random

from core.engine.catalog.tensor import Tensor
from core.verbs.inspect.tree import MAX_DEPTH, Node, build_tree, components


def metas(*rows: tuple[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {key: Tensor("bfloat16", shape) for key, shape in rows}


def labels(nodes: tuple[Node, ...]) -> list[str]:
    return [node.label for node in nodes]


def test_equal_layers_fold_and_chains_join() -> None:
    (node,) = build_tree(
        metas(*[(f"decoder.layers.{i}.{n}", (4, 4)) for i in range(32) for n in ("a", "b")])
    )
    assert node.label == "decoder.layers.[0-31]"
    assert (node.n_alike, node.n_tensors, node.n_elements, node.n_bytes) == (
        32,
        64,
        64 * 16,
        64 * 32,
    )
    assert labels(node.children) == ["a", "b"]


def test_layers_with_another_shape_or_dtype_or_name_do_not_fold() -> None:
    nodes = build_tree(metas(("l.0.a", (4,)), ("l.1.a", (5,)), ("l.2.a", (4,)), ("l.3.b", (4,))))
    assert labels(nodes[0].children) == ["[0,2].a", "1.a", "3.b"]
    mixed = {"l.0.a": Tensor("bfloat16", (4,)), "l.1.a": Tensor("float16", (4,))}
    assert labels(build_tree(mixed)[0].children) == ["0.a", "1.a"]


def test_alternating_layers_fold_into_two_nodes() -> None:
    (node,) = build_tree(metas(*[(f"l.{i}.w", (4 + i % 2,)) for i in range(8)]))
    assert labels(node.children) == ["[0-6:2].w", "[1-7:2].w"]


def test_numbered_names_fold_only_from_four_on() -> None:
    assert labels(build_tree(metas(*[(f"weight{i}", (4,)) for i in range(8)]))) == ["weight[0-7]"]
    assert labels(build_tree(metas(("w1", (4,)), ("w2", (5,)), ("w3", (4,))))) == ["w1", "w2", "w3"]


def test_nested_folds_multiply() -> None:
    rows = [(f"l.{i}.experts.{e}.w{k}", (2, k)) for i in range(3) for e in range(5) for k in (1, 2)]
    (node,) = build_tree(metas(*rows))
    assert (node.label, node.n_alike, node.n_tensors) == ("l.[0-2].experts.[0-4]", 15, 30)


def test_equal_content_under_another_name_refers_to_the_first() -> None:
    rows = [
        (f"state.{s}.l.{i}.{n}", (4,))
        for s in ("exp_avg", "exp_avg_sq")
        for i in range(2)
        for n in ("w", "b")
    ]
    (node,) = build_tree(metas(*rows, ("state.fp32.l.0.w", (4,))))
    assert [(child.label, child.same_as) for child in node.children] == [
        ("exp_avg.l.[0-1]", None),
        ("exp_avg_sq.l.[0-1]", "exp_avg.l.[0-1]"),
        ("fp32.l.0.w", None),
    ]


def test_a_key_may_be_a_tensor_and_a_container() -> None:
    (node,) = build_tree(metas(("a", (1,)), ("a.b", (2,))))
    assert (node.label, node.shape, node.n_tensors) == ("a", (1,), 2)
    assert labels(node.children) == ["b"]


def test_order_is_that_of_first_appearance() -> None:
    assert labels(build_tree(metas(("z", (1,)), ("l.0", (2,)), ("b", (3,)), ("l.1", (2,))))) == [
        "z",
        "l.[0-1]",
        "b",
    ]


def test_layers_fold_whatever_the_order_of_their_tensors() -> None:
    layers = [
        [(f"l.{i}.attn.q", (4, 4)), (f"l.{i}.attn.k", (2, 4)), (f"l.{i}.norm", (4,))]
        for i in range(12)
    ]
    ordered = build_tree(metas(*[row for layer in layers for row in layer]))
    # Where a file ends in the middle of a layer, the rest of it follows in another order; here, all
    # tensors of all layers are shuffled but those of the first.
    rest = [row for layer in layers[1:] for row in layer]
    random.Random(7).shuffle(rest)
    assert build_tree(metas(*layers[0], *rest)) == ordered
    assert labels(ordered) == ["l.[0-11]"]
    assert labels(ordered[0].children) == ["attn", "norm"]


def test_equal_rank_directories_fold_under_their_names() -> None:
    rows = [(f"mp_rank_{r:02d}:model.w", (4,)) for r in range(4)] + [("mp_rank_04:model.w", (5,))]

    def split(key: str) -> list[str]:
        rank, _, name = key.partition(":")
        return [rank, *components(name)]

    nodes = build_tree(metas(*rows), split=split, folds_roots=True)
    assert [(node.label, node.n_alike) for node in nodes] == [
        ("mp_rank_00, …, mp_rank_03", 4),
        ("mp_rank_04", 1),
    ]


def test_absurdly_deep_keys_end() -> None:
    (node,) = build_tree(metas((".".join("a" * 100_000), (1,))))
    assert node.n_tensors == 1
    assert len(components(".".join("a" * 100_000))) == MAX_DEPTH


def test_escaped_dots_do_not_separate() -> None:
    assert components("a\\.b.c") == ["a\\.b", "c"]
    assert components("a..b") == ["a", "", "b"]
