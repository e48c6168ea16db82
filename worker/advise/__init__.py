"""What a model costs and what a machine can give it, from the configuration file alone: pure arithmetic."""
