# SPDX-License-Identifier: Apache-2.0
"""Windows of ExpertParallel whose opening a rank does not live to see: processes of a gloo group, on a library that
opens none."""

import os
import threading
import unittest
from unittest import mock

import ranks
import tessera
import torch
from tessera import expert_parallel_checks as checks
from tessera import expert_parallel_session as session_module
from tessera import library

SHAPE = {"max_tokens": 300, "hidden": 512, "intermediate": 256, "experts": 16, "top_k": 4}


def open_behind_another(rank: int) -> str:
    """What a rank of two hears, of which rank 1 ends when both have agreed to open windows."""
    lib = mock.MagicMock()
    lib.tessera_peer_window_open.side_effect = lambda *_: os._exit(9) if rank else threading.Event().wait()
    with mock.patch.object(session_module, "load", lambda: lib), \
            mock.patch.object(session_module, "OPENING_SECONDS", 1, create=True), \
            mock.patch.object(session_module, "window_bytes", lambda desc: 4096), \
            mock.patch.object(session_module, "_make_id", lambda rank: bytes(128)), \
            mock.patch.object(session_module.Session, "_make_workspace", mock.MagicMock()), \
            mock.patch.object(library, "context", lambda *_: 0), \
            mock.patch.object(library, "check", lambda code: None), \
            mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, create=True):
        try:
            tessera.ExpertParallel(**SHAPE, device="cuda:0", time_limit=0.5)
        except RuntimeError as error:
            return str(error)
    return "joined"


class Opening(unittest.TestCase):
    def test_a_rank_that_fails_before_its_window(self):
        outcomes = ranks.run(2, open_behind_another, seconds=20, dies=(1,))
        self.assertEqual(outcomes[1], None)
        self.assertEqual(outcomes[0][0], "result", outcomes[0])
        self.assertRegex(outcomes[0][1], "no window within 1 s: rank 0 of 2 waited .*; end all ranks")

    def test_a_window_that_comes_too_late(self):
        """It is freed by whoever opened it, and one that comes in time is not."""
        late, undone, came = threading.Event(), threading.Event(), []
        with self.assertRaisesRegex(RuntimeError, "no window"):
            checks.call_within(0.05, late.wait, undone.set, "no window")
        self.assertFalse(undone.is_set())
        late.set()
        self.assertTrue(undone.wait(20))
        checks.call_within(20, lambda: came.append(1), lambda: came.append(2), "no window")
        with self.assertRaisesRegex(ValueError, "refused"):
            checks.call_within(20, mock.Mock(side_effect=ValueError("refused")), lambda: came.append(2), "no window")
        self.assertEqual(came, [1])


if __name__ == "__main__":
    unittest.main()
