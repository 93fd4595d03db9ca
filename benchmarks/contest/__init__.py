"""Bayesian networks beside what people would do instead, each tuned with as many trials: `make contest`."""
