"""Where each rank is: told to the others by a rank that stays there, and asked for by a rank that waits.

A rank that waits for others knows what it waits for, and not who is missing. So each has a thread that looks at its own
rank from time to time. Once the rank has waited, or has issued nothing, for a stated time, the thread writes to the
job's store where it is; the first rank that waits reads what the others wrote, and warns, once for each such wait.
While steps are made nothing is sent: a rank notes what it issues in an attribute of its own.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from penstock.errors import one_line

_logger = logging.getLogger("penstock")

#: How long a rank waits, or issues nothing, before it says where it is, in seconds. With a timeout of less than twice
#: this, half the timeout.
WARN_S = 60.0
_LOOKS = 8  # of a thread in that time
_MOST_NAMED = 8  # ranks in one warning


class Whereabouts:
    """What this rank has issued last, and what it waits for; alone, or before `watch`, nobody is told."""

    def __init__(self) -> None:
        # Written by threads that issue and wait, read by the one that looks: each is one assignment.
        self._last = "", time.time()
        self._waits: dict[int, tuple[str, float]] = {}
        self._watch: _Watch | None = None

    def issued(self, what: str) -> None:
        """Note what this rank issues, in the words that a message has for it."""
        self._last = what, time.time()

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Note that the calling thread waits for other ranks, while the block runs."""
        thread = threading.get_ident()
        before = self._waits.get(thread)
        if before is None:  # of two, one inside the other, the outer one says since when
            self._waits[thread] = what, time.time()
        try:
            yield
        finally:
            if before is None:
                self._waits.pop(thread, None)
                self._last = what, time.time()

    def now(self) -> tuple[bool, str, float]:
        """Return whether this rank waits for others, for what or after what, and since when (seconds of the epoch)."""
        waits = min(self._waits.copy().values(), key=lambda wait: wait[1], default=None)
        return (False, *self._last) if waits is None else (True, *waits)

    def watch(
        self, members: Sequence[int], rank: int, name: str, timeout_s: float, host_of: Callable[[int], str]
    ) -> None:
        """Begin to tell the others, and to warn, until `close`.

        Arguments:
            members: the ranks of the job that are waited for.
            rank: this process's number among them.
            name: a name that all members know, and nobody else has.
            timeout_s: how long ranks wait at most, in seconds.
            host_of: names the host of a rank, in brackets, where there are several.
        """
        self._watch = _Watch(self.now, members, rank, name, timeout_s, host_of)

    def said(self, rank: int) -> str:
        """Look up what another rank of the job has said of where it is; empty where it has said nothing."""
        place = None if self._watch is None else self._watch.read(rank)
        return "" if place is None else _in_words(place)

    def close(self) -> None:
        """End the thread."""
        if self._watch is not None:
            self._watch.stop()


class _Watch:
    """The thread of one rank. It refers to where the rank is, and to nothing that the rank computes with."""

    def __init__(
        self,
        now: Callable[[], tuple[bool, str, float]],
        members: Sequence[int],
        rank: int,
        name: str,
        timeout_s: float,
        host_of: Callable[[int], str],
    ) -> None:
        self._members, self._rank, self._name, self._timeout_s = tuple(members), members[rank], name, timeout_s
        self._patience_s = min(WARN_S, timeout_s / 2)
        self._host_of = host_of
        self._now = now
        self._store = _own_connection(dist.distributed_c10d._get_default_store())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="penstock-whereabouts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it. A thread that hangs in a store whose host has died is left to the end of the process."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=2)

    def read(self, rank: int) -> dict[str, Any] | None:
        """Read what a rank has said of where it is; `None` where it has said nothing."""
        try:
            key = self._key(rank)
            if not self._store.check([key]):
                return None
            place: Any = json.loads(self._store.get(key))
        except (RuntimeError, ValueError, RecursionError):
            return None
        return place if isinstance(place, dict) and place else None

    def _look(self) -> None:
        """Tell where this rank is once it stays there; warn once of each wait."""
        told: tuple[bool, str, float] | None = None
        warned: tuple[bool, str, float] | None = None
        try:
            while not self._ended.wait(self._patience_s / _LOOKS):
                place = self._now()
                waits, what, since = place
                age_s = time.time() - since
                if age_s >= self._patience_s and place != told:
                    self._tell({"waits": waits, "what": what, "since": since})
                    told = place
                elif told is not None and age_s < self._patience_s:
                    self._tell({})
                    told = None
                # Two looks later, when the others have told where they are.
                if waits and place != warned and age_s >= self._patience_s * (1 + 2 / _LOOKS):
                    self._warn(what, age_s)
                    warned = place
        except RuntimeError:  # the store is gone, and with it the rank that had it: who waits finds out by itself
            return

    def _key(self, rank: int) -> str:
        return f"{self._name} place {rank}"

    def _tell(self, place: dict[str, Any]) -> None:
        self._store.set(self._key(self._rank), json.dumps(place))

    def _warn(self, what: str, age_s: float) -> None:
        """Say who is missing, unless a rank before this one waits too, which says it."""
        missing, waiting_count = [], 0
        for rank in self._members:
            place = None if rank == self._rank else self.read(rank)
            if place is not None and place.get("waits") is True and place.get("what") == what:
                if rank < self._rank:
                    return
                waiting_count += 1
            elif rank != self._rank:
                missing.append(
                    f"rank {rank}{self._host_of(rank)} {'says nothing' if place is None else _in_words(place)}"
                )
        named = "; ".join(missing[:_MOST_NAMED])
        more = f"; and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        others = f" {waiting_count} others wait there too." if waiting_count else ""
        _logger.warning(
            f"Rank {self._rank}{self._host_of(self._rank)} has waited {age_s:.0f} s in {what}.{others} Of the rest: "
            f"{named or 'none'}{more}. One that says nothing has ended, is stopped, or goes on elsewhere. "
            f"Ranks wait for {self._timeout_s:g} s at most: Options(timeout_s=)."
        )


def _in_words(place: dict[str, Any]) -> str:
    """Write where a rank has said that it is, whatever it may have said."""
    what, since = (place.get(name) for name in ("what", "since"))
    moment = time.strftime("%H:%M:%S", time.gmtime(since)) if isinstance(since, float) and 0 < since < 1e11 else "?"
    doing = f"waits in {what}" if place.get("waits") is True else f"does something else, after {what or 'prepare()'}"
    return one_line(f"{doing}, since {moment} UTC", 300)


def _own_connection(store: Any) -> Any:
    """Connect to the job's store once more: a call that waits on a connection keeps other threads off it."""
    try:
        return store.clone()
    except (AttributeError, RuntimeError, NotImplementedError):  # older torch, or a store that has none
        return store
