# SPDX-License-Identifier: Apache-2.0
"""No option without effect: every pair of a router, rounding, activation, layout or grouping and an option is refused
by the option's name, or changes what the call computes, keeps or needs. And who is warned that routers cannot learn."""

import copy
import pickle
import unittest
import warnings

import tessera
import torch
from tessera.layer_options import OLD_KEYWORDS
from tessera.ops.prepared_calls import here
from tessera.options import ACTIVATIONS, GATED, GROUPINGS, ROUNDINGS, ROUTERS

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 26, 8, 6, 12, 2
LAYOUTS = ("concat", "up-first", "interleaved", "blocked:2", "transposed", "transposed-up-first",
           "transposed-interleaved", "transposed-blocked:2")
ROUTED, ROUNDED = ROUTERS[1:], ROUNDINGS[1:]
# Values that differ from the defaults. Lists: each of them.
EXPERT_OPTIONS = {"alpha": [1.25], "limit": [0.25], "up_offset": [0.0], "layout": list(LAYOUTS),
                  "save": ["x", "none"], "column_chunk": [3], "precision": ["fp8", "mxfp8"], "scales": ["pow2"],
                  "weight_codes": [tessera.WeightCodes(*[torch.zeros(1)] * 4)],
                  "w_gate": ["tensor"], "b_up": ["tensor"], "b_gate": ["tensor"]}
ROUTER_OPTIONS = {"route_scale": [2.5], "normalize_scores": [True], "groups": [2], "top_groups": [1], "capacity": [3]}
ROUNDING_OPTIONS = {"rounding": list(ROUNDED), "tile": [5], "seed": [7], "step": [3], "layer": [2]}
ROUTER_TENSORS = {"b_router": ["tensor"], "selection_bias": ["tensor"], "mask": ["tensor"]}


def drawn(name: str, *shape: int) -> torch.Tensor:
    """Equal names and sizes have equal values."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator) * 0.6


def router_tensor(name: str) -> torch.Tensor:
    """Every third token is padding."""
    return torch.arange(TOKENS) % 3 > 0 if name == "mask" else drawn(name, EXPERTS)


def weights(call: dict) -> dict:
    """Of the call's activation and layout; the tensors that it names are made too."""
    width = (2 if call.get("activation", "swiglu") in GATED else 1) * INTERMEDIATE
    turned = call.get("layout", "concat").startswith("transposed")
    width = INTERMEDIATE if "w_gate" in call else width
    shapes = {"w_up": (HIDDEN, width) if turned else (width, HIDDEN),
              "w_down": (INTERMEDIATE, HIDDEN) if turned else (HIDDEN, INTERMEDIATE)}
    if "w_gate" in call:
        shapes["w_gate"] = (INTERMEDIATE, HIDDEN)
    if "b_up" in call:
        shapes |= {"b_up": (width,), "b_down": (HIDDEN,)}
        if "w_gate" in call:
            shapes["b_gate"] = (INTERMEDIATE,)
    if "b_gate" in call:
        shapes["b_gate"] = (INTERMEDIATE,)
    return {name: drawn(name, EXPERTS, *shape).requires_grad_() for name, shape in shapes.items()}


def outcome(function) -> tuple:
    """What function() -> (results, tensors that have gradients) shows: values, gradients, the bytes that stay for
    backward and those of the workspaces; or ("refused", text)."""
    here.forget()
    kept = []
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
            results, leaves = function()
        loss = sum((r * drawn("d", *r.shape)).sum() for r in results if r.dtype.is_floating_point and r.requires_grad)
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True) if torch.is_tensor(loss) else ()
    except (ValueError, NotImplementedError) as error:
        return "refused", str(error)
    values = [t if t is None else t.detach().double() for t in (*results, *gradients)]
    return (values, sum(kept), sum(prepared.workspace for prepared in here.prepared.values()))


def same(a: tuple, b: tuple) -> bool:
    if a[1:] != b[1:] or len(a[0]) != len(b[0]):
        return False
    return all(x is None and y is None or x is not None and y is not None and torch.equal(x, y)
               for x, y in zip(a[0], b[0], strict=True))


def moe(call: dict) -> tuple:
    call = {"router": "topk-softmax", **call}
    tensors = {"x": drawn("x", TOKENS, HIDDEN).requires_grad_(),
               "w_router": drawn("w_router", EXPERTS, HIDDEN).requires_grad_(), **weights(call)}
    more = {name: router_tensor(name) for name in ROUTER_TENSORS if name in call}
    options = {name: value for name, value in call.items() if name not in ("w_gate", "b_up", "b_gate", *more)}
    result = tessera.moe(**tensors, **more, top_k=TOP_K, **options)
    if call.get("return_router"):
        result, router = result
        return [result, router.logits, router.counts], list(tensors.values())
    return [result], list(tensors.values())


def route(call: dict) -> tuple:
    tensors = {"x": drawn("x", TOKENS, HIDDEN).requires_grad_(),
               "w_router": drawn("w_router", EXPERTS, HIDDEN).requires_grad_()}
    more = {name: router_tensor(name) for name in ROUTER_TENSORS if name in call}
    options = {name: value for name, value in call.items() if name not in more}
    return list(tessera.route(**tensors, **more, top_k=TOP_K, **options)), list(tensors.values())


def routed_experts(call: dict) -> tuple:
    tensors = {"x": drawn("x", TOKENS, HIDDEN).requires_grad_(),
               "topk_weights": drawn("scores", TOKENS, TOP_K).requires_grad_(), **weights(call)}
    ids = drawn("ids", TOKENS, EXPERTS).topk(TOP_K).indices
    options = {name: value for name, value in call.items() if name not in ("w_gate", "b_up", "b_gate")}
    return [tessera.routed_experts(**tensors, topk_ids=ids, **options)], list(tensors.values())


def grouped_experts(call: dict) -> tuple:
    tensors = {"x": drawn("x", TOKENS, HIDDEN).requires_grad_(), **weights(call)}
    if "row_scores" in call:
        tensors["row_scores"] = drawn("scores", TOKENS).requires_grad_()
    offsets = torch.tensor([2 * e + (e > 3) for e in range(EXPERTS + 1)], dtype=torch.int32)
    groups = {"ends": offsets[1:], "counts": offsets.diff()}.get(call.get("grouped", call.get("grouping")), offsets)
    options = {name: value for name, value in call.items()
               if name not in ("w_gate", "b_up", "b_gate", "row_scores", "grouped", "buffers")}
    if "buffers" in call:
        options["buffers"] = (torch.zeros_like(tensors["w_up"]), None, torch.zeros_like(tensors["w_down"]), None, None,
                              None)
    return [tessera.grouped_experts(**tensors, expert_offsets=groups, **options)], list(tensors.values())


def module(call: dict) -> tuple:
    """In training, then in evaluation; all parameters, the buffer and the step have values."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {name: value for name, value in call.items() if name != "mask"}
        layer = tessera.MoE(HIDDEN, INTERMEDIATE, EXPERTS, **{"top_k": TOP_K, **options})
    with torch.no_grad():
        for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
            tensor.copy_(drawn(name, *tensor.shape))
    layer.step = 3
    parameters = list(layer.parameters())
    if call.get("main_grad"):
        for weight in (layer.w_up, layer.w_down):
            weight.main_grad = torch.zeros_like(weight)
    x = drawn("x", TOKENS, HIDDEN).to(layer.w_up.dtype)
    mask = router_tensor("mask") if "mask" in call else None
    o, router = layer(x, return_router=True, mask=mask)
    loss = layer.auxiliary_loss(router, mask, shape=(2, TOKENS // 2))
    evaluated = layer.eval()(x, mask=mask)
    return [o, loss, evaluated], parameters


def named_by(name: str, text: str) -> bool:
    return name in text or name == "b_gate" and "w_gate" in text


class Pairs(unittest.TestCase):
    walked = refused = 0

    def walk(self, what: str, call, bases: list[dict], options: dict, least: int):
        walked = refused = 0
        for base in bases:
            plain = outcome(lambda: call(base))
            self.assertNotEqual(plain[0], "refused", f"{what} {base}: {plain[1]}")
            for name, values in options.items():
                for value in values:
                    if name in base and (base[name] == value or name not in ("layout", "rounding", "grouping")):
                        continue
                    if (name, value) == ("layout", base.get("layout", "concat")):
                        continue
                    with self.subTest(what, base=base, **{name: value}):
                        walked += 1
                        changed = outcome(lambda: call({**base, name: value}))
                        if changed[0] == "refused":
                            refused += 1
                            self.assertTrue(named_by(name, changed[1]), changed[1])
                        else:
                            self.assertFalse(same(plain, changed), "accepted, and changes nothing")
        print(f"{what}: {walked} pairs walked, {refused} refused by name, {walked - refused} with an effect")
        self.assertGreaterEqual(walked, least)
        self.assertGreater(walked, refused)

    def test_moe(self):
        bases = [{"router": router} for router in ROUTED] + [{"rounding": r, "tile": 4} for r in ROUNDED]
        bases += [{"activation": activation} for activation in ACTIVATIONS]
        bases += [{"layout": layout} for layout in LAYOUTS] + [{"save": "x"}]
        self.walk("moe", moe, bases, EXPERT_OPTIONS | ROUTER_OPTIONS | ROUNDING_OPTIONS | ROUTER_TENSORS
                  | {"return_router": [True]}, 1000)

    def test_route(self):
        self.walk("route", route, [{"router": router} for router in ROUTED if router != "expert-choice"],
                  {name: values for name, values in (ROUTER_OPTIONS | ROUTER_TENSORS).items() if name != "capacity"},
                  30)
        with self.assertRaisesRegex(ValueError, "router=expert-choice: .*return_router"):
            route({"router": "expert-choice"})

    def test_routed_and_grouped_experts(self):
        bases = [{}] + [{"activation": activation} for activation in ACTIVATIONS[1:]]
        bases += [{"layout": layout} for layout in LAYOUTS[1:]]
        self.walk("routed_experts", routed_experts, bases, EXPERT_OPTIONS, 250)
        groups = [{"grouped": grouping, "grouping": grouping} for grouping in GROUPINGS[1:]]
        self.walk("grouped_experts", grouped_experts, bases + groups,
                  EXPERT_OPTIONS | {"row_scores": ["tensor"], "buffers": ["tensor"]}, 300)
        for call in (moe, routed_experts):
            changed = outcome(lambda call=call: call({"limit": float("inf")}))
            self.assertRegex(changed[1], "^limit=inf with activation swiglu")
        for base in groups:  # the same values, read as something else
            for grouping in GROUPINGS[1:]:
                if grouping == base["grouping"]:
                    continue
                changed = outcome(lambda: grouped_experts({**base, "grouping": grouping}))
                self.assertEqual(changed[0], "refused")
                self.assertRegex(changed[1], "expert_offsets" if grouping == "offsets" else f"^{grouping}")

    def test_module(self):
        bases = [{"router": router} for router in ROUTED] + [{"rounding": r, "tile": 4} for r in ROUNDED]
        bases += [{"activation": activation} for activation in ACTIVATIONS] + [{"shared_intermediate": 4}]
        options = {name: values for name, values in EXPERT_OPTIONS.items() if name in (
            "alpha", "limit", "up_offset", "save", "column_chunk", "precision", "scales")}
        options |= ROUTER_OPTIONS | ROUNDING_OPTIONS
        del options["step"]
        options |= {"router_bias": [True], "selection_bias": [True], "bias": [True], "shared_intermediate": [5],
                    "shared_gate": [True], "balance_coefficient": [0.5], "z_coefficient": [0.5], "main_grad": [True],
                    "dtype": [torch.bfloat16], "mask": ["tensor"], "sequence_balance_coefficient": [0.5],
                    "router_dtype": [torch.bfloat16, torch.float64]}
        self.walk("MoE", module, bases, options, 750)
        # Beside bf16 experts; fp32 is what the router of an fp32 layer has anyway.
        narrow = [{"dtype": torch.bfloat16, "router": router} for router in ROUTED]
        self.walk("MoE in bf16", module, narrow, {"router_dtype": [torch.float32, torch.float64], "mask": ["tensor"],
                                                  "sequence_balance_coefficient": [0.5]}, 25)

    def test_preparation_of_hugging_face(self):
        from tessera import huggingface

        for dtype in (torch.float16, torch.bfloat16, torch.float64, "float32"):
            with self.assertRaisesRegex(ValueError, "^router_dtype="):
                huggingface.prepare(torch.nn.Linear(2, 2), router_dtype=dtype)

    def test_softmax_topk_that_normalizes(self):
        for call in ({}, {"rounding": "nr-f", "tile": 3}):
            one = outcome(lambda: moe({**call, "router": "softmax-topk", "normalize_scores": True}))
            other = outcome(lambda: moe({**call, "router": "softmax-topk-renorm"}))
            plain = outcome(lambda: moe({**call, "router": "softmax-topk"}))
            self.assertTrue(same(one, other))
            self.assertFalse(same(one, plain))
        one = outcome(lambda: route({"router": "softmax-topk", "normalize_scores": True}))
        self.assertTrue(same(one, outcome(lambda: route({"router": "softmax-topk-renorm"}))))

    def test_losses_and_building_blocks(self):
        logits, counts = drawn("logits", TOKENS, EXPERTS).requires_grad_(), torch.arange(EXPERTS)
        losses = {scores: tessera.load_balancing_loss(logits, counts, scores=scores).item()
                  for scores in ("softmax", "sigmoid", "sqrtsoftplus")}
        self.assertEqual(len(set(losses.values())), 3)
        updates = [tessera.selection_bias_update(torch.zeros(EXPERTS), counts.square(), **options).tolist()
                   for options in ({}, {"rate": 0.5}, {"centered": True})]
        self.assertTrue(updates[0] != updates[1] and updates[0] != updates[2])
        offsets = torch.tensor([0, 9, 20], dtype=torch.int32)
        a, b = drawn("a", 20, 6), drawn("b", 2, 6, 6)
        products = [tessera.grouped_gemm(a, b, offsets, **options) for options in (
            {}, {"transpose_b": True}, {"bias": drawn("bias", 2, 6)})]
        self.assertFalse(torch.equal(products[0], products[1]) or torch.equal(products[0], products[2]))


class ConstantScores(unittest.TestCase):
    """Making a layer whose router cannot learn warns, and making any other does not."""

    def warned(self, **call) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.layer = tessera.MoE(HIDDEN, INTERMEDIATE, **call)
        return [str(warning.message) for warning in caught if warning.category is UserWarning]

    def gradient(self, tokens: int = TOKENS) -> float:
        """Of w_router, as a share of that of all scores: rounding errors are not learning."""
        torch.manual_seed(1)
        x = torch.randn(tokens, HIDDEN)
        self.layer.w_router.data = torch.randn_like(self.layer.w_router)
        self.layer(x).square().sum().backward()
        return (self.layer.w_router.grad.norm() / self.layer.w_up.grad.norm()).item()

    def test_warns_exactly_where_the_gradient_is_zero(self):
        checked = warned = 0
        for router in ROUTED:
            for experts in (1, 4, 12):
                for top_k in sorted({1, min(2, experts), experts}):
                    for more in ({}, {"normalize_scores": True}, {"rounding": "up", "tile": 3},
                                 {"rounding": "down", "tile": 2}, {"rounding": "nr-f", "tile": 1},
                                 {"normalize_scores": True, "rounding": "up", "tile": 3}):
                        case = {"router": router, "experts": experts, "top_k": top_k, **more}
                        with self.subTest(**case):
                            try:
                                texts = self.warned(**case)
                            except ValueError as error:
                                self.assertRegex(str(error), "normalize_scores|expert-choice")
                                continue
                            checked += 1
                            share = self.gradient()
                            if texts:
                                warned += 1
                                self.assertEqual(len(texts), 1)
                                self.assertRegex(texts[0], "cannot learn; use .*sigmoid-bias")
                                self.assertLess(share, 1e-6)
                            else:
                                self.assertGreater(share, 1e-4)
        print(f"{checked} layers, {warned} of which cannot learn")
        self.assertGreater(warned, 20)
        self.assertGreater(checked, 3 * warned)

    def test_the_remedies_learn(self):
        for router in ("softmax-topk", "sigmoid-bias"):
            self.assertEqual(self.warned(router=router, experts=4, top_k=1), [])
            self.assertGreater(self.gradient(), 1e-4)
        self.assertEqual(self.warned(router="sigmoid-bias", experts=1, top_k=1), [])
        self.assertGreater(self.gradient(), 1e-4)


class Groups(unittest.TestCase):
    """The options that tessera.MoE takes in groups, and the keywords of before."""

    NEW = {"router": tessera.RouterOptions, "activation": tessera.Activation, "rounding": tessera.Rounding,
           "shared": tessera.SharedExpert, "losses": tessera.Losses}
    # Of each group a kind that reads the field, and a value that is not its default.
    KINDS = {"route_scale": "sigmoid-bias", "normalize_scores": "sigmoid-bias", "groups": "group-limited",
             "top_groups": "group-limited", "capacity": "expert-choice", "alpha": "clamped-swiglu",
             "limit": "clamped-swiglu", "up_offset": "clamped-swiglu", "tile": "nr-f", "seed": "sr-f", "layer": "sr-f"}
    VALUES = {"router_dtype": torch.float32, "groups": 3, "top_groups": 2, "shared_gate": True}

    def layer(self, **options) -> tessera.MoE:
        return tessera.MoE(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, dtype=torch.bfloat16, **options)

    def shown(self, layer: tessera.MoE) -> tuple:
        """All that options decide."""
        tensors = {name: (t.shape, t.dtype) for name, t in layer.state_dict().items()}
        plain = {name: value for name, value in vars(layer).items() if not name.startswith("_") or name in (
            "_texts", "_activation", "_keeps_router_fp32", "_draws")}
        return tensors, plain

    def test_old_keywords_build_the_groups(self):
        walked = 0
        for name, (argument, field) in OLD_KEYWORDS.items():
            default = self.NEW[argument].__dataclass_fields__[field].default
            value = self.VALUES.get(name, True if default is False else 5 if isinstance(default, int) else 0.25)
            kind = self.KINDS.get(name)
            first = {} if kind is None else {"kind": kind}
            old = {argument: kind} if kind else {}
            if name == "shared_gate":
                first, old = {"intermediate": 4}, {"shared_intermediate": 4}
            with self.subTest(name):
                self.assertNotEqual(value, default)
                with warnings.catch_warnings():
                    warnings.simplefilter("error", DeprecationWarning)
                    new = self.layer(**{argument: self.NEW[argument](**first, **{field: value})})
                    plain = self.layer(**({argument: self.NEW[argument](**first)} if first else {}))
                says = f"MoE.*{name}.*: give {argument}=tessera.{self.NEW[argument].__name__}.*{field}="
                with self.assertWarnsRegex(DeprecationWarning, says) as caught:
                    made = self.layer(**old, **{name: value})
                self.assertEqual(caught.filename, __file__)
                self.assertEqual(self.shown(made), self.shown(new))
                self.assertNotEqual(self.shown(made), self.shown(plain))
                with self.assertRaisesRegex(ValueError, f"{name}=.* beside {argument}=.*two spellings of one option"):
                    self.layer(**{argument: self.NEW[argument](**first), name: value})
                walked += 1
        self.assertEqual(walked, 19)

    def test_other_keywords(self):
        with self.assertRaisesRegex(TypeError, "MoE: unknown keyword 'roouter'"):
            self.layer(roouter="topk-softmax")
        with self.assertRaisesRegex(TypeError, r"losses=0.1: tessera.Losses\(..\) is needed"):
            self.layer(losses=0.1)
        with self.assertRaisesRegex(TypeError, "shared='wide': tessera.SharedExpert"):
            self.layer(shared="wide")
        for make, says in ((lambda: tessera.RouterOptions("softmax"), "router='softmax': unknown; choose one of"),
                           (lambda: tessera.Activation("tanh"), "activation='tanh'"),
                           (lambda: tessera.Rounding("nearest"), "rounding='nearest'"),
                           (lambda: tessera.SharedExpert(gate=True), "shared_gate")):
            with self.assertRaisesRegex(ValueError, says):
                make()

    def test_copies(self):
        """Groups are values; layers made of them can be copied and pickled."""
        self.assertEqual(tessera.Losses(balance=0.5), tessera.Losses(0.5))
        router = pickle.loads(pickle.dumps(tessera.RouterOptions("sigmoid-bias", dtype=torch.float32)))
        self.assertEqual(router, tessera.RouterOptions("sigmoid-bias", dtype=torch.float32))
        layer = self.layer(router=router, rounding=tessera.Rounding("sr-f", tile=4, seed=3))
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            self.assertEqual(self.shown(other), self.shown(layer))
        self.assertEqual(repr(layer), "MoE(hidden=8, intermediate=6, experts=12, top_k=2, router=sigmoid-bias, "
                                      "activation=swiglu)")


if __name__ == "__main__":
    unittest.main()
