# SPDX-License-Identifier: Apache-2.0
"""The families of huggingface_test.py on a GPU in bf16, of sizes that the fast kernels serve."""

import gpu
import huggingface_test
import torch


class CudaFamilies(huggingface_test.Bf16Families):
    device = "cuda"

    def sizes(self, family: str) -> dict:
        """One layer with experts: its routing is the same for both implementations, as their inputs are equal."""
        sizes = {"hidden_size": 256, "initializer_range": 0.07}
        if family in ("deepseek_v3", "glm4_moe"):  # the first layer is dense
            return {**sizes, "moe_intermediate_size": 128}
        if family == "qwen3_next":  # a layer of each kind of attention
            return {**sizes, "moe_intermediate_size": 128, "mlp_only_layers": [0]}
        if family == "gpt_oss":
            sizes["layer_types"] = ["full_attention"]
        width = "moe_intermediate_size" if "moe_intermediate_size" in huggingface_test.FAMILIES[family] \
            else "intermediate_size"
        return {**sizes, width: 128, "num_hidden_layers": 1}

    def test_generate_takes_the_same_tokens_again(self):
        model = huggingface_test.build("qwen3_moe", **self.sizes("qwen3_moe")).to("cuda").bfloat16().eval()
        model.set_experts_implementation("tessera")
        ids = torch.randint(3, 97, (2, 5), generator=torch.Generator().manual_seed(1)).to("cuda")
        options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        first, second = (model.generate(ids, **options) for _ in range(2))
        self.assertTrue(torch.equal(first, second))

    def test_gradient_checkpointing_has_equal_bits(self):
        model = huggingface_test.build("qwen3_moe").to("cuda").bfloat16().train()
        model.set_experts_implementation("tessera")
        ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(1)).to("cuda")
        loss, _, gradients = huggingface_test.step(model, ids)
        gradients = {name: gradient.clone() for name, gradient in gradients.items() if gradient is not None}
        model.gradient_checkpointing_enable()
        again, _, recomputed = huggingface_test.step(model, ids)
        self.assertTrue(torch.equal(loss, again))
        for name, gradient in gradients.items():
            if "experts" in name:
                self.assertTrue(torch.equal(gradient, recomputed[name]), name)


if __name__ == "__main__":
    gpu.main()
