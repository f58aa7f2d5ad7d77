# SPDX-License-Identifier: Apache-2.0
"""Every rule of check_layers.py, with a planted violation and with what is allowed."""

import pathlib
import shutil
import tempfile
import unittest

import check_layers

FILES = {
    "include/tessera/shape.hpp": "#include <cstdint>\n",
    "src/core/check.hpp": '#include "tessera/shape.hpp"\n',
    "src/cpu/parallel/layer.hpp": '#include "core/check.hpp"\n',
    "src/cpu/reference/layer.hpp": "",
    "src/cuda/kernels/one.cuh": '#include "../gemm/sm90/mainloop.cuh"\n#include <cuda_bf16.h>\n',
    "src/cuda/kernels/two.cuh": "",
    "src/cuda/gemm/sm90/mainloop.cuh": '#include "../../arch/sm90/wgmma.cuh"\n',
    "src/cuda/arch/sm90/wgmma.cuh": 'inline void f() { asm volatile(""); }\n',
    "src/expert_parallel/fused/row.cuh": '#include "expert_parallel/plan/plan.hpp"\n',
    "src/expert_parallel/plan/plan.hpp": "#pragma once\n",
    "bench/expert_parallel/row.cu": '#include "expert_parallel/fused/row.cuh"\n',
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
    ("src/ops/bad.cpp", '#include "expert_parallel/fused/row.cuh"\n', "may not include src/expert_parallel/fused"),
    ("src/expert_parallel/bad.cpp", '#include "expert_parallel/fused/row.cuh"\n', "may not include src/expert_pa"),
    ("src/cuda/kernels/bad.cuh", '#include "../arch/sm90/wgmma.cuh"\n', "may not include src/cuda/arch/sm90"),
    # Epilogues see fragments in the files alone that are named as exceptions.
    ("src/cuda/epilogue/bad.cuh", '#include "../gemm/sm90/mainloop.cuh"\n', "may not include src/cuda/gemm/sm90"),
    ("src/core/bad.hpp", '#include "bad.hpp"\n', "includes itself through src/core/bad.hpp"),
]


class ExampleTest(unittest.TestCase):
    def test_copies_of_the_kernel_to_copy_break_no_rule(self):
        """docs/add-a-kernel.md says where they go."""
        repository = pathlib.Path(check_layers.__file__).resolve().parents[1]
        with tempfile.TemporaryDirectory() as scratch:
            root = pathlib.Path(scratch).resolve()
            for top in ("include", "src"):
                shutil.copytree(repository / top, root / top)
            for name, folder in (("scaled_projection_fwd.cuh", "kernels"), ("scaled_projection_fwd.cu", "instances")):
                text = (repository / "tests" / "example" / name).read_text(encoding="utf-8")
                copy = root / "src" / "cuda" / folder / name
                copy.write_text(text.replace("tests/example/", "../kernels/"), encoding="utf-8")
                self.assertEqual(check_layers.check_file(root, copy, {}), [])


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
                self.assertIn(complaint, found[0])
                # An include against an arrow may close a cycle of folders as well.
                self.assertTrue(all("includes itself through" in also for also in found[1:]), found)

    def test_cycle_of_several_files(self):
        for name, other in (("a", "b"), ("b", "c"), ("c", "a")):
            self.write(f"src/core/{name}.hpp", f'#include "{other}.hpp"\n')
        self.assertEqual(check_layers.check_tree(self.root), [
            "src/core/a.hpp: includes itself through src/core/b.hpp -> src/core/c.hpp -> src/core/a.hpp"])

    def test_cycle_of_folders_without_a_cycle_of_files(self):
        # All of one layer, so no arrow forbids it.
        self.write("src/core/one/first.hpp", '#include "core/two/first.hpp"\n')
        self.write("src/core/two/first.hpp", "")
        self.write("src/core/one/second.hpp", "")
        self.assertEqual(check_layers.check_tree(self.root), [])
        self.write("src/core/two/second.hpp", '#include "core/one/second.hpp"\n')
        self.assertEqual(check_layers.check_tree(self.root), [
            "src/core/one: includes itself through src/core/two -> src/core/one"])

    def test_words_in_comments_and_strings_are_no_violation(self):
        self.write("src/core/words.cpp", '// no asm here\nchar const* s = "getenv";\n')
        self.assertEqual(check_layers.check_tree(self.root), [])


if __name__ == "__main__":
    unittest.main()
