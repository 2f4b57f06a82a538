"""Measures what the paper claims: `python -m benchmarks --help`."""
