"""The experiments of the papers by name: what each claims, what was found here, and whether that is the same.

An experiment is a file in `experiments`: the claim, the paper's figures, the recipes at small and at the paper's scale,
what is measured, and which comparisons the verdict stands on. `reproduce` trains what is missing. All is in the
package, so that an installed `bayesify reproduce` has it; results go to the current folder, as the repository's own do.
"""

from bayesify.lab.reproduction.errors import ReproductionError
from bayesify.lab.reproduction.experiments import EXPERIMENTS
from bayesify.lab.reproduction.run import RESULTS, RUNS, reproduce

__all__ = ["EXPERIMENTS", "RESULTS", "RUNS", "ReproductionError", "reproduce"]
