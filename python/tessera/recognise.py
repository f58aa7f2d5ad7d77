# SPDX-License-Identifier: Apache-2.0
"""Which of Tessera's activations other code computes, found by running it: names and flags can mislead."""

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tessera.activation import activate
from tessera.options import ACTIVATIONS, GATED

# What attributes are called that may be numbers of a clamped activation.
ALPHAS, LIMITS = ("alpha",), ("limit", "clamp")

# fp64, so that close activations (both GELUs) stay apart, and far enough out to meet any clamp.
_FAR = 10.0 ** torch.linspace(1.5, 5, 8, dtype=torch.float64, device="cpu")
_GRID = torch.cat([torch.linspace(-12, 12, 49, dtype=torch.float64, device="cpu"), _FAR, -_FAR])


def recognise(name: str, compute, gated: bool, owners: tuple) -> dict:
    """The activation options that make Tessera compute what `compute(gate, up)` does, or `compute(h)` if not gated.

    owners: objects whose numbers named like alpha, limit or clamp may be parameters of the activation.
    Modes that are active at the first call of a layer neither see this nor change its tensors.
    Errors: NotImplementedError, beginning with `name`, where nothing fits on the whole grid.
    """
    with _disable_current_modes(), torch.device("cpu"), torch.no_grad():
        return _recognise(name, compute, gated, owners)


def _recognise(name: str, compute, gated: bool, owners: tuple) -> dict:
    inputs = torch.meshgrid(_GRID, _GRID, indexing="ij") if gated else (_GRID[None],)
    try:
        expected = compute(*inputs)
    except Exception as error:
        raise NotImplementedError(f"{name}: its activation could not be tried ({error}); keep its own "
                                  "implementation") from error
    rows = torch.cat(inputs, dim=-1)
    tolerance = 1e-6 * expected.abs().clamp(min=1)
    for options in _candidates(gated, owners):
        ours = activate(rows, **options)
        if ours.shape == expected.shape and ((ours - expected).abs() <= tolerance).all():
            return options
    raise NotImplementedError(f"{name}: its activation is none of Tessera's ({', '.join(ACTIVATIONS)}); keep its own "
                              "implementation")


def _candidates(gated: bool, owners: tuple):
    """Activations without parameters, then clamped ones with every number that the owners could mean."""
    for activation in ACTIVATIONS:
        if activation != "clamped-swiglu" and (activation in GATED) == gated:
            yield {"activation": activation}
    if not gated:
        return
    alphas, limits = {1.0, 1.702}, {float("inf")}
    for owner in owners:
        for key, value in vars(owner).items() if owner is not None else ():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
                if any(word in key for word in ALPHAS):
                    alphas.add(float(value))
                if any(word in key for word in LIMITS):
                    limits.add(float(value))
    for alpha in sorted(alphas):
        for limit in sorted(limits):
            for up_offset in (0.0, 1.0):
                yield {"activation": "clamped-swiglu", "alpha": alpha, "limit": limit, "up_offset": up_offset}
