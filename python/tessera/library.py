# SPDX-License-Identifier: Apache-2.0
"""libtessera.so by ctypes: the structs of tessera.h, errors as exceptions, one context per device.

Nothing here knows torch. The library lies beside this file, or, in an editable install, in the package's other folder;
TESSERA_LIBRARY names another one.
"""

import ctypes
import functools
import math
import os
import pathlib
import sys
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t
from ctypes import c_uint32, c_uint64, c_void_p

ABI_VERSION = 1
CPU, CUDA = 0, 1
UNPROVEN_KERNELS = 1
FP32, BF16, FP16, INT32, INT64, UINT8, FP8_E4M3, E8M0 = 1, 2, 3, 4, 5, 6, 7, 8
PASS_FORWARD, PASS_BACKWARD, PASS_BACKWARD_INPUT, PASS_BACKWARD_WEIGHTS, PASS_ROUTE = range(5)


class Struct(Structure):
    """A struct that refuses numbers which its fields would cut: ctypes takes 2**32 + 8 for 8 and 1e-60 for 0."""

    def __init__(self, *values, **named):
        super().__init__(*values, **named)
        named.update(zip([field[0] for field in self._fields_], values, strict=False))
        for name, value in named.items():
            if not isinstance(value, (int, float)):
                continue
            kept = getattr(self, name)
            if isinstance(value, int) and isinstance(kept, int) and kept != value:
                bits, kind = 8 * getattr(type(self), name).size, dict(self._fields_)[name]
                low, high = (0, bits) if kind in (c_uint32, c_uint64) else (f"-2^{bits - 1}", bits - 1)
                raise ValueError(f"{name}={value}: must be in [{low}, 2^{high})")
            if isinstance(kept, float) and (not kept and value or math.isinf(kept) and math.isfinite(value)):
                raise ValueError(f"{name}={value}: beyond fp32, where it would be {kept:g}; choose another number")


class Tensor(Structure):
    _fields_ = [("data", c_void_p), ("dtype", c_int32), ("device_kind", c_int32), ("device_index", c_int32),
                ("rank", c_int32), ("shape", c_int64 * 4), ("stride", c_int64 * 4)]


class Buffer(Structure):
    _fields_ = [("data", c_void_p), ("bytes", c_size_t)]


def _fields(kind, names: str):
    return [(name, kind) for name in names.split()]


class MoeDesc(Struct):
    _fields_ = [
        ("size", c_uint64),
        *_fields(c_int64, "tokens hidden intermediate experts top_k slots"),
        *_fields(c_int32, "dtype activation layout_order layout_orientation layout_block bias"),
        *_fields(c_int32, "score_position save grouping ids_dtype variable_experts reserved"),
        *_fields(c_float, "alpha limit up_offset"),
        *_fields(c_int32, "router normalize_scores groups top_groups round tile"),
        ("route_scale", c_float), ("layer", c_uint32), ("seed", c_uint64), ("step", c_uint64),
        ("capacity", c_int64), *_fields(c_int32, "replay overwrite_h"), ("column_chunk", c_int64),
        *_fields(c_int32, "router_dtype reserved_router precision pow2_scales weight_codes reserved_codes"),
    ]


class ExpertWeights(Structure):
    _fields_ = _fields(Tensor, "w_up w_gate w_down b_up b_gate b_down")


class WeightCodes(Structure):
    _fields_ = _fields(Tensor, "up up_scales down down_scales up_transposed down_transposed")


_WEIGHT_CODES = [("weight_codes_" + name, kind) for name, kind in WeightCodes._fields_]


class ForwardArgs(Struct):
    _fields_ = [
        ("size", c_uint64),
        *_fields(Tensor, "x topk_ids topk_weights token_offsets w_router b_router selection_bias"),
        *_fields(Tensor, "expert_offsets row_scores w_up w_gate w_down b_up b_gate b_down"),
        *_fields(Tensor, "o logits expert_counts h"),
        *_fields(Buffer, "routing workspace"), *_fields(Tensor, "topk_counts token_mask x8 x_scale h_scale"),
        *_WEIGHT_CODES,
    ]


class BackwardArgs(Struct):
    _fields_ = [
        ("size", c_uint64),
        *_fields(Tensor, "d_o x h"), ("routing", Buffer),
        *_fields(Tensor, "w_router b_router w_up w_gate w_down b_up b_gate b_down"),
        *_fields(Tensor, "dx dscores dlogits"),
        *_fields(Tensor, "dw_up dw_gate dw_down db_up db_gate db_down dw_router db_router"),
        *_fields(c_int32, "accumulate reserved"),
        *_fields(Tensor, "dh a_scaled dlogits_saved"), ("workspace", Buffer),
        *_fields(Tensor, "aux_dlogits token_mask x8 x_scale h_scale"), *_WEIGHT_CODES,
    ]


class RouteArgs(Struct):
    _fields_ = [
        ("size", c_uint64),
        *_fields(Tensor, "x w_router b_router selection_bias topk_ids topk_weights logits"),
        ("workspace", Buffer), *_fields(Tensor, "token_offsets token_mask"),
    ]


class RouterLossArgs(Struct):
    _fields_ = [
        ("size", c_uint64), *_fields(Tensor, "logits topk_counts"), ("scope_tokens", c_int64),
        *_fields(c_float, "balance z d_loss reserved"), *_fields(Tensor, "losses dlogits"), ("workspace", Buffer),
        *_fields(Tensor, "token_mask topk_ids sequence_offsets sequence_loss"),
        *_fields(c_float, "sequence_balance reserved_float"),
    ]


class SelectionBiasArgs(Struct):
    _fields_ = [
        ("size", c_uint64), *_fields(Tensor, "topk_counts selection_bias"),
        ("rate", c_float), ("subtract_mean", c_int32),
    ]


class GroupedGemmArgs(Struct):
    _fields_ = [
        ("size", c_uint64), *_fields(c_int32, "kind transpose_b accumulate reserved"),
        *_fields(Tensor, "a b bias expert_offsets c"), ("workspace", Buffer),
    ]


def _path() -> pathlib.Path:
    if chosen := os.environ.get("TESSERA_LIBRARY"):
        return pathlib.Path(chosen)
    beside = pathlib.Path(__file__).with_name("libtessera.so")
    paths = (pathlib.Path(folder, beside.name) for folder in sys.modules[__package__].__path__)
    return next((path for path in (beside, *paths) if path.exists()), beside)


@functools.cache
def load() -> ctypes.CDLL:
    """The library. Errors: RuntimeError where it cannot be loaded or is of another ABI."""
    path = _path()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise RuntimeError(
            f"libtessera.so: {error}; install the package with pip, or set TESSERA_LIBRARY to a build's "
            "lib/libtessera.so") from None
    library.tessera_version.restype = library.tessera_last_error.restype = c_char_p
    found = library.tessera_abi_version()
    if found != ABI_VERSION:
        raise RuntimeError(f"{path}: ABI {found}, this package needs {ABI_VERSION}; install both from one version")
    # Structs are passed by address: ops/prepared_calls.py keeps them prepared.
    for name in ("moe_forward", "moe_backward", "moe_backward_input", "moe_backward_weights", "route", "router_loss",
                 "update_selection_bias", "grouped_gemm"):
        arguments = 3 if name in ("update_selection_bias", "grouped_gemm") else 4
        getattr(library, f"tessera_{name}").argtypes = [c_void_p] * arguments
    library.tessera_context_create_with.argtypes = [c_int32] * 4 + [POINTER(c_void_p)]
    library.tessera_moe_workspace.argtypes = [c_void_p, POINTER(MoeDesc), c_int, POINTER(c_size_t)]
    library.tessera_router_loss_workspace_of.argtypes = [c_void_p, POINTER(MoeDesc), c_int64, POINTER(c_size_t)]
    library.tessera_moe_saved.argtypes = [POINTER(MoeDesc)] + [POINTER(c_size_t)] * 3
    library.tessera_moe_precision.argtypes = [c_void_p, POINTER(MoeDesc), POINTER(c_int32)]
    library.tessera_quantise_weights.argtypes = [c_void_p, POINTER(MoeDesc), POINTER(ExpertWeights),
                                                 POINTER(WeightCodes), c_void_p]
    library.tessera_moe_scores_are_constant.argtypes = [POINTER(MoeDesc), POINTER(c_int32)]
    library.tessera_check_device_values.argtypes = [c_void_p]
    library.tessera_grouped_gemm_workspace.argtypes = [c_void_p, POINTER(GroupedGemmArgs), POINTER(c_size_t)]
    return library


def version() -> str:
    return load().tessera_version().decode()


_EXCEPTIONS = {1: ValueError, 2: NotImplementedError, 5: MemoryError}


def check(code: int) -> None:
    """Raises what the status code means, with the library's text."""
    if code:
        raise _EXCEPTIONS.get(code, RuntimeError)(load().tessera_last_error().decode(errors="replace"))


_contexts: dict[tuple[int, int, int, int], int] = {}
_context_flags = 0
# A forked child has the parent's contexts without their threads.
os.register_at_fork(after_in_child=_contexts.clear)


def context(device_kind: int, device_index: int, num_threads: int) -> int:
    """Handle of the context of a device, made at its first use and kept. num_threads: CPU only."""
    key = (device_kind, device_index, num_threads, _context_flags)
    handle = _contexts.get(key)
    if handle is None:
        made = c_void_p()
        check(load().tessera_context_create_with(*key, byref(made)))
        # Two threads may meet here: the first one's context stays, the other one's is not needed.
        handle = _contexts.setdefault(key, made.value)
        if handle != made.value:
            load().tessera_context_destroy(made)
    return handle


def use_unproven_kernels(allowed: bool = True) -> None:
    """Takes GPUs of compute capability 10.0 (B200) in this process from now on; other GPUs are served as before.

    Their kernels are compiled and emulated, never run on hardware; until this is called, a call on such a GPU raises
    RuntimeError, which says so. Compare results with those of the CPU before they are used.

    Args:
        allowed: False refuses such GPUs again, for calls of shapes that have not been made before.

    Raises:
        Nothing.

    Example:
        >>> tessera.use_unproven_kernels()
        >>> tessera.use_unproven_kernels(False)
    """
    global _context_flags
    _context_flags = UNPROVEN_KERNELS if allowed else 0


def check_device_values(handle: int) -> None:
    check(load().tessera_check_device_values(handle))


def moe_workspace_bytes(handle: int, desc: MoeDesc, pass_: int) -> int:
    needed = c_size_t()
    check(load().tessera_moe_workspace(handle, byref(desc), pass_, byref(needed)))
    return needed.value


def router_loss_workspace_bytes(handle: int, desc: MoeDesc, sequences: int) -> int:
    needed = c_size_t()
    check(load().tessera_router_loss_workspace_of(handle, byref(desc), sequences, byref(needed)))
    return needed.value


def scores_are_constant(desc: MoeDesc) -> bool:
    constant = c_int32()
    check(load().tessera_moe_scores_are_constant(byref(desc), byref(constant)))
    return bool(constant.value)


def chosen_precision(handle: int, desc: MoeDesc) -> int:
    """The number of the precision of `desc`, or of what auto takes on this context."""
    chosen = c_int32()
    check(load().tessera_moe_precision(handle, byref(desc), byref(chosen)))
    return chosen.value


def quantise_weights(handle: int, desc: MoeDesc, weights: ExpertWeights, codes: WeightCodes, stream) -> None:
    check(load().tessera_quantise_weights(handle, byref(desc), byref(weights), byref(codes), stream))


def routing_bytes(desc: MoeDesc) -> int:
    needed = c_size_t()
    check(load().tessera_moe_saved(byref(desc), None, None, byref(needed)))
    return needed.value


def grouped_gemm_workspace_bytes(handle: int, args: GroupedGemmArgs) -> int:
    needed = c_size_t()
    check(load().tessera_grouped_gemm_workspace(handle, byref(args), byref(needed)))
    return needed.value
