"""Which bytes belong to whom: pure decisions over plain ints."""
