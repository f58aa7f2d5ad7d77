#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`tessera plan`: numbers checked by hand against docs/numerics.md. usage: plan_test.py PROGRAM SUITE"""

import json
import pathlib
import shutil
import subprocess
import tempfile

import program
from program import Cli

CONFIGS = pathlib.Path(__file__).parents[1] / "huggingface" / "configs"
MIB = 1 << 20
# T, d, n, E, K of a 7B model's layer with experts of 256.
LAYER = ["--tokens", "24576", "--hidden", "1536", "--intermediate", "256", "--experts", "128", "--top-k", "8",
         "--dtype", "bf16"]


class Plan(Cli):
    def saved(self, document: dict) -> dict:
        return {row["policy"]: row["saved_bytes"] for row in document["memory"]}

    def test_memory_of_every_policy(self):
        layer = self.run_json("plan", *LAYER)["layer"]
        rows, saved = 24576 * 8, self.saved(layer)
        tables = 16 * rows + 4 * 129 + 4 * rows  # three tables and scores, offsets, ids
        self.assertEqual(saved["tessera"], 264 * MIB + tables)  # 2Td + 4TKn
        self.assertEqual(saved["tessera-over-h"], saved["tessera"])
        self.assertEqual(saved["tessera-save-x"], 72 * MIB + tables)
        self.assertEqual(saved["momoe-keeps-none"], 72 * MIB)
        self.assertEqual(saved["momoe-keeps-all"], 840 * MIB)
        self.assertEqual(saved["megatron"], 936 * MIB)
        self.assertEqual(saved["scattermoe"], 1032 * MIB)
        tessera = layer["memory"][0]
        self.assertEqual(tessera["forward_transient_bytes"], 2 * rows * (256 + 1536))
        self.assertEqual(tessera["backward_transient_bytes"], 2 * rows * (2 * 256 + 1536))
        over_h, save_x = layer["memory"][1:3]
        self.assertEqual(over_h["backward_transient_bytes"], 2 * rows * 1536)
        self.assertEqual(save_x["backward_transient_bytes"], 2 * rows * (2 * 256 + 1536))  # h, then dh in its place
        self.assertIsNone(layer["memory"][-1]["backward_transient_bytes"])

    def test_memory_in_fp8(self):
        """In MiB: saved by both policies; transient in forward, where weights are quantised, and in backward."""
        for shape, table, of_mxfp8, layers in (
                ((24576, 1536, 256, 128, 8), (139, 174, 674, 1035), (675, 1038), 3),
                ((32768, 2048, 768, 128, 8), (466, 528, 1414, 2700), (1420, 2712), 3),
                ((32768, 4096, 1536, 128, 8), (928, 1052, 3212, 6168), (3236, 6216), 3)):
            names = ("--tokens", "--hidden", "--intermediate", "--experts", "--top-k")
            flags = [text for pair in zip(names, map(str, shape), strict=True) for text in pair]
            layer = self.run_json("plan", *flags, "--dtype", "bf16", "--router", "given")["layer"]
            plans = {row["policy"]: row for row in layer["memory"]}
            fp8, keeps_x = plans["tessera-fp8"], plans["tessera-fp8-keeps-x"]
            transient = fp8["forward_transient_bytes"], fp8["backward_transient_bytes"]
            of_all = (fp8["saved_bytes"], keeps_x["saved_bytes"], *transient)
            self.assertEqual(tuple(round(value / MIB) for value in of_all), table)
            mxfp8 = plans["tessera-mxfp8"]
            of_mx = mxfp8["forward_transient_bytes"], mxfp8["backward_transient_bytes"]
            self.assertEqual(tuple(round(value / MIB) for value in of_mx), of_mxfp8)
            self.assertEqual(mxfp8["saved_bytes"], fp8["saved_bytes"])  # rows are a multiple of 4
            own = plans["tessera"]
            peaks = [[stack * row["saved_bytes"] + row["backward_transient_bytes"] for row in (fp8, own)]
                     for stack in range(1, 6)]
            self.assertEqual([low < high for low, high in peaks].index(True) + 1, layers)
            self.assertEqual(fp8["lower_peak_from_layers"], layers)
            self.assertEqual((own["lower_peak_from_layers"], plans["megatron"]["lower_peak_from_layers"]), (None, None))
            t, d, n, e, k = shape
            rows = t * k
            self.assertEqual(fp8["saved_bytes"], 33 * (t * d + 2 * rows * n) // 32 + 16 * rows + 4 * (e + 1))
            self.assertEqual(keeps_x["saved_bytes"] - fp8["saved_bytes"], 31 * t * d // 32)
        for odd in (["--hidden", "192"], ["--intermediate", "96"], ["--dtype", "fp32"]):
            flags = [*LAYER]
            flags[LAYER.index(odd[0]) + 1] = odd[1]
            layer = self.run_json("plan", *flags)["layer"]
            self.assertNotIn("tessera-fp8", self.saved(layer))
            self.assertNotIn("tessera-mxfp8", self.saved(layer))

    def test_saved_bytes_do_not_grow_with_granularity(self):
        def saved(n: str, experts: str, k: str) -> tuple[int, int]:
            flags = [*LAYER[:4], "--intermediate", n, "--experts", experts, "--top-k", k, "--dtype", "bf16"]
            layer = self.run_json("plan", *flags)["layer"]
            return layer["saved_bytes"]["x"] + layer["saved_bytes"]["h"], self.saved(layer)["scattermoe"]

        coarse, fine = saved("1024", "32", "2"), saved("256", "128", "8")
        self.assertEqual(coarse[0], fine[0])
        self.assertGreater(fine[1], 1.5 * coarse[1])

    def test_transient_bytes_are_those_of_the_library(self):
        """The workspace is the formula, plus small blocks per thread and padding."""
        shape = ["--tokens", "4096", "--hidden", "256", "--intermediate", "128", "--experts", "16", "--top-k", "4"]
        plans = {row["policy"]: row for row in self.run_json("plan", *shape)["layer"]["memory"]}
        for policy, flags in (("tessera", []), ("tessera-save-x", ["--save", "x"])):
            passes = self.run_json("explain", *shape, *flags, "--threads", "1")["passes"]
            for name in ("forward", "backward"):
                planned, used = plans[policy][f"{name}_transient_bytes"], passes[name]["workspace_bytes"]
                self.assertLessEqual(planned, used)
                self.assertLess(used, 1.2 * planned)

    def test_work_and_intensity(self):
        layer = self.run_json("plan", *LAYER)["layer"]
        rows = 24576 * 8
        self.assertEqual(layer["flops"], {"forward": 6 * rows * 256 * 1536, "backward": 12 * rows * 256 * 1536,
                                          "router_forward": 2 * 24576 * 128 * 1536})
        self.assertEqual(layer["expert_parameters"], 128 * 3 * 256 * 1536)
        self.assertEqual(layer["granularity"], 6)
        self.assertAlmostEqual(layer["arithmetic_intensity"]["gemms"], 3 / (2 / 1536 + 2 / 256 + 3 / 1536))
        self.assertAlmostEqual(layer["arithmetic_intensity"]["layer"],
                               3 / (4 / 1536 + 3 / 256 + 1 / 2048 + 3 / 1536))

    def test_tile_waste(self):
        def waste(*flags: str) -> float:
            return self.run_json("plan", *flags)["layer"]["tile"]["waste"]

        def flags(tokens: int, experts: int, top_k: int, *more: str) -> list[str]:
            return ["--tokens", str(tokens), "--experts", str(experts), "--top-k", str(top_k), *more]

        # (M-1)/(2 T_e) where T_e is many tiles
        for tokens, experts, top_k in ((24576, 128, 8), (32768, 512, 10), (65536, 128, 2)):
            self.assertAlmostEqual(waste(*flags(tokens, experts, top_k)),
                                   127 * experts / (2 * tokens * top_k), delta=0.003)
        # One token, one choice: one row in one tile.
        self.assertAlmostEqual(waste(*flags(1, 4, 1, "--tile", "16")), 15)
        # Two tokens, one of two experts each: one tile for both (p = 1/2) or two tiles; 2 rows.
        self.assertAlmostEqual(waste(*flags(2, 2, 1, "--tile", "2")), (0.5 * 2 + 0.5 * 4) / 2 - 1)
        self.assertEqual(waste(*flags(100, 3, 3, "--tile", "50")), 0)  # every expert has every token
        self.assertAlmostEqual(waste(*flags(100, 3, 3, "--tile", "80")), 0.6)
        self.assertEqual(waste(*flags(0, 4, 2)), 0)
        self.assertEqual(waste(*flags(1000, 16, 2, "--round", "nr-f")), 0)

    def test_model(self):
        document = self.run_json("plan", "--hf", str(CONFIGS / "qwen3-30b-a3b.json"), "--tokens", "1024")
        model, layer = document["model"], document["layer"]
        self.assertEqual(model["parameters"]["total"], 30_532_122_624)
        self.assertEqual(model["parameters"]["active"], 3_353_032_704)
        self.assertEqual(layer["shape"], {"tokens": 1024, "hidden": 2048, "intermediate": 768, "experts": 128,
                                          "top_k": 8})
        self.assertEqual((layer["dtype"], layer["router"]), ("bf16", "softmax-topk-renorm"))
        for of_model, of_layer in zip(model["memory"], layer["memory"], strict=True):
            self.assertEqual(of_model["saved_bytes"], 48 * of_layer["saved_bytes"])
        # every parameter that a token meets multiplies once; the embedding is looked up
        self.assertEqual(model["flops"]["forward"], 1024 * 2 * (3_353_032_704 - 151936 * 2048))

    def test_every_published_config(self):
        for path in sorted(CONFIGS.glob("*.json")):
            with self.subTest(path.name):
                text = self.run_tessera("plan", "--hf", str(path), code=0).stdout
                self.assertIn("scattermoe", text)
                self.assertIn(json.loads(path.read_text())["model_type"], text)

    def test_plot(self):
        with tempfile.TemporaryDirectory() as folder:
            picture = pathlib.Path(folder, "plan.svg")
            code = 0 if shutil.which("gnuplot") else 3
            self.run_tessera("plan", *LAYER, "--plot", str(picture), code=code)
            script = picture.with_suffix(".gp").read_text()
            self.assertIn("\n6 267.7", script)  # d/n = 6: 264 MiB and the tables
            if code == 3:
                self.skipTest("no gnuplot: the script is there, the picture is not; apt-get install gnuplot-nox")
            svg = picture.read_text()
            self.assertIn("<svg", svg)
            self.assertIn("scattermoe", svg)
            self.assertIn("Tile waste", svg)

    def test_plot_without_gnuplot_says_so(self):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([program.PROGRAM, "plan", "--plot", f"{folder}/a.svg", "--json"],
                                  capture_output=True, text=True, env={"PATH": folder})
            self.assertEqual(done.returncode, 3, done.stderr)
            self.assertIn("gnuplot", done.stderr)
            self.assertIn("layer", json.loads(done.stdout))  # the numbers are not lost

    def test_bad_input(self):
        config = str(CONFIGS / "olmoe-1b-7b.json")
        self.refuse("plan", "--hf", "/no/such/config.json", naming="/no/such/config.json")
        self.refuse("plan", "--hf", config, "--experts", "4", naming="--experts")
        self.refuse("plan", "--hf", config, "--router", "sigmoid-bias", naming="--router")
        for ignored in (["--save", "x"], ["--capacity", "4"], ["--route-scale", "2"], ["--normalize-scores"],
                        ["--limit", "3"], ["--variable-experts"], ["--column-chunk", "8"], ["--replay"],
                        ["--sentinels", "0.5"], ["--routing", "file:/no/such/file"], ["--routing", "zipf:1"]):
            self.refuse("plan", "--hf", config, *ignored, naming=f"{ignored[0]} with --hf")
        self.run_json("plan", "--hf", config, "--tokens", "64", "--dtype", "fp32", "--round", "up", "--tile", "16")
        self.run_json("plan", "--hf", config, "--router-dtype", "fp32")
        self.refuse("plan", "--top-k", "99", naming="top_k=99")
        self.refuse("plan", "--tokens", "-1", naming="tokens=-1")
        for tile in "0", "-3":
            self.refuse("plan", "--tile", tile, naming=f"--tile {tile}")
            self.refuse("plan", "--hf", config, "--tile", tile, naming=f"--tile {tile}")
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "config.json")
            for text, naming in (("", "JSON"), ("[]", "object"), ("{}", "model_type"), ("{" * 99, "JSON"),
                                 ('{"model_type": "llama"}', "llama"),
                                 ('{"model_type": "mixtral"}', "num_hidden_layers"),
                                 ('{"model_type": "mixtral", "model_type": "mixtral"}', "twice")):
                path.write_text(text)
                with self.subTest(text):
                    self.refuse("plan", "--hf", str(path), naming=naming)

    def test_bad_plot(self):
        done = self.run_tessera("plan", "--plot", "plan.png", code=2)
        self.assertIn("plan.png", done.stderr)
        done = self.run_tessera("plan", "--plot", "/no/such/folder/plan.svg", code=3)
        self.assertIn("/no/such/folder", done.stderr)


if __name__ == "__main__":
    program.main({"plan": Plan})
