# SPDX-License-Identifier: Apache-2.0
"""Checkpoints for the tests of `tessera convert`, and how they run it.

They are written here by hand, from the format's description and Hugging Face's names, so that the
program meets files that it did not write itself. Element k of a layer's weight has its own bits: a permuted,
lost or doubled element shows.
"""

import json
import os
import pathlib
import random
import struct
import tempfile

from program import Cli

E, N, D = 3, 8, 5  # experts, intermediate, hidden
LAYOUTS = ["concat", "interleaved", "up-first", "transposed", "separate", "blocked:4", "transposed-interleaved",
           "transposed-up-first", "transposed-blocked:2"]
SIZES = {"BF16": 2, "F32": 4, "F16": 2}


def safetensors(tensors: dict[str, tuple[str, list[int], bytes]], metadata: dict | None = None) -> bytes:
    header = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()  # spaces after commas: not how the program writes headers
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())


def read_safetensors(path: pathlib.Path) -> dict[str, tuple[str, list[int], bytes]]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, data = json.loads(data[8:8 + length]), data[8 + length:]
    header.pop("__metadata__", None)
    return {name: (e["dtype"], e["shape"], data[slice(*e["data_offsets"])]) for name, e in header.items()}


def read_checkpoint(folder: pathlib.Path) -> dict[str, tuple[str, list[int], bytes]]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors"))
            for name, tensor in read_safetensors(path).items()}


def matrix(seed: str, rows: int, columns: int, dtype: str) -> list[list[bytes]]:
    bits = random.Random(seed)
    return [[bits.randbytes(SIZES[dtype]) for _ in range(columns)] for _ in range(rows)]


def flat(*matrices: list[list[bytes]]) -> bytes:
    return b"".join(element for rows in matrices for row in rows for element in row)


def transposed(rows: list[list[bytes]]) -> list[list[bytes]]:
    return [list(column) for column in zip(*rows, strict=True)]


class Expert:
    """Gate and up [N,D], down [D,N], biases, with bits that depend on layer and expert alone."""

    def __init__(self, layer: int, expert: int, dtype: str = "BF16"):
        seed = f"{layer} {expert} "
        self.gate, self.up = matrix(seed + "g", N, D, dtype), matrix(seed + "u", N, D, dtype)
        self.down = matrix(seed + "d", D, N, dtype)
        self.gate_bias, self.up_bias = matrix(seed + "gb", N, 1, dtype), matrix(seed + "ub", N, 1, dtype)
        self.down_bias = matrix(seed + "db", D, 1, dtype)


def gate_up(layout: str, gate: list, up: list) -> list:
    """Rows of w_up in the order of docs/numerics.md."""
    order, _, block = layout.removeprefix("transposed-").partition(":")
    if order in ("concat", "transposed"):
        return gate + up
    if order == "up-first":
        return up + gate
    if order == "interleaved":
        return [row for pair in zip(gate, up, strict=True) for row in pair]
    b = int(block)
    return [row for i in range(0, N, b) for row in gate[i:i + b] + up[i:i + b]]


def attention(layer: int, dtype: str) -> dict:
    name = f"model.layers.{layer}.self_attn.q_proj.weight"
    return {name: (dtype, [D, D], flat(matrix(name, D, D, dtype)))}


def per_expert(layers: list[int], names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
               block: str = "mlp", dtype: str = "BF16") -> dict:
    """As Hugging Face stores Qwen and others; tensors sorted by name, so expert 10 before 2."""
    tensors = {"model.embed_tokens.weight": ("F32", [4, D], flat(matrix("embed", 4, D, "F32")))}
    for layer in layers:
        tensors |= attention(layer, dtype)
        router = f"model.layers.{layer}.{block}.gate.weight"
        tensors[router] = (dtype, [E, D], flat(matrix(router, E, D, dtype)))
        for e in range(E):
            expert, prefix = Expert(layer, e, dtype), f"model.layers.{layer}.{block}.experts.{e}."
            for name, rows in zip(names, (expert.gate, expert.up, expert.down), strict=True):
                tensors[f"{prefix}{name}.weight"] = (dtype, [len(rows), len(rows[0])], flat(rows))
        shared = f"model.layers.{layer}.{block}.shared_experts.gate_proj.weight"
        tensors[shared] = (dtype, [N, D], flat(matrix(shared, N, D, dtype)))
    return dict(sorted(tensors.items()))


def stacked_gpt_oss(layers: list[int]) -> dict:
    tensors = {}
    for layer in layers:
        prefix, experts = f"model.layers.{layer}.mlp.experts.", [Expert(layer, e) for e in range(E)]
        tensors |= attention(layer, "BF16")
        tensors[prefix + "gate_up_proj"] = ("BF16", [E, D, 2 * N], flat(
            *(transposed(gate_up("interleaved", x.gate, x.up)) for x in experts)))
        tensors[prefix + "gate_up_proj_bias"] = ("BF16", [E, 2 * N], flat(
            *(gate_up("interleaved", x.gate_bias, x.up_bias) for x in experts)))
        tensors[prefix + "down_proj"] = ("BF16", [E, N, D], flat(*(transposed(x.down) for x in experts)))
        tensors[prefix + "down_proj_bias"] = ("BF16", [E, D], flat(*(x.down_bias for x in experts)))
    return tensors


def expected(layout: str, layer: int, prefix: str, bias: bool) -> dict[str, tuple[str, list[int], bytes]]:
    """The layer's experts under Tessera's names."""
    experts = [Expert(layer, e) for e in range(E)]
    tensors = {}
    if layout == "separate":
        tensors["w_gate"] = ([E, N, D], flat(*(x.gate for x in experts)))
        tensors["w_up"] = ([E, N, D], flat(*(x.up for x in experts)))
        if bias:
            tensors["b_gate"] = ([E, N], flat(*(x.gate_bias for x in experts)))
            tensors["b_up"] = ([E, N], flat(*(x.up_bias for x in experts)))
    else:
        blocks = [gate_up(layout, x.gate, x.up) for x in experts]
        turned = layout.startswith("transposed")
        tensors["w_up"] = ([E, D, 2 * N], flat(*map(transposed, blocks))) if turned else (
            [E, 2 * N, D], flat(*blocks))
        if bias:
            tensors["b_up"] = ([E, 2 * N], flat(*(gate_up(layout, x.gate_bias, x.up_bias) for x in experts)))
    turned = layout.startswith("transposed")
    downs = [transposed(x.down) if turned else x.down for x in experts]
    tensors["w_down"] = ([E, N, D] if turned else [E, D, N], flat(*downs))
    if bias:
        tensors["b_down"] = ([E, D], flat(*(x.down_bias for x in experts)))
    return {f"{prefix}.{name}": ("BF16", shape, data) for name, (shape, data) in tensors.items()}


class Checkpoints(Cli):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def checkpoint(self, tensors: dict, model_type: str = "qwen3_moe", shards: int = 1, **config) -> str:
        path = self.folder / "source"
        path.mkdir()
        (path / "config.json").write_text(json.dumps({"model_type": model_type} | config))
        (path / "tokenizer.json").write_text('{"tokens": "ä"}')
        if shards == 1:
            (path / "model.safetensors").write_bytes(safetensors(tensors, {"format": "pt", "by": "hand"}))
            return str(path)
        names, weight_map = list(tensors), {}
        for i in range(shards):  # every layer is spread over all shards
            name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
            part = {tensor: tensors[tensor] for tensor in names[i::shards]}
            weight_map |= dict.fromkeys(part, name)
            (path / name).write_bytes(safetensors(part))
        (path / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}, indent=3))
        return str(path)

    def convert(self, source: str, name: str, layout: str, *more: str) -> str:
        target = str(self.folder / name)
        summary = self.run_json("convert", "--from", source, "--to", target, "--layout", layout, *more)
        self.assertEqual((summary["end"], summary["to_layout"]), ("finished", layout))
        self.assertEqual(sorted(summary["files"]), sorted(os.listdir(target)))
        return target

    def same_folders(self, a: str, b: str) -> None:
        self.assertEqual(sorted(os.listdir(a)), sorted(os.listdir(b)))
        for name in os.listdir(a):
            self.assertEqual(pathlib.Path(a, name).read_bytes(), pathlib.Path(b, name).read_bytes(), name)

    def stacked(self, block: str, router: str) -> dict:
        """As transformers 5 saves a model whose experts it stacks."""
        experts, prefix = [Expert(0, e) for e in range(E)], f"model.layers.0.{block}."
        return attention(0, "BF16") | {
            prefix + "experts.gate_up_proj": ("BF16", [E, 2 * N, D], flat(*(x.gate + x.up for x in experts))),
            prefix + "experts.down_proj": ("BF16", [E, D, N], flat(*(x.down for x in experts))),
            prefix + router: ("BF16", [E, D], flat(matrix(router, E, D, "BF16")))}

    def refuse_convert(self, naming: str, layout: str = "concat", source: str | None = None) -> None:
        self.refuse("convert", "--from", source or str(self.folder / "source"), "--to", str(self.folder / "to"),
                    "--layout", layout, naming=naming)
        self.assertFalse((self.folder / "to").exists())
        self.assertEqual([name for name in os.listdir(self.folder) if name.startswith(".to")], [])
