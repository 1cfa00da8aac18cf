"""Which models and optimizers Megatron-FSDP has, or this project can write for it."""

from __future__ import annotations

from core.catalog.catalog import Catalog
from core.catalog.facets import MegatronModel
from core.catalog.optimizer_keys import MASTER, state_of
from core.errors import UnsupportedError
from core.megatron.model.args import fields_of
from core.megatron.model.facts import ModelFacts
from core.megatron.reshard.fsdp.names import FORMAT
from core.megatron.rules.experts import OPTION as EXPERTS
from core.megatron.rules.rules import GPT
from core.pickle.inert import TensorLeaf

_ADAM = ("exp_avg", "exp_avg_sq")
_DROP_OPTIMIZER = "drop the optimizer with --no-optim"


def check_model(catalog: Catalog, facts: ModelFacts) -> None:
    """Raise unless it is known how Megatron-FSDP stores a model and its optimizer.

    Raises:
        UnsupportedError: it is not.
    """
    model = catalog.facet(MegatronModel) or MegatronModel()
    refused = {
        f"a {facts.kind.kind} model": facts.kind is not GPT,
        "a hybrid model": facts.pattern is not None,
        "a model whose layers differ in kind": facts.blocks is not None
        or bool(facts.linear_layers),
        "a model with multi-token prediction": facts.n_predictions > 0,
        "a model with multi-latent attention": facts.is_mla,
        "a model with towers": model.wrapper is not None,
        "an adapter": any(".adapter." in key for key in catalog.tensors),
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise UnsupportedError(
                f"writing {name} as {FORMAT} is not supported",
                hint="write --to torch_dist or --to megatron",
            )
    if (model.expert_names or facts.expert_names) == "grouped":
        raise UnsupportedError(
            f"Megatron-FSDP's {FORMAT} has no form for GroupedMLP experts",
            hint=f"add {EXPERTS} sequential",
        )

    # The optimizer: Megatron's loader asks for the moments of Adam.
    optimizer = catalog.optimizer
    if optimizer is None:
        return
    states = {state[0] for key in catalog.tensors if (state := state_of(key)) is not None}
    if strange := sorted(states - {MASTER, *_ADAM}):
        raise UnsupportedError(
            f"the optimizer's state {strange[0]!r} cannot be written as {FORMAT}: Megatron-FSDP "
            "trains with Adam only",
            hint=_DROP_OPTIMIZER,
        )
    fields = fields_of(catalog.args)
    if not (fields.get("bf16") or fields.get("fp16")):
        raise UnsupportedError(
            f"an fp32 run cannot go on from {FORMAT}: without --bf16 or --fp16, Megatron-FSDP "
            "saves such checkpoints and does not load them",
            hint=f"{_DROP_OPTIMIZER}, and start with --bf16",
        )
    if isinstance(optimizer.step, TensorLeaf):
        raise UnsupportedError(
            "the number of steps is a tensor, as torch's Adam counts them; writing it as "
            f"{FORMAT} is not supported",
            hint=_DROP_OPTIMIZER,
        )
