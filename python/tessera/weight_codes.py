# SPDX-License-Identifier: Apache-2.0
"""Expert weights that are quantised once for all calls of a step."""

import dataclasses

import torch
from torch.compiler import is_compiling

from tessera.layer_call import autocast, local, options_text


def _stamp(weight) -> tuple | None:
    """Where a weight lies, and how often it was written: other numbers mean other values. -1 where torch counts nothing
    (inference tensors) or there is no memory (fake tensors)."""
    if weight is None:
        return None
    weight = local(weight)
    try:
        address = weight.data_ptr()
    except RuntimeError:
        address = -1
    return address, -1 if weight.is_inference() else weight._version


@dataclasses.dataclass(frozen=True, eq=False)
class WeightCodes:
    """Expert weights in e4m3 with a scale for each 128 x 128 of them, as quantise_weights made them: what layers with
    precision fp8 read in place of weights that they would quantise in every call. Formulas: docs/numerics.md.

    w = 2 for gated activations, else 1; gate stands before up, whatever the layout of the weights is.

    Args:
        up: [E,w,n,d] float8_e4m3fn.
        up_scales: [E,n/128,d/128,w] fp32.
        down: [E,d,n] float8_e4m3fn.
        down_scales: [E,d/128,n/128] fp32.
        up_transposed: [E,d,w*n] float8_e4m3fn, or None: without it there is no backward pass.
        down_transposed: [E,n,d] float8_e4m3fn, or None, as up_transposed.
        made_of: Of which weights these are: address and version counter of w_up, w_gate and w_down; None: nobody knows,
            and calls do not look.

    Raises:
        Nothing.

    Example:
        >>> w_up, w_down = torch.randn(8, 2 * 128, 256).bfloat16(), torch.randn(8, 256, 128).bfloat16()
        >>> codes = tessera.quantise_weights(w_up, w_down)
        >>> codes.up.shape, codes.down_scales.shape
        (torch.Size([8, 2, 128, 256]), torch.Size([8, 2, 1]))
    """

    up: torch.Tensor
    up_scales: torch.Tensor
    down: torch.Tensor
    down_scales: torch.Tensor
    up_transposed: torch.Tensor | None = None
    down_transposed: torch.Tensor | None = None
    made_of: tuple | None = None

    def of(self, w_up, w_gate, w_down) -> tuple:
        """The tensors, for a call with these weights.

        Args:
            w_up: The weight that the codes were made of.
            w_gate: As w_up, or None.
            w_down: As w_up.

        Returns:
            The six tensors in the order of the fields, absent ones None.

        Raises:
            ValueError: A weight is another one, or has been written since (not under torch.compile, which knows no
                versions).

        Example:
            >>> w_up, w_down = torch.randn(8, 2 * 128, 256).bfloat16(), torch.randn(8, 256, 128).bfloat16()
            >>> len(tessera.quantise_weights(w_up, w_down).of(w_up, None, w_down))
            6
        """
        if self.made_of is not None and not is_compiling():
            for name, weight, made in zip(("w_up", "w_gate", "w_down"), (w_up, w_gate, w_down), self.made_of,
                                          strict=True):
                stamp = _stamp(weight)
                if stamp == made:
                    continue
                if stamp is None or made is None or stamp[0] != made[0]:
                    raise ValueError(f"weight_codes: they are not those of this {name}; call quantise_weights with the "
                                     "weights of the call")
                raise ValueError(f"weight_codes: {name} has changed since they were made (version {made[1]}, now "
                                 f"{stamp[1]}); call quantise_weights again, once after each optimizer step")
        return self.up, self.up_scales, self.down, self.down_scales, self.up_transposed, self.down_transposed


def quantise_weights(w_up, w_down, *, w_gate=None, activation: str = "swiglu", layout: str = "concat",
                     scales: str = "fp32", transposed: bool = True) -> WeightCodes:
    """Quantises expert weights once, for all calls until they change: moe, routed_experts and grouped_experts with
    precision="fp8" take the result as weight_codes, and have the bits of calls that quantise. On a GPU by its kernels,
    on the current stream.

    Args:
        w_up: [E,w*n,d] bf16, gate and up rows as `layout` says; transposed layouts [E,d,w*n]; [E,n,d] beside w_gate.
            Under autocast other types are cast.
        w_down: [E,d,n] bf16; transposed layouts [E,n,d].
        w_gate: [E,n,d], where the gate's rows are a tensor of their own, or None.
        activation: As of the calls: gated ones have w = 2.
        layout: As of the calls.
        scales: fp32, or pow2 for powers of two, as of the calls.
        transposed: Whether transposed codes are made too, which backward passes read.

    Returns:
        WeightCodes: 1 byte for each weight, 2 with transposed, and the scales.

    Raises:
        ValueError: d or n is no multiple of 128, or a shape, dtype or device is none of these.
        NotImplementedError: On a GPU, where fp8 does not serve such weights.

    Example:
        >>> x, ids, weights = torch.randn(5, 256).bfloat16(), torch.randint(8, (5, 2)), torch.rand(5, 2)
        >>> w_up, w_down = torch.randn(8, 2 * 128, 256).bfloat16(), torch.randn(8, 256, 128).bfloat16()
        >>> codes = tessera.quantise_weights(w_up, w_down)
        >>> o = tessera.routed_experts(x, ids, weights, w_up, w_down, precision="fp8", weight_codes=codes)
        >>> torch.equal(o, tessera.routed_experts(x, ids, weights, w_up, w_down, precision="fp8"))
        True
    """
    text = options_text(activation=activation, layout=layout, precision="fp8", scales=scales)
    weights = (w_up, w_down) if w_gate is None else (w_up, w_down, w_gate)
    with torch.no_grad():
        tensors = tuple([local(weight).detach() for weight in weights])
        if torch._C._is_any_autocast_enabled():
            tensors = autocast(tensors)
        up, down, gate = (*tensors, None)[:3]
        made = torch.ops.tessera.quantise_weights.default(up, gate, down, text, transposed)
    made_of = None if is_compiling() else tuple([_stamp(w) for w in (w_up, w_gate, w_down)])
    return WeightCodes(*made, *[None] * (6 - len(made)), made_of=made_of)
