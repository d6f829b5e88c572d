"""What ``benchmarks/stream.py`` measures: sources larger than memory, streams without end."""
