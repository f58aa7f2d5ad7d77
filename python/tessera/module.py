# SPDX-License-Identifier: Apache-2.0
"""tessera.MoE: the layer with its parameters as a torch module."""

import dataclasses
import math
import warnings

import torch
from torch import nn

from tessera import functional
from tessera.activation import activate
from tessera.layer_options import Activation, Losses, Rounding, RouterOptions, SharedExpert, collect
from tessera.losses import router_losses, selection_bias_update
from tessera.ops.layer import takes_fp8
from tessera.options import GATED, Options
from tessera.weight_codes import quantise_weights


def _warn_of_constant_scores(experts: int, top_k: int, router: str, normalize_scores: bool) -> None:
    normalized = ", normalize_scores" if normalize_scores else ""
    remedy = "" if experts == 1 else 'router="softmax-topk", or '
    warnings.warn(f"experts={experts}, top_k={top_k}, router={router}{normalized}: every score is one number whatever "
                  "the logits are, so the gradient of w_router through the output is always 0 and the router cannot "
                  f'learn; use {remedy}router="sigmoid-bias" without normalize_scores', stacklevel=3)


class MoE(nn.Module):
    """A Mixture-of-Experts layer as a torch module: x [...,hidden] -> o [...,hidden].

    Parameters: w_router [E,d], w_up [E,w*n,d], w_down [E,d,n] in the layout of Hugging Face and Megatron (gate rows,
    then up rows; w = 2 for gated activations, else 1); with bias: b_up [E,w*n], b_down [E,d]; of RouterOptions:
    b_router [E], and the buffer selection_bias [E] fp32; of a shared expert of width s: w_shared_up [w*s,d],
    w_shared_down [d,s], w_shared_gate [1,d].

    Attributes: `weight_codes`, what quantise_weights() left for the calls that follow, or None: then calls in fp8
    quantise the weights themselves. `step`, an integer that stochastic token rounding draws from; set it once per
    optimizer step. torch.compile takes integers on a module for constants and compiles again for each step, unless
    torch._dynamo.config.allow_unspec_int_on_nn_module is set.

    UserWarning where the router cannot learn, every score being one number whatever the logits are: top_k=1 with
    topk-softmax, for example.

    Args:
        hidden: d, at least 1.
        intermediate: n, of each expert, at least 1.
        experts: E, at least 1.
        top_k: K experts per token, 1 to E.
        router: RouterOptions, or its kind alone: topk-softmax, softmax-topk, softmax-topk-renorm, sigmoid-bias,
            group-limited, sqrtsoftplus, expert-choice.
        activation: Activation, or its kind alone: swiglu, geglu, geglu-erf, reglu, clamped-swiglu, relu, relu2, silu,
            gelu, gelu-erf.
        rounding: Rounding, or its kind alone: none, nr-f, sr-f, nr-s, balance-f, up, down. In training mode only.
        shared: SharedExpert, or None for none.
        losses: Losses, the coefficients of auxiliary_loss, or None for none.
        bias: The experts have biases b_up and b_down.
        save: "h" saves the pre-activation for backward, "x" computes it again.
        column_chunk: Most columns of y or dx rows that exist at a time, 0 for all: less workspace, the same bits.
        precision: native, or fp8 or mxfp8, which quantise the operands of bf16 layers, save x and h as codes (half the
            bytes) and need hidden and intermediate in multiples of 128 or 32; or auto: fp8 where a Hopper GPU is
            expected to be faster, else native. GPUs serve them with swiglu and no biases: Hopper fp8 in multiples of
            256, Blackwell mxfp8 in multiples of 128.
        scales: Of fp8: fp32, or pow2 for powers of two.
        main_grad: Weight gradients of the experts are added to `weight.main_grad` where a weight has one, instead of
            being returned (not under torch.compile, which returns them). Frozen weights get none.
        device: Of the parameters; None: torch's default.
        dtype: Of the parameters, torch.float32 or torch.bfloat16; None: torch's default.
        old: Keywords of before 1.0, which build the groups with a DeprecationWarning that names the new spelling:
            router_bias, selection_bias, route_scale, normalize_scores, groups, top_groups, capacity, router_dtype,
            alpha, limit, up_offset, tile, seed, layer, shared_intermediate, shared_gate, balance_coefficient,
            z_coefficient, sequence_balance_coefficient.

    Raises:
        ValueError: Options contradict each other, or the layer would not read them, or a group is given beside an old
            keyword of it.
        TypeError: A keyword is unknown.

    Example:
        >>> layer = tessera.MoE(hidden=16, intermediate=12, experts=8, top_k=2, losses=tessera.Losses(balance=0.01))
        >>> o, router = layer(torch.randn(2, 5, 16), return_router=True)
        >>> loss = o.square().mean() + layer.auxiliary_loss(router)
        >>> o.shape, router.counts.sum().item()
        (torch.Size([2, 5, 16]), 20)
    """

    def __init__(self, hidden: int, intermediate: int, experts: int, top_k: int, *,
                 router: RouterOptions | str = "topk-softmax", activation: Activation | str = "swiglu",
                 rounding: Rounding | str = "none", shared: SharedExpert | None = None, losses: Losses | None = None,
                 bias: bool = False, save: str = "h", column_chunk: int = 0, precision: str = "native",
                 scales: str = "fp32", main_grad: bool = False, device=None, dtype=None, **old):
        super().__init__()
        router, activation, rounding, shared, losses = collect(
            {"router": router, "activation": activation, "rounding": rounding, "shared": shared, "losses": losses}, old)
        for name, value in (("hidden", hidden), ("intermediate", intermediate), ("experts", experts)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        if not 1 <= top_k <= experts:
            raise ValueError(f"top_k={top_k}, experts={experts}: a router chooses between 1 and all experts")
        if router.kind == "given":
            raise ValueError("router=given: MoE has a router of its own; call tessera.routed_experts with ids")
        if losses.balance and router.kind == "expert-choice":
            raise ValueError(f"Losses(balance={losses.balance}) (balance_coefficient) with router expert-choice: its "
                             "experts have equal counts, so that the loss is a constant; leave it out")
        self.top_k, self.router, self.rounding, self.step = top_k, router.kind, rounding.kind, 0
        self._draws = rounding.kind in ("sr-f", "nr-s")
        self.main_grad = main_grad
        self.weight_codes, self._precision, self._scales = None, precision, scales
        if losses.sequence_balance and (rounding.kind != "none" or router.kind == "expert-choice"):
            raise ValueError(f"Losses(sequence_balance={losses.sequence_balance}) (sequence_balance_coefficient), "
                             f"router={router.kind}, rounding={rounding.kind}: a loss per sequence needs top_k "
                             "experts for every token; leave it out")
        self.balance_coefficient, self.z_coefficient = losses.balance, losses.z
        self.sequence_balance_coefficient = losses.sequence_balance
        self._activation = dataclasses.astuple(activation)
        options = {"router": router.kind, "top_k": top_k, "route_scale": router.route_scale,
                   "normalize_scores": router.normalize_scores, "groups": router.groups,
                   "top_groups": router.top_groups, "activation": activation.kind, "alpha": activation.alpha,
                   "limit": activation.limit, "up_offset": activation.up_offset, "capacity": router.capacity,
                   "save": save, "column_chunk": column_chunk, "precision": precision, "scales": scales}
        rounded = {**options, "rounding": rounding.kind, "tile": rounding.tile, "seed": rounding.seed,
                   "layer": rounding.layer}
        if Options(**rounded).check(hidden=hidden, intermediate=intermediate, experts=experts):
            _warn_of_constant_scores(experts, top_k, router.kind, router.normalize_scores)
        # By (training, return_router).
        self._texts = {(training, logits): functional.options_text(**(rounded if training else options), logits=logits)
                       for training in (False, True) for logits in (False, True)}
        width = (2 if activation.kind in GATED else 1) * intermediate

        def parameter(*shape, dtype=dtype):
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        own = dtype or torch.get_default_dtype()
        if router.dtype not in (None, torch.float32, own):
            raise ValueError(f"RouterOptions(dtype={router.dtype}) (router_dtype): torch.float32, or that of the "
                             f"layer, which is {own}")
        self._keeps_router_fp32 = router.dtype is torch.float32
        self.w_router = parameter(experts, hidden, dtype=router.dtype or dtype)
        self.b_router = parameter(experts, dtype=router.dtype or dtype) if router.bias else None
        self.w_up, self.w_down = parameter(experts, width, hidden), parameter(experts, hidden, intermediate)
        self.b_up = parameter(experts, width) if bias else None
        self.b_down = parameter(experts, hidden) if bias else None
        shared_width = width // intermediate * shared.intermediate
        self.w_shared_up = parameter(shared_width, hidden) if shared.intermediate else None
        self.w_shared_down = parameter(hidden, shared.intermediate) if shared.intermediate else None
        self.w_shared_gate = parameter(1, hidden) if shared.gate else None
        zeros = torch.zeros(experts, device=device, dtype=torch.float32) if router.selection_bias else None
        self.register_buffer("selection_bias", zeros)
        self.reset_parameters()

    def _apply(self, fn, recurse=True):
        """As nn.Module's, behind to(), bfloat16() and their like; but the selection bias stays in fp32, and so does a
        router whose router_dtype says so."""
        bias, router = self.selection_bias, self._fp32_router()
        self.weight_codes = None  # of weights that are there no more
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

    def __getstate__(self) -> dict:
        """Of copies and files, which have weights of their own."""
        return {**self.__dict__, "weight_codes": None}

    def quantise_weights(self, transposed: bool = True):
        """Quantises the experts' weights once for all calls until they change, on their device: once after each
        optimizer step. Calls have the bits of calls that quantise; one that follows a change of the weights is refused.
        `layer.weight_codes = None` has calls quantise again, as to() and its like do.

        Args:
            transposed: Whether backward passes are to read the codes.

        Returns:
            WeightCodes, which stay in `weight_codes`; None where precision auto takes native for such weights however
            many tokens there are.

        Raises:
            ValueError: The precision is native or mxfp8, or hidden or intermediate is no multiple of 128.
            NotImplementedError: On a GPU, where fp8 does not serve such weights.

        Example:
            >>> layer = tessera.MoE(256, 128, experts=8, top_k=2, dtype=torch.bfloat16, precision="fp8")
            >>> codes = layer.quantise_weights()
            >>> o = layer(torch.randn(5, 256).bfloat16())
        """
        if self._precision not in ("fp8", "auto"):
            raise ValueError(f"quantise_weights with precision={self._precision}: only layers of fp8 read codes of "
                             "weights; build the layer with precision='fp8' or 'auto'")
        self.weight_codes = None
        if self._precision == "auto" and not self._may_take_fp8():
            return None
        self.weight_codes = quantise_weights(self.w_up, self.w_down, activation=self._activation[0],
                                             scales=self._scales, transposed=transposed)
        return self.weight_codes

    def _may_take_fp8(self) -> bool:
        """Whether auto takes fp8 for some number of tokens. 1024 of them for each expert have at least the rows from
        which it does so with codes (src/cuda/tuning/precision.hpp)."""
        experts, hidden, intermediate = self.w_down.shape
        return takes_fp8(self._texts[True, False], self.w_down.device, tokens=experts << 10, hidden=hidden,
                         intermediate=intermediate, experts=experts, bias=self.b_up is not None)

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
        """Draws uniform weights of variance 1/(3 * fan-in), as nn.Linear; biases become 0, the selection bias too.

        Raises:
            Nothing.
        """
        for name, parameter in self.named_parameters(recurse=False):
            if name.startswith("b_"):
                nn.init.zeros_(parameter)
            else:
                bound = 1 / math.sqrt(parameter.shape[-1])
                nn.init.uniform_(parameter, -bound, bound)
        if self.selection_bias is not None:
            nn.init.zeros_(self.selection_bias)

    def extra_repr(self) -> str:
        """What print(layer) shows.

        Returns:
            Sizes, router and activation.

        Raises:
            Nothing.
        """
        experts, hidden, intermediate = self.w_down.shape
        return (f"hidden={hidden}, intermediate={intermediate}, experts={experts}, top_k={self.top_k}, "
                f"router={self.router}, activation={self._activation[0]}")

    def forward(self, x, return_router: bool = False, mask=None):
        """The layer on x, on its device and its current stream.

        Args:
            x: [...,d] in the type of the experts.
            return_router: Whether the router's results are returned too.
            mask: [...] bool, or None: False for padding, which gets o = 0 and takes part in nothing (`tessera.moe`).
                Give it to auxiliary_loss too.

        Returns:
            o [...,d] in x's type, or (o, RouterOutput) with return_router, all on the device.

        Raises:
            ValueError: A shape, dtype or device does not fit the parameters.
            TypeError: return_router is neither True nor False.

        Example:
            >>> layer = tessera.MoE(16, 12, experts=8, top_k=2)
            >>> layer(torch.randn(3, 16), mask=torch.tensor([True, True, False]))[2].abs().sum().item()
            0.0
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
        codes = self.weight_codes
        if codes is not None:
            text += " weight_codes=True"
        result = functional.moe_with(text, choice, x, (self.w_router, self.b_router, self.selection_bias), weights,
                                     return_router, buffers, self.step if self.training and self._draws else 0, mask,
                                     codes)
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
        """The sum of the losses that the layer has coefficients for, to add to the training loss.

        The sequences of a balance loss per sequence are those of a mask [B,S], of `shape` or of `lengths`. They matter
        to that loss alone, and are not read while its coefficient is 0, which a schedule may set.

        Args:
            router: What forward returned with return_router.
            mask: The mask of forward, or None.
            lengths: [B] int32 or int64: tokens of sequences that follow each other, or None.
            shape: (B, S) of the tokens, or None.

        Returns:
            A scalar in fp32: balance * load_balancing_loss + z * z_loss + sequence_balance * sequence_balance_loss.

        Raises:
            ValueError: A loss per sequence is asked for, and the sequences are not known.

        Example:
            >>> layer = tessera.MoE(16, 12, experts=8, top_k=2, losses=tessera.Losses(sequence_balance=1e-3))
            >>> o, router = layer(torch.randn(2, 5, 16), return_router=True)
            >>> loss = o.square().mean() + layer.auxiliary_loss(router, shape=(2, 5))
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
        """Moves the selection bias towards experts with fewer tokens than the mean; call it once per optimizer step.

        Args:
            counts: [E] of any integer or floating type: RouterOutput.topk_counts, summed over micro-batches and
                data-parallel ranks.
            rate: By how much a bias moves.
            centered: Whether the mean of the update is subtracted (torchtitan).

        Raises:
            ValueError: The layer has no selection bias, or a count is negative or not finite.

        Example:
            >>> router = tessera.RouterOptions("sigmoid-bias", selection_bias=True)
            >>> layer = tessera.MoE(16, 12, experts=8, top_k=2, router=router)
            >>> o, router = layer(torch.randn(5, 16), return_router=True)
            >>> layer.update_selection_bias(router.topk_counts)
        """
        if self.selection_bias is None:
            raise ValueError("selection_bias: this layer has none; make it with "
                             "MoE(..., router=tessera.RouterOptions(kind, selection_bias=True))")
        selection_bias_update(self.selection_bias, counts, rate=rate, centered=centered)
