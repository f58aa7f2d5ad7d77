# SPDX-License-Identifier: Apache-2.0
"""Experts over hosts that GPUs of one machine pretend, over NCCL's network path: results, bits and bytes, and what NCCL
says of its transports. Needs two GPUs; with four, two hosts of two.

    torchrun --nproc-per-node 2 cuda_several_hosts_test.py    runs the ranks alone, as the test does.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import torch
import torch.distributed as dist
from several_hosts_cases import Case, forward, together

HOSTS = 2
# NCCL goes by the network between ranks with other NCCL_HOSTIDs. Multicast stays off everywhere.
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1",
               "NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,P2P,NET",
               "OMP_NUM_THREADS": "1"}
RANKS = 4 if torch.cuda.device_count() >= 4 else 2


def one_pass(case: Case, experts, rank: int, device) -> dict:
    leaves, ids, d_o = case.part(rank)
    leaves = {name: leaf.detach().to(device).requires_grad_() for name, leaf in leaves.items()}
    o = forward(experts, leaves, ids.to(device))
    o.backward(d_o.to(device))
    return {name: tensor.cpu() for name, tensor in
            ({"o": o.detach()} | {name: leaf.grad for name, leaf in leaves.items()}).items()}


def gathered(results: dict) -> dict:
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, results)
    return together(of_ranks)


def assert_near(got: dict, wanted: dict) -> None:
    for name, tensor in wanted.items():
        error = (got[name].float() - tensor.float()).nan_to_num(nan=1e9).norm() / tensor.float().norm()
        assert tensor.float().norm() > 0 and error < 2**-6, (name, error)


def assert_equal(got: dict, wanted: dict) -> None:
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor), name


def one_gpu(case: Case, device) -> dict:
    import tessera
    leaves, ids, d_o = case.tensors()
    leaves = {name: leaf.to(device).requires_grad_() for name, leaf in leaves.items()}
    o = tessera.routed_experts(leaves["x"], ids.clamp(-1, case.experts).to(device), leaves["topk_weights"],
                               leaves["w_up"], leaves["w_down"], b_up=leaves.get("b_up"), b_down=leaves.get("b_down"),
                               activation=case.activation)
    o.backward(d_o.to(device))
    return {name: tensor.cpu() for name, tensor in
            ({"o": o.detach()} | {name: leaf.grad for name, leaf in leaves.items()}).items()}


def check_graph(case: Case, rank: int, device) -> None:
    """A static pass for inference, captured and replayed on other tokens."""
    experts = case.make(hosts=HOSTS, exchange="static", device=device, training=False)
    leaves, ids, _ = case.part(rank)
    leaves, ids = {name: leaf.detach().to(device) for name, leaf in leaves.items()}, ids.to(device)
    with torch.no_grad():
        wanted = [forward(experts, leaves | {"x": leaves["x"] * scale}, ids) for scale in (1, 2)]
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        dist.barrier()
        with torch.cuda.graph(graph):
            o = forward(experts, leaves, ids)
        for scale in (1, 2):
            leaves["x"].mul_(scale)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(o, wanted[scale - 1]), scale
    experts.check()
    dist.barrier()
    del graph
    experts.close()


def run_rank() -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["NCCL_HOSTID"] = f"host{rank * HOSTS // ranks}"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    tokens = (300, 170, 0, 260)[:ranks]
    sizes = {"experts": 16, "top_k": 4, "dtype": torch.bfloat16, "hidden": 512, "intermediate": 256}
    for routing, more in (("random", {}), ("zipf", {"save": "x"}), ("one-expert", {}), ("sentinels", {}),
                          ("random", {"biases": True, "activation": "clamped-swiglu"}),
                          ("random", {"biases": True, "activation": "gelu"})):
        case, results = Case(tokens, routing=routing, **sizes, **more), {}
        for exchange in ("static", "counted"):
            for hosts in (HOSTS, "auto"):
                experts = case.make(hosts=hosts, exchange=exchange, device=device)
                first = gathered(one_pass(case, experts, rank, device))
                again = gathered(one_pass(case, experts, rank, device))
                torch.cuda.synchronize()
                experts.check()
                dist.barrier()
                experts.close()
                assert_equal(again, first)
                results[exchange, hosts] = first
        wanted = one_gpu(case, device)
        for first in results.values():
            assert_near(first, wanted)
            assert_equal(first, results["static", HOSTS])
        if rank == 0:
            print(f"passed: {routing} {more}", flush=True)
    check_graph(Case(tokens, **sizes), rank, device)
    if rank == 0:
        print("passed: graph", flush=True)
    dist.barrier()
    dist.destroy_process_group()


@unittest.skipUnless(torch.cuda.device_count() > 1, "needs two GPUs; run on a machine with them")
class PretendedHosts(unittest.TestCase):
    def test_over_the_network_path(self):
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, **ENVIRONMENT, "NCCL_DEBUG_FILE": f"{folder}/nccl.%h.%p"}
            result = subprocess.run(
                [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                 str(RANKS), __file__], capture_output=True, text=True, check=False, env=environment, timeout=540)
            said = "".join([path.read_text(encoding="utf-8", errors="replace")
                            for path in pathlib.Path(folder).iterdir()])
        self.assertEqual(result.returncode, 0, result.stdout[-2000:] + result.stderr[-6000:])
        self.assertEqual(len(re.findall("^passed: ", result.stdout, re.MULTILINE)), 7)
        self.assertRegex(said, "nNodes 2")
        self.assertRegex(said, "via NET/Socket")
        if RANKS > HOSTS:  # within a host GPUs still address each other
            self.assertRegex(said, "via P2P")


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_rank()
    else:
        unittest.main()
