# SPDX-License-Identifier: Apache-2.0
"""Experts over several hosts, pretended by processes of this machine over gloo: results and gradients against one
process's, bits, bytes and refusals."""

import contextlib
import dataclasses
import os
import pathlib
import random
import re
import time
import unittest
from unittest import mock

import ranks
import several_hosts_calls
import tessera
import tier
import torch
import torch._dynamo  # which a checkpoint imports, in every fork where it is not there
import torch.distributed as dist
from several_hosts_cases import Case, bytes_expected, forward, one_pass, together
from tessera.hosts import advice, rotation, topology
from tessera.hosts import experts as hosts_experts
from torch.utils.checkpoint import checkpoint

UNEVEN = (5, 0, 9, 4)
ROUTINGS = ("random", "zipf", "one-expert", "repeated", "sentinels")


def passes(rank: int, case: Case, ways: list, late: bool = False) -> list:
    """By way, (hosts, exchange) and whether with overlap: two equal passes, inference, and bytes sent to each host in
    the first. late: ranks come at random times."""
    made = []
    for hosts, exchange, *overlap in ways:
        experts = case.make(hosts=hosts, exchange=exchange, overlap=any(overlap))
        rail = experts._hosts.rail
        if late:
            time.sleep(random.Random(rank).random() / 5)
        first = one_pass(case, experts, rank)
        sent = list(rail.bytes_sent)
        second = one_pass(case, experts, rank)
        leaves, ids, _ = case.part(rank)
        with torch.no_grad():
            inference = forward(experts, leaves, ids)
        experts.check()
        experts.close()
        made.append({"results": (first, second), "inference": inference, "sent": sent})
    return made


def passes_of(rank: int, cases: list, late: bool) -> list:
    """What `passes` returns for each case and its ways."""
    made = []
    for case, ways in cases:
        try:
            made.append(passes(rank, case, ways, late))
        except Exception as error:
            raise RuntimeError(str(case)) from error
    return made


class Results(unittest.TestCase):
    def check_near(self, got: dict, wanted: dict, tolerance: float):
        for name, tensor in wanted.items():
            scale = tensor.float().nan_to_num().abs().max().item()
            self.assertGreater(scale, 10 * tolerance, f"{name}: nothing to compare")
            apart = (got[name].float() - tensor.float()).nan_to_num(nan=1e9).abs().max().item()
            self.assertLess(apart, tolerance * scale, name)

    def check_equal(self, got: dict, wanted: dict):
        for name, tensor in wanted.items():
            self.assertTrue(torch.equal(got[name], tensor), name)

    def check_all(self, cases: list[tuple[Case, list]], late: bool = False) -> list[list[dict]]:
        """By case, all of as many ranks, results of all ranks together, by way. The ranks are the same for all cases,
        as each start of them takes time."""
        outcomes = ranks.results(ranks.run(len(cases[0][0].tokens), passes_of, cases, late, seconds=1200))
        return [self.check_outcomes(*case, [outcome[i] for outcome in outcomes]) for i, case in enumerate(cases)]

    def check_outcomes(self, case: Case, ways: list, outcomes: list) -> list[dict]:
        wanted, found = case.expected(), []
        for i, (hosts, exchange, *overlap) in enumerate(ways):
            of_ranks = [outcome[i] for outcome in outcomes]
            first, second = [together([each["results"][j] for each in of_ranks]) for j in range(2)]
            with self.subTest(case, hosts=hosts, exchange=exchange, overlap=any(overlap)):
                self.check_equal(second, first)
                self.assertTrue(torch.equal(torch.cat([each["inference"] for each in of_ranks]), first["o"]))
                self.check_near(first, wanted, 2**-6 if case.dtype is torch.bfloat16 else 1e-6)
                self.check_equal(first, wanted if hosts == 1 else case.expected_bits(hosts))
                self.assertEqual([each["sent"] for each in of_ranks], bytes_expected(case, hosts, exchange))
            found.append(first)
        return found

    def check(self, case: Case, ways: list) -> list[dict]:
        return self.check_all([(case, ways)])[0]

    def test_two_hosts_of_two_ranks(self):
        """Both exchanges have the same bits, and so have two hosts of one rank each with the same tokens."""
        case = Case(UNEVEN)
        static, counted, one, *overlapped = self.check(case, [(2, "static"), (2, "counted"), (1, None),
                                                              (2, "static", True), (2, "counted", True)])
        for other in (counted, *overlapped):
            self.check_equal(other, static)
        self.assertFalse(torch.equal(one["w_up"], static["w_up"]))  # so much the order of sums shows
        merged, = self.check(dataclasses.replace(case, tokens=(5, 13)), [(2, "counted")])
        self.check_equal(merged, static)

    @tier.deep
    def test_routings(self):
        self.check_all([(Case(UNEVEN, routing=routing), [(2, "static"), (2, "counted")]) for routing in ROUTINGS[1:]])

    def test_biases_in_bf16(self):
        self.check(Case(UNEVEN, dtype=torch.bfloat16, activation="gelu", biases=True, save="x"),
                   [(2, "counted"), (1, None)])

    @tier.deep
    def test_three_hosts_of_two_ranks(self):
        self.check(Case((3, 4, 0, 6, 2, 5), routing="zipf"),
                   [(3, "static"), (3, "counted"), (3, "static", True), (3, "counted", True)])

    @tier.deep
    def test_everything(self):
        """With one expert for each token, two, and as many as a host has."""
        variants = (1, "h", "swiglu", False), (2, "x", "relu2", True), (0, "h", "clamped-swiglu", True)
        for tokens, hosts in (((7, 5), 2), ((5, 0, 9, 4), 2), ((5, 0, 9, 4), 4), ((0, 0, 0, 6), 4),
                              ((3, 4, 0, 6, 2, 5), 2), ((3, 4, 0, 6, 2, 5), 3), ((3, 4, 0, 6, 2, 5), 6)):
            cases = []
            for i, routing in enumerate(ROUTINGS):
                for dtype, (top_k, save, activation, biases) in ((torch.float32, variants[i % 3]),
                                                                 (torch.bfloat16, variants[(i + 1) % 3])):
                    if routing == "repeated" and top_k == 1:
                        continue
                    case = Case(tokens, routing=routing, dtype=dtype, top_k=top_k or 12 // hosts, save=save,
                                activation=activation, biases=biases, seed=i)
                    cases.append((case, [(hosts, "static"), (hosts, "counted"), (1, None),
                                         (hosts, ("static", "counted")[i % 2], True)]))
            for (case, _), found in zip(cases, self.check_all(cases, late=True), strict=True):
                static, counted, _, overlapped = found
                with self.subTest(case):
                    self.check_equal(counted, static)
                    self.check_equal(overlapped, static)

    def test_no_tokens_at_all(self):
        case = Case((0, 0))
        for outcome in ranks.results(ranks.run(2, passes, case, [(2, "static"), (2, "counted")])):
            for way in outcome:
                results = way["results"][0]
                self.assertEqual(results["o"].shape, (0, case.hidden))
                self.assertEqual(results["w_up"].abs().max().item(), 0)


def two_layers(rank: int, exchange: str) -> list:
    """Gradients of two micro-batches through two layers that share the object, the first recomputed in backward."""
    case = Case((6, 8, 3, 7))
    experts = case.make(hosts=2, exchange=exchange)
    leaves, ids, d_o = case.part(rank)
    others, _, _ = dataclasses.replace(case, seed=1).part(rank)
    for _ in range(2):
        first = checkpoint(lambda x: forward(experts, {**leaves, "x": x}, ids), leaves["x"], use_reentrant=False)
        forward(experts, {**others, "x": first}, ids).backward(d_o)
    frozen = {name: leaf.detach() for name, leaf in leaves.items()}
    x = leaves["x"].detach().requires_grad_()
    forward(experts, {**frozen, "x": x}, ids).backward(d_o)
    experts.close()
    return [leaf.grad for leaf in (*leaves.values(), *others.values()) if leaf is not others["x"]] + [x.grad]


class Training(unittest.TestCase):
    def expected(self) -> list:
        case = Case((6, 8, 3, 7))
        (leaves, ids, d_o), (others, _, _) = case.tensors(), dataclasses.replace(case, seed=1).tensors()
        for leaf in (*leaves.values(), *others.values()):
            leaf.requires_grad_()

        def layer(of: dict, x):
            return tessera.routed_experts(x, ids, of["topk_weights"], of["w_up"], of["w_down"])

        for _ in range(2):
            layer(others, layer(leaves, leaves["x"])).backward(d_o)
        x = leaves["x"].detach().requires_grad_()
        layer({name: leaf.detach() for name, leaf in leaves.items()}, x).backward(d_o)
        return [leaf.grad for leaf in (*leaves.values(), *others.values()) if leaf is not others["x"]] + [x.grad]

    def test_layers_and_micro_batches(self):
        for exchange in ("static", "counted"):
            got = ranks.results(ranks.run(4, two_layers, exchange))
            for i, wanted in enumerate(self.expected()):
                apart = torch.cat([gradients[i] for gradients in got]) - wanted
                self.assertGreater(wanted.abs().max().item(), 0.1)
                self.assertLess(apart.abs().max().item(), 2e-6 * wanted.abs().max().item(), (exchange, i))


def refused(rank: int, change: dict, on_rank: int | slice) -> tuple:
    """What an object says of which some ranks have another description."""
    case = Case((4, 4, 4, 4))
    on_rank = range(4)[on_rank] if isinstance(on_rank, slice) else [on_rank]
    try:
        case.make(**{"hosts": 2, **(change if rank in on_rank else {})})
    except (ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return None


def without_session(rank: int) -> str:
    """What is said where one rank joins and then has no memory for its session; then a pass of objects made anew."""
    case = Case((4, 4, 4, 4))
    failing = mock.patch.object(hosts_experts, "CpuSession", side_effect=MemoryError("no memory"))
    with failing if rank == 2 else contextlib.nullcontext():
        try:
            case.make(hosts=2)
        except (RuntimeError, MemoryError) as error:
            said = f"{type(error).__name__}: {error}"
    one_pass(case, case.make(hosts=2), rank)
    return said


def in_other_groups(rank: int) -> str:
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1, 2, 3])]
    try:
        Case((4, 4, 4, 4)).make(hosts=2, group=groups[rank > 0])
    except ValueError as error:
        return str(error)


def refused_pass(rank: int) -> list:
    """What passes are refused with, before anything is sent; then a pass."""
    case = Case((4, 4))
    experts, inference = case.make(hosts=2), case.make(hosts=2, training=False)
    leaves, ids, _ = case.part(rank)
    said = []
    for of, change in ((experts, {"x": leaves["x"].bfloat16()}), (experts, {"x": leaves["x"][:, :8]}),
                       (experts, {"w_up": leaves["w_up"][1:]}), (inference, {})):
        try:
            forward(of, leaves | change, ids)
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
    with torch.no_grad():
        out = torch.empty_like(leaves["x"])
        assert inference(leaves["x"], ids, *[leaves[name] for name in ("topk_weights", "w_up", "w_down")], out) is out
        assert torch.equal(out, forward(experts, leaves, ids))
    return said


class Refusals(unittest.TestCase):
    def test_ranks_that_differ(self):
        for change, on_rank, kind, says in (
                ({"max_tokens": 9}, 3, "ValueError", "max_tokens=5 on rank 0, 9 on rank 3: equal on all ranks"),
                ({"hosts": 1}, 2, "ValueError", "hosts=2 on rank 0, 1 on rank 2"),
                ({"exchange": "counted"}, 1, "ValueError", "exchange=None on rank 0, counted on rank 1"),
                ({"overlap": True}, 1, "ValueError", "overlap=False on rank 0, True on rank 1"),
                ({"hosts": 1, "overlap": True}, 3, None,
                 "rank 3 cannot join: ValueError: overlap=True: of rows between hosts"),
                ({"top_k": 7}, 2, "ValueError", "top_k=3 on rank 0, 7 on rank 2"),
                ({"save": "x"}, 1, "ValueError", "save=h on rank 0, x on rank 1"),
                ({"exchange": "some"}, 1, None, "rank 1 cannot join: ValueError: exchange='some': choose from static"),
                ({"time_limit": 0}, 2, None, "rank 2 cannot join: ValueError: time_limit=0: seconds, above 0"),
                ({"experts": 10}, slice(4), "ValueError", "experts=10: a multiple of the 4 ranks"),
                ({"max_tokens": 0}, slice(4), "ValueError", "max_tokens=0"),
                ({"partial_combine": True}, 0, None, "rank 0 cannot join: ValueError: partial_combine=True: for links"),
                ({"windows": [0] * 4}, 0, None, "rank 0 cannot join: ValueError: windows: addresses within a host"),
                ({"hosts": 1, "exchange": "static"}, 3, None,
                 "rank 3 cannot join: ValueError: exchange=.static.: between hosts"),
                ({"device": "meta"}, 0, None, "rank 0 cannot join: ValueError: device=meta")):
            said = ranks.results(ranks.run(4, refused, change, on_rank))
            for rank, answer in enumerate(said):
                with self.subTest(change, rank=rank):
                    self.assertIsNotNone(answer)
                    if kind is not None or rank != on_rank:
                        self.assertEqual(answer[0], kind or "RuntimeError")
                        self.assertRegex(answer[1], says)
                    else:
                        self.assertEqual(answer[0], "ValueError")

    def test_a_rank_without_memory(self):
        said = ranks.results(ranks.run(4, without_session))
        self.assertEqual(said[2], "MemoryError: no memory")
        for rank in (0, 1, 3):
            self.assertEqual(said[rank], "RuntimeError: rank 2 cannot join: MemoryError: no memory")

    def test_other_groups(self):
        for text in ranks.results(ranks.run(4, in_other_groups)):
            self.assertRegex(text, r"group=\(0, 1\) on rank 0, \(0, 1, 2, 3\) on rank 1: equal on all ranks")

    def test_passes(self):
        for said in ranks.results(ranks.run(2, refused_pass)):
            patterns = ("w_up: torch.float32", r"x: torch.float32 \[4, 8\]", r"w_up: .*\[5, 32, 32\]", "training=True")
            for text, pattern in zip(said, patterns, strict=True):
                self.assertRegex(text, pattern)

    def test_topologies(self):
        self.assertEqual(topology.hosts_of(["a", "a", "b", "b"]), 2)
        self.assertEqual(topology.hosts_of(["a"] * 3), 1)
        for names, says in ((["a", "b", "a", "b"], "ranks of a host are consecutive"),
                            (["a", "a", "b"], "2 on a, 1 on b")):
            with self.assertRaisesRegex(ValueError, says):
                topology.hosts_of(names)
        for hosts in (0, 3, True, "two", 2.0):
            with self.assertRaisesRegex(ValueError, "hosts="):
                topology.find(0, ["a"] * 4, hosts)
        with self.assertRaisesRegex(ValueError, "16 ranks on each host; at most 8"):
            topology.find(0, ["a"] * 32, 2)
        found = topology.find(5, ["a"] * 3 + ["b"] * 3, "auto")
        self.assertEqual((found.hosts, found.host, found.counterpart(0), list(found.of_host(0))),
                         (2, 1, 2, [0, 1, 2]))
        self.assertEqual((found.name(1), topology.Topology(0, 2, 2).name(1)), ("host 1 (ranks 3-5)", "host 1 (rank 1)"))


class Page(unittest.TestCase):
    """Numbers of docs/several-hosts.md, calculated by advice.py for hosts of eight GPUs."""

    SHAPES = {"7B-n256": (1536, 256, 128, 8), "Qwen3-30B": (2048, 768, 128, 8), "Qwen3-235B": (4096, 1536, 128, 8),
              "DeepSeek-V3": (7168, 2048, 256, 8)}

    def cells(self, name: str) -> list[list[float]]:
        """Of the page's row with this name, the numbers of each cell."""
        text = (pathlib.Path(__file__).parents[2] / "docs" / "several-hosts.md").read_text(encoding="utf-8")
        (row,) = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", text, re.MULTILINE)
        return [[float(number) for number in re.sub(r"(?<=\d),(?=\d{3})", "", cell).split(",")]
                for cell in row.split("|")]

    def test_tokens_of_equal_bytes(self):
        for hosts in (2, 8):
            for shape, (said,) in zip(self.SHAPES.values(), self.cells(f"{hosts} hosts"), strict=True):
                tokens = advice.tokens_of_equal_bytes(*shape, 8, hosts)
                self.assertLess(abs(tokens - said), 0.02 * said, (hosts, shape))

    def test_bytes_of_gathered_experts(self):
        said = self.cells("experts of a layer when gathered, bf16, MB per GPU")
        for (hidden, intermediate, experts, _), (megabytes,) in zip(self.SHAPES.values(), said, strict=True):
            self.assertEqual(round(2 * 3 * hidden * intermediate * experts / 8 / 1e6), megabytes)

    def test_bytes_and_times(self):
        for name, (hidden, intermediate, experts, top_k) in self.SHAPES.items():
            wanted = []
            for hosts in (2, 4, 8):
                wanted += [advice.bytes_of_weights(hidden, intermediate, experts, 8, hosts, True),
                           advice.bytes_of_rows(8192, hidden, experts, top_k, hosts)]
            for bytes_, (megabytes, milliseconds) in zip(wanted, self.cells(name), strict=True):
                self.assertEqual(round(bytes_ / 1e6), megabytes, name)
                self.assertAlmostEqual(bytes_ / 45e6, milliseconds, delta=0.051 if milliseconds < 100 else 0.51)


def of_replicas(rank: int) -> tuple:
    """One of two groups, each of two hosts of one rank, with tokens of its own. One of them is made anew, after which
    all are."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    case = Case((5, 8), seed=rank // 2)
    made = []
    for _ in range(2):
        time.sleep(0.2 * (rank == 1))
        experts = case.make(hosts=2, exchange="counted", group=groups[rank // 2])
        made.append(one_pass(case, experts, rank % 2))
        experts.close()
    return tuple(made)


class Replicas(unittest.TestCase):
    def test_groups_within_the_default_group(self):
        got = ranks.results(ranks.run(4, of_replicas))
        for replica in range(2):
            wanted = Case((5, 8), seed=replica).expected_bits(2)
            for i in range(2):
                made = together([of_rank[i] for of_rank in got[2 * replica:2 * replica + 2]])
                for name, tensor in wanted.items():
                    self.assertTrue(torch.equal(made[name], tensor), name)


def found_by_name(rank: int) -> tuple:
    os.environ["NCCL_HOSTID"] = f"host{rank // 2}"
    experts = Case((4, 4, 4, 4)).make(hosts="auto")
    made = experts._hosts.topology
    experts.close()
    return made.hosts, made.host


class Names(unittest.TestCase):
    def test_hosts_are_found_by_name(self):
        self.assertEqual(ranks.results(ranks.run(4, found_by_name)), [(2, 0), (2, 0), (2, 1), (2, 1)])


class Order(unittest.TestCase):
    """What the model of tests/expert_parallel/rails.hpp has for given."""

    def order(self, overlap: bool) -> list[str]:
        said = []

        def told(what: str, step: int) -> mock.Mock:
            said.append(f"{what} {step}")
            return mock.Mock(wait=lambda: said.append(f"wait {what} {step}"))

        rail = mock.Mock(host=0, hosts=3)
        rotation.Rotation(None, rail, None, 12, False, overlap)._rotate(
            lambda step, to, of: told("rows", step), lambda step, rows: told("pass", step) and step,
            lambda step, to, of: told("sums", step))
        return said

    def test_one_message_after_the_other(self):
        self.assertEqual(self.order(False), [
            "pass 0", "rows 1", "wait rows 1", "pass 1", "sums 1", "wait sums 1",
            "rows 2", "wait rows 2", "pass 2", "sums 2", "wait sums 2"])

    def test_messages_beside_passes(self):
        self.assertEqual(self.order(True), [
            "rows 1", "pass 0", "wait rows 1", "rows 2", "pass 1", "sums 1",
            "wait rows 2", "pass 2", "sums 2", "wait sums 1", "wait sums 2"])


Calls = tier.deep(several_hosts_calls.Calls)


if __name__ == "__main__":
    unittest.main()
