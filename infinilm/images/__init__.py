"""Pictures: reading them with care, and making of them the patches that a tower reads."""

from infinilm.images.opening import MediaRules, open_image, shrink
from infinilm.images.processor import ImageProcessor, Patches

__all__ = ["ImageProcessor", "MediaRules", "Patches", "open_image", "shrink"]
