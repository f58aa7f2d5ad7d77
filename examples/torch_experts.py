# SPDX-License-Identifier: Apache-2.0
"""tessera.MoE in torch's own operations: what the other examples compare with."""

import tessera
import torch
from torch.nn import functional


def grouped_mm_experts(x, ids, scores, w_up, w_down):
    """Sort, gather, two grouped products, weight, add: the way that is usual in torch. SwiGLU, gate rows first."""
    top_k = ids.shape[1]
    sorted_ids, order = ids.flatten().sort(stable=True)
    token = order // top_k
    # Not bincount, for whose length the host waits.
    ends = torch.searchsorted(sorted_ids, torch.arange(w_up.shape[0], device=ids.device, dtype=ids.dtype), right=True,
                              out_int32=True)
    gate, up = functional.grouped_mm(x[token], w_up.mT, offs=ends).chunk(2, dim=-1)
    y = functional.grouped_mm(functional.silu(gate) * up, w_down.mT, offs=ends)
    y = y * scores.flatten()[order, None].to(y.dtype)
    return torch.zeros_like(x).index_add(0, token, y)


def eager_experts(x, ids, scores, w_up, w_down):
    """One expert after the other, as most models are first written."""
    o = torch.zeros_like(x)
    for e, (up_rows, down_rows) in enumerate(zip(w_up.unbind(), w_down.unbind(), strict=True)):
        token, k = torch.where(ids == e)
        gate, up = functional.linear(x[token], up_rows).chunk(2, dim=-1)
        y = functional.linear(functional.silu(gate) * up, down_rows)
        o = o.index_add(0, token, y * scores[token, k, None].to(y.dtype))
    return o


class TorchMoE(tessera.MoE):
    """The module with the same parameters, its router topk-softmax; experts: one of the functions above."""

    def __init__(self, *sizes, experts_function=eager_experts, **options):
        super().__init__(*sizes, **options)
        if self.router != "topk-softmax":
            raise NotImplementedError(f"router={self.router}: this example has topk-softmax only")
        self.experts_function = experts_function

    def forward(self, x, return_router: bool = False):
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        rows, w_router, w_up, w_down = (t.to(dtype) for t in (x.reshape(-1, x.shape[-1]), self.w_router, self.w_up,
                                                              self.w_down))
        with torch.autocast(device, enabled=False):
            logits = rows.float() @ w_router.float().mT
            top_logits, ids = logits.topk(self.top_k, dim=-1)
            scores = top_logits.softmax(dim=-1)
            o = self.experts_function(rows, ids, scores, w_up, w_down).view(x.shape)
        counts = torch.bincount(ids.flatten(), minlength=logits.shape[1])
        router = tessera.RouterOutput(logits, ids, scores.detach(), counts, counts, None)
        return (o, router) if return_router else o
