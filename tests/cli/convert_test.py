#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`tessera convert`: every layout there and back, byte for byte. usage: convert_test.py PROGRAM SUITE

Checkpoints are written here by hand, from the format's description and Hugging Face's names, so that the
program meets files that it did not write itself. Element k of a layer's weight has its own bits: a permuted,
lost or doubled element shows.
"""

import json
import os
import pathlib
import random
import resource
import signal
import struct
import subprocess
import tempfile
import time

import program
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


class Convert(Checkpoints):
    def test_every_layout_and_back(self):
        tensors = per_expert([0, 2])
        source = self.checkpoint(tensors)
        for layout in LAYOUTS:
            with self.subTest(layout):
                there = self.convert(source, layout, layout)
                made = read_checkpoint(pathlib.Path(there))
                for layer in (0, 2):
                    for name, tensor in expected(layout, layer, f"model.layers.{layer}.mlp.experts", False).items():
                        self.assertEqual(made.pop(name), tensor, name)
                rest = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
                self.assertEqual(made, rest)
                self.same_folders(self.convert(there, layout + "-back", "huggingface"), source)

    def test_a_target_that_is_not_utf8(self):
        source = self.checkpoint(per_expert([0]))
        target = os.path.join(os.fsencode(self.folder), b"t\xff")
        done = subprocess.run([program.PROGRAM, "convert", "--from", source, "--to", target, "--layout", "separate",
                               "--json"], capture_output=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        summary = json.loads(done.stdout)
        self.assertEqual((summary["end"], summary["to"]), ("finished", str(self.folder / "t\ufffd")))
        self.same_folders(os.fsdecode(target), self.convert(source, "there", "separate"))

    def test_goes_on_without_stderr(self):
        source = self.checkpoint(per_expert([0]))
        good = self.convert(source, "good", "separate")
        command = ["convert", "--from", source, "--layout", "separate", "--to"]
        for kind in program.BROKEN:
            with self.subTest(kind):
                to = str(self.folder / kind)
                done = program.run_broken(kind, "stderr", *command, to)
                self.assertEqual(done.returncode, 0)
                self.assertTrue(done.stdout.decode().startswith(to + ": 1 layers of experts, "), done.stdout)
                self.same_folders(to, good)

    def test_checkpoints_of_train_with_any_router(self):
        tensors = per_expert([0])
        bias = "model.layers.0.mlp.gate.e_score_correction_bias"
        tensors[bias] = ("F32", [E], bytes(range(4 * E)))
        source = self.checkpoint(tensors, "tessera_moe")
        there = self.convert(source, "there", "interleaved")
        self.assertEqual(read_checkpoint(pathlib.Path(there))[bias], tensors[bias])
        self.same_folders(self.convert(there, "back", "huggingface"), source)

    def test_sharded_and_back(self):
        source = self.checkpoint(per_expert([0, 1, 2]), shards=4)
        there = self.convert(source, "there", "interleaved", "--shard-gb", "1e-6")
        files = sorted(pathlib.Path(there).glob("model-*.safetensors"))
        self.assertGreater(len(files), 1)
        index = json.loads(pathlib.Path(there, "model.safetensors.index.json").read_text())
        self.assertEqual(index["metadata"]["total_size"],
                         sum(len(data) for _, _, data in read_checkpoint(pathlib.Path(there)).values()))
        for path in files:
            for name in read_safetensors(path):
                self.assertEqual(index["weight_map"].pop(name), path.name)
        self.assertEqual(index["weight_map"], {})
        self.same_folders(self.convert(there, "back", "huggingface"), source)

    def test_between_layouts(self):
        """a -> b -> c is a -> c, and the way back still gives the source."""
        source = self.checkpoint(per_expert([0], ("w1", "w3", "w2"), "block_sparse_moe", "F32"), "mixtral")
        a = self.convert(source, "a", "transposed-interleaved")
        b = self.convert(a, "b", "separate")
        c = self.convert(b, "c", "up-first")
        self.same_folders(c, self.convert(source, "direct", "up-first"))
        self.same_folders(self.convert(c, "back", "huggingface"), source)

    def test_gpt_oss_with_biases(self):
        source = self.checkpoint(stacked_gpt_oss([0, 1]), "gpt_oss", shards=2)
        for layout in LAYOUTS:
            with self.subTest(layout):
                there = self.convert(source, layout, layout)
                made = read_checkpoint(pathlib.Path(there))
                for layer in (0, 1):
                    for name, tensor in expected(layout, layer, f"model.layers.{layer}.mlp.experts", True).items():
                        self.assertEqual(made[name], tensor, name)
                self.same_folders(self.convert(there, layout + "-back", "huggingface"), source)

    def test_stacked_concat_of_other_models(self):
        """transformers 5 may write [E,2N,D] and [E,D,N] under the names that gpt-oss has for [E,D,2N]."""
        experts = [Expert(0, e) for e in range(E)]
        prefix = "model.layers.0.mlp.experts."
        source = self.checkpoint({
            prefix + "gate_up_proj": ("BF16", [E, 2 * N, D], flat(*(x.gate + x.up for x in experts))),
            prefix + "down_proj": ("BF16", [E, D, N], flat(*(x.down for x in experts)))})
        there = self.convert(source, "there", "up-first")
        self.assertEqual(read_checkpoint(pathlib.Path(there)), expected("up-first", 0, prefix[:-1], False))
        self.same_folders(self.convert(there, "back", "huggingface"), source)

    def stacked(self, block: str, router: str) -> dict:
        """As transformers 5 saves a model whose experts it stacks."""
        experts, prefix = [Expert(0, e) for e in range(E)], f"model.layers.0.{block}."
        return attention(0, "BF16") | {
            prefix + "experts.gate_up_proj": ("BF16", [E, 2 * N, D], flat(*(x.gate + x.up for x in experts))),
            prefix + "experts.down_proj": ("BF16", [E, D, N], flat(*(x.down for x in experts))),
            prefix + router: ("BF16", [E, D], flat(matrix(router, E, D, "BF16")))}

    def test_stacked_mixtral_gets_its_own_names(self):
        tensors = self.stacked("mlp", "gate.weight")
        back = self.convert(self.checkpoint(tensors, "mixtral"), "back", "huggingface")
        native = per_expert([0], ("w1", "w3", "w2"), "block_sparse_moe")
        native = {name: tensor for name, tensor in native.items() if ".experts." in name} | attention(0, "BF16") | {
            "model.layers.0.block_sparse_moe.gate.weight": tensors["model.layers.0.mlp.gate.weight"]}
        self.assertEqual(read_checkpoint(pathlib.Path(back)), native)
        there = self.convert(back, "there", "interleaved")
        self.same_folders(self.convert(there, "again", "huggingface"), back)
        os.unlink(os.path.join(there, "tessera_conversion.json"))
        self.assertEqual(read_checkpoint(pathlib.Path(self.convert(there, "anew", "huggingface"))), native)

    def test_stacked_granite_gets_its_own_names(self):
        tensors = self.stacked("block_sparse_moe", "router.layer.weight")
        source = self.checkpoint(tensors, "granitemoe")
        back = self.convert(source, "back", "huggingface")
        prefix = "model.layers.0.block_sparse_moe."
        names = {"experts.gate_up_proj": "input_linear.weight", "experts.down_proj": "output_linear.weight"}
        native = {prefix + names.get(name.removeprefix(prefix), "") if "experts" in name else name: tensor
                  for name, tensor in tensors.items()}
        self.assertEqual(read_checkpoint(pathlib.Path(back)), native)
        self.same_folders(self.convert(self.convert(back, "there", "up-first"), "again", "huggingface"), back)
        there = self.convert(source, "stacked", "concat")
        self.same_folders(self.convert(there, "stacked-back", "huggingface"), source)

    def test_refuses_experts_that_the_model_type_has_no_names_for(self):
        self.checkpoint(self.stacked("mlp", "gate.weight"), "granitemoe")
        self.refuse_convert("no place", "huggingface")

    def test_without_the_conversion_file(self):
        """Names and bits come back; the cut into files and the order of tensors may differ."""
        tensors = per_expert([0, 1])
        there = self.convert(self.checkpoint(tensors), "there", "interleaved")
        os.unlink(os.path.join(there, "tessera_conversion.json"))
        back = self.convert(there, "back", "huggingface")
        self.assertEqual(read_checkpoint(pathlib.Path(back)), tensors)

    def test_a_trained_run(self):
        run, text = str(self.folder / "run"), self.folder / "text"
        text.write_bytes(random.Random(1).randbytes(4000).hex().encode())
        self.run_tessera("train", "--text", str(text), "--out", run, "--steps", "1", "--hidden", "16", "--layers",
                         "2", "--heads", "2", "--kv-heads", "1", "--head-dim", "8", "--context", "16", "--batch",
                         "1", "--experts", "4", code=0)
        there = self.convert(run, "there", "blocked:8")
        back = self.convert(there, "back", "huggingface")
        for name in ("model.safetensors", "config.json"):
            self.assertEqual(pathlib.Path(run, name).read_bytes(), pathlib.Path(back, name).read_bytes())
        self.run_json("generate", "--checkpoint", back, "--tokens", "3")
        done = self.run_tessera("generate", "--checkpoint", there, "--tokens", "3", code=2)
        self.assertIn("convert", done.stderr)

    def test_notes_what_does_not_come_along(self):
        source = self.checkpoint(per_expert([0]))
        pathlib.Path(source, "pytorch_model.bin").write_text("x")
        pathlib.Path(source, "figures").mkdir()
        done = self.run_tessera("convert", "--from", source, "--to", str(self.folder / "to"), "--layout", "concat",
                                code=0)
        self.assertIn("not copied: figures, pytorch_model.bin", done.stderr)
        self.assertTrue((self.folder / "to" / "tokenizer.json").exists())

    def test_ends_on_a_signal_and_leaves_nothing(self):
        n, d, experts = 512, 2048, 96
        weight = ("BF16", [n, d], bytes(2 * n * d))
        down = ("BF16", [d, n], weight[2])
        source = self.checkpoint({f"model.layers.0.mlp.experts.{e}.{name}_proj.weight": down if name == "down" else
                                  weight for e in range(experts) for name in ("gate", "up", "down")})
        for number in (signal.SIGINT, signal.SIGTERM):
            command = [program.PROGRAM, "convert", "--from", source, "--to", str(self.folder / "to"), "--layout",
                       "transposed", "--json"]
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            while child.poll() is None and not any(name.startswith(".to.") for name in os.listdir(self.folder)):
                time.sleep(0.001)
            child.send_signal(number)
            out, err = child.communicate()
            self.assertEqual(child.returncode, 1, err)
            self.assertEqual(json.loads(out)["end"], "stopped")
            self.assertIn("nothing was written", err)
            self.assertEqual(os.listdir(self.folder), ["source"])

    def test_disk_full(self):
        """A file size limit stands in for a full disk."""
        source = self.checkpoint(per_expert([0]))
        done = subprocess.run(
            [program.PROGRAM, "convert", "--from", source, "--to", str(self.folder / "to"), "--layout", "concat"],
            capture_output=True, text=True,
            preexec_fn=lambda: (signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
                                resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))))
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertIn("model.safetensors", done.stderr)
        self.assertEqual(os.listdir(self.folder), ["source"])

    def refuse_convert(self, naming: str, layout: str = "concat", source: str | None = None) -> None:
        self.refuse("convert", "--from", source or str(self.folder / "source"), "--to", str(self.folder / "to"),
                    "--layout", layout, naming=naming)
        self.assertFalse((self.folder / "to").exists())
        self.assertEqual([name for name in os.listdir(self.folder) if name.startswith(".to")], [])

    def test_refuses_quantised_checkpoints(self):
        tensors = per_expert([0])
        name = "model.layers.0.mlp.experts.1.up_proj.weight"
        fp8 = tensors | {name: ("F8_E4M3", [N, D], bytes(N * D))}
        prefix = "model.layers.0.mlp.experts."
        mxfp4 = {prefix + "gate_up_proj_blocks": ("U8", [E, 2 * N, 1, 16], bytes(E * 2 * N * 16)),
                 prefix + "gate_up_proj_scales": ("U8", [E, 2 * N, 1], bytes(E * 2 * N))}
        scaled = tensors | {name + "_scale_inv": ("F32", [1, 1], bytes(4))}
        for made, config, naming in ((fp8, {}, "FP8"), (mxfp4, {}, "MXFP4"), (scaled, {}, "weight_scale_inv"),
                                     (tensors, {"quantization_config": {"quant_method": "awq"}}, "awq")):
            with self.subTest(naming):
                source = self.checkpoint(made, **config)
                self.refuse_convert(naming)
                self.refuse_convert("BF16 version")  # the remedy
                subprocess.run(["rm", "-r", source], check=True)

    def test_refuses_broken_checkpoints(self):
        good = per_expert([0])
        gate, down = (f"model.layers.0.mlp.experts.1.{name}_proj.weight" for name in ("gate", "down"))

        def without(name: str) -> dict:
            return {key: tensor for key, tensor in good.items() if key != name}

        for made, naming in ((without(gate), gate), (without(down), down),
                             (good | {gate: ("BF16", [D, N], good[gate][2])}, gate),
                             (good | {gate: ("F16", [N, D], good[gate][2])}, gate),
                             ({key: tensor for key, tensor in good.items() if "experts." not in key}, "no expert")):
            with self.subTest(naming):
                source = self.checkpoint(made)
                self.refuse_convert(naming)
                subprocess.run(["rm", "-r", source], check=True)

    def test_refuses_a_config_that_contradicts_the_files(self):
        """Every kind of statement, wrong by one, of an otherwise good checkpoint; the same one right converts."""
        def layers(*indices: int) -> dict:
            tensors = per_expert(list(indices))
            for layer in indices:
                for name, shape in (("up", [N, D]), ("down", [D, N])):
                    tensors[f"model.layers.{layer}.mlp.shared_experts.{name}_proj.weight"] = ("BF16", shape,
                                                                                             bytes(2 * N * D))
            return tensors

        right = {"num_experts": E, "hidden_size": D, "moe_intermediate_size": N, "num_hidden_layers": 2,
                 "dtype": "bfloat16", "n_shared_experts": 1}
        dense_first = right | {"num_hidden_layers": 3, "first_k_dense_replace": 1}
        both, last = layers(0, 1), layers(1, 2)
        one_shared = {name.replace("shared_experts", "shared_expert"): tensor for name, tensor in both.items()}
        router = "model.layers.0.mlp.gate.weight"
        lost = "model.layers.1.mlp.shared_experts.up_proj.weight"
        for tensors, good in ((both, right), (last, dense_first)):
            source = self.checkpoint(tensors, **good)
            self.convert(source, "good", "concat")
            subprocess.run(["rm", "-r", source, str(self.folder / "good")], check=True)
        for tensors, config, naming in (
                (both, right | {"num_experts": E + 1}, f"num_experts = {E + 1}, but the files hold experts: {E}"),
                (both, right | {"num_experts": E - 1}, f"num_experts = {E - 1}, but the files hold experts: {E}"),
                (both, right | {"num_local_experts": E + 2}, f"num_local_experts = {E + 2}"),
                (both, right | {"num_experts": [E, E + 1]}, f"num_experts = {E + 1}"),
                (both, right | {"num_experts": "three"}, 'num_experts = "three"'),
                (both, right | {"hidden_size": D + 1}, f"hidden_size = {D + 1}"),
                (both, right | {"moe_intermediate_size": N + 1}, f"moe_intermediate_size = {N + 1}"),
                (both, {"intermediate_size": N + 1}, f"intermediate_size = {N + 1}"),
                (both, right | {"dtype": "float32"}, 'dtype = "float32", but the files hold BF16'),
                (both, {"torch_dtype": "float16"}, 'torch_dtype = "float16"'),
                (both, right | {"n_shared_experts": 2}, "n_shared_experts = 2"),
                (both, right | {"n_shared_experts": 0}, "n_shared_experts = 0"),
                (one_shared, {"shared_expert_intermediate_size": N + 1}, "shared_expert_intermediate_size = 9"),
                (both, right | {"num_hidden_layers": 3}, "layer 2 has experts, but the files hold none"),
                (both, right | {"num_hidden_layers": 1}, "num_hidden_layers = 1, but the files hold experts in"),
                (both, right | {"first_k_dense_replace": 1}, "layer 0 has no experts"),
                (last, dense_first | {"first_k_dense_replace": 0}, "layer 0 has experts, but the files hold none"),
                (last, dense_first | {"first_k_dense_replace": 2}, "layer 1 has no experts"),
                (both, right | {"decoder_sparse_step": 2}, "layer 0 has no experts"),
                (both, right | {"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
                (both, right | {"mlp_only_layers": [1]}, "layer 1 has no experts"),
                (both, right | {"moe_layer_freq": [1, 0]}, "layer 1 has no experts"),
                (both, right | {"moe_layer_freq": [1]}, "moe_layer_freq has 1 entries"),
                (both, right | {"mlp_layer_types": ["dense", "sparse"]}, "layer 0 has no experts"),
                (both, right | {"moe_layers": [0]}, "layer 1 has no experts"),
                (both, right | {"moe_layer_start_index": 1, "moe_layer_end_index": -1}, "layer 0 has no experts"),
                (both, right | {"expert_layer_period": 2, "expert_layer_offset": 1}, "layer 0 has no experts"),
                (both, {"text_config": right | {"num_experts": E + 1}}, f"num_experts = {E + 1}"),
                ({name: t for name, t in both.items() if name != lost}, right, lost),
                (both | {router: ("BF16", [E + 1, D], bytes(2 * (E + 1) * D))}, right, router)):
            with self.subTest(naming, config=config):
                source = self.checkpoint(tensors, **config)
                self.refuse_convert(naming)
                self.refuse_convert("take config.json and all weight files of one model")
                subprocess.run(["rm", "-r", source], check=True)

    def test_layers_that_predict_further_tokens_are_not_counted(self):
        source = self.checkpoint(per_expert([0, 1]), num_hidden_layers=1, num_nextn_predict_layers=1)
        self.same_folders(self.convert(self.convert(source, "there", "concat"), "back", "huggingface"), source)

    def test_goes_by_names_and_not_by_the_model_type(self):
        turned = {name: (dtype, [E, D, 2 * N] if "gate_up" in name else shape, data)
                  for name, (dtype, shape, data) in stacked_gpt_oss([0]).items() if not name.endswith("_bias")}
        for number, tensors in enumerate((
                per_expert([0]), per_expert([0], ("w1", "w3", "w2"), "feed_forward"),
                self.stacked("mlp", "gate.weight"), turned)):
            with self.subTest(number):
                source = self.checkpoint(tensors, "a_new_model")
                there = self.convert(source, "there", "interleaved")
                self.same_folders(self.convert(there, "back", "huggingface"), source)
                os.unlink(os.path.join(there, "tessera_conversion.json"))
                self.refuse_convert("put that file back", "huggingface", there)
                subprocess.run(["rm", "-r", source, there, str(self.folder / "back")], check=True)

    def test_transposed_matrices_are_known_by_their_shapes(self):
        """As Qwen3-VL stores them: [E,D,2N] with all gate columns first, and [E,N,D]."""
        experts, prefix = [Expert(0, e) for e in range(E)], "model.language_model.layers.0.mlp.experts."
        source = self.checkpoint({
            prefix + "gate_up_proj": ("BF16", [E, D, 2 * N], flat(*(transposed(x.gate + x.up) for x in experts))),
            prefix + "down_proj": ("BF16", [E, N, D], flat(*(transposed(x.down) for x in experts)))},
            "qwen3_vl_moe", text_config={"num_experts": E, "hidden_size": D})
        there = self.convert(source, "there", "separate")
        self.assertEqual(read_checkpoint(pathlib.Path(there)), expected("separate", 0, prefix[:-1], False))
        self.same_folders(self.convert(there, "back", "huggingface"), source)

    def test_lists_the_known_names(self):
        self.checkpoint(attention(0, "BF16"))
        for name in ("experts.<e>.gate_proj.weight", "experts.<e>.w1.weight", "experts.gate_up_proj",
                     "block_sparse_moe.input_linear.weight"):
            self.refuse_convert(name)
            help_text = self.run_tessera("convert", "--help", code=0).stdout
            self.assertIn(name, "".join(help_text.split()))

    def test_refuses_leftover_experts(self):
        experts, good = [Expert(1, e) for e in range(E)], per_expert([0])

        def stacked(layer: int) -> dict:
            prefix = f"model.layers.{layer}.mlp.experts."
            return {prefix + "gate_up_proj": ("BF16", [E, 2 * N, D], flat(*(x.gate + x.up for x in experts))),
                    prefix + "down_proj": ("BF16", [E, D, N], flat(*(x.down for x in experts)))}

        bias = "model.layers.0.mlp.experts.0.gate_proj.bias"
        router = "model.layers.0.block_sparse_moe.gate.weight"
        for made, model_type, naming in (
                (good | stacked(0), "qwen3_moe", "mlp.experts.0.down_proj.weight"),
                (good | stacked(1), "qwen3_moe", "mlp.experts.0.down_proj.weight"),
                (good | {bias: ("BF16", [N], bytes(2 * N))}, "qwen3_moe", bias),
                (self.stacked("mlp", "gate.weight") | {router: ("BF16", [E, D], bytes(2 * E * D))}, "mixtral",
                 router)):
            with self.subTest(naming):
                source = self.checkpoint(made, model_type)
                self.refuse_convert(naming, "huggingface")
                if naming != router:
                    self.refuse_convert(naming)
                subprocess.run(["rm", "-r", source], check=True)

    def test_refuses_broken_folders(self):
        self.refuse_convert("no such folder")
        source = pathlib.Path(self.checkpoint(per_expert([0]), shards=2))
        index = source / "model.safetensors.index.json"
        whole = json.loads(index.read_text())
        shard = source / "model-00002-of-00002.safetensors"
        saved = shard.read_bytes()
        for change, naming in (("../x.safetensors", "of this folder"), (3, "of this folder"),
                               ("model-00001-of-00002.safetensors", "as the index says")):
            name = sorted(read_safetensors(shard))[0]
            index.write_text(json.dumps({"weight_map": whole["weight_map"] | {name: change}}))
            self.refuse_convert(naming)
        index.write_text(json.dumps({"weight_map": whole["weight_map"] | {"extra": shard.name}}))
        self.refuse_convert("extra")
        for text, naming in (("[]", "weight_map"), ("{", "JSON"), ("{}", "weight_map"),
                             ('{"weight_map": {}}', "weight_map is missing, empty")):
            index.write_text(text)
            self.refuse_convert(naming)
        index.write_text(json.dumps(whole))
        shard.write_bytes(saved[:-1])
        self.refuse_convert(shard.name)
        shard.unlink()
        self.refuse_convert(shard.name)
        shard.write_bytes(saved)
        (source / "model.safetensors").write_bytes(saved)
        self.refuse_convert("both")
        (source / "model.safetensors").unlink()
        (source / "config.json").write_text("[]")
        self.refuse_convert("config.json")
        (source / "config.json").unlink()
        self.refuse_convert("config.json")

    def test_refuses_experts_without_a_gate(self):
        tensors = {name: tensor for name, tensor in per_expert([0]).items() if ".gate_proj." not in name}
        self.checkpoint(tensors)
        self.refuse_convert("experts without a gate")

    def test_refuses_bad_flags_and_targets(self):
        source = self.checkpoint(per_expert([0]))
        self.refuse_convert("diagonal", "diagonal")
        self.refuse_convert("does not divide n = 8", "blocked:3")
        self.refuse("convert", "--from", source, naming="--to")
        for size in "nan", "0", "inf":
            self.refuse("convert", "--from", source, "--to", str(self.folder / "to"), "--layout", "concat",
                        "--shard-gb", size, naming=size)
        (self.folder / "full").mkdir()
        (self.folder / "full" / "precious").write_text("x")
        for target in (self.folder / "full", pathlib.Path(source), self.folder / "source" / "config.json"):
            self.refuse("convert", "--from", source, "--to", str(target), "--layout", "concat", naming="--to")
        self.assertEqual((self.folder / "full" / "precious").read_text(), "x")
        (self.folder / "empty").mkdir()
        self.convert(source, "empty", "concat")  # an empty folder is no obstacle

    def test_refuses_a_conversion_file_that_does_not_fit(self):
        there = pathlib.Path(self.convert(self.checkpoint(per_expert([0])), "there", "concat"))
        path = there / "tessera_conversion.json"
        record = json.loads(path.read_text())
        weights = there / "model.safetensors"
        tensors = read_safetensors(weights)
        weights.write_bytes(safetensors(tensors | {"extra": ("F32", [1], b"abcd")}, {"tessera_layout": "concat"}))
        self.refuse_convert("delete that file", "huggingface", str(there))
        weights.write_bytes(safetensors(tensors, {"tessera_layout": "concat"}))
        for change, naming in (({"format": 2}, "format"), ({"files": []}, "files"),
                               ({"now": {"naming": "tessera", "layout": "diagonal"}}, "layout"),
                               ({"files": [{"name": "../x", "header": "{}"}]}, "../x"),
                               ({"files": [{"name": "x.safetensors", "header": "{"}]}, "JSON"),
                               ({"files": record["files"] * 2}, "twice"),
                               ({"files": [record["files"][0] | {"name": "config.json"}]}, "config.json"),
                               ({"now": {"naming": "tessera", "layout": "up-first"}}, "tessera_layout"),
                               ({"now": {"naming": "per-expert", "layout": "separate"}}, "tessera_layout")):
            path.write_text(json.dumps(record | change))
            self.refuse_convert(naming, "huggingface", str(there))
        # One tensor in two files, and another in none.
        header = json.loads(record["files"][0]["header"])
        name, lost = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"
        del header[lost], header["__metadata__"]
        entries, offset = sorted(header.items(), key=lambda item: item[1]["data_offsets"]), 0
        for _, entry in entries:
            size = entry["data_offsets"][1] - entry["data_offsets"][0]
            entry["data_offsets"] = [offset, offset + size]
            offset += size
        size = header[name]["data_offsets"][1] - header[name]["data_offsets"][0]
        again = {name: header[name] | {"data_offsets": [0, size]}}
        path.write_text(json.dumps(record | {"files": [
            {"name": "a.safetensors", "header": json.dumps(header)},
            {"name": "b.safetensors", "header": json.dumps(again)}]}))
        self.refuse_convert(name, "huggingface", str(there))


class ConvertMemory(Checkpoints):
    def test_takes_bounded_memory(self):
        """A checkpoint of 128 MiB, an expert of 1 MiB, and 48 MiB of memory."""
        n, d, experts = 512, 341, 128
        weight = ("BF16", [n, d], random.Random(0).randbytes(2 * n * d))
        down = ("BF16", [d, n], weight[2])
        tensors = {f"model.layers.0.mlp.experts.{e}.{name}_proj.weight": down if name == "down" else weight
                   for e in range(experts) for name in ("gate", "up", "down")}
        source = self.checkpoint(tensors)
        command = [program.PROGRAM, "convert", "--from", source, "--to", str(self.folder / "to"), "--layout",
                   "transposed"]
        self.assertGreater(os.path.getsize(os.path.join(source, "model.safetensors")), 120 << 20)
        limit = 48 << 20
        done = subprocess.run(command, capture_output=True, text=True,
                              preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)))
        self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    program.main({"convert": Convert, "convert_memory": ConvertMemory})
