# SPDX-License-Identifier: Apache-2.0
"""An error names the tensor that the caller would change, as the caller spells it, with the value and a remedy: every
tensor argument of every call with a wrong type, size, rank, device, and with strides that the library does not read."""

import unittest

import tessera
import torch

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 10, 8, 6, 4, 2


def arguments(dtype: torch.dtype) -> dict:
    """By call: its function, tensors and other options."""
    def made(*shape: int, dtype=dtype):
        return torch.randn(shape).to(dtype)

    torch.manual_seed(1)
    e, d, n = EXPERTS, HIDDEN, INTERMEDIATE
    x, w_router = made(TOKENS, d), made(e, d)
    experts = {"w_up": made(e, 2 * n, d), "w_down": made(e, d, n), "b_up": made(e, 2 * n), "b_down": made(e, d)}
    separate = {"w_up": made(e, n, d), "w_gate": made(e, n, d), "w_down": made(e, d, n), "b_up": made(e, n),
                "b_gate": made(e, n), "b_down": made(e, d)}
    router = {"w_router": w_router, "b_router": made(e), "selection_bias": made(e, dtype=torch.float32)}
    ids = {"topk_ids": torch.randint(e, (TOKENS, TOP_K)), "topk_weights": made(TOKENS, TOP_K, dtype=torch.float32)}
    rows = {"row_scores": made(TOKENS, dtype=torch.float32)}
    groups = {"offsets": [0, 3, 3, 7, 9], "ends": [3, 3, 7, 9], "counts": [3, 0, 4, 2]}
    losses = {"logits": made(TOKENS, e, dtype=torch.float32), "counts": torch.tensor([3, 0, 4, 3])}
    calls = {
        "moe": (tessera.moe, {"x": x, **router, **experts}, {"top_k": TOP_K}),
        "moe, separate": (tessera.moe, {"x": x, **router, **separate}, {"top_k": TOP_K, "router": "sigmoid-bias"}),
        "route": (tessera.route, {"x": x, **router}, {"top_k": TOP_K}),
        "routed_experts": (tessera.routed_experts, {"x": x, **ids, **experts}, {}),
        "routed_experts, separate": (tessera.routed_experts, {"x": x, **ids, **separate}, {}),
        "grouped_gemm": (tessera.grouped_gemm, {"a": made(TOKENS, d), "b": made(e, 3, d), "bias": made(e, 3),
                                                "expert_offsets": torch.tensor(groups["offsets"])}, {}),
        "grouped_gemm_wgrad": (tessera.grouped_gemm_wgrad, {"a": made(TOKENS, d), "b": made(TOKENS, 3),
                                                            "expert_offsets": torch.tensor(groups["offsets"])}, {}),
        "load_balancing_loss": (tessera.load_balancing_loss, losses, {}),
        "z_loss": (tessera.z_loss, {"logits": losses["logits"]}, {}),
        "selection_bias_update": (tessera.selection_bias_update, {"selection_bias": torch.zeros(e),
                                                                  "counts": losses["counts"]}, {}),
    }
    for grouping, values in groups.items():
        calls[f"grouped_experts, {grouping}"] = (
            tessera.grouped_experts, {"x": x, "expert_offsets": torch.tensor(values), **rows, **experts},
            {"grouping": grouping})
    return calls


def spelled(call: str, name: str) -> tuple[str, ...]:
    """What a message may call the argument."""
    if name == "expert_offsets" and call.startswith("grouped_experts, "):
        grouping = call.removeprefix("grouped_experts, ")
        return ("expert_offsets",) if grouping == "offsets" else (grouping,)
    return (name,)


def wrong(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same tensor, wrong in one thing."""
    made = {"device": tensor.to("meta"), "rank": tensor[None, None, None],
            "float64": tensor.double(), "float16": tensor.half(), "bool": tensor > 0}
    made["bfloat16" if tensor.dtype is torch.float32 else "float32"] = tensor.to(
        torch.bfloat16 if tensor.dtype is torch.float32 else torch.float32)
    if tensor.dim() == 2 or tensor.dtype.is_floating_point:
        made["int32"] = tensor.int()
    for axis in range(tensor.dim()):
        sizes = list(tensor.shape)
        sizes[axis] += 2
        made[f"size {axis}"] = torch.zeros(sizes, dtype=tensor.dtype)
    return made


# One tensor fixes the size by which others are judged: which of two is wrong, only the caller knows.
PARTNERS = {"x": ("w_router", "w_up", "topk_ids", "row_scores", "expert_offsets", "ends", "counts", "w_down"),
            "w_up": ("x", "w_router", "w_down", "b_up", "w_gate", "expert_offsets", "ends", "counts", "b_router"),
            "w_gate": ("w_up",), "w_down": ("w_up",), "topk_ids": ("topk_weights", "x"), "topk_weights": ("topk_ids",),
            "a": ("b", "expert_offsets"), "b": ("a", "bias", "expert_offsets"), "w_router": ("x", "w_up", "b_router"),
            "expert_offsets": ("b", "bias"), "logits": ("topk_counts", "counts"),
            "counts": ("logits", "selection_bias"),
            "selection_bias": ("counts", "topk_counts", "w_router"), "topk_counts": ()}


class Errors(unittest.TestCase):
    def test_name_the_tensor(self):
        walked = refused = 0
        for dtype in (torch.float32, torch.bfloat16):
            for call, (function, tensors, options) in arguments(dtype).items():
                function(**tensors, **options)
                for name, tensor in tensors.items():
                    for what, bad in wrong(tensor).items():
                        walked += 1
                        with self.subTest(call, dtype=dtype, name=name, what=what):
                            try:
                                function(**{**tensors, name: bad}, **options)
                            except (ValueError, NotImplementedError) as error:
                                refused += 1
                                self.check(call, name, what, str(error))
                            else:
                                self.assertIn(what, self.taken(call, name), "accepted")
        print(f"{walked} wrong tensors, {refused} refused")
        self.assertGreater(refused, 1000)

    def check(self, call: str, name: str, what: str, text: str):
        names = spelled(call, name)
        if what.startswith("size") or (call, name, what) == ("route", "x", "float32"):
            names += PARTNERS.get(name, ())
        # Of two, only the caller knows which one is wrong.
        both = ("both have the same" in text or "is on" in text) and any(
            f"{n}: " in text or f"{n} on" in text for n in names)
        self.assertTrue(both or any(text.startswith(n) for n in names), text)
        self.assertNotIn("\n", text)
        self.assertRegex(text, r"(is|are) needed|convert|move|make it|reshape|both have|have the same|with layout")

    def test_other_strides_are_read(self):
        for call, (function, tensors, options) in arguments(torch.float32).items():
            if call == "selection_bias_update":
                continue  # written in place
            plain = torch.utils._pytree.tree_leaves(function(**tensors, **options))
            for name, tensor in tensors.items():
                turned = tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor.repeat_interleave(3)[::3]
                for strided in (torch.stack((tensor, tensor), -1)[..., 0], turned):
                    with self.subTest(call, name=name):
                        again = torch.utils._pytree.tree_leaves(function(**{**tensors, name: strided}, **options))
                        self.assertTrue(all(map(torch.equal, plain, again)))

    @staticmethod
    def taken(call: str, name: str) -> tuple[str, ...]:
        """What is not wrong. Scores, counts and logits of other types are converted; x may have any rank and, where
        nothing else has its rows, any number of them."""
        types = ("float64", "float16", "bool", "bfloat16", "float32", "int32")
        if name in ("topk_weights", "row_scores", "counts") or name == "logits":
            rows = ("rank", "size 0") if name == "logits" else ()
            return types + rows + (("device", "size 1") if call == "z_loss" else ())
        if name == "x":
            return ("rank",) + ("size 0",) * (not call.startswith("routed")) + ("bfloat16",) * (call == "route")
        offsets = ("int32",) + ("size 0",) * (call == "grouped_gemm_wgrad")
        return {"topk_ids": ("int32", "rank"), "expert_offsets": offsets, "a": ("size 0", "size 1"),
                "b": ("size 1", "size 2")}.get(name, ())


if __name__ == "__main__":
    unittest.main()
