# SPDX-License-Identifier: Apache-2.0
"""Experts over the GPUs of a process group: what is refused where there are none, and the result where there are.

With GPUs: torchrun --nproc-per-node 2 expert_parallel_test.py compares the group's o with one GPU's, bit for bit.
"""

import ctypes
import os
import unittest

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import tessera
import torch
import torch.distributed as dist
from tessera import expert_parallel, library

SHAPE = {"max_tokens": 300, "hidden": 512, "intermediate": 256, "experts": 16, "top_k": 4}
GPUS = torch.cuda.device_count()
IN_GROUP = GPUS > 0 and "RANK" in os.environ


def setUpModule():
    if IN_GROUP:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    unittest.addModuleCleanup(dist.destroy_process_group)


class Refusals(unittest.TestCase):
    def test_other_devices(self):
        with self.assertRaisesRegex(ValueError, "run on GPUs"):
            tessera.ExpertParallel(**SHAPE, device="cpu")

    def test_unknown_activation(self):
        with self.assertRaisesRegex(ValueError, "activation='tanh'"):
            tessera.ExpertParallel(**SHAPE, activation="tanh", device="cuda:0")

    def test_bad_shape(self):
        with self.assertRaisesRegex(ValueError, "top_k=17"):
            tessera.ExpertParallel(**{**SHAPE, "top_k": 17}, device="cuda:0")

    @unittest.skipIf(GPUS > 0, "this machine has GPUs")
    def test_no_gpu(self):
        with self.assertRaisesRegex(RuntimeError, "torch sees none"):
            tessera.ExpertParallel(**SHAPE)
        with self.assertRaisesRegex(RuntimeError, "cuda:0"):
            tessera.ExpertParallel(**SHAPE, device="cuda:0")

    def test_tensors_of_other_types(self):
        with self.assertRaisesRegex(ValueError, "dtype=torch.float64"):
            expert_parallel._view(torch.zeros(2, dtype=torch.float64))
        with self.assertRaisesRegex(ValueError, "device=cpu"):
            expert_parallel._view(torch.zeros(2))


class Structs(unittest.TestCase):
    """As C lays them out: a window for this desc, of known size."""

    def test_desc(self):
        desc = expert_parallel._Desc(ctypes.sizeof(expert_parallel._Desc), 0, 1, 100, 256, 128, 16, 4, 8, 0, 0, 0, 0, 0,
                                     2.5)
        needed = ctypes.c_size_t()
        library.check(expert_parallel._library().tessera_expert_parallel_window(ctypes.byref(desc),
                                                                                ctypes.byref(needed)))
        rows = 2 * 100 * 256 * (1 + 4)
        self.assertTrue(rows <= needed.value <= rows + 2**17, needed.value)
        desc.time_limit = -1
        with self.assertRaisesRegex(ValueError, "time_limit=-1"):
            library.check(expert_parallel._library().tessera_expert_parallel_window(ctypes.byref(desc),
                                                                                    ctypes.byref(needed)))


@unittest.skipUnless(IN_GROUP, "needs GPUs and torchrun")
class OnGpus(unittest.TestCase):
    def test_equals_one_gpu(self):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for activation in ("swiglu", "gelu"):
            halves = 2 if activation == "swiglu" else 1
            experts = tessera.ExpertParallel(**SHAPE, activation=activation)
            torch.manual_seed(1)
            d, n, e, k = SHAPE["hidden"], SHAPE["intermediate"], SHAPE["experts"], SHAPE["top_k"]
            options = {"dtype": torch.bfloat16, "device": "cuda"}
            w_up, w_down = torch.randn(e, halves * n, d, **options) / 16, torch.randn(e, d, n, **options) / 16
            torch.manual_seed(2 + rank)
            own = slice(rank * e // ranks, (rank + 1) * e // ranks)
            for tokens in (300, 0, 1, 17 + rank):
                x = torch.randn(tokens, d, **options)
                scores, ids = torch.rand(tokens, e, device="cuda").topk(k)
                o = experts(x, ids, scores, w_up[own], w_down[own])
                torch.cuda.synchronize()
                experts.check()
                wanted = tessera.routed_experts(x, ids, scores, w_up, w_down, activation=activation)
                self.assertTrue(torch.equal(o, wanted), f"{activation}, {tokens} tokens")
            dist.barrier()
            experts.close()


if __name__ == "__main__":
    unittest.main()
