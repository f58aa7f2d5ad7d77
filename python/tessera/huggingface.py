# SPDX-License-Identifier: Apache-2.0
"""The experts of Hugging Face transformers, served by Tessera: `experts_implementation="tessera"`.

    tessera.register_huggingface()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="tessera")

Weights stay where and how they are. What a model computes between its projections is not believed but probed: its
activation is run on a grid of numbers and must equal one that Tessera has, or the model is refused.
"""

import functools
import inspect

import torch

from tessera import functional
from tessera.options import Options, parse
from tessera.recognise import ALPHAS, LIMITS, recognise

OLDEST, NEWEST = (5, 17), (6,)
INSTALL = "pip install 'transformers>=5.17,<6'"
# Arguments of transformers' decorator whose meaning is known here.
_KNOWN_FLAGS = {"experts_class", "experts_interface", "is_concatenated", "is_transposed", "has_bias", "has_gate",
                "has_post_expert_norm"}


def register_huggingface(name: str = "tessera", precision: str = "native", scales: str = "fp32") -> None:
    """Makes `experts_implementation=name` known to transformers. It may be called again, with other names too.

    Args:
        name: What models are asked for.
        precision: native, fp8, mxfp8 or auto, as of tessera.moe: what experts under this name quantise and save, unless
            prepare() says something else of a model. Parameters stay bf16.
        scales: Of fp8: fp32, or pow2 for powers of two.

    Raises:
        ValueError: precision or scales are unknown, or do not go together.
        ImportError: transformers is missing or of a version that is not known.
        NotImplementedError: Its experts have options that are not known here.

    Example:
        >>> tessera.register_huggingface()
        >>> model = AutoModelForCausalLM.from_pretrained(                                # doctest: +SKIP
        ...     name, experts_implementation="tessera", dtype=torch.bfloat16)
    """
    quantising = _precision_text(precision, scales)
    try:
        import transformers
    except ModuleNotFoundError as missing:
        raise ImportError(f"register_huggingface needs transformers; {INSTALL}") from missing
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not OLDEST <= version < NEWEST:
        raise ImportError(f"transformers {transformers.__version__}: Tessera knows the experts of 5.17 up to 6; "
                          f"{INSTALL}")
    from transformers.integrations import finegrained_fp8, moe

    unknown = set(inspect.signature(moe.use_experts_implementation).parameters) - _KNOWN_FLAGS
    if unknown:
        raise NotImplementedError(f"transformers {transformers.__version__}: its experts have options that Tessera "
                                  f"does not know ({', '.join(sorted(unknown))}); install an older one")
    serve = functools.partial(experts_forward, quantising=quantising) if quantising else experts_forward
    moe.ALL_EXPERTS_FUNCTIONS.register(name, serve)
    # Quantised experts have a list of their own; there experts_forward says that it does not serve them.
    quantised = getattr(finegrained_fp8, "ALL_FP8_EXPERTS_FUNCTIONS", None)
    if quantised is not None:
        quantised.register(name, serve)


def _precision_text(precision: str, scales: str) -> str:
    """What stands behind the other options of experts, with a space before it."""
    text = Options(precision=precision, scales=scales).text()
    return f" {text}" if text else ""


def prepare(model: torch.nn.Module, router_dtype: torch.dtype | None = None, precision: str | None = None,
            scales: str = "fp32") -> int:
    """Recognises all experts of a model at once; otherwise each is recognised at its first call.

    It is needed before torch.compile, of whatever model: nothing can be probed while it traces. It may be called again.

    Args:
        model: Of transformers, made with the implementation that register_huggingface() has named.
        router_dtype: torch.float32: the routers' parameters become fp32, and what enters them is widened, so that
            logits and gradients are those of fp32 weights beside bf16 experts. None: they stay as they are.
        precision: native, fp8, mxfp8 or auto, as of tessera.moe, for the experts of this model; their parameters stay
            bf16. None: what register_huggingface() was given.
        scales: Of precision fp8: fp32, or pow2 for powers of two.

    Returns:
        The number of experts modules, one for each layer; 0 where transformers computes them itself.

    Raises:
        ValueError: router_dtype is another one; precision or scales are unknown, or the experts' sizes are no
            multiples of their blocks.
        NotImplementedError: Experts compute what Tessera does not, or have no router beside them.

    Example:
        >>> import transformers
        >>> tessera.register_huggingface()
        >>> config = transformers.OlmoeConfig(hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_experts=4,
        ...                                   num_attention_heads=2, num_experts_per_tok=2, vocab_size=16,
        ...                                   eos_token_id=1)
        >>> model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="tessera")
        >>> tessera.huggingface.prepare(model)
        2
    """
    if router_dtype not in (None, torch.float32):
        raise ValueError(f"router_dtype={router_dtype}: torch.float32, or None for routers as they are")
    if precision is None and scales != "fp32":
        raise ValueError(f"scales={scales} without precision: only fp8 has a choice of scales; give precision='fp8'")
    found = [m for m in model.modules() if _is_experts(m)]
    texts = [_options_of(module) for module in found]
    if precision is not None:
        quantising = _precision_text(precision, scales)
        for module, text in zip(found, texts, strict=True):
            experts, *sizes = module.down_proj.shape
            intermediate, hidden = sizes if module.is_transposed else reversed(sizes)
            parse(text + quantising).check(hidden=hidden, intermediate=intermediate, experts=experts)
        for module in found:
            module._tessera_precision = quantising
    if router_dtype is not None:
        for block in list(model.modules()):
            if any(_is_experts(child) for child in block.children()):
                _widen_router(block)
    return len(found)


def _is_experts(module: torch.nn.Module) -> bool:
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")


def _widen_router(block: torch.nn.Module) -> None:
    routers = [child for name, child in block.named_children() if name in ("gate", "router")]
    if not routers:
        raise NotImplementedError(f"{type(block).__name__}: no router called gate or router; leave router_dtype out")
    for router in routers:
        router.float()
        if "_tessera_widened" not in router.__dict__:
            router.register_forward_pre_hook(_widened, with_kwargs=True)
            router._tessera_widened = True


def _widened(_router, arguments: tuple, named: dict) -> tuple:
    def widen(value):
        return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return tuple([widen(value) for value in arguments]), {name: widen(value) for name, value in named.items()}


def experts_forward(self, hidden_states, top_k_index, top_k_weights, quantising: str = ""):
    """What transformers calls in place of a model's own experts.

    Args:
        self: The experts module of transformers, whose weights are used where they lie.
        hidden_states: [T,d] of a floating type, converted to that of the weights.
        top_k_index: [T,K] int64; ids outside [0,E) own no row.
        top_k_weights: [T,K] of a floating type.
        quantising: The precision of register_huggingface(), as text; prepare() may have given the module another one.

    Returns:
        o [T,d] in the type of hidden_states.

    Raises:
        NotImplementedError: The experts compute what Tessera does not, or have more weights than ids.
        RuntimeError: torch.compile traces experts that `prepare` has not seen.

    Example:
        >>> experts = model.model.layers[0].mlp.experts                                  # doctest: +SKIP
        >>> o = tessera.huggingface.experts_forward(experts, x, ids, weights)            # doctest: +SKIP
    """
    if top_k_weights.shape != top_k_index.shape:
        raise NotImplementedError(
            f"{type(self).__name__}: weights {tuple(top_k_weights.shape)} for ids {tuple(top_k_index.shape)}; Tessera "
            "needs one weight per chosen expert; update transformers")
    text = _options_of(self) + self.__dict__.get("_tessera_precision", quantising)
    w_up = self.gate_up_proj if self.has_gate else self.up_proj
    b_up = b_down = None
    if self.has_bias:
        b_up, b_down = (self.gate_up_proj_bias if self.has_gate else self.up_proj_bias), self.down_proj_bias
    x = hidden_states
    if x.dtype is not w_up.dtype and not torch.is_autocast_enabled(x.device.type):
        x = x.to(w_up.dtype)
    weights = (w_up, None, self.down_proj, b_up, None, b_down)
    o = functional.routed_experts_with(text, x, top_k_index, top_k_weights, weights)
    return o.to(hidden_states.dtype)


def _options_of(module) -> str:
    """The options of an experts module as text, kept on the module for as long as its activation is the one tried."""
    kept = module.__dict__.get("_tessera_options")
    if kept is not None and _is_as_tried(module):
        return kept
    if torch.compiler.is_compiling():
        raise RuntimeError("experts that Tessera has not seen as they are: call tessera.huggingface.prepare(model) "
                           "before torch.compile")
    name = type(module).__name__
    if getattr(module, "has_post_expert_norm", False):
        raise NotImplementedError(f"{name}: normalises the experts' outputs, which Tessera does not; use another "
                                  "experts_implementation")
    for weight in (module.gate_up_proj if module.has_gate else module.up_proj, module.down_proj):
        if weight.dtype.itemsize < 2:
            raise NotImplementedError(f"{name}: weights of {weight.dtype}, which Tessera does not scale; load the "
                                      "model in bf16 or use another experts_implementation")
    act_fn = getattr(module, "act_fn", None)
    if isinstance(act_fn, torch.nn.Module) and next(act_fn.parameters(), None) is not None:
        raise NotImplementedError(f"{name}: its activation has parameters, which Tessera would take for constants; use "
                                  "another experts_implementation")
    layout = "interleaved" if module.has_gate and not module.is_concatenated else "concat"
    if module.is_transposed:
        layout = "transposed" if layout == "concat" else "transposed-interleaved"
    if module.has_gate:
        interleaved = layout.endswith("interleaved")

        def compute(gate, up):
            columns = torch.stack([gate, up], dim=-1).flatten(-2) if interleaved else torch.cat([gate, up], dim=-1)
            return module._apply_gate(columns)
    else:
        compute = module.act_fn
    config = getattr(module, "config", None)
    activation = recognise(name, compute, module.has_gate, (module, config))
    module._tessera_tried = act_fn, _numbers(module), _numbers(config)
    module._tessera_options = functional.options_text(layout=layout, **activation)
    return module._tessera_options


def _numbers(owner) -> tuple:
    """Its attributes that may be numbers of its activation, or None in their place."""
    return tuple([(key, value) for key, value in (vars(owner).items() if owner is not None else ())
                  if any(word in key for word in (*ALPHAS, *LIMITS, "scale", "softcap"))
                  and (value is None or type(value) in (int, float))])


def _is_as_tried(module) -> bool:
    act_fn, own, of_config = module._tessera_tried
    if getattr(module, "act_fn", None) is not act_fn:
        return False
    if own:
        numbers = module.__dict__
        for key, value in own:
            if numbers.get(key) != value:
                return False
    if of_config:
        numbers = module.config.__dict__
        for key, value in of_config:
            if numbers.get(key) != value:
                return False
    return True
