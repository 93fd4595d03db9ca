"""Several models on the same data: train their recipes (`compare_recipes`), and set them side by side (`table`)."""

from bayesify.lab.comparison.row import Row
from bayesify.lab.comparison.table import CompareError, Comparison

__all__ = ["CompareError", "Comparison", "Row"]
