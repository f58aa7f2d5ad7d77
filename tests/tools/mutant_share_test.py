# SPDX-License-Identifier: Apache-2.0
"""Shares of the emulator's mutants: N of them in a row hold every mutant once."""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "emulator"))

import mutant_runner  # noqa: E402


class Shares(unittest.TestCase):
    def test_n_in_a_row_hold_each_mutant_once(self):
        for count in (0, 1, 2, 7, 155):
            mutants = list(range(count))
            for first in (0, 5):
                shares = [mutant_runner.share_of(mutants, f"{k}/3") for k in range(first, first + 3)]
                self.assertEqual(sorted(sum(shares, [])), mutants)

    def test_without_a_share_all_are_run(self):
        self.assertEqual(mutant_runner.share_of([1, 2, 3], ""), [1, 2, 3])

    def test_other_texts_are_refused(self):
        for share in ("1", "1/0", "a/3", "-1/3", "1/3/5"):
            with self.subTest(share), self.assertRaisesRegex(SystemExit, "not a share"):
                mutant_runner.share_of([1, 2, 3], share)


if __name__ == "__main__":
    unittest.main()
