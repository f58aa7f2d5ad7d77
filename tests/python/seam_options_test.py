# SPDX-License-Identifier: Apache-2.0
"""No option without effect, where options_test.py does not reach: ExpertParallel, whose options are walked by what the
library, torch and the other ranks are given, as its passes run on GPUs alone; and what the seams of torchtitan and
Megatron read of modules and configurations."""

import contextlib
import ctypes
import os
import types
import unittest
import unittest.mock

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import integrations_test as seams
import tessera
import torch
from tessera import expert_parallel_library as structs
from tessera import expert_parallel_session as session_module
from tessera import library
from tessera.integrations import megatron, torchtitan
from tessera.options import ACTIVATIONS
from torch import distributed as dist
from torch import nn
from torch.nn import functional


class Walk(unittest.TestCase):
    def walk(self, what: str, call, same, bases: list[dict], options: dict, least: int) -> None:
        """Every option on every base: call(options) is refused by an error that names the option, or does not do what
        it does for the base alone."""
        walked = refused = 0
        for base in bases:
            plain = call(base)
            for name, values in options.items():
                for value in values if isinstance(values, list) else [values]:
                    if name in base:
                        continue
                    with self.subTest(what, base=base, **{name: value}):
                        walked += 1
                        try:
                            changed = call({**base, name: value})
                        except (ValueError, NotImplementedError) as error:
                            refused += 1
                            self.assertIn(name, str(error))
                        else:
                            self.assertFalse(same(plain, changed), "accepted, and changes nothing")
        print(f"{what}: {walked} pairs walked, {refused} refused by name, {walked - refused} with an effect")
        self.assertGreaterEqual(walked, least)
        self.assertGreater(walked, refused)


class Recorder:
    """The library that a session of rank 0 of two is made with: what it says of a description is its own, and what is
    done on a GPU is noted instead."""

    def __init__(self):
        self.library, self.noted = structs.load(), []

    def __getattr__(self, name: str):
        return getattr(self.library, name)

    def tessera_expert_parallel_workspace(self, context, desc, bytes_) -> int:
        bytes_._obj.value = 1 << 10
        return 0

    def tessera_expert_parallel_create(self, context, desc, addresses, buffer, handle) -> int:
        self.noted.append(("create", context, {name: getattr(desc._obj, name) for name, _ in structs.Desc._fields_},
                           list(addresses)))
        return 0

    def tessera_peer_group_id_make(self, path, made) -> int:
        return 0

    def tessera_peer_window_open(self, context, rank, ranks, group_id, bytes_, path, window) -> int:
        self.noted.append(("window", context, rank, ranks, bytes_))
        return 0

    def tessera_peer_window_addresses(self, window, addresses) -> int:
        addresses[:2] = 1 << 20, 2 << 20
        return 0

    def tessera_expert_parallel_destroy(self, handle) -> None: ...


def expert_parallel(options: dict):
    """All that a session of these options passes on, and what it holds for passes with gradients."""
    recorded, empty = Recorder(), torch.empty

    def gather(of_ranks, mine, group):
        recorded.noted.append(("ranks", mine, group))
        of_ranks[:] = [mine] * 2

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
                (session_module, "load", lambda: recorded),
                (library, "context", lambda kind, device, threads: (kind, device, threads)),
                (session_module.distributed, "get_rank", lambda group: 0),
                (session_module.distributed, "get_world_size", lambda group: 2),
                (session_module.distributed, "all_gather_object", gather),
                (torch, "empty", lambda *shape, dtype, device: empty(*shape, dtype=dtype))):
            stack.enter_context(unittest.mock.patch.object(owner, name, value))
        stack.enter_context(unittest.mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: 77,
                                                       create=True))
        session = tessera.ExpertParallel(**{"max_tokens": 300, "hidden": 512, "intermediate": 256, "experts": 16,
                                            "top_k": 4, "device": "cuda:0", **options})._session
    session.handle = ctypes.c_void_p()
    return recorded.noted, session.training, session.device


class ExpertParallel(Walk):
    def test_every_option_is_passed_on(self):
        bases = [{}] + [{"activation": activation} for activation in ACTIVATIONS[1:]] + [
            {"training": True}, {"partial_combine": True}, {"training": True, "save": "x"},
            {"training": True, "max_rows": 70}, {"activation": "clamped-swiglu", "training": True}]
        options = {"max_tokens": 301, "hidden": 520, "intermediate": 264, "experts": 18, "top_k": 5,
                   "activation": [activation for activation in ACTIVATIONS if activation != "swiglu"],
                   "alpha": 1.25, "limit": 0.25, "up_offset": [0.0, 0.5], "partial_combine": True, "training": True,
                   "save": ["x", "y"], "max_rows": [90, 0, 1 << 40], "group": "another group", "device": "cuda:1",
                   "windows": [[1 << 21, 2 << 21]], "time_limit": 7.0}
        self.walk("ExpertParallel", expert_parallel, lambda a, b: a == b, bases, options, 330)

    def test_limits_of_time(self):
        """0 among them, which stands for the default in C."""
        for seconds in (0.0, -1.0, float("nan"), 86401.0):
            with self.subTest(seconds), self.assertRaisesRegex(ValueError, f"^time_limit={seconds}"):
                expert_parallel({"time_limit": seconds})

    def test_windows_are_one_of_each_rank(self):
        with self.assertRaisesRegex(ValueError, "windows: 3 addresses for 2 ranks"):
            expert_parallel({"windows": [1, 2, 3]})


X = torch.randn(13, seams.D, generator=torch.Generator().manual_seed(1))
D_Y = torch.randn(13, seams.D, generator=torch.Generator().manual_seed(2))


def same(a: tuple, b: tuple) -> bool:
    """Equal tensors, numbers and texts at the same places."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


class QuantisedLinear(seams.GroupedLinear):
    pass


def torchtitan_experts(options: dict) -> tuple:
    """What a module of torchtitan's with these properties computes once Tessera does it."""
    form, function = options.get("form", "suffixes"), options.get("activation_fn")
    linears = form == "linears"
    module = seams.RoutedExperts(function) if linears else seams.GroupedExperts(function, form)
    for name in ("output_postprocess", "expert_output_postprocess"):
        if name in options:
            setattr(module, name, options[name])
    if "bias" in options:
        module.bias = nn.Parameter(torch.zeros(seams.E, seams.F))
    for name in ("w13", "w2"):
        if name in options:
            setattr(module, name, options[name](getattr(module, name).weight.detach()))
    torchtitan.use_tessera(nn.Sequential(module))
    x = X.clone().requires_grad_()
    if linears:
        ids = torch.arange(13)[:, None] % seams.E
        y = module(x, torch.ones(13, 1), ids, torch.bincount(ids.flatten(), minlength=seams.E))
    else:
        y = module(x, torch.tensor(seams.COUNTS))
    return y.detach(), *torch.autograd.grad(y, (x, *module.parameters()), D_Y)


def clamped(gate, up):
    return functional.silu(gate.clamp(max=0.75)) * up.clamp(-0.75, 0.75)


class Alpha:
    """An activation whose numbers are attributes."""

    def __init__(self, alpha: float, limit: float, offset: float):
        self.alpha, self.limit, self.offset = alpha, limit, offset

    def __call__(self, gate, up):
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + self.offset)


class Torchtitan(Walk):
    def test_every_property_of_a_module(self):
        bases = [{"form": form} for form in ("plain", "suffixes", "w13", "flat w13", "linears")]
        gated = [lambda g, u: functional.gelu(g) * u, lambda g, u: functional.gelu(g, approximate="tanh") * u,
                 lambda g, u: functional.relu(g) * u, Alpha(1.702, 7.0, 1.0), Alpha(1.25, 0.5, 0.0)]
        unknown = {"bias": True, "output_postprocess": seams.SwiGLU(), "expert_output_postprocess": seams.SwiGLU()}
        self.walk("torchtitan", torchtitan_experts, same, bases, {"activation_fn": gated, **unknown}, 40)
        self.walk("torchtitan with grouped linears", torchtitan_experts, same,
                  [{"form": "linears"}, {"form": "linears", "activation_fn": Alpha(1.0, 0.5, 0.0)}],
                  {"w13": QuantisedLinear, "w2": QuantisedLinear, "activation_fn": gated, **unknown}, 12)
        for activation_fn in (lambda g, u: g.tanh() * u, lambda g, u: g, lambda g, u: 1 / 0):
            for base in bases:
                with self.assertRaisesRegex(NotImplementedError, "activation"):
                    torchtitan_experts({**base, "activation_fn": activation_fn})


class Group:
    def __init__(self, size: int):
        self.size = lambda: size


def megatron_experts(options: dict) -> tuple:
    """What Experts of this configuration compute, hold and give Megatron's optimizer to read."""
    torch.manual_seed(3)
    config = seams.config(**{name: value for name, value in options.items() if name != "expert_tensor_parallel_size"})
    size = options.get("expert_tensor_parallel_size", 1)
    experts = megatron.Experts(seams.E, config, pg_collection=types.SimpleNamespace(expt_tp=Group(size)))
    weights = tuple(weight.detach().clone() for weight in experts.parameters())
    for weight in experts.parameters():
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    x = torch.randn(11, config.hidden_size, generator=torch.Generator().manual_seed(4)).to(weights[0].dtype)
    x.requires_grad_()
    y, _ = experts(x, seams.COUNTS, torch.rand(11, generator=torch.Generator().manual_seed(5)))
    loss = y.float().square().sum()
    if config.gradient_accumulation_fusion:  # then the gradients of weights are in main_grad alone
        loss.backward()
        gradients = (x.grad,)
    else:
        gradients = torch.autograd.grad(loss, (x, *experts.parameters()))
    return (weights, y.detach(), gradients, tuple(weight.main_grad for weight in experts.parameters()),
            tuple(weight.allreduce for weight in experts.parameters()))


class Megatron(Walk):
    def test_every_field_of_the_configuration(self):
        silu, gelu, relu = functional.silu, functional.gelu, functional.relu
        bases = [{"gated_linear_unit": gated, "activation_func": function}
                 for gated in (True, False) for function in (silu, gelu, relu)]
        bases += [{"moe_mlp_glu_interleave_size": 4}, {"params_dtype": torch.bfloat16},
                  {"gradient_accumulation_fusion": True},
                  {"activation_func_clamp_value": 0.5, "activation_func": silu},
                  {"glu_linear_offset": 1.0, "activation_func": silu}]
        options = {"hidden_size": 16, "moe_ffn_hidden_size": 16, "gated_linear_unit": False,
                   "activation_func": [gelu, relu], "activation_func_clamp_value": 0.25, "glu_linear_offset": 1.0,
                   "moe_mlp_glu_interleave_size": 2, "params_dtype": torch.bfloat16,
                   "gradient_accumulation_fusion": True, "expert_model_parallel_size": 2,
                   "init_method": nn.init.xavier_normal_, "output_layer_init_method": nn.init.kaiming_normal_,
                   "add_bias_linear": True, "delay_wgrad_compute": True, "fp8": "hybrid",
                   "moe_apply_probs_on_input": True, "expert_tensor_parallel_size": 2}
        self.walk("Megatron", megatron_experts, same, bases, options, 150)


def setUpModule():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    unittest.addModuleCleanup(dist.destroy_process_group)


if __name__ == "__main__":
    unittest.main()
