# SPDX-License-Identifier: Apache-2.0
"""transformers on two processes: FSDP2 with torch's distributed checkpoints, and accelerate."""

import functools
import tempfile
import unittest

import frameworks

frameworks.needs("torch", "transformers", "accelerate")

STEPS = 6


@functools.cache
def run(way: str, experts: str, begin: int = 0, end: int = STEPS, folder: str = "") -> dict:
    return frameworks.ranks("huggingface_program.py", {"way": way, "experts": experts, "from": begin, "to": end,
                                                       "folder": folder})


class Fsdp2(unittest.TestCase):
    def test_losses_and_a_resumed_run(self):
        """Within 1e-5 of the model's own experts; a run resumed after three steps has the bits of one that went on."""
        whole, stock = run("fsdp2", "tessera"), run("fsdp2", "eager")
        frameworks.check_losses(self, whole["losses"], stock["losses"], 1e-5, run("fsdp2", "zeros")["losses"])
        with tempfile.TemporaryDirectory() as folder:
            first = run("fsdp2", "tessera", 0, 3, folder)
            second = run("fsdp2", "tessera", 3, STEPS, folder)
        self.assertEqual(first["losses"] + second["losses"], whole["losses"])
        self.assertEqual(second["bits"], whole["bits"])
        self.assertNotEqual(first["bits"], whole["bits"])


class Accelerate(unittest.TestCase):
    def test_losses(self):
        """DDP; on a CPU accelerate ignores its FSDP plug-in. Both ranks together are what FSDP2 trains."""
        mine, stock = (run("accelerate", experts)["losses"] for experts in ("tessera", "eager"))
        frameworks.check_losses(self, mine, stock, 1e-5, run("fsdp2", "zeros")["losses"])


if __name__ == "__main__":
    unittest.main()
