# SPDX-License-Identifier: Apache-2.0
"""measure_times.py reads what ninja, bootstrap.sh and run_tests.py leave."""

import unittest

import measure_times
import run_tests

NINJA_LOG = """# ninja log v5
0\t9000\t1\tlm/CMakeFiles/tessera_lm.dir/model.cpp.o\tx
9000\t9500\t1\tlm/CMakeFiles/tessera_lm.dir/model.cpp.o\tx
0\t2000\t1\tsrc/CMakeFiles/tessera_cpu.dir/cpu/parallel/gemm.cpp.o\tx
0\t1500\t1\tsrc/CMakeFiles/tessera_cpu.dir/cpu/parallel/route.cpp.o\tx
0\t250\t1\tbin/tessera\tx
"""


class MeasureTimesTest(unittest.TestCase):
    def test_parts_of_a_build(self):
        self.assertEqual(measure_times.build_parts(NINJA_LOG),
                         {"src: tessera_cpu": 3.5, "lm": 0.5, "linking": 0.25})

    def test_suites_are_read_as_they_are_written(self):
        result = run_tests.Result("api.one", "passed", suite="api", seconds=2.5)
        text = "\n".join(["before", *run_tests.times([result]), "", "1 passed, 0 failed, 0 skipped"])
        self.assertEqual(measure_times.suites(text), [("api", 1, 2.5, "2.5 s api.one")])

    def test_set_up(self):
        text = "bootstrap: missing: cmake\nbootstrap: installing by apt took 41 s\n" + \
            2 * "bootstrap: installing into .venv took 4 s\n"
        self.assertEqual(measure_times.setup_parts(text), [("installing by apt", 41.0), ("installing into .venv", 8.0)])

    def test_table(self):
        one = measure_times.Measured("test", 0, 300.4, 500.6, [("apt", 41.0)], {"cli": 30.0, "small": 0.5})
        text = measure_times.table([one])
        self.assertIn("| **`make test`** | 300 | 501 |", text)
        self.assertIn("| compiling cli | | 30 |", text)
        self.assertNotIn("small", text)

    def test_tiers(self):
        text = ("=== deep\n23 passed, 0 failed, 0 skipped\n\n=== summary\nlint          5 s  ok\n"
                "deep       1527 s  FAILED\ntotal      1532 s\n")
        read = measure_times.tiers(text)
        self.assertEqual(read, [("lint", 5.0), ("deep", 1527.0)])
        one = measure_times.Measured("test", 0, 300.4, 500.6, [("apt", 41.0)], {"cli": 30.0})
        ci = measure_times.Measured("ci", 0, 2400.4, 4100.6, [("apt", 42.0)], {"cli": 31.0}, [], read)
        text = measure_times.table([one, ci])
        self.assertIn("| **`.ci/run`** | 2400 | 4101 |\n| its tier lint | 5 | |\n| its tier deep | 1527 | |\n", text)
        self.assertIn("| compiling cli | | 30 |", text)


if __name__ == "__main__":
    unittest.main()
