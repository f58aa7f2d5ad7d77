# SPDX-License-Identifier: Apache-2.0
"""AdamW whose update of a large matrix is one compiled pass over its memory, clipping by the norm of all gradients.

torch's fused kernel divides a gradient by grad_scale and writes it back, 32 bytes for each fp32 parameter, at 60 % of
the rate at which an H200 reads and writes memory; this one reads the gradient alone, 28 bytes.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

CLIP = 1.0
LARGE = 1 << 20  # parameters of a rank from which a call of its own is worth its launch


def update(p, gradient, average, square, numbers, beta1: float, beta2: float, decay: float) -> None:
    """AdamW in place. numbers: [factor of the gradient, rate, rate / (1 - beta1^t), 1 / sqrt(1 - beta2^t), eps]."""
    g = gradient * numbers[0]
    m = average + (g - average) * (1 - beta1)
    v = square * beta2 + g * g * (1 - beta2)
    average.copy_(m)
    square.copy_(v)
    p.copy_(p * (1 - numbers[1] * decay) - numbers[2] * m / (v.sqrt() * numbers[3] + numbers[4]))


def local(tensor) -> torch.Tensor:
    """What this rank has of it, as one row."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).view(-1)


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW, and its state, with `update` for large parameters where it is compiled: on GPUs. All
    parameters of a group have taken equally many steps. `grad_scale` is what gradients are divided by, or None."""

    def __init__(self, groups, betas: tuple, compiled: bool):
        super().__init__(groups, betas=betas, fused=True)
        self.grad_scale = None
        self.update = torch.compile(update, dynamic=False, fullgraph=True) if compiled else None

    @torch.no_grad()
    def step(self, closure=None):
        if self.update is None:
            return super().step(closure)
        for group in self.param_groups:
            lists = parameters, gradients, averages, squares, _, steps = [], [], [], [], [], []
            self._init_group(group, *lists)
            if not parameters:
                continue
            torch._foreach_add_(steps, 1)
            numbers, beta1, beta2 = self._numbers(group, steps[0]), *group["betas"]
            small = []
            for tensors in zip(parameters, gradients, averages, squares, steps, strict=True):
                if local(tensors[0]).numel() >= LARGE:
                    self.update(*map(local, tensors[:4]), numbers, beta1, beta2, group["weight_decay"])
                else:
                    small.append(tensors)
            self._fused(group, small)
        return None

    def _numbers(self, group: dict, step) -> torch.Tensor:
        beta1, beta2 = group["betas"]
        t = step.double()
        one, rate = torch.ones_like(t), torch.full_like(t, group["lr"])
        factor = one if self.grad_scale is None else self.grad_scale.double().reciprocal()
        return torch.stack((factor, rate, rate / (1 - beta1**t), (1 - beta2**t).rsqrt(), one * group["eps"])).float()

    def _fused(self, group: dict, tensors: list) -> None:
        """torch's update of many small parameters by one launch."""
        if not tensors:
            return
        parameters, gradients, averages, squares, steps = zip(*tensors, strict=True)
        beta1, beta2 = group["betas"]
        torch._fused_adamw_(
            *(list(map(local, part)) for part in (parameters, gradients, averages, squares)), [], list(steps),
            lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"],
            amsgrad=False, maximize=False, grad_scale=self.grad_scale, found_inf=None)


def clipped_step(optimizer, parameters) -> torch.Tensor:
    """Norm of the gradient; the optimizer's step with it clipped to CLIP. The optimizer divides gradients as it reads
    them, so that clipping writes nothing of its own."""
    # A kernel for each tensor: the one for many reads memory at a quarter of its rate.
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=False)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    optimizer.grad_scale = ((norm + 1e-6) / CLIP).clamp(min=1.0)
    optimizer.step()
    return norm
