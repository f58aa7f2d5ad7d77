# SPDX-License-Identifier: Apache-2.0
import pathlib
import tempfile
import unittest

import dram_bytes

ROOT = pathlib.Path(__file__).parent.parent.parent

# As Nsight Compute of CUDA 13.0 writes them on an H200, columns left out.
HEADER = """==WARNING== Note: Running with unmodified GPU clocks. Results may be inconsistent.
==PROF== Connected to process 790 (tessera)
"ID","Process ID","Kernel Name","Grid Size","dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum"
"","","","","byte","byte","ns"
"""
LOGITS = ('"0","790","void tessera::cuda::router_logits<tessera::cuda::RouterLogitsNarrow>'
          '(tessera::cuda::RouterLogitsParams)","(132, 1, 1)","76,085,504","2,394,112","30,944"\n')
RANK = '"1","790","tessera::cuda::metadata_rank(tessera::cuda::MetadataArguments)","(96, 1, 1)","795,392","0","5,920"\n'
SCATTER = ('"2","790","tessera::cuda::metadata_scatter(tessera::cuda::MetadataArguments)","(96, 1, 1)",'
           '"1,287,168","0","10,848"\n')
DGRAD = ('"3","790","void tessera::cuda::down_projection_dgrad<tessera::cuda::DownProjectionDgradConfig<(tessera::'
         'ActivationKind)0>>(tessera::cuda::DownProjectionDgradParams)","(132, 1, 1)","1","2","3"\n')
AGGREGATE = ('"4","790","void tessera::cuda::aggregate_beside<tessera::cuda::AggregateEightSlots, __nv_bfloat16>'
             '(tessera::cuda::AggregateBesideArguments)","(528, 1, 1)","605,571,584","54,079,232","163,808"\n')
SHAPE = dram_bytes.Shape(24576, 1536, 256, 128, 8)


class DramBytesTest(unittest.TestCase):
    def test_parses_what_ncu_writes(self):
        kernels = dram_bytes.parse(HEADER + LOGITS + RANK)
        self.assertEqual([k.dram_read for k in kernels], [76085504, 795392])
        self.assertEqual([k.dram_write for k in kernels], [2394112, 0])
        self.assertEqual([k.ns for k in kernels], [30944, 5920])
        self.assertEqual([dram_bytes.op_of(k.name) for k in kernels], ["router_logits", "metadata"])
        self.assertEqual(dram_bytes.parse("==ERROR== ERR_NVGPUCTRPERM\n"), [])

    def test_names(self):
        for kernel, op in (("void tessera::cuda::router_dlogits<C>(A)", "router_dlogits"),
                           ("void router_logits<RouterLogitsLow>(RouterLogitsParams)", "router_logits"),
                           ("void tessera::cuda::route<C, 4>(A)", "route"),
                           ("void tessera::cuda::router_wgrad<C>(A)", "router_wgrad"),
                           ("void tessera::cuda::aggregate_beside<C, E>(A)", "aggregate"),
                           ("tessera::cuda::given_slots(A)", "given_slots"),
                           ("void tessera::cuda::<unnamed>::route_plain<C>(A)", "route"),
                           ("tessera::cuda::(anonymous namespace)::metadata_plain_scan(A)", "metadata")):
            self.assertEqual(dram_bytes.op_of(kernel), op)

    def test_first_call_of_each_pass(self):
        kernels = dram_bytes.parse(HEADER + LOGITS + RANK + LOGITS + RANK + DGRAD + AGGREGATE + DGRAD + AGGREGATE)
        self.assertEqual([(back, dram_bytes.op_of(k.name)) for back, k in dram_bytes.first_calls(kernels)],
                         [(False, "router_logits"), (False, "metadata"), (True, "down_projection_dgrad"),
                          (True, "aggregate")])

    def test_calls_as_bench_libraries_makes_them(self):
        kernels = dram_bytes.parse(HEADER + LOGITS + RANK + DGRAD + AGGREGATE + DGRAD + AGGREGATE + LOGITS)
        self.assertEqual([back for back, _ in dram_bytes.first_calls(kernels)], [False, False, True, True])

    def test_profiles_the_shape_that_was_asked_for(self):
        with tempfile.TemporaryDirectory() as folder:
            ncu, table, given = (pathlib.Path(folder) / name for name in ("ncu", "table", "given"))
            table.write_text(HEADER + LOGITS + RANK, encoding="utf-8")
            ncu.write_text(f'#!/bin/sh\necho "$@" > "{given}"\ncat "{table}"\n', encoding="utf-8")
            ncu.chmod(0o755)
            kernels = dram_bytes.profile(str(ncu), "bench", "lib.so", SHAPE)
            self.assertEqual([dram_bytes.op_of(k.name) for k in kernels], ["router_logits", "metadata"])
            self.assertIn("bench --library layer=lib.so --rounds 1 --tokens 24576 --hidden 1536 --intermediate 256"
                          " --experts 128 --top-k 8", given.read_text(encoding="utf-8"))
            table.write_text("==ERROR== ERR_NVGPUCTRPERM\n", encoding="utf-8")
            with self.assertRaisesRegex(SystemExit, "gave no kernels"):
                dram_bytes.profile(str(ncu), "bench", "lib.so", SHAPE)

    def test_refuses_a_call_that_may_be_cut_off(self):
        for lines in (LOGITS + RANK, LOGITS + RANK + DGRAD + AGGREGATE, DGRAD + AGGREGATE + DGRAD):
            with self.assertRaisesRegex(SystemExit, "whole forward and a whole backward call: (router|down)_"):
                dram_bytes.first_calls(dram_bytes.parse(HEADER + lines))

    def test_rows_add_up_the_launches_of_an_op(self):
        calls = [(False, k) for k in dram_bytes.parse(HEADER + LOGITS + RANK + SCATTER)]
        calls += [(True, k) for k in dram_bytes.parse(HEADER + AGGREGATE)]
        logits, metadata, aggregate = dram_bytes.rows_of("7B-n256", SHAPE, calls)
        self.assertEqual(logits["bytes"], 2 * 24576 * 1536 + 2 * 128 * 1536 + 4 * 24576 * 128)
        self.assertEqual(logits["ratio"], 0.887)
        self.assertEqual((metadata["dram_read"], metadata["us"]), (795392 + 1287168, 16.768))
        self.assertTrue(aggregate["backward"])
        self.assertEqual(aggregate["bytes"], 2 * 24576 * 1536 * (8 + 1) + 4 * 24576 * 8)

    def test_shapes_are_those_of_bench(self):
        configs = (ROOT / "cli" / "bench_configs.hpp").read_text(encoding="utf-8")
        self.assertEqual(dram_bytes.shape_of("7B-n256", configs), SHAPE)
        for name in ("7B", "gpt-oss-20b", "FlashDMoE"):  # unknown, biased, not gated
            with self.assertRaises(SystemExit):
                dram_bytes.shape_of(name, configs)


if __name__ == "__main__":
    unittest.main()
