# SPDX-License-Identifier: Apache-2.0
"""The options of a layer: names as users write them, numbers as tessera.h wants them, and one line of text.

The text is what the torch operators take, so that graphs show it and exported programs keep it.
"""

import dataclasses
import functools
import warnings

from tessera import library

# Positions are the numbers of the enums in shape.hpp.
ACTIVATIONS = ("swiglu", "geglu", "geglu-erf", "reglu", "clamped-swiglu", "relu", "relu2", "silu", "gelu", "gelu-erf")
ORDERS = ("concat", "up-first", "interleaved", "blocked")
ROUTERS = ("given", "topk-softmax", "softmax-topk", "softmax-topk-renorm", "sigmoid-bias", "group-limited",
           "sqrtsoftplus", "expert-choice")
ROUNDINGS = ("none", "nr-f", "sr-f", "nr-s", "balance-f", "up", "down")
SAVES = ("h", "x", "none")
PRECISIONS = ("native", "fp8", "mxfp8", "auto")
SCALES = ("fp32", "pow2")  # of fp8
GROUPINGS = ("slots", "offsets", "ends", "counts")
GATED = frozenset(ACTIVATIONS[:5])


def check_name(what: str, name: str, names: tuple[str, ...]) -> int:
    if name not in names:
        raise ValueError(f"{what}={name!r}: unknown; choose one of {', '.join(names)}")
    return names.index(name)


def renamed(old: str, old_value, new: str, new_value, default):
    """The value of an argument whose old name is accepted until 1.0, with a warning. The old one is None where the
    caller did not give it."""
    if old_value is None:
        return new_value
    if new_value != default:
        raise ValueError(f"{old}={old_value}, {new}={new_value}: two names of one argument; leave out {old}")
    warnings.warn(f"{old} is called {new}; the old name goes with 1.0", DeprecationWarning, stacklevel=3)
    return old_value


def layout_parts(layout: str) -> tuple[int, int, int]:
    """Order, orientation (0 rows, 1 transposed) and block of a layout's name, as names.hpp reads it:
    `concat`, `transposed` (columns concat), `transposed-interleaved`, `blocked:32`, ..."""
    head, _, block = layout.partition(":")
    transposed = head.startswith("transposed")
    order = head.removeprefix("transposed").removeprefix("-") or "concat"
    blocked = order == "blocked"
    if order not in ORDERS or layout == "transposed-concat" or bool(block) != blocked \
            or blocked and not (block.isdecimal() and int(block) > 0):
        raise ValueError(f"layout={layout!r}: unknown; choose concat, up-first, interleaved, blocked:B, transposed or "
                         "transposed- with one of the last three")
    return ORDERS.index(order), int(transposed), int(block or 0)


@dataclasses.dataclass(frozen=True)
class Options:
    """Everything that fixes a layer's result apart from the tensors. Defaults as in the C++ API."""

    activation: str = "swiglu"
    alpha: float = 1.702  # alpha, limit and up_offset belong to clamped-swiglu
    limit: float = 7.0
    up_offset: float = 1.0
    layout: str = "concat"
    router: str = "given"
    top_k: int = 1  # of a router; ids that are given bring their own
    route_scale: float = 1.0
    normalize_scores: bool = False  # softmax-topk with it is softmax-topk-renorm
    groups: int = 0
    top_groups: int = 0
    capacity: int = 0  # of expert-choice; 0: ceil(T*K/E)
    rounding: str = "none"
    tile: int = 128
    seed: int = 0
    layer: int = 0
    save: str = "h"
    grouping: str = "slots"
    logits: bool = False  # moe_forward also returns the router's logits and its counts
    column_chunk: int = 0  # most columns of y or dx rows that exist at a time; 0: all
    precision: str = "native"  # of the GEMMs; fp8 and mxfp8 quantise their operands
    scales: str = "fp32"
    weight_codes: bool = False  # where fp8 is computed, weights are read as codes that came before the call
    overwrite_h: bool = False  # backward leaves dh in the memory of h

    def __post_init__(self):
        check_name("activation", self.activation, ACTIVATIONS)
        layout_parts(self.layout)
        check_name("router", self.router, ROUTERS)
        check_name("rounding", self.rounding, ROUNDINGS)
        check_name("save", self.save, SAVES)
        check_name("grouping", self.grouping, GROUPINGS)
        check_name("precision", self.precision, PRECISIONS)
        if check_name("scales", self.scales, SCALES) and self.precision != "fp8":
            raise ValueError(f"scales={self.scales} with precision={self.precision}: only fp8 has a choice of scales; "
                             "leave it out")
        if self.weight_codes and self.precision not in ("fp8", "auto"):
            raise ValueError(f"weight_codes with precision={self.precision}: only layers of fp8 read codes of weights; "
                             "leave them out, or give precision='fp8' or 'auto'")
        for name in ("alpha", "limit", "route_scale", "tile"):  # 0 is how the C ABI says "default"
            if getattr(self, name) == 0:
                raise ValueError(f"{name}=0: must not be 0; leave it out for its default")

    @property
    def up_width(self) -> int:
        """Width of h in units of n."""
        return 2 if self.activation in GATED else 1

    @property
    def groups_name(self) -> str:
        """What `expert_offsets` hold, as the grouping says and the library calls them."""
        return self.grouping if self.grouping in ("ends", "counts") else "expert_offsets"

    @property
    def transposed(self) -> bool:
        return self.layout.startswith("transposed")

    @property
    def quantises(self) -> bool:
        """Whether x and h are saved as codes; of auto, once `taken` has said what it is."""
        return self.precision in ("fp8", "mxfp8")

    def taken(self, fp8: bool) -> "Options":
        """The same with fp8 or native in the place of auto."""
        if self.precision != "auto":
            return self
        return dataclasses.replace(self, precision="fp8" if fp8 else "native", weight_codes=self.weight_codes and fp8)

    def scale_shapes(self, tokens, hidden, slots, width) -> tuple:
        """Shapes of x_scale and h_scale (MoeForwardArgs in moe.hpp) for h [slots, width]; sizes may be symbolic."""
        if self.precision == "mxfp8":
            return (tokens, hidden // 32), (slots, width // 32)
        return (tokens, hidden // 128), (width // 128, (slots + 3) // 4 * 4)

    @property
    def has_router(self) -> bool:
        return self.router != "given"

    def text(self) -> str:
        """What differs from the defaults, as `name=value` pairs. Plain enough for torch.compile to trace."""
        pairs = []
        for name, default in DEFAULTS:
            given = getattr(self, name)
            value = type(default)(given)  # equal options have equal texts: 1 is True
            if isinstance(default, int) and value != given:
                raise ValueError(f"{name}={given}: must be of type {type(default).__name__}")
            if value != default:
                pairs.append(f"{name}={value}")
        return " ".join(pairs)

    @property
    def experts_vary(self) -> bool:
        """Whether tokens differ in their number of experts."""
        return self.rounding != "none" or self.router == "expert-choice"

    def slots(self, tokens, experts, top_k, least=min):
        """P, the `num_slots()` of MoeDesc (shape.hpp). Sizes may be symbolic: then `least` is torch.sym_min."""
        chosen = tokens * top_k
        if self.router == "expert-choice":
            return experts * (self.capacity or (chosen + experts - 1) // experts)
        busy = least(experts, chosen)
        added = {"nr-f": busy * ((self.tile + 1) // 2 - 1), "balance-f": self.tile // 2, "sr-f": busy * (self.tile - 1),
                 "nr-s": busy * (self.tile - 1), "up": busy * (self.tile - 1)}.get(self.rounding)
        return chosen if added is None else least(chosen + added, tokens * experts)

    def routing_elements(self, tokens, slots, experts):
        """int32 elements of the routing tensor, `routing_bytes` / 4 of the library; sizes may be symbolic."""
        elements = experts + 1 + 4 * slots
        if self.experts_vary:
            elements = elements + tokens + 1
        if self.has_router:
            elements = elements + slots
        if self.experts_vary or self.router == "softmax-topk" and not self.normalize_scores:
            elements = (elements + 3) // 4 * 4 + tokens * experts  # logits begin at 16 bytes
        elif self.router in ("sigmoid-bias", "group-limited", "sqrtsoftplus"):
            elements = elements + slots
        if self.rounding != "none":
            elements = elements + tokens * self.top_k
        return elements

    def desc(self, *, top_k: int, tokens: int, hidden: int, intermediate: int, experts: int, dtype: int, ids_dtype: int,
             separate: bool, bias: bool, router_dtype: int = 0) -> library.MoeDesc:
        order, orientation, block = layout_parts(self.layout)
        if separate and self.layout != "concat":
            raise ValueError(f"w_gate with layout={self.layout}: gate and up are matrices [E,n,d] of their own, in no "
                             "other layout than concat; leave out one of them")
        return library.MoeDesc(
            size=library.ctypes.sizeof(library.MoeDesc), tokens=tokens, hidden=hidden, intermediate=intermediate,
            experts=experts, top_k=top_k, dtype=dtype, ids_dtype=ids_dtype, bias=bias,
            activation=ACTIVATIONS.index(self.activation),
            alpha=self.alpha, limit=self.limit, up_offset=self.up_offset,
            layout_order=order, layout_block=block, layout_orientation=2 if separate else orientation,
            router=ROUTERS.index(self.router), route_scale=self.route_scale,
            normalize_scores=self.normalize_scores, groups=self.groups, top_groups=self.top_groups,
            capacity=self.capacity, round=ROUNDINGS.index(self.rounding), tile=self.tile, seed=self.seed,
            layer=self.layer, column_chunk=self.column_chunk, overwrite_h=self.overwrite_h,
            precision=PRECISIONS.index(self.precision), pow2_scales=SCALES.index(self.scales),
            weight_codes=self.weight_codes,
            save=SAVES.index(self.save), grouping=GROUPINGS.index(self.grouping), router_dtype=router_dtype)

    def check(self, *, hidden: int, intermediate: int, experts: int) -> bool:
        """ValueError, as a call would raise it, for options that contradict each other or would change nothing. Returns
        whether every score is one number whatever the logits are: then no gradient of the output reaches the router."""
        dtype = library.BF16 if self.quantises else library.FP32
        desc = self.desc(top_k=self.top_k, tokens=max(self.capacity, 1), hidden=hidden, intermediate=intermediate,
                         experts=experts, dtype=dtype, ids_dtype=library.INT32, separate=False, bias=False)
        return library.scores_are_constant(desc)


DEFAULTS = tuple((field.name, field.default) for field in dataclasses.fields(Options))
_TYPES = {name: type(default) for name, default in DEFAULTS}


@functools.cache
def parse(text: str) -> Options:
    """The Options that `text()` came from."""
    values = dict(pair.split("=", 1) for pair in text.split())
    return Options(**{name: value == "True" if _TYPES[name] is bool else _TYPES[name](value)
                      for name, value in values.items()})
