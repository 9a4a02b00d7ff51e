"""What both ends of a link keep so that a connection may break without anything being lost.

The frames of a session are numbered by their order in each direction, so that no number travels.
Each end counts what it has taken in and says so now and then; what it has not said to have is kept
by the other end, within a bound, and sent again on the session's next connection. Introductions and
acknowledgements belong to a connection and are not counted.
"""

from __future__ import annotations

from collections import deque

import msgspec

from events.errors import WireError

RESUME_S = 2.0
"""A broken connection that has not come back by then has ended its session."""

BEAT_S = 0.1
"""How often each end looks whether it has something to acknowledge."""

SILENCE_S = 0.5
"""A replica says something at least this often."""

ACK_FRAMES = 64
"""As many frames are acknowledged at once."""


class Ack(msgspec.Struct, frozen=True, kw_only=True, tag="ack"):
    """`received` frames of this session have been taken in. Also a sign of life."""

    received: int


class Outgoing:
    """Frames on their way: those not sent yet, and those sent but not known to have arrived.

    Of the latter at most `kept_bytes` are kept: who lets more pile up can't resume.
    """

    def __init__(self, kept_bytes: int) -> None:
        self.unsent_bytes = 0
        self._kept_bytes = kept_bytes
        self._unsent: deque[bytes] = deque()
        self._sent: deque[bytes] = deque()
        self._sent_bytes = 0
        self._forgotten = 0  # frames sent and not kept any more
        self._arrived = 0  # of these, known to have arrived

    def keep(self, kept_bytes: int) -> None:
        """Of what was sent, from the next frame on: nothing for an end that never resumes."""
        self._kept_bytes = kept_bytes

    def add(self, frame: bytes) -> None:
        """One more frame."""
        self._unsent.append(frame)
        self.unsent_bytes += len(frame)

    def next(self) -> bytes | None:
        """The frame to send now, if there is one."""
        if not self._unsent:
            return None
        frame = self._unsent.popleft()
        self.unsent_bytes -= len(frame)
        self._sent.append(frame)
        self._sent_bytes += len(frame)
        while self._sent_bytes > self._kept_bytes:
            self._forget()
        return frame

    def acknowledge(self, received: int) -> None:
        """The other end has so many. Raises WireError when that can't be."""
        if not self._arrived <= received <= self._forgotten + len(self._sent):
            raise WireError("frames are acknowledged that were never sent")
        self._arrived = received
        while self._forgotten < received:
            self._forget()

    def rewind(self, received: int) -> bool:
        """Send again what follows the first `received` frames; False when not all of it is here."""
        try:
            self.acknowledge(received)
        except WireError:
            return False
        if self._forgotten > received:
            return False
        self._unsent.extendleft(reversed(self._sent))
        self.unsent_bytes += self._sent_bytes
        self._sent.clear()
        self._sent_bytes = 0
        return True

    def _forget(self) -> None:
        self._sent_bytes -= len(self._sent.popleft())
        self._forgotten += 1


class Incoming:
    """How many frames were taken in, and how many of them the other end knows of."""

    def __init__(self) -> None:
        self.received = 0
        self._said = 0

    def note(self) -> bool:
        """One more was taken in; whether it is time to say so."""
        self.received += 1
        return self.received - self._said >= ACK_FRAMES

    @property
    def unsaid(self) -> bool:
        """Whether there is something to acknowledge."""
        return self.received > self._said

    def ack(self) -> Ack:
        """What to say now."""
        self._said = self.received
        return Ack(received=self.received)
