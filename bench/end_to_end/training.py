# SPDX-License-Identifier: Apache-2.0
"""What train.py and the measuring programs share: processes, a sharded model, its optimizer, a step, flags."""

import argparse
import contextlib
import dataclasses
import datetime
import gc
import math
import os
import pathlib
import sys
import traceback

import experts
import gradients
import model as models
import text
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
BETAS, DECAY, CLIP = (0.9, 0.95), 0.1, 1.0
FIRST = 5  # steps that compile and fill caches


class Stop(Exception):
    """Ends a program with one line on stderr and exit status 2: rule, offending value, remedy."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Those of the model and of the text."""
    parser.add_argument("--config", default="small", help="one of " + ", ".join(models.CONFIGURATIONS))
    for name in ("layers", "context", "vocabulary"):
        parser.add_argument(f"--{name}", type=int, help="instead of the configuration's")
    parser.add_argument("--text", nargs="+", required=True, type=pathlib.Path, help="files and folders to learn from")
    parser.add_argument("--text-bytes", type=int, default=40_000_000, help="how much of them is read")
    parser.add_argument("--text-vocabulary", type=int, help="token ids that the text is written in, fewer than the "
                        "model's where a tokenizer of these is there or sooner trained (the model's)")
    parser.add_argument("--cache", type=pathlib.Path, default=pathlib.Path.home() / ".cache" / "tessera-text",
                        help="folder for the tokenizer and the token ids (~/.cache/tessera-text)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recompute", action="store_true", help="blocks are computed again in backward")
    parser.add_argument("--keep-gathered", action="store_true", help="blocks stay gathered in bf16 between forward and "
                        "backward: fewer bytes over the links, 2 bytes of memory for each parameter")
    parser.add_argument("--send-gradients", choices=("fp32", "bf16"), default="bf16", help="on several GPUs: gradients "
                        "of weights in bf16 are widened when they are added up (bf16, half the bytes, the default) "
                        "or before they are sent (fp32, FSDP2's way)")
    parser.add_argument("--attention", choices=BACKENDS, help="on GPUs (cudnn, and with --deterministic flash); a CPU "
                        "chooses for itself")
    parser.add_argument("--eager", action="store_true",
                        help="do not compile attention, router and losses on GPUs (they never are on a CPU)")
    parser.add_argument("--deterministic", action="store_true", help="on GPUs: the same bits at every run, slower")


def configuration(arguments) -> models.Configuration:
    if arguments.config not in models.CONFIGURATIONS:
        raise Stop(f"config {arguments.config!r}: unknown; choose from {', '.join(models.CONFIGURATIONS)}")
    changes = {name: value for name in ("layers", "context", "vocabulary")
               if (value := getattr(arguments, name)) is not None}
    try:
        return dataclasses.replace(models.CONFIGURATIONS[arguments.config], **changes)
    except ValueError as error:
        raise Stop(str(error)) from error


def attention(arguments) -> str:
    """The name in BACKENDS of the attention that was asked for, or the fastest that may be taken."""
    return arguments.attention or ("flash" if arguments.deterministic else "cudnn")


def load(name: str):
    try:
        return experts.load(name)
    except experts.Unavailable as error:
        raise Stop(f"experts {name}: cannot run here: {error}; install what it needs or choose others") from error
    except ValueError as error:
        raise Stop(str(error)) from error


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This process among those that train together, one per GPU."""

    rank: int
    count: int
    device: torch.device

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def say(self, line: str) -> None:
        if self.rank == 0:
            print(line, flush=True)

    def worst(self, *values: float) -> list[float]:
        """Elementwise maximum over ranks."""
        together = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(together, dist.ReduceOp.MAX)
        return together.tolist()

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def memory(self) -> tuple[int, int]:
        """Most bytes allocated and reserved since the last reset, of this rank; 0 on a CPU."""
        return (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if self.on_gpu else (0, 0)

    def retries(self) -> int:
        """How often this rank's allocator has given memory back and asked again, as there was none; 0 on a CPU."""
        return torch.cuda.memory_stats().get("num_alloc_retries", 0) if self.on_gpu else 0


@contextlib.contextmanager
def ranks(minutes: int = 10):
    """The processes of torchrun, or this one alone. A rank that waits longer than that for others ends."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    options = {"timeout": datetime.timedelta(minutes=minutes)}
    if on_gpu:
        if device.index >= torch.cuda.device_count():
            raise Stop(f"{device.index + 1} processes or more on {torch.cuda.device_count()} GPUs; start one for each")
        torch.cuda.set_device(device)
        options["device_id"] = device
    if "RANK" not in os.environ:
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if on_gpu else "gloo", **options)
    yield Ranks(dist.get_rank(), dist.get_world_size(), device)
    dist.barrier()
    dist.destroy_process_group()


def first_alone(here: Ranks, work):
    """work() on rank 0 before all others; a Stop there is one everywhere."""
    outcome = [None]
    if here.rank == 0:
        try:
            work()
        except (Stop, ValueError) as error:
            outcome = [str(error)]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise Stop(outcome[0])
    return work()


def settle() -> None:
    """Collects garbage and keeps what is left out of later collections, which look at all that torch has loaded and
    halt one rank, and at the next collective all, for tens of milliseconds."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def corpus(arguments, c: models.Configuration, here: Ranks) -> text.Corpus:
    vocabulary = arguments.text_vocabulary or c.vocabulary
    if vocabulary > c.vocabulary:
        raise Stop(f"--text-vocabulary {vocabulary}: the model has {c.vocabulary} token ids; name no more than these")
    return first_alone(here, lambda: text.prepare(arguments.text, vocabulary, c.context, arguments.cache,
                                                  arguments.text_bytes))


class Trainer:
    """Model, optimizer and steps. Parameters, gradients and moments are fp32 and sharded over all ranks; on GPUs
    blocks are gathered in bf16 and gradients are reduced in fp32."""

    def __init__(self, c: models.Configuration, here: Ranks, implementation, arguments):
        self.c, self.here, self.attention, self.steps = c, here, attention(arguments), 0
        if arguments.deterministic and here.on_gpu:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        if here.on_gpu:  # only the router's GEMMs are fp32; x and its weight come from bf16, which TF32 holds exactly
            torch.set_float32_matmul_precision("high")
        with torch.device("meta"):
            self.model = models.Model(c, implementation, compiled=here.on_gpu and not arguments.eager)
        self.model.recompute(arguments.recompute)
        mesh = init_device_mesh(here.device.type, (here.count,))
        narrow = here.on_gpu and here.count > 1 and arguments.send_gradients == "bf16"
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False,
                                      reduce_dtype=torch.bfloat16 if narrow else torch.float32
                                      ) if here.on_gpu else MixedPrecisionPolicy()
        # Parts that backward begins with stay gathered. The experts of the first block are a part of their own, as
        # nothing hides what is gathered before its attention and what is reduced after that.
        blocks = self.model.blocks
        self.kept = [part for part in (blocks[-1], self.model.head, self.model) if part is not None]
        for part in (blocks[0].experts, *blocks[:-1], *self.kept):
            keep = arguments.keep_gathered or part in self.kept
            fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep)
            if narrow:
                part.set_custom_reduce_scatter(gradients.SentInBf16())
        self.model.to_empty(device=here.device)
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() == 1]
        self.optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": DECAY},
                                            {"params": others, "weight_decay": 0.0}], betas=BETAS, fused=True)
        self.reset(arguments.seed)

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Weights as drawn from the seed, whatever the number of ranks; no moments."""
        out_scale = 0.02 / math.sqrt(2 * self.c.layers)
        for index, (name, parameter) in enumerate(self.model.named_parameters()):
            local = parameter.to_local()
            if parameter.dim() == 1:
                local.fill_(1.0)
                continue
            generator = torch.Generator(self.here.device).manual_seed(seed * 1_000_003 + index)
            scale = out_scale if name.endswith((".out", ".down_proj")) else 0.02
            whole = torch.empty(parameter.shape, device=self.here.device).normal_(0.0, scale, generator=generator)
            part = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            local.copy_(part.to_local())
        self.optimizer.state.clear()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def state(self) -> list:
        """Copies of this rank's weights and moments, to `restore`."""
        return [(parameter.to_local().clone(), {name: value.clone() for name, value in
                                                self.optimizer.state.get(parameter, {}).items()})
                for parameter in self.model.parameters()]

    @torch.no_grad()
    def restore(self, state: list) -> None:
        for parameter, (weights, moments) in zip(self.model.parameters(), state, strict=True):
            parameter.to_local().copy_(weights)
            self.optimizer.state[parameter] = {name: value.clone() for name, value in moments.items()}
        self.optimizer.zero_grad()

    def backend(self):
        """The one attention that all implementations use."""
        return sdpa_kernel(BACKENDS[self.attention]) if self.here.on_gpu else contextlib.nullcontext()

    def step(self, tokens, targets, rate: float) -> tuple:
        """Loss of this rank, norm of the gradient over all ranks, counts [L,E] of this rank; all on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with self.backend():
            loss, auxiliary, counts = self.model(tokens, targets)
            (loss + auxiliary).backward()
        norm = clipped_step(self.optimizer, self.model.parameters())
        self.optimizer.zero_grad()
        self.steps += 1
        if self.steps == FIRST:
            settle()
        return loss.detach(), norm, counts

    @torch.no_grad()
    def held_out_loss(self, data: text.Corpus, rows: int, batches: int) -> float:
        """Mean over all ranks, in nats."""
        here = self.here
        total = torch.zeros((), device=here.device, dtype=torch.float64)
        with self.backend():
            for batch in data.evaluation(rows, self.c.context, here.rank, here.count, batches, here.device):
                total += self.model(*batch)[0].double()
        for part in self.kept:  # no backward pass comes that would do it
            part.reshard()
        dist.all_reduce(total)
        return total.item() / (batches * here.count)


def clipped_step(optimizer, parameters) -> torch.Tensor:
    """Norm of the gradient; the optimizer's step with it clipped to CLIP. A fused optimizer divides gradients as it
    reads them, so that clipping takes no pass of its own."""
    # A kernel for each tensor: the one for many reads memory at a quarter of its rate.
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=False)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    optimizer.grad_scale = ((norm + 1e-6) / CLIP).clamp(min=1.0)
    optimizer.step()
    return norm


def learning_rate(step: int, steps: int, peak: float, warm_up: int) -> float:
    """Of step 1 to `steps`: linear up to `peak` over `warm_up` steps, then a cosine down to a tenth of it."""
    if step <= warm_up:
        return peak * step / warm_up
    return peak * (0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / max(steps - warm_up, 1)))


def device_name(here: Ranks) -> str:
    return torch.cuda.get_device_name(here.device) if here.on_gpu else "cpu"


def end(program) -> None:
    """Runs a program and ends the process: 2 and one line for a Stop."""
    try:
        program()
    except Stop as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"{pathlib.Path(sys.argv[0]).name}: {error}", file=sys.stderr, flush=True)
        status = 2
    except torch.OutOfMemoryError as error:
        print(f"{pathlib.Path(sys.argv[0]).name}: out of memory: {str(error).split('.')[0]}; fewer --sequences, "
              "--recompute or more GPUs help", file=sys.stderr, flush=True)
        status = 1
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except KeyboardInterrupt:
        status = 130
    except BaseException:
        traceback.print_exc()
        status = 1
    else:
        status = 0
    # Threads of gloo outlive the group and need the interpreter, so that ending it could take the process down.
    sys.stdout.flush()
    os._exit(status)
