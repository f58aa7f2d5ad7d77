# SPDX-License-Identifier: Apache-2.0
"""Two GEMMs of which the second starts in the tail of the first (src/cuda/gemm/handover.cuh), played by coroutines that
random schedules advance. Each rule of the word between them is broken once, and the model must notice.
"""

import random
import unittest

import models
from models import play, require


def hand_over(seed: int, broken: str = "") -> None:
    """Two GEMMs (handover.cuh): CTAs of the second take the places of those of the first that have run out of tiles,
    and read what others may still store."""
    chance = random.Random(seed)
    ctas, warps = chance.randint(1, 4), 2
    segments = chance.choice([1, 2, 4, 9])
    first, second = (
        [s for s in range(segments) for _ in range(chance.choice([0, 1, 2, 5]))] for _ in range(2)
    )
    early = segments * 3 // 4  # segments that are handed over
    drawn, counted, done = [[], []], [0], [0]
    written = {(tile, warp): False for tile in range(len(first)) for warp in range(warps)}
    ended = []  # CTAs of the first kernel

    def draw(kernel, tiles):
        if len(drawn[kernel]) == len(tiles):
            return None
        drawn[kernel].append(True)
        return len(drawn[kernel]) - 1

    def cta_of_first(cta: int):
        mine, left = [], [warps]

        def warp(index: int):
            pending, due, at = [], True, 0

            def count():
                nonlocal due
                while pending and broken != "counted_before_written":
                    if chance.random() < 0.3:
                        written[pending.pop(0)] = True
                    yield
                due = False
                if broken != "one_warp_counts" or index == 0:
                    counted[0] += 1 if broken != "one_warp_counts" else warps

            while True:
                if at == len(mine):
                    mine.append(draw(0, first))
                tile = mine[at]
                at += 1
                if tile is None:
                    break
                if due and first[tile] >= early:
                    yield from count()
                for _ in range(chance.randint(0, 8)):
                    yield
                pending.append((tile, index))
                while len(pending) > 1 and chance.random() < 0.5:
                    written[pending.pop(0)] = True
            if due and broken != "not_counted_at_end":
                yield from count()
            left[0] -= 1
            if left[0] == 0:
                ended.append(cta)
            while pending:
                written[pending.pop(0)] = True
                yield
            done[0] += 1

        return [warp(index) for index in range(warps)]

    def cta_of_second(cta: int):
        while cta not in ended:
            yield
        ready = 0
        while (tile := draw(1, second)) is not None:
            segment = second[tile]
            if segment >= ready and segment < early:
                while counted[0] < ctas * warps:
                    yield
                ready = early
            elif segment >= ready:
                while done[0] < ctas * warps and broken != "end_not_awaited":
                    yield
                ready = segments
            for (other, _), there in written.items():
                require(there or first[other] != segment, "rows are read before they are written")
            yield

    warps_of_first = [player for cta in range(ctas) for player in cta_of_first(cta)]
    play(chance, [*warps_of_first, *[cta_of_second(cta) for cta in range(ctas)]])


class HandoverModel(models.TestCase):
    def test_handover(self):
        for seed in range(300):
            hand_over(seed)

    def test_handover_needs_its_rules(self):
        for rule in ("counted_before_written", "one_warp_counts", "not_counted_at_end", "end_not_awaited"):
            with self.subTest(rule):
                self.notices(hand_over, rule)


if __name__ == "__main__":
    unittest.main()
