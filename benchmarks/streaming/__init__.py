"""The parts of the streaming benchmark: a server of the fake engine, and a client that counts tokens."""
