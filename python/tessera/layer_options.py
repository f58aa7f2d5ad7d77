# SPDX-License-Identifier: Apache-2.0
"""The groups of options that tessera.MoE takes: each says what one part of a layer does."""

import dataclasses
import warnings

from tessera import options


@dataclasses.dataclass(frozen=True)
class RouterOptions:
    """How a layer's router chooses experts and scores them. Formulas: docs/numerics.md.

    Args:
        kind: topk-softmax, softmax-topk, softmax-topk-renorm, sigmoid-bias, group-limited, sqrtsoftplus or
            expert-choice.
        bias: The router has a parameter b_router [E], which is added to the logits.
        selection_bias: The layer has a buffer selection_bias [E] fp32, which is added to the keys that choose, not to
            the scores.
        route_scale: Every score is multiplied by it; not 0.
        normalize_scores: A token's scores are divided by their sum: of sigmoid-bias, group-limited and sqrtsoftplus,
            and of softmax-topk, which it makes softmax-topk-renorm.
        groups: Groups of experts of group-limited, which divide E; 0: chosen from E.
        top_groups: Groups that a token may choose from, of group-limited; 0: chosen from K.
        capacity: Tokens that each expert takes, of expert-choice; 0: ceil(T*K/E).
        dtype: Of w_router and b_router: torch.float32 beside bf16 experts, or None for that of the layer. An fp32
            router stays fp32 in to(), bfloat16() and their like, and when a checkpoint of another type is loaded.

    Raises:
        ValueError: kind is unknown. tessera.MoE raises for options that the kind does not read.

    Example:
        >>> router = tessera.RouterOptions("sigmoid-bias", selection_bias=True)
        >>> layer = tessera.MoE(16, 12, experts=8, top_k=2, router=router)
        >>> layer.selection_bias.shape
        torch.Size([8])
    """

    kind: str = "topk-softmax"
    bias: bool = False
    selection_bias: bool = False
    route_scale: float = 1.0
    normalize_scores: bool = False
    groups: int = 0
    top_groups: int = 0
    capacity: int = 0
    dtype: object = None

    def __post_init__(self):
        options.check_name("router", self.kind, options.ROUTERS)


@dataclasses.dataclass(frozen=True)
class Activation:
    """What stands between the two projections of an expert. Formulas: docs/numerics.md.

    Args:
        kind: swiglu, geglu, geglu-erf, reglu or clamped-swiglu, which are gated, or relu, relu2, silu, gelu, gelu-erf.
        alpha: Slope of clamped-swiglu's gate, without unit; not 0.
        limit: Bound at which clamped-swiglu clamps gate and up; not 0.
        up_offset: What clamped-swiglu adds to up.

    Raises:
        ValueError: kind is unknown. tessera.MoE raises for numbers that the kind does not read.

    Example:
        >>> layer = tessera.MoE(16, 12, experts=8, top_k=2, activation=tessera.Activation("clamped-swiglu", limit=5.0))
    """

    kind: str = "swiglu"
    alpha: float = 1.702
    limit: float = 7.0
    up_offset: float = 1.0

    def __post_init__(self):
        options.check_name("activation", self.kind, options.ACTIVATIONS)


@dataclasses.dataclass(frozen=True)
class Rounding:
    """Token rounding: the rows of every expert become a multiple of `tile`, in training mode only.

    Args:
        kind: none, nr-f, sr-f, nr-s, balance-f, up or down.
        tile: Rows, at least 1.
        seed: Of the stochastic kinds, sr-f and nr-s, which draw from (seed, step, layer).
        layer: Number of this layer, so that layers of one seed draw differently.

    Raises:
        ValueError: kind is unknown. tessera.MoE raises for numbers that the kind does not read.

    Example:
        >>> layer = tessera.MoE(16, 12, experts=8, top_k=2, rounding=tessera.Rounding("nr-f", tile=4))
    """

    kind: str = "none"
    tile: int = 128
    seed: int = 0
    layer: int = 0

    def __post_init__(self):
        options.check_name("rounding", self.kind, options.ROUNDINGS)


@dataclasses.dataclass(frozen=True)
class SharedExpert:
    """An expert that sees every token, beside those that a router chooses.

    Args:
        intermediate: Its width; 0: there is none.
        gate: Its output is scaled by sigmoid(x . w_shared_gate) (Qwen2).

    Raises:
        ValueError: gate without an expert.

    Example:
        >>> layer = tessera.MoE(16, 12, experts=8, top_k=2, shared=tessera.SharedExpert(24, gate=True))
        >>> layer.w_shared_down.shape
        torch.Size([16, 24])
    """

    intermediate: int = 0
    gate: bool = False

    def __post_init__(self):
        if self.gate and not self.intermediate:
            raise ValueError("SharedExpert(gate=True) (shared_gate): it scales a shared expert, and intermediate=0 "
                             "makes none; leave it out, or give that expert's width")


@dataclasses.dataclass(frozen=True)
class Losses:
    """Coefficients of the losses that tessera.MoE.auxiliary_loss adds up; 0 leaves one out.

    Args:
        balance: Of load_balancing_loss.
        z: Of z_loss.
        sequence_balance: Of sequence_balance_loss.

    Raises:
        Nothing. tessera.MoE raises for losses that its router makes constant.

    Example:
        >>> layer = tessera.MoE(16, 12, experts=8, top_k=2, losses=tessera.Losses(balance=0.01, z=1e-3))
    """

    balance: float = 0.0
    z: float = 0.0
    sequence_balance: float = 0.0


# Old keyword of tessera.MoE -> (its argument, the field of that).
OLD_KEYWORDS = {
    "router_bias": ("router", "bias"), "router_dtype": ("router", "dtype"),
    **{name: ("router", name) for name in ("selection_bias", "route_scale", "normalize_scores", "groups", "top_groups",
                                           "capacity")},
    **{name: ("activation", name) for name in ("alpha", "limit", "up_offset")},
    **{name: ("rounding", name) for name in ("tile", "seed", "layer")},
    "shared_intermediate": ("shared", "intermediate"), "shared_gate": ("shared", "gate"),
    "balance_coefficient": ("losses", "balance"), "z_coefficient": ("losses", "z"),
    "sequence_balance_coefficient": ("losses", "sequence_balance"),
}
_KINDS = {"router": RouterOptions, "activation": Activation, "rounding": Rounding, "shared": SharedExpert,
          "losses": Losses}


def collect(given: dict, old: dict) -> tuple:
    """(router, activation, rounding, shared, losses) of tessera.MoE. given: its arguments of these names, each a group,
    the name of its kind alone, or None; old: its other keywords.

    Errors: TypeError for unknown keywords and other types; ValueError where a group and an old keyword of it are given.
    """
    unknown = [name for name in old if name not in OLD_KEYWORDS]
    if unknown:
        raise TypeError(f"MoE: unknown keyword {unknown[0]!r}; help(tessera.MoE) has all of them")
    groups = []
    for argument, kind in _KINDS.items():
        group = given[argument]
        fields = {field: old[name] for name, (of, field) in OLD_KEYWORDS.items() if of == argument and name in old}
        names = [name for name in old if OLD_KEYWORDS[name][0] == argument]
        if isinstance(group, kind):
            if fields:
                raise ValueError(f"{names[0]}={old[names[0]]} beside {argument}={group}: two spellings of one option; "
                                 f"give {kind.__name__}({OLD_KEYWORDS[names[0]][1]}=..)")
        elif group is None or isinstance(group, str) and "kind" in kind.__dataclass_fields__:
            group = kind(**({} if group is None else {"kind": group}), **fields)
        else:
            raise TypeError(f"{argument}={group!r}: tessera.{kind.__name__}(..) is needed")
        if fields:
            new = ", ".join([f"{name}={value!r}" for name, value in fields.items()])
            warnings.warn(f"MoE({', '.join(names)}=..): give {argument}=tessera.{kind.__name__}({new}); the old "
                          "keywords go with 1.0", DeprecationWarning, stacklevel=3)
        groups.append(group)
    return tuple(groups)
