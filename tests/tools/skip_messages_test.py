# SPDX-License-Identifier: Apache-2.0
"""Every skipped test says what it lacks and how to get it: walks all places that skip, and their messages."""

import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ("tests", "examples", "bench", "python")
ENDINGS = (".py", ".sh", ".cpp", ".hpp", ".cu", ".cuh")
# A message: what is missing; what to do about it. A Status of the library has its remedy in its own text.
REMEDY = re.compile(r"; ?.*\b(run on|install|installs|apt-get|make|makes|starts|mount|raise|runs it)\b|: `make ",
                    re.DOTALL)
ONE = r'f?"(?:[^"\\]|\\.)*"'
STRING = rf"{ONE}(?:\s*\\?\s*{ONE})*"
# Where a message stands: the literal behind the words that skip.
SKIPS = r'GTEST_SKIP\(\)\s*<<|skipTest\(|SkipTest\(|skip\(|skipUnless\([^\n]*"deep",|skipIf\([^"]*?,'
MESSAGE = re.compile(rf'(?:{SKIPS})\s*({STRING})|(?=f?"skipped: )({STRING})')
# Messages that are made elsewhere: of a Status, or of gpu.missing(), which is walked itself.
MADE_ELSEWHERE = re.compile(r'^f?"skipped: ?("|\{reason\})|^f?"skipped" ?:|^"skipped: " *:')
EXIT = re.compile(r"sys\.exit\(77\)|return (?:[^;]*\? ?[^;]*)?(?:kSkipped|77)\b[^;]*;|exit 77\b")
SAYS = re.compile(r"skipped|has_device\(|connect_gpus\(|on_first_gpu\(|run_on_gpus\(|kSkipped = ")
NEAR = 5  # lines above an exit status of 77 in which its message stands


def sources() -> list[pathlib.Path]:
    own = pathlib.Path(__file__).resolve()
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.suffix in ENDINGS]
    return [path for path in files if path != own and path.name != "run_tests_test.py" and path.is_file()]


def messages(text: str) -> list[str]:
    return [" ".join((match[1] or match[2]).split()) for match in MESSAGE.finditer(text)]


def helps(message: str) -> bool:
    return bool(MADE_ELSEWHERE.search(message) or REMEDY.search(message))


def silent_exits(text: str) -> list[str]:
    lines = text.splitlines()
    return [line.strip() for i, line in enumerate(lines)
            if EXIT.search(line) and not SAYS.search("\n".join(lines[max(0, i - NEAR):i + 1]))]


class SkipMessages(unittest.TestCase):
    def test_all_say_what_is_missing_and_how_to_get_it(self):
        walked = 0
        for path in sources():
            text = path.read_text(encoding="utf-8", errors="replace")
            for message in messages(text):
                walked += 1
                with self.subTest(path.relative_to(ROOT), message=message):
                    self.assertTrue(helps(message), "no remedy behind a semicolon")
            for line in silent_exits(text):
                with self.subTest(path.relative_to(ROOT), line=line):
                    self.fail("no line above says why")
        print(f"{walked} messages of skipped tests")
        self.assertGreater(walked, 15)

    def test_notices_bad_ones(self):
        for text in ('GTEST_SKIP() << "no GPU";', 'self.skipTest("no g++")', 'print("skipped: no torch")',
                     'std::printf("skipped: this machine has %d GPUs of %d\\n", present, gpus);'):
            (message,) = messages(text)
            self.assertFalse(helps(message), text)
        for text in ('GTEST_SKIP() << "no AVX2; run on a "\n  "Xeon";', 'self.skipTest("no g++; apt-get install g++")'):
            (message,) = messages(text)
            self.assertTrue(helps(message), text)
        self.assertEqual(len(silent_exits("if (!gpu) {\n  return 77;\n}")), 1)
        self.assertEqual(silent_exits('std::printf("skipped: no GPU; run on one");\nreturn 77;'), [])


if __name__ == "__main__":
    unittest.main()
