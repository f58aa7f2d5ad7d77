# SPDX-License-Identifier: Apache-2.0
import unittest

import check_commits
import check_source

LICENCE = "// SPDX-License-Identifier: Apache-2.0\n"
UNFINISHED = "// TO" "DO later\n"


class CheckSourceTest(unittest.TestCase):
    def test_good(self):
        self.assertEqual(check_source.check_text("a.cpp", LICENCE + "int a;\n"), [])
        self.assertEqual(check_source.check_text("a.py", "#!/usr/bin/env python3\n" + LICENCE), [])

    def test_tables_may_be_wide(self):
        row = "// " + 200 * "x" + "\n"
        table = "// clang-format off\n" + row + "// clang-format on\n"
        self.assertEqual(check_source.check_text("a.cpp", LICENCE + table), [])
        self.assertEqual(len(check_source.check_text("a.cpp", LICENCE + table + row)), 1)

    def test_bad(self):
        for text in ("int a;\n", LICENCE + "int a; \n", LICENCE + UNFINISHED, LICENCE + "int a;",
                     LICENCE + "// " + 200 * "x" + "\n", LICENCE + 700 * "\n"):
            with self.subTest(text=text[:80]):
                self.assertEqual(len(check_source.check_text("a.cpp", text)), 1)


class CheckCommitsTest(unittest.TestCase):
    def test_subjects(self):
        self.assertIsNone(check_commits.complaint("cuda: add the aggregate kernel"))
        for subject in ("Add things", "cuda:add", "cuda: add.", "cuda: " + 80 * "x", ""):
            with self.subTest(subject=subject):
                self.assertIsNotNone(check_commits.complaint(subject))


if __name__ == "__main__":
    unittest.main()
