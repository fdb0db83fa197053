"""Units: partition, plan, first values, parameters, and what a unit holds."""
