"""What every process of ours does the same way: settings, logging, the metrics endpoint, stop signals."""
