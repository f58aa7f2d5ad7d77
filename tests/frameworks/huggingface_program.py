# SPDX-License-Identifier: Apache-2.0
"""Two ranks that train the model of huggingface.py, for transformers_test.py.

    huggingface_program.py JSON

JSON: way (fsdp2 or accelerate), experts, from and to (steps), folder (of a checkpoint), results. fsdp2 loads the folder
where `from` is not 0 and saves it at the end.
"""

import json
import os
import pathlib
import sys

import frameworks
import huggingface
import torch
from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS = 6


def steps(case: dict) -> list:
    """The rows of this rank, of the steps that are asked for."""
    rank = int(os.environ["RANK"])
    return [ids[2 * rank:2 * rank + 2] for ids in huggingface.batches(STEPS)][case["from"]:case["to"]]


def mean(losses: list) -> list:
    total = torch.tensor(losses, dtype=torch.float64)
    distributed.all_reduce(total)
    return (total / distributed.get_world_size()).tolist()


def bits(tensors) -> str:
    """Of all values on this rank, that a change of any shows."""
    return str([tensor.view(torch.int32).sum(dtype=torch.int64).item() for tensor in tensors])


def fsdp2(case: dict) -> dict:
    distributed.init_process_group("gloo")
    model = huggingface.build(case["experts"])
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def state():
        parts = state_dict.get_state_dict(model, optimizer)
        return dict(zip(("model", "optimizer"), parts, strict=True))

    if case["from"]:
        held = state()
        checkpoint.load(held, checkpoint_id=case["folder"])
        state_dict.set_state_dict(model, optimizer, model_state_dict=held["model"],
                                  optim_state_dict=held["optimizer"])
    losses = huggingface.train(model, steps(case), optimizer)
    if case["folder"] and case["to"] < STEPS:
        checkpoint.save(state(), checkpoint_id=case["folder"])
    return {"losses": mean(losses), "bits": bits([p.to_local().detach() for p in model.parameters()])}


def accelerated(case: dict) -> dict:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    model = huggingface.build(case["experts"])
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=5e-3))
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    losses = huggingface.train(model, steps(case), optimizer, accelerator.backward)
    return {"losses": mean(losses), "bits": bits([p.detach() for p in model.parameters()])}


if __name__ == "__main__":
    case = json.loads(sys.argv[1])
    results = {"fsdp2": fsdp2, "accelerate": accelerated}[case["way"]](case)
    if os.environ["RANK"] == "0":
        pathlib.Path(case["results"]).write_text(json.dumps(results))
    frameworks.end()
