# SPDX-License-Identifier: Apache-2.0
"""Experts over several hosts, pretended by processes of this machine over gloo, of which one is lost or late: what the
others say, and when; and waits that are a stream's, as NCCL's are."""

import contextlib
import dataclasses
import os
import threading
import time
import unittest
from unittest import mock

import ranks
import tier
import torch
import torch.distributed as dist
from several_hosts_cases import Case, forward, together
from tessera.hosts import experts as hosts_experts
from tessera.hosts import faults, messages, topology, watch

LOSSY = ("random", "zipf", "repeated")  # all hosts have something for each other


@dataclasses.dataclass(frozen=True)
class Loss:
    """A rank that is lost when all have made a training pass and the forward pass of another. at: the pass that it does
    not make, "forward", "backward" or "inference". by_stream: waits for other hosts are those of a stream, as NCCL's
    are."""

    tokens: tuple = (4, 4, 4, 4)
    hosts: int = 2
    exchange: str = "static"
    routing: str = "random"
    overlap: bool = False
    at: str = "backward"
    gone: int = 3
    dies: bool = True
    by_stream: bool = False

    def case(self) -> Case:
        return Case(self.tokens, routing=self.routing)


waits: list[threading.Event] = []  # of this process's stream; each is set when it is over


def beside_the_host(work) -> tuple:
    """As watch.on_stream on a GPU: the host goes on, here when a while has passed, and finds no message there."""
    passed = threading.Event()
    waits.append(passed)

    def wait():
        with contextlib.suppress(RuntimeError):
            work.wait()
            passed.set()

    threading.Thread(target=wait, daemon=True).start()
    passed.wait(0.5)
    return lambda: True, passed.is_set


def until_one_is_gone(rank: int, loss: Loss) -> tuple:
    """(seconds of the wait, its error, that of the pass behind it)."""
    case = loss.case()
    leaves, ids, d_o = case.part(rank)
    # What first passes load may take a busy machine more than a second: they are over before a wait is limited to that.
    unhurried = case.make(hosts=loss.hosts, exchange=loss.exchange, overlap=loss.overlap)
    forward(unhurried, leaves, ids).backward(d_o)
    unhurried.check()
    unhurried.close()
    dist.barrier()
    with contextlib.ExitStack() as patched:
        if loss.by_stream:
            patched.enter_context(mock.patch.object(messages, "waits_on_stream", lambda device: True))
            patched.enter_context(mock.patch.multiple(watch, on_stream=beside_the_host, beside_captures=lambda: None))
        experts = case.make(hosts=loss.hosts, exchange=loss.exchange, overlap=loss.overlap, time_limit=1)
        forward(experts, leaves, ids).backward(d_o)
        experts.check()
        o = forward(experts, leaves, ids)
        if rank == loss.gone:
            for passed in waits:  # what it has sent until here arrives, however busy the machine is
                passed.wait(20)
            if loss.dies:
                os._exit(1)
            time.sleep(13)
            return ()
        start = time.monotonic()
        try:
            if loss.at == "backward":
                o.backward(d_o)
            else:
                with torch.no_grad() if loss.at == "inference" else contextlib.nullcontext():
                    forward(experts, leaves, ids)
            while loss.by_stream and time.monotonic() - start < 20:  # the host goes on, as beside a stream
                experts.check()
                time.sleep(0.05)
        except RuntimeError as error:
            seconds, first = time.monotonic() - start, str(error)
        try:
            forward(experts, leaves, ids)
        except RuntimeError as error:
            experts.abort()
            return seconds, first, str(error)
    return ()


def a_late_rank(rank: int) -> dict:
    """Before each pass another rank sleeps."""
    case = Case((5, 3, 0, 4))
    experts = case.make(hosts=2, overlap=True)
    leaves, ids, d_o = case.part(rank)
    time.sleep(0.3 * (rank == 3))
    o = forward(experts, leaves, ids)
    time.sleep(0.3 * (rank == 0))
    o.backward(d_o)
    experts.check()
    experts.close()
    return {name: leaf.grad for name, leaf in leaves.items()}


class Faults(unittest.TestCase):
    def check(self, loss: Loss, limit: float = 5):
        """limit: seconds. A rail's error comes within time_limit, one second, and two for what others report."""
        outcomes = ranks.run(len(loss.tokens), until_one_is_gone, loss, dies=(loss.gone,))
        local = len(loss.tokens) // loss.hosts
        of_hosts = [topology.Topology(0, len(loss.tokens), loss.hosts).name(host) for host in range(loss.hosts)]
        for rank, outcome in enumerate(outcomes):
            if rank == loss.gone:
                continue
            with self.subTest(loss, rank=rank):
                self.assertEqual(outcome[0], "result", outcome)
                self.assertTrue(outcome[1], "no error")
                seconds, first, second = outcome[1]
                self.assertLess(seconds, limit)
                at = "backward" if loss.at == "backward" else "forward"
                self.assertRegex(first, rf"^rank {rank} at pass 4 \({at}\), .* did not come \(.*\).*; "
                                        rf"last reported: .*rank {loss.gone} at pass 2.*; abort")
                # Who shares neither rail nor host with a rank that stalls fails before those that share its host.
                shares = rank // local == loss.gone // local or rank % local == loss.gone % local
                lost = of_hosts[loss.gone // local]
                self.assertIn(f"rank {loss.gone} of {lost}" if loss.dies or shares else f"of {lost} did not", first)
                if rank // local == loss.gone // local:
                    self.assertIn(f"of its own {of_hosts[rank // local]} did not come", first)
                self.assertRegex(second, "an earlier pass has failed")

    def test_a_rank_that_dies(self):
        self.check(Loss())

    def test_a_rank_that_dies_while_a_stream_waits(self):
        self.check(Loss(tokens=(4, 4), gone=1, by_stream=True, overlap=True))

    @tier.deep
    def test_a_rank_of_two_on_its_host_dies_while_a_stream_waits(self):
        self.check(Loss(by_stream=True), 8)

    def test_a_rank_that_is_late(self):
        got = together(ranks.results(ranks.run(4, a_late_rank)))
        for name, tensor in Case((5, 3, 0, 4)).expected_bits(2).items():
            if name != "o":
                self.assertTrue(torch.equal(got[name], tensor), name)

    @tier.deep
    def test_every_pass_and_topology(self):
        """Where the lost rank is the first one the store goes with it."""
        for tokens, hosts, gone in (((6, 4), 2, 1), ((5, 0, 9, 4), 2, 1), ((5, 0, 9, 4), 4, 2),
                                    ((3, 4, 0, 6, 2, 5), 3, 2), ((0, 4, 0, 6, 0, 5), 2, 4)):
            for i, at in enumerate(("forward", "backward", "inference")):
                for exchange in ("static", "counted"):
                    self.check(Loss(tokens, hosts, exchange, LOSSY[(gone + i) % len(LOSSY)], overlap=i % 2 == 0, at=at,
                                    gone=gone, by_stream=exchange == "static" and i > 0), 12)

    @tier.deep
    def test_ranks_that_stall(self):
        """Those of the lost rank's host wait 10 s more than those of its rail."""
        for exchange in ("static", "counted"):
            self.check(Loss(exchange=exchange, dies=False), 1 + 10 + 2 * 2 + 1)
        self.check(Loss(tokens=(4, 4), gone=1, dies=False, by_stream=True))


class Groups(unittest.TestCase):
    """What groups are made with, where NCCL is not there to make them."""

    def made(self, leaves_sms: bool) -> list[tuple]:
        """Of each group: its ranks, seconds, torch's variable for groups without a watchdog, and options."""
        made = []

        def new_group(ranks, timeout, backend, pg_options):
            made.append((ranks, timeout.total_seconds(), os.environ.get(topology.NO_WATCHDOG), pg_options))

        of_nccl = mock.Mock(Options=lambda: mock.Mock(config=mock.Mock()))
        with mock.patch.multiple(dist, new_group=new_group, get_backend=lambda group: "nccl", get_rank=lambda: 0), \
                mock.patch.object(dist, "ProcessGroupNCCL", of_nccl, create=True):
            topology.make_groups({(0, 1, 2, 3): topology.Topology(0, 4, 2)}, None, 5, leaves_sms)
        return made

    def test_rails_are_watched_by_us_alone(self):
        for before in (None, "0"):
            with mock.patch.dict(os.environ):
                os.environ.pop(topology.NO_WATCHDOG, None)
                if before is not None:
                    os.environ[topology.NO_WATCHDOG] = before
                self.assertEqual(self.made(False), [([0, 1], 15, before, None), ([2, 3], 15, before, None),
                                                    ([0, 2], 5, "1", None), ([1, 3], 5, "1", None)])
                self.assertEqual(os.environ.get(topology.NO_WATCHDOG), before)

    def test_rails_beside_passes_fit_into_what_those_leave(self):
        options = [options for *_, options in self.made(True)]
        self.assertEqual(options[:2], [None, None])
        for one in options[2:]:
            self.assertEqual((one.config.max_ctas, one.config.cga_cluster_size), (topology.RAIL_BLOCKS, 0))
        self.assertIsNot(options[2], options[3])  # torch writes to them
        self.assertEqual(topology.RAIL_SMS, topology.RAIL_BLOCKS + 8)


def failing() -> faults.Faults:
    """Of rank 0 of two hosts of one rank, in its first pass; the other rank has reported nothing."""
    store = mock.Mock(check=lambda keys: False)
    with mock.patch.object(dist.distributed_c10d, "_get_default_store", lambda: store):
        made = faults.Faults(topology.Topology(0, 2, 2), "name")
    made.begin("forward")
    return made


class Watched(unittest.TestCase):
    """Waits that are a stream's, of which only the times count."""

    def watched(self, reached, passed, seconds: float) -> tuple:
        """(the failure, whether what the stream waits for was let go) when a while has passed."""
        told = failing()
        let_go = mock.Mock()
        with mock.patch.multiple(watch, on_stream=lambda work: (reached, passed), beside_captures=lambda: None):
            watching = watch.Watch(told, 0.2, let_go)
            watching.wait("rows", 1, None)
            told.begin("backward")  # the host goes on
            end = time.monotonic() + seconds
            while time.monotonic() < end and not let_go.called:
                time.sleep(0.01)
            watching.close()
        return told.failure, let_go.called

    def test_the_rank_and_the_pass_of_the_wait_are_named(self):
        failure, let_go = self.watched(lambda: True, lambda: False, 20)
        self.assertRegex(failure, r"^rank 0 at pass 1 \(forward\), rows: rank 1 of host 1 \(rank 1\) did not come "
                                  r"\(no message within 0.2 s\); last reported: rank 1 has reported nothing; abort")
        self.assertTrue(let_go)

    def test_check_raises_what_was_in_vain(self):
        of_rail = failing()
        of_rail.fail("rows", 1, "no message", of_rail.moment)
        waited, rows = "rank 0 waited 11 s at publish in pass 3", "rank 0 has 9 rows in pass 3, and memory for 8"
        for told, raised, says in (
                (of_rail, None, "rows: rank 1 of host 1 (rank 1) did not come (no message)"),
                (failing(), waited, f"within the host: a rank of its own host 0 (rank 0) did not come ({waited})"),
                (failing(), rows, f"within host 0 (rank 0): {rows}")):
            check = mock.Mock(side_effect=raised and RuntimeError(raised))
            experts = mock.Mock(faults=told, session=mock.Mock(check=check))
            with self.assertRaises(RuntimeError) as raises:
                hosts_experts.HostsExperts.check(experts)
            self.assertIn(says, str(raises.exception))

    def test_places_in_other_sources_are_left_out(self):
        for error, left in (
                ("[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 2000ms for "
                 "send operation to complete", "Timed out waiting 2000ms for send operation to complete"),
                ("NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:4255, remote process exited "
                 "or there was a network error, NCCL version 2.28.9\nLast error:\nsocket",
                 "remote process exited or there was a network error, NCCL version 2.28.9")):
            told = failing()
            told.fail("rows", 1, error, told.moment)
            self.assertIn(f"rank 1 of host 1 (rank 1) did not come ({left}); ", told.failure)

    def test_abort_ends_all_of_it(self):
        late = mock.Mock(abort=mock.Mock(side_effect=RuntimeError("abort timed out")))
        experts, other = mock.Mock(device=torch.device("cuda", 0)), mock.Mock()
        experts._groups = (late, other)
        hosts_experts.HostsExperts.abort(experts)
        for call in (late.abort, other.abort, experts.rail.close, experts.session.abort, experts._leave):
            call.assert_called_once_with()

    def test_numbers_that_did_not_come_are_no_numbers(self):
        told, numbers = failing(), torch.tensor([[3, 4], [1, 2]])
        with mock.patch.multiple(dist, get_global_rank=lambda group, host: host):
            rail = messages.Rail(None, told, torch.device("cpu"), 1)
        self.assertEqual(rail.read(numbers), [[3, 4], [1, 2]])
        told.fail("numbers of rows", 1, "no message", told.moment)
        for call in (lambda: rail.read(numbers), lambda: rail.exchange_counts(numbers[0])):
            with self.assertRaisesRegex(RuntimeError, "numbers of rows: rank 1 of host 1"):
                call()

    def test_time_before_the_wait_does_not_count(self):
        self.assertEqual(self.watched(lambda: False, lambda: False, 0.6), (None, False))

    def test_a_message_that_came(self):
        self.assertEqual(self.watched(lambda: True, lambda: True, 0.6), (None, False))


if __name__ == "__main__":
    unittest.main()
