#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains one model with the experts of several libraries from the same seeds and compares the losses.

    torchrun --nproc-per-node 2 losses.py --config 7B-n256 --layers 12 --sequences 8 --steps 500 --seeds 0,1,2 \
        --experts tessera,torch-grouped-mm,hf-grouped-mm --text SRC --state losses.json

A run that is over is in the state file, with its loss at every step and on held-out text; the same command goes on with
those that are missing, and --seconds ends it between runs. torch-grouped-mm beside hf-grouped-mm, and NAME#2, a copy of
NAME, say how far two roundings of one model come apart.
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


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    training.add_flags(parser)
    parser.add_argument("--experts", default="tessera,torch-grouped-mm", help="of " + ", ".join(experts.NAMES))
    parser.add_argument("--seeds", default="0", help="N,N,..")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--sequences", type=int, default=8, help="of each rank and step")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--warm-up", type=int, default=50, help="steps")
    parser.add_argument("--held-out-every", type=int, default=100, help="steps")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no run starts that may end later")
    parser.add_argument("--state", type=pathlib.Path, required=True, help="JSON file")
    return parser.parse_args()


def train(a, trainer: training.Trainer, data, name: str, seed: int) -> dict:
    here, losses, held_out = trainer.here, [], {}
    trainer.model.use(training.load(name.split("#")[0]))
    trainer.reset(seed)
    for step in range(1, a.steps + 1):
        batch = data.batch(seed, step, a.sequences, trainer.c.context, here.rank, here.count, here.device)
        rate = training.learning_rate(step, a.steps, a.learning_rate, a.warm_up)
        losses.append(trainer.step(*batch, rate)[0].float())
        if step % a.held_out_every == 0 or step == a.steps:
            held_out[str(step)] = trainer.held_out_loss(data, a.sequences, 4)
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    return {"losses": [round(loss, 6) for loss in (mean / here.count).tolist()], "held_out": held_out}


def run(a) -> None:
    c, names, seeds = training.configuration(a), a.experts.split(","), a.seeds.split(",")
    if not all(seed.isdecimal() for seed in seeds):
        raise training.Stop(f"--seeds {a.seeds}: must be numbers with commas between them")
    pinned = {"config": a.config, "sizes": dataclasses.asdict(c), "steps": a.steps, "sequences": a.sequences,
              "learning_rate": a.learning_rate, "warm_up": a.warm_up, "text_bytes": a.text_bytes}
    with training.ranks() as here:
        state = json.loads(a.state.read_text(encoding="utf-8")) if a.state.exists() else {
            "pinned": pinned, "ranks": here.count, "device": training.device_name(here), "runs": {}}
        if (state["pinned"], state["ranks"]) != (pinned, here.count):
            raise training.Stop(f"--state {a.state}: is of other sizes, steps or ranks; name another file")
        dist.barrier()  # all have read it
        data = training.corpus(a, c, here)
        trainer = training.Trainer(c, here, training.load(names[0].split("#")[0]), a)
        start, longest = time.monotonic(), 0.0
        for seed in seeds:
            for name in names:
                if f"{name} {seed}" in state["runs"]:
                    continue
                began = time.monotonic()
                if here.worst(began - start + 1.1 * longest)[0] > a.seconds:
                    here.say(f"ends here, as --seconds {a.seconds:.0f} would be over; the same command goes on")
                    return
                state["runs"][f"{name} {seed}"] = done = train(a, trainer, data, name, int(seed))
                longest = max(longest, time.monotonic() - began)
                here.say(f"{name} seed {seed}: loss {done['losses'][-1]:.4f}, "
                         f"held out {done['held_out'][str(a.steps)]:.4f}")
                if here.rank == 0:
                    partial = a.state.with_suffix(".partial")
                    partial.write_text(json.dumps(state) + "\n", encoding="utf-8")
                    os.replace(partial, a.state)
        for line in loss_gaps.lines(loss_gaps.gaps(state["runs"], names, seeds, names[0]), names[0]):
            here.say(line)
        if here.rank == 0:
            curves = {name: state["runs"][f"{name} {seeds[0]}"]["losses"] for name in names}
            apart = {name: [(i, x - y) for i, (x, y) in enumerate(zip(curve, curves[names[0]], strict=True), 1)]
                     for name, curve in curves.items()}
            told = pictures.curves(a.state.with_suffix(".svg"), apart, f"Loss minus {names[0]}'s, seed {seeds[0]}",
                                   "step", "nats per token")
            if told:
                here.say(told)


if __name__ == "__main__":
    training.end(lambda: run(arguments()))
