# SPDX-License-Identifier: Apache-2.0
"""One rank on the CPU: a library in Python that makes the exchange of a session by itself, and cases around it, which
compare passes of training with the layer of one device."""

import ctypes
import unittest
from unittest import mock

import tessera
import torch
from cpu_session import make_desc, make_session
from tessera import expert_parallel_library as structs
from tessera import expert_parallel_session as session_module
from tessera import expert_parallel_training as training
from tessera import library
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

SHAPE = {"max_tokens": 300, "hidden": 64, "intermediate": 32, "experts": 8, "top_k": 3}


def at(view: library.Tensor) -> torch.Tensor:
    """The tensor of the CPU that a tessera_tensor describes."""
    dtype, item = {library.BF16: (torch.bfloat16, 2), library.INT32: (torch.int32, 4),
                   library.FP32: (torch.float32, 4)}[view.dtype]
    shape, stride = view.shape[:view.rank], view.stride[:view.rank]
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride))
    memory = (ctypes.c_char * (extent * item)).from_address(view.data)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride)


class OneRank:
    """The library's functions of a session of one rank on the CPU: rows sorted by expert."""

    def __init__(self, experts: int, activation: str = "swiglu"):
        self.experts, self.calls, self.dispatched, self.others_have_memory = experts, [], True, []
        self.gathered = []  # of calls of dispatch
        self.activation, self.counted = activation, []  # (rows, whether all fit) of passes

    def count(self, row_limit: int):
        others_fit = self.others_have_memory.pop() if self.others_have_memory else True
        self.counted.append((len(self.order), others_fit and len(self.order) <= row_limit))

    def sort(self, args):
        self.ids, self.scores = at(args.topk_ids).clone().flatten(), at(args.topk_weights).clone().flatten()
        routed = (self.ids >= 0) & (self.ids < self.experts)
        key = torch.where(routed, self.ids, self.experts)
        self.order = torch.argsort(key, stable=True)[:int(routed.sum())]
        self.offsets = torch.searchsorted(key[self.order].contiguous(), torch.arange(self.experts + 1))

    def write_tables(self, args) -> torch.Tensor:
        """The rows that there is memory for, as pairs."""
        origins = at(args.row_origins)
        order = self.order[:len(origins)]
        at(args.expert_offsets).copy_(self.offsets.clamp(max=len(order)))
        origins[:len(order), 0], origins[:len(order), 1] = order, 0
        at(args.row_scores)[:len(order)] = self.scores[order]
        return order

    def tessera_expert_parallel_forward(self, handle, address, stream):
        args = structs.ForwardArgs.from_address(address)
        biases = {name: at(getattr(args, name)) for name in ("b_up", "b_down") if getattr(args, name).rank}
        if args.row_origins.rank:
            self.save(args, biases.get("b_up"))
        with torch.no_grad():
            at(args.o).copy_(tessera.routed_experts(at(args.x), at(args.topk_ids), at(args.topk_weights), at(args.w_up),
                                                    at(args.w_down), activation=self.activation, **biases))
        self.calls.append("forward")
        return 0

    def save(self, args, b_up):
        self.sort(args)
        row_limit = args.row_origins.shape[0]
        self.count(row_limit)
        assert args.may_overflow or len(self.order) <= row_limit
        self.write_tables(args)
        x, ids, w_up = at(args.x), at(args.topk_ids), at(args.w_up)
        if args.h.rank:
            h = at(args.h)
            saved = self.order[:len(h)]
            experts = torch.nn.functional.one_hot(ids.flatten()[saved].long(), self.experts).bool()
            for expert, of_expert in enumerate(experts.T):
                bias = None if b_up is None else b_up[expert]
                h[:len(saved)][of_expert] = functional.linear(x[saved[of_expert] // ids.shape[1]], w_up[expert], bias)

    def tessera_expert_parallel_route(self, handle, address, stream):
        args = structs.RouteArgs.from_address(address)
        self.sort(args)
        self.count(args.row_limit or 1 << 30)
        self.dispatched = False
        self.calls.append("route")
        return 0

    def tessera_expert_parallel_routed_rows(self, handle, passes_ago, rows, all_fit):
        rows._obj.value, all_fit._obj.value = self.counted[-1 - passes_ago]
        self.calls.append("rows")
        return 0

    def tessera_expert_parallel_dispatch(self, handle, address, stream):
        args = structs.DispatchArgs.from_address(address)
        origins = at(args.row_origins)
        if not self.dispatched:
            assert args.may_overflow or len(self.order) <= len(origins)
            self.write_tables(args)
        rows = int(at(args.expert_offsets)[-1])
        token = origins[:rows, 0].long() // SHAPE["top_k"]
        for x, out in ((args.x, args.rows), (args.second_x, args.second_rows)):
            if x.rank and args.gathered:
                at(out).fill_(torch.nan)[token] = at(x)[token]
            elif x.rank:
                at(out)[:rows] = at(x)[token]
        if args.routing.data:
            self.write_routing(args, rows, token if args.gathered else torch.arange(rows))
        self.dispatched = True
        self.gathered.append(bool(args.gathered))
        self.calls.append("dispatch" if args.x.rank else "second rows")
        return 0

    def write_routing(self, args, rows: int, gathered: torch.Tensor):
        """RoutingView of routing.hpp."""
        count, experts = len(at(args.row_origins)), self.experts
        assert args.routing.bytes == 4 * (4 * count + experts + 1)
        memory = (ctypes.c_char * args.routing.bytes).from_address(args.routing.data)
        offsets, order, index, inverse, scores = torch.frombuffer(memory, dtype=torch.int32).split(
            [experts + 1, *[count] * 4])
        offsets.copy_(at(args.expert_offsets))
        for table, values, fill in ((order, torch.arange(rows), -1), (inverse, torch.arange(rows), -1),
                                    (index, gathered, 0)):
            table.fill_(fill)[:rows] = values
        scores.view(torch.float32).zero_()[:rows] = at(args.row_scores)[:rows]

    def tessera_expert_parallel_combine(self, handle, address, stream):
        args = structs.CombineArgs.from_address(address)
        rows, o = int(at(args.expert_offsets)[-1]), at(args.o)
        pair = at(args.row_origins)[:rows, 0].long()
        top_k = SHAPE["top_k"]
        slots = torch.zeros(o.shape[0], top_k, o.shape[1])
        slots.view(-1, o.shape[1])[pair] = at(args.rows)[:rows].float()
        if args.topk_weights.rank:
            slots *= at(args.topk_weights)[:, :, None]
        o.copy_(slots.sum(1))
        if args.dscores.rank:
            dscores = at(args.dscores)
            dscores.zero_()
            dscores.view(-1)[pair] = at(args.row_dscores)[:rows]
        self.calls.append("combine")
        return 0

    def tessera_expert_parallel_backward(self, handle, address, stream):
        args = structs.BackwardArgs.from_address(address)
        if args.dispatch:
            self.tessera_expert_parallel_dispatch(handle, args.dispatch, stream)
        if args.second_dispatch:
            self.tessera_expert_parallel_dispatch(handle, args.second_dispatch, args.side_stream)
        code = REAL.tessera_moe_backward_input(args.context, args.input_desc, args.input, None)
        self.tessera_expert_parallel_combine(handle, args.combine, args.side_stream or stream)
        if not code and args.weights:
            code = REAL.tessera_moe_backward_weights(args.context, args.weights_desc, args.weights, None)
        return code

    def __getattr__(self, name):  # all others: the library itself
        return getattr(REAL, name)


REAL = structs.load()


def cpu_session(activation: str = "swiglu", max_rows: int | None = None, save: str = "h", training: int = 1):
    """A session of SHAPE, whose current stream is the CPU's."""
    session = make_session(make_desc(activation, training=training, **SHAPE), max_rows, save)
    session.stream = lambda: None
    return session


class Operations(TorchDispatchMode):
    """Counts the operations of torch."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class Unseen:
    """A library whose own operations of torch nobody counts."""

    def __init__(self, fake):
        self.fake = fake

    def __getattr__(self, name):
        def call(*arguments):
            with _disable_current_modes():
                return getattr(self.fake, name)(*arguments)

        return call


class RankCase(unittest.TestCase):
    """Tensors, steps and comparisons for tests of one rank."""

    def tensors(self, activation: str, with_bias: bool, tokens: int = 40):
        torch.manual_seed(1)
        d, n, e, k = (SHAPE[name] for name in ("hidden", "intermediate", "experts", "top_k"))
        halves = 2 if activation in ("swiglu", "clamped-swiglu") else 1
        scores, ids = torch.rand(tokens, e).topk(k)
        ids = ids.int()
        ids[::7, 1] = -1
        ids[3:20:4, 0] = e
        made = [torch.randn(tokens, d), scores, torch.randn(e, halves * n, d) / 8, torch.randn(e, d, n) / 4]
        if with_bias:
            made += [torch.randn(e, halves * n), torch.randn(e, d)]
        made = [t if t is scores else t.bfloat16() for t in made]
        return ids, [t.requires_grad_() for t in made]

    def run_both(self, activation="swiglu", with_bias=False, max_rows=None, tokens=40, save="h"):
        """Results and gradients of the session, then of the layer."""
        ids, (x, scores, *weights) = self.tensors(activation, with_bias, tokens)
        session = cpu_session(activation, max_rows, save)
        biases = weights[2:] or [None, None]
        fake = OneRank(SHAPE["experts"], activation)
        with mock.patch.object(session_module, "load", return_value=fake):
            o = training.run(session, 0, x, ids, scores, *weights[:2], *biases)
        d_o = torch.randn_like(o)
        with mock.patch.object(session_module, "load", return_value=fake):
            got = torch.autograd.grad(o, (x, scores, *weights), d_o)
        names = dict(zip(("b_up", "b_down"), biases))
        wanted_o = tessera.routed_experts(x, ids, scores, *weights[:2], activation=activation, **names)
        wanted = torch.autograd.grad(wanted_o, (x, scores, *weights), d_o)
        asks, pair = ["rows"] if max_rows is None else [], ["dispatch", "combine"]
        back = ["dispatch", "second rows", "combine"] if save == "h" and training.SIDE_STREAM_BYTES == 0 else pair
        self.assertEqual(fake.calls, ["route", *asks, *pair, *back] if with_bias and activation != "clamped-swiglu" else
                         ["forward", *back, *asks])
        return (o, *got), (wanted_o, *wanted)

    def assert_near(self, got, wanted, limit=2**-8):
        for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
            self.assertEqual((a.shape, a.dtype), (b.shape, b.dtype))
            error = (a.float() - b.float()).norm() / b.float().norm()
            self.assertGreater(b.float().norm(), 0)
            self.assertLess(error, limit, i)

    def step(self, fake, session, leaves, ids, biases=(None, None)):
        """Whether the results and gradients of one step are right."""
        x, scores, w_up, w_down = leaves
        with mock.patch.object(session_module, "load", return_value=fake):
            o = training.run(session, 0, x, ids, scores, w_up, w_down, *biases)
            got = torch.autograd.grad(o, leaves, torch.ones_like(o))
        wanted_o = tessera.routed_experts(x, ids, scores, w_up, w_down, b_up=biases[0], b_down=biases[1])
        wanted = torch.autograd.grad(wanted_o, leaves, torch.ones_like(o))
        self.assert_near((o, *got), (wanted_o, *wanted))
