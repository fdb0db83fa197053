"""Forward and backward: hooks, gathering, order, saved tensors, casts and guards."""
