# SPDX-License-Identifier: Apache-2.0
"""The functions and structs of tessera.h for experts over several GPUs, by ctypes."""

import ctypes
import functools
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_uint64, c_void_p

from tessera import library


class Desc(library.Struct):
    """tessera_expert_parallel_desc of tessera.h."""

    _fields_ = [("size", c_uint64), ("rank", c_int32), ("ranks", c_int32),
                *[(name, c_int64) for name in ("max_tokens", "hidden", "intermediate", "experts", "top_k")],
                ("activation", c_int32), ("partial_combine", c_int32),
                *[(name, c_float) for name in ("alpha", "limit", "up_offset")], ("training", c_int32),
                ("time_limit", c_double), ("sms", c_int32), ("reserved", c_int32)]


def _args(names: str, *others: tuple) -> type:
    fields = [("size", c_uint64), *[(name, library.Tensor) for name in names.split()], *others]
    return type("_Args", (Structure,), {"_fields_": fields})


TENSORS = ("x", "topk_ids", "topk_weights", "w_up", "w_down", "o")
InferenceArgs = _args(" ".join(TENSORS))
ForwardArgs = _args("x topk_ids topk_weights w_up w_down o expert_offsets row_origins row_scores h",
                    ("may_overflow", c_int32), ("reserved", c_int32), ("b_up", library.Tensor),
                    ("b_down", library.Tensor))
RouteArgs = _args("topk_ids topk_weights", ("row_limit", c_int64))
DispatchArgs = _args("x second_x topk_ids expert_offsets row_origins row_scores rows second_rows",
                     ("may_overflow", c_int32), ("sms", c_int32), ("begun", c_void_p), ("gathered", c_int32),
                     ("reserved", c_int32), ("routing", library.Buffer))
CombineArgs = _args("rows expert_offsets row_origins topk_weights row_dscores dscores o", ("sms", c_int32),
                    ("reserved", c_int32), ("begun", c_void_p))


class BackwardArgs(Structure):
    """tessera_expert_backward_args of tessera.h: addresses of the structs of its calls."""

    _fields_ = [("size", c_uint64),
                *[(name, c_void_p) for name in ("dispatch", "context", "input_desc", "input", "weights_desc", "weights",
                                                "combine", "side_stream", "second_dispatch")]]


@functools.cache
def load() -> ctypes.CDLL:
    """The library with the types of the functions that a session calls."""
    lib = library.load()
    group_id, desc, handle = c_char_p, POINTER(Desc), c_void_p
    lib.tessera_peer_group_id_make.argtypes = [c_char_p, group_id]
    lib.tessera_peer_window_open.argtypes = [handle, c_int32, c_int32, group_id, c_size_t, c_char_p, POINTER(handle)]
    lib.tessera_peer_window_addresses.argtypes = [handle, POINTER(c_void_p)]
    lib.tessera_peer_window_close.argtypes = [handle]
    lib.tessera_peer_window_abort.argtypes = [handle]
    lib.tessera_peer_window_abort.restype = None
    lib.tessera_expert_parallel_window.argtypes = [desc, POINTER(c_size_t)]
    lib.tessera_expert_parallel_workspace.argtypes = [handle, desc, POINTER(c_size_t)]
    lib.tessera_expert_parallel_create.argtypes = [handle, desc, POINTER(c_void_p), library.Buffer, POINTER(handle)]
    lib.tessera_expert_parallel_destroy.argtypes = [handle]
    lib.tessera_expert_parallel_destroy.restype = None
    for name in ("input", "second_input"):
        getattr(lib, f"tessera_expert_parallel_{name}").argtypes = [handle, POINTER(c_void_p)]
    for name in ("forward", "route", "dispatch", "combine", "backward"):  # structs go by address
        getattr(lib, f"tessera_expert_parallel_{name}").argtypes = [c_void_p] * 3
    lib.tessera_expert_parallel_routed_rows.argtypes = [c_void_p, c_int64, POINTER(c_int64), POINTER(c_int32)]
    lib.tessera_expert_parallel_check.argtypes = [handle]
    lib.tessera_routing_of_groups.argtypes = [c_void_p, c_void_p, library.Tensor, library.Tensor, library.Buffer,
                                              c_void_p]
    return lib
