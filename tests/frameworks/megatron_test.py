# SPDX-License-Identifier: Apache-2.0
"""megatron-core's own MoE layer, its experts spread over two processes, with Tessera's experts and with its own.

The wheels of megatron-core 0.19.2 are for Python 3.12 and later. Its Python sources, all that runs here, load in 3.11
as well, so tools/bootstrap.sh unpacks the one for 3.12 into .venv-frameworks/megatron. What is not tested: GPTModel,
its optimizer, its sharded checkpoints and gradient_accumulation_fusion, which needs its extensions for GPUs.
"""

import os
import pathlib
import unittest

import frameworks

SOURCES = pathlib.Path(frameworks.sys.prefix, "megatron")
os.environ["PYTHONPATH"] = f"{SOURCES}:{os.environ.get('PYTHONPATH', '')}"
frameworks.sys.path.insert(0, str(SOURCES))
frameworks.needs("torch", "megatron-core", "psutil")


class MoELayer(unittest.TestCase):
    def test_losses_are_those_of_its_own_experts(self):
        for dispatcher in ("alltoall", "allgather"):
            with self.subTest(dispatcher=dispatcher):
                found = frameworks.ranks("megatron_program.py", {"dispatcher": dispatcher,
                                                                 "experts": ["stock", "tessera", "zeros"]})
                frameworks.check_losses(self, found["tessera"], found["stock"], 1e-5, found["zeros"])


if __name__ == "__main__":
    unittest.main()
