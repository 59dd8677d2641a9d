"""What the hosts share, or would not fit into one file: balancing, packers, rows, options."""
