"""The figures of DESIGN 7, measured side by side with the engines that people use today: ``python -m benchmarks --help``."""
