# SPDX-License-Identifier: Apache-2.0
"""Runs the ```python blocks of the documents, those of one page one after the other in one namespace. A block that
begins with `# not run` says why in the same line and is compiled only."""

import contextlib
import io
import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Documents(unittest.TestCase):
    def test_blocks(self):
        count = 0
        for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")]:
            namespace = {}
            for block in BLOCK.findall(page.read_text(encoding="utf-8")):
                with self.subTest(page=page.name, block=block.splitlines()[0]):
                    code = compile(block, str(page), "exec")
                    if not block.startswith("# not run: "):
                        with contextlib.redirect_stdout(io.StringIO()):
                            exec(code, namespace)
                        count += 1
        self.assertGreater(count, 1)


if __name__ == "__main__":
    unittest.main()
