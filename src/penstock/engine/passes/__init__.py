"""Forward and backward: parameters gathered, gradients reduced, saved tensors moved."""
