"""What is handled together: parameters found, laid out, planned, and their state."""
