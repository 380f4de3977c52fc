"""Ports of 127.0.0.1 for servers that start later, in processes of their own."""

from __future__ import annotations

import random
import socket

# Linux gives ports from 32768 on to processes that ask for any, so another process could take one before it is used.
_FIRST, _END = 20000, 32768


def free_port() -> int:
    draws = random.SystemRandom()  # hypothesis seeds the other one, and test processes beside this one draw, too
    while True:
        port = draws.randrange(_FIRST, _END)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:  # it is taken
            continue
        return port
