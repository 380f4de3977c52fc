"""What the router was told on its command line."""

from __future__ import annotations

from dataclasses import dataclass

from infinilm.server.settings import ServerSettings

__all__ = ["RouterSettings"]


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Settings of the router.

    Attributes
    ----------
    front : ServerSettings
        What clients meet: keys, hosts, origins, the limit of bodies, and seconds to drain. Its `model_names` are empty:
        those of the replicas count.
    max_requests : int
        Requests at a time; more get status 429.
    max_attempts : int
        Replicas that may be lost over a request until it fails. One that ends its replica must not end all of them.
    imbalance : int
        Requests that a replica may have more than the least loaded one and still be chosen for what it has computed.
    health_interval, health_timeout : float
        Seconds between two looks at a replica, and seconds it has to answer.
    wait_timeout : float
        Seconds that a stream which lost its replica waits for another one.
    routes_by_prefix : bool
        False: each replica in its turn.
    admin_keys : tuple of str
    admin_key_file : str or None
        Any of these keys, and of those of this file, may add and remove replicas; without any, no request may.
    replica_key : str or None
        That replicas ask for which are added without a key of their own.
    """

    front: ServerSettings
    max_requests: int = 4096
    max_attempts: int = 3
    imbalance: int = 16
    health_interval: float = 1.0
    health_timeout: float = 5.0
    wait_timeout: float = 30.0
    routes_by_prefix: bool = True
    admin_keys: tuple[str, ...] = ()
    admin_key_file: str | None = None
    replica_key: str | None = None
