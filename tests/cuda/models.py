# SPDX-License-Identifier: Apache-2.0
"""What the models of the kernels' barriers are made of: coroutines that random schedules advance."""

import random
import unittest


class BrokenRule(Exception):
    pass


def require(condition: bool, what: str) -> None:
    if not condition:
        raise BrokenRule(what)


class Barrier:
    """An mbarrier: the phase of parity p has ended when `parity` is no longer p."""

    def __init__(self, arrivals: int):
        self.arrivals = self.left = arrivals
        self.parity = 0

    def arrive(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.left = self.arrivals
            self.parity ^= 1

    def wait(self, parity: int):
        while self.parity == parity:
            yield


class Place:
    """A position in the ring of stages (PipelineState)."""

    def __init__(self, stages: int):
        self.stages, self.stage, self.parity = stages, 0, 0

    def advance(self, count: int = 1) -> None:
        position = self.stage + count
        self.parity ^= position // self.stages & 1
        self.stage = position % self.stages


def play(chance: random.Random, players: list) -> None:
    """Until all have ended; some of them are much slower than others."""
    weights = [chance.random() ** 3 + 0.03 for _ in players]
    alive = list(range(len(players)))
    for _ in range(300_000):  # ten times what the slowest schedule takes
        if not alive:
            return
        player = chance.choices(alive, [weights[i] for i in alive])[0]
        try:
            next(players[player])
        except StopIteration:
            alive.remove(player)
    raise BrokenRule("deadlock")


class TestCase(unittest.TestCase):
    def notices(self, model, *arguments) -> None:
        for seed in range(200):
            try:
                model(seed, *arguments)
            except BrokenRule:
                return
        self.fail(f"{arguments[-1]} goes unnoticed")
