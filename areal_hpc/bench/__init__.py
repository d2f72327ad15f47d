"""Benchmarks that users run on their own machines: `areal-hpc bench NAME`."""
