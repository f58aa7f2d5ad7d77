# SPDX-License-Identifier: Apache-2.0
"""What tools/ptxas_report.py makes of machine code: warps that ptxas brings together right before wgmmas are told from
those that it knows to be together."""

import json
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tools"))

import ptxas_report  # noqa: E402

WGMMA = "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24"


def kernel(name: str, *instructions: str) -> str:
    """As cuobjdump -sass writes it: every instruction with its encoding, in two lines."""
    lines = [f"\t\tFunction : {name}", "\t.headerflags\t@\"EF_CUDA_SM90 EF_CUDA_PTX_SM(EF_CUDA_SM90)\""]
    for i, instruction in enumerate(instructions):
        lines.append(f"        /*{16 * i:04x}*/                   {instruction} ;  /* 0x000000ff00007947 */")
        lines.append(" " * 60 + "/* 0x000fea0003800000 */")
    return "\n".join(lines) + "\n"


class Divided(unittest.TestCase):
    def test_warps_brought_together(self):
        sass = kernel("a", "R2UR UR8, R154", "WARPSYNC.ALL", "WARPGROUP.ARRIVE", WGMMA, WGMMA)
        self.assertEqual(ptxas_report.divided(sass), {"a": True})

    def test_warps_known_to_be_together(self):
        sass = kernel("a", "ULEA UR8, UR5, UR16, 0xe", "WARPGROUP.ARRIVE", WGMMA, WGMMA)
        self.assertEqual(ptxas_report.divided(sass), {"a": False})

    def test_elsewhere(self):
        far = kernel("far", "WARPSYNC.ALL", *["IADD3 R1, R2, R3, RZ"] * 40, WGMMA)
        self.assertEqual(ptxas_report.divided(far), {"far": False})
        behind = kernel("behind", WGMMA, "WARPSYNC.ALL") + kernel("next", WGMMA) + kernel("none", "WARPSYNC.ALL")
        self.assertEqual(ptxas_report.divided(behind), {"behind": False, "next": False})


class Commands(unittest.TestCase):
    def test_sources_alone(self):
        """Not what links to one, which is compiled for something else."""
        source = ptxas_report.ROOT / "src" / "expert_parallel" / "unfused" / "combine.cu"
        with tempfile.TemporaryDirectory() as folder:
            link = pathlib.Path(folder) / "combine.cu"
            link.symlink_to(source)
            entries = [{"file": str(file), "command": f"{compiler} -MD -MF x.d -c {file}"}
                       for compiler, file in (("nvcc", source), ("c++", link))]
            (pathlib.Path(folder) / "compile_commands.json").write_text(json.dumps(entries), encoding="utf-8")
            ((path, words),) = ptxas_report.compile_commands(pathlib.Path(folder))
        self.assertEqual((path, words[0], words[-1]), ("src/expert_parallel/unfused/combine.cu", "nvcc", "-Xptxas=-v"))

    def test_only_some_sources(self):
        commands = [("src/cuda/instances/gemv.cu", ["nvcc"]), ("src/cuda/plain/wgrad.cu", ["nvcc"])]
        self.assertEqual(ptxas_report.chosen(commands, "gemv"), commands[:1])
        self.assertEqual(ptxas_report.chosen(commands, ""), commands)
        with self.assertRaisesRegex(SystemExit, "--only gemm: no CUDA source"):
            ptxas_report.chosen(commands, "gemm")

    def test_no_kernel_of_the_library_is_left_out(self):
        """A folder that moves leaves the list: its kernels would drop out of the report and of sass_diff."""
        sources = {path.relative_to(ptxas_report.ROOT).as_posix() for path in ptxas_report.ROOT.glob("src/**/*.cu")}
        self.assertEqual({path for path in sources if not path.startswith(ptxas_report.FOLDERS)},
                         {"src/device/cuda.cu"})  # kernels around the library
        for folder in ptxas_report.FOLDERS:
            self.assertTrue(any(path.startswith(folder) for path in sources), folder)


if __name__ == "__main__":
    unittest.main()
