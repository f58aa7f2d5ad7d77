# SPDX-License-Identifier: Apache-2.0
"""An fp32 router beside bf16 experts on a GPU: as on the CPU, at few tokens, captured, and the size of its memory."""


import gpu
import router_dtype_test
import tessera
import torch


class RouterDType(router_dtype_test.RouterDType):
    device = "cuda"
    dlogits_rounding = 2.0**-17  # dlogits are the sum of two bf16 there

    def test_few_tokens_and_odd_sizes(self):
        """By kernels for few tokens, and by those for any size."""
        for tokens, hidden in ((1, 64), (5, 64), (5, 62)):
            x = self.bf16(torch.randn(tokens, hidden))
            w_router = torch.randn(8, hidden, device="cuda") / hidden**0.5
            logits = tessera.route(x, w_router, top_k=2)[2]
            self.assert_sum(logits, x.float(), w_router.mT, "logits")

    def test_captured(self):
        leaves = self.leaves()

        def step():
            o = self.call(leaves)
            return o.detach(), *torch.autograd.grad(o, leaves, self.d_o)

        wanted = step()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step()
        for _ in range(2):
            for result in results:
                result.fill_(float("nan"))
            graph.replay()
            for a, b in zip(results, wanted, strict=True):
                self.assertTrue(torch.equal(a, b))


if __name__ == "__main__":
    gpu.main()
