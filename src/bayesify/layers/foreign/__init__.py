"""Third-party layers: made Bayesian by what they compute."""
