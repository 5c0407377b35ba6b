"""The figures to reach, measured side by side with the engines that people use today: ``python -m benchmarks --help``."""
