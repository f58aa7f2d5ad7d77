# SPDX-License-Identifier: Apache-2.0
"""Scripts that preloaded.py forks behave as those of a fresh process."""

import os
import pathlib
import subprocess
import sys
import tempfile
import time
import unittest
from unittest import mock

import programs

SOCKET = os.environ.get("TESSERA_PRELOADED", "")
PRELOADED = pathlib.Path(__file__).parent / "preloaded.py"


@unittest.skipUnless(pathlib.Path(SOCKET).is_socket(), "no process that forks tests; run it by ctest")
class Forked(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def start(self, text: str, *arguments: str, **environment: str) -> subprocess.Popen:
        script = self.folder / "script.py"
        script.write_text(text)
        return subprocess.Popen([sys.executable, "-I", "-S", PRELOADED, "run", SOCKET, script, *arguments], text=True,
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=self.folder,
                                env={**os.environ, **environment})

    def test_arguments_files_folder_and_environment(self):
        text = ("import os, sys\n"
                "print(input(), sys.argv[1:], os.getcwd(), os.environ['TOLD'], 'HOME' in os.environ, sys.path[0],"
                " __name__, __file__ == sys.argv[0])\n")
        script = self.start(text, "a", "b", TOLD="it")
        said, complaint = script.communicate("heard\n")
        self.assertEqual(complaint, "")
        home = "HOME" in os.environ
        self.assertEqual(said, f"heard ['a', 'b'] {self.folder} it {home} {self.folder} __main__ True\n")
        self.assertEqual(script.returncode, 0)

    def test_status(self):
        failing = "import unittest\nclass T(unittest.TestCase):\n def test(self): self.fail('so')\nunittest.main()"
        at_exit = "import atexit, sys\natexit.register(sys.stderr.write, 'at the end')"
        for text, status, complaint in (("raise SystemExit(3)", 3, ""), ("1 / 0", 1, "ZeroDivisionError"),
                                        ("import os\nos.abort()", 134, "SIGABRT"),
                                        (failing, 1, "AssertionError: so"), (at_exit, 0, "at the end")):
            with self.subTest(text):
                script = self.start(text)
                self.assertIn(complaint, script.communicate()[1])
                self.assertEqual(script.returncode, status)

    def test_it_ends_with_the_one_who_asked(self):
        script = self.start("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(1000)")
        process = int(script.stdout.readline())
        script.kill()
        script.communicate()
        for _ in range(1000):
            if not pathlib.Path(f"/proc/{process}").exists():
                return
            time.sleep(0.01)
        self.fail("it is still there")

    def test_what_it_prints_comes_at_once_where_nothing_is_buffered(self):
        for told, came in (({"PYTHONUNBUFFERED": "1"}, "said\n"), ({"PYTHONUNBUFFERED": ""}, "")):
            script = self.start("import os\nprint('said')\nos._exit(0)", **told)
            self.assertEqual(script.communicate()[0], came)

    def test_torch_has_no_memory_of_others(self):
        text = ("import sys\nassert 'torch' in sys.modules and 'tessera' not in sys.modules\n"
                "import torch\nprint(torch.rand(1).item())\ntorch.manual_seed(1)\n"
                "torch.set_default_dtype(torch.float64)")
        first, second = (self.start(text).communicate() for _ in range(2))
        self.assertRegex(first[0], r"^0\.\d+$")
        self.assertEqual(first, second)


class NobodyListens(unittest.TestCase):
    def test_a_script_starts_by_itself(self):
        with tempfile.TemporaryDirectory() as folder, \
                mock.patch.dict(os.environ, TESSERA_PRELOADED=f"{folder}/ended.socket"):
            script = pathlib.Path(folder) / "script.py"
            script.write_text("print('said')")
            said = subprocess.run(programs.command(script), capture_output=True, text=True, check=False)
        self.assertEqual((said.stdout, said.stderr), ("said\n", ""))


if __name__ == "__main__":
    unittest.main()
