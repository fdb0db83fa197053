"""One thin wrapper per resource of the machine: host memory, streams, collectives."""
