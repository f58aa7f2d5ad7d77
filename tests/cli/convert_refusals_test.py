#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `tessera convert` refuses, and by which name. usage: convert_refusals_test.py PROGRAM SUITE"""

import json
import pathlib
import subprocess

import program
from checkpoints import E, N, D, Checkpoints, Expert, flat, per_expert, read_safetensors, safetensors


class Refusals(Checkpoints):
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

    def test_refuses_gates_that_are_lost_or_too_many(self):
        """Without its gate projections a gated model looks like one without gates."""
        whole = per_expert([0, 1])
        lost = {name: tensor for name, tensor in whole.items() if ".gate_proj." not in name}
        half = {name: tensor for name, tensor in whole.items() if ".0.mlp" in name or name in lost}
        for tensors, model_type, naming in (
                (lost, "qwen3_moe", 'model_type = "qwen3_moe" has experts with a gate, but the files hold no gate'),
                (half, "qwen3_moe", 'model_type = "qwen3_moe" has experts with a gate, but the files hold no gate'),
                (half, "a_new_model", "but the files hold no gate projections in model.layers.1.mlp.experts"),
                (whole, "nemotron_h", 'model_type = "nemotron_h" has experts without a gate')):
            with self.subTest(naming):
                source = self.checkpoint(tensors, model_type)
                self.refuse_convert(naming)
                subprocess.run(["rm", "-r", source], check=True)

    def test_refuses_a_config_of_other_layers_of_nemotron(self):
        plain = {name.replace("model.layers", "backbone.layers").replace("mlp", "mixer"): tensor
                 for name, tensor in per_expert([1]).items() if ".gate_proj." not in name}
        kinds = ["mamba", "moe"]
        wide = {"backbone.layers.1.mixer.gate.weight": ("BF16", [E, 2 * D], bytes(4 * E * D))}
        for tensors, config, naming in (
                (plain, {"layers_block_type": kinds}, None), (plain, {"hybrid_override_pattern": "ME"}, None),
                (plain, {"hybrid_override_pattern": "ME", "num_hidden_layers": 2}, None),
                (plain | wide, {"layers_block_type": kinds, "hidden_size": 2 * D, "moe_latent_size": D}, None),
                (plain, {"layers_block_type": kinds + ["moe"]}, "layer 2 has experts, but the files hold none"),
                (plain, {"layers_block_type": ["moe", "moe"]}, "layer 0 has experts, but the files hold none"),
                (plain, {"layers_block_type": ["mamba", "mlp"]}, "layer 1 has no experts"),
                (plain, {"hybrid_override_pattern": "MM"}, "layer 1 has no experts"),
                (plain, {"hybrid_override_pattern": "ME", "num_hidden_layers": 3}, "has 2 entries"),
                (plain, {"layers_block_type": kinds, "moe_latent_size": D + 1}, f"moe_latent_size = {D + 1}"),
                (plain, {"layers_block_type": kinds, "hidden_size": D + 1}, f"hidden_size = {D + 1}"),
                (plain, {"layers_block_type": kinds, "hidden_size": D + 1, "moe_latent_size": D}, "gate.weight is")):
            with self.subTest(naming, config=config):
                source = self.checkpoint(tensors, "nemotron_h", **config)
                if naming is None:
                    self.convert(source, "good", "concat")
                    subprocess.run(["rm", "-r", str(self.folder / "good")], check=True)
                else:
                    self.refuse_convert(naming)
                subprocess.run(["rm", "-r", source], check=True)

    def test_refuses_a_tensor_that_stands_in_two_shards(self):
        """Of an expert or not, with the same bits or others, in the shard that the index names and in another."""
        tensors = per_expert([0])
        for name in "model.layers.0.mlp.experts.1.up_proj.weight", "model.embed_tokens.weight":
            for flip in 0, 1:
                source = pathlib.Path(self.checkpoint(tensors, shards=2))
                index = json.loads((source / "model.safetensors.index.json").read_text())
                (other,) = set(index["weight_map"].values()) - {index["weight_map"][name]}
                dtype, shape, data = tensors[name]
                again = {name: (dtype, shape, bytes([data[0] ^ flip]) + data[1:])}
                (source / other).write_bytes(safetensors(read_safetensors(source / other) | again))
                with self.subTest(name, flip=flip):
                    self.refuse_convert(f"tensor {name} is in an earlier shard, too")
                subprocess.run(["rm", "-r", str(source)], check=True)

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


if __name__ == "__main__":
    program.main({"convert_refusals": Refusals})
