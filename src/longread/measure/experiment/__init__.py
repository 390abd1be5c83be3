"""Server options by workloads by gates: what each step of an optimisation gives, alone and on top of the others."""
