#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`tessera convert`: under which names experts are found and written. usage: convert_names_test.py PROGRAM SUITE"""

import os
import pathlib
import shutil
import subprocess

import program
from checkpoints import (
    E, N, D, LAYOUTS, Checkpoints, Expert, attention, expected, flat, matrix, per_expert, read_checkpoint,
    stacked_gpt_oss, transposed)


class Names(Checkpoints):
    def test_checkpoints_of_train_with_any_router(self):
        tensors = per_expert([0])
        bias = "model.layers.0.mlp.gate.e_score_correction_bias"
        tensors[bias] = ("F32", [E], bytes(range(4 * E)))
        source = self.checkpoint(tensors, "tessera_moe")
        there = self.convert(source, "there", "interleaved")
        self.assertEqual(read_checkpoint(pathlib.Path(there))[bias], tensors[bias])
        self.same_folders(self.convert(there, "back", "huggingface"), source)

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
                     "block_sparse_moe.input_linear.weight", "mlp.input_linear.weight", "experts.fc1.weight",
                     "experts.<e>.up_proj.weight", "experts.up_proj"):
            self.refuse_convert(name)
            help_text = self.run_tessera("convert", "--help", code=0).stdout
            self.assertIn(name, "".join(help_text.split()))

    def test_layers_that_predict_further_tokens_are_not_counted(self):
        source = self.checkpoint(per_expert([0, 1]), num_hidden_layers=1, num_nextn_predict_layers=1)
        self.same_folders(self.convert(self.convert(source, "there", "concat"), "back", "huggingface"), source)
    def plain(self, naming: str, layer: int = 0) -> dict:
        """Experts without a gate, as Nemotron has them: a tensor per matrix, or stacked."""
        experts, prefix = [Expert(layer, e) for e in range(E)], f"backbone.layers.{layer}.mixer.experts"
        if naming == "per expert":
            return {f"{prefix}.{e}.{name}_proj.weight": ("BF16", shape, flat(rows)) for e, x in enumerate(experts)
                    for name, shape, rows in (("down", [D, N], x.down), ("up", [N, D], x.up))}
        turned = naming == "transposed"
        names = ("w_up", "w_down") if naming in ("concat", "transposed") else ("up_proj", "down_proj")
        return {f"{prefix}.{name}": ("BF16", [E, *(shape[::-1] if turned else shape)],
                                     flat(*(transposed(rows) if turned else rows for rows in matrices)))
                for name, shape, matrices in ((names[0], [N, D], [x.up for x in experts]),
                                              (names[1], [D, N], [x.down for x in experts]))}

    def test_experts_without_a_gate(self):
        for naming in "per expert", "stacked":
            for model_type in "nemotron_h", "a_new_model":
                source = self.checkpoint(self.plain(naming) | attention(0, "BF16"), model_type)
                for layout, other in ("concat", "transposed"), ("transposed", "concat"):
                    with self.subTest(naming, layout=layout):
                        there = self.convert(source, "there", layout)
                        self.assertEqual(read_checkpoint(pathlib.Path(there)),
                                         self.plain(layout) | attention(0, "BF16"))
                        self.same_folders(self.convert(there, "back", "huggingface"), source)
                        self.same_folders(self.convert(there, "other", other), self.convert(source, "direct", other))
                        os.unlink(os.path.join(there, "tessera_conversion.json"))
                        if model_type == "nemotron_h":
                            anew = read_checkpoint(pathlib.Path(self.convert(there, "anew", "huggingface")))
                            self.assertEqual(anew, self.plain("per expert") | attention(0, "BF16"))
                        for made in "there", "back", "other", "direct", "anew":
                            shutil.rmtree(self.folder / made, ignore_errors=True)
                for layout in "separate", "interleaved", "up-first", "blocked:4", "transposed-interleaved":
                    self.refuse_convert(f"layout {layout}: the experts of backbone.layers.0.mixer.experts have no gate",
                                        layout)
                shutil.rmtree(source)

    def test_attention_of_jetmoe_stays_as_it_is(self):
        """Its projections of queries have the names of experts."""
        experts, prefix = [Expert(0, e) for e in range(E)], "model.layers.0."
        others = {f"{prefix}self_attention.experts.{name}_linear.weight":
                  ("BF16", shape, flat(*(matrix(f"{name} {e}", shape[1], shape[2], "BF16") for e in range(E))))
                  for name, shape in (("input", [E, 2, D]), ("output", [E, D, 2]))}
        source = self.checkpoint(others | {
            prefix + "mlp.input_linear.weight": ("BF16", [E, 2 * N, D], flat(*(x.gate + x.up for x in experts))),
            prefix + "mlp.output_linear.weight": ("BF16", [E, D, N], flat(*(x.down for x in experts)))}, "jetmoe")
        there = self.convert(source, "there", "interleaved")
        self.assertEqual(read_checkpoint(pathlib.Path(there)),
                         expected("interleaved", 0, prefix + "mlp", False) | others)
        self.same_folders(self.convert(there, "back", "huggingface"), source)

    def test_aria_stores_columns(self):
        experts, prefix = [Expert(0, e) for e in range(E)], "language_model.model.layers.0.mlp.experts."
        source = self.checkpoint({
            prefix + "fc1.weight": ("BF16", [E, D, 2 * N], flat(*(transposed(x.gate + x.up) for x in experts))),
            prefix + "fc2.weight": ("BF16", [E, N, D], flat(*(transposed(x.down) for x in experts)))}, "aria")
        there = self.convert(source, "there", "separate")
        self.assertEqual(read_checkpoint(pathlib.Path(there)), expected("separate", 0, prefix[:-1], False))
        self.same_folders(self.convert(there, "back", "huggingface"), source)


if __name__ == "__main__":
    program.main({"convert_names": Names})
