"""Towers: encoders of images, whose rows stand for tokens of a text. A table, as `families` is for texts.

A tower is a list of encoder layers like any other, so its math is a `ModelSpec` with a `TowerSpec`, and its weights
are found by `TensorNames`. What differs between towers is a row of `TOWERS`: which keys of config.json say the sizes,
how positions are told, what is normed how, what becomes of neighbouring patches, and what the model of texts takes.
"""

from infinilm.config.towers.config import KEPT_ROWS_BYTES, TowerConfig
from infinilm.config.towers.family import Linear, TowerFamily, TowerPlace
from infinilm.config.towers.table import TOWERS

__all__ = ["KEPT_ROWS_BYTES", "TOWERS", "Linear", "TowerConfig", "TowerFamily", "TowerPlace"]
