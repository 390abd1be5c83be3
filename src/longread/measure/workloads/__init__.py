"""Seeded, offline workloads for benchmarks and quality gates."""
