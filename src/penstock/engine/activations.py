"""What forward saves for backward, kept off the device meanwhile.

    forward     compute saves a tensor -> a copy goes to its tier -> its device memory goes
    backward    before a tensor is wanted it comes back, the ones that were saved before it after it

With activation checkpointing these are the inputs of the checkpointed blocks, and what lies outside of them. Only what
autograd saves during the model's forward is seen: parameters stay with their units, small tensors where they are.
"""

import sys
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType

import torch
from torch import Tensor, nn

from penstock.engine.staging import Buffers, transit_slots
from penstock.engine.versions import Version
from penstock.kinds import ACTIVATION, Tier
from penstock.machine.streams import DONE, Event, Streams
from penstock.tiers.home import CellPlan, Home, SectionPlan
from penstock.tiers.ring import Ring
from penstock.tiers.store import Store
from penstock.tiers.transit import Transit, buffer_home

LEAST_BYTES = 64 << 10  # smaller ones are not worth a copy
AHEAD_BYTES = 256 << 20  # on their way to the tier, or back before they are wanted


@dataclass(eq=False)
class _Place:
    """Where the bytes of a saved tensor are. What works on them may go on when the tensor is wanted no longer.

    Attributes:
        home: on the tier.
        here: on the device, while they leave or once they are coming back.
        arrived: `home` holds them, or `here` does.
    """

    home: Home
    here: Tensor | None
    arrived: Event = DONE


@dataclass(eq=False)
class Saved:
    """One saved tensor.

    Attributes:
        place: where its bytes are.
        before: the one that was saved before it: backward wants it after this one.
        shape, stride, dtype, version: of the tensor.
        key: what tells it apart while they leave.
    """

    place: _Place
    before: "weakref.ref[Saved] | None"
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    version: Version
    key: tuple[object, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.place.home.stop

    def saved_before(self) -> "Saved | None":
        """The one that was saved before it, if it is still wanted."""
        return None if self.before is None else self.before()


class Activations:
    """Takes saved tensors to a tier and brings them back.

    Arguments:
        tier: cpu or nvme.
        tile_numel: bytes of a tile of what goes to files.
        kept: tensors whose memory somebody else keeps: those of parameters.

    Attributes:
        interrupted: called where a forward has ended without a word.
    """

    def __init__(
        self, streams: Streams, store: Store, tier: Tier, *, tile_numel: int, kept: Callable[[], Iterable[Tensor]]
    ) -> None:
        self._streams = streams
        self._store = store
        self._tier = tier
        self._tile_numel = tile_numel
        self._kept = kept
        self._kept_storages: set[int] = set()
        self._ring = Ring(self._fill_ring)
        self._transit = Transit(streams, self._ring)
        self._free: dict[int, list[_Place]] = defaultdict(list)  # by bytes
        self._leaving: deque[Saved] = deque()
        self._known: dict[tuple[object, ...], Saved] = {}  # those that are leaving, by what tells tensors apart
        self._last: weakref.ref[Saved] | None = None
        self._forward: FrameType | None = None  # the call that is under way
        self.interrupted: Callable[[], None] = self.end

    def begin(self) -> None:
        """The outermost forward begins on this thread."""
        self.end()
        self._kept_storages = {tensor.untyped_storage()._cdata for tensor in self._kept()}
        self._forward = _call_of_module()

    def end(self) -> None:
        """It is over."""
        if self._forward is not None:
            self._forward = None
            self._let_go(AHEAD_BYTES)

    def take(self, tensor: Tensor) -> Saved | None:
        """Autograd saves a tensor; `None` for one that stays."""
        if self._forward is None:
            return None
        if not _is_running(self._forward):
            self.interrupted()  # torch tells nobody of a forward that an interrupt ended
            return None
        if tensor.device != self._streams.device or not _is_plain(tensor):
            return None
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes < LEAST_BYTES or tensor.untyped_storage()._cdata in self._kept_storages or not _is_dense(tensor):
            return None
        key = (tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride(), tensor.dtype)
        if key in self._known:
            return self._known[key]
        self._let_go(AHEAD_BYTES - nbytes)
        place = self._free[nbytes].pop() if self._free[nbytes] else _Place(self._make_home(nbytes), None)
        place.here = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        left = place.arrived  # it may still be read for a tensor that is gone
        place.arrived = self._transit.copy(buffer_home(place.here), place.home, after=left, what="save activation")
        saved = Saved(place, self._last, tensor.shape, tensor.stride(), tensor.dtype, Version(tensor), key)
        weakref.finalize(saved, _give_back, place, self._free[nbytes], weakref.ref(self._streams))
        self._known[key] = saved
        self._leaving.append(saved)
        self._last = weakref.ref(saved)
        return saved

    def bring(self, packed: Saved) -> Tensor:
        """Autograd wants it."""
        packed.version.check()
        place = packed.place
        self._bring(place)
        place.arrived.wait()
        assert place.here is not None
        values, place.here = place.here, None
        self._forget(packed)
        ahead, before = 0, packed.saved_before()
        while before is not None and (ahead := ahead + before.nbytes) <= AHEAD_BYTES:
            self._bring(before.place)
            before = before.saved_before()
        return values.view(packed.dtype).as_strided(packed.shape, packed.stride)

    def _bring(self, place: _Place) -> None:
        """Start to bring a tensor back, if it is not on the device."""
        if place.here is None:
            place.here = torch.empty(place.home.stop, dtype=torch.uint8, device=self._streams.device)
            # Compute has waited for it to leave, or its memory would not have gone.
            place.arrived = self._transit.copy(place.home, buffer_home(place.here), after=DONE, what="bring activation")

    def _let_go(self, most_bytes: int) -> None:
        """Drop what has left; where more than some bytes are leaving, compute waits for the first of them."""
        left = sum(saved.nbytes for saved in self._leaving)
        while self._leaving and (left > most_bytes or self._leaving[0].place.arrived.done()):
            saved = self._leaving.popleft()
            saved.place.arrived.wait()
            if self._forget(saved):
                saved.place.here = None
            left -= saved.nbytes

    def _forget(self, saved: Saved) -> bool:
        """Its device memory may be another tensor's from now on. Whether that was not known yet."""
        return self._known.get(saved.key) is saved and self._known.pop(saved.key) is saved

    def _make_home(self, nbytes: int) -> Home:
        plan = self._plan(nbytes)
        return Home([self._store.reserve([plan]).make(plan)])

    def _plan(self, nbytes: int) -> SectionPlan:
        cell = CellPlan("(activations)", ACTIVATION, self._tier, torch.uint8, nbytes)
        return SectionPlan(ACTIVATION, self._tier, (cell,), 0, nbytes, self._tile_numel)

    def _fill_ring(self) -> None:
        self._ring.fill(Buffers(self._store).make_slots(transit_slots([self._plan(self._tile_numel)])))


def _give_back(place: _Place, free: list[_Place], streams: "weakref.ref[Streams]") -> None:
    """Its tensor is gone: the next one may have the place, once nothing works on it."""
    here, place.here = place.here, None
    back_end = streams()
    if here is not None and back_end is not None:  # it was coming back, ahead of a backward that never came to it
        back_end.give_up((here,), until=place.arrived)
    if place.arrived.done():
        place.arrived = DONE  # or has failed, which concerns no other tensor
    free.append(place)


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is its bytes: no subclass, nothing sparse or nested, no view that is conjugate or negative."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _call_of_module() -> FrameType | None:
    """The frame that runs a module's forward and its hooks, of which the caller is one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != nn.modules.module.__file__:
        frame = frame.f_back
    return frame


def _is_running(call: FrameType) -> bool:
    """Whether a frame is under way on this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is not None


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill one piece of memory, in whatever order."""
    expected = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1:
            if stride != expected:
                return False
            expected *= extent
    return True
