#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a Mixture-of-Experts language model on the text of files, sharded over GPUs by FSDP2.

    torchrun --nproc-per-node 2 train.py --config 7B-n256 --layers 12 --sequences 4 --steps 500 --text SRC --out RUN
    python train.py --config small --steps 200 --text docs --out RUN          one process, on the CPU too

bf16 compute and fp32 weights on GPUs; AdamW, gradients clipped to norm 1, warm-up. Every --save-every steps a
checkpoint is written, whole or not at all; --resume goes on from the last, with the bits of a run that was never
interrupted (on GPUs with --deterministic). RUN gets steps.csv, loads.csv and, where gnuplot is installed,
their pictures loss.svg and loads.svg.
--experts names whose experts compute.
"""

import argparse
import csv
import dataclasses
import os
import pathlib
import signal
import sys
import threading
import time

import checkpoints
import experts
import pictures
import torch
import torch.distributed as dist
import training

COLUMNS = ("step", "loss", "gradient_norm", "learning_rate", "tokens_per_second", "peak_bytes", "busiest_expert")
UNTIMED = 5  # steps after a start or a checkpoint that no speed is made of


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    training.add_flags(parser)
    parser.add_argument("--experts", default="tessera", help="one of " + ", ".join(experts.NAMES))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sequences", type=int, default=4, help="of each rank and step")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="at its peak")
    parser.add_argument("--warm-up", type=int, default=50, help="steps until then")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of this run")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    parser.add_argument("--save-every", type=int, default=100, help="steps; the last one is saved too")
    parser.add_argument("--report-every", type=int, default=10, help="steps")
    return parser.parse_args()


def check(a) -> None:
    for name in ("steps", "sequences", "warm_up", "save_every", "report_every"):
        if getattr(a, name) < 1:
            raise training.Stop(f"--{name.replace('_', '-')} {getattr(a, name)}: must be at least 1")
    if not 0 < a.learning_rate < 1:
        raise training.Stop(f"--learning-rate {a.learning_rate}: must be between 0 and 1")
    saved = checkpoints.whole(a.out)
    if not a.resume and saved:
        raise training.Stop(f"--out {a.out}: has {saved[-1].name}; add --resume or name another folder")
    if a.resume and not saved:
        raise training.Stop(f"--resume: no checkpoint in {a.out}; leave it out, or name the folder of a run with --out")


class Record:
    """What the run was at every reported step; rank 0 writes it."""

    def __init__(self, folder: pathlib.Path, rows: list):
        self.folder, self.rows, self.counts = folder, rows, None

    def write(self) -> list[str]:
        """Returns a line for each picture that could not be drawn."""
        notes = []
        with open(self.folder / "steps.csv", "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([COLUMNS, *self.rows])
        if self.counts is not None:
            with open(self.folder / "loads.csv", "w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows(self.counts)
            notes.append(pictures.loads(self.folder / "loads.svg", self.counts,
                                        "Rows of every expert over the mean, last step"))
        notes.append(pictures.curves(self.folder / "loss.svg", {"training": [(row[0], row[1]) for row in self.rows]},
                                     "Training loss", "step", "nats per token"))
        return [line for line in notes if line]


class Clock:
    """Seconds a step between reports, without the first steps and without saving."""

    def __init__(self, here):
        self.here = here
        self.restart()

    def restart(self) -> None:
        self.skipped, self.steps, self.start = 0, 0, None

    def step(self) -> None:
        if self.start is None:
            self.skipped += 1
            if self.skipped >= UNTIMED:
                self.here.synchronize()
                self.start = time.perf_counter()
        else:
            self.steps += 1

    def seconds(self) -> float:
        """Returns what a step took on the slowest rank; 0 before the first step has been counted."""
        self.here.synchronize()
        spent = (time.perf_counter() - self.start) / self.steps if self.steps else 0.0
        if self.steps:
            self.steps, self.start = 0, time.perf_counter()
        return self.here.worst(spent)[0]


def run(a, c, here) -> None:
    data = training.corpus(a, c, here)
    trainer = training.Trainer(c, here, training.load(a.experts), a)
    # A resumed run is the same run only if these are the same.
    pinned = {"config": dataclasses.asdict(c), "experts": a.experts, "seed": a.seed, "text": data.digest,
              "token_ids": data.used,
              "steps": a.steps, "sequences": a.sequences, "ranks": here.count, "learning_rate": a.learning_rate,
              "warm_up": a.warm_up, "recompute": a.recompute,
              "send_gradients": a.send_gradients}
    record, first = Record(a.out, []), 1
    if a.resume:
        place = checkpoints.whole(a.out)[-1]
        notes = checkpoints.notes(place)
        for name, value in pinned.items():
            if notes["pinned"][name] != value:
                raise training.Stop(f"--resume: {name} is {value} and was {notes['pinned'][name]} in {place}; "
                                    "give the same, or start another run with --out")
        checkpoints.restore(place, trainer)
        record.rows, first = notes["rows"], notes["step"] + 1
        here.say(f"resumed from {place}")
    a.out.mkdir(parents=True, exist_ok=True)
    here.say(f"{a.config}, {c.layers} layers, {c.parameters() / 1e6:.1f} M parameters, {a.experts} experts, "
             f"{here.count} x {training.device_name(here)}, {len(data.training)} tokens of text, "
             f"{data.used} of {c.vocabulary} token ids in use")
    clock, tokens = Clock(here), a.sequences * c.context
    for step in range(first, a.steps + 1):
        rate = training.learning_rate(step, a.steps, a.learning_rate, a.warm_up)
        batch = data.batch(a.seed, step, a.sequences, c.context, here.rank, here.count, here.device)
        loss, norm, counts = trainer.step(*batch, rate)
        clock.step()
        if step % a.report_every == 0 or step == a.steps:
            report(record, here, step, a.steps, loss, norm, counts, rate, tokens, clock)
        if step % a.save_every == 0 or step == a.steps:
            place = checkpoints.save(a.out, step, trainer, {"pinned": pinned, "rows": record.rows})
            here.say(f"saved {place}")
            clock.restart()
    here.say(f"held-out loss {trainer.held_out_loss(data, a.sequences, 4):.4f} nats per token")
    if here.rank == 0:
        for line in record.write():
            here.say(line)


def report(record, here, step, steps, loss, norm, counts, rate, tokens, clock) -> None:
    mean, counts = loss.float() / here.count, counts.clone()
    dist.all_reduce(mean)
    dist.all_reduce(counts)
    seconds, peak = clock.seconds(), here.worst(here.memory()[0])[0]
    speed = tokens / seconds if seconds else 0.0
    share = (counts.max(dim=1).values / counts.float().mean(dim=1)).max().item()
    mean, norm = mean.item(), float(norm)
    line = (f"step {step}/{steps}  loss {mean:.4f}  gradient {norm:.2f}  rate {rate:.1e}  "
            f"busiest expert {share:.2f} x mean")
    if speed:
        line += f"  {speed:.0f} tokens/s per rank, {speed * here.count:.0f} in all"
    if here.on_gpu:
        line += f"  at most {peak / 2**30:.2f} GiB in use"
    here.say(line)
    if not mean < float("inf"):
        raise training.Stop(f"step {step}: the loss is {mean}; start again with a lower --learning-rate")
    record.rows.append((step, mean, norm, rate, round(speed, 1), int(peak), share))
    record.counts = counts.tolist()


def stopped(folder: pathlib.Path, rank: int, why: str) -> None:
    """One line that says what ended this rank and where to go on."""
    saved = checkpoints.whole(folder)
    remedy = f"go on from {saved[-1]} with --resume" if saved else "no checkpoint was written yet; start again"
    print(f"train.py: rank {rank}: {why}; {remedy}", file=sys.stderr, flush=True)


def end_when_terminated(folder: pathlib.Path, rank: int) -> None:
    """torchrun sends SIGTERM when another rank is lost. This one may then wait in a collective and run no handler, so
    that a thread reads the signal from a pipe and ends the process."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def listen() -> None:
        while os.read(read_end, 1) != bytes([signal.SIGTERM]):
            pass
        stopped(folder, rank, "stopped by SIGTERM, as torchrun sends when another rank is lost")
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()


def main() -> None:
    a = arguments()
    c = training.configuration(a)
    check(a)
    with training.ranks() as here:
        end_when_terminated(a.out, here.rank)
        try:
            run(a, c, here)
        except (training.Stop, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:  # of a collective whose other end is gone, for one
            stopped(a.out, here.rank, " ".join(str(error).split())[:300])
            raise SystemExit(1) from error


if __name__ == "__main__":
    training.end(main)
