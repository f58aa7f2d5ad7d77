# SPDX-License-Identifier: Apache-2.0
import unittest

from mutant_switches import at_run_time, cross, place_of, switched

SOURCE = """\
#include "some(header.hpp"
constexpr int kSize = 4;
struct Sums {
  __device__ int first() { return sum_ < 2 ? left : right; }  // a comment; of (it
  __device__ void store(int row) {
    if (row < end_) {  // until here
      wait();
      add({.at = row, .step = size / 2}, row + int{one} * pitch, 8);
    } else {
      skip();
    }
    for (int i = 0; i < count; ++i) sum_ += get<1>(i, row);
    if (row == 0) first_row();
  }
};
"""


def part(old, new):
    """What becomes of the place where `old` does, and whether it is of statements."""
    place = place_of(SOURCE, old, new)
    return SOURCE[place.begin:place.end], place.new, place.is_statement


class MutantSwitchesTest(unittest.TestCase):
    def test_expressions(self):
        for old, new, whole, becomes in (
                ("return sum_ < 2 ?", "return sum_ > 2 ?", "sum_ < 2 ? left : right", "sum_ > 2 ? left : right"),
                ("if (row < end_) {", "if (true) {", "row < end_", "true"),
                (".step = size / 2}", ".step = size}", "size / 2", "size "),
                ("int{one} * pitch, 8);", "int{two} * pitch, 8);", "one", "two"),
                ("row + int{one} * pitch", "row", "row + int{one} * pitch", "row "),
                ("(int i = 0;", "(int i = 1;", "0", "1"), ("i < count;", "i < 1;", "i < count", "i < 1"),
                ("get<1>(", "get<2>(", "get<1>(i, row)", "get<2>(i, row)")):
            with self.subTest(old=old):
                self.assertEqual(part(old, new), (whole, becomes, False))

    def test_statements(self):
        loop = "for (int i = 0; i < count; ++i) sum_ += get<1>(i, row);"
        for old, new, whole, becomes in (
                ("wait();", "", "wait();", ""), ("      wait();\n", "", "wait();", ""), ("skip();", "", "skip();", ""),
                ("first_row();", "", "if (row == 0) first_row();", "if (row == 0) "),
                ("if (row == 0) first_row", "first_row", "if (row == 0) first_row();", " first_row();"),
                ("i = 0; i < count", "i = 1; i < 2", loop, loop.replace("i = 0; i < count", "i = 1; i < 2"))):
            with self.subTest(old=old):
                self.assertEqual(part(old, new), (whole, becomes, True))

    def test_switches(self):
        text = "void f() { go(1 + 2); }"
        expression, same = place_of(text, "+ 2", "+ 3"), place_of(text, "1 + 2", "4")
        statement = place_of(text, "go(1 + 2);", "")
        self.assertFalse(cross(expression, statement))
        self.assertEqual(switched(text, [(1, expression), (2, statement), (3, same)]),
                         "void f() { if (::chosen_mutant == 2) { ; } else { go((::chosen_mutant == 3 ? (4) : "
                         "((::chosen_mutant == 1 ? (1 + 3) : (1 + 2))))); } }")

    def test_places_that_cross(self):
        text = "void f() { one(); two(); three(); }"
        self.assertTrue(cross(place_of(text, "one(); two();", ""), place_of(text, "two(); three();", "")))

    def test_at_run_time(self):
        text = at_run_time(SOURCE, ["constexpr int kSize"])
        self.assertIn("\n          int kSize = 4;", text)
        self.assertEqual(len(text), len(SOURCE))
        with self.assertRaisesRegex(ValueError, "not there any more: constexpr int kOther"):
            at_run_time(SOURCE, ["constexpr int kOther"])


if __name__ == "__main__":
    unittest.main()
