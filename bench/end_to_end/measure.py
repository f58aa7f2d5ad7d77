#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times training steps of one model with the experts of several libraries, exchanged between the steps of one process.

    torchrun --nproc-per-node 2 measure.py --config 7B-n256 --layers 12 --sequences 4 --text SRC \
        --experts tessera,torch-grouped-mm --rounds 6 --out rows.json

Every implementation is first checked against torch-grouped-mm (o and all gradients). The model then trains for
--warm-up steps, and from there on the learning rate is 0: every step costs what a step costs, and all implementations
see the same weights, tokens and routing. A round is a block of each implementation in random order: 3 steps untimed,
--timed by events between the ends of steps, the slowest rank counts. Ratios are of blocks of one round. --sequences 6,
or NAME=N,NAME=N where each has its own batch. --profile adds the kernels of three steps by kind, and the time of the
experts alone, on what three of the layers have in a step.
"""

import argparse
import datetime
import json
import math
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys

import experts
import intervals
import split
import torch
import torch.distributed as dist
import training

UNTIMED = 3


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    training.add_flags(parser)
    parser.add_argument("--experts", default="tessera,torch-grouped-mm", help="of " + ", ".join(experts.NAMES))
    parser.add_argument("--sequences", default="1", help="of each rank and step: N, or NAME=N,NAME=N")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--timed", type=int, default=10, help="steps of a block")
    parser.add_argument("--warm-up", type=int, default=300, help="training steps before weights stand still")
    parser.add_argument("--warm-up-sequences", type=int, default=0, help="of each rank and step of the warm-up, where "
                        "a large batch would take long; 0: as many as the first of --experts is timed with")
    parser.add_argument("--most-loaded", type=float, default=4.0, help="times the mean that the busiest expert of a "
                        "layer may have then: in the first steps of a training all tokens choose the same experts")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="of the warm-up")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no round starts after so many; two are done")
    parser.add_argument("--check-tokens", type=int, default=4096, help="of the check before anything is timed")
    parser.add_argument("--compile-seconds", type=float, default=400.0, help="of a library whose first call compiles "
                        "for minutes: a process of its own runs before all, and the library is left out if that takes "
                        "longer; 0 where its cache is known to be full")
    parser.add_argument("--profile", action="store_true", help="split steps by kinds of kernels (on GPUs), and "
                        "time the experts alone")
    parser.add_argument("--regime", default="", help="of the rows; by itself R0, R1 with batches of their own, R2 with "
                        "--recompute")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSON file of rows")
    return parser.parse_args()


def batches(names: list[str], text: str) -> dict[str, int]:
    """Sequences by implementation."""
    given = dict(part.split("=", 1) for part in text.split(",")) if "=" in text else dict.fromkeys(names, text)
    for name in names:
        if not given.get(name, "").isdecimal() or int(given[name]) < 1:
            raise training.Stop(f"--sequences {text}: gives {name} no batch; write N, or NAME=N for every one of "
                                "--experts")
    return {name: int(given[name]) for name in names}


def compiled_beforehand(name: str, a) -> str:
    """Fills the library's cache by check.py in a process of its own, so that the ranks do not all compile; returns why
    the library is to be left out, or nothing. What takes too long is ended with all that it has started."""
    command = [sys.executable, str(pathlib.Path(__file__).parent / "check.py"), name, "--config", a.config, "--tokens",
               str(a.check_tokens)]
    alone = {key: value for key, value in os.environ.items()
             if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    # quack starts its workers one after the other, for each of six GEMMs anew: one process is done sooner.
    alone.setdefault("QUACK_COMPILE_WORKERS", "1")
    process = subprocess.Popen(command, env=alone, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               start_new_session=True)
    try:
        told = process.communicate(timeout=a.compile_seconds)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"its first call did not end within --compile-seconds {a.compile_seconds:.0f}"
    if process.returncode == 0:
        return ""
    return f"a process of it ended with status {process.returncode}: " + " ".join(told.split())[-300:]


def chosen(a, c, here) -> tuple[dict, dict]:
    """Errors of the implementations that run here and pass the check, reasons of those that do not."""
    passed, left_out = {}, {}
    dtype = torch.bfloat16 if here.on_gpu else torch.float32
    for name in dict.fromkeys([*a.experts.split(","), experts.BASELINE]):
        wanted = name in a.experts.split(",")
        apart, reason = {}, ""
        if name in experts.COMPILE_FOR_MINUTES and here.rank == 0 and a.compile_seconds > 0:
            reason = compiled_beforehand(name, a)
        reason = first_reason(here, reason)  # the others wait for the first rank
        try:
            if reason:
                raise experts.Unavailable(reason)
            experts.load(name)
            if name != experts.NO_EXPERTS:
                apart = experts.checked(name, c.hidden, c.intermediate, c.experts, c.top_k, a.check_tokens,
                                        here.device, dtype)
        except experts.Unavailable as error:
            reason = str(error)
        except ValueError as error:
            if name not in experts.NAMES:
                raise training.Stop(str(error)) from error
            reason = str(error)
        except Exception as error:  # a peer's kernels may end in anything; it is named and left out
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        reason = first_reason(here, reason)  # left out everywhere or nowhere
        if reason:
            here.say(f"left out: {name}: {reason}")
            left_out[name] = reason
        elif wanted:
            here.say(f"checked: {name} {experts.version(name)} " + " ".join(f"{k} {v:.1e}" for k, v in apart.items()))
            passed[name] = apart
    if experts.BASELINE in left_out:
        raise training.Stop(f"{experts.BASELINE}: {left_out[experts.BASELINE]}; nothing can be checked without it")
    if not passed:
        raise training.Stop(f"--experts {a.experts}: none of them runs here; see the lines above")
    return passed, left_out


def first_reason(here, reason: str) -> str:
    """The one of the first rank that has one, on all ranks."""
    reasons = [None] * here.count
    dist.all_gather_object(reasons, reason)
    return next(filter(None, reasons), "")


def gpu_state(here) -> dict:
    """Clock and power of this rank's GPU as nvidia-smi has them, {} where it does not report them."""
    if not here.on_gpu:
        return {}
    try:
        uuid = torch.cuda.get_device_properties(here.device).uuid
        done = subprocess.run(["nvidia-smi", f"--id=GPU-{uuid}", "--query-gpu=clocks.sm,power.draw,driver_version",
                               "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20, check=True)
        clock, power, driver = (field.strip() for field in done.stdout.splitlines()[0].split(","))
        return {"sm_mhz": float(clock), "watts": float(power), "driver": driver}
    except (OSError, ValueError, IndexError, AttributeError, subprocess.SubprocessError):
        return {}


class Timer:
    """Blocks of steps of one trainer with any implementation."""

    def __init__(self, a, trainer, data, sequences: dict):
        self.a, self.trainer, self.data, self.sequences = a, trainer, data, sequences
        self.here, self.c = trainer.here, trainer.c

    def use(self, name: str) -> None:
        """Exchanges the experts; memory of the previous ones goes back to the device, and peaks begin anew."""
        self.trainer.model.use(training.load(name))
        self.here.synchronize()
        training.settle()
        if self.here.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()

    def step(self, name: str, index: int, rate: float = 0.0, sequences: int = 0) -> tuple:
        """One step with the implementation's own batch, or with so many sequences."""
        here, sequences = self.here, sequences or self.sequences[name]
        batch = self.data.batch(self.a.seed, index, sequences, self.c.context, here.rank, here.count, here.device)
        try:
            return self.trainer.step(*batch, rate)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(f"{name} with {sequences} sequences: {error}") from error

    def block(self, name: str, first: int) -> dict:
        """Milliseconds of the timed steps, their mean loss, peaks and clocks; tokens are those from step `first` on."""
        here = self.here
        self.use(name)
        state = torch.cuda.memory_allocated() if here.on_gpu else 0
        losses = []
        for i in range(UNTIMED):
            losses.append(self.step(name, first + i)[0])
        pace, retries = split.Pace(here.device), here.retries()
        for i in range(UNTIMED, UNTIMED + self.a.timed):
            losses.append(self.step(name, first + i)[0])
            pace.mark()
        clocks = gpu_state(here)  # while the last steps run
        ms = here.worst(*pace.milliseconds())
        mean = torch.stack(losses).double().mean()
        dist.all_reduce(mean)
        allocated, reserved, state, retries = here.worst(*here.memory(), state, here.retries() - retries)
        slowest_clock = -here.worst(-clocks.get("sm_mhz", 0.0))[0]
        return {"name": name, "ms": ms, "loss": mean.item() / here.count, "peak_bytes": int(allocated),
                "reserved_bytes": int(reserved), "state_bytes": int(state), "allocator_retries": int(retries),
                **({"sm_mhz": slowest_clock, "watts": clocks["watts"], "driver": clocks["driver"]} if clocks else {})}


def measure(a, timer: Timer, names: list[str], start: float, after_round) -> list[dict]:
    """Rounds of a block of each implementation, shuffled alike on all ranks; after_round(rounds so far)."""
    order, rounds, here = random.Random(a.seed), [], timer.here
    for number in range(a.rounds):
        if number >= 2 and here.worst(split.now() - start)[0] > a.seconds:
            here.say(f"ends after {number} of {a.rounds} rounds, as --seconds {a.seconds:.0f} are over")
            break
        order.shuffle(names)
        blocks = {name: timer.block(name, 10_000 + number * (UNTIMED + a.timed)) for name in names}
        rounds.append(blocks)
        here.say(f"round {number + 1}: " + "  ".join(f"{name} {statistics.median(blocks[name]['ms']):.2f} ms"
                                                     for name in sorted(blocks)))
        after_round(rounds)
    return rounds


def summary(name: str, rounds: list[dict], sequences: dict, context: int, baseline: str) -> dict:
    """Fields of one implementation's row."""
    blocks = [blocks[name] for blocks in rounds]
    steps = sorted(ms for block in blocks for ms in block["ms"])
    median = statistics.median(steps)
    # Time per token, so that batches may differ; a ratio above 1 says that the baseline takes longer.
    ratios = [statistics.median(blocks[baseline]["ms"]) / sequences[baseline]
              / (statistics.median(blocks[name]["ms"]) / sequences[name]) for blocks in rounds]
    ratio, half = intervals.mean_interval(ratios)
    row = {"ms": round(median, 3), "ms_p10": round(steps[len(steps) // 10], 3),
           "ms_p90": round(steps[len(steps) * 9 // 10], 3),
           "tokens_per_s_per_gpu": round(1e3 * sequences[name] * context / median),
           "batch_tokens": sequences[name] * context,
           f"times_faster_than_{baseline}": {"mean": round(ratio, 4), "half_interval": round(half, 4) if half < math.inf
                                             else None, "rounds": [round(r, 4) for r in ratios]},
           "peak_bytes": max(b["peak_bytes"] for b in blocks),
           "reserved_bytes": max(b["reserved_bytes"] for b in blocks),
           "state_bytes": max(b["state_bytes"] for b in blocks),
           "allocator_retries": sum(b["allocator_retries"] for b in blocks),
           "loss": round(statistics.fmean(b["loss"] for b in blocks), 6),
           "loss_apart": round(max(abs(blocks[name]["loss"] - blocks[baseline]["loss"]) for blocks in rounds), 6)
           if sequences[name] == sequences[baseline] else None}
    clocks = [b["sm_mhz"] for b in blocks if "sm_mhz" in b]
    if clocks:
        row["clocks_mhz"], row["watts"] = [min(clocks), max(clocks)], statistics.fmean(b["watts"] for b in blocks)
        row["rounds_with_other_clocks"] = [i for i, blocks in enumerate(rounds) if max(
            b["sm_mhz"] for b in blocks.values()) > 1.03 * min(b["sm_mhz"] for b in blocks.values())]
    return row


def rows(a, c, here, rounds, passed, sequences, loads, splits, alone) -> list[dict]:
    regime = a.regime or ("R2" if a.recompute else "R1" if len(set(sequences.values())) > 1 else "R0")
    baseline = experts.BASELINE if experts.BASELINE in passed else next(iter(passed))
    common = {"config": a.config, "dtype": "bf16" if here.on_gpu else "fp32", "gpus": here.count if here.on_gpu else 0,
              "ranks": here.count, "routing": "learned", "router": "topk-softmax", "round": "none",
              "pass": "train-step", "layers": c.layers, "context": c.context, "vocabulary": c.vocabulary,
              "regime": regime, "recompute": a.recompute, "keep_gathered": a.keep_gathered,
              "send_gradients": a.send_gradients,
              "attention": training.attention(a) if here.on_gpu else "cpu",
              "allocator": os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")),
              "compiled_dense": here.on_gpu and not a.eager, "busiest_expert": loads}
    result = []
    for name in sorted(passed):
        tokens = sequences[name] * c.context
        row = {**common, "impl": name, "variant": experts.variant(name), "version": experts.version(name),
               "sequences": sequences[name],
               "shape": [tokens, c.hidden, c.intermediate, c.experts, c.top_k], "errors": passed[name],
               "checked": name != experts.NO_EXPERTS, **summary(name, rounds, sequences, c.context, baseline)}
        row["model_tflops"] = round(c.flops_per_token() * tokens / row["ms"] / 1e9, 1)
        if experts.NO_EXPERTS in passed and sequences[name] == sequences[experts.NO_EXPERTS]:
            row["experts_ms"] = round(statistics.median(
                statistics.median(b[name]["ms"]) - statistics.median(b[experts.NO_EXPERTS]["ms"]) for b in rounds), 3)
        if name in splits:
            row["split"] = splits[name]
        if name in alone:  # beside `experts_ms` it says what sharding, communication and launches cost the experts
            row["experts_alone_ms"] = round(c.layers * alone[name], 3)
        result.append(row)
    return result


def run(a) -> None:
    start, c = split.now(), training.configuration(a)
    if a.rounds < 2:
        raise training.Stop(f"--rounds {a.rounds}: an interval needs at least 2")
    if a.timed < 1:
        raise training.Stop(f"--timed {a.timed}: must be at least 1")
    if a.warm_up_sequences < 0:
        raise training.Stop(f"--warm-up-sequences {a.warm_up_sequences}: write a number of sequences, or 0")
    with training.ranks() as here:
        passed, left_out = chosen(a, c, here)
        names = list(passed)
        sequences = batches(names, a.sequences)
        data = training.corpus(a, c, here)
        trainer = training.Trainer(c, here, training.load(names[0]), a)
        timer = Timer(a, trainer, data, sequences)
        here.say(f"{a.config}, {c.layers} layers, {c.parameters() / 1e6:.0f} M parameters on {here.count} x "
                 f"{training.device_name(here)}, {data.used} of {c.vocabulary} token ids in use; ready after "
                 f"{split.now() - start:.0f} s")
        # Each compiles and tunes, the first one once before the optimizer has its moments, so that a batch for which
        # memory does not suffice ends here. The first one then trains.
        for name in names + names[:1]:
            timer.use(name)
            timer.step(name, 0)
        for step in range(1, a.warm_up + 1):
            loss, _, counts = timer.step(names[0], step, a.learning_rate * min(1.0, step / max(a.warm_up // 2, 1)),
                                         a.warm_up_sequences)
        counts = counts.clone() if a.warm_up else timer.step(names[0], 1)[2].clone()
        dist.all_reduce(counts)
        loads = [round(share, 3) for share in (counts.max(dim=1).values / counts.float().mean(dim=1)).tolist()]
        here.say(f"warm after {split.now() - start:.0f} s" + (f", loss {loss.item():.3f}" if a.warm_up else "")
                 + f", busiest expert of a layer {max(loads):.2f} x mean")
        refuse_collapsed(max(loads), a)
        splits, alone = {}, {}

        def keep(rounds) -> list:
            """Writes what is known, as a limit of time may end this any moment."""
            if here.rank != 0:
                return []
            table = rows(a, c, here, rounds, passed, sequences, loads, splits, alone)
            write(a, here, data, table, rounds, left_out)
            return table

        rounds = measure(a, timer, list(names), start, keep)
        for name in ["", *names] if a.profile else [""]:
            if name:
                timer.use(name)
                if here.on_gpu:
                    splits[name] = split.profiled(lambda i, name=name: timer.step(name, 10_000 + i))
                alone[name] = here.worst(split.alone(trainer.model, training.load(name),
                                                     lambda name=name: timer.step(name, 10_000),
                                                     {0, c.layers // 2, c.layers - 1}))[0]
            table = keep(rounds)
        if here.rank == 0:
            for row in table:
                ratio = next(value for key, value in row.items() if key.startswith("times_faster"))
                half = math.inf if ratio["half_interval"] is None else ratio["half_interval"]
                over = (row["peak_bytes"] - row["state_bytes"]) / 2**30
                here.say(f"{row['impl']:26} {row['ms']:9.2f} ms  {row['tokens_per_s_per_gpu']:8} tokens/s per rank  "
                         f"{ratio['mean']:.3f} +- {half:.3f} times as fast  peak {over:.2f} GiB over the state  "
                         f"loss {row['loss']:.4f}" + crowded(row))


def refuse_collapsed(most: float, a) -> None:
    if most > a.most_loaded:
        raise training.Stop(f"the busiest expert of a layer has {most:.1f} times the mean after --warm-up {a.warm_up}, "
                            f"--most-loaded {a.most_loaded:g}: such steps are no measure of a trained layer; warm up "
                            "for longer")


def crowded(row: dict) -> str:
    """What is said of a row whose batch leaves the allocator too little memory to keep its blocks."""
    times = row["allocator_retries"]
    return f"  the allocator gave memory back {times} times in timed steps: take a smaller batch" if times else ""


def write(a, here, data, table, rounds, left_out) -> None:
    """The results file, with the command, the device and what was left out."""
    driver = next((b["driver"] for blocks in rounds for b in blocks.values() if "driver" in b), "")
    clocks = [clock for row in table for clock in row.get("clocks_mhz", [])]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False,
                            cwd=pathlib.Path(__file__).parent).stdout.strip()
    command = f"torchrun --nproc-per-node {here.count} bench/end_to_end/measure.py " + " ".join(sys.argv[1:])
    protocol = (f"median of {a.timed} steps in each of {len(rounds)} rounds, {UNTIMED} untimed before, all in one "
                "process in random order, weights standing still after the warm-up")
    a.out.parent.mkdir(parents=True, exist_ok=True)
    a.out.write_text(json.dumps({
        "command": command, "commit": commit, "device": training.device_name(here), "driver": driver,
        "clocks_mhz": [min(clocks), max(clocks)] if clocks else [0, 0], "date": datetime.date.today().isoformat(),
        "torch": torch.__version__, "text_sha256": data.digest, "protocol": protocol, "left_out": left_out,
        "rows": table}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    training.end(lambda: run(arguments()))
