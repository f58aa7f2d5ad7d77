# SPDX-License-Identifier: Apache-2.0
"""`tessera convert` with tiny models that transformers itself saved. usage: convert_families_test.py PROGRAM"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

try:
    import torch
    import transformers
    from safetensors.torch import load_file
except ModuleNotFoundError as missing:
    print(f"skipped: {missing}; tools/bootstrap.sh python installs it")
    sys.exit(77)

from families import FAMILIES

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class Families(unittest.TestCase):
    def convert(self, source: pathlib.Path, target: pathlib.Path, layout: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.argv[1], "convert", "--from", source, "--to", target, "--layout", layout],
                              capture_output=True, text=True)

    def test_there_and_back(self):
        """Every byte comes back, transformers loads it, and one expert more in config.json is refused."""
        for family, sizes in FAMILIES.items():
            with self.subTest(family), tempfile.TemporaryDirectory() as name:
                folder = pathlib.Path(name)
                source, there, back = folder / "source", folder / "there", folder / "back"
                torch.manual_seed(0)
                config = transformers.AutoConfig.for_model(family.split()[0], **sizes)
                model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
                model.save_pretrained(source)
                layout = "transposed" if family.startswith("nemotron_h") else "interleaved"  # no gate, no order
                for step in (source, there, layout), (there, back, "huggingface"):
                    done = self.convert(*step)
                    self.assertEqual(done.returncode, 0, done.stderr)
                self.assertNotEqual((there / "model.safetensors").read_bytes(),
                                    (source / "model.safetensors").read_bytes())
                self.assertEqual(sorted(p.name for p in source.iterdir()), sorted(p.name for p in back.iterdir()))
                for path in source.iterdir():
                    self.assertEqual(path.read_bytes(), (back / path.name).read_bytes(), path.name)
                loaded = transformers.AutoModelForCausalLM.from_pretrained(back).state_dict()
                for key, tensor in model.state_dict().items():
                    self.assertTrue(torch.equal(tensor, loaded[key]), key)
                (there / "tessera_conversion.json").unlink()  # then the names follow from the model type alone
                done = self.convert(there, folder / "anew", "huggingface")
                self.assertEqual(done.returncode, 0, done.stderr)
                first, anew = (load_file(path / "model.safetensors") for path in (source, folder / "anew"))
                self.assertEqual(sorted(first), sorted(anew))
                for key, tensor in first.items():
                    self.assertTrue(torch.equal(tensor, anew[key]), key)
                stated = json.loads((source / "config.json").read_text())
                for key in COUNTS:
                    if key in stated:
                        stated[key] += 1
                (source / "config.json").write_text(json.dumps(stated))
                done = self.convert(source, folder / "wrong", layout)
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertIn("= 5, but the files hold experts: 4", done.stderr)
                self.assertFalse((folder / "wrong").exists())


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
