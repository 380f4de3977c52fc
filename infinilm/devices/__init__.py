"""What this machine has to compute with, and arrays of other libraries as tensors of the core."""

from infinilm.devices.system import backends

__all__ = ["backends"]
