# SPDX-License-Identifier: Apache-2.0
"""What tools/ptxas_report.py makes of machine code and of what ptxas said, which cmake/keep_ptxas.sh keeps beside an
object: warps that ptxas brings together right before wgmmas are not those that it knows to be together."""

import json
import pathlib
import subprocess
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

    def test_wgmmas_of_e4m3(self):
        sass = kernel("a", "WARPSYNC.ALL", "WARPGROUP.ARRIVE", "QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24")
        self.assertEqual(ptxas_report.divided(sass), {"a": True})

    def test_warps_known_to_be_together(self):
        sass = kernel("a", "ULEA UR8, UR5, UR16, 0xe", "WARPGROUP.ARRIVE", WGMMA, WGMMA)
        self.assertEqual(ptxas_report.divided(sass), {"a": False})

    def test_elsewhere(self):
        far = kernel("far", "WARPSYNC.ALL", *["IADD3 R1, R2, R3, RZ"] * 40, WGMMA)
        self.assertEqual(ptxas_report.divided(far), {"far": False})
        behind = kernel("behind", WGMMA, "WARPSYNC.ALL") + kernel("next", WGMMA) + kernel("none", "WARPSYNC.ALL")
        self.assertEqual(ptxas_report.divided(behind), {"behind": False, "next": False})


USAGE = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1kv' for 'sm_90a'
ptxas info    : Function properties for _Z1kv
    8 bytes stack frame, 0 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 12 bytes smem
ptxas info    : Compile time = 3.406 ms
"""
SERIALISED = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"


class OfAnArchitecture(unittest.TestCase):
    """An object with code for two GPUs, and what sm_100a is asked beside."""

    def test_resources_of_each(self):
        both = USAGE + USAGE.replace("sm_90a", "sm_100a").replace("Used 40", "Used 72")
        self.assertEqual([entry[1][:13] for entry in ptxas_report.kernels(both, "sm_100a")], [" 72 registers"])
        self.assertEqual([entry[1][:13] for entry in ptxas_report.kernels(both)], [" 40 registers"])

    def columns(self, *instructions: str):
        return ptxas_report.tensor_columns(ptxas_report.code(kernel("k", *instructions))["k"])

    def test_columns_of_tensor_memory(self):
        find = "UTCATOMSWS.2CTA.FIND_AND_SET.ALIGN UP0, UR4, UR4"
        self.assertEqual(self.columns("UMOV UR5, 0x4", "UMOV UR4, 0x10", find, "UMOV UR4, 0x10", find), 512)
        self.assertIsNone(self.columns("UMOV UR4, 0x10"))
        for unknown in (("UMOV UR4, UR7", find), (find,), ("UMOV UR4, 0x10", find, "UMOV UR4, 0x8", find)):
            with self.assertRaises(ValueError):
                self.columns(*unknown)

    def test_faults(self):
        def fault(*instructions: str, registers_alone: bool = True) -> str:
            return ptxas_report.fault_of("k", ptxas_report.code(kernel("k", *instructions))["k"], registers_alone)

        find = "UTCATOMSWS.FIND_AND_SET.ALIGN UP0, UR4, UR4"
        self.assertEqual(fault("UMOV UR4, 0x10", find, "STG.E desc[UR4][R2.64], R5", "EXIT"), "")
        self.assertIn("no code for this architecture", fault("LDC R1, c[0x0][0x37c]", "@P0 EXIT", "BRA 0x20", "NOP"))
        self.assertIn("no code for this architecture", fault())
        self.assertIn("544 columns", fault("UMOV UR4, 0x11", find))
        self.assertIn("tensor memory", fault(find))
        self.assertIn("LDL.64 R2, [R1], local memory", fault("LDL.64 R2, [R1]"))
        self.assertEqual(fault("LDL.64 R2, [R1]", registers_alone=False), "")
        for path, architecture, alone in (("src/cuda/instances/sm100/k.cu", "sm_100a", True),
                                          ("src/cuda/instances/gemv.cu", "sm_90a", True),
                                          ("src/cuda/instances/gemv.cu", "sm_100a", False),
                                          ("src/cuda/plain/k.cu", "sm_90a", False)):
            self.assertEqual(ptxas_report.keeps_registers(path, architecture), alone)


class Kept(unittest.TestCase):
    """cmake/keep_ptxas.sh around a compiler that says what the test wants."""

    def compile(self, folder: str, says: str, status: int) -> tuple[subprocess.CompletedProcess, pathlib.Path]:
        compiler, output = pathlib.Path(folder, "compiler"), pathlib.Path(folder, "k.cu.o")
        compiler.write_text(f"#!/bin/sh\necho \"$@\" >{folder}/arguments\ncat >&2 <<'E'\n{says}E\nexit {status}\n",
                            encoding="utf-8")
        compiler.chmod(0o755)
        done = subprocess.run([ptxas_report.ROOT / "cmake" / "keep_ptxas.sh", compiler, "-c", "k.cu", "-o", output],
                              check=False, capture_output=True, text=True)
        return done, output

    def test_what_is_kept_and_what_is_printed(self):
        warning = "k.cu(3): warning #177-D: variable \"i\" was declared but never referenced\n"
        with tempfile.TemporaryDirectory() as folder:
            done, output = self.compile(folder, warning + USAGE + SERIALISED, 0)
            self.assertEqual((done.returncode, done.stderr), (0, warning + SERIALISED))
            self.assertIn("-Xptxas=-v", pathlib.Path(folder, "arguments").read_text(encoding="utf-8").split())
            self.assertEqual(ptxas_report.kernels(ptxas_report.said(output)), [
                ("_Z1kv", " 40 registers      12 bytes static shared    8 stack    4 spilled")])

    def test_a_failure_leaves_nothing(self):
        with tempfile.TemporaryDirectory() as folder:
            self.compile(folder, USAGE, 0)
            done, output = self.compile(folder, "k.cu(3): error: expected a \";\"\n", 2)
            self.assertEqual((done.returncode, done.stderr), (2, "k.cu(3): error: expected a \";\"\n"))
            with self.assertRaisesRegex(SystemExit, "k.cu.o.ptxas: no such file; remove the object"):
                ptxas_report.said(output)

    def test_serialised_wgmmas_are_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            _, output = self.compile(folder, USAGE + SERIALISED, 0)
            with self.assertRaisesRegex(SystemExit, r"k\.cu: ptxas info +: \(C7510\) Potential"):
                ptxas_report.refuse_serialised("k.cu", ptxas_report.said(output))
            _, output = self.compile(folder, USAGE, 0)
            ptxas_report.refuse_serialised("k.cu", ptxas_report.said(output))


class Objects(unittest.TestCase):
    def test_sources_alone(self):
        """Not what links to one, which is compiled for something else."""
        source = ptxas_report.ROOT / "src" / "expert_parallel" / "unfused" / "combine.cu"
        with tempfile.TemporaryDirectory() as folder:
            link = pathlib.Path(folder) / "combine.cu"
            link.symlink_to(source)
            code = "--generate-code=arch=compute_90a,code=[sm_90a]"
            entries = [{"file": str(file), "command": f"{compiler} {code} -MD -MF x.d -c {file} -o src/{compiler}.o"}
                       for compiler, file in (("nvcc", source), ("c++", link))]
            build = pathlib.Path(folder)
            (build / "compile_commands.json").write_text(json.dumps(entries), encoding="utf-8")
            self.assertEqual(ptxas_report.objects(build),
                             [("src/expert_parallel/unfused/combine.cu", build / "src" / "nvcc.o")])
            self.assertEqual(ptxas_report.objects(build, "sm_100a"), [])
            with self.assertRaisesRegex(SystemExit, "no such file; configure first"):
                ptxas_report.objects(build / "elsewhere")

    def test_only_some_sources(self):
        found = [("src/cuda/instances/gemv.cu", pathlib.Path("gemv.o")),
                 ("src/cuda/plain/wgrad.cu", pathlib.Path("wgrad.o"))]
        self.assertEqual(ptxas_report.chosen(found, "gemv"), found[:1])
        self.assertEqual(ptxas_report.chosen(found, ""), found)
        with self.assertRaisesRegex(SystemExit, "--only gemm: no CUDA source"):
            ptxas_report.chosen(found, "gemm")

    def test_no_kernel_of_the_library_is_left_out(self):
        """A folder that moves leaves the list: its kernels would drop out of the report and of sass_diff."""
        sources = {path.relative_to(ptxas_report.ROOT).as_posix() for path in ptxas_report.ROOT.glob("src/**/*.cu")}
        self.assertEqual({path for path in sources if not path.startswith(ptxas_report.FOLDERS)},
                         {"src/device/cuda.cu"})  # kernels around the library
        for folder in ptxas_report.FOLDERS:
            self.assertTrue(any(path.startswith(folder) for path in sources), folder)


if __name__ == "__main__":
    unittest.main()
