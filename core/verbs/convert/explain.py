"""Explain which layout rule each tensor of a conversion follows, and how the rule cuts it.

Tensors share a line if they differ only in the numbers of layers and experts, follow one rule, and
are cut in the same way.
"""

from __future__ import annotations

import re

from core.arrays.box import Shape
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.key_patterns import ranges
from core.engine.catalog.optimizer_keys import split_state_key
from core.megatron.model.args import parse_facts
from core.megatron.model.cut import Cut, cuts_of
from core.megatron.model.topology import Topology
from core.megatron.model.vocabulary import rows_of
from core.megatron.rules.rules import Rule, Rules
from core.values import dataclass


@dataclass(frozen=True, slots=True)
class LayoutLine:
    """A line of the explanation: tensors that one rule cuts in the same way.

    Args:
        names: the global name, with ``[0-3]`` for the numbers of layers and experts.
        n_tensors: number of tensors that the line stands for, optimizer states included.
        shape: global shape in the destination, in elements.
        rule: the rule's kind: ``replicate``, ``split``, ``vocab`` or ``opaque``.
        cut: description of the cut, in words.
        shard: shape of one shard, in elements.
        states: names of the optimizer states that follow the tensor.
        pattern, where, source: the rule's pattern, its position in the table, and where it was
            established.
    """

    names: str
    n_tensors: int
    shape: Shape
    rule: str
    cut: str
    shard: Shape
    states: tuple[str, ...]
    pattern: str
    where: str
    source: str

    def as_dict(self) -> dict[str, object]:
        """Build the JSON object of the line."""
        return {
            "names": self.names,
            "n_tensors": self.n_tensors,
            "shape": list(self.shape),
            "rule": self.rule,
            "cut": self.cut,
            "shard_shape": list(self.shard),
            "optimizer_states": list(self.states),
            "pattern": self.pattern,
            "where": self.where,
            "source": self.source,
        }


def explain_layout(
    catalog: Catalog, topology: Topology, rules: Rules, *, vocab_size: int | None
) -> list[LayoutLine]:
    """Explain the layout of all tensors of the global per-layer form, in its order.

    Args:
        catalog: the result of ``core.megatron.reshard.unshard.unshard``.
        topology: parallel sizes of the destination.
        rules: the layout rules.
        vocab_size: true rows of the vocabulary; None takes the number that ``unshard`` found.

    Raises:
        UnknownTensorError: no rule matches a tensor.
        UnsupportedError, CorruptError: a tensor cannot be cut, as in
            ``core.megatron.reshard.to_ranks.shard``.
    """
    facts = parse_facts(catalog.args, names=rules.model_of(catalog.tensors))
    cuts = cuts_of(catalog, topology, facts, rules, n_rows=rows_of(catalog, vocab_size))

    # Assign each optimizer state to its parameter: states are cut like it and have no own line.
    states: dict[str, list[str]] = {}
    for key in cuts:
        state = split_state_key(key)
        if state is not None:
            name, parameter = state
            states.setdefault(parameter, []).append(name)

    # Group the parameters that differ only in the numbers within their names.
    groups: dict[tuple[str, Rule, Cut, tuple[str, ...]], list[str]] = {}
    for key, cut in cuts.items():
        if split_state_key(key) is None:
            kind = (_NUMBER.sub("#", key), rules.rule_of(key), cut, tuple(states.get(key, ())))
            groups.setdefault(kind, []).append(key)
    return [
        LayoutLine(
            names=_fold_names(keys),
            n_tensors=len(keys) * (1 + len(state_names)),
            shape=cut.shape,
            rule=rule.kind,
            cut=_describe_cut(cut),
            shard=cut.shard_shape,
            states=state_names,
            pattern=rule.pattern.pattern,
            where=rule.where,
            source=rule.source,
        )
        for (_, rule, cut, state_names), keys in groups.items()
    ]


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
"""The number of a layer or an expert within a name."""


def _fold_names(keys: list[str]) -> str:
    """Fold names that differ only in numbers into one, such as ``layers.[0-3].weight``."""
    columns = [set(map(int, column)) for column in zip(*map(_NUMBER.findall, keys), strict=True)]
    texts = iter(
        [str(*numbers) if len(numbers) == 1 else f"[{ranges(numbers)}]" for numbers in columns]
    )
    return _NUMBER.sub(lambda _: next(texts), keys[0])


def _describe_cut(cut: Cut) -> str:
    """Describe in words how a tensor is cut, such as ``axis 0 over TP 4``."""
    if cut.axis is None:
        return "every rank holds all of it"
    group = cut.group.upper()
    parts = (
        f", in {len(cut.parts)} parts of {' + '.join(map(str, cut.parts))}"
        if len(cut.parts) > 1
        else ""
    )
    return f"axis {cut.axis} over {group} {cut.n}{parts}"
