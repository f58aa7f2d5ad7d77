# SPDX-License-Identifier: Apache-2.0
"""How gradients go from rank to rank under FSDP2: half the bytes for the same sums."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter


class SentInBf16(ReduceScatter):
    """Means of bf16 gradients over all ranks, in fp32. Each rank gets its part of everybody's gradients as they are
    and adds them up in fp32, in the order of ranks. FSDP2 itself widens them first and sends twice the bytes; over two
    ranks the bits are the same. One for each sharded module, whose gradients are bf16."""

    def __init__(self):
        self.input = None

    def allocate(self, size, *, dtype: torch.dtype, device) -> torch.Tensor:
        """FSDP2 asks for what is sent, and then, for each such tensor, for what comes of it, as if of the same
        type."""
        if dtype != torch.bfloat16:
            raise ValueError(f"gradients are {dtype}: only those in bf16 are sent in bf16; use --send-gradients fp32")
        if self.input is None:
            self.input = torch.empty(*size, dtype=dtype, device=device)
            return self.input
        return torch.empty(*size, dtype=torch.float32, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op: bool = False) -> None:
        sent, self.input = self.input, None
        if input_tensor is not sent or output_tensor.dtype != torch.float32 or op != dist.ReduceOp.AVG or async_op:
            raise RuntimeError("this torch's FSDP2 reduces gradients in another way: use --send-gradients fp32")
        parts = torch.empty_like(input_tensor)
        # As bytes, as not every backend knows the type.
        dist.all_to_all_single(parts.view(torch.uint8), input_tensor.view(torch.uint8), group=group)
        torch.mean(parts.view(group.size(), -1), dim=0, dtype=torch.float32, out=output_tensor)
