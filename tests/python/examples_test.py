# SPDX-License-Identifier: Apache-2.0
"""The examples do what they say, in small."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

import programs
import tessera
import tier
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import finetune_huggingface  # noqa: E402
import memory_against_granularity  # noqa: E402
import train_expert_parallel  # noqa: E402
import train_fsdp  # noqa: E402
import train_transformer  # noqa: E402

# What programs learn from where losses are compared: a text that never changes, so that no draw of it meets an expert
# and the next one at nearly one logit, where another order of sums chooses the other.
LICENSE = ROOT / "LICENSE"
TEXT = LICENSE.read_text(encoding="utf-8")


class Examples(unittest.TestCase):
    def test_transformer_learns(self):
        for router in ("topk-softmax", "sigmoid-bias"):
            lines = []
            result = train_transformer.train(TEXT.encode(), steps=40, hidden=48, layers=1, context=32, batch=8,
                                             intermediate=32, router=router, report=lines.append)
            self.assertLess(result["after"], 0.75 * result["before"])
            self.assertRegex(lines[-1], "held-out bits per byte")

    @tier.deep
    def test_losses_are_those_of_torch_experts(self):
        losses = [train_transformer.train(TEXT.encode(), steps=8, hidden=48, layers=1, context=32, batch=8,
                                          implementation=name, report=lambda _: None)["losses"]
                  for name in train_transformer.IMPLEMENTATIONS]
        for other in losses[1:]:
            torch.testing.assert_close(torch.tensor(other), torch.tensor(losses[0]), rtol=1e-4, atol=0)

    def test_speed_is_that_of_steps_after_the_first(self):
        """A step takes a second, the first two a thousand; the first half of four do not count."""
        class Clock:
            calls = 0

            def perf_counter(self):
                self.calls += 1
                return self.calls + 1000 * min(self.calls, 3)

            monotonic = perf_counter

        with mock.patch.object(train_transformer, "time", Clock()):
            result = train_transformer.train(TEXT.encode(), steps=4, hidden=32, layers=1, context=16, batch=4,
                                             intermediate=32, report=lambda _: None)
        self.assertEqual(result["tokens_per_second"], 4 * 16)

    def test_learning_rate_rises_first_and_is_lower_for_wide_models(self):
        sizes = {"steps": 20, "layers": 1, "heads": 4, "context": 8, "batch": 1, "intermediate": 16,
                 "report": lambda _: None}
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        programs = (lambda hidden: train_transformer.train(TEXT.encode(), hidden=hidden, **sizes),
                    lambda hidden: train_fsdp.train(TEXT.encode(), "tessera", hidden=hidden,
                                                    device=torch.device("cpu"), **sizes))
        for program in programs:
            for hidden, peak in ((48, 3e-3), (96, 3e-3), (384, 7.5e-4)):
                rates, step = [], torch.optim.AdamW.step
                with mock.patch.object(torch.optim.AdamW, "step", autospec=True, side_effect=lambda optimizer: (
                        rates.append(optimizer.param_groups[0]["lr"]), step(optimizer))):
                    program(hidden)
                self.assertEqual(len(rates), 20)
                self.assertAlmostEqual(max(rates), peak, places=12)
                self.assertLess(rates[0], 0.51 * peak)
                self.assertAlmostEqual(rates[-1], peak / 10, places=12)

    @tier.deep
    def test_fsdp_on_two_ranks(self):
        """By torchrun, as documents start examples; the others here start their ranks themselves."""
        result = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
             ROOT / "examples" / "train_fsdp.py", "--text", LICENSE, "--steps", "5",
             "--layers", "1"],
            capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.assertEqual(result.returncode, 0, result.stderr)
        (difference,) = re.findall(r"losses differ by ([0-9.]+) at most", result.stdout)
        self.assertLess(float(difference), 2e-3)
        self.assertEqual(len(re.findall(r"(?:tessera|eager): \d+ tokens/s on 2 ranks", result.stdout)), 2)

    def over_hosts(self, ranks: int, hosts: int, *options) -> list[subprocess.Popen]:
        """The ranks of train_hosts.py."""
        started = programs.start_ranks(ranks, ROOT / "examples" / "train_hosts.py", "--hosts", hosts, "--text", LICENSE,
                                       "--layers", 1, *options)
        self.addCleanup(programs.kill, started)
        return started

    def run_over_hosts(self, *arguments) -> tuple[float, list[float], str]:
        """(how far the losses are apart, those that are printed, all that is printed) of train_hosts.py."""
        printed = "".join(said for said, _ in programs.finish(self.over_hosts(*arguments)))
        (difference,) = re.findall(r"losses differ by (\S+) at most", printed)
        losses = re.findall(r"loss ([0-9.]+)$", printed, re.MULTILINE)
        return float(difference), [float(loss) for loss in losses], printed

    @tier.deep  # several_hosts_test has the layer over hosts, test_experts_over_two_ranks the example
    def test_experts_over_two_pretended_hosts(self):
        """Losses of one process, but for the order of sums, with all else under HSDP."""
        difference, losses, _ = self.run_over_hosts(2, 2, "--steps", "6", "--hidden", "48", "--context", "32")
        self.assertLess(difference, 1e-5)
        self.assertLess(losses[-1], losses[0])

    @tier.deep
    def test_experts_over_three_pretended_hosts(self):
        difference, losses, _ = self.run_over_hosts(6, 3, "--steps", "40", "--batch", "12", "--experts", "12",
                                                    "--overlap")
        self.assertLess(difference, 1e-4)
        self.assertLess(losses[-1], 0.8 * losses[0])

    @tier.deep
    def test_killed_and_resumed_on_other_hosts(self):
        """Two hosts of two ranks are killed, three of two go on, with the losses of one process from the beginning."""
        with tempfile.TemporaryDirectory() as folder:
            options = ("--steps", "12", "--batch", "12", "--experts", "12", "--save", folder, "--save-every", "4")
            killed = self.over_hosts(4, 2, *options)
            for line in killed[0].stdout:
                if line.startswith("saved step 4"):
                    break
            programs.kill(killed)
            saved = sorted(path.parent.name for path in pathlib.Path(folder).glob("step-*/.metadata"))
            self.assertIn(saved, [["step-00000004"], ["step-00000004", "step-00000008"]])
            difference, losses, printed = self.run_over_hosts(6, 3, *options)
            self.assertRegex(printed, f"goes on from step {int(saved[-1][5:])} on 3 hosts")
            self.assertLess(difference, 1e-4)
            self.assertGreater(len(losses), 2)

    def test_nothing_is_gathered_beside_a_pass_of_experts(self):
        """Every parameter is whole while blocks compute, in forward and backward."""
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        sizes = {"hidden": 16, "layers": 3, "heads": 2, "context": 8, "experts": 4, "top_k": 2, "intermediate": 8}
        model, seen = train_transformer.Transformer(tessera.MoE, **sizes), []

        def look(*_):
            seen.append([isinstance(parameter, DTensor) for parameter in model.parameters()])

        experts, others = train_expert_parallel.shard_the_rest(model, init_device_mesh("cpu", (1,)))
        for block in model.blocks:
            block.experts.register_forward_hook(look)
            block.experts.w_down.register_hook(look)
        tokens = torch.zeros(2, 8, dtype=torch.int64)
        for _ in range(2):
            model(tokens, tokens)[0].backward()
        self.assertEqual((len(experts), len(seen)), (6, 12))
        self.assertFalse(any(map(any, seen)))
        self.assertTrue(all(isinstance(parameter, DTensor) for parameter in others))
        self.assertTrue(all(parameter.grad.any() for parameter in experts))

    @tier.deep  # expert_parallel_training_test and several_hosts_test have the layer
    def test_experts_over_two_ranks(self):
        """Losses of one process, but for the order of sums: with all else under FSDP2, several passes for each step,
        and blocks that run again in backward."""
        started = programs.start_ranks(2, ROOT / "examples" / "train_expert_parallel.py", "--text", LICENSE,
                                       "--steps", 6, "--hidden", 48, "--context", 32, "--accumulate", 2, "--checkpoint")
        printed = "".join(said for said, _ in programs.finish(started))
        (difference,) = re.findall(r"losses differ by (\S+) at most", printed)
        self.assertLess(float(difference), 1e-5)
        losses = [float(loss) for loss in re.findall(r"^2 ranks: .*loss ([0-9.]+)$", printed, re.MULTILINE)]
        self.assertLess(losses[-1], losses[0])
        speeds = [float(speed) for speed in re.findall(r" ranks: ([0-9]+) tokens/s", printed)]
        (times,) = re.findall(r"^2 ranks: (\S+) times as many tokens/s as one$", printed, re.MULTILINE)
        self.assertAlmostEqual(float(times), speeds[0] / speeds[1], delta=0.01 * float(times) + 0.01)

    @unittest.skipUnless(torch.cuda.device_count() > 1, "needs two GPUs; run on a machine with them")
    def test_experts_over_two_gpus(self):
        result = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
             ROOT / "examples" / "train_expert_parallel.py", "--text", LICENSE, "--steps", "20"],
            capture_output=True, text=True, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0"})
        self.assertEqual(result.returncode, 0, result.stderr)
        (difference,) = re.findall(r"losses differ by (\S+) at most", result.stdout)
        self.assertLess(float(difference), 2e-2)

    def test_finetuning_is_the_same_with_other_experts(self):
        tessera.register_huggingface()
        losses = [finetune_huggingface.finetune(TEXT, name=None, implementation=implementation, steps=6,
                                                report=lambda _: None) for implementation in ("tessera", "eager")]
        torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-4, atol=0)
        self.assertLess(losses[0][-1], losses[0][0])

    def test_memory_does_not_grow_with_granularity(self):
        coarse, fine = memory_against_granularity.measure(1), memory_against_granularity.measure(16)
        tokens, hidden, width = 1024, 256, 1024
        for row in (coarse, fine):
            slots, experts = tokens * row["top_k"], 4 * row["top_k"]
            exact = 4 * (tokens * hidden + 2 * tokens * width + experts + 1 + 5 * slots)
            self.assertEqual(row["tessera"], exact)
            self.assertEqual(row["tessera, h recomputed"], exact - 4 * 2 * tokens * width)
        self.assertGreater(fine["torch grouped_mm"], 3 * coarse["torch grouped_mm"])


if __name__ == "__main__":
    unittest.main()
