"""Trains a tiny model with tensor and pipeline parallelism on the CPU, saves, and goes on in
another layout.

    $ cd docs/examples
    $ torchrun --standalone --nproc-per-node 4 train_tp_pp.py --tp 2 --pp 2 \\
          --checkpoints /tmp/run --steps 40
    ^C, kill -9, a power cut: at any time
    $ torchrun --standalone --nproc-per-node 4 train_tp_pp.py --tp 1 --pp 4 \\
          --checkpoints /tmp/run --steps 40

The second command finds the newest complete checkpoint and goes on with it, as if nothing had
happened: its losses are those of a run that was not interrupted, which ``kill_and_resume.py`` in
this folder shows. With ``--async-save`` the files are written while training goes on.

What is in a checkpoint:

* weights and the optimizer's moments as ShardedTensors, which know their place in the global
  tensors: any layout can load them;
* the random state of each layer's dropout as a ShardedObject, one of a grid of as many as there are
  layers;
* the numbers of steps, the learning rate's schedule and the position in the data as common state,
  which all ranks have alike.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel_model import Place, Sizes, Stage, Weight, train_step

from core.dist_checkpointing import ShardedObject, check_is_distributed_checkpoint, load, save
from core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

MOMENTS = ("exp_avg", "exp_avg_sq")


class Adam:
    """The optimizer; its state is two moments for each weight, and the number of steps."""

    def __init__(self, weights: dict[str, Weight]) -> None:
        self.weights = weights
        self.step_count = 0
        self.state = {
            name: {moment: torch.zeros_like(weight.parameter) for moment in MOMENTS}
            for name, weight in weights.items()
        }

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Changes the weights, and forgets their gradients."""
        self.step_count += 1
        for name, weight in self.weights.items():
            gradient, moments = weight.parameter.grad, self.state[name]
            moments["exp_avg"].lerp_(gradient, 0.1)
            moments["exp_avg_sq"].lerp_(gradient**2, 0.05)
            mean = moments["exp_avg"] / (1 - 0.9**self.step_count)
            spread = moments["exp_avg_sq"] / (1 - 0.95**self.step_count)
            weight.parameter.sub_(lr * mean / (spread.sqrt() + 1e-8))
            weight.parameter.grad = None


class Schedule:
    """The learning rate: a linear warm-up, then a cosine."""

    def __init__(self, lr: float, n_warmup: int, n_steps: int) -> None:
        self.state = {"lr": lr, "n_warmup": n_warmup, "n_steps": n_steps, "n_done": 0}

    def next(self) -> float:
        """The rate of the next step."""
        state = self.state
        state["n_done"] += 1
        if state["n_done"] <= state["n_warmup"]:
            return state["lr"] * state["n_done"] / state["n_warmup"]
        done = (state["n_done"] - state["n_warmup"]) / max(1, state["n_steps"] - state["n_warmup"])
        return state["lr"] * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


class Samples:
    """The data: random tokens, and a rule to be learned; every epoch has an order of its own."""

    def __init__(self, vocab: int, n: int = 96) -> None:
        self.tokens = torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(1))
        self.targets = (self.tokens * 3 + 1) % vocab
        self.generator = torch.Generator().manual_seed(2)
        self._begin_epoch(0)

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch, self.position = epoch, 0
        self.order = torch.randperm(len(self.tokens), generator=self.generator)

    def next(self, n_batches: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Micro-batches of tokens and targets."""
        if self.position + n_batches * size > len(self.order):
            self._begin_epoch(self.epoch + 1)
        taken = self.order[self.position : self.position + n_batches * size].chunk(n_batches)
        self.position += n_batches * size
        return [(self.tokens[rows], self.targets[rows]) for rows in taken]

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "order": self.order,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where another one was."""
        self.epoch, self.position, self.order = state["epoch"], state["position"], state["order"]
        self.generator.set_state(state["generator"])


class Training:
    """All that changes while it trains, on one rank."""

    def __init__(self, place: Place, n_steps: int) -> None:
        sizes = Sizes()
        self.place = place
        self.stage = Stage(sizes, place)
        self.optimizer = Adam(self.stage.weights)
        self.schedule = Schedule(lr=3e-2, n_warmup=5, n_steps=n_steps)
        self.samples = Samples(sizes.vocab)
        self.step = 0

    def advance(self) -> float:
        """One step; returns its loss."""
        loss = train_step(self.stage, self.samples.next(n_batches=3, size=8))
        self.optimizer.step(self.schedule.next())
        self.step += 1
        return loss

    def sharded_state_dict(self) -> dict[str, Any]:
        """What this rank holds; also what it asks for when it loads."""
        model = {name: weight.sharded(self.place) for name, weight in self.stage.weights.items()}
        moments = {
            name: {
                moment: make_sharded_optimizer_tensor(
                    model[name], tensor, f"optimizer.state.{moment}"
                )
                for moment, tensor in state.items()
            }
            for name, state in self.optimizer.state.items()
        }
        n_layers = self.stage.sizes.layers
        random_states = {
            layer: ShardedObject(
                "dropout.rng_state",
                generator.get_state(),
                (n_layers,),
                (layer,),
                self.place.tp_rank,
            )
            for layer, generator in self.stage.generators.items()
        }
        return {
            "step": self.step,
            "model": model,
            "optimizer": {"state": moments, "step_count": self.optimizer.step_count},
            "schedule": dict(self.schedule.state),
            "samples": self.samples.state_dict(),
            "random_states": random_states,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what ``load`` returned."""
        self.step = state["step"]
        self.schedule.state = state["schedule"]
        self.samples.load_state_dict(state["samples"])
        self.optimizer.step_count = state["optimizer"]["step_count"]
        for name, weight in self.stage.weights.items():
            weight.parameter.copy_(state["model"][name])
            for moment, tensor in self.optimizer.state[name].items():
                tensor.copy_(state["optimizer"]["state"][name][moment])
        for layer, generator in self.stage.generators.items():
            generator.set_state(state["random_states"][layer])


def newest(checkpoints_dir: Path) -> Path | None:
    """The newest complete checkpoint. A save that was cut short has no ``metadata.json``."""
    complete = [
        path for path in checkpoints_dir.glob("step_*") if check_is_distributed_checkpoint(path)
    ]
    return max(complete, default=None)


def main() -> None:
    """One rank's run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks")
    parser.add_argument("--pp", type=int, default=2, help="pipeline stages")
    parser.add_argument("--steps", type=int, default=40, help="steps of the whole training")
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument(
        "--checkpoints", type=Path, required=True, help="directory of the checkpoints"
    )
    parser.add_argument("--losses", type=Path, help="file that gets a line of JSON for each step")
    parser.add_argument(
        "--format", choices=("torch_dist", "zarr"), default="torch_dist", help="of the checkpoints"
    )
    parser.add_argument("--async-save", action="store_true", help="write while training goes on")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait after each step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_world_size() != options.tp * options.pp:
        parser.error(
            f"{options.tp} x {options.pp} ranks are needed, there are {dist.get_world_size()}"
        )
    print(f"rank {dist.get_rank()} is process {os.getpid()}", flush=True)
    training = Training(Place.of_this_rank(options.tp, options.pp), options.steps)
    queue = AsyncCallsQueue()
    found = [newest(options.checkpoints)]
    dist.broadcast_object_list(found)  # all ranks go on from what rank 0 sees
    if found[0] is not None:
        training.load_state_dict(load(training.sharded_state_dict(), found[0], strict="raise_all"))
        report(f"goes on from {found[0].name}")
    while training.step < options.steps:
        loss = training.advance()
        report(f"step {training.step:3d}  loss {loss:.6f}")
        if options.losses and dist.get_rank() == 0:
            with options.losses.open("a") as file:
                file.write(json.dumps({"step": training.step, "loss": loss}) + "\n")
        queue.maybe_finalize_async_calls()
        if training.step % options.save_every == 0:
            save_checkpoint(training, options, queue)
        time.sleep(options.pause)
    queue.close()
    dist.destroy_process_group()


def save_checkpoint(
    training: Training, options: argparse.Namespace, queue: AsyncCallsQueue
) -> None:
    """Saves at once, or hands the work to the queue."""
    checkpoint_dir = options.checkpoints / f"step_{training.step:06d}"
    if dist.get_rank() == 0:
        checkpoint_dir.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    request = save(
        training.sharded_state_dict(),
        checkpoint_dir,
        (options.format, 1),
        async_sharded_save=options.async_save,
    )
    if request is not None:
        queue.schedule_async_request(request)


def report(text: str) -> None:
    """Prints on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
