"""How fast a model runs: against the limits of the machine, and under a trace of many requests."""
