"""Explain which rule each tensor of a conversion follows, and how the rule cuts it.

Tensors that differ only in the numbers of layers and experts, and follow one rule with one result,
share a line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from core.arrays.box import Shape
from core.catalog.catalog import Catalog
from core.catalog.key_patterns import ranges
from core.catalog.optimizer_keys import state_of
from core.megatron.model.args import facts_of
from core.megatron.model.cut import Cut, cuts_of
from core.megatron.model.topology import Topology
from core.megatron.model.vocabulary import rows_of
from core.megatron.reshard.reshard import Rules
from core.megatron.rules.rules import Rule


@dataclass(frozen=True, slots=True)
class LayoutLine:
    """A line of the explanation: tensors that follow one rule with one result.

    Args:
        names: the global name, with ``[0-3]`` for the numbers of layers and experts.
        n_tensors: how many tensors the line stands for.
        shape: global shape in the destination, in elements.
        rule: the rule's kind: ``replicate``, ``split``, ``vocab`` or ``opaque``.
        cut: how the rule cuts the tensor, in words.
        shard: shape of one shard, in elements.
        states: names of the optimizer states that follow the tensor.
        pattern, where, source: the rule's pattern, its row, and where it was established.
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
        """Return the line as a JSON object."""
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
    """Return the lines of all tensors of the global per-layer form, in its order.

    Args:
        catalog: the result of ``core.megatron.reshard.reshard.unshard``.
        topology: parallel sizes of the destination.
        vocab_size: true rows of the vocabulary; None takes the number that ``unshard`` found.

    Raises:
        UnknownTensorError, UnsupportedError, CorruptError: as
        ``core.megatron.reshard.reshard.shard`` does.
    """
    facts = facts_of(catalog.args, names=rules.model_of(catalog.tensors))
    cuts = cuts_of(catalog, topology, facts, rules, n_rows=rows_of(catalog, vocab_size))
    states: dict[str, list[str]] = {}
    for key in cuts:
        state = state_of(key)
        if state is not None:
            name, parameter = state
            states.setdefault(parameter, []).append(name)
    groups: dict[tuple[object, ...], list[str]] = {}
    for key, cut in cuts.items():
        if state_of(key) is None:
            template = _NUMBER.sub("#", key)
            groups.setdefault(
                (template, rules.rule_of(key), cut, tuple(states.get(key, ()))), []
            ).append(key)
    return [
        _line(keys, rules.rule_of(keys[0]), cuts[keys[0]], states.get(keys[0], []))
        for keys in groups.values()
    ]


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def _line(keys: list[str], rule: Rule, cut: Cut, states: list[str]) -> LayoutLine:
    return LayoutLine(
        names=_folded_name(keys),
        n_tensors=len(keys) * (1 + len(states)),
        shape=cut.shape,
        rule=rule.kind,
        cut=_cut_text(cut),
        shard=cut.shard_shape,
        states=tuple(states),
        pattern=rule.pattern.pattern,
        where=rule.where,
        source=rule.source,
    )


def _folded_name(keys: list[str]) -> str:
    """Return one name for all keys, which differ only in numbers."""
    columns = [set(map(int, column)) for column in zip(*map(_NUMBER.findall, keys), strict=True)]
    texts = iter(
        [str(*numbers) if len(numbers) == 1 else f"[{ranges(numbers)}]" for numbers in columns]
    )
    return _NUMBER.sub(lambda _: next(texts), keys[0])


def _cut_text(cut: Cut) -> str:
    """Return how a rule cuts a tensor, in words."""
    if cut.axis is None:
        return "every rank holds all of it"
    group = cut.group.upper()
    parts = (
        f", in {len(cut.parts)} parts of {' + '.join(map(str, cut.parts))}"
        if len(cut.parts) > 1
        else ""
    )
    return f"axis {cut.axis} over {group} {cut.n}{parts}"
