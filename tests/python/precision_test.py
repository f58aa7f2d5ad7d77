# SPDX-License-Identifier: Apache-2.0
"""Layers that quantise their operands: the recipe, put together from torch's own casts, in fp64; what is saved; and the
entries, which all give its bits."""

import copy
import unittest

import tessera
import tessera.ops
import torch
from tessera.ops.layer import GRADIENTS
from torch.nn import functional

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 96, 256, 128, 6, 2
SCHEMES = ({"precision": "fp8"}, {"precision": "fp8", "scales": "pow2"}, {"precision": "mxfp8"})


def sqnr(ref, out) -> float:
    """20 log10(|ref| / |ref - out|), dB."""
    return 20 * torch.log10(ref.double().norm() / (ref.double() - out.double()).norm()).item()


def quantised(values, scheme: dict, rows: int = 1):
    """Dequantised codes of blocks of `rows` x 128 (mxfp8: 1 x 32, whatever `rows` is) of a matrix."""
    mx = scheme["precision"] == "mxfp8"
    size = (1, 32) if mx else (rows, 128)
    blocks = values.float().unflatten(-1, (-1, size[1])).unflatten(-3, (-1, size[0]))  # [R, rows, C, columns]
    amax = blocks.abs().amax((-3, -1), keepdim=True)
    if mx or scheme.get("scales") == "pow2":
        mantissa, exponent = torch.frexp(amax)  # amax = mantissa * 2^exponent, mantissa in [0.5, 1)
        scale = torch.ldexp(torch.ones(()), exponent - 9 + (mantissa > 0.875).int())
    else:
        scale = (amax * torch.tensor(1 / 448)).clamp(min=2.0**-126)
    codes = (blocks * (1 / scale)).to(torch.float8_e4m3fn).float()
    return (codes * scale).flatten(-4, -3).flatten(-2).double()


def recipe(x, ids, scores, w_up, w_down, d_o, scheme: dict) -> dict:
    """docs/numerics.md#a-layer-that-quantises: sums in fp64, what is stored rounded to bf16; swiglu, given routing."""
    def rnd(values):
        return values.float().bfloat16().double()

    def weight(w, along_rows: bool):
        if scheme["precision"] != "mxfp8" or along_rows:
            return quantised(w, scheme, 128)
        return quantised(w.mT, scheme).mT

    def act(h):
        gate, up = h.chunk(2, -1)
        return functional.silu(gate) * up

    x8, dO8 = quantised(x, scheme), quantised(d_o, scheme)
    out = {"o": torch.zeros_like(x8), "dx": torch.zeros_like(x8), "dscores": torch.zeros(ids.shape).double(),
           "dw_up": torch.zeros(w_up.shape).double(), "dw_down": torch.zeros(w_down.shape).double()}
    for e in range(EXPERTS):
        token, slot = torch.nonzero(ids == e, as_tuple=True)
        s = scores[token, slot].double().unsqueeze(-1)
        hb = rnd(x8[token] @ weight(w_up[e], True).mT)
        y = rnd(quantised(act(hb), scheme) @ weight(w_down[e], True).mT)
        out["o"].index_add_(0, token, s * y)
        with torch.enable_grad():
            h = quantised(hb, scheme).requires_grad_()
            a = act(h)
        da = dO8[token] @ weight(w_down[e], False)
        out["dscores"][token, slot] = (da * a.detach()).sum(-1)
        dh = rnd(torch.autograd.grad(a, h, s * da)[0])
        out["dw_down"][e] = d_o[token].double().mT @ rnd(s * a.detach())
        out["dw_up"][e] = dh.mT @ rnd(x8[token])
        out["dx"].index_add_(0, token, rnd(quantised(dh, scheme) @ weight(w_up[e], False)))
    return out


class Precision(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(3)
        d, n = HIDDEN, INTERMEDIATE
        self.x = torch.randn(TOKENS, d).bfloat16()
        self.x[:, :40] *= 2.0 ** torch.randint(-3, 4, (TOKENS, 1))  # neighbours have other scales
        self.ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
        self.scores = torch.rand(TOKENS, TOP_K)
        self.w_up = (torch.randn(EXPERTS, 2 * n, d) / d**0.5).bfloat16()
        self.w_down = (torch.randn(EXPERTS, d, n) / n**0.5).bfloat16()
        self.w_router = (torch.randn(EXPERTS, d) / d**0.5).bfloat16()
        self.d_o = torch.randn(TOKENS, d).bfloat16()

    def leaves(self, *tensors):
        return [t.detach().clone().requires_grad_() for t in tensors or (self.x, self.scores, self.w_up, self.w_down)]

    def routed(self, **options):
        x, scores, w_up, w_down = leaves = self.leaves()
        o = tessera.routed_experts(x, self.ids, scores, w_up, w_down, **options)
        return [o, *torch.autograd.grad(o, leaves, self.d_o)]

    def routed_by_layer(self, **options):
        leaves = self.leaves(self.x, self.w_router, self.w_up, self.w_down)
        o = tessera.moe(leaves[0], *leaves[1:], top_k=TOP_K, **options)
        return [o, *torch.autograd.grad(o, leaves, self.d_o)]

    def assert_same(self, one, other):
        for a, b in zip(one, other, strict=True):
            self.assertTrue(torch.equal(a, b))

    def test_results_are_those_of_the_recipe(self):
        """A code that falls to the other side of a rounding costs little of the 23 dB that the recipe has."""
        exact = self.routed()
        for scheme in SCHEMES:
            with self.subTest(**scheme):
                names = ("o", "dx", "dscores", "dw_up", "dw_down")
                ref = recipe(self.x, self.ids, self.scores, self.w_up, self.w_down, self.d_o, scheme)
                for name, out, plain in zip(names, self.routed(**scheme), exact, strict=True):
                    self.assertGreater(sqnr(ref[name], out), 36, name)
                    self.assertLess(sqnr(plain, out), 28, f"{name} is that of bf16")
                    self.assertGreater(sqnr(plain, out), 20, name)

    def test_what_is_saved_has_half_the_bytes(self):
        def saved(call) -> dict:
            seen = {}

            def keep(tensor):
                seen[tensor.data_ptr()] = tensor
                return tensor
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                o = call()
            for weight in (self.w_up, self.w_down):
                seen = {k: t for k, t in seen.items() if t.shape != weight.shape}
            del o
            return seen

        def bytes_of(tensors: dict, kind=None) -> int:
            return sum(t.nbytes for t in tensors.values() if kind is None or t.dtype in kind)

        x, scores, w_up, w_down = self.leaves()
        plain = saved(lambda: tessera.routed_experts(x, self.ids, scores, w_up, w_down))
        tables = bytes_of(plain, (torch.int32,))
        values = TOKENS * HIDDEN + TOKENS * TOP_K * 2 * INTERMEDIATE
        self.assertEqual(bytes_of(plain), 2 * values + tables)
        for scheme in SCHEMES:
            for save, kept in (("h", values), ("x", TOKENS * HIDDEN)):
                with self.subTest(**scheme, save=save):
                    low = saved(lambda scheme=scheme, save=save: tessera.routed_experts(
                        x, self.ids, scores, w_up, w_down, save=save, **scheme))
                    self.assertEqual(bytes_of(low), 33 * kept // 32 + tables)
                    self.assertNotIn(torch.bfloat16, {t.dtype for t in low.values()})
                    self.assertNotIn(x.data_ptr(), low)
        self.assertLess(33 / 64, 0.52)

    def test_entries_have_the_same_bits(self):
        for scheme in SCHEMES:
            with self.subTest(**scheme):
                plain = self.routed_by_layer(**scheme)
                self.assert_same(plain, self.routed_by_layer(**scheme))  # by the call that is remembered
                saved_x = self.routed_by_layer(save="x", **scheme)
                self.assert_same(plain, saved_x)
                layer = tessera.MoE(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, dtype=torch.bfloat16, **scheme)
                with torch.no_grad():
                    for name in ("w_router", "w_up", "w_down"):
                        getattr(layer, name).copy_(getattr(self, name))
                for return_router in (False, True):
                    x = self.x.clone().requires_grad_()
                    o = layer(x, return_router=return_router)
                    o = o[0] if return_router else o
                    got = torch.autograd.grad(o, [x, layer.w_router, layer.w_up, layer.w_down], self.d_o)
                    self.assert_same(plain, [o, *got])
                with torch.no_grad():
                    self.assert_same(plain[:1], [layer(self.x)])
                copied = copy.deepcopy(layer)
                copied.main_grad = True
                copied.w_up.main_grad = torch.ones(copied.w_up.shape)
                copied.w_down.main_grad = torch.zeros(copied.w_down.shape)
                copied(self.x).backward(self.d_o)
                self.assertGreater(sqnr(plain[3], copied.w_up.main_grad - 1), 40)
                self.assertGreater(sqnr(plain[4], copied.w_down.main_grad), 40)

    def test_rows_grouped_by_the_caller(self):
        order = torch.argsort(self.ids.flatten(), stable=True)
        counts = torch.bincount(self.ids.flatten(), minlength=EXPERTS).int()
        rows, scores = self.x[order // TOP_K], self.scores.flatten()[order]
        y = tessera.grouped_experts(rows, counts, self.w_up, self.w_down, row_scores=scores, grouping="counts",
                                    precision="fp8")
        o = torch.zeros(TOKENS, HIDDEN).index_add_(0, order // TOP_K, y.float())
        self.assertGreater(sqnr(self.routed(precision="fp8")[0], o), 40)

    def test_graphs_that_are_kept_and_losses_of_logits(self):
        leaves = self.leaves(self.x, self.w_router, self.w_up, self.w_down)
        o, router = tessera.moe(leaves[0], *leaves[1:], top_k=TOP_K, return_router=True, precision="fp8")
        once = torch.autograd.grad(o, leaves, self.d_o, retain_graph=True)
        self.assert_same(once, torch.autograd.grad(o, leaves, self.d_o, retain_graph=True))
        dlogits = torch.randn(TOKENS, EXPERTS)
        dx, dw = torch.autograd.grad(router.logits, leaves[:2], dlogits)
        x8 = quantised(self.x, {"precision": "fp8"}).float().bfloat16()
        self.assertGreater(sqnr(dlogits.double().mT @ x8.double(), dw), 45)
        self.assertGreater(sqnr(dlogits.double() @ self.w_router.double(), dx), 45)

    def test_operators_and_compilation(self):
        for scheme in SCHEMES:
            text = " ".join(f"{name}={value}" for name, value in scheme.items())
            leaves = self.leaves(self.x, self.w_router, self.w_up, self.w_down)
            x, w_router, w_up, w_down = leaves
            arguments = (x, None, None, w_router, None, None, None, None, w_up, None, w_down, None, None, None,
                         f"router=topk-softmax top_k={TOP_K} {text}")
            # The other checks compare or add up codes, for which torch has no functions.
            checks = {"test_utils": ("test_autograd_registration", "test_faketensor")}
            torch.library.opcheck(torch.ops.tessera.moe_forward.default, arguments, **checks)
            with torch.no_grad():
                _, h, routing, x8, x_scale, h_scale = torch.ops.tessera.moe_forward.default(*arguments)
            saved = [t.detach() for t in (self.d_o, x8)] + [h, routing, w_router.detach(), None, w_up.detach(), None,
                                                            w_down.detach(), None, None, None, None]
            needs = sum(1 << GRADIENTS.index(name) for name in ("dx", "dw_router", "dw_up", "dw_down"))
            torch.library.opcheck(torch.ops.tessera.moe_backward.default,
                                  (*saved, arguments[-1], needs, None, x_scale, h_scale), **checks)

            def call(x, w_router, w_up, w_down, scheme=scheme):
                return tessera.moe(x, w_router, w_up, w_down, top_k=TOP_K, **scheme)

            compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
            o = compiled(*leaves)
            self.assert_same(self.routed_by_layer(**scheme), [o, *torch.autograd.grad(o, leaves, self.d_o)])

    def test_auto_is_native(self):
        self.assert_same(self.routed(), self.routed(precision="auto"))

    def test_refusals_name_the_option(self):
        def refuse(error, text: str, **options):
            with self.assertRaisesRegex(error, text):
                self.routed(**options)

        refuse(ValueError, "precision='fp4': unknown; choose one of native, fp8, mxfp8, auto", precision="fp4")
        refuse(ValueError, "scales='fp16': unknown", precision="fp8", scales="fp16")
        for precision in ("native", "mxfp8", "auto"):
            refuse(ValueError, f"scales=pow2 with precision={precision}: only fp8", precision=precision, scales="pow2")
        refuse(NotImplementedError, "column_chunk=64 with precision=fp8", precision="fp8", column_chunk=64)
        self.x, self.w_up, self.w_down = self.x[:, :240], self.w_up[..., :240], self.w_down[:, :240]
        refuse(ValueError, "hidden=240 with precision=fp8: blocks need a multiple of 128; pad it to 256",
               precision="fp8")
        with self.assertRaisesRegex(ValueError, "intermediate=16 with precision=mxfp8"):
            tessera.MoE(64, 16, EXPERTS, TOP_K, dtype=torch.bfloat16, precision="mxfp8")
        layer = tessera.MoE(128, 128, EXPERTS, TOP_K, precision="fp8")
        with self.assertRaisesRegex(NotImplementedError, "precision=fp8 with dtype=fp32"):
            layer(torch.randn(3, 128))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            self.assertIs(layer(torch.randn(3, 128)).dtype, torch.bfloat16)


if __name__ == "__main__":
    unittest.main()
