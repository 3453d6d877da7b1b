"""What is run by hand: measuring, tuning, benchmarks, the demo and the command line. No call passes here."""
