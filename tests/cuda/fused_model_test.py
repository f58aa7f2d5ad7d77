# SPDX-License-Identifier: Apache-2.0
"""The ring of stages in the fused kernel (src/expert_parallel/fused), whose consumers store the last task under the k
loop of the next one, played by coroutines that random schedules advance. Each rule is broken once, and the model must
notice.
"""

import random
import unittest

import models
from models import Barrier, Place, play, require


def fused(seed: int, broken: str = "") -> None:
    """The fused kernel over several GPUs (src/expert_parallel/fused/forward.cuh): up tasks store from their lent
    stages and announce when that is written, under the next task; down tasks give theirs back at once. A task may need
    what the last one has announced."""
    chance = random.Random(seed)
    stages, lent_to_up = 4, chance.choice([1, 2])
    tasks = [(chance.random() < 0.5, chance.choice([1, 2, 5, 7]), chance.choice([1, 2, 2]), chance.random() < 0.4)
             for _ in range(7)]  # up, k_tiles, 64-row parts, whether it needs what the one before has announced
    full, empty = [Barrier(1) for _ in range(stages)], [Barrier(8) for _ in range(stages)]
    content, stored_from, announced = [None] * stages, [0] * stages, [0] * len(tasks)

    def lent(task):
        return lent_to_up if tasks[task][0] else 1

    def producer():
        place = Place(stages)
        for task, (_, k_tiles, _, needs) in enumerate(tasks):
            while needs and task > 0 and announced[task - 1] < 8:
                yield
            for i in range(k_tiles + lent(task)):
                yield from empty[place.stage].wait(place.parity ^ 1)
                require(stored_from[place.stage] == 0, "a stage is filled while it is stored from")
                content[place.stage] = (task, i)
                yield
                full[place.stage].arrive()
                place.advance()

    def warp(group: int):
        place, held, unread, unwritten, sent = Place(stages), None, [], [0], None

        def take(task, i):
            yield from full[place.stage].wait(place.parity)
            require(content[place.stage] == (task, i), "a warp missed a phase of a stage")

        def read(later):
            while len(unread) > later:
                if chance.random() < 0.3:
                    stored_from[unread.pop(0)] -= 1
                    unwritten[0] -= 1
                yield

        def complete():  # what it stored for the up before is written
            nonlocal sent
            if broken != "counted_before_written":
                yield from read(0)
            require(unwritten[0] == 0, "announced before it is written")
            announced[sent] += 1
            sent = None

        def settle():
            nonlocal held
            if held is not None:
                yield from read(0)
                empty[held].arrive()
            held = None

        for task, (up, k_tiles, parts, _) in enumerate(tasks):
            if parts <= group:
                if sent is not None:
                    yield from complete()
                yield from settle()
                for i in range(k_tiles + lent(task)):
                    yield from take(task, i)
                    empty[place.stage].arrive()
                    place.advance()
                    yield
            else:
                previous = None
                for i in range(k_tiles):
                    there = full[place.stage].parity != place.parity
                    if sent is not None and (i == 4 or (not there and broken != "counted_at_fixed_time")):
                        yield from complete()
                    yield from take(task, i)
                    if i > 0:
                        empty[previous].arrive()
                    else:
                        yield from settle()
                    previous = place.stage
                    place.advance()
                    yield
                if sent is not None:
                    yield from complete()
                empty[previous].arrive()
                for i in range(k_tiles, k_tiles + lent(task)):
                    yield from take(task, i)
                    stage = place.stage
                    place.advance()
                    for _ in range(chance.randint(0, 5)):
                        yield
                    if not up:
                        empty[stage].arrive()
                        continue
                    stored_from[stage] += 1
                    unwritten[0] += 1
                    unread.append(stage)
                    yield from read(1)
                    if held is not None:
                        empty[held].arrive()
                    held = stage
            if up:
                sent = task
            else:
                announced[task] += 1
        if sent is not None:
            yield from complete()

    play(chance, [producer(), *[warp(group) for group in range(2) for _ in range(4)]])


class FusedModel(models.TestCase):
    def test_fused_kernel(self):
        for seed in range(100):
            fused(seed)

    def test_fused_kernel_needs_its_rules(self):
        for rule in ("counted_before_written", "counted_at_fixed_time"):
            with self.subTest(rule):
                self.notices(fused, rule)


if __name__ == "__main__":
    unittest.main()
