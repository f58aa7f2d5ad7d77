# SPDX-License-Identifier: Apache-2.0
"""The experts of a layer spread over the ranks of a process group: expert_parallel.hpp for PyTorch on the GPUs of a
host, and tessera.hosts over several hosts or on the CPU.

    experts = tessera.ExpertParallel(max_tokens=8192, hidden=2048, intermediate=768, experts=128, top_k=8)
    o = experts(x, topk_ids, topk_weights, w_up, w_down)    # on every rank, with its own tokens and experts

Forward is one launch; gradients, with training=True, are unfused (expert_parallel_training.py). What passes share is a
Session (expert_parallel_session.py).

NVLink multicast must be off: set NCCL_NVLS_ENABLE=0 before the first NCCL call of the process.
"""

import torch

from tessera import expert_parallel_training, functional, library, options
from tessera.expert_parallel_checks import check_shapes, narrowed
from tessera.expert_parallel_library import TENSORS
from tessera.expert_parallel_session import ADDRESS_WORDS, PreparedPass, Session, check_devices
from tessera.hosts.experts import HostsExperts, over_hosts
from tessera.ops.prepared_calls import guard


class ExpertParallel:
    """A session of P ranks, one per GPU, among which the experts of a layer are spread. bf16, on the CPU also fp32.

    Rank r of the P ranks owns experts [r*E/P, (r+1)*E/P). All ranks make the same passes in the same order, also those
    in which they have no token; layers of one shape share one session. Whether a pass has gradients, and of what, is
    the same on all ranks. Making and closing a session are collective; where one rank fails to join, all of them raise.
    Everything but `device` and `windows` is equal on all ranks.

    After a backward pass, and after an unfused forward pass, the host waits until the number of rows is known, which it
    was when the GPU began to multiply. Where memory for a sixteenth more rows than the layer had in its last pass was
    not enough on some rank, all ranks make the pass again. With max_rows the host does not wait; where there are more
    rows than that the pass is void, and check() says so.

    With `hosts` the ranks are those of several hosts, which exchange rows by torch.distributed, and with device="cpu"
    ranks of one host do, too: docs/several-hosts.md says when that pays, what is sent and whose bits o has. There all
    ranks of the default group make their objects at the same time, also where `group` is a part of it.

    Larger passes have to be split: max_tokens * K * K is at most 2^32, and a rank's pool, P * max_tokens * K rows and
    127 for each of its experts, has at most 2^31 - 1.

    Args:
        max_tokens: Most tokens of any rank in any pass, 1 to 2^24.
        hidden: d, a multiple of 8 up to 2^20.
        intermediate: n, a multiple of 8 up to 2^20.
        experts: E of all ranks together, a multiple of P, at most 512.
        top_k: K experts per token, at most 32 and at most E.
        activation: swiglu, geglu, geglu-erf, reglu, clamped-swiglu, relu, relu2, silu, gelu or gelu-erf.
        alpha: Slope of clamped-swiglu's gate, without unit. Other activations do not read it.
        limit: Bound at which clamped-swiglu clamps gate and up. Other activations do not read it.
        up_offset: What clamped-swiglu adds to up. Other activations do not read it.
        partial_combine: Where the link would hold up the pass, a rank may send back one weighted sum of a token's
            choices there, rounded to bf16, instead of each result. Then the bits of o, the same every time, depend on P
            and on the token's rank.
        training: Passes may have gradients, or biases with any activation; windows and workspace are larger.
        save: "h" saves the pre-activation for backward, "x" makes it again. Only with training.
        max_rows: A bound of the rows that a rank's experts have in any pass, 1 to P * max_tokens * K, or None. Only
            with training.
        group: Process group of torch.distributed with 1 to 8 ranks on each host; None: the default group.
        device: This rank's GPU, such as "cuda:0", or "cpu", where rows go over gloo; None: torch's current GPU.
        windows: Addresses of memory of all ranks, as this rank's GPU sees it, zeroed, of `window_bytes` each. None:
            NCCL makes them.
        time_limit: Seconds that a pass waits for another rank, above 0 and at most 86390; with `hosts` those of its own
            host for 10 more.
        hosts: How many hosts the ranks are on, equally many on each and those of a host consecutive; "auto": as many as
            there are names of hosts (NCCL_HOSTID, or host name and boot id).
        exchange: Between hosts: "static" sends max_tokens rows to each host, without numbers that the host would wait
            for; "counted" the rows that are needed, after their numbers. None: static for up to 4 hosts.
        overlap: Between hosts: rows and sums cross while experts multiply. A GPU's passes leave 16 SMs to them.
        sums_on_owners: The old name of partial_combine, which warns until 1.0.

    Raises:
        ValueError: A bound above is broken, ranks differ in an argument, or they cannot be divided into hosts.
        RuntimeError: There is no GPU, NCCL cannot make windows, NVLink multicast is on, or another rank cannot join, or
            has failed before it opened its window: then the others wait for it for the longer of time_limit and 120 s.
        MemoryError: A window or the workspace does not fit.

    Example:
        >>> experts = tessera.ExpertParallel(max_tokens=8192, hidden=2048, intermediate=768, experts=128,
        ...                                  top_k=8)                                    # doctest: +SKIP
        >>> o = experts(x, topk_ids, topk_weights, w_up, w_down)                         # doctest: +SKIP
    """

    _hosts = None  # what serves several hosts, or the CPU, in place of a session

    def __init__(self, *, max_tokens: int, hidden: int, intermediate: int, experts: int, top_k: int,
                 activation: str = "swiglu", alpha: float = 1.702, limit: float = 7.0, up_offset: float = 1.0,
                 partial_combine: bool = False, training: bool = False, save: str = "h", max_rows: int | None = None,
                 group=None, device=None, windows=None, time_limit: float = 30, hosts: int | str = 1,
                 exchange: str | None = None, overlap: bool = False, sums_on_owners: bool | None = None):
        partial_combine = options.renamed("sums_on_owners", sums_on_owners, "partial_combine", partial_combine, False)
        arguments = {
            "max_tokens": max_tokens, "hidden": hidden, "intermediate": intermediate, "experts": experts,
            "top_k": top_k, "activation": activation, "alpha": alpha, "limit": limit, "up_offset": up_offset,
            "partial_combine": partial_combine, "training": training, "save": save, "max_rows": max_rows,
            "group": group, "device": device, "windows": windows, "time_limit": time_limit}
        if over_hosts(hosts, device):
            self._hosts = HostsExperts(hosts=hosts, exchange=exchange, overlap=overlap, **arguments)
            return
        if exchange is not None:
            raise ValueError(f"exchange={exchange!r}: between hosts; leave it out with hosts=1")
        if overlap:
            raise ValueError("overlap=True: of rows between hosts; leave it out with hosts=1")
        self._session = Session(**arguments)

    @property
    def window_bytes(self) -> int:
        """Bytes that the window of each rank needs.

        Returns:
            The bytes, the same on all ranks.

        Raises:
            ValueError: A bound of the session is broken.
        """
        return (self._session if self._hosts is None else self._hosts.session).window_bytes()

    def __call__(self, x, topk_ids, topk_weights, w_up, w_down, out=None, *, b_up=None, b_down=None):
        """A pass on this rank's tokens and experts, enqueued on the current stream. Differentiable with training.

        Args:
            x: [T,d] bf16, or on the CPU fp32, T from 0 to max_tokens; weights and biases have its type.
            topk_ids: [T,K] int32 or int64; ids outside [0,E) own no row.
            topk_weights: [T,K] of a floating type; a pass without gradients and biases takes fp32 alone.
            w_up: [E/P,2n,d], gate rows first, or [E/P,n,d] where the activation is not gated.
            w_down: [E/P,d,n].
            out: [T,d] of x's type that gets the result, or None. Only without gradients and biases.
            b_up: [E/P,2n] or [E/P,n], or None. With training, or with clamped-swiglu; then b_down too.
            b_down: [E/P,d], or None, as b_up.

        Returns:
            o [T,d] of x's type, or `out`.

        Raises:
            ValueError: A shape, dtype or device is none of these, or only one of the biases is given.
            RuntimeError: Gradients or biases ask for training=True, an earlier pass has failed, or with `hosts` a rank
                did not come, which is named.

        Example:
            >>> with torch.no_grad():                                                    # doctest: +SKIP
            ...     o = experts(x, topk_ids, topk_weights, w_up, w_down)
        """
        if self._hosts is not None:
            return self._hosts(x, topk_ids, topk_weights, w_up, w_down, out, b_up, b_down)
        session, layer = self._session, w_up.data_ptr()  # before it is cast
        autocast, ready = torch._C._is_any_autocast_enabled(), session.ready
        if (ready is not None and out is None and b_up is None and b_down is None and not autocast
                and torch.is_grad_enabled() and ready.check(x, topk_ids, topk_weights, w_up, w_down)
                and (layer | w_down.data_ptr()) % 16 == 0 and torch._C._cuda_getDevice() == session.device.index):
            return expert_parallel_training.run_fused(session, layer, ready.alike, x, topk_ids, topk_weights, w_up,
                                                      w_down)
        if autocast:
            x, w_up, w_down, b_up, b_down = functional.autocast((x, w_up, w_down, b_up, b_down))
        if b_up is not None or b_down is not None:
            return self._general(layer, x, topk_ids, topk_weights, w_up, w_down, b_up, b_down, out)
        tensors = (x, topk_ids, topk_weights, w_up, w_down) if out is None else (
            x, topk_ids, topk_weights, w_up, w_down, out)
        kind = (out is None, torch.is_grad_enabled())
        prepared = session.passes.get(kind)
        if prepared is None or prepared.check is None or not prepared.check(*tensors):
            if kind[1] and any(tensor.requires_grad for tensor in tensors):
                return self._general(layer, x, topk_ids, topk_weights, w_up, w_down, None, None, out)
            prepared = session.passes[kind] = PreparedPass(tensors, session.device)
        index = session.device.index
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return self(x, topk_ids, topk_weights, w_up, w_down, out)
        if prepared.narrow:
            topk_ids = narrowed(topk_ids, session.desc.experts)
        if out is None:
            make, how = prepared.make_o
            out = make(*how)
        words = prepared.words
        for word, tensor in zip(ADDRESS_WORDS, (x, topk_ids, topk_weights, w_up, w_down, out), strict=True):
            words[word] = tensor.data_ptr()
        code = session.forward(session.handle, prepared.address, session.stream())
        if code:
            library.check(code)
        return out

    def _general(self, layer: int, x, topk_ids, topk_weights, w_up, w_down, b_up, b_down, out) -> torch.Tensor:
        """A pass with gradients or biases. Tensors that are like those of the last such pass are not checked again."""
        session, training = self._session, expert_parallel_training
        tensors = (x, topk_ids, topk_weights, w_up, w_down, b_up, b_down)
        given = tensors if b_up is not None and b_down is not None else tensors[:5]
        kind = "general", len(given), torch.is_grad_enabled()
        like_before = session.passes.get(kind) if session.training else None
        if out is not None or len(given) == 5 and b_up is not b_down or like_before is None or not like_before(*given):
            self._check_general(tensors, out)
            session.passes[kind] = guard(given)
        if torch._C._cuda_getDevice() != session.device.index:
            with torch.cuda.device(session.device):
                return self._general_here(layer, *tensors)
        ready = training.ready(session, *given) if session.training and len(given) == 5 else None
        if ready is not None:
            session.ready = ready  # the next pass on such tensors is made without another look
            return training.run_fused(session, layer, ready.alike, *given)
        return self._general_here(layer, *tensors)

    def _general_here(self, layer: int, x, topk_ids, *others) -> torch.Tensor:
        if topk_ids.dtype is torch.int64:
            topk_ids = narrowed(topk_ids, self._session.desc.experts)
        return expert_parallel_training.run(self._session, layer, x, topk_ids.contiguous(), *others)

    def _check_general(self, tensors: tuple, out) -> None:
        session, training = self._session, expert_parallel_training
        b_up, b_down = tensors[5:]
        if (b_up is None) != (b_down is None):
            raise ValueError("b_up, b_down: give both or neither")
        if session.training is None and (training.needs_gradients(*tensors) or not session.fuses(*tensors[3:])):
            raise RuntimeError("a pass with gradients, or with biases that one launch does not take (of another "
                               "activation than clamped-swiglu, or beside tensors that are not contiguous): make the "
                               "object with training=True, or call it under torch.no_grad() and without biases")
        if out is not None:
            raise ValueError("out: a pass with gradients or biases makes its own result")
        check_devices((*TENSORS[:5], "b_up", "b_down"), tensors, session.device)
        check_shapes(session.desc, torch.bfloat16, *tensors)

    def input(self, tokens: int) -> torch.Tensor:
        """The place of x in this rank's window: a pass on what is written there copies nothing.

        It may be overwritten once a pass has ended on this rank: write it on the stream of the passes. It is valid
        until close().

        Args:
            tokens: T, 0 to max_tokens.

        Returns:
            [T,d] bf16, a view of the window.

        Raises:
            ValueError: tokens is above max_tokens.
            NotImplementedError: Over several hosts, and on the CPU, where x is passed itself.

        Example:
            >>> x = experts.input(hidden_states.shape[0]).copy_(hidden_states)           # doctest: +SKIP
        """
        if self._hosts is not None:
            return self._hosts.input(tokens)
        max_tokens = self._session.desc.max_tokens
        if tokens > max_tokens:
            raise ValueError(f"tokens={tokens}: at most max_tokens={max_tokens}")
        return self._session.place("input")[:tokens]

    def check(self) -> None:
        """Raises for passes that have failed; synchronise their stream first, as nothing waits here.

        Raises:
            RuntimeError: A pass that has ended waited in vain for a rank, or had more rows than max_rows.
        """
        (self._hosts or self._session).check()

    def close(self) -> None:
        """Waits for this rank's GPU and frees the window that NCCL made; collective. Passes of other ranks may still
        run, but none may start.

        Raises:
            RuntimeError: The GPU or NCCL reports a failure.
        """
        (self._hosts or self._session).close()

    def abort(self) -> None:
        """Waits for this rank's GPU and frees the window without waiting for the other ranks, where check() has raised:
        one of them may be gone.

        Raises:
            Nothing: what fails while a session is abandoned is ignored.
        """
        (self._hosts or self._session).abort()
