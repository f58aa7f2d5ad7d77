# SPDX-License-Identifier: Apache-2.0
"""`tessera plan --hf` with configurations that transformers itself saved. usage: plan_families_test.py PROGRAM"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

try:
    import torch
    import transformers
except ModuleNotFoundError as missing:
    print(f"skipped: {missing}; tools/bootstrap.sh python installs it")
    sys.exit(77)

from families import FAMILIES

# What plan does not count, and the word by which it says why.
UNCLEAR = {"ernie4_5_moe": "router", "jamba": "Mamba", "jetmoe": "attention", "lfm2_moe": "convolutions",
           "llama4_text": "router", "nemotron_h": "Mamba", "phimoe": "sparse mixer"}
# Of nested configurations: the type of the whole, by that of its language model.
WHOLE = {"aria_text": "aria", "qwen3_5_moe_text": "qwen3_5_moe"}


class Families(unittest.TestCase):
    def plan(self, config: dict) -> subprocess.CompletedProcess:
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "config.json")
            path.write_text(json.dumps(config))
            return subprocess.run([sys.argv[1], "plan", "--hf", path, "--json"], capture_output=True, text=True)

    def test_parameters_are_those_of_transformers(self):
        """To the last one, the bias by which experts are selected included; or a refusal that says what is unclear."""
        counted = 0
        for name, sizes in FAMILIES.items():
            family = name.split()[0]
            config = transformers.AutoConfig.for_model(family, **sizes)
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config)
            biases = sum(b.numel() for n, b in model.named_buffers() if n.endswith("e_score_correction_bias"))
            parameters = sum(p.numel() for p in model.parameters()) + biases
            plain = json.loads(config.to_json_string())
            nested = [{"model_type": WHOLE[family], "text_config": plain}] if family in WHOLE else []
            for stated in [plain, *nested]:
                with self.subTest(name, model_type=stated["model_type"]):
                    done = self.plan(stated)
                    if family in UNCLEAR:
                        self.assertEqual(done.returncode, 2, done.stdout)
                        self.assertIn(UNCLEAR[family], done.stderr)
                        continue
                    self.assertEqual(done.returncode, 0, done.stderr)
                    self.assertEqual(json.loads(done.stdout)["model"]["parameters"]["total"], parameters)
                    counted += 1
        self.assertGreaterEqual(counted, 18)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
