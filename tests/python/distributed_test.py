# SPDX-License-Identifier: Apache-2.0
"""DTensor parameters and FSDP2, in a group of one process on the CPU."""

import copy
import unittest

import tessera
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


class Distributed(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        cls.addClassCleanup(dist.destroy_process_group)
        cls.mesh = init_device_mesh("cpu", (1,))
        torch.manual_seed(0)
        cls.x = torch.randn(9, 32)

    def test_dtensor_weights(self):
        layer = tessera.MoE(32, 16, 8, 2)
        o = layer(self.x)
        o.sum().backward()
        weights = {}
        for name, p in layer.named_parameters():
            placement = Replicate() if name == "w_router" else Shard(0)
            weights[name] = distribute_tensor(p.detach().clone(), self.mesh, [placement])
        for weight in weights.values():
            weight.requires_grad_()
        again = tessera.moe(self.x, **weights, top_k=2)
        self.assertTrue(torch.equal(again, o))
        again.sum().backward()
        for name, parameter in layer.named_parameters():
            self.assertIsInstance(weights[name].grad, DTensor)
            self.assertTrue(torch.equal(weights[name].grad.to_local(), parameter.grad), name)

    def test_dtensor_input(self):
        layer = tessera.MoE(32, 16, 8, 2)
        x = distribute_tensor(self.x, self.mesh, [Replicate()])
        self.assertTrue(torch.equal(layer(x), layer(self.x)))

    def test_fsdp2(self):
        plain = torch.nn.Sequential(tessera.MoE(32, 16, 8, 2),
                                    tessera.MoE(32, 16, 8, 2, shared=tessera.SharedExpert(24)))
        sharded = copy.deepcopy(plain)
        for layer in (*sharded, sharded):
            fully_shard(layer, mesh=self.mesh)
        losses = {}
        for name, model in (("plain", plain), ("sharded", sharded)):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            losses[name] = []
            for _ in range(4):
                loss = (model(self.x) - self.x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[name].append(loss.item())
        self.assertEqual(losses["plain"], losses["sharded"])
        self.assertLess(losses["plain"][-1], losses["plain"][0])


if __name__ == "__main__":
    unittest.main()
