# SPDX-License-Identifier: Apache-2.0
"""The slabs of src/cuda/epilogue/wgrad_sums.cuh, played by coroutines that random schedules advance. Each rule
that keeps the warps that fill them apart from TMA, which reads them, is broken once, and the model must notice."""

import random
import unittest

import models
from models import play, require


def pace(seed: int, broken: str = "") -> None:
    """Sums of a warpgroup that TMA stores piece by piece (epilogue/wgrad_sums.cuh): four of eight pieces are in slabs,
    the others in registers until these have been read. Warp w issues pieces w and w + 4."""
    chance = random.Random(seed)
    slabs, pieces, warps, tiles = 4, 8, 4, 5
    content = [[None] * warps for _ in range(slabs)]
    reading = [0] * slabs
    met = [0, 0]  # warps at the barrier, barriers passed

    def warp(index: int):
        issued = []  # slabs that TMA still reads

        def meet():
            met[0] += 1
            passed = met[1]
            if met[0] == warps:
                met[:] = 0, passed + 1
            while met[1] == passed:
                yield

        def wait_read():
            while issued:
                if chance.random() < 0.2:
                    reading[issued.pop(0)] -= 1
                yield

        def fill(waits, tile, first):
            if waits and (broken != "one_warp_waits" or index == 0):
                yield from wait_read()
            if broken != "no_meeting_before":
                yield from meet()
            for slab in range(slabs):
                require(reading[slab] == 0, "a slab is filled while it is stored from")
                content[slab][index] = (tile, first + slab)
                yield
            if broken != "no_meeting_after":
                yield from meet()

        for tile in range(tiles):
            yield from fill(broken != "no_wait_before_a_tile", tile, 0)
            for piece in range(pieces):
                if piece == slabs:
                    yield from fill(broken != "no_wait_before_the_second", tile, slabs)
                place = piece % slabs
                if index == place:
                    require(content[place] == [(tile, piece)] * warps, "what is stored is not all there")
                    reading[place] += 1
                    issued.append(place)
                for _ in range(chance.randint(0, 12)):
                    if issued and chance.random() < 0.05:
                        reading[issued.pop(0)] -= 1
                    yield
        yield from wait_read()

    play(chance, [warp(index) for index in range(warps)])


class PaceModel(models.TestCase):
    def test_paced_stores(self):
        for seed in range(200):
            pace(seed)

    def test_paced_stores_need_their_rules(self):
        for rule in (
            "no_wait_before_a_tile",
            "no_wait_before_the_second",
            "no_meeting_before",
            "no_meeting_after",
            "one_warp_waits",
        ):
            with self.subTest(rule):
                self.notices(pace, rule)


if __name__ == "__main__":
    unittest.main()
