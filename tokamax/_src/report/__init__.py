"""One page about measurements, for people: `tokamax report`."""
