"""Where two models diverge, and what a tensor holds."""

from infinilm.debug.comparison import Comparison, compare
from infinilm.debug.tensor_statistics import TensorStats, tensor_stats

__all__ = ["Comparison", "TensorStats", "compare", "tensor_stats"]
