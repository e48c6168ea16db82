"""The parts of the elastic benchmark: phases of load, an engine under them, a link that can be simulated."""
