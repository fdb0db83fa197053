"""How memory is page-locked for devices of each kind, with modules of torch that are made up."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.runtime import host_memory
from penstock.runtime.host_memory import PAGE_BYTES, Arena, Words

CPU, CUDA, OTHER = torch.device("cpu"), torch.device("cuda", 1), torch.device("xpu", 1)


class Module:
    """Of an accelerator that registers memory, or refuses it."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer
        self.log: list[tuple[object, ...]] = []

    def synchronize(self, device: torch.device) -> None:
        self.log.append(("synchronize", device))

    def host_register(self, address: int, nbytes: int) -> Any:
        self.log.append(("register", address, nbytes))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def host_unregister(self, address: int) -> None:
        self.log.append(("unregister", address))


def use(patch: pytest.MonkeyPatch, module: Any) -> None:
    patch.setattr(torch, "get_device_module", lambda device: module)
    one_node(patch)


def one_node(patch: pytest.MonkeyPatch) -> None:
    for place in ("host_memory.device_node", "system.device_node"):
        patch.setattr(f"penstock.runtime.{place}", lambda device: None)
    patch.setattr("penstock.runtime.system.device_nodes", lambda device: [])


@pytest.fixture
def torch_has_pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Torch has a pinned allocator, whose buffers begin 256 bytes past a page. Bytes of each that was asked for."""
    asked: list[int] = []
    zeros = torch.zeros

    def allocate(*size: int, pin_memory: bool = False, **rest: Any) -> torch.Tensor:
        if not pin_memory:
            return zeros(*size, **rest)
        asked.append(*size)
        memory = zeros(size[0] + 2 * PAGE_BYTES, **rest)
        start = -memory.data_ptr() % PAGE_BYTES + 256
        return memory[start : start + size[0]]

    monkeypatch.setattr(torch, "zeros", allocate)
    return asked


def test_the_module_of_any_accelerator_may_register_memory(monkeypatch):
    module = Module()
    use(monkeypatch, module)
    allocation = Arena(5 * PAGE_BYTES, OTHER)
    address = allocation.allocate(1, torch.int8).data_ptr()
    assert (allocation.pinned, allocation.pageable) == (True, False)
    allocation.close()
    allocation.close()
    assert module.log == [("register", address, 5 * PAGE_BYTES), ("synchronize", OTHER), ("unregister", address)]


@pytest.mark.parametrize("answer", [False, 1 << 20, RuntimeError("no room"), OSError("no")], ids=repr)
def test_what_it_refuses_is_pageable(monkeypatch, answer):
    module = Module(answer)
    use(monkeypatch, module)
    allocation = Arena(5 * PAGE_BYTES, OTHER)
    assert (allocation.pinned, allocation.pageable) == (False, True)
    assert not allocation.allocate(5 * PAGE_BYTES, torch.int8).any()
    allocation.close()
    assert len(module.log) == 1


def test_one_that_registers_nothing_copies_slabs_through_buffers_of_torch_s(monkeypatch, torch_has_pinned):
    use(monkeypatch, SimpleNamespace())
    assert not host_memory.can_register(OTHER)
    allocation = Arena(5 * PAGE_BYTES, OTHER)
    assert (allocation.pinned, allocation.pageable, torch_has_pinned) == (False, True, [])
    ring = Arena(5 * PAGE_BYTES, OTHER, ring=True)
    assert (ring.pinned, ring.pageable, torch_has_pinned) == (True, False, [5 * PAGE_BYTES, 6 * PAGE_BYTES])
    first, second = (ring.allocate(8, torch.float32) for _ in range(2))
    assert (first.data_ptr() % PAGE_BYTES, second.data_ptr() - first.data_ptr()) == (0, PAGE_BYTES), "files want pages"
    ring.close()
    allocation.close()


def test_cuda_s_runtime_registers_and_a_refusal_leaves_no_error_behind(monkeypatch):
    log: list[tuple[object, ...]] = []

    class Runtime:
        answer = 0

        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
            log.append(("register", address, nbytes, flags))
            return self.answer

        def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
            log.append(("unregister", address))

    class Current:
        def __init__(self, device: torch.device) -> None:
            log.append(("current", device))

        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", Current)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append(("synchronize", device)))
    one_node(monkeypatch)
    allocation = Arena(PAGE_BYTES, CUDA)
    address = allocation.allocate(1, torch.int8).data_ptr()
    allocation.close()
    assert log == [
        ("current", CUDA),
        ("register", address, PAGE_BYTES, 0),
        ("synchronize", CUDA),
        ("unregister", address),
    ]
    runtime.answer = 801
    launched: list[object] = []
    monkeypatch.setattr(torch, "ones", lambda *size, **rest: launched.append(rest["device"]))
    allocation = Arena(PAGE_BYTES, CUDA)
    assert (allocation.pinned, launched) == (False, [CUDA])
    allocation.close()


def test_words_have_a_place_each_and_go_together(monkeypatch):
    module = Module()
    use(monkeypatch, module)
    words = Words(OTHER)
    assert module.log == [], "nothing is taken before it is asked for"
    addresses = {words.place(number).data_ptr() for number in range(1500)}
    assert len(addresses) == 1500
    assert words.place(3).data_ptr() == words.place(3).data_ptr() in addresses
    assert (words.place(0).dtype, words.place(0).numel()) == (torch.float32, 1)
    words.close()
    words.close()
    assert [what for what, *_ in module.log] == ["register"] * 2 + ["synchronize", "unregister"] * 2
