"""Convert plain networks into Bayesian ones and back: choose the layers, convert, check, summarise."""
