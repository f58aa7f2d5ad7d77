# SPDX-License-Identifier: Apache-2.0
"""bench/end_to_end: the model, its data, the check of the experts, what is made of measured times."""

import argparse
import contextlib
import dataclasses
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

import programs
import tessera
import tier
import torch
from torch import distributed
from torch.nn import functional

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = ROOT / "bench" / "end_to_end"
sys.path.insert(0, str(PROGRAMS))

import experts  # noqa: E402
import largest  # noqa: E402
import measure  # noqa: E402
import model as models  # noqa: E402
import predict  # noqa: E402
import split  # noqa: E402
import text  # noqa: E402
import train  # noqa: E402
import training  # noqa: E402

TINY = models.CONFIGURATIONS["tiny"]


def drawn(name: str, **changes) -> models.Model:
    model = models.Model(dataclasses.replace(TINY, **changes), experts.load(name))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1))
    return model


def tokens() -> tuple:
    ids = torch.randint(TINY.vocabulary, (3, 33), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def gradients(model: models.Model) -> tuple:
    loss, auxiliary, counts = model(*tokens())
    (loss + auxiliary).backward()
    return loss, auxiliary, counts, {name: p.grad for name, p in model.named_parameters()}


class Models(unittest.TestCase):
    def test_cross_entropy_in_chunks(self):
        generator = torch.Generator().manual_seed(0)
        x, w = (torch.randn(rows, 16, generator=generator).requires_grad_() for rows in (23, 50))
        targets = torch.randint(50, (23,), generator=generator)
        rows, models.LOSS_ROWS = models.LOSS_ROWS, 7
        self.addCleanup(setattr, models, "LOSS_ROWS", rows)
        loss = models._CrossEntropy.apply(x, w, targets, models.loss_chunk)
        wanted = functional.cross_entropy(x @ w.mT, targets)
        torch.testing.assert_close(loss, wanted)
        torch.testing.assert_close(torch.autograd.grad(3 * loss, (x, w)), torch.autograd.grad(3 * wanted, (x, w)))

    def test_router_and_its_losses_are_the_librarys(self):
        generator = torch.Generator().manual_seed(0)
        x, w = torch.randn(40, 16, generator=generator), torch.randn(8, 16, generator=generator)
        logits = torch.randn(40, 8, generator=generator).requires_grad_()
        ids, weights, made, counts = models.route(x, w, 2)
        right_ids, right_weights, right_logits = tessera.route(x, w, top_k=2)
        self.assertTrue(torch.equal(ids.sort().values.int(), right_ids.sort().values))
        torch.testing.assert_close(made, right_logits)
        torch.testing.assert_close(weights.sort().values, right_weights.sort().values)
        self.assertEqual(counts.tolist(), torch.bincount(ids.flatten(), minlength=8).tolist())
        loss = models.auxiliary_loss(logits, counts)
        right = tessera.losses.router_losses(logits, counts, balance=models.BALANCE, z=models.Z)
        torch.testing.assert_close(loss, right)
        torch.testing.assert_close(*(torch.autograd.grad(value, logits)[0] for value in (loss, right)))

    def test_positions_matter_and_the_future_does_not(self):
        model = drawn("torch-eager")
        ids, targets = tokens()
        with torch.no_grad():
            hidden = []
            for changed in (ids, ids.roll(1, dims=1), torch.cat((ids[:, :16], ids[:, 16:].flip(1)), dim=1)):
                x = functional.embedding(changed, model.embedding)
                tables = models.rotary_tables(32, TINY.head_size, "cpu")
                hidden.append(model.blocks[0](x, *tables)[0])
        torch.testing.assert_close(hidden[0][:, :16], hidden[2][:, :16])
        self.assertGreater((hidden[0][:, 16:] - hidden[2][:, 16:]).abs().max(), 0.01)
        q = torch.randn(1, 1, 32, TINY.head_size)
        turned = models.rotate(q, *models.rotary_tables(32, TINY.head_size, "cpu"))
        torch.testing.assert_close(turned.norm(dim=-1), q.norm(dim=-1))
        same = models.rotate(q[:, :, :1].expand_as(q), *models.rotary_tables(32, TINY.head_size, "cpu"))[0, 0]
        torch.testing.assert_close(same[3] @ same[5], same[20] @ same[22])  # a product depends on the distance

    def test_experts_are_exchanged_and_nothing_else(self):
        wanted = gradients(drawn("torch-grouped-mm"))
        for name in ("tessera", "tessera-layer", "torch-eager", "hf-grouped-mm", "hf-eager"):
            model = drawn("torch-grouped-mm")
            model.use(experts.load(name))
            loss, auxiliary, counts, grads = gradients(model)
            torch.testing.assert_close(loss, wanted[0], rtol=1e-5, atol=0)
            torch.testing.assert_close(auxiliary, wanted[1], rtol=1e-5, atol=0)
            self.assertTrue(torch.equal(counts, wanted[2]), name)
            for key, gradient in grads.items():
                torch.testing.assert_close(gradient, wanted[3][key], rtol=1e-3, atol=1e-6, msg=f"{name} {key}")

    def test_recomputed_blocks_have_the_same_gradients(self):
        once, again = drawn("tessera"), drawn("tessera")
        again.recompute(True)
        for one, other in zip(gradients(once)[3].values(), gradients(again)[3].values(), strict=True):
            self.assertTrue(torch.equal(one, other))

    def test_sizes(self):
        for name, parameters in (("7B-n256", 7.15e9), ("Qwen3-30B", 30.5e9)):
            self.assertAlmostEqual(models.CONFIGURATIONS[name].parameters() / parameters, 1, delta=0.005)
        self.assertAlmostEqual(models.CONFIGURATIONS["7B-n256"].flops_per_token() / 7.2e9, 1, delta=0.01)
        self.assertEqual(TINY.parameters(), sum(p.numel() for p in models.Model(TINY, None).parameters()))
        untied = dataclasses.replace(TINY, tied=False)
        self.assertEqual(untied.parameters(), sum(p.numel() for p in models.Model(untied, None).parameters()))
        for change, word in (({"top_k": 9}, "top_k=9"), ({"heads": 3}, "heads=3"), ({"layers": 0}, "layers=0")):
            with self.assertRaisesRegex(ValueError, word):
                dataclasses.replace(TINY, **change)


class Experts(unittest.TestCase):
    def test_others_than_the_baseline_are_found_out(self):
        sizes = (64, 32, 8, 2, 200, "cpu", torch.float32)
        for name in ("tessera", "tessera-layer", "hf-grouped-mm", "hf-eager", "torch-eager"):
            self.assertLess(max(experts.checked(name, *sizes).values()), 1e-5, name)
        right = experts.load("torch-eager")
        wrong = {"no dscores": lambda x, ids, s, up, down: right(x, ids, s.detach(), up, down) + 0 * s.sum(),
                 "other order": lambda x, ids, s, up, down: right(x, ids, s, up.roll(32, dims=1), down),
                 "zeros": lambda x, ids, s, up, down: 0 * right(x, ids, s, up, down)}
        for fault, function in wrong.items():
            experts._FACTORIES["wrong"] = lambda function=function: function
            experts.load.cache_clear()
            with self.assertRaisesRegex(ValueError, "wrong: .* off from torch-grouped-mm", msg=fault):
                experts.checked("wrong", *sizes)
        del experts._FACTORIES["wrong"]
        experts.load.cache_clear()

    def test_what_cannot_be_imported_is_named(self):
        def missing():
            raise ImportError("No module named 'peer'")

        experts._FACTORIES["peer"] = missing
        self.addCleanup(experts._FACTORIES.pop, "peer")
        with self.assertRaisesRegex(experts.Unavailable, "ImportError: No module named 'peer'"):
            experts.load("peer")
        with self.assertRaisesRegex(ValueError, "unknown; choose from tessera"):
            experts.load("tesera")


class Text(unittest.TestCase):
    def test_corpus(self):
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            for i in range(25):
                (folder / f"{i:02}.txt").write_text(f"file {i} tells of number {i * i} and of number {i * 7}. " * 20)
            (folder / "99.txt").write_text((folder / "03.txt").read_text())  # once is enough
            (folder / "picture.png").write_bytes(b"\0\1")
            files = text.listing([folder], 10**6)
            self.assertEqual([pathlib.Path(path).name for path, _ in files], [f"{i:02}.txt" for i in range(25)])
            self.assertEqual(len(text.listing([folder], 3000)), 3)
            corpus = text.prepare([folder], 300, 16, folder / "cache")
            import tokenizers
            tokenizer = tokenizers.Tokenizer.from_file(str(next((folder / "cache").glob("*/tokenizer.json"))))
            content = tokenizer.decode(corpus.training.tolist(), skip_special_tokens=True)
            self.assertTrue(content.startswith((folder / "00.txt").read_text() + (folder / "01.txt").read_text()))
            self.assertNotIn("file 19 ", content)
            self.assertIn("file 19 ", tokenizer.decode(corpus.held_out.tolist()))
            again = text.prepare([folder], 300, 16, folder / "cache")
            self.assertEqual(corpus.training.tolist(), again.training.tolist())
            self.assertEqual(corpus.digest, again.digest)
            whole, targets = corpus.batch(3, 7, 4, 16, 0, 1, "cpu")
            parts = [corpus.batch(3, 7, 2, 16, rank, 2, "cpu")[0] for rank in (0, 1)]
            self.assertTrue(torch.equal(whole, torch.cat(parts)))
            self.assertTrue(torch.equal(whole[:, 1:], targets[:, :-1]))
            self.assertFalse(torch.equal(whole, corpus.batch(3, 8, 4, 16, 0, 1, "cpu")[0]))
            with self.assertRaisesRegex(ValueError, "too few for a context of 100000"):
                text.prepare([folder], 300, 100_000, folder / "cache")
        with self.assertRaisesRegex(ValueError, "no such file"):
            text.listing([folder / "gone"], 10)

    def test_programs_prepare_a_corpus_at_once(self):
        with tempfile.TemporaryDirectory() as folder:
            folder, encode, corpora = pathlib.Path(folder), text._encode, []
            for i in range(25):
                (folder / f"{i:02}.txt").write_text(f"file {i} tells of number {i * i}. " * 20)

            def encode_beside_another(*arguments):
                if not corpora:  # the other one begins and ends while this one encodes
                    corpora.append(None)
                    corpora[0] = text.prepare([folder], 300, 16, folder / "cache")
                return encode(*arguments)

            with mock.patch.object(text, "_encode", encode_beside_another):
                corpora.append(text.prepare([folder], 300, 16, folder / "cache"))
            first, second = corpora
            self.assertEqual(first.training.tolist(), second.training.tolist())
            self.assertEqual(first.held_out.tolist(), second.held_out.tolist())
            self.assertEqual([path.name for path in (folder / "cache").iterdir()],
                             [f"text-{first.digest[:16]}-300"])
            next((folder / "cache").glob("*/used.json")).unlink()  # as an interrupted program of before leaves it
            with self.assertRaisesRegex(ValueError, "is not whole; remove it"):
                text.prepare([folder], 300, 16, folder / "cache")


class Measured(unittest.TestCase):
    def test_ratio_is_of_time_per_token_in_each_round(self):
        rounds = [{"a": {"ms": [10.0 * k] * 3, "loss": 2.0, "peak_bytes": 5, "reserved_bytes": 6, "state_bytes": 1,
                         "allocator_retries": 0},
                   "b": {"ms": [40.0 * k] * 3, "loss": 2.5, "peak_bytes": 7, "reserved_bytes": 8, "state_bytes": 1,
                         "allocator_retries": k}}
                  for k in (1, 2)]
        row = measure.summary("a", rounds, {"a": 1, "b": 2}, 100, "b")
        self.assertEqual(row["times_faster_than_b"], {"mean": 2.0, "half_interval": 0.0, "rounds": [2.0, 2.0]})
        self.assertEqual((row["ms"], row["tokens_per_s_per_gpu"], row["peak_bytes"]), (15.0, 6667, 5))
        self.assertIsNone(row["loss_apart"])
        self.assertEqual(measure.crowded(row), "")
        row = measure.summary("b", rounds, {"a": 1, "b": 2}, 100, "b")
        self.assertIn("gave memory back 3 times", measure.crowded(row))
        self.assertEqual(measure.summary("a", rounds, {"a": 1, "b": 1}, 100, "b")["loss_apart"], 0.5)

    def test_batches(self):
        self.assertEqual(measure.batches(["a", "b"], "3"), {"a": 3, "b": 3})
        self.assertEqual(measure.batches(["a", "b"], "b=2,a=5"), {"a": 5, "b": 2})
        for bad in ("a=5", "0", "x", "a=1,b=0"):
            with self.assertRaisesRegex(training.Stop, "--sequences"):
                measure.batches(["a", "b"], bad)

    def test_split_of_a_step(self):
        def kernel(name, ts, dur):
            return {"cat": "kernel", "name": name, "ts": ts, "dur": dur}

        events = [kernel("ncclDevKernel_AllGather", 0, 1000), kernel("nvjet_tst_128", 500, 1000),
                  kernel("void tessera::cuda::up_projection_fwd", 1500, 2000), kernel("flash_fwd_kernel", 4000, 1000),
                  kernel("void tessera::cuda::aggregate_beside", 2000, 1500),  # beside another: it counts once
                  {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9000}]
        self.assertEqual(split.summarize(events, 2), {
            "all": 2.5, "attention": 0.5, "dense gemm": 0.5, "experts": 1.0, "idle": 0.25, "nccl": 0.5,
            "nccl exposed": 0.25})
        self.assertEqual(split.summarize(events[-1:], 2), {})

    def test_kinds_of_kernels(self):
        for name, kind in (("_groupXtY", "experts"), ("_scatter2scatter", "experts"), ("_group", "experts"),
                           ("token_gather_sum_kernel", "experts"), ("_bitmatrix_metadata_compute_stage1", "experts"),
                           ("_compute_col_partial_sum_kernel", "experts"),
                           ("void group_norm", "elementwise"), ("triton_red_fused_logsumexp", "elementwise"),
                           ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "attention"),
                           ("multi_tensor_apply_kernel<FusedOptimizerTensor>", "optimizer"),
                           ("nvjet_tst", "dense gemm")):
            self.assertEqual(split.kind(name), kind, name)

    @tier.deep
    def test_program(self):
        """All implementations that run on a CPU, in one process; rows as the contracts want them."""
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder) / "rows.json"
            sys.argv = ["measure.py", "--config", "tiny", "--context", "32", "--text", str(ROOT / "docs"), "--cache",
                        folder, "--text-bytes", "200000", "--experts",
                        "tessera,hf-grouped-mm,sonicmoe,no-experts,torch-grouped-mm", "--rounds", "2", "--timed", "2",
                        "--warm-up", "2", "--warm-up-sequences", "2", "--check-tokens", "64",
                        "--profile", "--out", str(out)]
            with contextlib.redirect_stdout(io.StringIO()):
                measure.run(measure.arguments())
            document = json.loads(out.read_text())
        rows = {row["impl"]: row for row in document["rows"]}
        self.assertTrue(document["protocol"].startswith("median of 2 steps in each of 2 rounds"))
        names = {"tessera", "hf-grouped-mm", "torch-grouped-mm", "no-experts"}
        if torch.cuda.is_available():
            names |= rows.keys()
        else:
            self.assertIn("need a GPU", document["left_out"]["sonicmoe"])
        self.assertEqual(rows.keys(), names)
        for name, row in rows.items():
            self.assertEqual((row["pass"], row["layers"], row["sequences"], row["regime"]), ("train-step", 2, 1, "R0"))
            self.assertEqual(row["batch_tokens"], 32)
            self.assertEqual(row["checked"], name != "no-experts")
            self.assertGreater(row["ms"], 0)
            self.assertGreater(row["experts_alone_ms"], 0)
            self.assertEqual(len(row["times_faster_than_torch-grouped-mm"]["rounds"]), 2)
        # Weights stand still and tokens are the same: equal losses but for rounding, unless there are no experts.
        self.assertLess(rows["tessera"]["loss_apart"], 1e-3)
        self.assertGreater(rows["no-experts"]["loss_apart"], 1e-4)

    def test_clipping(self):
        """The optimizer's division does what clip_grad_norm_ does, above the limit and below it."""
        for scale in (10.0, 1e-3):
            ours, wanted = (torch.nn.Parameter(torch.linspace(-1, 1, 60).view(6, 10)) for _ in range(2))
            gradient = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)) * scale
            optimizers = [torch.optim.AdamW([p], lr=0.1, fused=True) for p in (ours, wanted)]
            for _ in range(2):
                ours.grad, wanted.grad = gradient.clone(), gradient.clone()
                norm = training.clipped_step(optimizers[0], [ours])
                torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_([wanted], training.CLIP))
                optimizers[1].step()
            torch.testing.assert_close(ours, wanted)
            moments = [o.state[p]["exp_avg"] for o, p in zip(optimizers, (ours, wanted), strict=True)]
            torch.testing.assert_close(*moments)
            self.assertGreater(moments[0].abs().max().item(), 1e-5)

    def test_collapsed_routing_is_not_timed(self):
        a = argparse.Namespace(warm_up=20, most_loaded=4.0)
        measure.refuse_collapsed(4.0, a)
        with self.assertRaisesRegex(training.Stop, "has 16.0 times the mean after --warm-up 20, --most-loaded 4"):
            measure.refuse_collapsed(16.0, a)

    def test_a_step_has_its_own_batch_or_that_of_the_warm_up(self):
        seen = []
        corpus = text.Corpus(torch.arange(5000).numpy(), torch.arange(100).numpy(), "", 5000)
        trainer = argparse.Namespace(here=training.Ranks(0, 1, torch.device("cpu")), c=TINY,
                                     step=lambda tokens, targets, rate: seen.append((tuple(tokens.shape), rate)))
        timer = measure.Timer(argparse.Namespace(seed=0), trainer, corpus, {"hf-eager": 3})
        timer.step("hf-eager", 1)
        timer.step("hf-eager", 1, 0.5, 2)
        self.assertEqual(seen, [((3, TINY.context), 0.0), ((2, TINY.context), 0.5)])

    def test_who_is_out_of_memory(self):
        def step(*_):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

        here = training.Ranks(0, 1, torch.device("cpu"))
        corpus = text.Corpus(torch.arange(100).numpy(), torch.arange(100).numpy(), "", 100)
        timer = measure.Timer(argparse.Namespace(seed=0), argparse.Namespace(here=here, c=TINY, step=step), corpus,
                              {"hf-eager": 3})
        with self.assertRaises(torch.OutOfMemoryError) as raised:
            timer.step("hf-eager", 1)
        printed = io.StringIO()

        def again():
            raise raised.exception

        with contextlib.redirect_stderr(printed), mock.patch.object(os, "_exit") as ended:
            training.end(again)
        ended.assert_called_once_with(1)
        self.assertRegex(printed.getvalue(), r"out of memory: hf-eager with 3 sequences: CUDA out of memory; fewer")

    def test_bad_input_ends_in_one_line(self):
        self.refuse((["--config", "tine"], "config 'tine': unknown"), (["--steps", "0"], "--steps 0"),
                    (["--layers", "0"], "layers=0"), (["--experts", "tesera"], "experts 'tesera': unknown"))

    @tier.deep  # a process for each
    def test_bad_input_that_a_group_refuses(self):
        self.refuse((["--text", "/nowhere"], "no such file"), (["--text-vocabulary", "1000"], "has 512 token ids"),
                    (["--resume"], "--resume: no checkpoint"))

    def refuse(self, *cases):
        for flags, word in cases:
            with self.subTest(word), tempfile.TemporaryDirectory() as folder:
                command = [str(PROGRAMS / "train.py"), "--config", "tiny", "--text", str(ROOT / "docs"),
                           "--cache", folder, "--out", f"{folder}/run", "--text-bytes", "100000", *flags]
                if flags[0] in ("--text", "--experts", "--text-vocabulary", "--resume"):  # refused by a group
                    result = subprocess.run(programs.command(*command), capture_output=True, text=True, check=False,
                                            timeout=300)
                    self.assertEqual(result.returncode, 2, result.stderr)
                    said = result.stderr
                else:  # without a process for each, which takes seconds
                    with mock.patch.object(sys, "argv", command), self.assertRaises(training.Stop) as stopped:
                        train.main()
                    said = str(stopped.exception)
                    self.assertFalse(distributed.is_initialized())
                self.assertIn(word, said)
                self.assertEqual(len(said.strip().splitlines()), 1, said)


class Runs(unittest.TestCase):
    def test_trial_of_a_batch_may_have_collapsed_routing(self):
        sys.argv = ["measure.py", *largest.flags("tessera", 3, ["--text", "docs"], pathlib.Path("rows.json"))]
        a = measure.arguments()
        self.assertEqual((a.sequences, a.regime, a.text), ("3", "R1", [pathlib.Path("docs")]))
        measure.refuse_collapsed(16.0, a)

    def test_a_batch_fits_where_the_allocator_does_not_ask_again(self):
        for retries in (0, 3):
            def measured(command, retries=retries, **_):
                pathlib.Path(command[-1]).write_text(json.dumps({"rows": [{"allocator_retries": retries}]}))
                return subprocess.CompletedProcess(command, 0, "", "")

            with tempfile.TemporaryDirectory() as folder, mock.patch.object(subprocess, "run", measured):
                self.assertEqual(largest.trial(2, "tessera", 3, [], pathlib.Path(folder)),
                                 {"fits": retries == 0, "row": {"allocator_retries": retries}})

    def test_search_for_the_largest_batch(self):
        for limit, first in ((5, 1), (5, 5), (5, 9), (1, 1), (0, 3)):
            tried = {}
            while (n := largest.next_trial(tried, first)) is not None:
                self.assertNotIn(str(n), tried)
                tried[str(n)] = {"fits": n <= limit}
            self.assertEqual(max((int(n) for n, result in tried.items() if result["fits"]), default=0), limit)

    def test_learning_rate(self):
        rates = [training.learning_rate(step, 100, 1e-3, 10) for step in range(1, 101)]
        self.assertAlmostEqual(rates[0], 1e-4)
        self.assertAlmostEqual(rates[9], 1e-3)
        self.assertAlmostEqual(rates[-1], 1e-4)
        self.assertEqual(max(rates), rates[9])


def has_program() -> bool:
    try:
        return bool(predict.program())
    except FileNotFoundError:
        return False


@unittest.skipUnless(has_program(), "the program tessera is not built: target tessera_cli")
class Predictions(unittest.TestCase):
    def test_files_are_what_the_program_says(self):
        """The one of before the runs to the last digit, though its formulas were this program's own then."""
        for name, rates in (("predictions.json", "before-runs"), ("predictions-2026-11-27.json", "first-run"),
                            ("predictions-2026-11-27-balanced.json", "balanced-run")):
            document = json.loads((PROGRAMS / name).read_text())
            self.assertEqual(document["points"], json.loads(json.dumps(list(predict.validation(rates)))), name)
            self.assertEqual(document.get("rates", "before-runs"), rates)

    def test_sizes_are_the_models(self):
        for name in predict.CONFIGURATIONS:
            c = models.CONFIGURATIONS[name]
            sizes = [f"--{key}={value}" for key, value in (
                ("hidden", c.hidden), ("intermediate", c.intermediate), ("experts", c.experts), ("top-k", c.top_k),
                ("layers", c.layers), ("heads", c.heads), ("kv-heads", c.kv_heads), ("head-size", c.head_size),
                ("vocabulary", c.vocabulary), ("cluster", "8x8"))] + ["--tied"] * c.tied
            done = subprocess.run([predict.program(), "plan", "--json", *sizes], capture_output=True, text=True)
            model = json.loads(done.stdout)["model"]
            self.assertEqual((model["layer_parameters"], model["parameters"]), (c.layer_parameters(), c.parameters()))

    def test_what_the_program_refuses_is_printed(self):
        with self.assertRaisesRegex(ValueError, "--cluster '0x2'"):
            predict.Point("7B-n256", 12, 0, 2, 4, False, "tessera", "h200").predict()
        with mock.patch.dict(os.environ, {"TESSERA_PROGRAM": "", "PATH": ""}), \
                mock.patch.object(predict, "BUILT", pathlib.Path("/no/such/program")), \
                self.assertRaisesRegex(FileNotFoundError, "TESSERA_PROGRAM"):
            predict.program()

    def test_results_are_held_against_it(self):
        point = predict.Point("7B-n256", 12, 1, 2, 4, False, "tessera", "h200").predict()
        row = {"config": "7B-n256", "layers": 12, "gpus": 2, "sequences": 4, "recompute": False, "impl": "tessera",
               "regime": "R0", "ms": 1.2 * point["ms"]}
        others = [{**row, "impl": "no-experts"}, {**row, "config": "small"}, {**row, "impl": "sonicmoe-layer"}]
        (name, ratio), (without, more) = predict.against({"device": "NVIDIA H200", "rows": [row, *others]})
        self.assertIn("no-experts", without)
        self.assertGreater(more, ratio)  # it is predicted to take less
        self.assertAlmostEqual(ratio, 1.2)
        self.assertIn("12 layers, 2 GPUs, 4 sequences, R0, tessera", name)
        ((_, slower),) = predict.against({"device": "NVIDIA H100 80GB HBM3", "rows": [row]})
        self.assertLess(slower, ratio)
        with self.assertRaisesRegex(ValueError, "device cpu: has no constants"):
            predict.against({"device": "cpu", "rows": [row]})

    def test_rows_of_layers_that_stay_gathered_are_listed_apart(self):
        row = {"config": "7B-n256", "layers": 12, "gpus": 4, "sequences": 1, "recompute": False, "impl": "tessera",
               "regime": "R0", "ms": 100.0}
        rows = [row, {**row, "keep_gathered": True}]
        again, once = (ratio for _, ratio in predict.against({"device": "NVIDIA H200", "rows": rows}))
        self.assertGreater(once, again)  # predicted to be faster

    def test_more_takes_longer(self):
        point = predict.Point("7B-n256", 12, 1, 2, 4, False, "tessera", "h200")
        ms = point.predict()["ms"]
        for change in ({"layers": 13}, {"sequences": 5}, {"recompute": True}, {"experts": "torch-grouped-mm"}):
            self.assertGreater(dataclasses.replace(point, **change).predict()["ms"], ms)
        slower = dataclasses.replace(point, recompute=True).predict()
        self.assertLess(slower["peak_bytes"], point.predict()["peak_bytes"])
        # Eight hosts send what one does not; gradients reduced between them take a link of their own.
        self.assertGreater(dataclasses.replace(point, hosts=8).predict()["terms_ms"]["reduction of a layer"],
                           point.predict()["terms_ms"]["reduction of a layer"])


if __name__ == "__main__":
    unittest.main()
