# SPDX-License-Identifier: Apache-2.0
"""torchtitan's own Trainer on the CPU, for torchtitan_test.py: a Qwen3 MoE of two layers, FSDP2 over the ranks, gloo.

    torchtitan_program.py JSON

JSON: seam (stock, zeros, or how Tessera computes the experts), ep, steps, folder (of checkpoints), interval, load (the
step to go on from, or 0), results. Rank 0 writes the losses of the steps that were run.
"""

import json
import os
import pathlib
import sys
from dataclasses import dataclass

import frameworks
import torch

VOCABULARY, LENGTH = 256, 64


def shim_the_cpu() -> None:
    """What torchtitan asks of torch.cuda and asks of torch.cpu in vain, before it is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.get_device_name = lambda *_: "cpu"
    torch.cpu.get_device_properties = lambda *_: type("Properties", (), {"total_memory": 1 << 34})()
    torch.cpu.memory_stats = lambda *_: {}
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda *_: None
    torch.cpu.current_device = lambda: 0
    torch.distributed.set_timeout = lambda *_, **__: None


def text_of_its_own():
    """A tokenizer of bytes, and a dataset that needs no network: sentences with a rule to learn."""
    import datasets
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.hf_datasets import DatasetConfig, text_datasets

    class Bytes(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config, **_):
            super().__init__()
            self.eos_id = 0

        def encode(self, text, **_):
            return list(text.encode())

        def decode(self, ids, **_):
            return bytes(ids).decode()

        def get_vocab_size(self):
            return VOCABULARY

    def load(_path):
        return datasets.Dataset.from_dict({"text": [f"{i} plus {i % 7} is {i + i % 7}. " * 8 for i in range(200)]})

    text_datasets.DATASETS["sums"] = DatasetConfig(path="", loader=load, sample_processor=lambda s: s["text"])
    return Bytes.Config()


def attention_of_the_cpu(model) -> None:
    """FlexAttention has no backward pass on a CPU."""
    from torchtitan.models.common import attention

    for _, config, parent, name in list(model.traverse(attention.FlexAttention.Config)):
        plain = attention.ScaledDotProductAttention.Config()
        if isinstance(parent, list):
            parent[name] = plain
        else:
            setattr(parent, name, plain)


def configuration(case: dict):
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
    from torchtitan.config.override import OverrideConfig
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
    from torchtitan.models import qwen3
    from torchtitan.models.common.moe import RoutedExperts
    from torchtitan.trainer import Trainer

    spec = qwen3.model_registry("debugmodel_moe")
    model = spec.model
    model.vocab_size = VOCABULARY
    model.tok_embeddings.num_embeddings = model.lm_head.out_features = VOCABULARY
    del model.layers[2:]
    for _, routed, _, _ in model.traverse(RoutedExperts.Config):
        routed.inner_experts.hidden_dim = 64
    attention_of_the_cpu(model)
    overrides = case["seam"] in ("routed_experts", "grouped_experts")
    imports = [f"tessera.integrations.torchtitan.{case['seam']}"] if overrides else []
    return Trainer.Config(
        model_spec=spec, tokenizer=text_of_its_own(), dump_folder=case["folder"],
        dataloader=HuggingFaceTextDataLoader.Config(dataset="sums"), loss=CrossEntropyLoss.Config(),
        optimizer=default_adamw(lr=5e-4), metrics=MetricsProcessor.Config(log_freq=1),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
        training=TrainingConfig(local_batch_size=2, seq_len=LENGTH, steps=case["steps"], disable_cuda_graphs=True),
        parallelism=ParallelismConfig(expert_parallel_degree=case["ep"], spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(enable=case["interval"] > 0, interval=case["interval"] or 1,
                                            load_step=case["load"] or -1, last_save_model_only=False),
        activation_checkpoint=None, debug=DebugConfig(seed=7, deterministic=False),
        override=OverrideConfig(imports=imports))


def main(case: dict) -> None:
    shim_the_cpu()
    from torchtitan.trainer import Trainer

    losses = []
    config = configuration(case)
    if case["seam"] == "zeros":
        from torchtitan.models.common.moe import GroupedExperts

        GroupedExperts.forward = lambda self, x, counts: 0 * x
    if case["seam"] == "use_tessera":
        from tessera.integrations import torchtitan as seam

        build = type(config.model_spec.model).build

        def build_and_replace(self, **options):
            model = build(self, **options)
            assert seam.use_tessera(model) == 2
            return model

        type(config.model_spec.model).build = build_and_replace
    trainer = Trainer(config)
    for part in trainer.model_parts:
        for module in part.modules():
            if hasattr(module, "set_force_sum_reduction_for_comms"):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    log = trainer.metrics_processor.log

    def keep(step, average, *rest, **more):
        losses.append(average)
        return log(step, average, *rest, **more)

    trainer.metrics_processor.log = keep
    names = {type(m).__module__ for p in trainer.model_parts for m in p.modules() if "RoutedExperts" in type(m).__name__
             or "GroupedExperts" in type(m).__name__}
    trainer.train()
    trainer.close()
    if os.environ["RANK"] == "0":
        pathlib.Path(case["results"]).write_text(json.dumps({"losses": losses, "modules": sorted(names)}))
    frameworks.end()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
