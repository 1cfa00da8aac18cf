"""The names of parameters in Megatron-FSDP's state dicts, and which are stored in halves."""

from __future__ import annotations

from core.catalog.catalog import Catalog
from core.catalog.facets import MegatronModel
from core.megatron.model.args import fields_of
from core.megatron.model.facts import ModelFacts
from core.megatron.rules.rules import Rules

FORMAT = "fsdp_dtensor"


class FsdpNames:
    """A finder of the parameters' names in Megatron-FSDP's state dicts."""

    def __init__(self, catalog: Catalog, facts: ModelFacts, rules: Rules) -> None:
        model = catalog.facet(MegatronModel) or MegatronModel()
        fields = fields_of(catalog.args)
        self._rules = rules
        self._expert_names = model.expert_names or facts.expert_names or "sequential"
        # Only --swiglu divides gated layers; a configuration without that argument means it, too.
        self._splits = facts.is_gated and fields.get("swiglu", True) is not False

    def halves(self, name: str) -> tuple[str, ...]:
        """Return the suffixes of the halves in which a parameter is stored; ("",) for a whole."""
        is_split = self._splits and self._rules.rule_of(name).parts == "gated"
        return ("_w", "_v") if is_split else ("",)

    def in_model(self, name: str) -> str:
        """Return the name of a parameter below ``model``."""
        expert = self._rules.expert_of(name)
        if expert is not None and expert.number is not None:
            name = self._rules.expert_name(expert, names=self._expert_names, number=expert.number)
        return f"module.{name}"

    def in_optimizer(self, name: str) -> str:
        """Return the name of a parameter below ``optimizer.state``."""
        return f"module.module.{self.in_model(name)}"
