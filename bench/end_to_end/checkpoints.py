# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: whole or not there. One is written beside its name and renamed once every rank is done."""

import json
import os
import pathlib
import re
import shutil

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

KEPT = 2


def whole(folder: pathlib.Path) -> list[pathlib.Path]:
    """Checkpoints in a run's folder, oldest first."""
    found = pathlib.Path(folder).glob("checkpoint-*")
    return sorted(path for path in found if re.fullmatch(r"checkpoint-\d{8}", path.name))


def save(folder: pathlib.Path, step: int, trainer, notes: dict) -> pathlib.Path:
    """By all ranks together. notes: what `restore` gives back, as JSON."""
    place = folder / f"checkpoint-{step:08}"
    partial = folder / f"{place.name}.partial"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=partial)
    if dist.get_rank() == 0:
        (partial / "notes.json").write_text(json.dumps({**notes, "step": step}, indent=1), encoding="utf-8")
        shutil.rmtree(place, ignore_errors=True)
        os.replace(partial, place)
        for old in whole(folder)[:-KEPT]:
            shutil.rmtree(old)
    dist.barrier()
    return place


def notes(place: pathlib.Path) -> dict:
    return json.loads((place / "notes.json").read_text(encoding="utf-8"))


def restore(place: pathlib.Path, trainer) -> None:
    """Weights and moments to the bit, over any number of ranks."""
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=place)
    set_state_dict(trainer.model, trainer.optimizer, model_state_dict=state["model"],
                   optim_state_dict=state["optimizer"])
