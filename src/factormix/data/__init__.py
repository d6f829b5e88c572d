"""Where rows come from: sources, readers of files, weights, units and data sets."""
