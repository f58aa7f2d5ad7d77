# SPDX-License-Identifier: Apache-2.0
"""tessera.MoE: the layer with its parameters as a torch module."""

import math
import warnings

import torch
from torch import nn

from tessera import functional
from tessera.activation import activate
from tessera.options import GATED, Options
from tessera.losses import router_losses, selection_bias_update


def _warn_of_constant_scores(experts: int, top_k: int, router: str, normalize_scores: bool) -> None:
    normalized = ", normalize_scores" if normalize_scores else ""
    remedy = "" if experts == 1 else 'router="softmax-topk", or '
    warnings.warn(f"experts={experts}, top_k={top_k}, router={router}{normalized}: every score is one number whatever "
                  "the logits are, so the gradient of w_router through the output is always 0 and the router cannot "
                  f'learn; use {remedy}router="sigmoid-bias" without normalize_scores', stacklevel=3)


class MoE(nn.Module):
    """A Mixture-of-Experts layer: x [...,hidden] -> o [...,hidden].

    Parameters: w_router [E,d], w_up [E,w*n,d], w_down [E,d,n] in the layout of Hugging Face and Megatron (gate rows,
    then up rows); with bias: b_up, b_down; with router_bias: b_router. With selection_bias, a buffer of that name is
    added to the keys that choose, and `update_selection_bias(counts)` balances the experts with it.
    shared_intermediate: width of an expert that sees every token (0: none), its output scaled by
    sigmoid(x . w_shared_gate) with shared_gate (Qwen2).
    router_dtype: of w_router and b_router, torch.float32 beside bf16 experts, or dtype (None). An fp32 one stays fp32
    in to(), bfloat16() and their like, and when a checkpoint of another type is loaded.
    balance_coefficient, z_coefficient, sequence_balance_coefficient: weights of the auxiliary losses, see
    auxiliary_loss.
    main_grad: weight gradients of the experts are added to `weight.main_grad` where a weight has one, instead of
    being returned (not under torch.compile, which returns them). Frozen weights get none.
    rounding, tile: token rounding, in training mode only; the stochastic kinds draw from (seed, self.step, layer), so
    set `step` once per optimizer step. torch.compile takes integers on a module for constants and compiles again for
    each step, unless torch._dynamo.config.allow_unspec_int_on_nn_module is set.
    Router, activation, save and column_chunk: as for `tessera.moe`.
    ValueError for options that contradict each other or that the layer would not read. UserWarning where the router
    cannot learn, every score being one number whatever the logits are: top_k=1 with topk-softmax, for example.

        layer = tessera.MoE(hidden=1024, intermediate=512, experts=64, top_k=8)
        o = layer(x)
    """

    def __init__(self, hidden: int, intermediate: int, experts: int, top_k: int, *, router: str = "topk-softmax",
                 router_bias: bool = False, selection_bias: bool = False, route_scale: float = 1.0,
                 normalize_scores: bool = False, groups: int = 0, top_groups: int = 0, activation: str = "swiglu",
                 alpha: float = 1.702, limit: float = 7.0, up_offset: float = 1.0, bias: bool = False,
                 shared_intermediate: int = 0, shared_gate: bool = False, balance_coefficient: float = 0.0,
                 z_coefficient: float = 0.0, rounding: str = "none", tile: int = 128, seed: int = 0, layer: int = 0,
                 capacity: int = 0, column_chunk: int = 0, save: str = "h", main_grad: bool = False, device=None,
                 dtype=None, router_dtype=None, sequence_balance_coefficient: float = 0.0):
        super().__init__()
        for name, value in (("hidden", hidden), ("intermediate", intermediate), ("experts", experts)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        if not 1 <= top_k <= experts:
            raise ValueError(f"top_k={top_k}, experts={experts}: a router chooses between 1 and all experts")
        if router == "given":
            raise ValueError("router=given: MoE has a router of its own; call tessera.routed_experts with ids")
        if shared_gate and not shared_intermediate:
            raise ValueError("shared_gate: it scales a shared expert, and shared_intermediate=0 makes none; leave it "
                             "out, or give that expert's width")
        if balance_coefficient and router == "expert-choice":
            raise ValueError(f"balance_coefficient={balance_coefficient} with router expert-choice: its experts have "
                             "equal counts, so that the loss is a constant; leave it out")
        self.top_k, self.router, self.rounding, self.step = top_k, router, rounding, 0
        self._draws = rounding in ("sr-f", "nr-s")
        self.main_grad = main_grad
        if sequence_balance_coefficient and (rounding != "none" or router == "expert-choice"):
            raise ValueError(f"sequence_balance_coefficient={sequence_balance_coefficient}, router={router}, "
                             f"rounding={rounding}: a loss per sequence needs top_k experts for every token; leave it "
                             "out")
        self.balance_coefficient, self.z_coefficient = balance_coefficient, z_coefficient
        self.sequence_balance_coefficient = sequence_balance_coefficient
        self._activation = (activation, alpha, limit, up_offset)
        options = {"router": router, "top_k": top_k, "route_scale": route_scale, "normalize_scores": normalize_scores,
                   "groups": groups, "top_groups": top_groups, "activation": activation, "alpha": alpha,
                   "limit": limit, "up_offset": up_offset, "capacity": capacity, "save": save,
                   "column_chunk": column_chunk}
        rounded = {**options, "rounding": rounding, "tile": tile, "seed": seed, "layer": layer}
        if Options(**rounded).check(hidden=hidden, intermediate=intermediate, experts=experts):
            _warn_of_constant_scores(experts, top_k, router, normalize_scores)
        # By (training, return_router).
        self._texts = {(training, logits): functional.options_text(**(rounded if training else options), logits=logits)
                       for training in (False, True) for logits in (False, True)}
        width = (2 if activation in GATED else 1) * intermediate

        def parameter(*shape, dtype=dtype):
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        own = dtype or torch.get_default_dtype()
        if router_dtype not in (None, torch.float32, own):
            raise ValueError(f"router_dtype={router_dtype}: torch.float32, or dtype, which is {own}")
        self._keeps_router_fp32 = router_dtype is torch.float32
        self.w_router = parameter(experts, hidden, dtype=router_dtype or dtype)
        self.b_router = parameter(experts, dtype=router_dtype or dtype) if router_bias else None
        self.w_up, self.w_down = parameter(experts, width, hidden), parameter(experts, hidden, intermediate)
        self.b_up = parameter(experts, width) if bias else None
        self.b_down = parameter(experts, hidden) if bias else None
        shared_width = width // intermediate * shared_intermediate
        self.w_shared_up = parameter(shared_width, hidden) if shared_intermediate else None
        self.w_shared_down = parameter(hidden, shared_intermediate) if shared_intermediate else None
        self.w_shared_gate = parameter(1, hidden) if shared_intermediate and shared_gate else None
        zeros = torch.zeros(experts, device=device, dtype=torch.float32) if selection_bias else None
        self.register_buffer("selection_bias", zeros)
        self.reset_parameters()

    def _apply(self, fn, recurse=True):
        """As nn.Module's, behind to(), bfloat16() and their like; but the selection bias stays in fp32, and so does a
        router whose router_dtype says so."""
        bias, router = self.selection_bias, self._fp32_router()
        super()._apply(fn, recurse)
        for name, (values, gradient) in router.items():
            parameter = getattr(self, name)
            if parameter.dtype is not torch.float32:
                device = parameter.device
                parameter.grad = None
                parameter.data = values.to(device)
                parameter.grad = None if gradient is None else gradient.to(device)
        if bias is not None and self.selection_bias.dtype is not torch.float32:
            self.selection_bias = bias.to(self.selection_bias.device)
        return self

    def _fp32_router(self) -> dict:
        """(values, gradient) of each parameter of the router that stays fp32."""
        names = ("w_router", "b_router") if self._keeps_router_fp32 else ()
        present = {name: getattr(self, name) for name in names}
        return {name: (p.data, None if p.grad is None else p.grad.data) for name, p in present.items() if p is not None}

    def _load_from_state_dict(self, *arguments):
        """As nn.Module's; with assign=True the selection bias and an fp32 router would have the type that they have
        there."""
        super()._load_from_state_dict(*arguments)
        for name, (values, _) in self._fp32_router().items():
            getattr(self, name).data = values.float()
        if self.selection_bias is not None:
            self.selection_bias = self.selection_bias.float()

    def reset_parameters(self) -> None:
        """Uniform weights of variance 1/(3 * fan-in), as nn.Linear; biases 0, the selection bias too."""
        for name, parameter in self.named_parameters(recurse=False):
            if name.startswith("b_"):
                nn.init.zeros_(parameter)
            else:
                bound = 1 / math.sqrt(parameter.shape[-1])
                nn.init.uniform_(parameter, -bound, bound)
        if self.selection_bias is not None:
            nn.init.zeros_(self.selection_bias)

    def extra_repr(self) -> str:
        experts, hidden, intermediate = self.w_down.shape
        return (f"hidden={hidden}, intermediate={intermediate}, experts={experts}, top_k={self.top_k}, "
                f"router={self.router}, activation={self._activation[0]}")

    def forward(self, x, return_router: bool = False, mask=None):
        """o, or (o, RouterOutput) with return_router: logits, ids, weights, and counts [E], all on the device.

        mask [...] bool: False for padding, which gets o = 0 and takes part in nothing (`tessera.moe`). Give it to
        auxiliary_loss too.
        """
        weights = (self.w_up, None, self.w_down, self.b_up, None, self.b_down)
        buffers = None
        if self.main_grad and not torch.compiler.is_compiling():
            buffers = tuple(getattr(weight, "main_grad", None) for weight in weights)
            buffers = buffers if any(buffer is not None for buffer in buffers) else None
        choice = (self.top_k, self.router, self.rounding if self.training else "none")
        text = self._texts.get((self.training, return_router))
        if text is None:
            raise TypeError(f"return_router={return_router}: must be True or False; torch.fx.symbolic_trace, which has "
                            "neither, is not served: use torch.compile or torch.export")
        result = functional.moe_with(text, choice, x, (self.w_router, self.b_router, self.selection_bias), weights,
                                     return_router, buffers, self.step if self.training and self._draws else 0, mask)
        if self.w_shared_up is None:
            return result
        if mask is None:
            shared = self._shared(x)
        else:
            real = mask.unsqueeze(-1)
            shared = torch.where(real, self._shared(torch.where(real, x, 0)), 0)
        return (result[0] + shared, result[1]) if return_router else result + shared

    def _shared(self, x):
        y = nn.functional.linear(x, self.w_shared_up)
        y = nn.functional.linear(activate(y, *self._activation), self.w_shared_down)
        return y if self.w_shared_gate is None else torch.sigmoid(nn.functional.linear(x, self.w_shared_gate)) * y

    def auxiliary_loss(self, router: functional.RouterOutput, mask=None, lengths=None, shape=None):
        """balance_coefficient * load-balancing loss + z_coefficient * z-loss + sequence_balance_coefficient * balance
        loss per sequence, a scalar to add to the training loss. mask: that of forward. The sequences are those of a
        mask [B,S], of shape=(B, S), or of lengths [B] that follow each other; they matter to the loss per sequence
        alone, and are not read while its coefficient is 0, which a schedule may set.

            o, router = layer(x, return_router=True, mask=mask)
            loss = task_loss(o) + layer.auxiliary_loss(router, mask)
        """
        sequences = self.sequence_balance_coefficient
        if not self.balance_coefficient and not self.z_coefficient and not sequences:
            return router.logits.new_zeros(())
        logits, topk_ids = router.logits, None
        if mask is not None and shape is None and lengths is None and mask.dim() == 2:
            shape = mask.shape
        if sequences:
            if shape is None and lengths is None:
                raise ValueError("sequence_balance_coefficient: the sequences are not known; give a mask [B,S], "
                                 "shape=(B, S) or lengths=[B]")
            topk_ids = router.topk_ids
        if lengths is None and shape is not None:
            logits = logits.view(*shape, -1)
            topk_ids = None if topk_ids is None else topk_ids.view(*shape, -1)
        mask = mask if mask is None else mask.reshape(logits.shape[:-1])
        scores = {"sqrtsoftplus": "sqrtsoftplus", "sigmoid-bias": "sigmoid", "group-limited": "sigmoid"}
        return router_losses(logits, router.topk_counts, scores=scores.get(self.router, "softmax"),
                             balance=self.balance_coefficient, z=self.z_coefficient, sequence_balance=sequences,
                             topk_ids=topk_ids, lengths=lengths, mask=mask)

    def update_selection_bias(self, counts, rate: float = 1e-3, centered: bool = False) -> None:
        """Once per optimizer step, with the counts summed over micro-batches and data-parallel ranks."""
        if self.selection_bias is None:
            raise ValueError("selection_bias: this layer has none; make it with MoE(..., selection_bias=True)")
        selection_bias_update(self.selection_bias, counts, rate=rate, centered=centered)
