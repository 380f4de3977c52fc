"""Replicas on a cluster of Ray, and the application `infinilm.ray:app` for Ray Serve. Needs the extra `ray`."""

from infinilm.ray.application import app

__all__ = ["app"]
