"""A simulated fleet for the placement policies: traces, workers, routers, figures."""
