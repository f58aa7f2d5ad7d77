#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""No flag without effect: every pair of a router, rounding, activation or layout and a flag is refused by the flag's
name, or changes what the command prints. And who is warned that a router cannot learn. The suite `options` walks every
third pair, `all_options` every pair.
usage: options_test.py PROGRAM SUITE"""

import json
import pathlib
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor

import program
from program import Cli

SHAPE = ["--tokens", "26", "--hidden", "8", "--intermediate", "6", "--experts", "12", "--top-k", "2"]
ROUTERS = ("topk-softmax", "softmax-topk", "softmax-topk-renorm", "sigmoid-bias", "group-limited", "sqrtsoftplus",
           "expert-choice", "given")
ROUNDINGS = ("nr-f", "sr-f", "nr-s", "balance-f", "up", "down")
ACTIVATIONS = ("swiglu", "geglu", "geglu-erf", "reglu", "clamped-swiglu", "relu", "relu2", "silu", "gelu", "gelu-erf")
LAYOUTS = ("concat", "interleaved", "up-first", "transposed", "separate", "blocked:2", "transposed-interleaved",
           "transposed-up-first", "transposed-blocked:2")
BASES = [["--router", router] for router in ROUTERS] + [["--router", router, "--replay"] for router in ROUTERS[:-1]]
BASES += [["--round", rounding, "--tile", "4"] for rounding in ROUNDINGS]
BASES += [["--activation", activation] for activation in ACTIVATIONS] + [["--layout", layout] for layout in LAYOUTS]
# Flags that describe the layer.
LAYER = [["--alpha", "1.25"], ["--limit", "0.25"], ["--up-offset", "0"], ["--bias"], ["--dtype", "bf16"],
         ["--router", "sigmoid-bias"], ["--round", "up"], ["--tile", "5"], ["--capacity", "3"], ["--replay"],
         ["--groups", "2"], ["--top-groups", "1"], ["--route-scale", "2.5"], ["--normalize-scores"],
         ["--variable-experts"], ["--save", "x"], ["--column-chunk", "3"], ["--layout", "interleaved"],
         ["--activation", "geglu"], ["--router-dtype", "fp32"], ["--router-dtype", "bf16"]]
# Flags of its data.
DATA = [["--routing", "zipf:2"], ["--step", "3"], ["--layer", "2"], ["--aux-dlogits"], ["--router-bias"],
        ["--sentinels", "0.5"], ["--repeat-experts"], ["--accumulate"], ["--seed", "7"],
        ["--padding", "0.3"], ["--ids-dtype", "int64"]]
# What cannot be seen where it is read: int64 ids have the same numbers, and results do not depend on threads.
# fp32 is what the router of an fp32 layer has anyway.
UNSEEN = {"--router-dtype": [[]], "--ids-dtype": [["--router", "given"], ["--replay"]], "--threads": [[]]}


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([program.PROGRAM, *arguments], capture_output=True, text=True, timeout=300)


def unseen(flag: str, base: list[str]) -> bool:
    return any(set(where) <= set(base) for where in UNSEEN.get(flag, ()))


def is_named(flag: str, text: str) -> bool:
    """As the command line or the library spells it."""
    plain = flag.removeprefix("--")
    return plain in text or plain.replace("-", "_") in text


class Pairs(Cli):
    EVERY = 1  # of how many pairs one is walked

    def walk(self, command: str, bases: list[list[str]], flags: list[list[str]], least: int) -> None:
        # Of each base and of each flag, as the first pair moves from base to base.
        pairs = [(base, flag) for i, base in enumerate(bases) for j, flag in enumerate(flags)
                 if flag[0] not in base and (i + j) % self.EVERY == 0]
        with ThreadPoolExecutor(2) as pool:
            plain = dict(zip(map(tuple, bases), pool.map(lambda b: run(command, *SHAPE, *b, "--json"), bases)))
            changed = list(pool.map(lambda p: run(command, *SHAPE, *p[0], *p[1], "--json"), pairs))
        for base in bases:
            self.assertEqual(plain[tuple(base)].returncode, 0, f"{base}: {plain[tuple(base)].stderr}")
        refused = 0
        for (base, flag), done in zip(pairs, changed, strict=True):
            with self.subTest(command, base=base, flag=flag):
                if done.returncode == 2:
                    refused += 1
                    self.assertTrue(is_named(flag[0], done.stderr), done.stderr)
                    continue
                self.assertEqual(done.returncode, 0, done.stderr)
                json.loads(done.stdout)
                if not unseen(flag[0], base):
                    self.assertNotEqual(done.stdout, plain[tuple(base)].stdout, "accepted, and changes nothing")
        print(f"{command}: {len(pairs)} pairs walked, {refused} refused by name")
        self.assertGreaterEqual(len(pairs), least)
        self.assertTrue(least / 20 < refused < len(pairs) - least / 20)

    def test_verify(self):
        self.walk("verify", BASES, LAYER + DATA + [["--threads", "3"]], 1000 // self.EVERY)


class Options(Pairs):
    EVERY = 3

    def test_commands_without_data(self):
        for command in ("explain", "plan"):
            more = [["--threads", "3"]] if command == "plan" else []
            for flag in [f for f in DATA if f[0] not in ("--ids-dtype", "--step", "--layer")] + more:
                self.refuse(command, *SHAPE, *flag, naming=f"{flag[0]} with {command}")
            for flag in ("--step", "--layer"):
                self.refuse(command, *SHAPE, "--round", "sr-f", "--tile", "4", flag, "3",
                            naming=f"{flag} with {command}")
        # What describes the layer shows, or is refused as the layer would refuse it.
        for command in ("explain", "plan"):
            plain = self.run_tessera(command, *SHAPE, "--json", code=0).stdout
            for flag in (["--dtype", "bf16"], ["--round", "up", "--tile", "4"], ["--variable-experts"],
                         ["--router", "expert-choice", "--capacity", "3"], ["--activation", "relu"]):
                done = run(command, *SHAPE, *flag, "--json")
                with self.subTest(command, flag=flag):
                    self.assertTrue(done.returncode == 0 and done.stdout != plain
                                    or done.returncode == 2 and is_named(flag[0], done.stderr), done)

    def test_bench(self):
        self.refuse("bench", "--config", "gpt-oss-20b", "--activation", "relu", naming="--activation with --config")
        for flags, naming in ((["--tile", "5"], "tile=5"), (["--groups", "2"], "groups=2"), (["--gpus", "2"], "--gpus"),
                              (["--partial-combine"], "--partial-combine"),
                              (["--padding", "0.3"], "--padding with bench"),
                              (["--device", "cuda", "--router", "given", "--ids-dtype", "int64"],
                               "--ids-dtype with bench --device cuda"),
                              (["--device", "cuda", "--gpus", "2", "--ids-dtype", "int64"],
                               "--ids-dtype with bench --device cuda"), (["--alpha", "2"], "alpha=2")):
            self.refuse("bench", *SHAPE, *flags, naming=naming)

    def test_old_names(self):
        """The flags of before 1.0 do what the new ones do, and say which those are."""
        done = run("bench", *SHAPE, "--sums-on-owners")
        self.assertEqual(done.returncode, 2)
        self.assertIn("note: --sums-on-owners is called --partial-combine; the old name goes with 1.0\n", done.stderr)
        self.assertIn("--partial-combine: of the GPUs of --gpus", done.stderr)
        self.assertNotIn("--sums-on-owners", run("bench", "--help").stdout)

    def test_train(self):
        with tempfile.TemporaryDirectory() as folder:
            text = pathlib.Path(folder, "text.txt")
            text.write_text("What is this text for? It trains a model. " * 400)
            for router in ROUTERS[:-1]:
                for flag in (["--groups", "2"], ["--top-groups", "1"], ["--normalize-scores"], ["--bias-rate", "0.1"],
                             ["--tile", "16"], ["--balance", "0.5"]):
                    read = {"--groups": router == "group-limited", "--top-groups": router == "group-limited",
                            "--normalize-scores": router in ("softmax-topk", "sigmoid-bias", "group-limited",
                                                             "sqrtsoftplus"),
                            "--bias-rate": router in ("sigmoid-bias", "group-limited", "sqrtsoftplus"),
                            "--tile": False, "--balance": router != "expert-choice"}[flag[0]]
                    if not read:
                        self.refuse("train", "--text", str(text), "--out", f"{folder}/run", "--router", router, *flag,
                                    naming=f"{flag[0]} with --r")

    def test_who_cannot_learn_is_told(self):
        shape = ["--tokens", "26", "--hidden", "8", "--intermediate", "6"]
        for flags, warns in ((["--experts", "4", "--top-k", "1"], True), (["--experts", "1", "--top-k", "1"], True),
                            (["--experts", "4", "--top-k", "1", "--router", "sigmoid-bias",
                              "--normalize-scores"], True),
                            (["--experts", "4", "--top-k", "1", "--router", "softmax-topk"], False),
                            (["--experts", "4", "--top-k", "1", "--round", "up", "--tile", "3"], False),
                            (["--experts", "4", "--top-k", "2"], False),
                            (["--experts", "4", "--top-k", "1", "--router", "given"], False)):
            for command in ("verify", "plan"):
                done = self.run_tessera(command, *shape, *flags, code=0)
                self.assertEqual(done.stderr.count("cannot learn; use"), warns, (command, flags, done.stderr))
        with tempfile.TemporaryDirectory() as folder:
            text = pathlib.Path(folder, "text.txt")
            text.write_text("What is this text for? It trains a model. " * 400)
            small = ["--text", str(text), "--steps", "1", "--batch", "2", "--layers", "1", "--hidden", "16",
                     "--heads", "2", "--kv-heads", "1", "--head-dim", "8", "--intermediate", "8", "--context", "16",
                     "--seconds", "1"]
            for top_k, warns in (("1", 1), ("2", 0)):
                done = self.run_tessera("train", *small, "--top-k", top_k, "--out", f"{folder}/{top_k}", code=0)
                self.assertEqual(done.stderr.count("cannot learn; use"), warns, done.stderr)


if __name__ == "__main__":
    program.main({"options": Options, "all_options": Pairs})
