"""How a mixture learns: solvers, the loop around them, callbacks, and runs on disk."""
