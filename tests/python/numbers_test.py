# SPDX-License-Identifier: Apache-2.0
"""Numbers that would lose something on their way into the library are refused, by name and value."""

import unittest

import tessera
import tessera.losses
import torch

NAN, INF = float("nan"), float("inf")

# (option, value, what the error says); the other options are those for which it matters.
OPTIONS = [
    ("top_k", 2.7, {}, "top_k=2.7: must be of type int"),
    ("top_k", 2**64 + 2, {}, r"top_k=18446744073709551618: must be in \[-2\^63, 2\^63\)"),
    ("top_k", 0, {}, "top_k=0"),
    ("top_k", -1, {}, "top_k=-1"),
    ("top_k", NAN, {}, "NaN|nan"),
    ("tile", 2**32 + 8, {"rounding": "up"}, r"tile=4294967304: must be in \[-2\^31, 2\^31\)"),
    ("tile", 8.5, {"rounding": "up"}, "tile=8.5: must be of type int"),
    ("seed", -1, {"rounding": "sr-f"}, r"seed=-1: must be in \[0, 2\^64\)"),
    ("seed", 2**64, {"rounding": "sr-f"}, r"seed=18446744073709551616: must be in \[0, 2\^64\)"),
    ("layer", 2**32, {"rounding": "sr-f"}, r"layer=4294967296: must be in \[0, 2\^32\)"),
    ("layer", -1, {"rounding": "sr-f"}, r"layer=-1: must be in \[0, 2\^32\)"),
    ("step", -1, {"rounding": "sr-f"}, "step=-1: must be in"),
    ("groups", 2**32 + 2, {"router": "group-limited"}, r"groups=4294967298: must be in \[-2\^31, 2\^31\)"),
    ("top_groups", -2**32 + 1, {"router": "group-limited"}, "top_groups=-4294967295: must be in"),
    ("capacity", 2**64 + 3, {"router": "expert-choice"}, r"capacity=18446744073709551619: must be in"),
    ("capacity", -2, {"router": "expert-choice"}, "capacity=-2"),
    ("column_chunk", 2**64, {}, "column_chunk=18446744073709551616: must be in"),
    ("column_chunk", -8, {}, "column_chunk=-8"),
    ("normalize_scores", 2, {"router": "sigmoid-bias"}, "normalize_scores=2: must be of type bool"),
    ("normalize_scores", "no", {"router": "sigmoid-bias"}, "normalize_scores=no: must be of type bool"),
    ("route_scale", NAN, {"router": "sigmoid-bias"}, "route_scale=nan: must be finite"),
    ("route_scale", INF, {"router": "sigmoid-bias"}, "route_scale=inf: must be finite"),
    ("route_scale", 1e-60, {"router": "sigmoid-bias"}, "route_scale=1e-60: beyond fp32, where it would be 0"),
    ("route_scale", 1e39, {"router": "sigmoid-bias"}, r"route_scale=1e\+39: beyond fp32, where it would be inf"),
    ("alpha", NAN, {"activation": "clamped-swiglu"}, "alpha=nan"),
    ("alpha", 1e-60, {"activation": "clamped-swiglu"}, "alpha=1e-60: beyond fp32"),
    ("limit", NAN, {"activation": "clamped-swiglu"}, "limit=nan"),
    ("limit", -1.0, {"activation": "clamped-swiglu"}, "limit=-1"),
    ("limit", 1e-60, {"activation": "clamped-swiglu"}, "limit=1e-60: beyond fp32"),
    ("up_offset", INF, {"activation": "clamped-swiglu"}, "up_offset=inf"),
]


class Numbers(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)
        self.x, self.router = torch.randn(12, 16), torch.randn(4, 16)
        self.weights = {"w_up": torch.randn(4, 16, 16), "w_down": torch.randn(4, 16, 8)}

    def test_options(self):
        for name, value, others, text in OPTIONS:
            with self.subTest(name=name, value=value):
                options = {"top_k": 2, **others, name: value}
                with self.assertRaisesRegex(ValueError, text):
                    tessera.moe(self.x, self.router, **self.weights, **options)
        tessera.moe(self.x, self.router, **self.weights, top_k=True, rounding="sr-f", seed=2**64 - 1, layer=2**32 - 1,
                    step=2**62)

    def test_coefficients(self):
        logits, counts, bias = torch.randn(6, 4), torch.ones(4), torch.zeros(4)
        for coefficient in ("balance", "z"):
            for value, text in ((NAN, "must be finite"), (INF, "must be finite"), (1e39, "beyond fp32"),
                                (1e-60, "beyond fp32")):
                with self.assertRaisesRegex(ValueError, f"{coefficient}=.*{text}"):
                    tessera.losses.router_losses(logits, counts, **{coefficient: value})
        for rate, text in ((NAN, "must be finite"), (-INF, "must be finite"), (1e39, "beyond fp32")):
            with self.assertRaisesRegex(ValueError, f"rate=.*{text}"):
                tessera.selection_bias_update(bias, counts, rate=rate)
        self.assertEqual(int(bias.count_nonzero()), 0)

    def test_types_of_ids_and_offsets(self):
        ids, scores = torch.zeros(12, 2, dtype=torch.int64), torch.ones(12, 2)
        for dtype in (torch.float32, torch.float64, torch.bool, torch.uint8, torch.int16, torch.int8):
            with self.assertRaisesRegex(ValueError, f"topk_ids: dtype {dtype}; int32 or int64 is needed"):
                tessera.routed_experts(self.x, ids.to(dtype), scores, **self.weights)
            offsets = torch.tensor([0, 3, 6, 9, 12]).to(dtype)
            with self.assertRaisesRegex(ValueError, "dtype.*int32 or int64|counts.*int|offsets"):
                tessera.grouped_experts(self.x, offsets, **self.weights)
            with self.assertRaises(ValueError):
                tessera.grouped_gemm(self.x, self.weights["w_up"], offsets)
        for far in (2**33, -2**33, 2**62):  # sentinels, as all ids outside [0,E)
            o = tessera.routed_experts(self.x, ids + far, scores, **self.weights)
            self.assertEqual(int(o.count_nonzero()), 0)


if __name__ == "__main__":
    unittest.main()
