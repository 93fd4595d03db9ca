"""Random networks × methods × options, and oracles that do not depend on how bayesify computes.

`layers` has the odd parts that networks are built of, `networks` the table of blocks, `outputs` the forms of what they
return, `around` networks around a converted part, `case` the description of a network and its conversion, `strategies`
how hypothesis draws descriptions, `expected` what results are compared with, `rounding` by how much they may differ,
`oracles` what must hold, `refusals` when a refusal is true, `runner` and `search` run them, and `corpus/` has every
network that ever failed.
"""
