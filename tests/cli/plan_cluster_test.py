#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`tessera plan --cluster`: times and memory by hand, rates against the results they name. usage:
plan_cluster_test.py PROGRAM SUITE"""

import json
import math
import pathlib
import tempfile

import program
from program import Cli

ROOT = pathlib.Path(__file__).parents[2]
CONFIGS = ROOT / "tests" / "huggingface" / "configs"
GIB = 1 << 30
D, N, E, K, HEADS, SIZE, VOCABULARY, CONTEXT = 1536, 256, 128, 8, 12, 128, 50304, 4096
SMALL = ["--hidden", "1536", "--intermediate", "256", "--experts", "128", "--top-k", "8", "--heads", "12",
         "--vocabulary", "50304", "--tied"]  # a layer of 7B-n256
QWEN = ["--hidden", "2048", "--intermediate", "768", "--experts", "128", "--top-k", "8", "--heads", "32", "--kv-heads",
        "4", "--head-size", "128", "--vocabulary", "151936"]
LAYER = 2 * D * SIZE * (HEADS + HEADS) + E * 3 * D * N + E * D + 2 * D
H200, H100 = ["--gpu", "h200"], ["--gpu", "h100"]
OLD = ["--rates", "before-runs"]


def results(path: str) -> dict:
    return json.loads((ROOT / path).read_text())


class PlanCluster(Cli):
    def plan(self, cluster: str, layers: int, *flags: str, model=SMALL, code: int = 0) -> dict:
        return self.run_json("plan", "--cluster", cluster, "--layers", str(layers), *model, *flags, code=code)

    def predictions(self, *arguments, **named) -> dict:
        return {row["impl"]: row for row in self.plan(*arguments, **named)["predictions"]}

    def equal(self, value: float, wanted: float) -> None:
        self.assertAlmostEqual(value / wanted, 1, delta=1e-12)

    def test_terms_by_hand(self):
        tokens, layers, total = 2 * CONTEXT, 3, 3 * LAYER + VOCABULARY * D + D
        document = self.plan("4x8", layers, "--sequences", "2", "--sharding", "hsdp", *H200, *OLD)
        self.equal(document["model"]["layer_parameters"], 160_631_808)
        self.equal(document["model"]["parameters"], 559_163_904)
        row = {r["impl"]: r for r in document["predictions"]}["tessera"]
        ms = {name: value / 1e3 for name, value in row["terms_ms"].items()}
        # q, k, v and out: 6 FLOP per weight and token
        self.equal(ms["projections"], layers * 6 * tokens * 4 * D * D / 650e12)
        # forward q k^T and p v, half of them masked, and 2.5 times that in backward
        self.equal(ms["attention"], layers * 3.5 * 2 * tokens * CONTEXT * D / 390e12)
        self.equal(ms["elementwise"], layers * (40 * 2 * tokens * D + 14 * LAYER) / 3.4e12)
        self.equal(ms["experts"], layers * (0.1 + (2.59 - 0.1) * tokens / 24576) / 1e3)
        self.equal(ms["head"], 6 * tokens * VOCABULARY * D / 650e12 + 8 * tokens * VOCABULARY / 3.4e12)
        self.equal(ms["optimizer"], total / 8 * 36 / 3.4e12)
        self.equal(ms["gather of a layer"], 2 * LAYER * 7 / 8 / 340e9)
        self.equal(ms["reduction of a layer"], 4 * LAYER * 7 / 8 / 340e9 + 4 * LAYER / 8 * 2 * 3 / 4 / 45e9)
        self.assertEqual((ms["router"], ms["exchange"]), (0, 0))
        self.equal(row["tokens_per_s_per_gpu"], tokens / row["ms"] * 1e3)
        self.equal(row["tokens_per_day"], 86400 * 32 * tokens / row["ms"] * 1e3)
        low, high = row["tokens_per_day_with_stragglers"]
        self.equal(low, row["tokens_per_day"] / 1.06)
        self.equal(high, row["tokens_per_day"] / 1.02)

    def test_place_of_the_experts(self):
        """Which of the two ways sends fewer bytes between hosts, by hand."""
        def reach(experts: int, top_k: int, hosts: int) -> float:
            return 1 - math.comb(experts - experts // hosts, top_k) / math.comb(experts, top_k)

        for model, shape, hosts, sequences, advice in (
                (SMALL, (1536, 256), 8, 6, "within-host"), (SMALL, (1536, 256), 2, 1, "over-hosts"),
                (QWEN, (2048, 768), 2, 4, "over-hosts"), (QWEN, (2048, 768), 8, 4, "within-host")):
            (hidden, intermediate), tokens = shape, sequences * CONTEXT
            layout = self.plan(f"{hosts}x8", 2, "--sequences", str(sequences), *H200, model=model)["experts_layout"]
            rows = 4 * tokens * (hosts - 1) * reach(128, 8, hosts) * 2 * hidden
            weights = 8 * 3 * hidden * intermediate * 128 / 8 * (hosts - 1) / hosts
            self.equal(layout["over_hosts_bytes_per_layer"], rows)
            self.equal(layout["within_host_bytes_per_layer"], weights)
            self.equal(layout["over_hosts_ms_per_layer"], rows / 45e9 * 1e3)
            self.equal(layout["within_host_ms_per_layer"], weights / 45e9 * 1e3)
            self.equal(layout["equal_tokens_per_gpu"], tokens * weights / rows)
            self.assertEqual((layout["advice"], layout["tokens_per_gpu"]), (advice, tokens))
            self.assertEqual(advice == "over-hosts", rows < weights)
        self.assertNotIn("experts_layout", self.plan("1x8", 2, "--sequences", "1", *H200))
        for cluster in ("2x16", "3x8", "32x4"):  # GPUs of a host; experts on all GPUs; experts of a token on a host
            layout = self.plan(cluster, 2, "--sequences", "1", *H200)["experts_layout"]
            self.assertEqual((layout["advice"], layout["over_hosts_possible"]), ("within-host", False))
            self.assertNotIn("over_hosts_bytes_per_layer", layout)
        flags = ("--layers", "2", "--sequences", "6", *SMALL, *H200)
        text = self.run_tessera("plan", "--cluster", "8x8", *flags, code=0).stdout
        self.assertRegex(text, "experts' place    within each host sends fewer bytes .*calculated")
        self.assertRegex(text, r"over hosts      .* MB, .* ms: rows of 24576 tokens, .*; as much with 2\d{3} tokens")

    def test_step_is_made_of_its_terms(self):
        covered = set()
        for cluster, sequences in (("1x1", "6"), ("1x8", "6"), ("2x1", "1"), ("8x2", "8")):
            for flags in ([], ["--recompute"]):
                flags_of_all = ["--sequences", sequences, "--sharding", "hsdp", *H200]
                row = self.predictions(cluster, 5, *flags_of_all, *flags)["tessera"]
                t = row["terms_ms"]
                layer = sum(t[n] for n in ("experts", "attention", "projections", "elementwise", "router")) / 5
                forward, backward = 0.36 * layer, 0.64 * layer + (0.36 * layer if flags else 0)
                gather, reduce = t["gather of a layer"], t["reduction of a layer"]
                covered.add(gather + reduce < backward)
                self.equal(row["ms"], 1.049 * (5 * (max(forward, gather) + max(backward, gather + reduce)) + t["head"]
                                              + t["optimizer"] + gather + reduce))
        self.assertEqual(covered, {True, False})  # steps that compute bounds, and steps that communication does

    def test_sharding_over_all_gpus(self):
        for cluster, gpus, ranks in (("8x8", 8, 64), ("4x2", 2, 8), ("1x4", 4, 4)):
            row = self.predictions(cluster, 2, "--sequences", "1", *H200, *OLD)["tessera"]
            rate = 340e9 if ranks == gpus else min(340e9, gpus * 45e9)  # a port of 45 GB/s for each GPU
            self.equal(row["terms_ms"]["gather of a layer"], 1e3 * 2 * LAYER * (ranks - 1) / ranks / rate)
            self.equal(row["terms_ms"]["reduction of a layer"], 1e3 * 4 * LAYER * (ranks - 1) / ranks / rate)
            self.equal(row["memory_bytes"]["state"], 16 * (2 * LAYER + VOCABULARY * D + D) / ranks)

    def test_memory_by_hand(self):
        total = 44 * LAYER + VOCABULARY * D + D
        rows = self.predictions("1x4", 44, "--sequences", "6", *H200, code=0)
        memory = rows["tessera-layer"]["memory_bytes"]
        self.equal(memory["state"], 16 * total / 4)
        self.equal(memory["gathered"], 10 * LAYER)
        self.equal(memory["saved"], 6 * CONTEXT * 44 * 32_816)
        self.equal(memory["loss"], 3 * 4096 * VOCABULARY * 4 + 8 * VOCABULARY * D)
        self.equal(memory["runtime"], 3 * GIB)
        self.equal(rows["tessera-layer"]["peak_bytes"], sum(memory.values()))
        recomputed = self.predictions("1x4", 44, "--sequences", "6", "--recompute", *H200)["tessera-layer"]
        self.equal(recomputed["memory_bytes"]["saved"], 6 * CONTEXT * (44 * 2 * D + 32_816))
        # what a layer keeps: x, q, k, v, rotated q and k, o, log-sum-exp and, counted with the experts, their norm
        attention = 2 * (2 * D + 5 * D) + 4 * HEADS
        self.assertEqual(attention, 21_552)
        logits = 8 * E  # of the model's own router, with their softmax
        for impl, experts in (("tessera", 2 * D + 4 * K * N), ("sonicmoe", 11_264), ("liger-triton", 11_264),
                              ("scattermoe", 44_032), ("torch-grouped-mm", 93_184), ("hf-grouped-mm", 93_184)):
            self.assertEqual(rows[impl]["saved_bytes_per_token_and_layer"], attention + logits + experts, impl)
        for impl, peak in (("tessera", 68), ("scattermoe", 101), ("torch-grouped-mm", 150)):
            self.assertAlmostEqual(rows[impl]["peak_bytes"] / GIB, peak, delta=1)

    def test_layers_that_stay_gathered(self):
        place = ("1x8", 5, "--sequences", "1", *H200)
        again, once = (self.predictions(*place, *flags)["tessera"] for flags in ([], ["--keep-gathered"]))
        self.equal(once["memory_bytes"]["gathered"], (2 * 5 + 6) * LAYER)
        t = once["terms_ms"]
        layer = sum(t[name] for name in ("experts", "attention", "projections", "elementwise", "router")) / 5
        gather, reduce = t["gather of a layer"], t["reduction of a layer"]
        self.assertLess(0.64 * layer, reduce)  # communication is what bounds this step
        self.equal(again["ms"] - once["ms"], 1.049 * 5 * gather)
        self.assertTrue(self.plan(*place, "--keep-gathered")["batch"]["keep_gathered"])

    def test_largest_batches(self):
        """Those of the paper calculation for cards of 80 and 141 GB, to one sequence."""
        table = ((SMALL, 44, (("1x4", H100), ("1x2", H200), ("1x4", H200), ("1x1", H200)),
                  {"tessera": (7, 14, 18, 4), "scattermoe": (3, 7, 9, 2), "torch-grouped-mm": (2, 4, 5, 1)}),
                 (QWEN, 18, (("1x4", H100), ("1x2", H200)), {"tessera": (4, 8), "torch-grouped-mm": (1, 3)}),
                 (QWEN, 36, (("1x4", H200),), {"tessera": (4,), "torch-grouped-mm": (1,)}))
        for model, layers, places, wanted in table:
            for i, (cluster, gpu) in enumerate(places):
                rows = self.predictions(cluster, layers, *gpu, model=model)
                for impl, sequences in wanted.items():
                    with self.subTest((cluster, gpu, impl)):
                        row = rows[impl]
                        self.assertAlmostEqual(row["largest_sequences"], sequences[i], delta=1)
                        self.assertEqual(row["sequences"], row["largest_sequences"])

    def test_a_batch_that_does_not_fit(self):
        for cluster, gpu, flags in (("1x4", H100, []), ("1x2", H200, ["--recompute"]),
                                    ("8x8", H100, ["--context", "1000"])):
            place = (cluster, 44, *gpu, *flags)
            largest = self.predictions(*place)["tessera-layer"]["largest_sequences"]
            fits = self.plan(*place, "--sequences", str(largest))
            row, memory = fits["predictions"][0], fits["cluster"]["memory_bytes"]
            self.assertTrue(row["fits"])
            self.assertLessEqual(row["peak_bytes"], memory)
            row = self.plan(*place, "--sequences", str(largest + 1), code=1)["predictions"][0]
            self.assertFalse(row["fits"])
            self.assertGreater(row["peak_bytes"], memory)
            done = self.run_tessera("plan", "--cluster", cluster, "--layers", "44", *SMALL, *gpu, *flags, "--sequences",
                                    str(largest + 1), code=1)
            self.assertIn(f"--sequences {largest + 1}: tessera-layer needs", done.stderr)
            self.assertIn(f"the largest that fits is {largest}", done.stderr)
            self.assertIn("does not fit", done.stdout)
        done = self.run_tessera("plan", "--cluster", "1x1", "--layers", "44", *SMALL, code=1)
        self.assertIn("not one sequence of 4096 tokens fits", done.stderr)
        self.assertIn("--recompute", done.stderr)
        one = self.predictions("1x1", 44, code=1)["tessera-layer"]
        self.assertEqual((one["sequences"], one["largest_sequences"], one["fits"]), (1, 0, False))

    def test_what_grows_and_what_falls(self):
        place = {"cluster": "2x4", "layers": 12, "flags": ["--sequences", "6", *H200]}

        def row(impl="tessera", **changes) -> dict:
            at = {**place, **changes}
            return self.predictions(at["cluster"], at["layers"], *at["flags"])[impl]

        base, flags = row(), place["flags"]
        for change in ({"layers": 13}, {"flags": ["--sequences", "7", *H200]}, {"flags": [*flags, "--context", "5000"]},
                       {"impl": "torch-grouped-mm"}):
            other = row(**change)
            self.assertGreater(other["ms"], base["ms"], change)
            self.assertGreater(other["peak_bytes"], base["peak_bytes"], change)
        recomputed = row(flags=[*flags, "--recompute"])
        self.assertGreater(recomputed["ms"], base["ms"])
        self.assertLess(recomputed["peak_bytes"], base["peak_bytes"])
        self.assertGreater(row(flags=["--sequences", "6", *H100])["ms"], base["ms"])
        self.assertLess(row(cluster="4x4")["peak_bytes"], base["peak_bytes"])
        hsdp = row(flags=[*flags, "--sharding", "hsdp"])
        self.assertGreater(hsdp["peak_bytes"], base["peak_bytes"])
        self.assertEqual(row(cluster="1x8")["peak_bytes"], base["peak_bytes"])
        self.assertGreater(row("tessera")["ms"], row("tessera-layer")["ms"])  # the model's router runs beside

    def test_times_of_experts_are_those_of_the_results(self):
        measured = {}
        for row in results("bench/results/archive/h200/2026-11-24-layer-sonicmoe.json")["rows"]:
            if row["impl"] in ("tessera", "sonicmoe"):
                measured.setdefault((*row["shape"], row["impl"], "h200"), []).append(row["ms"])
        for row in results("bench/results/archive/h100/2026-11-24-layer-over-h.json")["rows"]:
            if row["variant"] == "dh over h" and row["impl"] == "tessera":
                measured.setdefault((*row["shape"], row["impl"], "h100"), []).append(row["ms"])
        self.assertEqual(len(measured), 30)
        for (tokens, d, n, experts, k, impl, gpu), passes in measured.items():
            flags = ["--hidden", str(d), "--intermediate", str(n), "--experts", str(experts), "--top-k", str(k),
                     "--heads", "8", "--vocabulary", "1000", "--head-size", "64"]
            row = self.predictions("8x8", 1, "--gpu", gpu, "--sequences", "1", model=flags)[impl]
            self.assertAlmostEqual(row["experts_ms"], sum(passes), delta=0.006, msg=(impl, gpu, d, n))
            self.assertEqual((row["experts_tokens"], row["experts_measured"]), (tokens, True))
            self.assertTrue((ROOT / row["experts_source"]).is_file())

    def derived(self, path: str, of: str, elementwise_of: str) -> dict:
        """Rates that the kernels of a step of 12 layers and 6 sequences on two H200 had, from the row `of`."""
        rows = {r["impl"]: r for r in results(path)["rows"]}
        row, tokens, gathered = rows[of], 6 * CONTEXT, 12 * LAYER
        sharded = (gathered + VOCABULARY * D + D) / 2

        def ms(impl: str, kind: str) -> float:  # of a step that is not profiled
            return rows[impl]["split"][kind] * rows[impl]["ms"] / rows[impl]["split"]["all"] / 1e3

        names = {kernel["name"]: kernel["ms"] for kernel in row["split"]["kernels"]}
        fp32 = sum(t for name, t in names.items() if "simt_sgemm" in name or "gemm_f32f32" in name)
        dense = ms(of, "dense gemm") - fp32 * row["ms"] / row["split"]["all"] / 1e3
        others = sum(ms(of, kind) for kind in row["split"] if kind not in ("all", "nccl", "sharding copies", "kernels"))
        sent = sum(t for name, t in names.items() if "ReduceScatter" in name or "AllGather" in name) / 1e3
        elementwise = (12 * 40 * 2 * tokens * D + 8 * tokens * VOCABULARY) / ms(elementwise_of, "elementwise")
        router = ms("no-experts", "router")
        if of == "tessera-layer":  # beside it tessera has the model's router and its GEMMs
            router = ms("tessera", "router") + ms("tessera", "dense gemm") - dense
        return {
            "attention_flops_per_s": 12 * 3.5 * 2 * tokens * CONTEXT * D / ms(of, "attention"),
            "dense_flops_per_s": (12 * 6 * tokens * 4 * D * D + 6 * tokens * VOCABULARY * D) / dense,
            "elementwise_bytes_per_s": elementwise,
            "copies_bytes_per_s": 14 * gathered / (row["ms"] / 1e3 - others),
            "optimizer_bytes_per_s": 36 * sharded / ms(of, "optimizer"),
            "logits_rows": router * elementwise / (12 * tokens * E * 4),
            "link_bytes_per_s": (4 * sharded + 2 * gathered) / sent,
            "slowdown": 1 / (1 - row["split"]["idle"] / row["split"]["all"])}

    def test_rates_are_those_of_the_steps(self):
        folder = "bench/results/archive/h200x2/2026-11-27-end-to-end-"
        for name, *source in (("first-run", folder + "first-run.json", "no-experts", "tessera"),
                              ("balanced-run", folder + "r0.json", "tessera-layer", "tessera-layer")):
            flags = ("1x2", 12, "--sequences", "6", "--rates", name)
            rates = self.plan(*flags, *H200)["rates"]
            for rate, wanted in self.derived(*source).items():
                self.assertAlmostEqual(rates[rate] / wanted, 1, delta=0.01, msg=(name, rate))
            self.assertEqual(self.plan(*flags, *H200)["assumptions"][0]["source"], source[0])
            scaled = self.plan(*flags, *H100)["rates"]
            for rate, ratio in (("dense_flops_per_s", 630 / 650), ("attention_flops_per_s", 630 / 650),
                                ("elementwise_bytes_per_s", 2.4 / 3.4), ("optimizer_bytes_per_s", 2.4 / 3.4)):
                self.equal(scaled[rate] / rates[rate], ratio)
        newest = self.plan("1x2", 12)["rates"]
        self.assertEqual(newest["name"], "balanced-run")  # unless another is named

    def test_a_step_without_experts(self):
        """It is no less by the time of experts where communication is what a pass takes."""
        place = ("1x4", 44, "--sequences", "5", *H200)
        (row,) = self.plan(*place, "--impl", "no-experts")["predictions"]
        self.assertNotIn("no-experts", self.predictions(*place))
        terms, rates = row["terms_ms"], self.plan(*place)["rates"]
        self.assertEqual(terms["experts"], 0)
        self.assertGreater(terms["router"], 0)  # the model's
        self.assertEqual(row["saved_bytes_per_token_and_layer"], 21_552 + 8 * E + 2 * D)
        layer = sum(terms[name] for name in ("attention", "projections", "elementwise", "router")) / 44
        gather, reduce = terms["gather of a layer"], terms["reduction of a layer"]
        self.assertGreater(gather + reduce, 0.64 * layer)
        self.equal(row["ms"], rates["slowdown"] * (44 * (0.36 * layer + gather + reduce) + terms["head"]
                                                   + terms["optimizer"] + gather + reduce))
        path = "bench/results/archive/h200x4/2026-11-28-end-to-end-r0.json"
        measured = {r["impl"]: r["ms"] for r in results(path)["rows"]}["no-experts"]
        self.assertAlmostEqual(measured / row["ms"], 1, delta=0.05)

    def test_other_shapes_take_the_nearest_rate(self):
        flags = ["--hidden", "2048", "--intermediate", "700", "--experts", "64", "--top-k", "4", "--heads", "16",
                 "--vocabulary", "1000"]
        rows = self.predictions("1x1", 2, *H200, model=flags)
        self.assertEqual(list(rows), ["tessera-layer", "tessera"])
        self.equal(rows["tessera"]["experts_ms"], 11.35 * 700 * 4 / (768 * 8))
        self.assertFalse(rows["tessera"]["experts_measured"])
        self.assertIn("Qwen3-30B", rows["tessera"]["experts_source"])

    def test_experts_spread_over_a_host(self):
        flags = ["--sequences", "2", "--sharding", "hsdp", *H200, *OLD]
        plain = self.predictions("2x4", 3, *flags)["tessera"]
        row = self.predictions("2x4", 3, *flags, "--expert-parallel")["tessera"]
        experts, tokens = 3 * E * N * D, 2 * CONTEXT
        dense = LAYER - experts
        self.equal(row["terms_ms"]["exchange"], 1e3 * 3 * 5 * tokens * K * 2 * D * 3 / 4 / 340e9)
        self.equal(row["terms_ms"]["gather of a layer"], 1e3 * 2 * dense * 3 / 4 / 340e9)
        self.equal(row["terms_ms"]["reduction of a layer"],
                   1e3 * (4 * dense * 3 / 4 / 340e9 + 4 * LAYER / 4 * 2 / 2 / 45e9))
        self.equal(row["memory_bytes"]["gathered"], 10 * (dense + experts / 4))
        self.equal(row["memory_bytes"]["exchange"], tokens * 2 * K * 2 * D)
        self.assertEqual(row["memory_bytes"]["state"], plain["memory_bytes"]["state"])
        place = ("1x4", 3, "--sequences", "6", "--sharding", "hsdp", *H200)
        spread, gathered = (self.predictions(*place, *more)["tessera"] for more in (["--expert-parallel"], []))
        self.assertGreater(spread["ms"], gathered["ms"])  # experts of 256 are cheaper gathered than their rows sent
        document = self.plan("2x4", 3, *flags, "--expert-parallel")
        self.assertIn("exchange", [a["of"] for a in document["assumptions"]])

    def test_every_assumption_is_named(self):
        document = self.plan("8x8", 44)
        of = [a["of"] for a in document["assumptions"]]
        for name in ("GEMMs", "attention", "elementwise", "copies", "optimizer", "NCCL", "network", "stragglers",
                     "overlap", "gaps", "experts", "router", "routing", "memory", "left out"):
            self.assertIn(name, of)
        for a in document["assumptions"]:
            self.assertIn(a["basis"], ("measured", "scaled", "assumed"))
            self.assertEqual(a["basis"] == "assumed", a["source"] == "", a)
            self.assertTrue((ROOT / a["source"]).exists())
        on_h200 = [a["basis"] for a in self.plan("1x2", 12, *H200)["assumptions"]]
        self.assertNotIn("scaled", on_h200)
        self.assertIn("measured", on_h200)
        before = self.plan("1x2", 12, *H200, *OLD)["assumptions"]
        self.assertEqual({a["basis"] for a in before}, {"assumed"})
        text = self.run_tessera("plan", "--cluster", "8x8", "--layers", "44", *SMALL, code=0).stdout
        for a in document["assumptions"]:
            self.assertIn(a["text"], text)

    def test_the_published_figure_stands_beside_64_h100(self):
        published = self.plan("8x8", 44)["published"]
        self.assertEqual((published["tokens_per_day"], published["tokens_per_s_per_gpu"]), (213e9, 38520))
        per_day = published["tokens_per_s_per_gpu"] * 64 * 86400
        self.assertAlmostEqual(per_day / published["tokens_per_day"], 1, delta=1e-4)
        self.assertIn("vocabulary", published["not_named"])
        self.assertIn("published", self.plan("16x4", 44))
        for cluster, gpu in (("8x8", H200), ("4x8", H100)):
            self.assertNotIn("published", self.plan(cluster, 44, *gpu))
        text = self.run_tessera("plan", "--cluster", "8x8", "--layers", "44", *SMALL, code=0).stdout
        self.assertIn("213 B tokens/day, 38520 tokens/s per GPU", text)
        self.assertIn("with stragglers", text)

    def test_model_of_a_config_file(self):
        config = ["--hf", str(CONFIGS / "qwen3-30b-a3b.json")]
        of_file = self.run_json("plan", "--cluster", "4x8", *config)
        of_flags = self.plan("4x8", 48, model=QWEN)
        self.assertEqual(of_file["model"], of_flags["model"])
        self.assertEqual(of_file["predictions"], of_flags["predictions"])
        self.assertEqual(self.run_json("plan", "--cluster", "4x8", *config, "--layers", "18")["predictions"],
                         self.plan("4x8", 18, model=QWEN)["predictions"])
        for name in ("mixtral-8x7b", "olmoe-1b-7b", "gpt-oss-20b"):
            parameters = self.run_json("plan", "--hf", str(CONFIGS / f"{name}.json"))["model"]["parameters"]["total"]
            model = self.run_json("plan", "--cluster", "8x8", "--hf", str(CONFIGS / f"{name}.json"))["model"]
            self.assertAlmostEqual(model["parameters"] / parameters, 1, delta=2e-3)  # without biases and small norms
        for name, what in (("deepseek-v3", "another attention"), ("qwen3-next-80b-a3b", "another attention"),
                           ("glm-4.5-air", "layers without experts"), ("qwen1.5-moe-a2.7b", "shared experts")):
            self.refuse("plan", "--cluster", "8x8", "--hf", str(CONFIGS / f"{name}.json"), naming=what)
        gated = {"model_type": "afmoe", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 99, "head_dim": 8,
                 "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 64, "hidden_act": "silu",
                 "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 0,
                 "score_func": "sigmoid", "route_norm": True, "n_group": 1}
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "config.json")
            path.write_text(json.dumps(gated))
            self.refuse("plan", "--cluster", "8x8", "--hf", str(path), naming="another attention")
        self.refuse("plan", "--cluster", "8x8", *config, "--layers", "49", naming="--layers 49: the model has 48")
        for flags in (["--hidden", "64"], ["--heads", "8"], ["--tied"], ["--vocabulary", "99"]):
            self.refuse("plan", "--cluster", "8x8", *config, *flags, naming=flags[0])

    def test_bad_input(self):
        for text in ("", "8", "x8", "8x", "0x8", "8x0", "-1x8", "8x8x8", "8*8", "8 x 8", "8xx8", "1e2x8", "8x65537",
                     "99999999999999999999x1", "+8x8"):
            given = [f"--cluster={text}"] if text.startswith("-") else ["--cluster", text]
            self.refuse("plan", *given, "--layers", "2", *SMALL, naming=f"--cluster '{text}': must be")
        base = ["plan", "--cluster", "1x2", "--layers", "2", *SMALL]
        for flags, naming in ((["--gpu", "b200"], "--gpu b200"), (["--sharding", "ddp"], "--sharding ddp"),
                              (["--rates", "newest"], "--rates newest"),
                              (["--impl", "megablocks"], "--impl megablocks"),
                              (["--expert-parallel"], "--sharding hsdp"),
                              (["--tokens", "64"], "--tokens with --cluster"),
                              (["--activation", "relu"], "--activation with --cluster"),
                              (["--router", "given"], "--router"), (["--dtype", "fp32"], "--dtype"),
                              (["--plot", "a.svg"], "--plot"), (["--kv-heads", "5"], "--kv-heads 5"),
                              (["--context", "0"], "--context"), (["--sequences", "-3"], "--sequences"),
                              (["--sequences", "many"], "--sequences"), (["--head-size", "0"], "--head-size")):
            self.refuse(*base, *flags, naming=naming)
        for name in ("--hidden", "--intermediate", "--experts", "--top-k", "--heads", "--vocabulary"):
            place = SMALL.index(name)
            self.refuse("plan", "--cluster", "1x2", "--layers", "2", *SMALL[:place], *SMALL[place + 2:],
                        naming=f"--cluster without {name}")
        self.refuse("plan", "--cluster", "1x2", *SMALL, naming="--cluster without --layers")
        self.refuse(*base[:-3], "--vocabulary", "0", naming="--vocabulary")
        tiny = ["plan", "--cluster", "1x2", "--layers", "2", "--hidden", "100", "--intermediate", "8", "--experts", "4",
                "--vocabulary", "9"]
        self.refuse(*tiny, "--top-k", "5", "--heads", "5", naming="--top-k 5")
        self.refuse(*tiny, "--top-k", "2", "--heads", "7", naming="--heads 7: does not divide")
        self.refuse("plan", "--cluster", "1x3", "--layers", "2", *SMALL, "--sharding", "hsdp", "--expert-parallel",
                    naming="128 experts on 3 GPUs")
        self.refuse("plan", "--sequences", "2", naming="--sequences without --cluster")
        self.refuse("plan", "--layers", "2", naming="--layers without --cluster")
        config = str(CONFIGS / "olmoe-1b-7b.json")
        self.refuse("plan", "--hf", config, "--recompute", naming="--recompute without --cluster")


if __name__ == "__main__":
    program.main({"plan_cluster": PlanCluster})
