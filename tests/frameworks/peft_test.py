# SPDX-License-Identifier: Apache-2.0
"""PEFT: LoRA on the experts' own parameters trains a model whose experts Tessera computes as it trains the model's."""

import unittest

import frameworks

frameworks.needs("torch", "transformers", "peft")


class Lora(unittest.TestCase):
    def losses(self, experts: str) -> list:
        import huggingface
        import peft
        import torch

        model = peft.get_peft_model(huggingface.build(experts), peft.LoraConfig(
            r=4, lora_alpha=16, target_modules=[],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]))
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.assertTrue(trained and all("lora_" in name and "experts" in name for name in trained), list(trained))
        torch.manual_seed(3)
        with torch.no_grad():  # lora_B begins with zeros, behind which lora_A has no gradient
            for name, parameter in trained.items():
                if "lora_B" in name:
                    parameter.normal_(std=0.2)
        before = {name: p.detach().clone() for name, p in trained.items()}
        losses = huggingface.train(model, huggingface.batches(4), torch.optim.AdamW(trained.values(), lr=2e-2))
        if experts != "zeros":
            for name, parameter in trained.items():
                self.assertFalse(torch.equal(parameter, before[name]), f"{name} was not trained")
        return losses

    def test_losses_are_those_of_the_models_own_experts(self):
        frameworks.check_losses(self, self.losses("tessera"), self.losses("eager"), 1e-5, self.losses("zeros"))


if __name__ == "__main__":
    unittest.main()
