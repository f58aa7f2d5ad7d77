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

    def test_lessons(self):
        lessons = "# Lessons\n\n**1. One.** Text\n\n**12. Twelve.** Text\n"
        self.assertEqual(check_source.check_lessons("a.cuh", "// lesson 1, and lesson 12\n", lessons), [])
        for text in ("// lesson 2\n", "// (lesson 13)\n", "// Lesson 0\n"):
            with self.subTest(text=text):
                self.assertEqual(len(check_source.check_lessons("a.cuh", text, lessons)), 1)


    def test_files_that_comments_name(self):
        ends = check_source.ends_of(["src/cuda/gemm/slabs.cuh", "tests/cuda/ring_model_test.py"])
        for text in ("// As in slabs.cuh\n", "int a;  // gemm/slabs.cuh, src/cuda/gemm/slabs.cuh\n",
                     "/* tests/cuda/ring_model_test.py. */\n", '#include "gone.cuh"\n', "// ../gone.cuh, {a,b}/*.cuh\n"):
            with self.subTest(text=text):
                self.assertEqual(check_source.check_files("a.cuh", text, ends), [])
        for text in ("// As in slab.cuh\n", "int a;  // sm90/slabs.cuh\n", "/* One.\n * tests/gone_test.py */\n"):
            with self.subTest(text=text):
                self.assertEqual(len(check_source.check_files("a.cuh", text, ends)), 1)

    def test_texts_of_mutants(self):
        sources = {"cuda/a.cuh": "wait(); wait(); arrive();\n"}
        self.assertEqual(check_source.check_mutants("m.py", [("no arrival", "cuda/a.cuh", "arrive();", "")], sources), [])
        for file, text, count in (("cuda/a.cuh", "wait();", 2), ("cuda/a.cuh", "post();", 0), ("b.cuh", "wait();", 0)):
            with self.subTest(file=file, text=text):
                found = check_source.check_mutants("m.py", [("broken", file, text, "", "says")], sources)
                self.assertEqual(len(found), 1)
                self.assertIn(f"mutant `broken`: its text stands {count} times in src/{file}", found[0])


class CommentsTest(unittest.TestCase):
    def check(self, comment: str, path: str = "src/ops/a.cpp") -> list[str]:
        return check_source.check_text(path, LICENCE + comment)

    def test_without_a_subject(self):
        for word in ("Of", "By", "What", "Whether", "Who", "Whose", "Which", "How"):
            for comment in (f"// {word} a warp.\n", f"  /// {word} a warp.\n", f"/* One.\n * {word} a warp. */\n",
                            f"// A sentence.\n// {word} a warp, once.\n", f"// (A sentence.)\n// {word} it is.\n",
                            f"int a;\n// {word} it is\n", f"int a;\n///< {word} it is\n"):
                with self.subTest(comment=comment):
                    found = self.check(comment)
                    self.assertEqual(len(found), 1, found)
                    self.assertIn(f"begins with `{word}`", found[0])
        for comment in ("// Where rows cross.\n", "// When it ends. Later, it does.\n", "// Where rows\n// cross.\n"):
            with self.subTest(comment=comment):
                self.assertEqual(len(self.check(comment)), 1)

    def test_for_words_above(self):
        for comment in ("int a;  // .. of a thread\n", "/// .. and back.\n", "int a;  ///< .. of a thread\n"):
            with self.subTest(comment=comment):
                found = self.check(comment)
                self.assertEqual(len(found), 1, found)
                self.assertIn("for words above", found[0])

    def test_sentences(self):
        for comment in ("// A row\n// Of a warp.\n", "// Where rows cross, they do.\n", "// When\n// it is so, it is.\n",
                        "// Office hours.\n", "int a;  // of a warp\n", "// x0, x1, .. of a lane\n", "// ...\n"):
            with self.subTest(comment=comment):
                self.assertEqual(self.check(comment), [])
        self.assertEqual(self.check("// Of a warp.\n", "tests/a.cpp"), [])  # not a folder of SENTENCES


class PrivateMembersTest(unittest.TestCase):
    OWNER = "class Session:\n    def __init__(self):\n        self._rows = {}\ndef _room(): pass\n"

    def check(self, text: str) -> list[str]:
        return check_source.check_private_members({"owner.py": self.OWNER, "user.py": text})

    def test_foreign(self):
        for text in ("session._rows.clear()\n", "session._rows = 1\n", "from tessera.owner import _room\n",
                     "import owner\nowner._room()\n", "class Child(Session):\n    def f(self): return self._rows\n"):
            with self.subTest(text=text):
                found = self.check(text)
                self.assertEqual(len(found), 1, found)
                self.assertRegex(found[0], "^user.py:[123]: uses _r(ows|oom), a private member of another file")

    def test_own_and_others(self):
        for text in ("class Other:\n    def __init__(self):\n        self._rows = 2\n    def f(self): return self._rows\n",
                     "import torch\ntorch._C._x()\n", "tables._asdict()\n", "from torch import _room\n",
                     "module._tessera_rows = 1\n", "Struct._fields_\n"):
            with self.subTest(text=text):
                self.assertEqual(self.check(text), [])

    def test_windows_are_reached_through_the_transport(self):
        for text in ("char* w = p.windows[rank];\n", "char* windows_[8];\n", "char* w = windows [0];\n"):
            with self.subTest(text=text):
                kernel = "src/expert_parallel/fused/a.cuh"
                self.assertEqual(check_source.check_text(kernel, LICENCE + text), [
                    f"{kernel}:2: indexes windows outside src/expert_parallel/transport/; use Peer or OwnWindow"])
                for path in ("src/expert_parallel/transport/peer.cuh", "src/expert_parallel/session.cpp",
                             "tests/emulator/a.hpp"):
                    self.assertEqual(check_source.check_text(path, LICENCE + text), [])
        own = "char* w = own_window(p).place(at);  // of windows\n"
        self.assertEqual(check_source.check_text("src/expert_parallel/fused/a.cu", LICENCE + own), [])

    def test_fragments_are_seen_by_the_core_alone(self):
        text = LICENCE + "float* sums = gemm::Fragments::of(acc, 0);\n"
        for path in ("src/cuda/epilogue/a.cuh", "src/cuda/kernels/a.cuh", "src/expert_parallel/fused/a.cuh"):
            with self.subTest(path=path):
                self.assertEqual(check_source.check_text(path, text), [
                    f"{path}:2: sees fragments outside src/cuda/gemm/sm90/; use what Accumulators and Core give"])
        for path in ("src/cuda/gemm/sm90/a.cuh", "tests/emulator/a.cpp"):
            self.assertEqual(check_source.check_text(path, text), [])


class CheckCommitsTest(unittest.TestCase):
    def test_subjects(self):
        self.assertIsNone(check_commits.complaint("cuda: add the aggregate kernel"))
        for subject in ("Add things", "cuda:add", "cuda: add.", "cuda: " + 80 * "x", ""):
            with self.subTest(subject=subject):
                self.assertIsNotNone(check_commits.complaint(subject))

    def test_a_body_where_a_decision_or_a_figure_is(self):
        body = "\n\nBecause of this.\n"
        for subject, files in (("cuda: take 0.97 of the time", []), ("cuda: save 12% of the bytes", []),
                               ("cuda: launch in 5 us", []), ("docs: decide the layout", ["docs/adr/0030-layout.md"]),
                               ("bench: measure it again", ["bench/results/archive/h200/2026-11-25-a.json"]),
                               ("docs: new table", ["README.md", "docs/performance.md"])):
            with self.subTest(subject=subject):
                self.assertIsNotNone(check_commits.lacks_body(subject, files))
                self.assertIsNotNone(check_commits.lacks_body(subject + "\n\nReviewed-by: A <a@b.example>\n", files))
                self.assertIsNotNone(check_commits.lacks_body(subject + "\n\n# a comment of git\n", files))
                self.assertIsNone(check_commits.lacks_body(subject + body, files))
        for subject in ("cuda: run on sm_90a", "docs: mend links", "convert: read 3 more models"):
            with self.subTest(subject=subject):
                self.assertIsNone(check_commits.lacks_body(subject, ["docs/adr/README.md", "bench/results/schema.json"]))


if __name__ == "__main__":
    unittest.main()
