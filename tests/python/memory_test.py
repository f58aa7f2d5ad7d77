# SPDX-License-Identifier: Apache-2.0
"""Memory of large results that is kept for later ones: only what nobody uses any more is used again."""

import collections
import copy
import io
import itertools
import os
import subprocess
import sys
import threading
import unittest
from unittest import mock

import operators
import tessera
import tier
import torch
from tessera.ops import memory, prepared_calls

SIZE = 4 * memory.LARGE


def results(count=1, size=SIZE):
    """Tensors over kept memory, of ones."""
    made = [memory.tensor((size // 4096, 1024), (1024, 1), torch.float32, size) for _ in range(count)]
    for tensor in made:
        tensor.fill_(1)
    return made


class Kept(unittest.TestCase):
    def setUp(self):
        memory.forget()
        self.addCleanup(memory.forget)

    def kept(self) -> int:
        return sum(kept.size for kept in memory._kept)

    def test_the_next_result_of_its_size_has_it(self):
        first, second = results(2)
        addresses = {first.data_ptr(), second.data_ptr()}
        self.assertEqual([address % 64 for address in addresses], [0, 0])
        del first, second
        self.assertEqual({t.data_ptr() for t in results(2)}, addresses)
        other = memory.tensor((SIZE,), (1,), torch.uint8, SIZE)
        self.assertIn(other.data_ptr(), addresses)
        self.assertEqual((other.shape, other.stride(), other.dtype), ((SIZE,), (1,), torch.uint8))
        self.assertEqual(results(size=SIZE + memory.LARGE)[0].untyped_storage().nbytes(), SIZE + memory.LARGE)

    def test_what_is_in_use_is_left_alone(self):
        def storage_alone(t):
            return t.untyped_storage()

        def saved_by_autograd(t):
            leaf = torch.ones((), requires_grad=True)
            return leaf * t

        holders = {
            "tensor": lambda t: t, "view": lambda t: t[1:, :5], "detached": lambda t: t.detach(),
            "data": lambda t: t.data, "storage": storage_alone, "numpy": lambda t: t.numpy(),
            "memoryview": lambda t: memoryview(t.numpy()),
            "dlpack": lambda t: t.__dlpack__(), "graph": lambda t: saved_by_autograd(t).grad_fn,
            "parameter": torch.nn.Parameter, "lazy clone": torch._lazy_clone}
        for name, hold in holders.items():
            with self.subTest(name):
                memory.forget()
                result, = results()
                address = result.data_ptr()
                held = hold(result)
                del result
                for _ in range(2):
                    new, = results()
                    self.assertNotEqual(new.data_ptr(), address)
                del held, new
                addresses = {t.data_ptr() for t in results(2)}
                self.assertTrue(address in addresses or name == "lazy clone")  # that one has moved

    def test_what_has_moved_is_not_used_again(self):
        for name, move in (("resized", lambda t: t.resize_(2 * SIZE)), ("shared", lambda t: t.share_memory_()),
                           ("emptied", lambda t: t.untyped_storage().resize_(0))):
            with self.subTest(name):
                memory.forget()
                result, = results()
                move(result)
                del result
                new, = results()
                self.assertEqual((new.untyped_storage().nbytes(), new.is_shared()), (SIZE, False))
                self.assertEqual(float(new.sum()), SIZE / 4)
                self.assertEqual(self.kept(), SIZE)

    def test_no_more_is_kept_than_was_in_use_at_once(self):
        most = 0
        for step in range(20):
            held = [results(size=SIZE + memory.LARGE * (step * k % 7))[0] for k in range(1, 4)]
            most = max(most, sum(t.untyped_storage().nbytes() for t in held))
            del held
            self.assertLessEqual(self.kept(), most)
        self.assertGreater(self.kept(), 0)
        one, = results(size=SIZE - memory.LARGE)
        self.assertLess(self.kept(), most)

    def test_those_that_were_used_last_stay(self):
        def sizes():
            return [2 * kept.size // SIZE for kept in memory._kept]

        held = [results(size=size * SIZE)[0] for size in (1, 2, 3, 4)]
        del held
        results(size=2 * SIZE)
        self.assertEqual(sizes(), [2, 6, 8, 4])
        results(size=SIZE // 2)  # takes the place of the first
        self.assertEqual(sizes(), [6, 8, 4, 1])
        held = [results(size=size * SIZE)[0] for size in (3, 4)]
        self.assertEqual(sizes(), [4, 1, 6, 8])
        held += results(size=5 * SIZE)  # takes the place of both that are idle
        self.assertEqual(sizes(), [6, 8, 10])
        del held[2:]
        results(size=SIZE)
        self.assertEqual(sizes(), [6, 8, 2])

    def test_empty_cache(self):
        held, idle = results(2)
        del idle
        prepared_calls.here.grow(1000)
        tessera.empty_cache()
        self.assertEqual((self.kept(), prepared_calls.here.scratch.numel()), (0, 0))
        self.assertEqual(float(held.sum()), SIZE / 4)
        del held
        self.assertEqual(self.kept(), 0)

    def test_tensors_are_like_others(self):
        result, = results()
        file = io.BytesIO()
        torch.save(result, file)
        self.assertLess(file.tell(), SIZE + 10000)
        self.assertNotEqual(copy.deepcopy(result).data_ptr(), result.data_ptr())
        self.assertFalse(result._is_view())
        with torch.inference_mode():
            inference, = results()
        address = inference.data_ptr()
        self.assertTrue(inference.is_inference())
        del inference
        normal, = results()
        self.assertEqual((normal.data_ptr(), normal.is_inference()), (address, False))
        normal.requires_grad_().sum().backward()
        self.assertEqual(float(normal.grad.sum()), SIZE / 4)

    def test_a_child_process_has_its_own(self):
        held, idle = results(2)
        del idle
        child = os.fork()
        if child == 0:
            try:
                torch.set_num_threads(1)  # OpenMP's are the parent's
                held.zero_()
                mine = results(2)
                os._exit(int(sum(float(t.sum()) for t in mine) != SIZE / 2))
            except BaseException:
                os._exit(2)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        self.assertEqual(float(held.sum()), SIZE / 4)

    def test_threads(self):
        wrong, queue = [], collections.deque()

        def work(number):
            for step in range(200):
                tensor = memory.tensor((1024,), (1,), torch.float32, 4096)
                tensor.fill_(1000 * number + step)
                queue.append((tensor, 1000 * number + step))
                if step % 3:
                    held, value = queue.popleft()  # most often another thread's, freed here
                    if not bool((held == value).all()):
                        wrong.append(value)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        interval = sys.getswitchinterval()
        self.addCleanup(sys.setswitchinterval, interval)
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wrong += [value for held, value in queue if not bool((held == value).all())]
        self.assertEqual(wrong, [])

    def test_a_torch_that_counts_in_another_way(self):
        for count in (None, lambda _, numbers=itertools.count(): next(numbers)):
            with mock.patch.object(memory, "_use_count", count):
                memory._references_tell.cache_clear()
                self.addCleanup(memory._references_tell.cache_clear)
                result, = results()
                self.assertEqual((self.kept(), result.shape), (0, (SIZE // 4096, 1024)))

    def test_results_may_outlive_everything(self):
        code = ("from tessera.ops import memory\n"
                "held, cycle = [[memory.tensor((1 << 22,), (1,), memory.torch.uint8, 1 << 22)] for _ in range(2)]\n"
                "cycle.append(cycle)")
        self.assertEqual(subprocess.run([sys.executable, "-c", code], check=False).returncode, 0)


@tier.deep
class Layers(operators.Operators, unittest.TestCase):
    """Everything that torch asks of an operator, with all results over kept memory."""

    def setUp(self):
        super().setUp()
        prepared_calls.here.forget()  # prepared calls remember what is large
        self.addCleanup(prepared_calls.here.forget)
        self.addCleanup(memory.forget)
        large = mock.patch.object(memory, "LARGE", 1)
        large.start()
        self.addCleanup(large.stop)

    def test_results_and_gradients_have_memory_of_earlier_ones(self):
        def step():
            o = self.routed(self.tensors)
            gradients = self.gradients(o)
            results = o, *gradients
            return {t.untyped_storage().data_ptr() for t in results}, [t.clone() for t in results]

        memory.forget()
        first, values = step()
        second, again = step()
        self.assertEqual((first, len(first)), (second, 5))
        for a, b in zip(values, again, strict=True):
            self.assertTrue(torch.equal(a, b))

    def test_h_of_a_graph_is_left_alone(self):
        graphs = [self.routed(self.tensors) for _ in range(3)]
        expected = [g.clone() for g in self.gradients(graphs[0])]
        for graph in graphs[1:]:
            for got, wanted in zip(self.gradients(graph), expected, strict=True):
                self.assertTrue(torch.equal(got, wanted))


if __name__ == "__main__":
    unittest.main()
