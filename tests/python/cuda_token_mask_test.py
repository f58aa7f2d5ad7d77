# SPDX-License-Identifier: Apache-2.0
"""Padding masks on a GPU: as on the CPU, by kernels that start at once and by those for odd sizes, and in graphs."""


import gpu
import tessera
import token_mask_test
import torch


class Masked(token_mask_test.Masked):
    device, dtype, few_tokens_differ = "cuda", torch.bfloat16, True
    tokens, hidden, intermediate, experts = 300, 128, 64, 16

    def test_captured(self):
        """A mask may change between replays."""
        leaves = {"x": self.x.clone().requires_grad_(),
                  **{name: w.clone().requires_grad_() for name, w in self.weights.items()}}
        mask = self.mask.clone()

        def step():
            o, router = tessera.moe(**leaves, top_k=2, router="softmax-topk", return_router=True, mask=mask)
            return o.detach(), router.counts, *torch.autograd.grad(o, list(leaves.values()), self.d_o)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step()
        for changed in (self.mask.flip(0), ~self.mask, torch.ones_like(mask), torch.zeros_like(mask)):
            mask.copy_(changed)
            graph.replay()
            got = [tensor.clone() for tensor in results]
            for a, b in zip(got, step(), strict=True):
                self.assertTrue(torch.equal(a, b))


class Fp32Router(Masked):
    """Whose weights and dlogits are sums of bf16 there."""

    router_dtype = torch.float32


class OddSizes(token_mask_test.Masked):
    """By plain kernels."""

    device, dtype, few_tokens_differ = "cuda", torch.bfloat16, True
    hidden, intermediate, experts = 60, 20, 10

    test_compile = test_operators = test_fake_tensors = None


class OddSizesFp32Router(OddSizes):
    router_dtype = torch.float32


class ManyTokens(token_mask_test.ManyTokens):
    """Several chunks of tokens in the sums of the router's gradient."""

    device, dtype, few_tokens_differ = "cuda", torch.bfloat16, True
    tokens, hidden, intermediate, experts = 6000, 256, 64, 32


if __name__ == "__main__":
    gpu.main()
