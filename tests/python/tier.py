# SPDX-License-Identifier: Apache-2.0
"""`@tier.deep` leaves tests that only add depth, classes too, to `make test-deep`."""

import os
import unittest

deep = unittest.skipUnless(os.environ.get("TESSERA_TESTS") == "deep",
                           "adds depth: `make test-deep` runs it, as does TESSERA_TESTS=deep")
