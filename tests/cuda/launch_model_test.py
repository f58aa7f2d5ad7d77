# SPDX-License-Identifier: Apache-2.0
"""The launches of whole calls, one after another on a stream: what a kernel that starts early (decisions 0019, 0021)
may read and write before the previous ones have ended.

A kernel is a list of steps, as src/cuda/layer/{forward,backward}.cpp launch it. Random schedules advance those that may
run. Two steps on the same memory, of which one writes, must come in the order of the launches; each rule that sees to
that is broken once, and the model must notice.
"""

import random
import unittest
from dataclasses import dataclass


class BrokenRule(Exception):
    pass


@dataclass
class Kernel:
    """Steps: read X, write X; let: the next kernel may start; wait: for the end of the previous one; announce, await
    and clear X: a word. Without `early` a kernel starts when the previous one has ended."""

    name: str
    steps: list[str]
    early: bool = False


# Rows of few tokens, whose values say that they are there: clearing them writes them as well.
CLEARED_ROWS = ["clear a", "write a of first", "write a of last", "clear y", "write y"]


def cleared(one: bool, broken: str) -> list[str]:
    if broken == "words_not_cleared":
        return []
    return CLEARED_ROWS if one else ["clear a"]


def chosen_tables(broken: str, scans: bool, one: bool) -> list[Kernel]:
    """What choose_tokens launches, which makes slots and tables: from its second kernel on all start early. scans:
    there is a launch for sums that emit adds up itself otherwise."""
    keep, scan = [["let", "wait", "read scratch", "write scratch"] for _ in range(2)]
    if broken == "keep_reads_at_once":
        keep.remove("wait")
    if broken == "scan_never_waits":  # emit, which waits for it, then knows nothing of keep
        scan.remove("wait")
    emit = ["wait", *cleared(one, broken), "read scratch", "write ids", "write scores", "write tables"]
    if broken == "emit_reads_at_once":
        emit.remove("wait")
    return [
        # rank_pairs behind route, or route_and_rank in the place of both: neither waits.
        Kernel("rank_pairs", ["let", "read scratch", "write scratch"]),
        Kernel("choose_tokens_keep", keep, early=True),
        *([Kernel("choose_tokens_scan", scan, early=True)] if scans else []),
        Kernel("choose_tokens_emit", emit, early=True),
    ]


def tables(routed: bool, counts: bool, early: bool, broken: str, rounds: bool, scans: bool, one: bool) -> list[Kernel]:
    """What the tables are made from lies where y is written later, unless one kernel has the experts: scratch. early:
    without rounding none of these kernels is, but they could be. The last one clears the words of the kernels behind,
    or rows. metadata_scatter stands for metadata_one_block, too, which lets the next kernel start."""
    starts = ["let", "wait"] if early else []
    first = [Kernel("router_logits", ["read x", "write scratch"]),
             Kernel("route", ["read scratch", "write ids", "write scores", "write scratch"])]
    given = [Kernel("given_slots", ["write scratch", "write ids", "write scores"]),
             Kernel("metadata_rank", [*starts, "read ids", "write scratch"])]
    scatter = Kernel("metadata_scatter",
                     [*(starts or ["let"]), *cleared(one, broken), "read ids", "read scratch", "write tables"], early)
    return [
        *(first if routed else given),
        *(chosen_tables(broken, scans, one) if rounds else [scatter]),
        *([Kernel("expert_counts", ["read tables"])] if counts else []),
    ]


def forward(routed: bool, counts: bool = False, broken: str = "", rounds: bool = False,
            scans: bool = False, one: bool = False) -> list[Kernel]:
    """one: one kernel for few tokens has the experts, whatever makes the tables. Its jobs of three kinds run side by
    side, each a kernel here, as soon as the first kind has waited; rows say that they are there."""
    up = ["read tables", "read x", "write a of first", "write h", "announce a", "write a of last", "write h"]
    down = ["read tables", "await a", "read a of first", "write scratch", "wait", "read a of last", "write scratch"]
    if broken == "only_first_experts":  # of a CTA: no reason to wait but the rule
        down = ["read tables", "await a", "read a of first", "write scratch"]
    if broken == "nothing_awaited":
        down.remove("await a")
    starts = {"let_before_wait": ["let", "wait"], "wait_before_let": ["wait", "let"]}.get(broken)
    if one:
        waits = ["wait"] if broken != "experts_read_at_once" else []
        return [
            *tables(routed, counts, False, broken, rounds, scans, True),
            Kernel("jobs of up", [*waits, "let", "read tables", "read x", "write a of first", "write h",
                                  "write a of last", "announce a"], early=True),
            Kernel("jobs of down", ["let", "read tables", "await a", "read a of first", "read a of last", "write y",
                                    "announce y", "wait"], early=True),
            Kernel("jobs of aggregate", ["read tables", "await y", "read y", "read scores", "write o", "wait"], True),
        ]
    return [
        *tables(routed, counts, starts is not None, broken, rounds, scans, False),
        Kernel("up_projection_fwd", (starts or ["let"]) + up, early=starts is not None),
        Kernel("down_projection_fwd", down, early=True),
        Kernel("aggregate", ["read scratch", "read scores", "write o"]),
    ]


def backward(routed: bool, broken: str = "", fp32_router: bool = False, rounds: bool = False,
             lists: bool = False) -> list[Kernel]:
    """dx rows take the place of a'. fp32_router: terms of the weights first, those of dlogits behind them. rounds: the
    router rounds tokens, so its part of dx is a GEMM, to whose sums the aggregate adds. lists: of the tokens alone that
    router_dlogits lists; the part of others is in their dx rows."""
    wgrad = ["read tables", "await a'", "read a' of first", "write dw_down", "wait", "let", "read a' of last",
             "write dw_down"]
    if broken == "wgrad_lets_at_once":
        wgrad.remove("let")
        wgrad.insert(0, "let")
    dlogits = ["let", "read partials", "write dlogits", "wait"]
    if broken == "no_wait_at_end":
        dlogits.remove("wait")
    operand = "terms" if fp32_router else "dlogits"
    row_term = ["read dlogits", *(["read router terms"] if fp32_router else [])]
    dgrad = [*(["let", "wait"] if lists else []), "read dlogits", f"read {operand}", "write dx"]
    if broken == "dgrad_reads_at_once":
        dgrad = [s for s in dgrad if s != "wait"]
    return [
        Kernel("memset", ["clear a'"]),
        *([Kernel("split_weights", ["write router terms"])] if fp32_router else []),
        Kernel("down_projection_dgrad", ["let", "read tables", "read h", "write a' of first", "write dh", "announce a'",
                                         "write a' of last", "write partials"]),
        Kernel("down_projection_wgrad", wgrad, early=True),
        *([Kernel("router_dlogits", dlogits, early=True)] if routed else []),
        *([Kernel("split_dlogits", ["read dlogits", "write terms"])] if fp32_router else []),
        *([Kernel("router_dgrad", dgrad, early=lists)] if rounds else []),
        Kernel("up_projection_dgrad", ["let", "read tables", "read dh", "wait",
                                       *(row_term if lists or not rounds else []), "write a' of first",
                                       "write a' of last"], early=True),
        Kernel("up_projection_wgrad", ["read tables", "read dh", "read x", "write dw_up", "wait", "let",
                                       "write dw_up"], early=True),
        Kernel("aggregate_beside", ["let", "read a' of first", "read a' of last", *(["read dx"] if rounds else []),
                                    "write dx", "wait"], early=True),
        *([Kernel("router_wgrad", [f"read {operand}", "read x", "write dw_router", "wait"], True)] if routed else []),
    ]


def run(seed: int, launches: list[Kernel]) -> None:
    chance = random.Random(seed)
    started, may_start_next, ended = set(), set(), set()
    words: set[str] = set()
    uses = [{tuple(step.split(" ", 1)) for step in k.steps if step.startswith(("read", "write"))} for k in launches]
    left = [[sum(s == " ".join(use) for s in k.steps) for use in sorted(uses[i])] for i, k in enumerate(launches)]

    def begin(index: int, kind: str, memory: str) -> None:
        for other in range(index):
            for n, (kind_before, memory_before) in enumerate(sorted(uses[other])):
                conflict = memory == memory_before and "write" in (kind, kind_before)
                if conflict and left[other][n]:
                    raise BrokenRule(f"{launches[index].name}: {kind} {memory} before {launches[other].name} has ended")

    def kernel(index: int):
        me = launches[index]
        for step in me.steps:
            for _ in range(chance.randint(0, 4)):
                yield
            kind, _, memory = step.partition(" ")
            if kind == "let":
                may_start_next.add(index)
            elif kind == "wait":
                while index - 1 not in ended:
                    yield
            elif kind == "clear":
                words.discard(memory)
            elif kind == "announce":
                words.add(memory)
            elif kind == "await":
                while memory not in words:
                    yield
            else:
                begin(index, kind, memory)
                for _ in range(chance.randint(0, 4)):
                    yield
                left[index][sorted(uses[index]).index((kind, memory))] -= 1
        ended.add(index)

    players: dict[int, object] = {}
    speeds = [chance.random() ** 3 + 0.03 for _ in launches]
    for _ in range(100_000):
        if len(ended) == len(launches):
            return
        following = len(started)
        if following < len(launches):
            ahead = following - 1
            may = ahead < 0 or ahead in ended or (launches[following].early and ahead in may_start_next)
            if may and chance.random() < 0.3:
                started.add(following)
                players[following] = kernel(following)
        if not players:
            continue
        index = chance.choices(list(players), [speeds[i] for i in players])[0]
        try:
            next(players[index])
        except StopIteration:
            del players[index]
    raise BrokenRule("deadlock")


def calls(seed: int, *makers) -> list[Kernel]:
    """Several calls on the same memory."""
    chance = random.Random(seed)
    launches: list[Kernel] = []
    for make in makers:
        launches += make(chance)
    return launches


def step(chance, broken_forward: str = "", broken_backward: str = "", rounds: bool | None = None,
         lists: bool | None = None, one: bool | None = None) -> list[Kernel]:
    """rounds: whether tokens are rounded; where None, in a quarter of the calls with a router. lists: of these, whether
    some are listed; where None, in half of them. one: whether one kernel has the experts; where None, in a third unless
    a rule is broken."""
    routed = bool(rounds) or chance.random() < 0.5
    fp32_router = routed and chance.random() < 0.5
    if rounds is None:
        rounds = routed and chance.random() < 0.25
    if lists is None:
        lists = chance.random() < 0.5
    if one is None:
        one = not broken_forward and not broken_backward and chance.random() < 0.3
    return [*forward(routed, chance.random() < 0.3, broken_forward, rounds, chance.random() < 0.5, one),
            *backward(routed, broken_backward, fp32_router, rounds, rounds and lists)]


class LaunchModel(unittest.TestCase):
    def test_calls_in_sequence(self):
        for seed in range(400):
            run(seed, calls(seed, step, step, lambda chance: forward(chance.random() < 0.5), step))

    def test_early_up_projection_fwd_waits_before_it_lets(self):
        for seed in range(200):
            run(seed, calls(seed, *[lambda chance: step(chance, "wait_before_let")] * 2))

    def notices(self, **broken) -> None:
        for seed in range(1000):
            try:
                run(seed, calls(seed, *[lambda chance: step(chance, **broken)] * 2))
            except BrokenRule as rule:
                self.assertNotIn("deadlock", str(rule))
                return
        self.fail(f"{broken} goes unnoticed")

    def test_forward_needs_its_rules(self):
        for rule in ("let_before_wait", "only_first_experts", "nothing_awaited", "words_not_cleared"):
            with self.subTest(rule):
                self.notices(broken_forward=rule)

    def test_experts_of_few_tokens_need_their_rules(self):
        for rule in ("experts_read_at_once", "words_not_cleared"):
            with self.subTest(rule):
                self.notices(broken_forward=rule, one=True)

    def test_choose_tokens_needs_its_rules(self):
        for rule in ("keep_reads_at_once", "scan_never_waits", "emit_reads_at_once", "words_not_cleared"):
            with self.subTest(rule):
                self.notices(broken_forward=rule, rounds=True)

    def test_backward_needs_its_rules(self):
        for rule in ("wgrad_lets_at_once", "no_wait_at_end"):
            for rounds, lists in ((False, False), (True, False), (True, True)):
                with self.subTest(rule, rounds=rounds, lists=lists):
                    self.notices(broken_backward=rule, rounds=rounds, lists=lists)
        self.notices(broken_backward="dgrad_reads_at_once", rounds=True, lists=True)


if __name__ == "__main__":
    unittest.main()
