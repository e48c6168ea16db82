"""What fits where, and how fast it can be: pure arithmetic over a configuration file."""
