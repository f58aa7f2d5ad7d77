# SPDX-License-Identifier: Apache-2.0
"""Experts over the GPUs of a process group: what is refused where there are none, and the result where there are.

With GPUs: torchrun --nproc-per-node 2 expert_parallel_test.py compares o of a session with one GPU's, bit for bit.
"""

import ctypes
import os
import unittest
from unittest import mock

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import tessera
import torch
import torch.distributed as dist
from cpu_session import make_session
from tessera import expert_parallel_library as structs
from tessera import expert_parallel_session as session_module
from tessera import library

SHAPE = {"max_tokens": 300, "hidden": 512, "intermediate": 256, "experts": 16, "top_k": 4}
GPUS = torch.cuda.device_count()
IN_GROUP = GPUS > 0 and "RANK" in os.environ
DEVICE = f"cuda:{os.environ['LOCAL_RANK'] if IN_GROUP else 0}"  # of this rank, as ranks report to each other what fails


def setUpModule():
    if IN_GROUP:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    unittest.addModuleCleanup(dist.destroy_process_group)


class Refusals(unittest.TestCase):
    def test_other_devices(self):
        with self.assertRaisesRegex(ValueError, "run on GPUs"):
            tessera.ExpertParallel(**SHAPE, device="meta")

    def test_old_names(self):
        with self.assertWarnsRegex(DeprecationWarning, "sums_on_owners is called partial_combine"):
            experts = self.make(mock.MagicMock(), sums_on_owners=True)
        self.assertEqual(experts._session.desc.partial_combine, 1)
        with self.assertRaisesRegex(ValueError, "two names of one argument; leave out sums_on_owners"):
            self.make(mock.MagicMock(), sums_on_owners=False, partial_combine=True)

    def test_unknown_activation(self):
        with self.assertRaisesRegex(ValueError, "activation='tanh'"):
            tessera.ExpertParallel(**SHAPE, activation="tanh", device=DEVICE)

    def test_bad_shape(self):
        with self.assertRaisesRegex(ValueError, "top_k=17"):
            tessera.ExpertParallel(**{**SHAPE, "top_k": 17}, device=DEVICE)

    def agree(self, desc, of_others: list, group_id=b"id"):
        """agree() of rank 0, which gathers this of the others."""
        def gather(of_ranks, mine, group):
            of_ranks[:] = [mine, *[({**mine[0], **other}, None, failure) for other, failure in of_others]]

        with mock.patch.object(session_module.distributed, "get_world_size", return_value=1 + len(of_others)), \
                mock.patch.object(session_module.distributed, "all_gather_object", gather):
            return session_module.agree(desc, group_id, None)

    def test_ranks_that_differ(self):
        desc = structs.Desc(rank=0, ranks=2, max_tokens=300, hidden=512)
        with self.assertRaisesRegex(ValueError, "max_tokens=300 on rank 0, 200 on rank 1"):
            self.agree(desc, [({"max_tokens": 200}, None)])

    def test_ranks_that_bound_their_rows_differently(self):
        """Without a bound a rank makes a pass again for whose rows another one had no memory: all or none do so."""
        desc = structs.Desc(rank=0, ranks=2, max_tokens=300, hidden=512, training=1)
        with self.assertRaisesRegex(ValueError, "max_rows=None on rank 0, 200 on rank 1"):
            self.agree(desc, [({"max_rows": 200}, None)])
        with self.assertRaisesRegex(ValueError, "save=h on rank 0, x on rank 1"):
            self.agree(desc, [({"save": "x"}, None)])

    def test_ranks_that_agree(self):
        desc = structs.Desc(ranks=2, max_tokens=300)
        self.assertEqual(self.agree(desc, [({}, None)]), b"id")

    def test_another_rank_that_fails(self):
        desc = structs.Desc(ranks=3, max_tokens=300)
        with self.assertRaisesRegex(RuntimeError, "rank 2 cannot join: MemoryError: no memory"):
            self.agree(desc, [({}, None), ({}, "MemoryError: no memory")])

    def make(self, lib, failing=None, sent=None, rank=0, **options):
        """A session of two ranks on a library that is none. failing: the call of it that fails. sent: gets what this
        rank sends to the other, which sends the same."""
        if failing is not None:
            getattr(lib, failing).return_value = 1

        def check(code):
            if code == 1:
                raise RuntimeError("no session")

        def gather(of_ranks, mine, group):
            if sent is not None:
                sent.append(mine)
            of_ranks[:] = [mine] * 2

        with mock.patch.object(session_module, "load", return_value=lib), \
                mock.patch.object(library, "context", return_value=0), \
                mock.patch.object(library, "check", side_effect=check), \
                mock.patch.object(session_module.distributed, "get_rank", return_value=rank), \
                mock.patch.object(session_module.distributed, "get_world_size", return_value=2), \
                mock.patch.object(session_module.distributed, "all_gather_object", gather), \
                mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, create=True), \
                mock.patch.object(torch, "empty") as empty:
            empty.return_value.data_ptr.return_value = 0
            empty.side_effect = options.pop("empty", None)
            return tessera.ExpertParallel(**{**SHAPE, "device": "cuda:0", **options})

    def test_window_of_a_session_that_is_not_made(self):
        for fails in ("tessera_peer_window_addresses", "tessera_expert_parallel_create"):
            with self.subTest(fails):
                lib = mock.MagicMock()
                with self.assertRaisesRegex(RuntimeError, "no session"):
                    self.make(lib, fails)
                lib.tessera_peer_window_abort.assert_called_once()

    def test_joins(self):
        for rank in range(2):
            sent, lib = [], mock.MagicMock()
            experts = self.make(lib, sent=sent, rank=rank)
            self.assertEqual((len(sent), sent[0][2], experts._session._streams), (1, None, {77}))
            self.assertEqual(sent[0][1], None if rank else bytes(128))
            self.assertEqual(lib.tessera_peer_group_id_make.called, rank == 0)

    def test_whoever_fails_tells_the_others(self):
        """Once, before it raises what has failed."""
        out_of_memory = torch.OutOfMemoryError("no memory")
        for kind, text, how in (
                (RuntimeError, "no session", {"failing": "tessera_expert_parallel_window"}),
                (RuntimeError, "no session", {"failing": "tessera_expert_parallel_workspace"}),
                (RuntimeError, "no session", {"failing": "tessera_peer_group_id_make"}),
                (torch.OutOfMemoryError, "no memory", {"empty": out_of_memory}),
                (ValueError, "windows: 3 addresses for 2 ranks", {"windows": [0, 1, 2]}),
                (ValueError, "activation='tanh'", {"activation": "tanh"}),
                (ValueError, "device=meta", {"device": "meta"})):
            with self.subTest(text, **how):
                sent, lib = [], mock.MagicMock()
                with self.assertRaisesRegex(kind, text):
                    self.make(lib, sent=sent, **how)
                self.assertEqual(len(sent), 1)
                self.assertRegex(sent[0][2], f"{kind.__name__}: {text}")
                lib.tessera_peer_window_open.assert_not_called()

    def test_multicast_of_any_rank(self):
        for value, says in (("1", "is 1"), (None, "is not set")):
            sent = []
            with mock.patch.dict(os.environ, {} if value is None else {"NCCL_NVLS_ENABLE": value}):
                if value is None:
                    del os.environ["NCCL_NVLS_ENABLE"]
                with self.assertRaisesRegex(RuntimeError, f"NCCL_NVLS_ENABLE {says}; set it to 0"):
                    self.make(mock.MagicMock(), sent=sent, rank=1)
                self.assertRegex(sent[0][2], "multicast must be off")
                self.make(mock.MagicMock(), rank=1, windows=[0, 0])  # NCCL has no part in it

    def test_on_the_device_that_is_given(self):
        on, seen = [], []

        class Device:
            def __init__(self, device):
                self.device = device

            def __enter__(self):
                on.append(self.device)

            def __exit__(self, *_):
                on.pop()

        sent = mock.MagicMock()
        sent.append = lambda _: seen.extend(on)
        with mock.patch.object(torch.cuda, "is_available", return_value=True), \
                mock.patch.object(torch.cuda, "device", Device):
            self.make(mock.MagicMock(), sent=sent, device="cuda:1")
            with self.assertRaises(RuntimeError):
                self.make(mock.MagicMock(), "tessera_expert_parallel_window", sent=sent, device="cuda:1")
        self.assertEqual((seen, on), ([torch.device("cuda:1")] * 2, []))

    @unittest.skipIf(GPUS > 0, "this machine has GPUs, where it would be served; run on one without")
    def test_no_gpu(self):
        with self.assertRaisesRegex(RuntimeError, "torch sees none"):
            tessera.ExpertParallel(**SHAPE)
        with self.assertRaisesRegex(RuntimeError, "cuda:0"):
            tessera.ExpertParallel(**SHAPE, device="cuda:0")


class Passes(unittest.TestCase):
    """What is prepared once and used call by call, on tensors of the CPU."""

    def setUp(self):
        self.tensors = (torch.zeros(5, 24, dtype=torch.bfloat16)[:, :16], torch.zeros(5, 2, dtype=torch.int64).mT.mT,
                        torch.zeros(5, 2), torch.zeros(4, 16, 16, dtype=torch.bfloat16),
                        torch.zeros(4, 16, 8, dtype=torch.bfloat16))

    def made(self, tensors) -> session_module.PreparedPass:
        return session_module.PreparedPass(tensors, torch.device("cpu"))

    def described(self, ready, name: str) -> tuple:
        view = getattr(ready.args, name)
        return view.dtype, view.shape[:view.rank], view.stride[:view.rank]

    def test_describes_tensors(self):
        ready = self.made(self.tensors)
        self.assertEqual(self.described(ready, "x"), (library.BF16, [5, 16], [24, 1]))
        self.assertEqual(self.described(ready, "w_up"), (library.BF16, [4, 16, 16], [256, 16, 1]))
        self.assertEqual(self.described(ready, "o"), (library.BF16, [5, 16], [16, 1]))
        make, how = ready.make_o
        self.assertEqual((make(*how).shape, make(*how).is_contiguous()), ((5, 16), True))
        with_o = self.made((*self.tensors, torch.zeros(5, 32, dtype=torch.bfloat16)[:, :16]))
        self.assertEqual(self.described(with_o, "o"), (library.BF16, [5, 16], [32, 1]))
        self.assertIsNone(with_o.make_o)

    def test_narrows_ids(self):
        x, ids, *others = self.tensors
        turned = torch.zeros(2, 5, dtype=torch.int64).mT
        self.assertEqual(self.described(self.made((x, turned, *others)), "topk_ids"), (library.INT32, [5, 2], [2, 1]))
        ready = self.made((x, ids.int(), *others))
        self.assertEqual((ready.narrow, self.described(ready, "topk_ids")), (False, (library.INT32, [5, 2], [2, 1])))

    def test_serves_like_tensors_alone(self):
        ready = self.made(self.tensors)
        self.assertTrue(ready.check(*[t.clone() if t.is_contiguous() else t for t in self.tensors]))
        for i, other in enumerate((self.tensors[0][:4], self.tensors[1].int(), self.tensors[2].bfloat16(),
                                   self.tensors[3].mT, self.tensors[4][:, :, :4])):
            self.assertFalse(ready.check(*self.tensors[:i], other, *self.tensors[i + 1:]), i)

    def test_no_gradient_is_lost(self):
        ready = self.made(self.tensors)
        tensors = (*self.tensors[:4], self.tensors[4].clone().requires_grad_())
        self.assertFalse(ready.check(*tensors))
        with torch.no_grad():
            self.assertTrue(self.made(tensors).check(*tensors))

    def on_cpu(self) -> tessera.ExpertParallel:
        experts = object.__new__(tessera.ExpertParallel)
        experts._session = make_session(structs.Desc(experts=16))
        return experts

    def test_call(self):
        """Addresses, conversion and results of calls, with a GPU, a stream and a library that are none."""
        experts, seen = self.on_cpu(), []

        def forward(handle, address, stream):
            args = structs.InferenceArgs.from_address(address)
            ids = (ctypes.c_int32 * 10).from_address(args.topk_ids.data)
            seen.append((handle.value, args.x.data, list(ids), args.w_down.data, args.o.data, stream))
            return 0

        experts._session.forward = forward
        with mock.patch.object(torch._C, "_cuda_getDevice", lambda: None, create=True), \
                mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, create=True):
            for variant in range(3):
                x, _, *others = self.tensors = [t.clone() for t in self.tensors]
                ids, out = torch.arange(10).view(5, 2) + variant, torch.zeros(5, 16, dtype=torch.bfloat16)
                o = experts(x, ids, *others, *([out] if variant == 2 else []))
                wanted = (8, x.data_ptr(), ids.flatten().tolist(), others[2].data_ptr(), o.data_ptr(), 77)
                self.assertEqual(seen[-1], wanted)
                self.assertEqual(o is out, variant == 2)
            self.assertEqual(len(experts._session.passes), 2)  # with o and without
            with self.assertRaisesRegex(RuntimeError, "training=True"):
                experts(x.requires_grad_(), ids, *others)
            with torch.no_grad():
                experts(x, ids, *others)
            with self.assertRaisesRegex(RuntimeError, "training=True"):
                experts(x, ids, *others)

    def call(self, streams: list, ids=None) -> tuple:
        """Calls on these streams: the object, and what the library got as ids."""
        experts, seen = self.on_cpu(), []

        def forward(handle, address, stream):
            args = structs.InferenceArgs.from_address(address)
            seen.append(list((ctypes.c_int32 * 10).from_address(args.topk_ids.data)))
            return 0

        experts._session.forward = forward
        x, zeros, *others = self.tensors
        for stream in streams:
            with mock.patch.object(torch._C, "_cuda_getDevice", lambda: None, create=True), \
                    mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index, s=stream: s, create=True), \
                    mock.patch.object(torch.cuda, "current_stream", lambda index, s=stream: f"stream {s}"):
                experts(x, zeros if ids is None else ids, *others)
        return experts, seen

    def test_ids_of_64_bits(self):
        outside = [-2**63, 2**63 - 1, 2**32, 2**32 + 3, -2**32 + 5, -1, 16]
        ids = torch.tensor([*outside, 0, 7, 15]).view(2, 5).mT
        (got,) = self.call([77], ids)[1]
        wanted = [i if 0 <= i < 16 else None for i in ids.flatten().tolist()]
        self.assertEqual([i if 0 <= i < 16 else None for i in got], wanted)

    def test_workspace_is_kept_for_every_stream(self):
        experts, _ = self.call([77, 78, 77, 78, 79])
        recorded = experts._session._workspace.record_stream.mock_calls
        self.assertEqual(recorded, [mock.call("stream 78"), mock.call("stream 79")])

    def test_refuses(self):
        with self.assertRaisesRegex(ValueError, "x: dtype torch.float64"):
            self.made((torch.zeros(5, 16, dtype=torch.float64), *self.tensors[1:]))
        with self.assertRaisesRegex(ValueError, "w_up: on meta; this rank computes on cpu"):
            self.made((*self.tensors[:3], self.tensors[3].to("meta"), self.tensors[4]))


class Structs(unittest.TestCase):
    """As C lays them out: a window for this desc, of known size."""

    def test_desc(self):
        desc = structs.Desc(ctypes.sizeof(structs.Desc), 0, 1, 100, 256, 128, 16, 4, 8, 0, 0, 0, 0, 0,
                                     2.5)
        needed = ctypes.c_size_t()
        library.check(structs.load().tessera_expert_parallel_window(ctypes.byref(desc),
                                                                                ctypes.byref(needed)))
        rows = 2 * 100 * 256 * (1 + 4)
        self.assertTrue(rows <= needed.value <= rows + 2**17, needed.value)
        desc.time_limit = -1
        with self.assertRaisesRegex(ValueError, "time_limit=-1"):
            library.check(structs.load().tessera_expert_parallel_window(ctypes.byref(desc),
                                                                                    ctypes.byref(needed)))


def one_gpu(x, ids, scores, w_up, w_down, activation):
    """The layer's o. With more tokens after them: few tokens have kernels of their own, whose sums have another order
    (decision 0022)."""
    tokens, more = x.shape[0], 512
    x, ids, scores = (torch.cat((t, t.new_zeros(more, t.shape[1]))) for t in (x, ids, scores))
    ids[tokens:] = torch.arange(ids.shape[1], device=ids.device)
    return tessera.routed_experts(x, ids, scores, w_up, w_down, activation=activation)[:tokens]


@unittest.skipUnless(IN_GROUP, "needs GPUs and torchrun")
class OnGpus(unittest.TestCase):
    def test_equals_one_gpu(self):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for activation in ("swiglu", "gelu"):
            halves = 2 if activation == "swiglu" else 1
            experts = tessera.ExpertParallel(**SHAPE, activation=activation)
            torch.manual_seed(1)
            d, n, e, k = SHAPE["hidden"], SHAPE["intermediate"], SHAPE["experts"], SHAPE["top_k"]
            options = {"dtype": torch.bfloat16, "device": "cuda"}
            w_up, w_down = torch.randn(e, halves * n, d, **options) / 16, torch.randn(e, d, n, **options) / 16
            torch.manual_seed(2 + rank)
            own = slice(rank * e // ranks, (rank + 1) * e // ranks)
            for tokens in (300, 0, 1, 17 + rank):
                x = torch.randn(tokens, d, **options)
                scores, ids = torch.rand(tokens, e, device="cuda").topk(k)
                placed = experts.input(tokens)
                for variant in ("made", "given", "in place", "with gaps", "at odd addresses"):
                    wanted = one_gpu(x, ids, scores, w_up, w_down, activation)
                    out = torch.full_like(x, torch.nan) if variant == "given" else None
                    source = placed.copy_(x) if variant == "in place" else x
                    if variant == "with gaps":  # between rows, which the kernel copies
                        source = torch.randn(tokens, d + 8, **options)[:, 8:].copy_(x)
                    elif variant == "at odd addresses":  # which it cannot
                        source = torch.randn(tokens, d + 1, **options)[:, 1:].copy_(x)
                    o = experts(source, ids, scores, w_up[own], w_down[own], out)
                    torch.cuda.synchronize()
                    experts.check()
                    self.assertTrue(torch.equal(o, wanted), f"{activation}, {tokens} tokens, {variant}")
                    self.assertTrue(out is None or o is out)
                    x = torch.randn_like(x)  # of the same kind, elsewhere
            with self.assertRaisesRegex(RuntimeError, "training=True"):  # though the tensors were served before
                experts(x, ids, scores, w_up[own].requires_grad_(), w_down[own])
            with self.assertRaisesRegex(ValueError, "overlap"):  # not the window's first rows
                experts(experts.input(4)[::2], ids[:2], scores[:2], w_up[own], w_down[own])
            with self.assertRaisesRegex(ValueError, "at most max_tokens"):
                experts.input(SHAPE["max_tokens"] + 1)
            dist.barrier()
            experts.close()

    def test_partial_combine(self):
        """Of a shape where the link would hold up the pass: near one GPU's o, the same bits every time."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        d, n, e, k, tokens = 512, 128, 32, 8, 300
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        torch.manual_seed(1)
        w_up, w_down = torch.randn(e, 2 * n, d, **options) / 16, torch.randn(e, d, n, **options) / 16
        own = slice(rank * e // ranks, (rank + 1) * e // ranks)
        torch.manual_seed(2 + rank)
        x = torch.randn(tokens, d, **options)
        scores, ids = torch.rand(tokens, e, device="cuda").topk(k)
        wanted = one_gpu(x, ids, scores, w_up, w_down, "swiglu").float()
        experts = tessera.ExpertParallel(max_tokens=16384, hidden=d, intermediate=n, experts=e, top_k=k,
                                         partial_combine=True)
        results = [experts(x, ids, scores, w_up[own], w_down[own]) for _ in range(20)]
        torch.cuda.synchronize()
        experts.check()
        error = ((results[0].float() - wanted).norm() / wanted.norm()).item()
        self.assertLess(error, 2**-8)
        if ranks > 1:
            self.assertGreater(error, 0)
        self.assertTrue(all(torch.equal(o, results[0]) for o in results))
        dist.barrier()
        experts.close()

    def test_leaves_after_a_fault(self):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        d, n, e, k = SHAPE["hidden"], SHAPE["intermediate"], SHAPE["experts"], SHAPE["top_k"]
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        torch.manual_seed(1)
        w_up, w_down = torch.randn(e, 2 * n, d, **options) / 16, torch.randn(e, d, n, **options) / 16
        own = slice(rank * e // ranks, (rank + 1) * e // ranks)
        x = torch.randn(17, d, **options)
        scores, ids = torch.rand(17, e, device="cuda").topk(k)
        lost = tessera.ExpertParallel(**SHAPE, time_limit=1)
        if rank == 0:  # the others do not come
            lost(x, ids, scores, w_up[own], w_down[own])
            torch.cuda.synchronize()
            with self.assertRaisesRegex(RuntimeError, "rank 0 waited"):
                lost.check()
            lost.abort()  # nor do they leave with it
        dist.barrier()
        lost.abort()
        lost.close()  # nothing is left of it
        experts = tessera.ExpertParallel(**SHAPE)
        o = experts(x, ids, scores, w_up[own], w_down[own])
        torch.cuda.synchronize()
        experts.check()
        self.assertTrue(torch.equal(o, one_gpu(x, ids, scores, w_up, w_down, "swiglu")))
        dist.barrier()
        experts.close()


if __name__ == "__main__":
    unittest.main()
