# SPDX-License-Identifier: Apache-2.0
"""A pass over the experts of H hosts: in step s = 0 .. H-1 host h computes for the tokens of host (h+s) mod H.

Each rank sends the tokens that have an expert on another host there once, along its rail; the inner session, of the
ranks of one host, computes their experts there and adds up what a token's choices give; that partial sum comes back.
o_t is the sum of the partial sums in fp32, hosts ascending, rounded once. Backward sends d_o the same way, and gets dx
and gradients of scores back. Gradients of weights are added up in fp32 over the steps.

All ranks send and compute in the same order. Without `overlap` all of it is the current stream's, one after the other:

    pass 0 | rows of step 1, pass 1, its sums | rows of step 2, pass 2, its sums | ..

With `overlap` rows of the next step are sent before a pass and awaited behind it, and sums are awaited at the end:

    rail:        rows 1 | rows 2 | sums 1 | rows 3 | sums 2 | ..
    stream:      pass 0          | pass 1          | pass 2 ..

Then passes have to leave SMs to the rail: a pass that takes all of them waits for ranks of its host, one of which may
run its rail first, which waits for another host, whose rail waits behind the pass of a GPU there, and so on in a ring
(tests/expert_parallel/rails_test.cpp).
"""

import torch
from torch.autograd.function import once_differentiable

from tessera import expert_parallel_training as training
from tessera.hosts.messages import Crossing, Rail

PER_STEP = len(training.SavedPass.__annotations__)


class Plan:
    """Which of this rank's tokens go to which host.

    ids: [H,T,K] int32, by host: numbered from its first expert, -1 for those of other hosts. rows_out, rows_in: rows
    that this rank sends to the counterpart on each host, and gets from it. token: by host the tokens that go there,
    None where all of them do, in their order. `settle` makes rows and tokens; before it they are those of `static`.
    """

    def __init__(self, topk_ids: torch.Tensor, rail: Rail, experts: int, max_tokens: int):
        hosts = rail.hosts
        per_host = experts // hosts
        first = torch.arange(hosts, device=topk_ids.device, dtype=torch.int32)[:, None, None] * per_host
        self.ids = topk_ids[None] - first
        self.ids = torch.where((self.ids >= 0) & (self.ids < per_host), self.ids, -1)
        self.rows_out = self.rows_in = [max_tokens] * hosts
        self.token = [None] * hosts
        self._rail = rail

    def begin_counting(self) -> None:
        """Sends and receives the numbers of rows, for which the host does not wait."""
        self._goes = (self.ids >= 0).any(2)
        mine = self._goes.sum(1)
        self._counts = torch.stack((mine, self._rail.exchange_counts(mine)))

    def settle(self) -> None:
        """The numbers of rows, for which the host waits."""
        self.rows_out, self.rows_in = self._rail.read(self._counts)
        order = torch.argsort(self._goes.logical_not().byte(), dim=1, stable=True)
        self.token = [order[host, :rows] for host, rows in enumerate(self.rows_out)]
        self.token[self._rail.host] = None

    def chosen(self, rows: torch.Tensor, host: int, padding=0) -> torch.Tensor:
        """Of rows [T,..] those that go to the host, [rows_out,..]."""
        if self.token[host] is not None:
            return rows[self.token[host]]
        missing = self.rows_out[host] - rows.shape[0]
        return torch.cat((rows, rows.new_full((missing, *rows.shape[1:]), padding))) if missing else rows

    def add(self, total: torch.Tensor, partial: torch.Tensor, host: int) -> None:
        """Adds what came back from the host to [T,c] fp32."""
        if self.token[host] is None:
            total += partial[:total.shape[0]]
        else:
            total.index_add_(0, self.token[host], partial.float())


class Rotation:
    """Passes over all hosts. session: of this host's ranks, with max_tokens tokens at most. counted: whether ranks send
    each other the rows that are needed, after their numbers, or max_tokens rows without numbers. overlap: whether they
    are sent while passes run."""

    def __init__(self, session, rail: Rail, faults, experts: int, counted: bool, overlap: bool):
        self.session, self.rail, self._faults = session, rail, faults
        self.experts, self.counted, self.overlap = experts, counted, overlap

    def __call__(self, layer: int, x, topk_ids, topk_weights, weights: tuple) -> torch.Tensor:
        """o of x [T,d], topk_ids [T,K] int32 of all experts, topk_weights [T,K] fp32. weights: w_up, w_down, b_up,
        b_down of this rank's experts, the biases None where there are none."""
        if training.needs_gradients(x, topk_weights, *weights):
            return _Pass.apply(self, layer, x, topk_ids, topk_weights, *weights)
        return self.forward(layer, x, topk_ids, topk_weights, weights, None)[0]

    def _steps(self):
        """(step, the host that this rank's rows go to, the host that rows come from)."""
        host, hosts = self.rail.host, self.rail.hosts
        return [(step, (host - step) % hosts, (host + step) % hosts) for step in range(hosts)]

    def _rotate(self, send, run, give_back) -> dict:
        """What comes back for each step but the first, by the host that it comes from, and what run() gives of the
        first: lists of tensors. send(step, to, of) begins to send rows and to receive others; run(step, rows) makes the
        pass on these, None of the first step; give_back(results, to, of) begins to send its results to their host `of`
        and to receive those from `to`."""
        came, steps, coming, going = {}, self._steps(), None, []
        for step, to, of in steps:
            if self.overlap:
                rows = coming.wait() if step else None
                coming = send(*steps[step + 1]) if step + 1 < len(steps) else None
            else:
                rows = send(step, to, of).wait() if step else None
            results = run(step, rows)
            if step == 0:
                came[to] = results
                continue
            going.append((to, give_back(results, to, of)))
            if not self.overlap:
                came[to] = going.pop()[1].wait()
        return came | {to: crossing.wait() for to, crossing in going}

    def forward(self, layer: int, x, topk_ids, topk_weights, weights: tuple, saved: list | None) -> tuple:
        """(o, plan). saved: None, or a list that gets the SavedPass of each step."""
        self._faults.begin("forward")
        rail, top_k, columns = self.rail, topk_ids.shape[1], x.shape[1]
        plan = Plan(topk_ids, rail, self.experts, self.session.desc.max_tokens)
        counts = self.counted and rail.hosts > 1
        if counts:
            plan.begin_counting()

        def send(step: int, to: int, of: int) -> Crossing:
            if step == 1 and counts:
                plan.settle()
            parts = [plan.chosen(x, to), plan.chosen(topk_weights, to), plan.chosen(plan.ids[to], to, -1)]
            return rail.begin("rows to their experts", parts, to, plan.rows_in[of], of,
                              [(columns, x.dtype), (top_k, torch.float32), (top_k, torch.int32)])

        def run(step: int, rows: list | None) -> list:
            rows = [x, topk_weights, plan.ids[rail.host]] if rows is None else rows
            return [self._inner((layer, step), rows, weights, saved)]

        def give_back(results: list, to: int, of: int) -> Crossing:
            return rail.begin("partial sums to their tokens", results, of, plan.rows_out[to], to, [(columns, x.dtype)])

        partials = self._rotate(send, run, give_back)
        return self._sum(plan, {host: partial for host, (partial,) in partials.items()}, x), plan

    def _inner(self, layer, rows: list, weights: tuple, saved: list | None) -> torch.Tensor:
        x, topk_weights, topk_ids = rows
        with self._faults.within_host():
            if saved is None:
                return training.run(self.session, layer, x, topk_ids, topk_weights, *weights)
            o, saved_pass = training.forward_saved(self.session, layer, x, topk_ids, topk_weights, weights)
        saved.append(saved_pass)
        return o

    def backward(self, plan: Plan, saved: list, d_o, weights: tuple, buffers: tuple) -> tuple:
        """(dx, dscores [T,K] fp32). buffers: gradients of weights are added there."""
        self._faults.begin("backward")
        rail, columns, top_k = self.rail, d_o.shape[1], plan.ids.shape[2]

        def send(step: int, to: int, of: int) -> Crossing:
            return rail.begin("gradients of o to the experts", [plan.chosen(d_o, to)], to, plan.rows_in[of], of,
                              [(columns, d_o.dtype)])

        def run(step: int, rows: list | None) -> list:
            with self._faults.within_host():
                return list(training.backward_saved(self.session, saved[step], d_o if rows is None else rows[0],
                                                    weights, buffers))

        def give_back(results: list, to: int, of: int) -> Crossing:
            return rail.begin("gradients to their tokens", results, of, plan.rows_out[to], to,
                              [(columns, d_o.dtype), (top_k, torch.float32)])

        came = self._rotate(send, run, give_back)
        dx, dscores = [{host: results[i] for host, results in came.items()} for i in range(2)]
        like = d_o.new_empty(plan.ids.shape[1:], dtype=torch.float32)
        return self._sum(plan, dx, d_o), self._sum(plan, dscores, like)

    def _sum(self, plan: Plan, partials: dict, like: torch.Tensor) -> torch.Tensor:
        """In fp32, hosts ascending, rounded once."""
        total = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
        for host in range(self.rail.hosts):
            plan.add(total, partials[host], host)
        return total.to(like.dtype)


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rotation: Rotation, layer: int, x, topk_ids, topk_weights, *weights):
        saved = []
        o, ctx.plan = rotation.forward(layer, x, topk_ids, topk_weights, weights, saved)
        ctx.rotation = rotation
        ctx.save_for_backward(*weights, *[tensor for each in saved for tensor in each])
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, d_o):
        tensors = ctx.saved_tensors  # once: recomputation makes them once
        weights, tensors = tensors[:4], tensors[4:]
        saved = [training.SavedPass(*tensors[i:i + PER_STEP]) for i in range(0, len(tensors), PER_STEP)]
        buffers = [torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if needed else None
                   for weight, needed in zip(weights, ctx.needs_input_grad[5:], strict=True)]
        dx, dscores = ctx.rotation.backward(ctx.plan, saved, d_o.contiguous(), weights, tuple(buffers))
        gradients = [None if buffer is None else buffer.to(weight.dtype)
                     for buffer, weight in zip(buffers, weights, strict=True)]
        return None, None, dx, None, dscores, *gradients
