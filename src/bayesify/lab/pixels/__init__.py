"""Arithmetic on the pixels of image batches: rounding, linear maps along the axes, JPEG."""
