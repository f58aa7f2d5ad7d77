# SPDX-License-Identifier: Apache-2.0
"""The installed package on a machine that has nothing: no torch, no compiler, no GPU."""

import os
import subprocess
import sys
import unittest

SITE = os.environ["TESSERA_PYTHON_SITE"]


def run(code: str, **environment) -> subprocess.CompletedProcess:
    """In an interpreter that sees the package and the standard library only (-S: no site-packages)."""
    return subprocess.run([sys.executable, "-S", "-B", "-c", code], capture_output=True, text=True, check=False,
                          env={"PYTHONPATH": SITE, "PATH": "", **environment})


class Import(unittest.TestCase):
    def test_import_without_torch_is_quick(self):
        code = "import sys, tessera; assert 'torch' not in sys.modules; print(tessera.__version__, tessera.__file__)"
        result = run(code)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn(SITE, result.stdout)
        loaded = run(code.replace("print(", "print(len(sys.modules)); print(")).stdout.split()[0]
        self.assertLess(int(loaded), 150)  # what takes long is modules; of these most are Python's own

    def test_layers_say_that_torch_is_missing(self):
        result = run("import tessera; tessera.moe")
        self.assertIn("ImportError: tessera.moe needs torch; pip install torch", result.stderr)
        result = run("import tessera; tessera.losses.router_losses")
        self.assertIn("ImportError: tessera.losses needs torch; pip install torch", result.stderr)

    def test_unknown_names(self):
        self.assertIn("has no attribute 'mo'", run("import tessera; tessera.mo").stderr)
        self.assertIn("routed_experts", run("import tessera; print(dir(tessera))").stdout)

    def test_a_library_that_is_not_there(self):
        result = run("import tessera; tessera.__version__", TESSERA_LIBRARY="/nowhere/libtessera.so")
        self.assertIn("RuntimeError: libtessera.so: /nowhere/libtessera.so", result.stderr)
        self.assertIn("set TESSERA_LIBRARY", result.stderr)

    def test_cuda_without_a_gpu_is_an_error_of_ours(self):
        result = run("from tessera import library; library.context(library.CUDA, 0, 0)")
        self.assertRegex(result.stderr.splitlines()[-1], "^(RuntimeError|NotImplementedError): .*(device|cuda|CUDA)")

    def test_unproven_kernels_are_asked_for(self):
        """The context that a call gets was made with the flag, or without it."""
        result = run("import tessera; from tessera import library; "
                     "handle = lambda: library.context(library.CPU, 0, 1); plain = handle(); "
                     "tessera.use_unproven_kernels(); unproven = handle(); "
                     "tessera.use_unproven_kernels(False); print(plain == handle(), plain == unproven, "
                     "[key[3] for key in library._contexts])")
        self.assertEqual(result.stdout.strip(), "True False [0, 1]", result.stderr)


if __name__ == "__main__":
    unittest.main()
