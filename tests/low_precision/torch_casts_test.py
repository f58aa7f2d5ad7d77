# SPDX-License-Identifier: Apache-2.0
"""torch_casts_test.py PROGRAM: e4m3 and e8m0 of the library against torch's casts, where those are defined.

torch turns what exceeds 464 into NaN, where e4m3 here becomes 448, and it keeps the sign of NaN. Its cast to e8m0
rounds to the nearest power of two, so that amax / 448 has to be rounded up beforehand.
"""

import subprocess
import sys
import unittest

import torch

PROGRAM = sys.argv.pop(1)


class TorchCasts(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        data = torch.frombuffer(bytearray(subprocess.run([PROGRAM], check=True, stdout=subprocess.PIPE).stdout),
                                dtype=torch.uint8)
        cls.codes, values, scales, cls.bytes = data.split([65536, 1024, 1024, 65536])
        cls.values, cls.scales = values.clone().view(torch.float32), scales.clone().view(torch.float32)
        cls.bf16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)

    def test_e4m3_of_every_bf16(self):
        value = self.bf16.float()
        theirs = self.bf16.to(torch.float8_e4m3fn).view(torch.uint8)
        defined = value.abs() <= 464
        self.assertGreater(int(defined.sum()), 34000)
        self.assertTrue(torch.equal(self.codes[defined], theirs[defined]))
        nan = value.isnan()
        self.assertTrue(bool((self.codes[nan] == 0x7f).all()) and bool((theirs[nan] & 0x7f == 0x7f).all()))
        large = ~nan & ~defined
        self.assertTrue(torch.equal(self.codes[large], torch.where(value[large] > 0, 0x7e, 0xfe).to(torch.uint8)))

    def test_values_of_every_e4m3_code(self):
        theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        self.assertTrue(torch.equal(self.values.isnan(), theirs.isnan()))
        numbers = ~theirs.isnan()
        self.assertTrue(torch.equal(self.values[numbers].view(torch.int32), theirs[numbers].view(torch.int32)))

    def test_values_of_every_e8m0_byte(self):
        theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).float()
        self.assertTrue(torch.equal(self.scales[:255], theirs[:255]))
        self.assertTrue(bool(self.scales[255].isnan()) and bool(theirs[255].isnan()))

    def test_e8m0_scale_of_every_bf16(self):
        amax = self.bf16.abs().double()
        mantissa, exponent = torch.frexp(amax / 448)  # in [0.5, 1): 2^exponent is above, unless it is 2^(exponent-1)
        power = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-127, 127)
        finite = amax.isfinite()
        theirs = torch.ldexp(torch.ones_like(amax), power).float().to(torch.float8_e8m0fnu).view(torch.uint8)
        theirs[amax == 0] = 0
        self.assertTrue(torch.equal(self.bytes[finite], theirs[finite]))
        self.assertTrue(bool((self.bytes[~finite] == 255).all()))


if __name__ == "__main__":
    unittest.main()
