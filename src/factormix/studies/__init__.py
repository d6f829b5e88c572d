"""Experiments on top of the library: the demo, and the paper's claims one by one."""
