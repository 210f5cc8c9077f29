"""A link whose data socket carries small frames only; the payload moves some other way."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec

from actors.channels.base import Packet
from actors.channels.header_link import HeaderLink
from actors.channels.link import Joint, Link
from contracts.clock import Clock
from contracts.errors import ChannelError, PeerDeadError, PeerError
from contracts.frames import BAD_FRAME

encode = msgspec.msgpack.Encoder().encode


class FrameLink(Link, abc.ABC):
    def __init__(self, joint: Joint, clock: Clock, decode: Callable[[bytes], Any]) -> None:
        super().__init__(joint, clock)
        self._header_link = HeaderLink(joint.data, joint.peer, clock)
        self._decode = decode
        self.poll_fd = joint.data.fileno()

    @property
    def blocked_since_s(self) -> float | None:
        return self._header_link.blocked_since_s

    @property
    def pending(self) -> bool:
        return self._header_link.pending

    def flush(self) -> None:
        with contextlib.suppress(PeerDeadError):  # `receive` finds the end of the stream
            self._header_link.flush()

    def receive(self) -> list[Packet]:
        packets = []
        for frame in self._header_link.receive():
            try:
                packet = self._take(self._decode(frame))
            except PeerError:
                raise
            except (ChannelError, *BAD_FRAME) as error:
                raise PeerError(f"{self.peer} sent a bad frame: {error}", self.peer) from None
            except Exception as error:
                raise PeerError(
                    f"cannot take what {self.peer} sent: {type(error).__name__}: {error}", self.peer
                ) from error
            if packet is not None:
                packets.append(packet)
        return packets

    def close(self) -> None:
        self._header_link.close()

    @abc.abstractmethod
    def _take(self, message: Any) -> Packet | None:
        """Acts on a frame; a packet if it announced one."""
