"""Which parameters are in which group of the optimizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from core.engine.catalog.optimizer_keys import Optimizer, ParamGroup
from core.errors import CorruptError, UnsupportedError
from core.megatron.model.args import parse_facts
from core.megatron.model.topology import Topology
from core.megatron.optimizer.groups import (
    Policy,
    Slots,
    Trained,
    assign,
    by_policy,
    identity,
    policies_of,
)
from core.megatron.optimizer.merged_groups import MergedGroups
from core.megatron.optimizer.numbered.write import NumberedFiles
from core.megatron.optimizer.target_groups import TargetGroups, target_groups
from core.pickle.inert import make_namespace
from tests.megatron.support import groups_oracle
from tests.megatron.support.reshard_targets import target_of
from tests.megatron.support.synthetic import Model
from tests.support import forked

PARAMS = [
    Trained("embedding.word_embeddings.weight", (40, 8), "bfloat16", False),
    Trained("decoder.layers.0.self_attention.linear_qkv.weight", (24, 8), "bfloat16", False),
    Trained("decoder.layers.0.self_attention.linear_qkv.bias", (24,), "bfloat16", False),
    Trained("decoder.layers.0.self_attention.q_layernorm.weight", (2,), "bfloat16", False),
    Trained(
        "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight", (16, 8), "bfloat16", True
    ),
    Trained("decoder.final_layernorm.weight", (8,), "float32", False),
    Trained("output_layer.weight", (40, 8), "bfloat16", False),
]
WD = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
NO_WD = {**WD, "wd_mult": 0.0}
FAST = {**WD, "default_config": False, "max_lr": 1.0}
EXPERTS = {**WD, "is_expert_parallel": True}


def slots(
    settings: Mapping[str, object], members: Sequence[int], params: Sequence[Trained] = PARAMS
) -> Slots:
    masters = [params[i].shape for i in members if params[i].dtype == "bfloat16"]
    return Slots(settings, [params[i].shape for i in members], masters)


@pytest.mark.parametrize(
    ("args", "groups"),
    [
        ({}, [(WD, (0, 1, 4, 6)), (NO_WD, (2, 3, 5))]),
        ({}, [(NO_WD, (2, 3, 5)), (WD, (0, 1, 6)), (EXPERTS, (4,))]),
        ({"apply_wd_to_qk_layernorm": True}, [(WD, (0, 1, 3, 4, 6)), (NO_WD, (2, 5))]),
        ({"embedding_init_method_std": 0.1}, [(WD, (1, 4, 6)), (NO_WD, (0, 2, 3, 5))]),
        (
            {"decoupled_lr": 1.0},
            [(WD, (1, 4)), (NO_WD, (2, 3, 5)), ({**WD, "is_decoupled_lr": True}, (0, 6))],
        ),
        (
            {"decoupled_lr": 1.0},
            [(WD, (1, 4)), (FAST, (0, 6)), (NO_WD, (2, 3, 5))],
        ),
        (
            {"use_mup": True},
            [(WD, (0,)), (FAST, (1, 4, 6)), (NO_WD, (2, 3, 5))],
        ),
        ({}, [(WD, (0, 1, 2, 3, 4, 5, 6))]),
        ({}, [(WD, (0, 1, 4, 6)), (NO_WD, (2, 3, 5)), (EXPERTS, ())]),
    ],
    ids=[
        "plain",
        "experts",
        "qk norms",
        "embeddings",
        "decoupled",
        "decoupled at HEAD",
        "mup",
        "no groups",
        "empty",
    ],
)
def test_settings_and_arguments_tell_what_a_group_has(
    args: dict[str, object], groups: list[tuple[dict[str, object], tuple[int, ...]]]
) -> None:
    params = (
        PARAMS
        if any(group[0] is EXPERTS and group[1] for group in groups)
        else [replace(param, is_expert=False) for param in PARAMS]
    )
    wanted = tuple(members for _, members in groups)
    assignment = assign(
        params, [slots(*group) for group in groups], tuple(policies_of(args)), agrees=None
    )
    assert assignment == wanted


@pytest.fixture(scope="module")
def megatron() -> dict[str, list[tuple[dict[str, object], list[str]]]]:
    """What megatron-core makes of ``PARAMS``, for each case of ``groups_oracle``."""
    params = json.dumps([(param.name, param.shape, param.is_expert) for param in PARAMS])
    script = Path(groups_oracle.__file__)
    process = forked.run([script], input=params, check=True)
    answers = json.loads(process.stdout.splitlines()[-1])
    assert isinstance(answers, dict)
    return answers


@pytest.mark.parametrize("case", groups_oracle.CASES)
def test_groups_are_those_that_megatron_makes(
    megatron: dict[str, list[tuple[dict[str, object], list[str]]]], case: str
) -> None:
    place = {param.name: i for i, param in enumerate(PARAMS)}
    wanted = tuple(tuple(place[name] for name in names) for _, names in megatron[case])
    groups = [
        slots(settings, members)
        for (settings, _), members in zip(megatron[case], wanted, strict=True)
    ]
    assert len({identity(settings) for settings, _ in megatron[case]}) == len(groups)
    policies = [next(policies_of(groups_oracle.CASES[case]))]
    assert assign(PARAMS, groups, policies, agrees=None) == wanted
    shuffled = [groups[-1], *groups[:-1]]
    assert assign(PARAMS, shuffled, policies, agrees=None) == (wanted[-1], *wanted[:-1])
    n_axes = {name: 2 - (len(PARAMS[i].shape) == 1) for name, i in place.items()}
    optimizer = Optimizer("float16", tuple(ParamGroup(settings) for settings, _ in megatron[case]))
    args = {**MOE.args(Topology(ep=2)), **groups_oracle.CASES[case]}
    target = target_of(
        optimizer, make_namespace(args), topology=Topology(ep=4), facts=parse_facts(args)
    )
    assigned = target_groups(target, n_axes)
    for settings, names in megatron[case]:
        assert all(assigned.settings[assigned.group_of[name]] == settings for name in names)
    order = [
        settings
        for settings, _ in sorted(
            megatron[case], key=lambda group: bool(group[0]["is_expert_parallel"])
        )
    ]
    assert (list(assigned.settings), assigned.is_sorted) == (order, True)


def test_the_policy_of_the_arguments_is_the_first() -> None:
    assert next(policies_of({})) == Policy("vectors", "ends", "all")
    assert next(policies_of({"apply_wd_to_qk_layernorm": True})) == Policy(
        "qk_norms", "ends", "all"
    )
    assert next(policies_of({"use_mup": True})) == Policy("vectors", "matrices", "all")
    assert len(set(policies_of({}))) == 12


ADAM = {"betas": (0.9, 0.95)}
MUON = {"momentum_beta": 0.95}


def test_muon_has_the_matrices_other_than_embedding_and_output() -> None:
    groups = [
        slots({**WD, **MUON}, (1,)),
        slots({**EXPERTS, **MUON}, (4,)),
        slots({**WD, **ADAM}, (0, 6)),
        slots({**NO_WD, **ADAM}, (2, 3, 5)),
    ]
    assert by_policy(PARAMS, groups, Policy()) == ((1,), (4,), (0, 6), (2, 3, 5))


def test_muon_precedes_adam_and_its_experts_have_an_optimizer_with_expert_parallelism_only() -> (
    None
):
    router, embedding = (
        ParamGroup({**WD, **MUON}, ("router", EXPERT)),
        ParamGroup({**WD, **ADAM}, ("e",)),
    )
    groups = at(Topology(), Topology(ep=2), embedding, router)
    assert groups.group_of == {"router": 0, EXPERT: 1, "e": 2}
    assert groups.by_member([2, 1, 0]) == [[0], [1], [2]]
    groups = at(Topology(), Topology(), embedding, router)
    assert groups.by_member(range(2)) == [[0], [1]]


def test_rank_files_of_a_muon_distributed_by_layers_are_refused() -> None:
    args = {**MOE.args(Topology()), "optimizer": "dist_muon"}
    muon = Optimizer("float16", (ParamGroup({**WD, **MUON}, ("a",)),))
    with pytest.raises(UnsupportedError, match=r"cannot write .*layer_wise_optimizer_N.pt"):
        NumberedFiles(target_of(muon, args, topology=Topology()))


def test_adapters_alone_may_be_trained() -> None:
    params = [
        *PARAMS,
        Trained(
            "decoder.layers.0.mlp.linear_fc1.adapter.linear_in.weight", (2, 8), "bfloat16", False
        ),
    ]
    assert assign(params, [slots(WD, (7,), params)], tuple(policies_of({})), agrees=None) == ((7,),)


def test_groups_that_look_alike_are_told_by_their_masters() -> None:
    params = [
        Trained(f"decoder.layers.{i}.mlp.linear_fc2.weight", (8, 8), "bfloat16", False)
        for i in range(4)
    ]
    groups = [slots({**WD, "lr_mult": 0.5}, (1, 2), params), slots(WD, (0,), params)]
    true = {(1, 0, 0), (2, 0, 1), (0, 1, 0)}
    assignment = assign(params, groups, tuple(policies_of({})), agrees=lambda *pair: pair in true)
    assert assignment == ((1, 2), (0,))
    with pytest.raises(UnsupportedError, match="in several ways"):
        assign(params, groups, tuple(policies_of({})), agrees=None)
    with pytest.raises(UnsupportedError, match="do not fit"):
        assign(params, groups, tuple(policies_of({})), agrees=lambda *pair: False)


def test_a_policy_cannot_tell_groups_of_the_same_traits() -> None:
    assert by_policy(PARAMS, [slots(WD, ()), slots({**WD, "lr_mult": 2.0}, ())], Policy()) is None


def test_an_identity_has_what_tells_groups_apart() -> None:
    assert identity(WD) == identity({**WD, "lr": 3.0, "step": 4})
    assert identity(WD) != identity(NO_WD)
    assert identity(EXPERTS, is_expert=False) == identity(WD)
    assert identity({"pre_wd_mult": 0.0}) == identity({"wd_mult": 0.0, "weight_decay": 0.1})
    assert identity({"weight_decay": 0.1}) != identity({"weight_decay": 0.0})


def merged(*ranks: Sequence[tuple[dict[str, object], Sequence[str]]]) -> MergedGroups:
    merged_groups = MergedGroups(lambda new, old: None)
    for number, groups in enumerate(ranks):
        merged_groups.add(f"mp_rank_{number:02d}", groups)
    return merged_groups


def test_ranks_may_list_groups_in_any_order_and_leave_empty_ones_out() -> None:
    groups = merged([(WD, "a")], [(EXPERTS, "c"), (NO_WD, "b"), (WD, "d")])
    assert [group.params for group in groups.groups()] == [("a", "d"), ("b",), ("c",)]
    assert groups.omits_empty is True
    assert merged([(WD, "a"), (NO_WD, "")], [(WD, "a"), (NO_WD, "b")]).omits_empty is False
    assert merged([(WD, "a"), (NO_WD, "b")]).omits_empty is None


def test_an_empty_group_may_miss_the_steps() -> None:
    groups = merged([(WD, "")], [({**WD, "step": 3}, "a")], [(WD, "")])
    assert groups.groups()[0].settings["step"] == 3
    with pytest.raises(
        CorruptError,
        match="step of the optimizer's param group 0 is 4, but 3 in mp_rank_00",
    ):
        merged([({**WD, "step": 3}, "a")], [({**WD, "step": 4}, "b")])


def test_a_parameter_is_in_one_group() -> None:
    with pytest.raises(
        CorruptError, match=r"wd_mult of its param group is 0.0, but 1.0 in mp_rank_00"
    ) as caught:
        merged([(WD, "a")], [(NO_WD, "a")])
    assert caught.value.key == "a"
    with pytest.raises(UnsupportedError, match="cannot be distinguished"):
        merged([(WD, "a"), ({**WD, "lr": 1.0}, "b")])


EXPERT = "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight"
MOE = Model(experts=4, moe=(0,))


def at(source: Topology, target: Topology, *groups: ParamGroup) -> TargetGroups:
    facts = parse_facts({**MOE.args(source), "expert_tensor_parallel_size": source.expert_tp})
    names = {name: 2 for group in groups for name in group.params or ()}
    destination = target_of(
        Optimizer("float16", groups), MOE.args(source), topology=target, facts=facts
    )
    return target_groups(destination, names)


def test_experts_have_groups_of_their_own_with_expert_parallelism_only() -> None:
    groups = at(Topology(), Topology(ep=2), ParamGroup(WD, ("router", EXPERT)))
    assert [settings["is_expert_parallel"] for settings in groups.settings] == [False, True]
    assert groups.group_of == {"router": 0, EXPERT: 1}
    groups = at(
        Topology(ep=2), Topology(), ParamGroup(WD, ("router",)), ParamGroup(EXPERTS, (EXPERT,))
    )
    assert [settings["is_expert_parallel"] for settings in groups.settings] == [False]
    old = {"wd_mult": 1.0, "lr_mult": 1.0}
    assert len(at(Topology(), Topology(ep=2), ParamGroup(old, ("router", EXPERT))).settings) == 1


def test_without_expert_parallelism_another_tp_of_experts_is_treated_as_the_source_does() -> None:
    a, b = Topology(tp=2, etp=1), Topology(tp=4, etp=2)
    groups = at(a, b, ParamGroup(WD, ("router",)), ParamGroup(EXPERTS, (EXPERT,)))
    assert groups.group_of == {"router": 0, EXPERT: 1}
    assert (
        len(
            at(
                a, Topology(tp=4), ParamGroup(WD, ("router",)), ParamGroup(EXPERTS, (EXPERT,))
            ).settings
        )
        == 1
    )
    assert len(at(a, b, ParamGroup(WD, ("router", EXPERT))).settings) == 1


def test_a_parameter_without_a_group_is_named() -> None:
    target = target_of(
        Optimizer("float16", (ParamGroup(WD, ("a",)),)), MOE.args(Topology()), topology=Topology()
    )
    with pytest.raises(CorruptError, match="no param group contains it"):
        target_groups(target, {"a": 2, "b": 2})


def test_groups_without_names_go_by_the_arguments_or_are_refused() -> None:
    args = MOE.args(Topology())
    params = {"embedding.word_embeddings.weight": 2, "decoder.final_layernorm.weight": 1}
    by_decay = Optimizer("float16", (ParamGroup(NO_WD), ParamGroup(WD)))
    groups = target_groups(target_of(by_decay, args, topology=Topology()), params)
    assert [groups.settings[groups.group_of[name]]["wd_mult"] for name in params] == [1.0, 0.0]
    unknown = Optimizer("float16", (ParamGroup(WD), ParamGroup({**WD, "lr_mult": 2.0})))
    with pytest.raises(UnsupportedError, match="cannot derive this from the groups.? settings"):
        target_groups(target_of(unknown, args, topology=Topology()), params)
