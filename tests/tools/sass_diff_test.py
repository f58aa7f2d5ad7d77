# SPDX-License-Identifier: Apache-2.0
"""sass_diff.py sees a changed instruction, and no difference where only names, addresses or encodings differ."""

import unittest

import sass_diff


def listing(**kernels):
    """cuobjdump's form: an address, the instruction, its encoding; a second line of encoding alone."""
    lines = []
    for name, body in kernels.items():
        lines += ["code for sm_90a", f"\t\tFunction : {name}", '\t.headerflags    @"EF_CUDA_SM90"']
        for i, instruction in enumerate(body):
            encoding = hash((name, i)) & 0xffff
            lines.append(f"        /*{i * 16:04x}*/                   {instruction} ;   /* 0x{encoding:016x} */")
            lines.append(f"                                                   /* 0x{i:016x} */")
    return "\n".join(lines) + "\n"


BODY = ["MOV R1, c[0x0][0x28]", "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24", "@P0 BRA 0x40", "EXIT"]
OTHER = ["MOV R1, c[0x0][0x28]", "FADD R2, R2, R3", "EXIT"]


class SassDiff(unittest.TestCase):
    def parse(self, **kernels):
        return sass_diff.kernels_of(listing(**kernels))

    def test_reads_instructions_alone(self):
        self.assertEqual(self.parse(_Z1fv=BODY), {"_Z1fv": BODY})

    def test_renamed_and_reordered_kernels_are_equal(self):
        old = self.parse(_Z5blockv=BODY, _Z1gv=OTHER)
        new = self.parse(_Z2ggv=OTHER, _Z4gemmv=BODY)
        self.assertEqual(sass_diff.compare(old, new), [])

    def test_names_in_operands_do_not_count(self):
        for operand in ("CALL.REL.NOINC `({})", "MOV R4, 32@lo({})", "CALL.ABS.NOINC {}"):
            with self.subTest(operand):
                old = self.parse(_Z1fv=[*OTHER, operand.format("_ZN5block3runEv")])
                new = self.parse(_Z1fv=[*OTHER, operand.format("_ZN4gemm3runEv")])
                self.assertEqual(sass_diff.compare(old, new), [])

    def test_changed_instruction_is_seen(self):
        for place, changed in enumerate(("MOV R1, c[0x0][0x30]", "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24",
                                         "@P1 BRA 0x40", "NOP")):
            with self.subTest(changed):
                body = [*BODY]
                body[place] = changed
                lines = sass_diff.compare(self.parse(_Z1fv=BODY), self.parse(_Z1fv=body))
                self.assertEqual(len(lines), 1)
                self.assertIn("4 ->      4 instructions, 2 differ", lines[0])

    def test_order_of_instructions_counts(self):
        swapped = [BODY[1], BODY[0], *BODY[2:]]
        self.assertEqual(len(sass_diff.compare(self.parse(_Z1fv=BODY), self.parse(_Z1fv=swapped))), 1)

    def test_a_kernel_more_or_less_is_seen(self):
        one, two = self.parse(_Z1fv=BODY), self.parse(_Z1fv=BODY, _Z1gv=OTHER)
        self.assertIn("only in the new build", sass_diff.compare(one, two)[0])
        self.assertIn("only in the old build", sass_diff.compare(two, one)[0])
        # A copy needs an equal of its own.
        twins = self.parse(_Z1fv=BODY, _Z1hv=BODY)
        self.assertEqual(len(sass_diff.compare(one, twins)), 1)

    def test_a_function_for_two_architectures_is_two(self):
        twice = sass_diff.kernels_of(listing(_Z1fv=BODY) + listing(_Z1fv=OTHER))
        self.assertEqual(list(twice.values()), [BODY, OTHER])


if __name__ == "__main__":
    unittest.main()
