"""Run with megatron-core: the coordinates of all ranks of a training run, by its ``RankGenerator``.

stdin: a JSON list of ``{world, tp, pp, ep, etp, cp, order}``. stdout: for each a list of ``[tp, pp,
ep, dp, edp]``, one a rank, or null where the pipeline groups of dense and expert ranks differ,
which Megatron refuses.
"""

from __future__ import annotations

import json
import sys
import warnings

warnings.filterwarnings("ignore")

from megatron.core.parallel_state import RankGenerator  # noqa: E402


def places(generator: RankGenerator, token: str, world: int) -> list[int]:
    group_ranks = [0] * world
    for group in generator.get_ranks(token):
        for place, rank in enumerate(group):
            group_ranks[rank] = place
    return group_ranks


def main() -> None:
    answers: list[list[list[int]] | None] = []
    for run in json.load(sys.stdin):
        world, tp, pp, ep, etp, cp = (
            run[name] for name in ("world", "tp", "pp", "ep", "etp", "cp")
        )
        dp, edp = world // (tp * pp * cp), world // (etp * ep * pp)
        dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=run["order"])
        expert = RankGenerator(tp=etp, ep=ep, dp=edp, pp=pp, cp=1, order=run["order"])
        if dense.get_ranks("pp") != expert.get_ranks("pp"):
            answers.append(None)
            continue
        columns = [
            *(places(dense, token, world) for token in ("tp", "pp")),
            places(expert, "ep", world),
            places(dense, "dp", world),
            places(expert, "dp", world),
        ]
        answers.append([list(rank) for rank in zip(*columns, strict=True)])
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
