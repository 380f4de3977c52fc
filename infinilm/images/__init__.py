"""Pictures: reading them with care, and making of them the patches that a tower reads."""

from infinilm.images.opening import MediaRules, hash_of_pixels, open_image, shrink
from infinilm.images.processor import ImageProcessor, Patches

__all__ = ["ImageProcessor", "MediaRules", "Patches", "hash_of_pixels", "open_image", "shrink"]
