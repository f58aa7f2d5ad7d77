# SPDX-License-Identifier: Apache-2.0
"""Experts over hosts that GPUs of one machine pretend, over NCCL's network path: results, bits, bytes, what NCCL says
of its transports, and what is said where a rank dies or stalls. Needs two GPUs; with four, two hosts of two.

    torchrun --nproc-per-node 2 cuda_several_hosts_test.py    runs the ranks alone, as the first test does.
"""

import contextlib
import importlib.util
import itertools
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time
import unittest

import torch
import torch.distributed as dist
from several_hosts_cases import Case, bytes_expected, forward, together

HOSTS = 2
# NCCL goes by the network between ranks with other NCCL_HOSTIDs. Multicast stays off everywhere.
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1",
               "NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,P2P,NET",
               "OMP_NUM_THREADS": "1"}
RANKS = 4 if torch.cuda.device_count() >= 4 else 2
SIZES = {"experts": 16, "top_k": 4, "dtype": torch.bfloat16, "hidden": 512, "intermediate": 256}
# With this variable ranks lose the last one: how it is lost.
LOSES = "TESSERA_TEST_LOSES"
SECONDS = 3  # that they wait for it
# With this variable ranks leave tensors and results there, for ranks from C++.
LEAVES_IN = "TESSERA_TEST_LEAVES_IN"
CPP_CASES = ({"routing": "random"}, {"routing": "zipf"}, {"routing": "sentinels"})
WEIGHTS = ("w_up", "w_down")
DESCRIPTION_BYTES = 128  # that HostsExperts::create sends to each other host


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


def lose_rank(rank: int, device, how: str) -> None:
    """The last rank is lost between a forward pass and its backward pass; prints what the others say, and when."""
    case = Case((300, 170, 0, 260)[:RANKS], **SIZES)
    experts = case.make(hosts=HOSTS, device=device, time_limit=SECONDS)
    one_pass(case, experts, rank, device)
    torch.cuda.synchronize()
    experts.check()
    leaves, ids, d_o = case.part(rank)
    leaves = {name: leaf.detach().to(device).requires_grad_() for name, leaf in leaves.items()}
    o = forward(experts, leaves, ids.to(device))
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    if rank == RANKS - 1:
        if how == "dies":
            os._exit(0)
        time.sleep(SECONDS + 10 + 10)
        os._exit(0)
    start = time.monotonic()
    try:
        o.backward(d_o.to(device))
        torch.cuda.synchronize()
        experts.check()
    except RuntimeError as error:
        print(f"after {time.monotonic() - start:.1f} s: {error}", flush=True)
    try:
        forward(experts, leaves, ids.to(device))
    except RuntimeError as error:
        print(f"then: {error}", flush=True)
    experts.abort()
    print("aborted", flush=True)
    if rank == 0 and RANKS > HOSTS:  # the store ends with it
        time.sleep(max(start + SECONDS + 10 + 6 - time.monotonic(), 0))
    os._exit(0)  # the default group still has the lost rank


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes() if tensor.numel() else b""


def write_for_cpp(folder: pathlib.Path, case: Case, rank: int) -> None:
    """Tensors of a rank, as hosts_program.cpp reads them."""
    leaves, ids, d_o = case.part(rank)
    folder.mkdir(exist_ok=True)
    for name, tensor in (leaves | {"topk_ids": ids.clamp(-1, case.experts).int(), "d_o": d_o}).items():
        (folder / f"{rank}.{name}").write_bytes(raw(tensor))
    (folder / f"{rank}.tokens").write_text(str(case.tokens[rank]), encoding="ascii")
    if rank == 0:
        sizes = max(*case.tokens, 1) + 1, case.hidden, case.intermediate, case.experts, case.top_k
        (folder / "desc").write_text(" ".join([str(size) for size in sizes]), encoding="ascii")


def leave_for_cpp(folder: pathlib.Path, case: Case, rank: int, device) -> None:
    """The same, and the results of a pass."""
    experts = case.make(hosts=HOSTS, exchange="static", device=device)
    results = one_pass(case, experts, rank, device)
    torch.cuda.synchronize()
    experts.check()
    dist.barrier()
    experts.close()
    write_for_cpp(folder, case, rank)
    torch.save(results, folder / f"{rank}.python")


def run_rank() -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["NCCL_HOSTID"] = f"host{rank * HOSTS // ranks}"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    if LOSES in os.environ:
        lose_rank(rank, device, os.environ[LOSES])
    tokens = (300, 170, 0, 260)[:ranks]
    if LEAVES_IN in os.environ:
        for i, more in enumerate(CPP_CASES):
            leave_for_cpp(pathlib.Path(os.environ[LEAVES_IN]) / str(i), Case(tokens, **SIZES, **more), rank, device)
        dist.destroy_process_group()
        return
    for routing, more in (("random", {}), ("zipf", {"save": "x"}), ("one-expert", {}), ("sentinels", {}),
                          ("random", {"biases": True, "activation": "clamped-swiglu"}),
                          ("random", {"biases": True, "activation": "gelu"})):
        case, results = Case(tokens, routing=routing, **SIZES, **more), {}
        for exchange in ("static", "counted"):
            sent = bytes_expected(case, HOSTS, exchange)[rank]
            for hosts, overlap in ((HOSTS, False), ("auto", True)):
                experts = case.make(hosts=hosts, exchange=exchange, overlap=overlap, device=device)
                first = gathered(one_pass(case, experts, rank, device))
                assert experts._hosts.rail.bytes_sent == sent, (experts._hosts.rail.bytes_sent, sent)
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
    check_graph(Case(tokens, **SIZES), rank, device)
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

    def library_path(self) -> dict:
        """Where the dynamic linker finds torch's own NCCL, too."""
        folders = [os.environ.get("LD_LIBRARY_PATH", "")]
        with contextlib.suppress(ModuleNotFoundError):
            found = importlib.util.find_spec("nvidia.nccl")
            folders += [f"{place}/lib" for place in (found.submodule_search_locations if found else [])]
        return {"LD_LIBRARY_PATH": ":".join([folder for folder in folders if folder])}

    def run_cpp(self, folder: pathlib.Path, *more: str, debug: str = "INFO", seconds: int = 30) -> list[str]:
        """What each rank says, ranks being programs in C++. seconds: that they wait for each other, to join as well."""
        folders = [pathlib.Path(os.environ[name]).resolve().parents[up] / below for name, up, below in
                   (("TESSERA_PROGRAM", 0, ""), ("TESSERA_LIBRARY", 1, "bin")) if name in os.environ]
        program = folders[0] / "cuda_hosts_program"
        local = RANKS // HOSTS
        started = [subprocess.Popen(
            [str(program), str(folder), str(rank // local), str(HOSTS), str(rank % local), str(local), str(rank),
             str(seconds), *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **ENVIRONMENT, **self.library_path(), "NCCL_HOSTID": f"host{rank // local}",
                 "NCCL_DEBUG": debug, "NCCL_DEBUG_FILE": f"{folder}/nccl.%h.%p"}) for rank in range(RANKS)]
        try:
            said = [process.communicate(timeout=90) for process in started]
        finally:
            for process in started:
                process.kill()
        told = "".join([out[-1000:] + errors[-2000:] for out, errors in said])
        self.assertEqual([process.returncode for process in started], [0] * RANKS, told)
        return [out for out, _ in said]

    def test_cpp_has_the_same_bits(self):
        with tempfile.TemporaryDirectory() as folder:
            result = subprocess.run(
                [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                 str(RANKS), __file__], capture_output=True, text=True, check=False, timeout=240,
                env={**os.environ, **ENVIRONMENT, "NCCL_DEBUG": "WARN", LEAVES_IN: folder})
            self.assertEqual(result.returncode, 0, result.stdout[-2000:] + result.stderr[-6000:])
            for i, more in enumerate(CPP_CASES):
                case, of_case = Case((300, 170, 0, 260)[:RANKS], **SIZES, **more), pathlib.Path(folder) / str(i)
                said = self.run_cpp(of_case)
                for rank, exchange in itertools.product(range(RANKS), ("static", "counted")):
                    with self.subTest(more, rank=rank, exchange=exchange):
                        self.check_cpp_rank(of_case, case, rank, exchange, said[rank])
                log = "".join([path.read_text(encoding="utf-8", errors="replace") for path in of_case.glob("nccl.*")])
                self.assertRegex(log, "nNodes 2")
                self.assertRegex(log, "via NET/Socket")
                if RANKS > HOSTS:  # within a host rows go through windows, for which NCCL connects no channel
                    self.assertRegex(log, f"nRanks {RANKS // HOSTS} nNodes 1 ")

    def check_cpp_rank(self, folder: pathlib.Path, case: Case, rank: int, exchange: str, said: str):
        for name, wanted in torch.load(folder / f"{rank}.python").items():
            made = bytearray((folder / f"{rank}.{exchange}.{name}").read_bytes())
            dtype = torch.float32 if name in (*WEIGHTS, "topk_weights") else torch.bfloat16
            got = torch.frombuffer(made, dtype=dtype) if made else torch.empty(0, dtype=dtype)
            got = got.view(wanted.shape).to(wanted.dtype)  # Python rounds gradients of weights
            self.assertTrue(wanted.numel() == 0 or wanted.abs().max() > 0, name)
            self.assertTrue(torch.equal(got, wanted), name)
        sent = " ".join([str(count + DESCRIPTION_BYTES if count else 0)
                         for count in bytes_expected(case, HOSTS, exchange)[rank]])
        self.assertIn(f"{exchange} sent {sent}\n", said)

    def test_a_captured_pass_from_cpp(self):
        case = Case((300, 170, 0, 260)[:RANKS], **SIZES)
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(RANKS):
                write_for_cpp(pathlib.Path(folder), case, rank)
            for said in self.run_cpp(pathlib.Path(folder), "captured", debug="WARN"):
                self.assertIn("captured: the same bits\n", said)

    def test_ranks_from_cpp_that_are_lost(self):
        case = Case((300, 170, 0, 260)[:RANKS], **SIZES)
        for how in ("dies", "stalls"):
            with tempfile.TemporaryDirectory() as folder:
                for rank in range(RANKS):
                    write_for_cpp(pathlib.Path(folder), case, rank)
                said = self.run_cpp(pathlib.Path(folder), how, debug="WARN", seconds=2 * SECONDS)
            for rank in range(RANKS // HOSTS):
                with self.subTest(how, rank=rank):
                    seconds, text = re.search(r"^after ([\d.]+) s: (.*)$", said[rank], re.MULTILINE).groups()
                    self.assertRegex(text, rf"^rank {rank} of host 0 at pass 2 \(forward\), .*: rank {rank} of host 1 "
                                           r"did not come \(.+\); destroy the rails")
                    self.assertLess(float(seconds), 2 * SECONDS + 6)
                    self.assertIn(f"then: {text}", said[rank])

    def check_loss(self, how: str):
        """Without torchrun, which would end the others."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        started = [subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **ENVIRONMENT, "NCCL_DEBUG": "WARN", "RANK": str(rank), "LOCAL_RANK": str(rank),
                 "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), LOSES: how})
            for rank in range(RANKS)]
        said = [process.communicate(timeout=240) for process in started]
        for rank, (process, (out, errors)) in enumerate(zip(started[:-1], said, strict=False)):
            with self.subTest(how, rank=rank):
                self.assertEqual(process.returncode, 0, out[-2000:] + errors[-6000:])
                awaited = "of host 1"
                if rank == RANKS // HOSTS - 1:
                    awaited = f"rank {RANKS - 1} of host 1"
                elif rank >= RANKS // HOSTS:  # it waits for its counterpart, whom the lost rank holds up
                    awaited = f"rank {rank - RANKS // HOSTS} of host 0"
                seconds, text = re.search(r"^after ([\d.]+) s: (.*)$", out, re.MULTILINE).groups()
                self.assertRegex(text, rf"^rank {rank} at pass 4 \(backward\), .*{awaited}.* did not come \(.*\); "
                                       rf"last reported: .*rank {RANKS - 1} at pass 2.*; abort")
                self.assertLess(float(seconds), SECONDS + 10 + 6)
                self.assertRegex(out, "(?m)^then: an earlier pass has failed")
                self.assertRegex(out, "(?m)^aborted$")

    def test_a_rank_that_dies(self):
        self.check_loss("dies")

    def test_a_rank_that_stalls(self):
        self.check_loss("stalls")


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_rank()
    else:
        unittest.main()
