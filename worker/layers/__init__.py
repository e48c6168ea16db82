"""The parts models are made of."""
