# SPDX-License-Identifier: Apache-2.0
"""`@tier.deep` leaves tests that only add depth, classes too, to `make test-deep`, which has TESSERA_TESTS=deep: it
runs these alone, as `make test` has the others of their file. TESSERA_TESTS=all runs both."""

import os
import unittest

_ASKED, _DEEP = os.environ.get("TESSERA_TESTS"), set()


def deep(test):
    _DEEP.add(test)
    return unittest.skipUnless(_ASKED == "all" or _ASKED == "deep",
                               "adds depth: `make test-deep` runs it, as does TESSERA_TESTS=deep")(test)


def _names(case: type) -> list[str]:
    names = unittest.TestLoader().getTestCaseNames(case)
    return names if case in _DEEP else [name for name in names if getattr(case, name) in _DEEP]


if _ASKED == "deep":
    unittest.defaultTestLoader.getTestCaseNames = _names
