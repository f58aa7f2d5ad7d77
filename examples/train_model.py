#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a language model of real size with MoE layers over GPUs: bench/end_to_end/train.py, where the code is.

    torchrun --nproc-per-node 2 examples/train_model.py --config 7B-n256 --layers 12 --text SRC --out RUN
    python examples/train_model.py --config small --text docs --out RUN        on the CPU
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "bench" / "end_to_end"))

import train  # noqa: E402
import training  # noqa: E402

if __name__ == "__main__":
    training.end(train.main)
