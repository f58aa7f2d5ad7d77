# SPDX-License-Identifier: Apache-2.0
import pathlib
import tempfile
import unittest

import check_links

GOOD = """# First heading
[file](docs/page.md) [place](docs/page.md#a-second-one) [here](#first-heading) [web](https://example.org)
`src/core` `src/*/thing.hpp` `src/{core,ops}/` `build/bin/tessera` `docs/<op>.md` `a/b` `1/2`
```sh
cat docs/not-checked-in-blocks.md
```
"""
BAD = ["[file](docs/none.md)", "[up](../../etc/passwd)", "[place](docs/page.md#third)", "`src/none.hpp`",
       "`src/{core,none}`", "![image](docs/none.svg)"]


class CheckLinksTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = pathlib.Path(scratch.name).resolve()
        for folder in ("docs", "src/core", "src/ops"):
            (self.root / folder).mkdir(parents=True)
        (self.root / "src/core/thing.hpp").touch()
        (self.root / "docs/page.md").write_text("# Page\n## A second one!\n", encoding="utf-8")

    def check(self, text):
        file = self.root / "README.md"
        file.write_text(text, encoding="utf-8")
        return check_links.check_tree(self.root, [file])

    def test_good(self):
        self.assertEqual(self.check(GOOD), [])

    def test_bad(self):
        for text in BAD:
            with self.subTest(text=text):
                self.assertEqual(len(self.check(text)), 1)

    def test_the_map_of_the_kernels(self):
        for folder in ("src/cuda/kernels", "docs/kernels"):
            (self.root / folder).mkdir(parents=True)
        for kernel in ("route", "router_loss"):
            (self.root / f"src/cuda/kernels/{kernel}.cuh").touch()
        page = self.root / "docs/kernels/README.md"
        self.assertEqual(len(check_links.check_map(self.root)), 2)
        # A name in prose, in another cell, or as a part of another name is no row.
        page.write_text("`router_loss`\n\n| kernel | page |\n|---|---|\n| `route` | `router_loss` |\n",
                        encoding="utf-8")
        self.assertEqual(len(check_links.check_map(self.root)), 1)
        page.write_text("| kernel | page |\n|---|---|\n| `router_loss` | |\n", encoding="utf-8")
        self.assertEqual(check_links.check_map(self.root), ["docs/kernels/README.md: no row has `route`"])
        page.write_text("| kernel | page |\n|---|---|\n| `route`, `router_loss` | |\n", encoding="utf-8")
        self.assertEqual(check_links.check_map(self.root), [])


if __name__ == "__main__":
    unittest.main()
