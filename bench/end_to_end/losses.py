#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains one model with the experts of several libraries from the same seeds and compares the losses.

    torchrun --nproc-per-node 2 losses.py --config 7B-n256 --layers 12 --sequences 8 --steps 500 --seeds 0,1,2 \
        --experts tessera,torch-grouped-mm,hf-grouped-mm --text SRC --state losses.json

A run that is over is in the state file, with its loss at every step and on held-out text; the same command goes on with
those that are missing, and --seconds ends it between runs. torch-grouped-mm beside hf-grouped-mm, and NAME#2, a copy of
NAME, say how far two roundings of one model come apart.

Runs of one seed part in the first hundred steps, in which the loss falls fast: which of them is a few steps ahead is
chance, as copies of one program show. With --shared-steps the first of --experts trains these steps for all.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import time

import experts
import loss_gaps
import pictures
import torch
import torch.distributed as dist
import training


def add_flags(parser: argparse.ArgumentParser, steps: int, sequences: int, learning_rate: float) -> None:
    """Those of training runs over seeds, with their defaults."""
    training.add_flags(parser)
    parser.add_argument("--seeds", default="0", help="N,N,..")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--sequences", type=int, default=sequences, help="of each rank and step")
    parser.add_argument("--learning-rate", type=float, default=learning_rate)
    parser.add_argument("--warm-up", type=int, default=50, help="steps")
    parser.add_argument("--held-out-every", type=int, default=100, help="steps")
    parser.add_argument("--held-out-batches", type=int, default=4, help="of --sequences each and of every rank")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no run starts that may end later")
    parser.add_argument("--state", type=pathlib.Path, required=True, help="JSON file")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_flags(parser, steps=500, sequences=8, learning_rate=3e-4)
    parser.add_argument("--experts", default="tessera,torch-grouped-mm", help="of " + ", ".join(experts.NAMES))
    parser.add_argument("--shared-steps", type=int, default=0, help="of --steps, which the first of --experts trains "
                        "for all; the runs of a seed then begin and end in one command (0)")
    return parser.parse_args()


def train(a, trainer: training.Trainer, data, implementation, seed: int, evaluated=None, at_step=None, first: int = 1,
          last: int | None = None) -> dict:
    """Losses of steps `first` to `last` (all of --steps) and of held-out text. evaluated: experts for the latter, if
    others than those that train; at_step: called with the number of each step before it. Step 1 begins with the seed's
    weights, a later one with those that the trainer has."""
    here, losses, held_out = trainer.here, [], {}
    trainer.model.use(implementation)
    if first == 1:
        trainer.reset(seed)
    for step in range(first, (last or a.steps) + 1):
        if at_step is not None:
            at_step(step)
        batch = data.batch(seed, step, a.sequences, trainer.c.context, here.rank, here.count, here.device)
        rate = training.learning_rate(step, a.steps, a.learning_rate, a.warm_up)
        losses.append(trainer.step(*batch, rate)[0].float())
        if step % a.held_out_every == 0 or step == a.steps:
            trainer.model.use(evaluated or implementation)
            held_out[str(step)] = trainer.held_out_loss(data, a.sequences, a.held_out_batches)
            trainer.model.use(implementation)
            here.say(f"seed {seed}, step {step}/{a.steps}: held out {held_out[str(step)]:.4f}")
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    return {"losses": [round(loss, 6) for loss in (mean / here.count).tolist()], "held_out": held_out}


class Branches:
    """Runs that have their first --shared-steps in common: the weights and moments after these, of one seed."""

    def __init__(self, a, trainer: training.Trainer, data, first):
        self.a, self.trainer, self.data, self.first = a, trainer, data, first
        self.seed = self.begun = self.state = None

    def train(self, implementation, seed: int) -> dict:
        a = self.a
        if a.shared_steps == 0:
            return train(a, self.trainer, self.data, implementation, seed)
        if self.seed != seed:
            self.state = None  # before there is another
            self.begun = train(a, self.trainer, self.data, self.first, seed, last=a.shared_steps)
            self.seed, self.state = seed, self.trainer.state()
        self.trainer.restore(self.state)
        done = train(a, self.trainer, self.data, implementation, seed, first=a.shared_steps + 1)
        return {"losses": self.begun["losses"] + done["losses"], "held_out": self.begun["held_out"] | done["held_out"]}


def opened(a, here, pinned: dict) -> dict:
    """What --state holds, or a new one; a Stop where it is of another command."""
    state = json.loads(a.state.read_text(encoding="utf-8")) if a.state.exists() else {
        "pinned": pinned, "ranks": here.count, "device": training.device_name(here), "runs": {}}
    if (state["pinned"], state["ranks"]) != (pinned, here.count):
        raise training.Stop(f"--state {a.state}: is of other sizes, steps or ranks; name another file")
    dist.barrier()  # all have read it
    return state


def complete(a, here, state: dict, names: list[str], seeds: list[str], one, together: bool = False) -> bool:
    """Adds one(name, seed) for all that state lacks, seed by seed, and keeps it in --state; False where --seconds
    ended it before. together: a seed that lacks a run has none, as its runs are of one command."""
    start, longest = time.monotonic(), 0.0
    for seed in seeds:
        if together and any(f"{name} {seed}" not in state["runs"] for name in names):
            for name in names:
                state["runs"].pop(f"{name} {seed}", None)
        for name in names:
            if f"{name} {seed}" in state["runs"]:
                continue
            began = time.monotonic()
            if here.worst(began - start + 1.1 * longest)[0] > a.seconds:
                here.say(f"ends here, as --seconds {a.seconds:.0f} would be over; the same command goes on")
                return False
            state["runs"][f"{name} {seed}"] = done = one(name, int(seed))
            longest = max(longest, time.monotonic() - began)
            here.say(f"{name} seed {seed}: loss {done['losses'][-1]:.4f}, held out "
                     f"{done['held_out'][str(a.steps)]:.4f}, {time.monotonic() - began:.0f} s")
            if here.rank == 0:
                partial = a.state.with_suffix(".partial")
                partial.write_text(json.dumps(state) + "\n", encoding="utf-8")
                os.replace(partial, a.state)
    return True


def numbers(text: str) -> list[str]:
    """Seeds as they are given."""
    if not all(seed.isdecimal() for seed in text.split(",")):
        raise training.Stop(f"--seeds {text}: must be numbers with commas between them")
    return text.split(",")


def sizes(a, c) -> dict:
    """What makes two runs comparable."""
    return {"config": a.config, "sizes": dataclasses.asdict(c), "steps": a.steps, "sequences": a.sequences,
            "learning_rate": a.learning_rate, "warm_up": a.warm_up, "text_bytes": a.text_bytes}


def run(a) -> None:
    c, names, seeds = training.configuration(a), a.experts.split(","), numbers(a.seeds)
    if not 0 <= a.shared_steps < a.steps:
        raise training.Stop(f"--shared-steps {a.shared_steps}: must be less than --steps {a.steps}, and not negative")
    with training.ranks() as here:
        shared = {"shared_steps": a.shared_steps} if a.shared_steps else {}
        state = opened(a, here, sizes(a, c) | shared)
        data, first = training.corpus(a, c, here), training.load(names[0].split("#")[0])
        branches = Branches(a, training.Trainer(c, here, first, a), data, first)
        if not complete(a, here, state, names, seeds, lambda name, seed: branches.train(
                training.load(name.split("#")[0]), seed), together=a.shared_steps > 0):
            return
        for line in loss_gaps.lines(loss_gaps.gaps(state["runs"], names, seeds, names[0]), names[0]):
            here.say(line)
        if here.rank == 0:
            curves = {name: state["runs"][f"{name} {seeds[0]}"]["losses"] for name in names}
            apart = {name: [(i, x - y) for i, (x, y) in enumerate(zip(curve, curves[names[0]], strict=True), 1)]
                     for name, curve in curves.items()}
            note = pictures.curves(a.state.with_suffix(".svg"), apart, f"Loss minus {names[0]}'s, seed {seeds[0]}",
                                   "step", "nats per token")
            if note:
                here.say(note)


if __name__ == "__main__":
    training.end(lambda: run(arguments()))
