#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One rank of the fused forward pass as a fluid, all ranks alike: how long would it take if ..?

Tasks, rows and their order are those of src/dist/plan.hpp, drawn for one owner; what a task takes, what the link and a
communication warp carry are rates, from the timeline of passes on two and four H200 (bench/results/h200x4 and h200x2,
2026-11-22-fused-timeline.json). Time goes in steps of a microsecond. Not in it: other ranks that are late, caches,
clocks. It repeats the measured passes within 4%, see the rows with `measured`.

    bench/dist/simulate.py [--out FILE]
"""
import argparse
import collections
import dataclasses
import json
import random

BLOCK_ROWS, UNIT_BLOCKS, TILE_COLUMNS, K_TILE = 128, 16, 256, 64
CTAS = 132
WARPS = 2 * CTAS  # that communicate
MB = 1e6


@dataclasses.dataclass(frozen=True)
class Layer:
    name: str
    ranks: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    gated: bool = True
    tokens: int = 8192


@dataclasses.dataclass(frozen=True)
class Rates:
    """GB/s, us and MB."""
    link: float  # pulls and sends together, in one direction
    read: float = 430  # rows, of all warps
    written: float = 1200
    pulls_in_flight: float = 2.7  # beside sends they get the link in proportion
    sends_in_flight: float = 13
    row_latency: float = 4
    k_tile_of_up: float = 0.66
    k_tile_of_down: float = 0.735
    end_of_up: float = 1.5
    end_of_down: float = 3.2
    head: float = 29  # until tasks may begin
    tail: float = 55  # from the last result to the end: words, sums
    sum_of_token: float = 3.6  # dedup: of one communication warp, and for each of the token's rows
    sum_of_row: float = 2.45


@dataclasses.dataclass(frozen=True)
class Way:
    transfer: str  # direct, once, dedup
    lag: int = 8
    ticket_rows: int = 0  # rows that a warp draws at a time; 0: row i is warp (i mod warps)'s
    own_stay: bool = False  # dedup: results of the rank's own tokens are added up at the end, where they lie


class Rows:
    """What one owner gets: rows in the order of the pulls, blocks, and the places of each token's rows."""

    def __init__(self, layer):
        rng = random.Random(1)
        local = layer.experts // layer.ranks
        self.source = []  # of a token that has rows here
        by_expert = [[[] for _ in range(layer.ranks)] for _ in range(local)]
        for source in range(layer.ranks):
            for _ in range(layer.tokens):
                experts = [e for e in rng.sample(range(layer.experts), layer.top_k) if e < local]
                for e in experts:
                    by_expert[e][source].append(len(self.source))
                if experts:
                    self.source.append(source)
        self.blocks_of = [[] for _ in self.source]
        self.block_rows, self.units, self.rows = [], [], []  # rows: (token, block)
        for sources in by_expert:
            tokens = [t for of_source in sources for t in of_source]
            first_block = len(self.block_rows)
            for begin in range(0, len(tokens), BLOCK_ROWS):
                for token in tokens[begin:begin + BLOCK_ROWS]:
                    self.blocks_of[token].append(len(self.block_rows))
                    self.rows.append((token, len(self.block_rows)))
                self.block_rows.append(min(BLOCK_ROWS, len(tokens) - begin))
            blocks = list(range(first_block, len(self.block_rows)))
            for left in range(-(-len(blocks) // UNIT_BLOCKS), 0, -1):  # units of this expert, larger ones first
                size = -(-len(blocks) // left)
                self.units.append(blocks[:size])
                blocks = blocks[size:]

    def brought(self, transfer):
        """(number, token, blocks that it is written to) of each row that crosses."""
        seen = set()
        for number, (token, block) in enumerate(self.rows):
            if transfer == "direct":
                yield number, token, [block]
            elif token not in seen:
                seen.add(token)
                yield number, token, self.blocks_of[token]


def tasks_of(units, lag, up_tiles, down_tiles):
    tasks = collections.deque()

    def add(kind, unit, tiles):
        for tile in range(tiles):
            tasks.extend((kind, block) for block in (unit if tile % 2 == 0 else reversed(unit)))

    for step in range(len(units) + lag):
        if step < len(units):
            add("up", units[step], up_tiles)
        if step >= lag:
            add("down", units[step - lag], down_tiles)
    return tasks


class Pass:
    def __init__(self, layer, way, rates):
        self.layer, self.way, self.rates = layer, way, rates
        self.rows = Rows(layer)
        self.row_mb = 2 * layer.hidden / MB
        columns = TILE_COLUMNS // 2 if layer.gated else TILE_COLUMNS
        self.tiles = {"up": -(-layer.intermediate // columns), "down": -(-layer.hidden // TILE_COLUMNS)}
        self.task_us = {"up": layer.hidden / K_TILE * rates.k_tile_of_up + rates.end_of_up,
                        "down": layer.intermediate / K_TILE * rates.k_tile_of_down + rates.end_of_down}
        self.tasks = tasks_of(self.rows.units, way.lag, self.tiles["up"], self.tiles["down"])
        blocks = len(self.rows.block_rows)
        self.arrived, self.done = [0] * blocks, {"up": [0] * blocks, "down": [0] * blocks}
        self.on_the_way = collections.deque()
        self.queues, self.tickets = [collections.deque() for _ in range(WARPS)], {}
        for number, token, targets in self.rows.brought(way.transfer):
            if way.ticket_rows:
                self.tickets.setdefault(number // way.ticket_rows, []).append((token, targets))
            else:
                self.queues[number % WARPS].append((token, targets))
        self.tickets = collections.deque(v for _, v in sorted(self.tickets.items()))
        self.debt, self.active = [0.0] * WARPS, WARPS
        self.sends = 0.0  # MB that wait for the link
        self.running, self.waiting = [None] * CTAS, [None] * CTAS
        self.us_without_rows = 0.0
        last = sorted(range(len(self.rows.source)), key=lambda t: self.rows.blocks_of[t][-1])
        self.sums = collections.deque(t for t in last if self.rows.source[t] != 0 or not way.own_stay)
        self.sum_time = 0.0

    def pull(self, now):
        """A step of all warps; MB that crossed."""
        rates, link = self.rates, self.rates.link / 1e3
        if self.sends > 0:
            share = rates.pulls_in_flight / (rates.pulls_in_flight + min(self.sends, rates.sends_in_flight))
            link = max(link * share, link - self.sends)
        link_us = self.row_mb * max(1, self.active) / link
        crossed, self.active = 0.0, 0
        for warp in range(WARPS):
            left = 1 - self.debt[warp]
            queue = self.queues[warp]
            while left > 0:
                if not queue and self.tickets:
                    queue.extend(self.tickets.popleft())
                if not queue:
                    break
                token, targets = queue.popleft()
                us = self.row_mb * WARPS * 1e3 * max(1 / rates.read, len(targets) / rates.written)
                if self.rows.source[token] != 0:
                    us = max(us, link_us)
                    crossed += self.row_mb
                left -= us
                self.on_the_way.append((now + rates.row_latency - min(left, 0), targets))
            self.debt[warp] = max(-left, 0)
            self.active += bool(queue or self.tickets)
        return crossed

    def step_cta(self, cta, now):
        if self.running[cta] is not None and self.running[cta][0] <= now:
            _, kind, block = self.running[cta]
            self.running[cta] = None
            self.done[kind][block] += 1
            if kind == "down" and self.way.transfer != "dedup":
                others = (self.layer.ranks - 1) / self.layer.ranks
                self.sends += self.rows.block_rows[block] * 2 * TILE_COLUMNS / MB * others
        if self.running[cta] is not None:
            return
        if self.waiting[cta] is None and self.tasks:
            if self.tasks[0][0] == "down" and self.sends > self.rates.sends_in_flight:
                return  # stores do not get away
            self.waiting[cta] = self.tasks.popleft()
        if self.waiting[cta] is None:
            return
        kind, block = self.waiting[cta]
        if kind == "up":
            ready = self.arrived[block] == self.rows.block_rows[block]
            self.us_without_rows += 0 if ready else 1 / CTAS
        else:
            ready = self.done["up"][block] == self.tiles["up"]
        if ready:
            self.running[cta] = (now + self.task_us[kind], kind, block)
            self.waiting[cta] = None

    def add_up(self):
        """dedup: a step of the warps that have pulled all their rows."""
        self.sum_time = min(self.sum_time + WARPS, WARPS)
        while self.sums and self.sum_time > 0:
            token = self.sums[0]
            blocks = self.rows.blocks_of[token]
            if any(self.done["down"][b] < self.tiles["down"] for b in blocks):
                return
            self.sums.popleft()
            self.sum_time -= self.rates.sum_of_token + len(blocks) * self.rates.sum_of_row
            if self.rows.source[token] != 0:
                self.sends += self.row_mb

    def run(self):
        now, pulled, tasks_end = self.rates.head, None, None
        while True:
            crossed = 0.0
            if pulled is None:
                crossed = self.pull(now)
                if not self.tickets and not any(self.queues):
                    pulled = now
            while self.on_the_way and self.on_the_way[0][0] <= now:
                for block in self.on_the_way.popleft()[1]:
                    self.arrived[block] += 1
            self.sends = max(0.0, self.sends - max(0.0, self.rates.link / 1e3 - crossed))
            for cta in range(CTAS):
                self.step_cta(cta, now)
            sums = self.way.transfer == "dedup"
            if sums and pulled is not None:
                self.add_up()
            if tasks_end is None and not self.tasks and not any(self.running) and not any(self.waiting):
                tasks_end = now
            now += 1
            if tasks_end is not None and self.sends == 0 and not (sums and self.sums):
                return {"us": round(now + self.rates.tail), "pulled": round(pulled), "tasks_end": round(tasks_end),
                        "us_without_rows": round(self.us_without_rows)}


def cases():
    """(layer, way, rates, what the kernel took by its timeline in us, or None)"""
    qwen4 = Layer("Qwen3-30B", 4, 2048, 768, 128, 8)
    qwen2 = dataclasses.replace(qwen4, ranks=2)
    flash4 = Layer("FlashDMoE", 4, 2048, 2048, 32, 2, gated=False)
    flash2 = dataclasses.replace(flash4, ranks=2)
    # With two GPUs the clock is lower.
    four, two = Rates(link=265), Rates(link=330, tail=75, k_tile_of_up=0.715, k_tile_of_down=0.79)
    flash = {"head": 16, "tail": 45, "end_of_up": 2.6}
    short4 = dataclasses.replace(four, k_tile_of_up=0.7, k_tile_of_down=0.68, end_of_down=3, **flash)
    short2 = dataclasses.replace(two, k_tile_of_up=0.72, k_tile_of_down=0.71, end_of_down=1.7, **flash)
    faster = {"read": 800, "written": 1800}
    yield qwen4, Way("once"), four, 1305
    yield qwen4, Way("direct", lag=32), four, None
    yield qwen4, Way("dedup", lag=29), dataclasses.replace(four, tail=40), None
    yield qwen2, Way("once"), two, 1212
    yield qwen2, Way("direct", lag=16), two, 1219
    yield flash4, Way("direct"), short4, 510
    yield flash2, Way("direct"), short2, 508
    yield qwen4, Way("once"), dataclasses.replace(four, **faster), None
    yield qwen2, Way("once"), dataclasses.replace(two, **faster), None
    yield qwen2, Way("direct", lag=16), dataclasses.replace(two, **faster), None
    yield flash4, Way("direct"), dataclasses.replace(short4, **faster), None
    yield flash2, Way("direct"), dataclasses.replace(short2, **faster), None
    for ticket_rows in (1, 2, 4, 8, 16):
        yield qwen4, Way("once", ticket_rows=ticket_rows), four, None
    yield qwen2, Way("once", ticket_rows=2), two, None
    yield qwen4, Way("once", ticket_rows=2), dataclasses.replace(four, **faster), None
    yield qwen4, Way("once", ticket_rows=4), dataclasses.replace(four, **faster), None
    yield qwen2, Way("once", ticket_rows=4), dataclasses.replace(two, **faster), None
    for changed in ({}, faster):
        yield flash4, Way("direct", ticket_rows=2), dataclasses.replace(short4, **changed), None
        yield flash2, Way("direct", ticket_rows=2), dataclasses.replace(short2, **changed), None
    for own_stay in (False, True):
        for token, row in ((3.6, 2.45), (2.0, 2.0), (1.0, 1.5), (0.7, 1.2), (0.3, 0.6)):
            rates = dataclasses.replace(four, tail=45, sum_of_token=token, sum_of_row=row)
            yield qwen4, Way("dedup", lag=4, own_stay=own_stay), rates, None
    for token, row in ((1.0, 1.5), (1.5, 2.2)):
        way = Way("dedup", lag=4, own_stay=True, ticket_rows=4)
        sums = {"sum_of_token": token, "sum_of_row": row} | faster
        yield qwen4, way, dataclasses.replace(four, tail=45, **sums), None
        yield qwen2, way, dataclasses.replace(two, tail=40, **sums), None
    for token, row in ((1.0, 1.5), (0.7, 1.2), (0.3, 0.6)):
        rates = dataclasses.replace(two, tail=40, sum_of_token=token, sum_of_row=row)
        yield qwen2, Way("dedup", own_stay=True), rates, None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--out", help="file of the results, JSON")
    args = parser.parse_args()
    defaults = {f.name: f.default for f in dataclasses.fields(Rates)}
    rows = []
    for layer, way, rates, measured in cases():
        result = Pass(layer, way, rates).run()
        row = {"config": layer.name, "gpus": layer.ranks} | dataclasses.asdict(way)
        row["rates"] = {k: v for k, v in dataclasses.asdict(rates).items() if v != defaults[k]}
        row |= {"measured": measured} if measured else {}
        rows.append(row | result)
        print(json.dumps(rows[-1]), flush=True)
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            file.write('{"command": "bench/dist/simulate.py --out FILE", "device": "none: a simulation",\n "rows": [\n')
            file.write(",\n".join("  " + json.dumps(row) for row in rows) + "\n]}\n")


if __name__ == "__main__":
    main()
