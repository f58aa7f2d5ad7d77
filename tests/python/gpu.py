# SPDX-License-Identifier: Apache-2.0
"""What the tests of a GPU share: they are skipped, as a whole and with a line that says so, where there is none."""

import sys
import unittest

import tessera.library
import torch


def missing() -> str | None:
    """Why layers cannot run on a GPU here, or None."""
    if not torch.cuda.is_available():
        return (f"torch {torch.__version__} sees no GPU; run on a machine with a Hopper GPU, with a torch for CUDA "
                "(-DTESSERA_TEST_PYTHON=PYTHON)")
    try:
        tessera.library.context(tessera.library.CUDA, torch.cuda.current_device(), 0)
    except RuntimeError as error:
        return str(error)
    return None


def main() -> None:
    """unittest.main(), or exit status 77."""
    reason = missing()
    if reason:
        print(f"skipped: {reason}")
        sys.exit(77)
    unittest.main()
