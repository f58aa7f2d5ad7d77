# SPDX-License-Identifier: Apache-2.0
"""Memory of large results on the CPU, kept for later results of the same size.

malloc gives blocks of more than 32 MB back to the system when they are freed, and a tensor in new memory costs a page
fault for every 4 KB. So the storages of large results stay here. One that nothing else refers to any more is idle: the
next result of its size is made over it. It is torch's own, of torch's allocator, so that results can be resized, shared
and saved as all tensors can. A new storage takes the place of idle ones: no more is kept than was in use at once.

Nothing is locked: a thread takes a storage out of the deque before it looks at it, so that no other finds it idle too.
"""

import collections
import functools
import sys

import torch

LARGE = 1 << 20  # bytes; smaller results come from malloc, which keeps those itself

_use_count = getattr(torch._C, "_storage_Use_Count", None)
_kept = collections.deque()  # of _Kept, least recently taken first


class _Kept:
    """A storage, and how to see that it is idle: its references, torch's and Python's, are those that it was born
    with. address: users may resize a storage or share its memory, which moves it."""

    __slots__ = ("storage", "size", "address", "born")

    def __init__(self, size: int):
        self.storage = torch.UntypedStorage(size)
        self.size, self.address = size, self.storage.data_ptr()
        self.born = self._references()

    def _references(self) -> tuple[int, int]:
        return _use_count(self.storage._cdata), sys.getrefcount(self.storage)

    def idle(self) -> bool:
        return self._references() == self.born

    def unmoved(self) -> bool:
        return self.storage.data_ptr() == self.address and self.storage.nbytes() == self.size

    def tensor(self, shape: tuple, strides: tuple, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(0, dtype=dtype, device="cpu").set_(self.storage, 0, shape, strides)


def tensor(shape: tuple, strides: tuple, dtype: torch.dtype, size: int) -> torch.Tensor:
    """A new tensor of `size` bytes, contiguous, not initialised."""
    if not _references_tell():
        return torch.empty(shape, dtype=dtype, device="cpu")
    kept = _take(size)
    if kept is None:
        _make_room(size)
        kept = _Kept(size)
    result = kept.tensor(shape, strides, dtype)
    _kept.append(kept)
    return result


def forget() -> None:
    """Idle storages go back to torch's allocator now, the others when their tensors die."""
    _kept.clear()


def _pop() -> _Kept | None:
    try:
        return _kept.popleft()
    except IndexError:  # another thread was sooner
        return None


def _take(size: int) -> _Kept | None:
    """An idle storage of this size, out of the deque."""
    passed, found = [], None
    while found is None and (kept := _pop()) is not None:
        if kept.size != size or not kept.idle():
            passed.append(kept)
        elif kept.unmoved():
            found = kept
    _kept.extendleft(reversed(passed))
    return found


def _make_room(size: int) -> None:
    """Idle storages of `size` bytes together go, or all of them."""
    stay = []
    while size > 0 and (kept := _pop()) is not None:
        if kept.idle():
            size -= kept.size
        else:
            stay.append(kept)
    _kept.extendleft(reversed(stay))


@functools.cache
def _references_tell() -> bool:
    """Whether this torch counts references as `idle` believes: else nothing is kept."""
    if _use_count is None:
        return False
    kept = _Kept(64)
    answers = [kept.idle()]
    result = kept.tensor((16,), (1,), torch.float32)
    answers.append(kept.idle())
    storage = result.untyped_storage()
    del result
    answers.append(kept.idle())
    del storage
    answers.append(kept.idle())
    return answers == [True, False, False, True]
