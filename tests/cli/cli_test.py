#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Drives the program as a user or script does. usage: cli_test.py PROGRAM SUITE"""

import json
import os
import pathlib
import subprocess
import tempfile
import unittest.mock

import program
from program import Cli

SMALL = ["--tokens", "48", "--hidden", "40", "--intermediate", "24", "--experts", "6", "--top-k", "2"]


class Info(Cli):
    def test_text_and_json(self):
        self.assertIn("backend", self.run_tessera("info", code=0).stdout)
        info = self.run_json("info")
        self.assertEqual([b["name"] for b in info["backends"]], ["cpu", "cuda"])
        self.assertGreaterEqual(info["devices"][0]["threads"], 1)

    def test_no_colour_in_a_pipe(self):
        self.assertNotIn("\033", self.run_tessera("verify", *SMALL, code=0).stdout)


class Explain(Cli):
    def test_every_op_has_one_chosen_candidate(self):
        explained = self.run_json("explain", *SMALL)
        for name in ("forward", "backward"):
            ops = explained["passes"][name]["ops"]
            self.assertGreater(len(ops), 2)
            for op in ops:
                self.assertEqual(sum(c["chosen"] for c in op["candidates"]), 1, op)
                self.assertTrue(all(c["reason"] for c in op["candidates"]), op)
        self.assertIn("up_projection_fwd", self.run_tessera("explain", *SMALL, code=0).stdout)

    def test_refuses_as_the_call_would(self):
        self.refuse("explain", *SMALL, "--router", "given", "--round", "nr-f", naming="round")


class Verify(Cli):
    KEYS = ["ok", "shape", "routed_rows", "device", "dtype", "tensors", "saved_bytes",
            "saved_bytes_formula", "transient_peak_bytes", "bitwise_repeat"]

    def test_document(self):
        result = self.run_json("verify", *SMALL, "--bias", "--router", "topk-softmax")
        self.assertEqual(list(result), self.KEYS)
        self.assertEqual(result["shape"], {"tokens": 48, "hidden": 40, "intermediate": 24,
                                           "experts": 6, "top_k": 2})
        self.assertEqual(result["routed_rows"], 96)
        self.assertTrue(result["ok"] and result["bitwise_repeat"])
        # x, h, three index arrays and scores, offsets, ids
        self.assertEqual(result["saved_bytes"], 4 * 48 * 40 + 4 * 2 * 96 * 24 + 16 * 96 + 28 + 4 * 96)
        self.assertEqual(result["saved_bytes"], result["saved_bytes_formula"])
        for name in ("o", "dx", "dw_up", "dw_down", "dscores", "dlogits", "db_up", "db_down"):
            tensor = result["tensors"][name]
            self.assertEqual(list(tensor), ["rel_error", "naive_rel_error", "worst_row_ratio", "ok"])
            self.assertTrue(tensor["ok"])
            self.assertLess(tensor["rel_error"], 1e-5)

    def test_options(self):
        for options in (["--layout", "blocked:4", "--activation", "geglu-erf"],
                        ["--layout", "transposed-interleaved", "--routing", "zipf:1.5"],
                        ["--routing", "shuffled-zipf:1.5"],
                        ["--layout", "separate", "--routing", "empty:0.5", "--accumulate"],
                        ["--router", "given", "--sentinels", "0.5", "--ids-dtype", "int64"],
                        ["--router", "given", "--variable-experts", "--repeat-experts"],
                        ["--router", "given", "--routing", "one-token-each"],
                        ["--routing", "one-expert", "--router", "softmax-topk-renorm"],
                        ["--activation", "relu2", "--layout", "transposed", "--threads", "3"]):
            with self.subTest(options):
                self.run_tessera("verify", *SMALL, *options, code=0)

    def test_degenerate_shapes(self):
        for shape in (["--tokens", "0"], ["--tokens", "1", "--top-k", "1"],
                      ["--experts", "1", "--top-k", "1"], ["--experts", "4", "--top-k", "4"],
                      ["--hidden", "1", "--intermediate", "1"]):
            with self.subTest(shape):
                flags = dict(zip(SMALL[::2], SMALL[1::2])) | dict(zip(shape[::2], shape[1::2]))
                self.run_tessera("verify", *[part for item in flags.items() for part in item], code=0)

    def test_fp32_router_beside_bf16_experts(self):
        flags = [*SMALL, "--dtype", "bf16", "--router-dtype", "fp32"]
        self.assertTrue(self.run_json("verify", *flags)["ok"])
        self.assertIn("fp32 router", self.run_tessera("explain", *flags, code=0).stdout)

    def test_low_precision(self):
        shape = ["--tokens", "70", "--hidden", "128", "--intermediate", "128", "--experts", "4", "--dtype", "bf16"]
        for flags, scales, least in ((["fp8"], "fp32", 23), (["fp8", "--scales", "pow2"], "pow2", 22),
                                     (["mxfp8"], "rceil", 22)):
            result = self.run_json("verify", *shape, "--precision", *flags)
            self.assertEqual((result["precision"], result["scales"]), (flags[0], scales))
            self.assertTrue(result["ok"] and result["bitwise_repeat"])
            plain = self.run_json("verify", *shape)
            self.assertEqual(result["saved_bytes"], result["saved_bytes_formula"])
            self.assertLess(result["saved_bytes"], 0.56 * plain["saved_bytes"])  # tables weigh much at this d and n
            for name in ("o", "dx", "dw_up", "dw_down"):
                tensor = result["tensors"][name]
                self.assertGreater(tensor["sqnr_db"], least - 1)
                self.assertLess(tensor["sqnr_db"], 30)
                self.assertAlmostEqual(tensor["sqnr_db"], tensor["recipe_sqnr_db"], delta=0.3)
        self.refuse("verify", *shape, "--precision", "fp4", naming="choose one of: native fp8 mxfp8")
        self.refuse("verify", *shape, "--precision", "mxfp8", "--scales", "pow2", naming="only fp8 has a choice")
        self.refuse("verify", *shape, "--precision", "fp8", "--scales", "rceil", naming="--scales rceil")
        self.refuse("verify", *shape, "--precision", "fp8", "--column-chunk", "64", naming="column_chunk=64")
        self.refuse("verify", "--precision", "fp8", naming="dtype=fp32")
        self.run_tessera("verify", "--random", "1", "--unproven-kernels", code=0)
        auto = self.run_tessera("verify", *shape, "--precision", "auto", "--json", code=0)
        self.assertNotIn("precision", json.loads(auto.stdout))  # native
        self.assertIn("--precision auto takes native here", auto.stderr)
        self.refuse("verify", "--random", "3", "--precision", "auto", naming="--precision auto with --random")
        self.refuse("verify", "--random", "3", "--scales", "pow2", naming="--scales with --random")
        cases = self.run_json("verify", "--random", "4", "--precision", "fp8", "--seed", "3")["cases"]
        self.assertEqual([case["precision"] for case in cases], ["fp8"] * 4)

    def test_precision_in_plan_and_explain(self):
        shape = ["--hidden", "128", "--intermediate", "128", "--dtype", "bf16"]
        for command in ("plan", "explain"):
            saved = [self.run_json(command, *shape, "--precision", name) for name in ("auto", "native", "fp8", "mxfp8")]
            saved = [(report.get("layer") or report)["saved_bytes"] for report in saved]
            self.assertEqual(saved[0], saved[1])
            self.assertEqual([2 * part["h"] for part in saved[2:]], [saved[1]["h"]] * 2)
            self.assertEqual([part["h_scale"] for part in saved[2:]], [saved[1]["h"] // 64] * 2)
        auto = self.run_json("explain", *shape, "--precision", "auto")
        self.assertEqual(auto["precision"], "native")
        self.assertEqual(self.run_json("explain", *shape, "--precision", "fp8")["precision"], "fp8")
        auto = auto["passes"]
        for name, ops in (("forward", 2), ("backward", 2)):
            reasons = [c["reason"] for op in auto[name]["ops"] for c in op["candidates"]]
            self.assertEqual(sum("auto takes native" in reason for reason in reasons), ops)
        fp8 = self.run_json("explain", *shape, "--precision", "fp8")["passes"]["backward"]["ops"]
        chosen = {op["op"]: [c["name"] for c in op["candidates"] if c["chosen"]] for op in fp8}
        self.assertEqual(chosen["up_projection_dgrad"], ["cpu/low_precision"])
        self.assertEqual(chosen["up_projection_wgrad"], ["cpu/parallel"])

    def test_random(self):
        done = self.run_tessera("verify", "--random", "5", "--seed", "5", code=0)
        lines = done.stdout.splitlines()
        self.assertEqual(len(lines), 6)
        self.assertIn("5 of 5 cases passed, 1 with T >= 512", lines[-1])

    def test_random_takes_no_layer(self):
        for flags in (["--router", "sigmoid-bias"], ["--dtype", "bf16"], ["--tokens", "8"], ["--bias"],
                      ["--routing", "zipf:1"], ["--step", "3"]):
            self.refuse("verify", "--random", "1", *flags, naming=flags[0])

    def test_equal_seeds_give_equal_lines(self):
        lines = [self.run_tessera("verify", "--random", "2", "--seed", "6", code=0).stdout for _ in "ab"]
        self.assertEqual(*lines)

    def test_random_commands_reproduce_their_case(self):
        document = self.run_json("verify", "--random", "4", "--seed", "6")
        self.assertEqual((document["passed"], document["failed"]), (4, 0))
        for case in document["cases"]:
            command = case.pop("command").split()
            self.assertEqual(command[:2], ["tessera", "verify"])
            self.assertEqual(self.run_json(*command[1:]), case)


class Bench(Cli):
    def test_document(self):
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder, "results.json")
            document = self.run_json("bench", *SMALL, "--seconds", "0", "--out", str(out))
            self.assertEqual(document, json.loads(out.read_text()))
        self.assertEqual(list(document), ["command", "commit", "device", "driver", "clocks_mhz", "date",
                                          "protocol", "ceilings", "rows"])
        self.assertEqual(document["command"],
                         "tessera bench --tokens 48 --hidden 40 --intermediate 24 --experts 6 "
                         "--top-k 2 --seconds 0")
        rows = document["rows"]
        self.assertEqual([row["pass"] for row in rows], ["forward", "backward", "forward-inference"])
        for row in rows:
            self.assertEqual(list(row), [
                "config", "shape", "dtype", "layout", "gpus", "routing", "router", "round", "pass", "impl",
                "variant", "ms", "ms_p10", "ms_p90", "tflops", "bound_ms", "bound_impl", "bounds_tried_ms",
                "aggregate_floor_ms", "saved_bytes", "transient_peak_bytes", "checked"])
            self.assertIs(row["checked"], True)
            self.assertLessEqual(row["ms_p10"], row["ms"])
            self.assertGreater(row["bound_ms"], 0)
            self.assertIn(row["bound_impl"], row["bounds_tried_ms"])

    def test_unchecked_rows_say_so(self):
        rows = self.run_json("bench", *SMALL, "--seconds", "0", "--no-check", "--pass", "forward")["rows"]
        self.assertEqual([row["checked"] for row in rows], [False])

    def test_given_routing(self):
        self.run_tessera("bench", *SMALL, "--seconds", "0", "--router", "given", "--sentinels", "0.2", code=0)

    def test_gradients_of_other_losses(self):
        self.run_tessera("bench", *SMALL, "--seconds", "0", "--aux-dlogits", code=0)
        blocks = ["--tokens", "256", "--hidden", "128", "--intermediate", "128", "--experts", "6", "--dtype", "bf16",
                  "--seconds", "0"]
        plain = self.run_json("bench", *blocks)["rows"][1]
        for flags in (["--precision", "fp8", "--scales", "pow2"], ["--precision", "mxfp8", "--save", "x"]):
            for row in self.run_json("bench", *blocks, *flags)["rows"]:
                self.assertTrue(row["checked"])
                self.assertEqual(row["precision"], flags[1])
                self.assertEqual(row["variant"], {"pow2": "pow2-scales", "x": "save-x"}[flags[3]])
                self.assertLess(row["saved_bytes"], 0.6 * plain["saved_bytes"])
        self.assertNotIn("precision", plain)

    def test_a_processor_whose_library_multiplies_no_bf16(self):
        with unittest.mock.patch.dict(os.environ, ONEDNN_MAX_CPU_ISA="AVX2"):
            rows = self.run_json("bench", *SMALL, "--dtype", "bf16", "--seconds", "0")["rows"]
        self.assertGreaterEqual(len(rows), 2)
        for row in rows:
            self.assertTrue(row["checked"])
            self.assertRegex(row["bound_impl"], "-fp32$")

    def test_configuration_with_a_routing_file(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "routing.json")
            for tokens, top_k in (1, 1), (4, 2), (4096, 1):
                path.write_text(json.dumps({"topk_ids": [list(range(top_k))] * tokens,
                                            "topk_weights": [[0.5] * top_k] * tokens}))
                self.refuse("bench", "--config", "cpu-small", "--routing", f"file:{path}", naming="--config cpu-small")

    def test_bad_flags(self):
        self.refuse("bench", "--config", "no-such", naming="no-such")
        self.refuse("bench", "--pass", "sideways", naming="sideways")
        self.refuse("bench", *SMALL, "--out", "/no/such/folder/x.json", naming="/no/such/folder/x.json")  # at once
        for seconds in "nan", "-1", "1e9", "soon":
            self.refuse("bench", *SMALL, "--seconds", seconds, naming=seconds)
        self.refuse("bench", "--config", "cpu-small", "--tokens", "4", naming="--config")
        self.refuse("bench", *SMALL, "--gpus", "2", naming="--gpus")
        self.refuse("bench", *SMALL, "--partial-combine", naming="--partial-combine")
        self.refuse("bench", *SMALL, "--router", "given", "--aux-dlogits", naming="aux-dlogits")
        self.refuse("bench", *SMALL, "--sentinels", "0.1", naming="sentinels")
        self.refuse("bench", *SMALL, "--dtype", "fp16", naming="dtype")

    def test_bad_flags_of_one_gpu(self):
        # Refused before any GPU is looked for.
        for flags, naming in ((["--router", "given", "--aux-dlogits"], "aux-dlogits"),
                              (["--sentinels", "0.1"], "sentinels"), (["--variable-experts"], "--variable-experts"),
                              (["--replay"], "--replay"), (["--save", "x"], "--save"),
                              (["--routing", "zipf:1"], "--routing"), (["--pass", "sideways"], "sideways")):
            with self.subTest(flags):
                self.refuse("bench", "--device", "cuda", *SMALL, *flags, naming=naming)

    def test_bad_flags_of_several_gpus(self):
        # Refused before any GPU is looked for.
        def refuse(*flags, naming):
            self.refuse("bench", "--device", "cuda", "--gpus", *flags, naming=naming)
        refuse("-1", "--config", "Qwen3-30B", naming="--gpus")
        refuse("9", "--config", "Qwen3-30B", naming="--gpus")
        refuse("3", "--config", "Qwen3-30B", naming="experts=128")
        refuse("2", "--config", "Qwen3-30B", "--bias", naming="--bias")
        refuse("2", "--config", "Qwen3-30B", "--dtype", "fp32", naming="--dtype")
        refuse("2", "--config", "Qwen3-30B", "--layout", "interleaved", naming="--layout")
        # As its checkpoints have it, unless asked for another.
        refuse("2", "--config", "gpt-oss-20b", naming="--layout transposed-interleaved")
        refuse("2", "--config", "gpt-oss-20b", "--layout", "separate", naming="--layout separate")
        refuse("2", "--config", "gpt-oss-20b", "--layout", "concat", naming="biases")
        refuse("2", "--config", "Qwen3-30B", "--pass", "backward", naming="--pass")
        refuse("2", "--config", "Qwen3-30B", "--aux-dlogits", naming="--aux-dlogits")
        refuse("2", "--config", "Qwen3-30B", "--router-bias", naming="--router-bias")
        for tokens in "1", "8":  # nothing to compare bits with
            refuse("2", *SMALL[2:], "--tokens", tokens, naming=f"tokens={tokens}")
        if len(self.run_json("info")["devices"]) == 1:  # without a GPU: what is not refused looks for one
            for flags in ["9"], ["0"], ["8", "--no-check"]:
                self.refuse("bench", "--device", "cuda", "--gpus", "2", *SMALL[2:], "--tokens", *flags, naming="cuda:1",
                            code=3)


class Usage(Cli):
    def test_help_of_every_command_has_an_example(self):
        for command in ("info", "verify", "bench", "explain", "plan", "train", "convert", "generate"):
            with self.subTest(command):
                text = self.run_tessera(command, "--help", code=0).stdout
                self.assertIn(f"tessera {command}", text)
                self.assertIn("--json", text)

    def test_version(self):
        self.assertRegex(self.run_tessera("--version", code=0).stdout, r"^tessera \d+\.\d+\.\d+$")

    def test_no_or_unknown_command(self):
        self.refuse(naming="subcommand")
        self.refuse("frobnicate", naming="frobnicate")
        self.refuse("verify", "--tokens", "4", "--frobnicate", "2", naming="verify takes no --frobnicate 2; "
                                                                           "see tessera verify --help")
        self.refuse("generate", naming="--checkpoint is required; see tessera generate --help")

    def test_bad_values(self):
        for flags, naming in (
            (["--tokens", "many"], "many"),
            (["--tokens", "-1"], "tokens=-1"),
            (["--tokens", "99999999999999999999"], "99999999999999999999"),
            (["--tokens", "1e3"], "1e3"),
            (["--tokens", "12abc"], "12abc"),
            (["--tokens", "010"], "010"),
            (["--tokens", "0x10"], "0x10"),
            (["--tokens", "-01"], "-01"),
            (["--tokens", "4.0"], "4.0"),
            (["--tokens", "nan"], "nan"),
            (["--seed", "-1"], "'-1' is not a whole number in [0, 2^64)"),
            (["--seed", "18446744073709551616"], "18446744073709551616"),
            (["--round", "nr-f", "--tile", "4294967304"], "4294967304"),
            (["--route-scale", "nan"], "nan"),
            (["--route-scale", "1e-60"], "'1e-60' is not a number that fp32 can hold"),
            (["--route-scale", "1e39"], "1e39"),
            (["--route-scale", "0x1p3"], "0x1p3"),
            (["--router", "group-limited", "--groups", "4294967298"], "4294967298"),
            (["--tokens", "4000000000"], "tokens=4000000000"),
            (["--hidden", "0"], "hidden=0"),
            (["--top-k", "17"], "top_k=17"),
            (["--activation", "tanh"], "tanh"),
            (["--layout", "diagonal"], "diagonal"),
            (["--layout", "blocked"], "blocked"),
            (["--layout", "blocked:0"], "blocked:0"),
            (["--layout", "blocked:7"], "layout.block=7"),
            (["--layout", "concat:2"], "concat:2"),
            (["--activation", "relu", "--layout", "interleaved"], "layout"),
            (["--router", "psychic"], "psychic"),
            (["--router", "given", "--round", "nr-f"], "round"),
            (["--router", "expert-choice", "--round", "up"], "round"),
            (["--round", "nearest"], "nearest"),
            (["--round", "nr-f", "--tile", "0"], "tile"),
            (["--capacity", "4"], "capacity"),
            (["--router", "given", "--replay"], "replay"),
            (["--dtype", "fp16"], "dtype"),
            (["--router-dtype", "fp16"], "router_dtype=fp16 beside dtype=fp32"),
            (["--router-dtype", "bf16"], "router_dtype=bf16 beside dtype=fp32"),
            (["--dtype", "bf16", "--router-dtype", "fp32", "--router", "given"], "router_dtype=fp32 with router given"),
            (["--column-chunk", "-1"], "column_chunk=-1"),
            (["--dtype", "int8"], "int8"),
            (["--routing", "zipf"], "zipf"),
            (["--routing", "shuffled-zipf"], "shuffled-zipf"),
            (["--routing", "zipf:nan"], "nan"),
            (["--routing", "empty:2"], "empty:2"),
            (["--routing", "balanced:1"], "balanced:1"),
            (["--routing", "one-token-each"], "one-token-each"),
            (["--sentinels", "0.5"], "sentinels"),
            (["--padding", "0.5", "--router", "given"], "padding"), (["--padding", "2"], "--padding 2"),
            (["--sentinels", "nan", "--router", "given"], "sentinels"),
            (["--variable-experts"], "variable_experts"),
            (["--router", "given", "--aux-dlogits"], "aux-dlogits"),
            (["--router", "given", "--router-bias"], "router-bias"),
            (["--threads", "-3"], "num_threads"),
            (["--device", "abacus"], "abacus"),
            (["--random", "0"], "--random"),
            (["--random", "5", "--tokens", "3"], "--random"),
        ):
            with self.subTest(flags):
                self.refuse("verify", *flags, naming=naming)

    def test_what_the_machine_lacks(self):
        self.refuse("verify", "--device", "cuda:1000", naming="cuda:1000", code=3)
        self.refuse("bench", "--device", "cuda:1000", naming="cuda:1000", code=3)
        self.refuse("verify", "--device", "cuda:x", naming="cuda:N", code=2)
        self.refuse("verify", "--tokens", "2000000", "--hidden", "100000", naming="memory", code=3)

    def test_full_stdout_is_an_error(self):
        if not os.path.exists("/dev/full"):
            self.skipTest("no /dev/full; mount devtmpfs on /dev, or run on Linux")
        with open("/dev/full", "w") as full:
            done = subprocess.run([program.PROGRAM, "info"], stdout=full, stderr=subprocess.PIPE, text=True)
        self.assertEqual(done.returncode, 3)
        self.assertIn("stdout", done.stderr)


class RoutingFile(Cli):
    def with_file(self, text: str | bytes) -> str:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        path = pathlib.Path(folder.name, "routing.json")
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return f"file:{path}"

    def test_rectangular(self):
        table = {"topk_ids": [[0, 3], [1, 2], [9, -1]],
                 "topk_weights": [[0.5, 0.5], [0.9, 0.1], [1, 1]]}
        result = self.run_json("verify", "--experts", "4", "--routing", self.with_file(json.dumps(table)))
        self.assertEqual((result["shape"]["tokens"], result["shape"]["top_k"]), (3, 2))
        self.assertEqual(result["routed_rows"], 4)

    def test_rows_of_unequal_length(self):
        table = {"topk_ids": [[0], [], [1, 2, 1]], "topk_weights": [[1], [], [0.5, 0.25, 2]]}
        result = self.run_json("verify", "--experts", "4", "--routing", self.with_file(json.dumps(table)))
        self.assertEqual(result["routed_rows"], 4)

    def test_bad_files(self):
        good = {"topk_ids": [[0]], "topk_weights": [[1]]}
        for text in ("", "{", "[1]", "null", "[" * 100000, '{"topk_ids": ' + "[" * 100000,
                     b"\xff\xfe\x00", json.dumps({"topk_ids": [[0]]}),
                     json.dumps(good | {"topk_ids": [0]}), json.dumps(good | {"topk_ids": [["0"]]}),
                     json.dumps(good | {"topk_ids": [[0.5]]}), json.dumps(good | {"topk_ids": [[0, 1]]}),
                     json.dumps(good | {"topk_weights": [[None]]}),
                     json.dumps(good | {"topk_weights": [[1e300]]}),
                     '{"topk_ids": [[0]], "topk_weights": [[NaN]]}',
                     '{"topk_ids": [[0]], "topk_weights": [[1e999]]}'):
            with self.subTest(text[:40]):
                self.refuse("verify", "--routing", self.with_file(text), naming="routing file")

    def test_missing_file_and_contradictions(self):
        self.refuse("verify", "--routing", "file:/no/such/file", naming="/no/such/file")
        self.refuse("verify", "--routing", "file:/", naming="file:/")
        path = self.with_file('{"topk_ids": [[0]], "topk_weights": [[1]]}')
        self.refuse("verify", "--routing", path, "--tokens", "2", naming="tokens")
        self.refuse("verify", "--routing", path, "--router", "topk-softmax", naming="router given")


SUITES = {"info": Info, "explain": Explain, "verify": Verify, "bench": Bench, "usage": Usage,
          "routing_file": RoutingFile}

if __name__ == "__main__":
    program.main(SUITES)
