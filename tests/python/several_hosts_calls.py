# SPDX-License-Identifier: Apache-2.0
"""Tests of several_hosts_test.py: calls that experts of one host take, of experts over two hosts. Rows that lie apart,
bounds of rows, gradients of some tensors alone, two backward passes, autocast, and compiled code."""

import unittest

import ranks
import torch
import torch._dynamo  # in every fork where it is not there
from several_hosts_cases import LEAVES, Case, forward, one_pass

CASE = Case((5, 0, 9, 4))


def gradients_of(rank: int, experts, wanted: tuple) -> dict:
    """Gradients where only these leaves ask for one."""
    leaves, ids, d_o = CASE.part(rank)
    leaves = {name: leaf.detach().requires_grad_(name in wanted) for name, leaf in leaves.items()}
    forward(experts, leaves, ids).backward(d_o)
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def equal(got: dict, wanted: dict, names=None) -> bool:
    return set(got) == set(names or wanted) and all(torch.equal(got[name], wanted[name]) for name in got)


def calls(rank: int, exchange: str) -> dict:
    """By call, whether it has the bits that it should have."""
    case, experts = CASE, CASE.make(hosts=2, exchange=exchange)
    wanted, said = one_pass(case, experts, rank), {}
    leaves, ids, d_o = case.part(rank)
    detached = {name: leaf.detach() for name, leaf in leaves.items()}

    apart = torch.stack((detached["x"], torch.full_like(detached["x"], torch.nan)), 1)[:, 0]
    said["rows that lie apart"] = torch.equal(forward(experts, detached | {"x": apart}, ids), wanted["o"])
    for names in (("x",), ("topk_weights",), ("w_up",), ("w_down", "x")):
        said[f"gradients of {names} alone"] = equal(gradients_of(rank, experts, names), wanted, names)

    o, named = forward(experts, leaves, ids), [name for name in LEAVES if name in leaves]
    twice = [torch.autograd.grad(o, list(leaves.values()), d_o, retain_graph=keep) for keep in (True, False)]
    said["two backward passes"] = all(
        equal(dict(zip(leaves, each, strict=True)), {name: wanted[name] for name in named}) for each in twice)

    with torch.autocast("cpu", torch.bfloat16):
        cast = forward(experts, detached, ids)
    narrow = {name: leaf if name == "topk_weights" else leaf.bfloat16() for name, leaf in detached.items()}
    said["autocast"] = cast.dtype is torch.bfloat16 and torch.equal(cast, forward(experts, narrow, ids))

    call = torch.compiler.disable(lambda x: forward(experts, leaves | {"x": x}, ids))

    def step(x):
        return call(x * 2) * 3

    made = [step(leaves["x"]), torch.compile(step, backend="eager")(leaves["x"])]
    grads = [torch.autograd.grad(each, leaves["x"], d_o)[0] for each in made]
    said["inside what is compiled"] = torch.equal(*made) and torch.equal(*grads)
    experts.close()

    bounded = case.make(hosts=2, exchange=exchange, max_rows=54)
    said["a bound of rows"] = equal(one_pass(case, bounded, rank), wanted)
    bounded.close()
    return said


def too_many_rows(rank: int) -> str:
    """What a pass says where one rank's rows, those of all tokens, are more than its bound."""
    case = Case((4, 4, 4, 4), routing="one-expert")
    experts = case.make(hosts=2, max_rows=3, time_limit=1)
    leaves, ids, _ = case.part(rank)
    try:
        forward(experts, leaves, ids)
    except RuntimeError as error:
        experts.abort()
        return str(error)
    return ""


class Calls(unittest.TestCase):
    def test_calls_of_one_host(self):
        for exchange in ("static", "counted"):
            for rank, said in enumerate(ranks.results(ranks.run(4, calls, exchange))):
                self.assertEqual(len(said), 9)
                for what, holds in said.items():
                    with self.subTest(what, exchange=exchange, rank=rank):
                        self.assertTrue(holds)

    def test_too_many_rows(self):
        said = ranks.results(ranks.run(4, too_many_rows))
        self.assertRegex(said[3], "^max_rows=3: the pass has 8 rows; make the object with a larger bound")
        for text in said[:3]:
            self.assertRegex(text, r"did not come .*rank 3")
