# SPDX-License-Identifier: Apache-2.0
"""bench/end_to_end/train.py over two processes with gloo: a rank is killed, the run goes on with the bits of one that
was not interrupted."""

import csv
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

import programs
import tier
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = ROOT / "bench" / "end_to_end"
STEPS, SAVE_EVERY = 60, 15


def flat(state: dict, prefix: str = ""):
    for key, value in state.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class Processes(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))

    def train(self, out: pathlib.Path, *options) -> tuple:
        """The program and its arguments."""
        return (ROOT / "examples" / "train_model.py", "--config", "tiny", "--text", ROOT / "docs", "--text-bytes",
                "200000", "--cache", self.folder / "text", "--sequences", "1", "--steps", STEPS, "--save-every",
                SAVE_EVERY, "--report-every", "3", "--learning-rate", "3e-3", "--warm-up", "5", "--out", out, *options)

    def start(self, *program) -> list[subprocess.Popen]:
        """Its two ranks."""
        ranks = programs.start_ranks(2, *program)
        self.addCleanup(programs.kill, ranks)
        return ranks

    def finish(self, ranks: list[subprocess.Popen]) -> str:
        return programs.finish(ranks)[0][0]

    def alone(self, *program) -> subprocess.CompletedProcess:
        return subprocess.run(programs.command(*program), capture_output=True, text=True, check=False, timeout=300)

    def state(self, place: pathlib.Path) -> dict:
        dcp_to_torch_save(place, self.folder / "state.pt")
        return dict(flat(torch.load(self.folder / "state.pt", weights_only=False)))

    @tier.deep  # half a minute of two processes
    def test_killed_and_resumed(self):
        whole, broken = self.folder / "whole", self.folder / "broken"
        output = self.finish(self.start(*self.train(whole)))
        self.assertRegex(output, r"step 60/60  loss .* tokens/s per rank, \d+ in all")
        self.assertRegex(output, r"held-out loss \d+\.\d+ nats")
        with open(whole / "steps.csv", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        self.assertLess(float(rows[-1]["loss"]), float(rows[0]["loss"]) - 0.2)
        for picture in ("loss.svg", "loads.svg"):
            self.assertIn("</svg>", (whole / picture).read_text(encoding="utf-8"))

        ranks = self.start(*self.train(broken))
        for line in ranks[0].stdout:
            if line.startswith("saved "):
                break
        ranks[1].kill()
        _, complaint = ranks[0].communicate(timeout=300)
        ranks[1].communicate(timeout=300)
        self.assertEqual(ranks[0].returncode, 1, complaint)
        self.assertRegex(complaint.splitlines()[-1],
                         r"^train.py: rank 0: .*; go on from .*checkpoint-000000\d\d with --resume$")
        saved = sorted(place.name for place in broken.glob("checkpoint-*") if place.suffix != ".partial")
        self.assertNotIn(f"checkpoint-{STEPS:08}", saved)
        (broken / "checkpoint-99999999.partial").mkdir()  # what a rank lost while it saves leaves behind
        output = self.finish(self.start(*self.train(broken, "--resume", "--keep-gathered")))
        self.assertIn(f"resumed from {broken / saved[-1]}", output)

        last = f"checkpoint-{STEPS:08}"
        wanted, got = self.state(whole / last), self.state(broken / last)
        self.assertEqual(wanted.keys(), got.keys())
        tensors = [name for name, value in wanted.items() if isinstance(value, torch.Tensor)]
        self.assertGreater(len(tensors), 3 * 15)  # weights and both moments of each
        for name in tensors:
            self.assertTrue(torch.equal(wanted[name], got[name]), name)
        with open(broken / "steps.csv", encoding="utf-8") as file:
            again = list(csv.DictReader(file))
        for column in ("step", "loss", "gradient_norm", "learning_rate", "busiest_expert"):
            self.assertEqual([row[column] for row in rows], [row[column] for row in again])

        alone = self.alone(*self.train(broken, "--resume"))
        self.assertEqual(alone.returncode, 2, alone.stderr)
        self.assertRegex(alone.stderr, r"^train_model.py: --resume: ranks is 1 and was 2 in .*\n$")

    @tier.deep
    def test_blocks_that_stay_gathered(self):
        """They do stay so, and losses are the same, also of held-out text between steps."""
        program = self.folder / "gathered.py"
        program.write_text(f"import sys; sys.path.insert(0, {str(PROGRAMS)!r})\n"
                           "import argparse, model, text, torch, training\n"
                           "from torch.distributed.tensor import DTensor\n"
                           "c, losses = model.CONFIGURATIONS['tiny'], {False: [], True: []}\n"
                           "ids = torch.randint(0, 512, (2000,), generator=torch.Generator().manual_seed(0)).numpy()\n"
                           "data = text.Corpus(ids, ids, '', 512)\n"
                           "with training.ranks() as here:\n"
                           "    for keep in losses:\n"
                           "        a = argparse.Namespace(attention=None, deterministic=False, eager=True,\n"
                           "                               recompute=False, seed=0, keep_gathered=keep)\n"
                           "        trainer = training.Trainer(c, here, training.load('torch-eager'), a)\n"
                           "        for step in range(3):\n"
                           "            batch = data.batch(0, step, 2, c.context, here.rank, 2, here.device)\n"
                           "            losses[keep] += [trainer.step(*batch, 1e-2)[0].item(),\n"
                           "                             trainer.held_out_loss(data, 2, 1)]\n"
                           "        trainer.model(*batch)\n"
                           "        assert isinstance(trainer.model.blocks[0].qkv, DTensor) != keep, keep\n"
                           "    assert losses[False] == losses[True], losses\n"
                           "    assert len(set(losses[True])) == 6, losses\n")
        self.finish(self.start(program))

    @tier.deep
    def test_what_a_layer_costs_to_send(self):
        out = self.folder / "communication.json"
        program = (PROGRAMS / "communication.py", "--config", "tiny", "--sends", "2", "--sequences", "2", "--repeats",
                   "2", "--out", out)
        output = self.finish(self.start(*program))
        found = json.loads(out.read_text(encoding="utf-8"))
        parameters = found["layer_parameters"]
        self.assertEqual(found["bytes_sent"], {"gather": parameters, "reduce": 2 * parameters, "both": 3 * parameters})
        for name, ms in found["alone_ms"].items():
            self.assertGreater(ms, 0, name)
        self.assertAlmostEqual(found["bytes_per_s"]["both"] * found["alone_ms"]["both"], 3e3 * parameters, delta=1)
        self.assertEqual(len(found["beside"]), 6)
        for pair in found["beside"]:
            self.assertAlmostEqual(pair["compute_times_slower"] * found["alone_ms"][pair["compute"]],
                                   pair["compute_ms"])
            self.assertGreater(pair["collective_ms"], 0)
        self.assertIn("reduce beside copy: ", output)
        alone = self.alone(*program)
        self.assertEqual(alone.returncode, 2, alone.stderr)
        self.assertIn("1 process: has nobody to send to", alone.stderr)

    def test_terminated_while_it_waits(self):
        """As torchrun does it: SIGTERM to a rank whose main thread is in a call that runs no handler of Python's."""
        program = (f"import sys; sys.path.insert(0, {str(PROGRAMS)!r})\n"
                   "import hashlib, pathlib, train\n"
                   "train.end_when_terminated(pathlib.Path('gone'), 3)\n"
                   "print('ready', flush=True)\n"
                   "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)\n")
        process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", program], text=True, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        self.assertEqual(process.stdout.readline(), "ready\n")
        process.terminate()
        _, complaint = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 1, complaint)
        self.assertEqual(complaint, "train.py: rank 3: stopped by SIGTERM, as torchrun sends when another rank is "
                                    "lost; no checkpoint was written yet; start again\n")


if __name__ == "__main__":
    unittest.main()
