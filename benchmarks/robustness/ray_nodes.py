"""A Ray head and another node, each with room for an attention and an expert rank; the other one's
raylet is killed, which takes its ranks along, and another node comes."""

from __future__ import annotations

import contextlib
import itertools

import psutil

from tests.support.ray_head import RayHead, RayNode, ray_head, ray_node

ROOM = {"attention": 1.0, "expert": 1.0}
SETTINGS = {"attention_resources": {"attention": 1.0}, "expert_resources": {"expert": 1.0}}
RAYLET = "raylet-1"


class RayNodes:
    """A context manager."""

    def __enter__(self) -> RayNodes:
        with contextlib.ExitStack() as stack:
            self.head: RayHead = stack.enter_context(ray_head(resources=ROOM))
            self._numbers = itertools.count(2)
            self._places = stack
            self._other = self._start()
            self._stack = stack.pop_all()
            self._places = self._stack
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def roots(self) -> list[psutil.Process]:
        """Whose descendants all that Ray starts are."""
        return [self.head.process, psutil.Process(self._other.started.pid)]

    def kill_raylet(self) -> None:
        """And starts another node, which is there when this returns."""
        for raylet in self._other.running("raylet/raylet"):
            with contextlib.suppress(psutil.Error):
                raylet.kill()
        another = self._start()
        self._other.kill()
        self._other = another

    def _start(self) -> RayNode:
        return self._places.enter_context(ray_node(self.head, next(self._numbers), resources=ROOM))
