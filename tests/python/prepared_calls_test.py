# SPDX-License-Identifier: Apache-2.0
"""The code that prepared calls write out, for either kind of device: GPU, stream and library are made up."""

import contextlib
import gc
import types
import unittest
from unittest import mock

import torch
import torch._dynamo
from tessera import library
from tessera.ops import prepared_calls

CURRENT, OTHER = 1, 0


class Calls(unittest.TestCase):
    """`device` is that of the prepared call; its tensors lie in the memory of the CPU."""

    def setUp(self):
        self.current, self.entered, self.seen = CURRENT, [], []

        @contextlib.contextmanager
        def device(index):
            before, self.current = self.current, index
            self.entered.append(index)
            yield
            self.current = before

        for target, name, value in (
                (torch._C, "_cuda_getDevice", lambda: self.current), (torch.cuda, "device", device),
                (torch._C, "_cuda_getCurrentRawStream", lambda index: 1000 + index), (library, "context", lambda *_: 7),
                (prepared_calls, "_MAKERS", dict.fromkeys(("cpu", "cuda"), prepared_calls._MAKERS["cpu"]))):
            self.enterContext(mock.patch.object(target, name, value, create=True))
        self.addCleanup(prepared_calls.here.forget)

    def enterContext(self, manager):  # unittest has it from Python 3.11 on
        self.addCleanup(manager.__exit__, None, None, None)
        return manager.__enter__()

    def prepare(self, device: str, a, b, **how) -> prepared_calls.PreparedCall:
        prepared = prepared_calls.PreparedCall("grouped_gemm", torch.device(device), library.GroupedGemmArgs(),
                                               library.MoeDesc())
        prepared.read(("a", "b", "bias"), (a, b, None), unread=("b",))
        prepared.write("c", (3, 4), torch.float32, **how)
        prepared.write(None, (0,), torch.float32)

        def function(context, desc, args, stream):
            words = library.GroupedGemmArgs.from_address(args)
            self.seen.append((context, desc == library.ctypes.addressof(prepared.desc), words.a.data, words.b.data,
                              words.bias.data, words.c.data, words.workspace.data, stream))
            return 0

        prepared.function = function
        return prepared.ready(("test", device, len(prepared_calls.here.prepared)), 640)

    def check(self, device: str, stream):
        turned, b = torch.ones(4, 3).mT, torch.ones(2, 2)
        prepared = self.prepare(device, turned, b, zeroed=True, converted=torch.bfloat16)
        for step in (0, 5):
            c, nothing = prepared.run((turned, b), step=step)
            self.assertEqual((c.shape, c.dtype, nothing.shape), ((3, 4), torch.bfloat16, (0,)))
            self.assertEqual(c.abs().max(), 0)
            self.assertEqual(prepared.desc.step, step)
        context, own_desc, a, unread, absent, result, workspace, on = self.seen[-1]
        self.assertEqual((context, own_desc, unread, absent, on), (7, True, None, None, stream))
        self.assertNotIn(a, (None, turned.data_ptr()))  # a contiguous copy
        self.assertTrue(result and workspace)
        a, beside = torch.ones(3, 4), torch.ones(1)
        prepared = self.prepare(device, a, b)
        c, _ = prepared.run((a, b), [(prepared_calls.field_word(library.GroupedGemmArgs, "bias"), beside)])
        self.assertEqual(self.seen[-1][2:6], (a.data_ptr(), None, beside.data_ptr(), c.data_ptr()))

    def test_cpu(self):
        self.check("cpu", None)
        self.assertEqual(self.seen[-1][6], prepared_calls.here.scratch.data_ptr())
        self.assertEqual(self.entered, [])

    def test_current_gpu(self):
        self.check(f"cuda:{CURRENT}", 1000 + CURRENT)
        self.assertNotEqual(self.seen[-1][6], prepared_calls.here.scratch.data_ptr())
        self.assertEqual(self.entered, [])

    def test_another_gpu(self):
        self.check(f"cuda:{OTHER}", 1000 + OTHER)
        self.assertEqual(self.entered, [OTHER] * 3)
        self.assertEqual(self.current, CURRENT)

    def test_text_is_shared(self):
        a, b = torch.ones(3, 4), torch.ones(2, 2)
        self.prepare("cpu", a, b)
        misses = prepared_calls._compiled.cache_info().misses
        self.prepare("cpu", torch.ones(9, 4), b)
        self.assertEqual(prepared_calls._compiled.cache_info().misses, misses)

    def test_what_the_library_reads_is_alive_where_dynamo_traces(self):
        turned, b = torch.ones(4, 3).mT, torch.ones(2, 2)
        prepared, alive = self.prepare("cpu", turned, b), []

        def function(context, desc, args, stream):
            copy = library.GroupedGemmArgs.from_address(args).a.data
            alive.append(any(type(t) is torch.Tensor and t.data_ptr() == copy for t in gc.get_objects()))
            return 0

        prepared.function = function
        self.addCleanup(torch._dynamo.reset)
        torch._dynamo.reset()
        for run in (prepared.run, torch.compile(prepared.run, backend="eager")):
            run((turned, b))
        self.assertEqual(alive, [True, True])

    def test_tensors_on_two_devices(self):
        """Named before anything else is looked at, as torch writes devices."""
        on = {device: types.SimpleNamespace(device=torch.device(device)) for device in ("cuda:0", "cuda:1", "cpu")}
        for first, second in (("cuda:1", "cuda:0"), ("cuda:0", "cpu"), ("cpu", "cuda:1")):
            prepared = prepared_calls.PreparedCall("moe_forward", torch.device(first), library.ForwardArgs(),
                                                   library.MoeDesc())
            with self.assertRaises(ValueError) as refusal:
                prepared.read(("x", "b_router", "w_up"), (on[first], None, on[second]))
            self.assertEqual(str(refusal.exception),
                             f"x is on {first}, w_up on {second}, all of a call on one device; move one, "
                             f"such as x.to('{second}') or module.to('{first}')")

    def test_errors(self):
        a, b = torch.ones(3, 4), torch.ones(2, 2)
        prepared = self.prepare("cpu", a, b)
        prepared.function = lambda *_: 1
        with self.assertRaises(ValueError):
            prepared.run((a, b))


if __name__ == "__main__":
    unittest.main()
