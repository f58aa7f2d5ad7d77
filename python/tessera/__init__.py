# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-Experts layers for PyTorch on the CPU and on Hopper GPUs.

    import tessera
    o = tessera.moe(x, w_router, w_up, w_down, top_k=8)      # router and experts
    o = tessera.routed_experts(x, ids, weights, w_up, w_down)  # ids and weights from elsewhere

Importing the package needs neither torch nor a GPU; the first use of a layer imports torch. Where torch is imported,
the operators tessera::* are registered with it, so that saved programs that call them load.
"""

import importlib
from typing import TYPE_CHECKING

from tessera.registration import register_with_torch

_HOME = {
    "Activation": "layer_options",
    "ExpertParallel": "expert_parallel",
    "Losses": "layer_options",
    "MoE": "module",
    "Rounding": "layer_options",
    "RouterOptions": "layer_options",
    "RouterOutput": "functional",
    "SharedExpert": "layer_options",
    "WeightCodes": "weight_codes",
    "check_device_values": "functional",
    "empty_cache": "functional",
    "grouped_experts": "functional",
    "grouped_gemm": "functional",
    "grouped_gemm_wgrad": "functional",
    "load_balancing_loss": "losses",
    "sequence_balance_loss": "losses",
    "moe": "functional",
    "quantise_weights": "weight_codes",
    "register_huggingface": "huggingface",
    "route": "functional",
    "routed_experts": "functional",
    "selection_bias_update": "losses",
    "use_unproven_kernels": "library",
    "z_loss": "losses",
}

_MODULES = ("losses",)  # as attributes, without an import of their own

__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from tessera.expert_parallel import ExpertParallel
    from tessera.functional import (
        RouterOutput, check_device_values, empty_cache, grouped_experts, grouped_gemm, grouped_gemm_wgrad, moe,
        route, routed_experts,
    )
    from tessera.huggingface import register_huggingface
    from tessera.layer_options import Activation, Losses, Rounding, RouterOptions, SharedExpert
    from tessera.library import use_unproven_kernels
    from tessera.losses import load_balancing_loss, selection_bias_update, sequence_balance_loss, z_loss
    from tessera.module import MoE
    from tessera.weight_codes import WeightCodes, quantise_weights


def __getattr__(name: str):
    if name == "__version__":
        from tessera import library
        value = library.version()
    elif name in _HOME or name in _MODULES:
        try:
            module = importlib.import_module(f"tessera.{_HOME.get(name, name)}")
            value = getattr(module, name) if name in _HOME else module
        except ModuleNotFoundError as missing:
            raise ImportError(f"tessera.{name} needs {missing.name}; pip install {missing.name}") from missing
    else:
        raise AttributeError(f"module 'tessera' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES, "__version__"})


register_with_torch()
