"""The whole model in numpy, the readable specification of the engine: a file for each kind of sublayer, as in C++."""

from infinilm.models.reference.model import ReferenceModel
from infinilm.models.reference.step import Tap

__all__ = ["ReferenceModel", "Tap"]
