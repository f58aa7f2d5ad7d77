# SPDX-License-Identifier: Apache-2.0
"""The barriers of src/cuda/gemm (ring.cuh, lent.cuh), played by coroutines that random schedules advance.

Producer and consumers follow the kernels' rules; every stage and every resident k_tile knows what lies in it and who
still reads it. Each rule that keeps them apart is broken once, and the model must notice.
"""

import random
import unittest

import models
from models import Barrier, Place, play, require


def lend(seed: int, together: bool, broken: str = "") -> None:
    """Stages lent to the epilogue: a cooperative CTA of two warpgroups, each warp alone, or (together) each warpgroup
    storing by its first warp."""
    chance = random.Random(seed)
    stages, lent = chance.choice([(4, 4), (4, 2), (3, 2), (4, 3)])
    k_tiles, tiles = chance.choice([1, 2, 5]), 6
    halves = [chance.choice([1, 2]) for _ in range(tiles)]  # 64-row parts that exist
    full = [Barrier(1) for _ in range(stages)]
    empty = [Barrier(2 if broken == "first_warp_releases" else 8) for _ in range(stages)]
    content, stored_from = [None] * stages, [0] * stages
    met = [[0, 0], [0, 0]]  # warps at the barrier of a warpgroup, barriers passed

    def producer():
        place = Place(stages)
        for tile in range(tiles):
            for i in range(k_tiles + lent):
                yield from empty[place.stage].wait(place.parity ^ 1)
                require(stored_from[place.stage] == 0, "a stage is filled while it is stored from")
                content[place.stage] = (tile, i)
                yield
                full[place.stage].arrive()
                place.advance()

    def warp(group: int, index: int):
        place, held, stores = Place(stages), None, []

        def release(stage):
            if broken != "first_warp_releases" or index == 0:
                empty[stage].arrive()

        def meet():
            met[group][0] += 1
            passed = met[group][1]
            if met[group][0] == 4:
                met[group] = [0, passed + 1]
            while met[group][1] == passed:
                yield

        def take(tile, i):
            yield from full[place.stage].wait(place.parity)
            require(content[place.stage] == (tile, i), "a warp missed a phase of a stage")

        def give_back(later):  # all but the last `later` stores have been read
            if held is None:
                return
            while len(stores) > later and broken != "no_wait_for_stores":
                if chance.random() < 0.3:
                    counts, at = stores.pop(0)
                    counts[at] -= 1
                yield
            release(held)

        for tile in range(tiles):
            if halves[tile] <= group:
                if broken != "no_settle":
                    yield from give_back(0)
                held = None
                for i in range(k_tiles + lent):
                    yield from take(tile, i)
                    release(place.stage)
                    place.advance()
                    yield
                continue
            previous = None
            for i in range(k_tiles):
                yield from take(tile, i)
                if i > 0:
                    release(previous)
                else:
                    if broken != "no_settle":
                        yield from give_back(0)
                    held = None
                previous = place.stage
                place.advance()
                yield
            release(previous)
            for i in range(k_tiles, k_tiles + lent):
                yield from take(tile, i)
                stage = place.stage
                place.advance()
                for _ in range(chance.randint(0, 5)):
                    yield
                if together:
                    yield from meet()
                if together and index > 0:
                    release(stage)
                else:
                    stored_from[stage] += 1
                    stores.append((stored_from, stage))
                    yield from give_back(1)
                    held = stage
                yield

    play(chance, [producer(), *[warp(group, index) for group in range(2) for index in range(4)]])


def share(seed: int, broken: str = "") -> None:
    """A pair of CTAs that share B: each loads its A, and half of B into both; each warp releases a stage to both."""
    chance = random.Random(seed)
    stages, k_tiles, warps, ctas = chance.choice([2, 3, 4]), 20, 4, range(2)
    at_home, half_awaited = broken == "released_at_home", broken == "half_of_b_awaited"
    full = [[Barrier(2 if half_awaited else 3) for _ in range(stages)] for _ in ctas]
    empty = [[Barrier(warps if at_home else 2 * warps) for _ in range(stages)] for _ in ctas]
    content = [[[None] * 3 for _ in range(stages)] for _ in ctas]  # A, the halves of B
    readers = [[0] * stages for _ in ctas]

    def land(cta, stage, part, k_tile):
        require(readers[cta][stage] == 0, "a stage is filled while it is read")
        content[cta][stage][part] = k_tile

    def producer(cta: int):
        place = Place(stages)
        for k_tile in range(k_tiles):
            yield from empty[cta][place.stage].wait(place.parity ^ 1)
            for other in chance.sample(ctas, 2):
                for _ in range(chance.randint(0, 3)):
                    yield
                land(other, place.stage, 1 + cta, k_tile)
                if other == cta or not half_awaited:
                    full[other][place.stage].arrive()
            land(cta, place.stage, 0, k_tile)
            full[cta][place.stage].arrive()
            place.advance()

    def warp(cta: int):
        place = Place(stages)

        def release(stage):
            readers[cta][stage] -= 1
            for other in [cta] if at_home else ctas:
                empty[other][stage].arrive()

        previous = None
        for k_tile in range(k_tiles):
            yield from full[cta][place.stage].wait(place.parity)
            require(content[cta][place.stage] == [k_tile] * 3, "what is multiplied is not all there")
            readers[cta][place.stage] += 1
            for _ in range(chance.randint(0, 3)):
                yield
            if k_tile > 0:
                release(previous)
            previous = place.stage
            place.advance()
        release(previous)

    play(chance, [*map(producer, ctas), *[warp(cta) for cta in ctas for _ in range(warps)]])


def follow(seed: int, broken: str = "") -> None:
    """B with a stage less than A (b_behind): four gathering warps, of which one, in turns, loads the B of the k_tile
    before; behind a tile's last A it waits for one more stage."""
    chance = random.Random(seed)
    stages, warps, readers = chance.choice([3, 4]), 4, 2
    tiles = [chance.choice([1, 2, 3, 4, 7]) for _ in range(5)]
    full, empty = [Barrier(warps + 1) for _ in range(stages)], [Barrier(readers) for _ in range(stages)]
    a, b = [[None] * warps for _ in range(stages)], [None] * (stages - 1)
    reads_a, reads_b = [0] * stages, [0] * (stages - 1)

    def producer(warp: int):
        place, behind, b_stage = Place(stages), Place(stages), 0

        def load_b(tile, k_tile):
            nonlocal b_stage
            mine = warp == (tiles[tile] - k_tile + 2) % warps
            if mine:
                require(reads_b[b_stage] == 0, "B is filled while it is read")
                b[b_stage] = (tile, k_tile)
                yield
                full[behind.stage].arrive()
            if mine or broken != "one_warp_counts":
                behind.advance()
                b_stage = (b_stage + 1) % (stages - 1)

        for tile, k_tiles in enumerate(tiles):
            for k_tile in range(k_tiles):
                yield from empty[place.stage].wait(place.parity ^ 1)
                if broken == "not_behind":
                    yield from load_b(tile, k_tile)
                elif k_tile > 0:
                    yield from load_b(tile, k_tile - 1)
                require(reads_a[place.stage] == 0, "A is filled while it is read")
                a[place.stage][warp] = (tile, k_tile)
                yield
                full[place.stage].arrive()
                place.advance()
            if broken == "not_behind":
                continue
            if warp == 3 and broken != "last_at_once":  # whose turn it is
                yield from empty[place.stage].wait(place.parity ^ 1)
            if broken != "last_with_next_tile":
                yield from load_b(tile, k_tiles - 1)

    def reader():
        place, b_stage, held = Place(stages), 0, None

        def release():
            if held is not None:
                reads_a[held[0]] -= 1
                reads_b[held[1]] -= 1
                empty[held[0]].arrive()

        for tile, k_tiles in enumerate(tiles):
            for k_tile in range(k_tiles):
                yield from full[place.stage].wait(place.parity)
                there = [*a[place.stage], b[b_stage]]
                require(there == [(tile, k_tile)] * (warps + 1), "what is multiplied is not all there")
                reads_a[place.stage] += 1
                reads_b[b_stage] += 1
                for _ in range(chance.randint(0, 3)):
                    yield
                release()
                held = place.stage, b_stage
                place.advance()
                b_stage = (b_stage + 1) % (stages - 1)
        release()

    play(chance, [*map(producer, range(warps)), *[reader() for _ in range(readers)]])


def stay(seed: int, broken: str = "") -> None:
    """B that stays for a run of tiles: ping-pong warpgroups, runs of whole pairs of tiles, the last perhaps without
    rows."""
    chance = random.Random(seed)
    stages, k_tiles = chance.choice([2, 4, 8]), chance.choice([1, 2, 4, 8])
    sequence = []  # run, tile in it, whether it has rows, tiles of the run to come
    for run in range(6):
        count, ragged = 2 * chance.randint(1, 3), chance.random() < 0.5
        sequence += [(run, i, not (ragged and i == count - 1), count - 1 - i) for i in range(count)]
    full, empty = [Barrier(1) for _ in range(stages)], [Barrier(1) for _ in range(stages)]
    arrivals = 1 if broken == "one_warpgroup_releases" else 2
    resident_full = [Barrier(1) for _ in range(k_tiles)]
    resident_empty = [Barrier(arrivals) for _ in range(k_tiles)]
    a, b, readers, turn = [None] * stages, [None] * k_tiles, [0] * k_tiles, [True, False]

    def producer():
        place = Place(stages)
        for run, i, rows, _ in sequence:
            for k_tile in range(k_tiles if rows else 0):
                if i == 0:
                    if broken != "no_wait_for_resident":
                        yield from resident_empty[k_tile].wait(run & 1 ^ 1)
                    require(readers[k_tile] == 0, "B is replaced while it is read")
                    b[k_tile] = run
                    yield
                    resident_full[k_tile].arrive()
                yield from empty[place.stage].wait(place.parity ^ 1)
                a[place.stage] = (run, i, k_tile)
                yield
                full[place.stage].arrive()
                place.advance()

    def release_resident(group, k_tile, to_come):
        if to_come < 2 and (broken != "one_warpgroup_releases" or group == 0):
            resident_empty[k_tile].arrive()

    def warpgroup(group: int):
        place = Place(stages)
        for number, (run, i, rows, to_come) in enumerate(sequence):
            if number % 2 != group:
                place.advance(k_tiles if rows else 0)
                continue
            while not turn[group]:
                yield
            turn[group] = False
            if not rows:
                for k_tile in range(k_tiles if broken != "no_arrivals_without_rows" else 0):
                    yield from resident_full[k_tile].wait(run & 1)
                    release_resident(group, k_tile, to_come)
                    yield
                turn[group ^ 1] = True
                continue
            previous = None
            for k_tile in range(k_tiles):
                if i < 2:
                    yield from resident_full[k_tile].wait(run & 1)
                yield from full[place.stage].wait(place.parity)
                require(a[place.stage] == (run, i, k_tile), "a warpgroup missed a phase of a stage")
                require(b[k_tile] == run, "B of another run is multiplied")
                readers[k_tile] += 1
                for _ in range(chance.randint(0, 3)):
                    yield
                if k_tile > 0:
                    readers[k_tile - 1] -= 1
                    empty[previous].arrive()
                    release_resident(group, k_tile - 1, to_come)
                previous = place.stage
                place.advance()
                yield
            turn[group ^ 1] = True
            for _ in range(chance.randint(0, 4)):
                yield
            readers[k_tiles - 1] -= 1
            empty[previous].arrive()
            release_resident(group, k_tiles - 1, to_come)
            for _ in range(chance.randint(0, 30)):  # the epilogue
                yield

    play(chance, [producer(), warpgroup(0), warpgroup(1)])


class RingModel(models.TestCase):
    def test_lent_stages(self):
        for seed in range(60):
            lend(seed, together=seed % 2 == 1)

    def test_lent_stages_need_their_rules(self):
        for rule in ("first_warp_releases", "no_settle", "no_wait_for_stores"):
            with self.subTest(rule):
                self.notices(lend, False, rule)

    def test_shared_b(self):
        for seed in range(200):
            share(seed)

    def test_shared_b_needs_its_rules(self):
        for rule in ("released_at_home", "half_of_b_awaited"):
            with self.subTest(rule):
                self.notices(share, rule)

    def test_b_behind_a(self):
        for seed in range(200):
            follow(seed)

    def test_b_behind_a_needs_its_rules(self):
        for rule in ("not_behind", "last_at_once", "last_with_next_tile", "one_warp_counts"):
            with self.subTest(rule):
                self.notices(follow, rule)

    def test_resident_b(self):
        for seed in range(200):
            stay(seed)

    def test_resident_b_needs_its_rules(self):
        for rule in ("one_warpgroup_releases", "no_wait_for_resident", "no_arrivals_without_rows"):
            with self.subTest(rule):
                self.notices(stay, rule)


if __name__ == "__main__":
    unittest.main()
