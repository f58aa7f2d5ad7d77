# SPDX-License-Identifier: Apache-2.0
"""Parts of examples/train_expert_parallel.py on two ranks."""

import pathlib
import sys
import unittest

import ranks
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))

import train_expert_parallel  # noqa: E402


def gradients(scale: float) -> tuple[list, list]:
    """Gradients of each rank's experts, and of the parameters that all share."""
    torch.manual_seed(3)
    return [scale * torch.randn(4, 5) for _ in range(2)], [scale * torch.randn(3, 6), scale * torch.randn(3)]


def clipped(rank: int, scale: float, shape: tuple) -> tuple:
    """What a rank has after clipping: the gradient of its experts, and the whole ones of all else."""
    names = ("hosts", "local")[-len(shape):]
    mesh, (experts, whole) = init_device_mesh("cpu", shape, mesh_dim_names=names), gradients(scale)
    expert, shared = torch.nn.Parameter(torch.zeros(4, 5)), torch.nn.Linear(6, 3)
    fully_shard(shared, mesh=mesh)
    expert.grad = experts[rank].clone()
    for parameter, grad in zip(shared.parameters(), whole, strict=True):
        parameter.grad = distribute_tensor(grad, mesh, parameter.placements)
    train_expert_parallel.clip([expert], list(shared.parameters()))
    return expert.grad, [parameter.grad.full_tensor() for parameter in shared.parameters()]


class Clipping(unittest.TestCase):
    def test_all_gradients_are_one_vector(self):
        """Those of experts are sums over both ranks, all others means, in shards or, of two hosts, replicated."""
        for scale, shape in ((3.0, (2,)), (3.0, (2, 1)), (0.01, (2,))):  # beyond the bound, and within it
            experts, whole = gradients(scale)
            means = [grad / 2 for grad in experts]
            norm = torch.cat([grad.flatten() for grad in (*means, *whole)]).norm().item()
            self.assertEqual(norm > 1, scale > 1)
            for rank, (own, others) in enumerate(ranks.results(ranks.run(2, clipped, scale, shape))):
                for got, wanted in zip((own, *others), (means[rank], *whole), strict=True):
                    torch.testing.assert_close(got, min(1.0, 1 / norm) * wanted)


if __name__ == "__main__":
    unittest.main()
