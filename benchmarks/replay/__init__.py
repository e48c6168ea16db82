"""The parts of the arena replay: model shapes, loads, step times, the simulated device, the pictures."""
