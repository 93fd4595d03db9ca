"""Plain networks into Bayesian ones and back: which layers, how, what became of them."""
