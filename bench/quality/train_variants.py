#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains one small model with each variant of token rounding, from the same seeds on the same data.

    train_variants.py --config 95M-2of64 --variants top-k,nr-f,nr-f-tile-1024 --seeds 0,1,2 --steps 3662 --text SRC \
        --state quality-0.json

Variants of one seed begin with the same weights and see the same batches; held-out text is judged by plain top-k for
all of them. A run that is over is in the state file; the same command goes on with those that are missing. One process
for each GPU, each with seeds and a file of its own; compare_variants.py then has the table.
"""

import argparse
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1] / "end_to_end"))

import losses  # noqa: E402
import training  # noqa: E402
import variants  # noqa: E402


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    losses.add_flags(parser, steps=3662, sequences=16, learning_rate=1e-3)
    parser.add_argument("--variants", default=",".join(variants.VARIANTS), help="of " + ", ".join(variants.VARIANTS))
    return parser.parse_args()


def run(a) -> None:
    c, names, seeds = training.configuration(a), a.variants.split(","), losses.numbers(a.seeds)
    for name in names:
        if name not in variants.VARIANTS:
            raise training.Stop(f"variant {name!r}: unknown; choose from {', '.join(variants.VARIANTS)}")
    with training.ranks() as here:
        state = losses.opened(a, here, losses.sizes(a, c))
        data = training.corpus(a, c, here)
        plain = variants.Layer(variants.PLAIN, c.layers, 0)
        trainer = training.Trainer(c, here, plain, a)

        def one(name: str, seed: int) -> dict:
            layer = variants.Layer(name, c.layers, seed)
            done = losses.train(a, trainer, data, layer, seed, evaluated=plain, at_step=layer.at_step)
            return {**done, "rows": layer.rows()}

        losses.complete(a, here, state, names, seeds, one)


if __name__ == "__main__":
    training.end(lambda: run(arguments()))
