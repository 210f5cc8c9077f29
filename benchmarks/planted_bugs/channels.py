"""Packets between attention and expert ranks."""

from __future__ import annotations

from benchmarks.planted_bugs.bug import Bug

_EXECUTOR = ("tests/unit/actors/engine/test_executor.py",)
_DISPATCH = ("tests/property/test_dispatch.py", "tests/unit/actors/engine/test_executor.py")
_HANDSHAKE = ("tests/unit/actors/channels/test_handshake.py",)
_NEIGHBOUR = ("tests/unit/actors/channels/test_local_process.py",)
_TCP = "actors/channels/tcp.py"
_LANES = ("tests/unit/actors/channels/test_tcp_lanes.py",)
_SHAKES = "actors/channels/handshake.py"

BUGS: tuple[Bug, ...] = (
    Bug(
        "dispatch: a token on a group's edge is of the group after",
        "actors/moe/dispatch.py",
        "group_T[[start for start, _ in token_groups[1:]]]",
        "group_T[[start - 1 for start, _ in token_groups[1:]]]",
        _DISPATCH,
    ),
    Bug(
        "dispatch: weights stand in the tokens' order, pairs in the experts'",
        "actors/moe/dispatch.py",
        "weights_N = topk_weights_TK.take(order_N)",
        "weights_N = topk_weights_TK.ravel()",
        _DISPATCH,
    ),
    Bug(
        "dispatch: rows count from the group's start",
        "actors/moe/dispatch.py",
        "rows_U = rows_U - shift",
        "rows_U = rows_U - first",
        _DISPATCH,
    ),
    Bug(
        "dispatch: positions among the distinct tokens are one too high",
        "actors/moe/dispatch.py",
        "goes_W = goes_PW.ravel()[1:]",
        "goes_W = goes_PW.ravel()",
        _DISPATCH,
    ),
    Bug(
        "dispatch: a packet carries the layer that comes next",
        "actors/moe/remote_backend.py",
        "            key.layer,\n            key.micro_batch,",
        "            key.layer + 1,\n            key.micro_batch,",
        _EXECUTOR,
    ),
    Bug(
        "dispatch: the shared experts' output is left out",
        "actors/moe/remote_backend.py",
        "            yield from added(total_TD, shared_TD)\n",
        "            pass\n",
        _EXECUTOR,
    ),
    Bug(
        "handshake: the acceptor's proof is not looked at",
        _SHAKES,
        'if not hmac.compare_digest(reply.proof, _proof(me, "acceptor", challenge, hello, bare)):',
        "if not reply.proof:",
        _HANDSHAKE,
    ),
    Bug(
        "handshake: the proof does not hold the challenge",
        _SHAKES,
        "hmac.digest(me.token, msgspec.msgpack.encode((label, *said))",
        "hmac.digest(me.token, msgspec.msgpack.encode((label, *said[1:]))",
        _HANDSHAKE,
    ),
    Bug(
        "handshake: one without an epoch is let in",
        "actors/channels/handshake.py",
        "if (hello.epoch is None) != (me.epoch is None):",
        "if hello.epoch is not None and me.epoch is None:",
        _HANDSHAKE,
    ),
    Bug(
        "handshake: whom it looks for is not compared",
        _SHAKES,
        "if hello.to is not None and hello.to != me.name:",
        "if hello.to is not None and not hello.to:",
        _HANDSHAKE,
    ),
    Bug(
        "lanes: a BE packet under way is finished first",
        _TCP,
        "next(lane for lane in lanes if lane)",
        "next(lane for lane in reversed(lanes) if lane)",
        _LANES,
    ),
    Bug(
        "lanes: LS that fills the line starves BE",
        _TCP,
        "                if passed_over == BEST_EFFORT_TURN:\n",
        "                if False:\n",
        _LANES,
    ),
    Bug(
        "lanes: what commit has begun of a packet waits for its turn",
        _TCP,
        "                    self._send_whole(packet.begun)\n",
        "",
        _LANES,
    ),
    Bug(
        "lanes: a packet may begin in another",
        _TCP,
        "        if before is not None:\n",
        "        if False:\n",
        _LANES,
    ),
    Bug(
        "repair: a neighbour that a debugger holds counts as stopped at once",
        "actors/channels/local_process.py",
        "return bool(fields) and fields[0] in _STOPPED",
        "return bool(fields) and fields[0] in _HALTED",
        _NEIGHBOUR,
    ),
    Bug(
        "repair: a neighbour behind a link is excused as one that waits for a core",
        "actors/channels/local_process.py",
        "if said is not None and said.network == _network() else None",
        "if said is not None else None",
        _NEIGHBOUR,
    ),
    Bug(
        "repair: a header stands for what a lost rank has half sent",
        "actors/channels/nccl.py",
        "while under_way and under_way[0][0].query():",
        "while under_way:",
        ("tests/unit/actors/channels/test_device.py",),
    ),
)
