# SPDX-License-Identifier: Apache-2.0
"""bench/end_to_end: what is gathered when, the head's gradient, and what the first steps leave behind."""

import argparse
import dataclasses
import gc
import pathlib
import sys
import unittest
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench" / "end_to_end"))

import model as models  # noqa: E402
import text  # noqa: E402
import training  # noqa: E402


def corpus(c) -> text.Corpus:
    """A text of the vocabulary of a configuration."""
    ids = torch.randint(0, c.vocabulary, (3000,), generator=torch.Generator().manual_seed(0)).numpy()
    return text.Corpus(ids, ids, "", c.vocabulary)


def trainer_of(c, here) -> training.Trainer:
    """Of torch's layer, on the CPU."""
    arguments = argparse.Namespace(attention=None, deterministic=False, eager=True, recompute=False, seed=0,
                                   keep_gathered=False)
    return training.Trainer(c, here, training.load("torch-eager"), arguments)


class Parts(unittest.TestCase):
    untied = dataclasses.replace(models.CONFIGURATIONS["tiny"], tied=False)

    def test_gradients_are_added_in_fp32(self):
        """One product after another, none of them rounded to the type of its operands."""
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randn(shape, generator=generator) for shape in ((7, 30), (30, 5)))
        total = torch.ones(7, 5)
        for part, other in zip(a.split(10, dim=1), b.split(10), strict=True):
            models.add_product(total, part, other)
        torch.testing.assert_close(total, 1 + a @ b)

    def test_it_is_a_part_of_its_own(self):
        """Its loss and gradients are those of the whole product; it is sharded but between its own forward and
        backward, and after held-out text too."""
        c = self.untied
        data, seen = corpus(c), []
        with training.ranks() as here:
            trainer = trainer_of(c, here)
            head = trainer.model.head
            tokens, targets = data.batch(0, 0, 2, c.context, 0, 1, here.device)
            head.register_forward_pre_hook(lambda _, rows: seen.append((rows[0].detach(), head.weight)), prepend=True)
            loss, _, _ = trainer.model(tokens, targets)
            self.assertIsInstance(seen[0][1], DTensor)  # not gathered with the others before
            self.assertNotIsInstance(head.weight, DTensor)
            loss.backward()
            self.assertIsInstance(head.weight, DTensor)
            w = head.weight.full_tensor().detach().requires_grad_()
            wanted = functional.cross_entropy(seen[0][0] @ w.mT, targets.flatten())
            torch.testing.assert_close(loss, wanted)
            torch.testing.assert_close(head.weight.grad.full_tensor(), torch.autograd.grad(wanted, w)[0])
            self.assertGreater(head.weight.grad.full_tensor().abs().max(), 1e-4)
            trainer.held_out_loss(data, 2, 1)
            for name, parameter in trainer.model.named_parameters():
                self.assertIsInstance(parameter, DTensor, name)

    def test_what_is_gathered_when(self):
        """Experts of the first block apart from its attention, the last block until its backward pass."""
        c = dataclasses.replace(self.untied, layers=3)
        data, sharded = corpus(c), []
        with training.ranks() as here:
            trainer = trainer_of(c, here)
            blocks = trainer.model.blocks

            def note(*_):
                sharded.append([isinstance(p, DTensor) for block in blocks
                                for p in (block.qkv, block.experts.gate_up_proj)])

            for block in blocks:
                block.experts.register_forward_pre_hook(note, prepend=True)
            loss, auxiliary, _ = trainer.model(*data.batch(0, 0, 2, c.context, 0, 1, here.device))
            note()
            (loss + auxiliary).backward()
            note()
        yes = [True, True]
        self.assertEqual(sharded, [[False, True, *yes, *yes], [*yes, False, False, *yes], [*yes, *yes, False, False],
                                   [*yes, *yes, False, False], [*yes] * 3])


class Collections(unittest.TestCase):
    def test_what_the_first_steps_made_is_not_looked_at_again(self):
        """Nor is anything else kept: cycles that a step makes are still collected."""
        c = models.CONFIGURATIONS["tiny"]
        data = corpus(c)
        self.addCleanup(gc.unfreeze)
        gc.unfreeze()
        with training.ranks() as here, mock.patch.object(training, "FIRST", 2):
            trainer = trainer_of(c, here)
            for step, frozen in ((0, False), (1, True), (2, True)):
                trainer.step(*data.batch(0, step, 1, c.context, 0, 1, here.device), 1e-3)
                self.assertEqual(gc.get_freeze_count() > 10_000, frozen)
        ring = []
        ring.append(ring)
        del ring
        self.assertGreaterEqual(gc.collect(), 1)


if __name__ == "__main__":
    unittest.main()
