# SPDX-License-Identifier: Apache-2.0
"""bench/end_to_end: what reaches a peer whose kernels need a GPU. A stand-in takes its place that computes the same by
torch and refuses what the package's source refuses or would misread: layouts, types, order of the tokens."""

import argparse
import pathlib
import sys
import types
import unittest
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench" / "end_to_end"))

import experts  # noqa: E402
import model as models  # noqa: E402
import text  # noqa: E402
import training  # noqa: E402

SIZES = (64, 32, 8, 2, 200, "cpu", torch.float32)


def sonic_experts(x, scores, token_ids, expert_ids, w1, w2):
    """sonicmoe.functional's experts with concat_layout: w1 [2n,d,E], w2 [d,n,E], one row for each (token, expert)."""
    for name, w in (("w1", w1), ("w2", w2)):
        assert not isinstance(w, DTensor), name
        assert w.stride() == (w.shape[1], 1, w.shape[0] * w.shape[1]), f"{name}: stride order must be (2, 0, 1)"
    assert token_ids.dtype == expert_ids.dtype == torch.int32 and scores.dtype == torch.float32
    assert torch.equal(token_ids, token_ids.sort().values), "token ids must ascend"
    assert len(token_ids) == len(expert_ids) == len(scores)
    o = torch.zeros_like(x)
    for e, (w_up, w_down) in enumerate(zip(w1.unbind(-1), w2.unbind(-1), strict=True)):
        rows = torch.where(expert_ids == e)[0]
        token = token_ids[rows].long()
        gate, up = (x[token] @ w_up.mT).chunk(2, dim=-1)
        y = (functional.silu(gate) * up) @ w_down.mT
        o = o.index_add(0, token, scores[rows, None].to(x.dtype) * y)
    return o


def general_routing(x, router_scores, token_indices, expert_indices, w1, b1, w2, b2, E, stream_id, activation_type,
                    is_inference_mode_enabled=False, concat_layout=False):
    assert (b1, b2, E, stream_id, activation_type) == (None, None, w2.shape[-1], 7, "swiglu") and concat_layout
    assert not is_inference_mode_enabled, "it would save nothing for backward"
    counts = torch.bincount(expert_indices, minlength=E).int()
    return sonic_experts(x, router_scores, token_indices, expert_indices, w1, w2), counts


def softmax_topk_layer(x, router_w, w1, b1, w2, b2, K, stream_id, activation_type=None, is_inference_mode_enabled=False,
                       is_softmax_over_topk=True, norm_topk_probs=False, concat_layout=False):
    assert (b1, b2, stream_id, activation_type) == (None, None, 7, "swiglu") and concat_layout
    assert not is_inference_mode_enabled and is_softmax_over_topk and not norm_topk_probs
    logits = functional.linear(x, router_w).bfloat16()  # as it is with bf16 weights
    values, ids = logits.float().topk(K, dim=-1)
    token_ids = torch.arange(x.shape[0], dtype=torch.int32).repeat_interleave(K)
    o = sonic_experts(x, values.softmax(-1).flatten(), token_ids, ids.flatten().int(), w1, w2)
    return o, logits, torch.bincount(ids.flatten(), minlength=w2.shape[-1]).int()


def sonic_modules() -> dict:
    """sonicmoe and the part of quack that is touched, by the names of their modules."""
    def configs(epilogue=None):
        return [types.SimpleNamespace(cluster_m=m, cluster_n=n, swap_ab=swap)
                for m, n in ((1, 2), (2, 1)) for swap in (False, True)]

    parts = {"sonicmoe": types.ModuleType("sonicmoe"), "quack": types.ModuleType("quack")}
    for name, contents in (
            ("sonicmoe.functional", {"moe_general_routing_inputs": general_routing,
                                     "moe_TC_softmax_topk_layer": softmax_topk_layer}),
            ("sonicmoe.enums", {"ActivationType": types.SimpleNamespace(SWIGLU="swiglu")}),
            ("quack.gemm_config", {"_get_sm90_configs": configs, "_get_sm100_configs": configs,
                                   "_get_sm120_configs": configs})):
        parts[name] = types.ModuleType(name)
        parts[name].__dict__.update(contents)
        package, _, part = name.partition(".")
        setattr(parts[package], part, parts[name])
    return parts


def setUpModule():
    experts.load(experts.BASELINE)  # what it imports stays, when a test's stand-ins go


# The layer's logits, and so their gradient, are bf16.
BOUNDS = {"sonicmoe": 1e-5, "sonicmoe-layer": 5e-3}


class StandIn(unittest.TestCase):
    def setUp(self):
        self.modules = sonic_modules()
        self.enterContext(mock.patch.dict(sys.modules, self.modules))
        self.enterContext(mock.patch.object(experts, "_needs_gpu", lambda: None))
        self.enterContext(mock.patch.object(torch.cuda, "current_stream",
                                            lambda: types.SimpleNamespace(cuda_stream=7)))
        experts.load.cache_clear()
        self.addCleanup(experts.load.cache_clear)

    def test_results_and_gradients(self):
        for name, bound in BOUNDS.items():
            self.assertLess(max(experts.checked(name, *SIZES).values()), bound, name)

    def test_logits_that_are_rounded_do_not_choose_others(self):
        """Of a router that is drawn they would: the check of a layer draws one that rounding leaves as it is."""
        candidate = experts.load("sonicmoe-layer")
        with mock.patch.object(candidate, "rounds_logits", False), self.assertRaisesRegex(ValueError, "sonicmoe-layer"):
            experts.checked("sonicmoe-layer", 64, 32, 128, 8, 400, "cpu", torch.float32)
        found = experts.checked("sonicmoe-layer", 256, 32, 128, 8, 400, "cpu", torch.float32)
        self.assertLess(max(found.values()), BOUNDS["sonicmoe-layer"])

    def test_only_clusters_that_compile_in_time(self):
        for _ in range(2):  # a second load restricts the space, not what is left of it
            for name in BOUNDS:
                experts.load(name)
            space = self.modules["quack.gemm_config"]
            self.assertEqual([(c.cluster_m, c.cluster_n, c.swap_ab) for c in space._get_sm90_configs("gated")],
                             [(2, 1, False)])
            self.assertEqual(space._get_sm100_configs(), [])
            experts.load.cache_clear()
        for name in BOUNDS:
            self.assertEqual(experts.variant(name), "clusters of (2, 1) only")

    def test_steps_under_fsdp(self):
        """Blocks gathered and resharded around it, recomputed too: losses of three steps are those of the baseline."""
        c = models.CONFIGURATIONS["tiny"]
        ids = torch.randint(0, c.vocabulary, (3000,), generator=torch.Generator().manual_seed(0)).numpy()
        data = text.Corpus(ids, ids, "", c.vocabulary)
        found = {}
        with training.ranks() as here:
            for name, recompute in ((experts.BASELINE, False), ("sonicmoe", False), ("sonicmoe", True),
                                    ("sonicmoe-layer", False)):
                a = argparse.Namespace(attention=None, deterministic=False, eager=True, recompute=recompute, seed=0,
                                       keep_gathered=False)
                trainer = training.Trainer(c, here, training.load(name), a)
                steps = [trainer.step(*data.batch(0, 0, 2, c.context, 0, 1, here.device), 1e-2) for _ in range(3)]
                found[name, recompute] = [loss.item() for loss, _, _ in steps]
                rows = 2 * c.layers * c.context * c.top_k
                self.assertEqual([int(counts.sum()) for _, _, counts in steps], [rows] * 3)
        wanted = found.pop((experts.BASELINE, False))
        self.assertGreater(wanted[0] - wanted[2], 0.01)
        for key, losses in found.items():
            for loss, right in zip(losses, wanted, strict=True):
                self.assertAlmostEqual(loss, right, delta=2e-3 if key[0] == "sonicmoe-layer" else 1e-5, msg=key)


class Saved(unittest.TestCase):
    def test_compiled_parts_keep_no_fp32_copy_of_x(self):
        """Between forward and backward the model's router holds x as it came, compiled or not, so that no library pays
        for a copy that a layer with its own router does not make."""
        x, w = torch.randn(64, 96).bfloat16().requires_grad_(), torch.randn(16, 96).bfloat16().requires_grad_()
        options = {"backend": "aot_eager_decomp_partition", "dynamic": False, "fullgraph": True}
        with mock.patch.object(torch, "compile", lambda function, **_: compile_(function, **options)):
            dense = models.Dense(compiled=True)
        for choose in (models.choose, dense.choose):
            kept = []

            def keep(t, kept=kept):
                kept.append(t)
                return t

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                ids, weights, logits, counts = models.route(x, w, 4, choose)
            self.assertIn(x.shape, [t.shape for t in kept])
            for t in kept:
                if t.shape == x.shape:
                    self.assertEqual(t.dtype, torch.bfloat16)
                    self.assertEqual(t.data_ptr(), x.data_ptr())
            self.assertLess(sum(t.numel() * t.element_size() for t in kept if t is not x), 64 * 96 * 2)
            self.assertEqual(int(counts.sum()), 64 * 4)


compile_ = torch.compile

if __name__ == "__main__":
    unittest.main()
