# SPDX-License-Identifier: Apache-2.0
"""A rank that is killed in a backward pass over GPUs: every other rank reports it within its limit. Needs two GPUs, and
uses up to four.

The last rank kills itself instead of its backward pass, or behind the first launch of it: before its rows come the
others wait for its word that they are staged, before its results go back for its word that they are there. So that the
pass has begun everywhere, steps before it are compared bit by bit.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from unittest import mock

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import gpu
import tessera
import torch
import torch.distributed as dist
from tessera import expert_parallel_library, expert_parallel_session
from tessera import expert_parallel_prepared as prepared
from tessera import expert_parallel_training as training

D, N, E, K, T = 512, 256, 16, 4, 300
LIMIT = 1.0  # seconds of a wait
SLACK = 5.0  # for the host, which may have to be scheduled, and for kernels behind the one that waits
CASES = {"dispatch": "at staged", "combine": "at ack"}  # the launch that is not made, where the others wait for it
OWN_FIRST = "own-first"  # as dispatch, where the others have begun to multiply rows of their own tokens


class Kills:
    """The library, whose backward pass kills the process ahead of `launch` when all that has been enqueued before it is
    done."""

    def __init__(self, launch: str):
        self._library, self._launch = expert_parallel_session.load(), launch

    def __getattr__(self, name):
        return getattr(self._library, name)

    def tessera_expert_parallel_backward(self, session, address: int, stream) -> None:
        if self._launch == "combine":
            args = expert_parallel_library.BackwardArgs.from_address(address)
            assert self._library.tessera_expert_parallel_dispatch(session, args.dispatch, stream) == 0
        torch.cuda.synchronize()
        os.kill(os.getpid(), signal.SIGKILL)


def rank_of_group(killed_at: str, bounded: bool, folder: str) -> None:
    """One rank; prints what it reports as JSON."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks,
                            device_id=torch.device("cuda", rank))
    torch.manual_seed(rank)
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    x, d_o = (torch.randn(T, D, **options) for _ in range(2))
    scores, ids = torch.rand(T, E, device="cuda").topk(K)
    weights = [torch.randn(E // ranks, *shape, **options) / 16 for shape in ((2 * N, D), (D, N))]
    leaves = [t.requires_grad_() for t in (x, scores, *weights)]

    def step() -> tuple:
        o = experts(x, ids.int(), *leaves[1:])
        return (o, *torch.autograd.grad(o, leaves, d_o))

    # First passes load kernels, which may take one rank longer than the limit of the passes that are tested.
    if killed_at == OWN_FIRST:
        for module, name, value in ((training, "SIDE_STREAM_BYTES", 0), (training, "gathers_tokens", lambda *_: True),
                                    (prepared, "begins_with_own_rows", lambda *_: True)):
            setattr(module, name, value)  # of a process that ends
    for limit in (60.0, LIMIT):
        experts = tessera.ExpertParallel(max_tokens=T, hidden=D, intermediate=N, experts=E, top_k=K, training=True,
                                         time_limit=limit, max_rows=ranks * T * K if bounded else None)
        first = step()
        if limit > LIMIT:
            assert all(torch.equal(a, b) for a, b in zip(step(), first, strict=True))
            experts.close()
            torch.cuda.synchronize()
            dist.barrier()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(step(), first, strict=True))
    torch.cuda.synchronize()
    experts.check()
    dist.barrier()
    torch.cuda.synchronize()
    if rank + 1 == ranks:
        with mock.patch.object(expert_parallel_session, "load", return_value=Kills(killed_at)):
            step()
        raise AssertionError("the last rank has lived")
    begin, said, later = time.monotonic(), "", ""
    try:
        step()
        torch.cuda.synchronize()
        experts.check()
    except RuntimeError as error:
        said = str(error)
    seconds = time.monotonic() - begin
    try:
        step()
    except RuntimeError as error:
        later = str(error)
    print(json.dumps({"said": said, "later": later, "seconds": seconds}), flush=True)
    os._exit(0)  # nobody is left to leave the group with


def run(killed_at: str, bounded: bool) -> list:
    """What each rank but the last reports; of the last one its exit status."""
    ranks = min(torch.cuda.device_count(), 4)
    with tempfile.TemporaryDirectory() as folder:
        processes = [subprocess.Popen([sys.executable, "-W", "ignore", __file__, killed_at, str(int(bounded)), folder],
                                      env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks)}, text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in range(ranks)]
        reports, end = [], time.monotonic() + 120
        for rank, process in enumerate(processes):
            try:
                out, errors = process.communicate(timeout=max(end - time.monotonic(), 1))
            except subprocess.TimeoutExpired:
                for each in processes:
                    each.kill()
                raise AssertionError(f"rank {rank} of {ranks} does not end") from None
            if rank + 1 == ranks:
                reports.append(process.returncode)
            elif process.returncode == 0:
                reports.append(json.loads(out.splitlines()[-1]))
            else:
                raise AssertionError(f"rank {rank}: exit status {process.returncode}\n{errors[-3000:]}")
    return reports


class Killed(unittest.TestCase):
    def test_every_rank_reports_it(self):
        for killed_at, site in [*CASES.items(), (OWN_FIRST, CASES["dispatch"])]:
            for bounded in (True, False):
                with self.subTest(killed_at=killed_at, bounded=bounded):
                    *reports, status = run(killed_at, bounded)
                    self.assertEqual(status, -signal.SIGKILL)
                    last, named = len(reports), 0
                    for report in reports:
                        self.assertRegex(report["said"], f"the word of rank {last} is|had given up", report)
                        self.assertLess(report["seconds"], LIMIT + SLACK)
                        self.assertGreater(report["seconds"], 0.5 * LIMIT if "waited" in report["said"] else 0)
                        self.assertIn("rebuild the group", report["later"])
                        named += f"the word of rank {last} is" in report["said"] and site in report["said"]
                    self.assertGreaterEqual(named, 1, reports)


if __name__ == "__main__":
    if "RANK" in os.environ and len(sys.argv) == 4:
        rank_of_group(sys.argv[1], sys.argv[2] == "1", sys.argv[3])
    elif gpu.missing() is None and torch.cuda.device_count() < 2:
        print("skipped: two GPUs of one host are needed; run on a machine with two Hopper GPUs")
        sys.exit(77)
    else:
        gpu.main()
