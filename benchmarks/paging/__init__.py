"""Parts of the benchmark of paged experts: imposed routing, engines, offloading by layers, the link, loading."""
