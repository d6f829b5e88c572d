"""The mathematics: parameters, density, sampling, constraints, statistics. No I/O, no training."""
