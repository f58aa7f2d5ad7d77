# SPDX-License-Identifier: Apache-2.0
"""Names of kernels, as tools/ptxas_report.py writes them."""

import shutil
import unittest

import ptxas_report


class Names(unittest.TestCase):
    def test_parameters_are_left_out(self):
        for signature, name in (("scan(ScanParams)", "scan"), ("f<C<(Part)1> >(P)", "f<C<(Part)1> >"),
                                ("f<C<(Part)1> >(P<C<(Part)1> >)", "f<C<(Part)1> >"), ("f", "f"), ("f(g(int))", "f")):
            self.assertEqual(ptxas_report.without_parameters(signature), name)

    @unittest.skipIf(shutil.which("c++filt") is None, "no c++filt; apt-get install binutils")
    def test_mangled_names(self):
        self.assertEqual(ptxas_report.demangle(["_ZN7tessera4cuda3addEPfi", "_ZN7tessera4cuda1fIiEEvT_"]),
                         ["add", "f<int>"])


if __name__ == "__main__":
    unittest.main()
