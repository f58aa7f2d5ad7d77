# SPDX-License-Identifier: Apache-2.0
"""Tests of several_hosts_test.py: calls that experts of one host take, of experts over two hosts. Rows that lie apart,
bounds of rows, gradients of some tensors alone, two backward passes, autocast, and compiled code; and passes from C++.
"""

import dataclasses
import os
import pathlib
import subprocess
import tempfile
import unittest

import ranks
import torch
import torch._dynamo  # in every fork where it is not there
from several_hosts_cases import LEAVES, Case, bytes_expected, forward, one_pass, together

CASE = Case((5, 0, 9, 4))


def gradients_of(rank: int, experts, wanted: tuple) -> dict:
    """Gradients where only these leaves ask for one."""
    leaves, ids, d_o = CASE.part(rank)
    leaves = {name: leaf.detach().requires_grad_(name in wanted) for name, leaf in leaves.items()}
    forward(experts, leaves, ids).backward(d_o)
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def most_rows(case: Case, hosts: int) -> int:
    """Rows that a rank's experts have of the tokens of one host: the most of all ranks and hosts."""
    _, ids, _ = case.tensors()
    per_host, per_rank = len(case.tokens) // hosts, case.experts // len(case.tokens)
    of_hosts = ids.split([sum(case.tokens[h * per_host:(h + 1) * per_host]) for h in range(hosts)])
    return max(int((of_host // per_rank == rank).sum()) for of_host in of_hosts for rank in range(len(case.tokens)))


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

    torch._dynamo.utils.counters.clear()
    made = [step(leaves["x"]), torch.compile(step, backend="eager")(leaves["x"])]
    grads = [torch.autograd.grad(each, leaves["x"], d_o)[0] for each in made]
    said["inside what is compiled"] = torch.equal(*made) and torch.equal(*grads)
    said["the call is the only graph break"] = sum(torch._dynamo.utils.counters["graph_break"].values()) == 1
    experts.close()

    bounded = case.make(hosts=2, exchange=exchange, max_rows=most_rows(case, 2))
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


def built_programs() -> pathlib.Path:
    """The folder with the programs of the build that is tested."""
    if "TESSERA_PROGRAM" in os.environ:
        return pathlib.Path(os.environ["TESSERA_PROGRAM"]).parent
    return pathlib.Path(os.environ["TESSERA_LIBRARY"]).resolve().parents[1] / "bin"


def passes_of(rank: int, cases: list) -> list[dict]:
    """Results of a pass, for each (case, hosts, exchange)."""
    made = []
    for case, hosts, exchange in cases:
        experts = case.make(hosts=hosts, exchange=exchange)
        made.append(one_pass(case, experts, rank))
        experts.close()
    return made


def from_cpp(case: Case, hosts: int, exchange: str) -> tuple[dict, list[list[int]]]:
    """(results, bytes that each rank sent to each host) of hosts_program.cpp on the tensors of the case."""
    leaves, ids, d_o = case.tensors()
    tensors = leaves | {"topk_ids": ids.clamp(-1, case.experts).int(), "d_o": d_o}
    sizes = (hosts, len(case.tokens) // hosts, int(exchange == "counted"), max(case.tokens) + 1, case.hidden,
             case.intermediate, case.experts, case.top_k, *case.tokens)
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        (place / "desc").write_text(" ".join([str(size) for size in sizes]), encoding="ascii")
        for name, tensor in tensors.items():
            (place / name).write_bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        said = subprocess.run([built_programs() / "hosts_program", folder], capture_output=True, text=True, check=True)
        results = {}
        for name, file in (("o", "o"), ("x", "dx"), ("topk_weights", "dscores"), ("w_up", "dw_up"),
                           ("w_down", "dw_down")):
            dtype = case.dtype if name in ("o", "x") else torch.float32
            like = leaves["x" if name == "o" else name]
            results[name] = torch.frombuffer(bytearray((place / file).read_bytes()), dtype=dtype).view(like.shape)
            results[name] = results[name].to(like.dtype)  # Python rounds gradients of weights
    return results, [[int(number) for number in line.split()] for line in said.stdout.splitlines()]


class Calls(unittest.TestCase):
    def test_cpp_has_these_bits(self):
        for tokens, hosts in (((5, 0, 9, 4), 2), ((5, 0, 9, 4), 4), ((3, 4, 0, 6, 2, 5), 3)):
            cases = [(dataclasses.replace(CASE, tokens=tokens, routing=routing, dtype=torch.bfloat16, seed=i), hosts,
                      ("static", "counted")[(hosts + i) % 2])
                     for i, routing in enumerate(("random", "zipf", "sentinels"))]
            outcomes = ranks.results(ranks.run(len(tokens), passes_of, cases))
            for i, (case, _, exchange) in enumerate(cases):
                wanted = together([outcome[i] for outcome in outcomes])
                got, sent = from_cpp(case, hosts, exchange)
                with self.subTest(case, hosts=hosts, exchange=exchange):
                    for name, tensor in wanted.items():
                        self.assertGreater(tensor.float().abs().max().item(), 0, name)
                        self.assertTrue(torch.equal(got[name], tensor), name)
                    self.assertEqual(sent, bytes_expected(case, hosts, exchange))

    def test_calls_of_one_host(self):
        for exchange in ("static", "counted"):
            for rank, said in enumerate(ranks.results(ranks.run(4, calls, exchange))):
                self.assertEqual(len(said), 10)
                for what, holds in said.items():
                    with self.subTest(what, exchange=exchange, rank=rank):
                        self.assertTrue(holds)

    def test_too_many_rows(self):
        said = ranks.results(ranks.run(4, too_many_rows))
        self.assertRegex(said[3], "^max_rows=3: the pass has 8 rows; make the object with a larger bound")
        for text in said[:3]:
            self.assertRegex(text, r"did not come .*rank 3")
