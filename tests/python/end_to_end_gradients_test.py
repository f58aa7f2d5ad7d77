# SPDX-License-Identifier: Apache-2.0
"""bench/end_to_end/gradients.py: gradients sent in bf16 and added up in fp32."""

import pathlib
import sys
import tempfile
import unittest
from unittest import mock

import programs
import tier
import torch
from torch import distributed

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = ROOT / "bench" / "end_to_end"
sys.path.insert(0, str(PROGRAMS))

import gradients  # noqa: E402

AVERAGE = distributed.ReduceOp.AVG


class Ranks:
    """Stands in for a group of so many processes, of which one is looked at: it gets what `given` holds."""

    def __init__(self, given: list):
        self.given = given

    def size(self) -> int:
        return len(self.given)

    def all_to_all(self, received, sent, group):
        received.copy_(torch.cat([part.view(torch.uint8) for part in self.given]))


def reduced(given: list) -> torch.Tensor:
    """What a rank has whose part of the gradients of all ranks is `given`, bf16 each."""
    ranks, reduce = Ranks(given), gradients.SentInBf16()
    sent = reduce.allocate((len(given) * given[0].numel(),), dtype=torch.bfloat16, device="cpu")
    came = reduce.allocate((given[0].numel(),), dtype=torch.bfloat16, device="cpu")
    with mock.patch.object(distributed, "all_to_all_single", ranks.all_to_all):
        reduce(came, sent, ranks, AVERAGE)
    return came


class Sums(unittest.TestCase):
    def test_no_sum_is_rounded_to_bf16(self):
        for ranks in (2, 4):
            generator = torch.Generator().manual_seed(ranks)
            given = [torch.randn(300, generator=generator).bfloat16() for _ in range(ranks)]
            wanted = torch.stack(given).double().mean(dim=0)
            came = reduced(given)
            self.assertEqual(came.dtype, torch.float32)
            self.assertLess((came - wanted).abs().max().item(), 1e-6)
            self.assertGreater((wanted.bfloat16() - wanted).abs().max().item(), 1e-3)

    def test_one_after_the_other(self):
        """A module reduces in every step: what is sent and what comes of it are told apart each time."""
        reduce = gradients.SentInBf16()
        for _ in range(2):
            sent = reduce.allocate((4,), dtype=torch.bfloat16, device="cpu")
            came = reduce.allocate((2,), dtype=torch.bfloat16, device="cpu")
            self.assertEqual((sent.dtype, came.dtype), (torch.bfloat16, torch.float32))
            ranks = Ranks([torch.ones(2).bfloat16(), torch.full((2,), 2.0).bfloat16()])
            with mock.patch.object(distributed, "all_to_all_single", ranks.all_to_all):
                reduce(came, sent, ranks, AVERAGE)
            self.assertEqual(came.tolist(), [1.5, 1.5])

    def test_what_it_cannot_do_is_said(self):
        reduce = gradients.SentInBf16()
        with self.assertRaisesRegex(ValueError, "gradients are torch.float32: .* use --send-gradients fp32"):
            reduce.allocate((4,), dtype=torch.float32, device="cpu")
        sent = reduce.allocate((4,), dtype=torch.bfloat16, device="cpu")
        came = reduce.allocate((2,), dtype=torch.bfloat16, device="cpu")
        for arguments in ((came, sent.clone(), None, AVERAGE), (came.bfloat16(), sent, None, AVERAGE),
                          (came, sent, None, distributed.ReduceOp.SUM), (came, sent, None, AVERAGE, True)):
            reduce.input = sent
            with self.assertRaisesRegex(RuntimeError, "in another way: use --send-gradients fp32"):
                reduce(*arguments)


PROGRAM = f"""
import sys; sys.path.insert(0, {str(PROGRAMS)!r})
import gradients, torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
distributed.init_process_group("gloo")
mesh, found = init_device_mesh("cpu", (distributed.get_world_size(),)), {{}}
for narrow in (False, True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 33), nn.Tanh(), nn.Linear(33, 5))  # rows that two ranks cannot share evenly
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=None if narrow else torch.float32)
    for part in (model[0], model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
        if narrow:
            part.set_custom_reduce_scatter(gradients.SentInBf16())
    torch.manual_seed(1 + distributed.get_rank())
    for _ in range(2):  # gradients of two passes add up
        (model(torch.randn(7, 12)) ** 2).sum().backward()
    found[narrow] = [p.grad.to_local() for p in model.parameters()]
for wide, narrow in zip(found[False], found[True], strict=True):
    assert narrow.dtype == torch.float32 and torch.equal(wide, narrow), (wide, narrow)
    assert wide.numel() == 0 or wide.abs().max() > 0.01
    assert not torch.equal(wide, wide.bfloat16().float()) or wide.numel() < 20
distributed.destroy_process_group()
"""


@tier.deep
class Processes(unittest.TestCase):
    def test_bits_of_two_ranks_are_those_of_fsdp(self):
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder, "program.py")
            program.write_text(PROGRAM, encoding="utf-8")
            programs.finish(programs.start_ranks(2, program))


if __name__ == "__main__":
    unittest.main()
