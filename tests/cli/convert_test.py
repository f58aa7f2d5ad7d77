#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`tessera convert`: every layout there and back, byte for byte. usage: convert_test.py PROGRAM SUITE"""

import json
import os
import pathlib
import random
import resource
import signal
import subprocess
import time

import program
from checkpoints import (
    LAYOUTS, Checkpoints, expected, per_expert, read_checkpoint, read_safetensors)


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
