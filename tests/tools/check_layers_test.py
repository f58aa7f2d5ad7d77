# SPDX-License-Identifier: Apache-2.0
"""Every rule of check_layers.py, with a planted violation and with what is allowed."""

import pathlib
import tempfile
import unittest

import check_layers

FILES = {
    "include/tessera/shape.hpp": "#include <cstdint>\n",
    "src/core/check.hpp": '#include "tessera/shape.hpp"\n',
    "src/cpu/parallel/layer.hpp": '#include "core/check.hpp"\n',
    "src/cpu/reference/layer.hpp": "",
    "src/cuda/kernels/one.cuh": '#include "../arch/wgmma.cuh"\n#include <cuda_bf16.h>\n',
    "src/cuda/kernels/two.cuh": "",
    "src/cuda/arch/wgmma.cuh": 'inline void f() { asm volatile(""); }\n',
    "src/dist/kernels/row.cuh": '#include "dist/plan.hpp"\n',
    "src/dist/plan.hpp": "#pragma once\n",
    "bench/dist/row.cu": '#include "dist/kernels/row.cuh"\n',
    "src/ops/moe.cpp": '#include "cpu/parallel/layer.hpp"\nchar* e = getenv("TESSERA_EXPLAIN");\n',
    "lm/model.cpp": "#include <tessera/shape.hpp>\n",
    "tests/ops/all.cpp": '#include "cpu/reference/layer.hpp"\n#include "ops/moe.cpp"\n',
}

# (file, text, part of the complaint)
VIOLATIONS = [
    ("include/tessera/bad.hpp", '#include "core/check.hpp"\n', "may not include src/core"),
    ("include/tessera/bad.hpp", "#include <cuda_runtime.h>\n", "CUDA header"),
    ("src/core/bad.cpp", '#include "cpu/parallel/layer.hpp"\n', "may not include src/cpu"),
    ("src/core/bad.cpp", '#include "../cpu/parallel/layer.hpp"\n', "may not include src/cpu"),
    ("src/cpu/reference/bad.cpp", '#include "cpu/parallel/layer.hpp"\n', "may not include"),
    ("src/ops/bad.cpp", '#include "cpu/reference/layer.hpp"\n', "may not include"),
    ("src/capi/bad.cpp", '#include "core/check.hpp"\n', "may not include"),
    ("lm/bad.cpp", '#include "core/check.hpp"\n', "may not include"),
    ("cli/bad.cpp", '#include "ops/moe.cpp"\n', "may not include"),
    ("src/cuda/arch/bad.cuh", '#include "../kernels/one.cuh"\n', "may not include"),
    ("src/cuda/kernels/bad.cuh", '#include "two.cuh"\n', "kernels do not include each other"),
    ("src/cuda/kernels/bad.cuh", 'asm("nop;");\n', "asm outside"),
    ("src/cpu/parallel/bad.cpp", 'auto v = std::getenv("X");\n', "reads the environment"),
    ("src/core/bad.cpp", '#include "nowhere.hpp"\n', "no file of the repository"),
    ("src/unknown/bad.cpp", "", "belongs to no layer"),
    # A folder in a layer's list does not stand for the layers nested in it, and neither does a layer for its own.
    ("src/ops/bad.cpp", '#include "dist/kernels/row.cuh"\n', "may not include src/dist/kernels"),
    ("src/dist/bad.cpp", '#include "dist/kernels/row.cuh"\n', "may not include src/dist/kernels"),
    ("src/core/bad.hpp", '#include "bad.hpp"\n', "includes itself through src/core/bad.hpp"),
]


class CheckLayersTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = pathlib.Path(scratch.name).resolve()
        for path, text in FILES.items():
            self.write(path, text)

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return file

    def test_allowed(self):
        self.assertEqual(check_layers.check_tree(self.root), [])

    def test_planted_violations(self):
        for path, text, complaint in VIOLATIONS:
            with self.subTest(path=path, text=text):
                file = self.write(path, text)
                found = check_layers.check_tree(self.root)
                file.unlink()
                self.assertEqual(len(found), 1, found)
                self.assertIn(complaint, found[0])

    def test_cycle_of_several_files(self):
        for name, other in (("a", "b"), ("b", "c"), ("c", "a")):
            self.write(f"src/core/{name}.hpp", f'#include "{other}.hpp"\n')
        self.assertEqual(check_layers.check_tree(self.root), [
            "src/core/a.hpp: includes itself through src/core/b.hpp -> src/core/c.hpp -> src/core/a.hpp"])

    def test_words_in_comments_and_strings_are_no_violation(self):
        self.write("src/core/words.cpp", '// no asm here\nchar const* s = "getenv";\n')
        self.assertEqual(check_layers.check_tree(self.root), [])


if __name__ == "__main__":
    unittest.main()
