# SPDX-License-Identifier: Apache-2.0
"""A session of one rank that has joined nobody, on the CPU: tests put a library of their own behind it."""

import ctypes
from unittest import mock

import torch
from tessera import expert_parallel_session as session_module
from tessera.expert_parallel_library import Desc
from tessera.options import ACTIVATIONS

CLAMP = {"alpha": 1.702, "limit": 7.0, "up_offset": 1.0}


def make_desc(activation: str = "swiglu", **sizes) -> Desc:
    return Desc(**{"ranks": 1, "activation": ACTIVATIONS.index(activation), **CLAMP, **sizes})


def make_session(desc: Desc, max_rows: int | None = None, save: str = "h") -> session_module.Session:
    session = object.__new__(session_module.Session)
    session.handle, session.passes, session.desc = ctypes.c_void_p(8), {}, desc
    session.device = torch.device("cpu")
    session.passes_counted, session.all_fit, session.side = 0, True, session_module.SideStream()
    session._calls, session._places, session._layer_rows = {}, {}, {}
    session._streams, session._workspace = {77}, mock.MagicMock()
    session.training = session_module.training_options(desc, max_rows, save)
    return session
