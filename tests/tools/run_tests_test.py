# SPDX-License-Identifier: Apache-2.0
"""run_tests.py on a build folder of its own: a passing, a failing, two skipped tests and one not built."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools" / "run_tests.py"
SKIPS_LIKE_GOOGLETEST = r"printf 'x.cpp:1: Skipped\nno such\ndevice\n\n[  SKIPPED ] A.B (0 ms)\n'"
CTEST_FILE = rf"""
add_test(passes true)
add_test(fails false)
add_test(skips sh -c "echo no GPU here; exit 77")
set_tests_properties(skips PROPERTIES SKIP_RETURN_CODE 77 LABELS special)
add_test(skips_inside bash -c "{SKIPS_LIKE_GOOGLETEST.replace(chr(92), chr(92) * 2)}")
set_tests_properties(skips_inside PROPERTIES SKIP_REGULAR_EXPRESSION "\\[  SKIPPED \\]")
add_test(missing /nowhere/at/all)
add_test([=[waits  # GetParam() = 4-byte object <01-00>]=] sleep 0.3)
add_test(thorough true)
set_tests_properties(thorough PROPERTIES LABELS "slow;deep")
"""


class RunTestsTest(unittest.TestCase):
    def run_tool(self, *arguments):
        with tempfile.TemporaryDirectory() as build:
            pathlib.Path(build, "CTestTestfile.cmake").write_text(CTEST_FILE, encoding="utf-8")
            command = [sys.executable, str(TOOL), *[a.replace("BUILD", build) for a in arguments]]
            return subprocess.run(command, capture_output=True, text=True, check=False)

    def test_counts_and_reasons(self):
        result = self.run_tool("BUILD", "--skipped", "tests/cuda=no GPU on this machine")
        self.assertEqual(result.returncode, 1)
        lines = result.stdout.splitlines()
        self.assertEqual(lines[-1], "3 passed, 2 failed, 3 skipped")
        self.assertIn("skipped: skips (no GPU here)", lines)
        self.assertIn("skipped: skips_inside (no such device)", lines)
        self.assertIn("skipped: tests/cuda (no GPU on this machine)", lines)

    def test_seconds_of_a_suite(self):
        result = self.run_tool("BUILD")
        (line,) = [line for line in result.stdout.splitlines() if line.endswith(" s waits")]
        suite, tests, seconds, longest = line.split()[:4]
        self.assertEqual((suite, tests), (".", "7"))
        self.assertGreater(float(longest), 0.25)
        self.assertGreaterEqual(float(seconds), float(longest))

    def test_green(self):
        result = self.run_tool("BUILD", "--ctest=--tests-regex", "--ctest=passes")
        self.assertEqual(result.returncode, 0, result.stdout)
        self.assertEqual(result.stdout.splitlines()[-1], "1 passed, 0 failed, 0 skipped")

    def test_label_of_a_folder(self):
        result = self.run_tool("BUILD:special")
        self.assertTrue(result.stdout.endswith("0 passed, 1 failed, 1 skipped\n"), result.stdout)

    def test_says_what_is_left_out_for_its_depth(self):
        text = " tests that only add depth are left out; make test-deep runs them: "
        result = self.run_tool("BUILD", "--ctest=--label-exclude", "--ctest=^deep$")
        self.assertIn(f": 1{text}thorough\n", result.stdout)
        self.assertNotIn("skipped: thorough", result.stdout)
        self.assertNotIn(text, self.run_tool("BUILD").stdout)

    def test_nothing_run_is_a_failure(self):
        self.assertEqual(self.run_tool("BUILD", "--ctest=-R", "--ctest=none").returncode, 1)


if __name__ == "__main__":
    unittest.main()
